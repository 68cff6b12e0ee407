# SPDX-License-Identifier: Apache-2.0
"""Validation of the arguments of convolutions, quantization and integer products; imports no CuPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupy_awq import check
from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array

Pair = tuple[int, int]

MAX_BLOCK = 131071
"""Columns of a block whose sum of int8 products is always an int32: (2**31 - 1) // 2**14."""


class Geometry(NamedTuple):
    """A convolution's sizes."""

    batch: int
    channels: int
    height: int
    width: int
    outputs: int
    kernel: Pair
    stride: Pair
    padding: tuple[Pair, Pair]
    """((top, bottom), (left, right))."""
    dilation: Pair
    groups: int
    out: Pair
    nhwc: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of y, in its layout."""
        if self.nhwc:
            return self.batch, *self.out, self.outputs
        return self.batch, self.outputs, *self.out


def geometry(
    shape: tuple[int, ...],
    weight: tuple[int, int, int, int],
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    layout: Any,
) -> Geometry:
    """The sizes of a convolution of x of a shape with a weight [Co, Kh, Kw, Ci/groups].

    Padding is a number, (vertical, horizontal), ((top, bottom), (left, right)), or "same": ceil(size / stride)
    outputs, the odd pixel of padding at the bottom and the right.

    >>> geometry((1, 8, 7, 7), (16, 3, 3, 8), 2, "same", 1, 1, "NCHW").out
    (4, 4)
    """
    if layout not in ("NCHW", "NHWC"):
        raise ValueError(f"layout must be 'NCHW' or 'NHWC', got {layout!r}")
    nhwc = layout == "NHWC"
    if len(shape) != 4:
        raise ValueError(f"x must be {layout}, got shape {shape}")
    batch, height, width, channels = shape if nhwc else (shape[0], *shape[2:], shape[1])
    co, kh, kw, ci = weight
    groups = _whole(groups, "groups", 1)
    if channels != ci * groups:
        raise ValueError(f"Ci={channels} in x is not Ci/groups={ci} in codes times groups={groups}")
    if co % groups:
        raise ValueError(f"Co={co} in codes is not a multiple of groups={groups}")
    steps, spread = _pair(stride, "stride", 1), _pair(dilation, "dilation", 1)
    if isinstance(padding, str):
        if padding != "same":
            raise ValueError(f"padding must be numbers or 'same', got {padding!r}")
        sides = _same(height, kh, steps[0], spread[0]), _same(width, kw, steps[1], spread[1])
    elif isinstance(padding, tuple) and len(padding) == 2 and all(isinstance(p, tuple) for p in padding):
        sides = _pair(padding[0], "padding", 0), _pair(padding[1], "padding", 0)
    else:
        vertical, horizontal = _pair(padding, "padding", 0)
        sides = (vertical, vertical), (horizontal, horizontal)
    out = _outputs(height, kh, steps[0], spread[0], sides[0]), _outputs(width, kw, steps[1], spread[1], sides[1])
    if min(out) < 1:
        raise ValueError(f"the {kh}x{kw} kernel, dilation {spread}, is larger than x {height}x{width} with its padding")
    return Geometry(batch, channels, height, width, co, (kh, kw), steps, sides, spread, groups, out, nhwc)


def activation(value: Any) -> check.Activation:
    """None, "relu", "relu6" or (low, high)."""
    form = check.activation(value)
    if form.kind not in (None, "clamp"):
        raise ValueError(f"activation must be None, 'relu', 'relu6' or (low, high), got {value!r}")
    return form


def packed(weight: Any) -> BlockQuantizedWeight:
    if not isinstance(weight, BlockQuantizedWeight):
        raise TypeError(f"weight must be a BlockQuantizedWeight, got {type(weight).__name__}")
    return weight


def floats(x: Array, weight: BlockQuantizedWeight) -> None:
    """x lies where the weight does and holds floats."""
    check.on_device(x, "x", weight.device, "the weight")
    check.float_dtype(x.dtype, "x")


class Quantized(NamedTuple):
    """The sizes of a product of quantized rows."""

    m: int
    n: int
    k: int
    block: int
    """Columns of a block of x; with ``row_scales`` of the weight."""
    dtype: np.dtype[Any]
    """Of y."""
    row_scales: bool = False
    """x is one block, the weight has more."""


def row_blocks(x: Array, block_size: Any) -> int:
    """The block size for quantizing x [M, K]."""
    check.device_id(x, "x")
    check.float_dtype(x.dtype, "x")
    if len(x.shape) != 2:
        raise ValueError(f"x must be [M, K], got shape {x.shape}")
    if x.shape[1] == 0:
        raise ValueError("x must have at least one column")
    return int(x.shape[1]) if block_size is None else _whole(block_size, "block_size", 1)


def quantized(
    xq: Array,
    x_scale: Array,
    x_offset: Array | None,
    x_sums: Array,
    weight: BlockQuantizedWeight,
    block_size: Any,
    bias: Array | None,
    out: Array | None,
) -> Quantized:
    """The sizes of a product; each block of x lies within one block of the weight."""
    check.on_device(xq, "xq", weight.device, "the weight")
    n, kh, kw, k = weight.shape
    if (kh, kw) != (1, 1):
        raise ValueError(f"weight must have a 1x1 kernel for a matrix product, got {kh}x{kw}")
    if xq.dtype != check.INT8:
        raise TypeError(f"xq must be int8, got {xq.dtype}")
    if len(xq.shape) != 2:
        raise ValueError(f"xq must be [M, K], got shape {xq.shape}")
    if xq.shape[1] != k:
        raise ValueError(f"K={xq.shape[1]} in xq is not K={k} in weight")
    m = int(xq.shape[0])
    for name, a, dtype in (
        ("x_scale", x_scale, check.FLOAT32),
        ("x_offset", x_offset, check.FLOAT32),
        ("x_sums", x_sums, check.INT32),
    ):
        if a is None:
            if name == "x_offset":
                continue
            raise TypeError(f"{name} must be an array, got None")
        check.on_device(a, name, weight.device, "xq")
        if a.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, got {a.dtype}")
        if len(a.shape) != 2 or a.shape[0] != m or a.shape != x_scale.shape or a.shape[1] == 0:
            raise ValueError(f"{name} must be [M, blocks] with M={m} as in xq, got shape {a.shape}")
    blocks = x_scale.shape[1]
    default = k if blocks == 1 else weight.block_size
    block = default if block_size is None else _whole(block_size, "block_size", 1)
    if -(-k // block) != blocks:
        raise ValueError(f"x_scale has {blocks} blocks, but K={k} in blocks of block_size={block} are {-(-k // block)}")
    row_scales = blocks == 1 < weight.blocks
    if row_scales:
        block = weight.block_size
    if block > MAX_BLOCK:
        raise ValueError(f"blocks of {block} columns could overflow int32: quantize x in blocks of at most {MAX_BLOCK}")
    if weight.blocks > 1 and weight.block_size % block:
        raise ValueError(f"the weight's block_size={weight.block_size} is not a multiple of the {block} columns of x's")
    if bias is not None:
        check.bias(bias, n, device=weight.device)
    dtype = weight.dtype
    if out is not None:
        dtype = check.float_dtype(getattr(out, "dtype", None), "out")
        check.out(out, (m, n), dtype, weight.device)
    return Quantized(m, n, k, block, dtype, row_scales)


def fp8(x: Array, weight: BlockQuantizedWeight, bias: Array | None, out: Array | None) -> Quantized:
    """The sizes of a product of x, to be quantized to e4m3; its block is the weight's."""
    floats(x, weight)
    row_blocks(x, None)
    n, kh, kw, k = weight.shape
    if (kh, kw) != (1, 1):
        raise ValueError(f"weight must have a 1x1 kernel for a matrix product, got {kh}x{kw}")
    if weight.bits != 4:
        raise ValueError(f"weight must have 4 bits for a product with float8, got {weight.bits}")
    if x.shape[1] != k:
        raise ValueError(f"K={x.shape[1]} in x is not K={k} in weight")
    m = int(x.shape[0])
    if bias is not None:
        check.bias(bias, n, device=weight.device)
    if out is not None:
        check.out(out, (m, n), x.dtype, weight.device)
    return Quantized(m, n, k, weight.block_size, x.dtype)


def _whole(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def _pair(value: Any, name: str, least: int) -> Pair:
    values = value if isinstance(value, tuple) else (value, value)
    if len(values) != 2:
        raise ValueError(f"{name} must be a number or two, got {value!r}")
    return _whole(values[0], name, least), _whole(values[1], name, least)


def _same(size: int, kernel: int, stride: int, dilation: int) -> Pair:
    total = max(0, (-(-size // stride) - 1) * stride + dilation * (kernel - 1) + 1 - size)
    return total // 2, total - total // 2


def _outputs(size: int, kernel: int, stride: int, dilation: int, sides: Pair) -> int:
    return (size + sum(sides) - dilation * (kernel - 1) - 1) // stride + 1
