# SPDX-License-Identifier: Apache-2.0
"""Validation of the arguments of convolutions, activation quantization and int8 GEMMs.

The functions and their error messages have the form that `cupy_awq.check` describes. This module does not import CuPy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupy_awq import check, check_scalar, overlap
from cupy_awq.activation import ACTIVATIONS, Activation
from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array

Pair = tuple[int, int]
"""A pair of integers (vertical, horizontal)."""

MAX_BLOCK = 131071
"""The largest block size for which a sum of products of int8 values cannot overflow int32: (2**31 - 1) // 2**14."""


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
    """The number of channel groups; 1 for an ordinary convolution, Ci for a depthwise convolution."""
    out: Pair
    """The size of y in pixels, (height, width)."""
    nhwc: bool
    """Whether x and y are [batch, height, width, channels] instead of [batch, channels, height, width]."""

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        """The shape of y: [batch, Co, height, width], or [batch, height, width, Co] if ``nhwc``."""
        if self.nhwc:
            return self.batch, *self.out, self.outputs
        return self.batch, self.outputs, *self.out


class QuantizedProduct(NamedTuple):
    """The sizes of a validated GEMM y [M, N] = x @ W^T with x [M, K] and W [N, K] quantized in blocks along K."""

    m: int
    """The number of rows of x, M."""
    n: int
    """The number of out features, N."""
    k: int
    """The number of in features, K."""
    block_size: int
    """The number of columns per quantization block of x, or of the weight if ``row_scales``."""
    dtype: np.dtype[Any]
    """The dtype of y."""
    row_scales: bool = False
    """Whether x has one scale per row while each row of the weight has several blocks."""


