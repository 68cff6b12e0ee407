# SPDX-License-Identifier: Apache-2.0
"""The public operations on blocks of INT4 and INT8 codes: check the arguments, then NumPy or the GPU's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq import check
from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import HOST, Array
from cupy_awq.int8 import arguments, forms, gpu, reference


def quantize_activations(
    x: Array, /, *, block_size: int | None = None, symmetric: bool = False, rounding: str = "half_away"
) -> tuple[Array, Array, Array | None, Array]:
    """Rows as int8 codes with a scale and an offset for each block of columns: x = code * scale + offset, about.

        asymmetric  scale = (max - min) / 255, offset = max - 127 * scale; a scale of 1e-5 or less becomes 1, with
                    offset = max (MNN's on-line quantization)
        symmetric   scale = max|x| / 127, no offset (with block_size=32 llama.cpp's q8_1)

        code = clamp(round((x - offset) / scale), -128, 127), each operation in float32

    Args:
        x: [M, K] float16, bfloat16 or float32.
        block_size: columns of a block, the last may be short; by default K.
        symmetric: which of the two.
        rounding: of halves, "half_away" from zero or to "half_even".

    Returns:
        codes int8 [M, K], scale float32 [M, blocks], offset float32 [M, blocks] (None if symmetric), and the sums of
        the codes, int32 [M, blocks]. A block with an infinity or a NaN has scale NaN and codes 0.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.

    >>> quantize_activations(np.array([[-1.0, 0.25, 1.0]], np.float32), symmetric=True)[0]
    array([[-127,   32,  127]], dtype=int8)
    """
    (x,) = gpu.views(x=x)
    block = min(arguments.row_blocks(x, block_size), max(1, x.shape[1]))
    if not isinstance(symmetric, bool):
        raise TypeError(f"symmetric must be True or False, got {symmetric!r}")
    if rounding not in ("half_away", "half_even"):
        raise ValueError(f"rounding must be 'half_away' or 'half_even', got {rounding!r}")
    if check.device_id(x, "x") == HOST:
        return reference.quantize(x, block, symmetric, rounding)
    return gpu.quantize(x, block, symmetric, rounding)


def gemm_int8(
    xq: Array,
    x_scale: Array,
    x_offset: Array | None,
    x_sums: Array,
    weight: BlockQuantizedWeight,
    /,
    *,
    block_size: int | None = None,
    bias: Array | None = None,
    activation: Any = None,
    out: Array | None = None,
) -> Array:
    """y [M, N] = activation(A @ B^T + bias), where A are quantized rows and B is a weight, multiplied as integers.

        y = sum over blocks of sA*(C*sB + sumA*oB) + oA*(sumB*sB + k*oB),  C = A_q B_q^T in int32

    That is the product of what the codes stand for, with no other error than that of float32 sums over blocks.

    Args:
        xq, x_scale, x_offset, x_sums: what `quantize_activations` returns; no x_offset means zeros.
        weight: [N, 1, 1, K], 4 or 8 bits.
        block_size: columns of a block of xq; by default K for one block, else the weight's. Unless xq is one block, it
            must divide the weight's block size, if that has more than one.
        bias: [N] float16, bfloat16 or float32.
        activation: None, "relu", "relu6", or (low, high).
        out: [M, N] float16, bfloat16 or float32 to fill and return; by default of the dtype of the weight's scale.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.

    Source of the formula: MNN's DequantAndAcc.

    >>> weight = BlockQuantizedWeight(np.full((1, 1, 1, 4), 9, np.uint8), np.full((1, 1), 0.5, np.float32), None)
    >>> gemm_int8(*quantize_activations(np.array([[1, 2, 3, 4]], np.float32)), weight)
    array([[5.]], dtype=float32)
    """
    weight = arguments.packed(weight)
    xq, x_scale, x_offset, x_sums, bias, out = gpu.views(
        xq=xq, x_scale=x_scale, x_offset=x_offset, x_sums=x_sums, bias=bias, out=out
    )
    facts = arguments.quantized(xq, x_scale, x_offset, x_sums, weight, block_size, bias, out)
    form = arguments.activation(activation)
    if weight.device == HOST:
        target = np.empty((facts.m, facts.n), facts.dtype) if out is None else out
        if facts.row_scales:
            x_scale, x_offset, x_sums = forms.in_blocks(xq, x_scale, x_offset, facts.block)
        return reference.gemm(xq, x_scale, x_offset, x_sums, weight, facts, bias, form, target)
    return gpu.gemm(xq, x_scale, x_offset, x_sums, weight, facts, bias, form, out)


def linear_int8(
    x: Array,
    weight: BlockQuantizedWeight,
    /,
    *,
    bias: Array | None = None,
    activation: Any = None,
    out: Array | None = None,
) -> Array:
    """y [M, N] = activation(x @ W^T + bias) with x quantized on the way: a linear layer of INT4 or INT8 weights (W4A8).

    Each block of x has the block size of the weight, no offset, and so is off by at most half a step of its scale
    max|x| / 127. An element of y is therefore off by at most the sum over blocks of max|x| / 254 times the sum of |W|,
    and by about 1/200 of the size of x @ W^T where both are normal.

    Args:
        x: [M, K] float16, bfloat16 or float32.
        weight: [N, 1, 1, K], of `from_packed` for an AWQ weight.
        bias, activation: as in `gemm_int8`.
        out: array of x's dtype to fill and return.

    Returns:
        y, of x's dtype: two launches on a GPU.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.

    >>> weight = BlockQuantizedWeight(np.full((1, 1, 1, 4), 9, np.uint8), np.full((1, 1), 0.5, np.float32), None)
    >>> linear_int8(np.array([[127, 2, 3, 4]], np.float16), weight)
    array([[68.]], dtype=float16)
    """
    weight = arguments.packed(weight)
    x, out = gpu.views(x=x, out=out)
    arguments.floats(x, weight)
    block = min(weight.block_size, arguments.row_blocks(x, None))
    quantized = quantize_activations(x, block_size=block, symmetric=True)
    if out is None:
        out = gpu.empty((len(x), weight.shape[0]), x.dtype, weight.device)
    elif out.dtype != x.dtype:
        raise TypeError(f"out must be {x.dtype} like x, got {out.dtype}")
    return gemm_int8(*quantized, weight, block_size=block, bias=bias, activation=activation, out=out)


def linear_fp8(
    x: Array,
    weight: BlockQuantizedWeight,
    /,
    *,
    bias: Array | None = None,
    activation: Any = None,
    out: Array | None = None,
) -> Array:
    """y [M, N] = activation(x @ W^T + bias) with x rounded to float8 (e4m3) on the way: a linear layer of INT4 weights.

    Each row of x has a scale, max|x| / 448 (of at least 2**-100 / 448), and is off by at most 1/17 of each element or
    2**-10 scales, whichever is more. An element of y is therefore off by at most the sum over k of that times |W|, and
    by about 1/38 of the size of x @ W^T where both are normal: more than with `linear_int8`, but elements keep their
    precision beside others that are a thousand times as large.

    Tensor cores of Hopper keep about 14 bits of the largest of what they add up (DeepSeek-V3 Technical Report, 3.5.2).
    Products have 8, and but 128 columns or less are added up so, what comes of it in float32: in a model of that y is
    off by a further 1/4000 of its size.

    Args:
        x: [M, K] float16, bfloat16 or float32. A row with an infinity or a NaN gives a row of NaN.
        weight: [N, 1, 1, K] of 4 bits, of `from_packed` for an AWQ weight.
        bias, activation: as in `gemm_int8`.
        out: array of x's dtype to fill and return.

    Returns:
        y, of x's dtype: two launches on a GPU, which must be of sm_89 or newer; K must be a multiple of 16 there, and
        the weight's block size of 32 where it is less than K.

    Raises:
        TypeError, ValueError: an argument that does not fit, or a GPU; the message names it.

    >>> weight = BlockQuantizedWeight(np.full((1, 1, 1, 4), 9, np.uint8), np.full((1, 1), 0.5, np.float32), None)
    >>> linear_fp8(np.array([[448, 17, 3, 4]], np.float16), weight)  # 17 lies half-way between 16 and 18
    array([[235.5]], dtype=float16)
    """
    weight = arguments.packed(weight)
    x, bias, out = gpu.views(x=x, bias=bias, out=out)
    facts = arguments.fp8(x, weight, bias, out)
    form = arguments.activation(activation)
    if weight.device == HOST:
        target = np.empty((facts.m, facts.n), facts.dtype) if out is None else out
        return reference.linear_fp8(x, weight, facts, bias, form, target)
    return gpu.linear_fp8(x, weight, facts, bias, form, out)


def conv2d(
    x: Array,
    weight: BlockQuantizedWeight,
    /,
    *,
    bias: Array | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    activation: Any = None,
    layout: str = "NCHW",
    out: Array | None = None,
) -> Array:
    """A 2-D convolution (correlation, as everywhere in deep learning) with quantized weights.

        y[b, co, i, j] = activation(bias[co] + sum over y, x, c of
                                    x[b, c, i*stride + y*dilation - top, j*stride + x*dilation - left] * w[co, y, x, c])

    Args:
        x: float16, bfloat16 or float32, [batch, Ci, height, width], or [batch, height, width, Ci] for layout "NHWC".
        weight: [Co, Kh, Kw, Ci/groups].
        bias: [Co] float16, bfloat16 or float32.
        stride, dilation: a number or (vertical, horizontal).
        padding: the same, or ((top, bottom), (left, right)), or "same": ceil(size / stride) outputs, with the odd pixel
            of padding at the bottom and the right.
        groups: of channels, Ci for a depthwise convolution.
        activation: None, "relu", "relu6", or (low, high).
        layout: of x and y.
        out: array for y to fill and return, of x's dtype.

    Returns:
        y in the layout and dtype of x.

    On a GPU, tensor cores take float16 and bfloat16 x; they round each weight to the type of x.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.

    >>> weight = BlockQuantizedWeight(np.full((1, 3, 3, 1), 9, np.uint8), np.ones((1, 1), np.float32), None)
    >>> conv2d(np.ones((1, 1, 3, 3), np.float32), weight, padding=1)[0, 0]
    array([[4., 6., 4.],
           [6., 9., 6.],
           [4., 6., 4.]], dtype=float32)
    """
    weight = arguments.packed(weight)
    x, bias, out = gpu.views(x=x, bias=bias, out=out)
    arguments.floats(x, weight)
    sizes = arguments.geometry(x.shape, weight.shape, stride, padding, dilation, groups, layout)
    form = arguments.activation(activation)
    if bias is not None:
        check.bias(bias, sizes.outputs, device=weight.device)
    if out is not None:
        check.out(out, sizes.shape, x.dtype, weight.device)
    if weight.device == HOST:
        target = np.empty(sizes.shape, x.dtype) if out is None else out
        return reference.conv2d(x, weight, sizes, bias, form, target)
    return gpu.conv2d(x, weight, sizes, bias, form, out)
