# SPDX-License-Identifier: Apache-2.0
"""Validation of the arguments of convolutions, activation quantization and int8 GEMMs, without importing CuPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupy_awq import check, check_scalar
from cupy_awq.activation import ACTIVATIONS, Activation
from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array

Pair = tuple[int, int]
"""A pair of integers (vertical, horizontal)."""

MAX_BLOCK = 131071
"""The largest block size for which a sum of int8 products cannot overflow int32: (2**31 - 1) // 2**14."""


class ConvolutionShape(NamedTuple):
    """The sizes and parameters of a validated convolution of x with a weight [Co, Kh, Kw, Ci/groups]."""

    batch: int
    """The number of images."""
    channels: int
    """The number of input channels, Ci."""
    height: int
    """The height of x in pixels."""
    width: int
    """The width of x in pixels."""
    outputs: int
    """The number of output channels, Co."""
    kernel: Pair
    """The size of the filter, (Kh, Kw)."""
    stride: Pair
    """The (vertical, horizontal) stride in pixels of x."""
    padding: tuple[Pair, Pair]
    """The padding of x in pixels, ((top, bottom), (left, right))."""
    dilation: Pair
    """The (vertical, horizontal) dilation: the distance between adjacent filter taps in pixels of x."""
    groups: int
    """The number of channel groups, 1 unless the convolution is grouped."""
    out: Pair
    """The size of y in pixels, (height, width)."""
    nhwc: bool
    """Whether x and y are [batch, height, width, channels] instead of [batch, channels, height, width]."""

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        """The shape of y in the layout that ``nhwc`` gives."""
        if self.nhwc:
            return self.batch, *self.out, self.outputs
        return self.batch, self.outputs, *self.out


class QuantizedProduct(NamedTuple):
    """The sizes of a validated GEMM y [M, N] = x @ W^T of quantized x [M, K] and a block-quantized weight [N, K]."""

    m: int
    """The number of rows of x, M."""
    n: int
    """The number of out features, N."""
    k: int
    """The number of in features, K."""
    block_size: int
    """The number of columns of x per quantization block; with ``row_scales``, that of the weight."""
    dtype: np.dtype[Any]
    """The dtype of y."""
    row_scales: bool = False
    """Whether x has one scale per row (one block) while the weight has several blocks."""


def convolution(
    x_shape: tuple[int, ...],
    weight_shape: tuple[int, int, int, int],
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    layout: Any,
) -> ConvolutionShape:
    """Validate a convolution and return its sizes; the arguments have the meaning that they have in `cupy_awq.conv2d`.

    Raises:
        TypeError, ValueError: an argument is invalid or contradicts another; the message names it.

    >>> convolution((1, 8, 7, 7), (16, 3, 3, 8), 2, "same", 1, 1, "NCHW").out
    (4, 4)
    """
    if not (isinstance(layout, str) and layout in ("NCHW", "NHWC")):
        raise ValueError(f"layout: expected 'NCHW' or 'NHWC', got {layout!r}")
    nhwc = layout == "NHWC"
    if len(x_shape) != 4:
        raise ValueError(f"x: expected {layout}, got shape {x_shape}")
    batch, height, width, channels = x_shape if nhwc else (x_shape[0], *x_shape[2:], x_shape[1])
    co, kh, kw, ci = weight_shape
    groups = check_scalar.integer(groups, "groups", 1)
    if channels != ci * groups:
        raise ValueError(
            f"x: expected Ci = {ci * groups} channels, Ci/groups={ci} times groups={groups}, got {channels}"
        )
    if co % groups:
        raise ValueError(f"groups: expected a divisor of Co={co}, got {groups}")
    strides, dilations = _pair(stride, "stride", 1), _pair(dilation, "dilation", 1)
    if isinstance(padding, str):
        if padding != "same":
            raise ValueError(f"padding: expected numbers or 'same', got {padding!r}")
        sides = _same_padding(height, kh, strides[0], dilations[0]), _same_padding(width, kw, strides[1], dilations[1])
    elif isinstance(padding, tuple) and len(padding) == 2 and all(isinstance(p, tuple) for p in padding):
        sides = _pair(padding[0], "padding", 0), _pair(padding[1], "padding", 0)
    else:
        vertical, horizontal = _pair(padding, "padding", 0)
        sides = (vertical, vertical), (horizontal, horizontal)
    out = (
        _out_size(height, kh, strides[0], dilations[0], sides[0]),
        _out_size(width, kw, strides[1], dilations[1], sides[1]),
    )
    if min(out) < 1:
        raise ValueError(
            f"x: expected at least the size of the {kh}x{kw} kernel with dilation {dilations}, "
            f"got {height}x{width} with padding {sides}"
        )
    return ConvolutionShape(batch, channels, height, width, co, (kh, kw), strides, sides, dilations, groups, out, nhwc)


def activation(activation: Any, kinds: tuple[str | None, ...]) -> Activation:
    """Return the epilogue's activation for a name, (low, high) or None.

    Args:
        activation: as in `cupy_awq.gemm`.
        kinds: the values of `Activation.kind` that the operation supports.

    Raises:
        TypeError, ValueError: not an activation, or one that the operation does not support.

    >>> from cupy_awq.block_check import activation
    >>> activation("relu6", (None, "clamp")).limits
    (0.0, 6.0)
    """
    found = check.activation(activation)
    if found.kind not in kinds or found.gated:
        names = [repr(name) for name, known in ACTIVATIONS.items() if known.kind in kinds and not known.gated]
        raise ValueError(f"activation: expected None, {', '.join(names)} or (low, high), got {activation!r}")
    return found