def validate_convolution(
    x_shape: tuple[int, ...],
    weight_shape: tuple[int, int, int, int],
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    layout: Any,
) -> ConvolutionShape:
    """Validate the arguments of a convolution and return its sizes and parameters.

    The arguments have the meaning that they have in `cupy_awq.conv2d`.

    Raises:
        TypeError, ValueError: an argument is invalid, or two arguments contradict each other; the message names one.

    >>> validate_convolution((1, 8, 7, 7), (16, 3, 3, 8), 2, "same", 1, 1, "NCHW").out
    (4, 4)
    """
    if not (isinstance(layout, str) and layout in ("NCHW", "NHWC")):
        raise ValueError(f"layout: expected 'NCHW' or 'NHWC', got {layout!r}")
    nhwc = layout == "NHWC"
    if len(x_shape) != 4:
        raise ValueError(f"x: expected {layout}, got shape {x_shape}")
    batch, height, width, channels = x_shape if nhwc else (x_shape[0], *x_shape[2:], x_shape[1])
    co, kh, kw, ci = weight_shape
    groups = check_scalar.validate_integer(groups, "groups", 1)
    if channels != ci * groups:
        raise ValueError(
            f"x: expected Ci = {ci * groups} channels, Ci/groups={ci} times groups={groups}, got {channels} in the"
            f" {layout} shape {list(x_shape)}"
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


def validate_supported_activation(activation: Any, kinds: tuple[str | None, ...]) -> Activation:
    """Return the `Activation` for a name, a pair of bounds (low, high) or None, if the operation supports it.

    Args:
        activation: the user's argument, as in `cupy_awq.gemm`.
        kinds: the values of `Activation.kind` that the operation supports.

    Raises:
        TypeError, ValueError: ``activation`` is not an activation, or the operation does not support it.

    >>> from cupy_awq.block_check import validate_supported_activation
    >>> validate_supported_activation("relu6", (None, "clamp")).limits
    (0.0, 6.0)
    """
    found = check.validate_activation(activation)
    if found.kind not in kinds or found.gated:
        names = [repr(name) for name, known in ACTIVATIONS.items() if known.kind in kinds and not known.gated]
        raise ValueError(f"activation: expected None, {', '.join(names)} or (low, high), got {activation!r}")
    return found


def validate_block_weight(weight: Any) -> BlockQuantizedWeight:
    """Return ``weight``. Raises TypeError for anything but a `BlockQuantizedWeight`."""
    if not isinstance(weight, BlockQuantizedWeight):
        raise TypeError(f"weight: expected a BlockQuantizedWeight, got {type(weight).__name__}")
    return weight


def validate_disjoint(out: Array, weight: BlockQuantizedWeight, bias: Array | None) -> None:
    """Raise ValueError if the memory of ``out`` overlaps an array of the weight, or the bias."""
    overlap.validate_disjoint(out, weight=weight.stored, scale=weight.scale, offset=weight.offset, bias=bias)


def validate_float_x(x: Array, weight: BlockQuantizedWeight) -> None:
    """Raise TypeError unless x is a float16, bfloat16 or float32 array on the device of ``weight``."""
    check.validate_device(x, "x", weight.device, "the weight")
    check.validate_float_dtype(x.dtype, "x")


def validate_x_block_size(x: Array, block_size: Any) -> int:
    """Return the number of columns of x [M, K] per quantization block: ``block_size``, or K if it is None.

    Raises:
        TypeError, ValueError: x is not a float matrix with K > 0, or ``block_size`` is not a positive integer.
    """
    check.device_id(x, "x")
    check.validate_float_dtype(x.dtype, "x")
    if len(x.shape) != 2:
        raise ValueError(f"x: expected [M, K], got shape {x.shape}")
    if x.shape[1] == 0:
        raise ValueError(f"x: expected at least one column, got shape {x.shape}")
    return int(x.shape[1]) if block_size is None else check_scalar.validate_integer(block_size, "block_size", 1)


def validate_quantized_product(
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
        TypeError, ValueError: an argument is invalid, two arguments contradict each other, or a quantization block of x
            spans several blocks of the weight; the message names the argument.
    """
    check.validate_device(xq, "xq", weight.device, "the weight")
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
        check.validate_device(a, name, weight.device, "xq")
        if a.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, got {a.dtype}")
        if len(a.shape) != 2 or a.shape[0] != m or a.shape != x_scale.shape or a.shape[1] == 0:
            raise ValueError(f"{name}: expected [M, blocks] with M={m} as in xq, got shape {a.shape}")
    blocks = x_scale.shape[1]
    default = k if blocks == 1 else weight.block_size
    size = default if block_size is None else check_scalar.validate_integer(block_size, "block_size", 1)
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
        check.validate_bias(bias, n, device=weight.device)
    dtype = weight.dtype
    if out is not None:
        dtype = check.validate_float_dtype(getattr(out, "dtype", None), "out")
        check.validate_out(out, (m, n), dtype, weight.device)
        validate_disjoint(out, weight, bias)
    return QuantizedProduct(m, n, k, size, dtype, row_scales)


def validate_float_product(
    x: Array, weight: BlockQuantizedWeight, bias: Array | None, out: Array | None
) -> QuantizedProduct:
    """Validate the arguments of `cupy_awq.linear_int8` and return the sizes of the GEMM.

    x is not quantized yet, so the returned block size is that of the weight.

    Raises:
        TypeError, ValueError: an argument is invalid, or two arguments contradict each other; the message names one.
    """
    validate_float_x(x, weight)
    validate_x_block_size(x, None)
    n, k = _matrix_shape(weight)
    if x.shape[1] != k:
        raise ValueError(f"x: expected [M, K] with K={k} as in weight, got shape {x.shape}")
    m = int(x.shape[0])
    if bias is not None:
        check.validate_bias(bias, n, device=weight.device)
    if out is not None:
        check.validate_out(out, (m, n), x.dtype, weight.device)
        validate_disjoint(out, weight, bias)
    return QuantizedProduct(m, n, k, weight.block_size, x.dtype)


def _matrix_shape(weight: BlockQuantizedWeight) -> tuple[int, int]:
    """Return (N, K) of a weight [N, 1, 1, K]. Raises ValueError if the filter is larger than 1x1."""
    n, kh, kw, k = weight.shape
    if (kh, kw) != (1, 1):
        raise ValueError(f"weight: expected a 1x1 kernel for a matrix product, got {kh}x{kw}")
    return n, k


def _pair(value: Any, name: str, least: int) -> Pair:
    values = value if isinstance(value, tuple) else (value, value)
    if len(values) != 2:
        raise ValueError(f"{name}: expected a number or two, got {value!r}")
    return check_scalar.validate_integer(values[0], name, least), check_scalar.validate_integer(values[1], name, least)


def _same_padding(size: int, kernel: int, stride: int, dilation: int) -> Pair:
    total = max(0, (-(-size // stride) - 1) * stride + dilation * (kernel - 1) + 1 - size)
    return total // 2, total - total // 2


def _out_size(size: int, kernel: int, stride: int, dilation: int, sides: Pair) -> int:
    return (size + sum(sides) - dilation * (kernel - 1) - 1) // stride + 1
