# SPDX-License-Identifier: Apache-2.0
"""Validation of the arguments of convolutions, of quantization and of products of quantized rows; imports no CuPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupy_awq import check, check_scalar
from cupy_awq.activation import ACTIVATIONS, Activation
from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array

Pair = tuple[int, int]
"""A vertical and a horizontal number."""

MAX_BLOCK = 131071
"""The longest block whose sum of int8 products always fits in an int32: (2**31 - 1) // 2**14."""


class ConvolutionShape(NamedTuple):
    """The sizes of a validated convolution."""

    batch: int
    """The number of images."""
    channels: int
    """The channels of x, Ci."""
    height: int
    """The rows of an image of x."""
    width: int
    """The pixels of a row of x."""
    outputs: int
    """The channels of y, Co."""
    kernel: Pair
    """The size of the kernel, (Kh, Kw)."""
    stride: Pair
    """The pixels of x from one pixel of y to the next."""
    padding: tuple[Pair, Pair]
    """((top, bottom), (left, right)), in pixels."""
    dilation: Pair
    """The pixels of x from one tap of the kernel to the next."""
    groups: int
    """The number of groups of channels."""
    out: Pair
    """The size of an image of y."""
    nhwc: bool
    """Whether x and y are [batch, height, width, channels], else [batch, channels, height, width]."""

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        """The shape of y."""
        if self.nhwc:
            return self.batch, *self.out, self.outputs
        return self.batch, self.outputs, *self.out


class QuantizedProduct(NamedTuple):
    """The sizes of a validated product of quantized rows [M, K] and a weight [N, K]."""

    m: int
    """The rows of x."""
    n: int
    """The out features."""
    k: int
    """The in features."""
    block_size: int
    """The columns of a block of x; with ``row_scales`` those of a block of the weight."""
    dtype: np.dtype[Any]
    """The dtype of y."""
    row_scales: bool = False
    """Whether x has one block per row while the weight has several."""


def convolution(
    x_shape: tuple[int, ...],
    weight_shape: tuple[int, int, int, int],
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    layout: Any,
) -> ConvolutionShape:
    """Return the sizes of a convolution of x with a weight [Co, Kh, Kw, Ci/groups]; arguments as in `cupy_awq.conv2d`.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.

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
    """Return the activation that a name, (low, high) or None means; it must be of one of ``kinds``.

    Raises:
        TypeError, ValueError: not an activation, or one that the operation does not have.

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
    """Return ``weight``.

    Raises:
        TypeError: it is not a `BlockQuantizedWeight`.
    """
    if not isinstance(weight, BlockQuantizedWeight):
        raise TypeError(f"weight: expected a BlockQuantizedWeight, got {type(weight).__name__}")
    return weight


def float_x(x: Array, weight: BlockQuantizedWeight) -> None:
    """Check that x is an array of floats on the device of the weight.

    Raises:
        TypeError: it is not.
    """
    check.on_device(x, "x", weight.device, "the weight")
    check.float_dtype(x.dtype, "x")


def x_block_size(x: Array, block_size: Any) -> int:
    """Return the block size in which to quantize x [M, K], by default K.

    Raises:
        TypeError, ValueError: x is not a matrix of floats, or ``block_size`` is not a positive integer.
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
    """Return the sizes of a product, in which each block of x lies within one block of the weight.

    Raises:
        TypeError, ValueError: an argument of `cupy_awq.gemm_int8` that does not fit; the message names it.
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
    """Return the sizes of a product of x [M, K] that will be quantized; the block size is the weight's.

    Raises:
        TypeError, ValueError: an argument of `cupy_awq.linear_int8` that does not fit; the message names it.
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
    """Return (N, K) of the weight of a linear layer."""
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