def block_weight(weight: Any) -> BlockQuantizedWeight:
    """Return ``weight``. Raises TypeError unless it is a `BlockQuantizedWeight`."""
    if not isinstance(weight, BlockQuantizedWeight):
        raise TypeError(f"weight: expected a BlockQuantizedWeight, got {type(weight).__name__}")
    return weight


def float_x(x: Array, weight: BlockQuantizedWeight) -> None:
    """Raise TypeError unless x is a float16, bfloat16 or float32 array on the device of ``weight``."""
    check.on_device(x, "x", weight.device, "the weight")
    check.float_dtype(x.dtype, "x")


def x_block_size(x: Array, block_size: Any) -> int:
    """Return the number of columns of x [M, K] per quantization block: ``block_size``, or K if it is None.

    Raises:
        TypeError, ValueError: x is not a float matrix with K > 0, or ``block_size`` is not a positive integer.
    """
    check.device_id(x, "x")
    check.float_dtype(x.dtype, "x")
    if len(x.shape) != 2:
        raise ValueError(f"x: expected [M, K], got shape {x.shape}")
    if x.shape[1] == 0:
        raise ValueError(f"x: expected at least one column, got shape {x.shape}")
    return int(x.shape[1]) if block_size is None else check_scalar.integer(block_size, "block_size", 1)


def product(
    xq: Array,
    x_scale: Array,
    x_offset: Array | None,
    x_sums: Array,
    weight: BlockQuantizedWeight,
    block_size: Any,
    bias: Array | None,
    out: Array | None,
) -> QuantizedProduct:
    """Validate the arguments of `cupy_awq.gemm_int8` and return its sizes.

    Raises:
        TypeError, ValueError: an argument is invalid or contradicts another, or a block of x spans several blocks of
            the weight; the message names the argument.
    """
    check.on_device(xq, "xq", weight.device, "the weight")
    n, k = _matrix_shape(weight)
    if xq.dtype != check.INT8:
        raise TypeError(f"xq: expected int8, got {xq.dtype}")
    if len(xq.shape) != 2 or xq.shape[1] != k:
        raise ValueError(f"xq: expected [M, K] with K={k} as in weight, got shape {xq.shape}")
    m = int(xq.shape[0])
    for name, a, dtype in (
        ("x_scale", x_scale, check.FLOAT32),
        ("x_offset", x_offset, check.FLOAT32),
        ("x_sums", x_sums, check.INT32),
    ):
        if a is None:
            if name == "x_offset":
                continue
            raise TypeError(f"{name}: expected an array, got None")
        check.on_device(a, name, weight.device, "xq")
        if a.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, got {a.dtype}")
        if len(a.shape) != 2 or a.shape[0] != m or a.shape != x_scale.shape or a.shape[1] == 0:
            raise ValueError(f"{name}: expected [M, blocks] with M={m} as in xq, got shape {a.shape}")
    blocks = x_scale.shape[1]
    default = k if blocks == 1 else weight.block_size
    size = default if block_size is None else check_scalar.integer(block_size, "block_size", 1)
    if -(-k // size) != blocks:
        raise ValueError(f"x_scale: expected {-(-k // size)} blocks for K={k} and block_size={size}, got {blocks}")
    row_scales = blocks == 1 < weight.blocks
    if row_scales:
        size = weight.block_size
    if size > MAX_BLOCK:
        raise ValueError(f"block_size: expected at most {MAX_BLOCK}, for which int32 sums cannot overflow, got {size}")
    if weight.blocks > 1 and weight.block_size % size:
        raise ValueError(f"block_size: expected a divisor of the weight's block_size={weight.block_size}, got {size}")
    if bias is not None:
        check.bias(bias, n, device=weight.device)
    dtype = weight.dtype
    if out is not None:
        dtype = check.float_dtype(getattr(out, "dtype", None), "out")
        check.out(out, (m, n), dtype, weight.device)
    return QuantizedProduct(m, n, k, size, dtype, row_scales)


def float_product(x: Array, weight: BlockQuantizedWeight, bias: Array | None, out: Array | None) -> QuantizedProduct:
    """Validate the arguments of `cupy_awq.linear_int8` and return its sizes; the block size is that of the weight.

    Raises:
        TypeError, ValueError: an argument is invalid or contradicts another; the message names it.
    """
    float_x(x, weight)
    x_block_size(x, None)
    n, k = _matrix_shape(weight)
    if x.shape[1] != k:
        raise ValueError(f"x: expected [M, K] with K={k} as in weight, got shape {x.shape}")
    m = int(x.shape[0])
    if bias is not None:
        check.bias(bias, n, device=weight.device)
    if out is not None:
        check.out(out, (m, n), x.dtype, weight.device)
    return QuantizedProduct(m, n, k, weight.block_size, x.dtype)


def _matrix_shape(weight: BlockQuantizedWeight) -> tuple[int, int]:
    """Return (N, K) of a weight [N, 1, 1, K]. Raises ValueError for a larger filter."""
    n, kh, kw, k = weight.shape
    if (kh, kw) != (1, 1):
        raise ValueError(f"weight: expected a 1x1 kernel for a matrix product, got {kh}x{kw}")
    return n, k


def _pair(value: Any, name: str, least: int) -> Pair:
    values = value if isinstance(value, tuple) else (value, value)
    if len(values) != 2:
        raise ValueError(f"{name}: expected a number or two, got {value!r}")
    return check_scalar.integer(values[0], name, least), check_scalar.integer(values[1], name, least)


def _same_padding(size: int, kernel: int, stride: int, dilation: int) -> Pair:
    total = max(0, (-(-size // stride) - 1) * stride + dilation * (kernel - 1) + 1 - size)
    return total // 2, total - total // 2


def _out_size(size: int, kernel: int, stride: int, dilation: int, sides: Pair) -> int:
    return (size + sum(sides) - dilation * (kernel - 1) - 1) // stride + 1
