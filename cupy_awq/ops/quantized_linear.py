# SPDX-License-Identifier: Apache-2.0
"""`quantize_activations`, `gemm_int8`, `linear_int8`, `linear_fp8`: GEMMs of quantized activations and weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_awq import block_check, block_reference, check, check_scalar
from cupy_awq.activation import Activation
from cupy_awq.array_types import Clamp
from cupy_awq.block_check import QuantizedProduct
from cupy_awq.block_weight import BlockQuantizedWeight, from_packed
from cupy_awq.check import HOST, Array
from cupy_awq.kernels import select
from cupy_awq.kernels.dtypes import ITEMSIZE
from cupy_awq.kernels.epilogue import EPILOGUE_ACTIVATIONS
from cupy_awq.kernels.family import KernelProblem
from cupy_awq.kernels.int8 import problem as int8_problem
from cupy_awq.kernels.int8.gemm_w4a8_mma import GEMM_W4A8_MMA
from cupy_awq.kernels.int8.problem import Int8Problem
from cupy_awq.kernels.int8.quantize_fp8 import Fp8Quantization, half_sum_stride
from cupy_awq.kernels.int8.quantize_rows import RowQuantization
from cupy_awq.ops import repacked_linear
from cupy_awq.ops.chosen_kernel import choose_kernel
from cupy_awq.ops.prepared_gemm import gemm_problem
from cupy_awq.ops.repack import RepackedWeight
from cupy_awq.packing import namespace
from cupy_awq.runtime import device, placement
from cupy_awq.runtime.arrays import deliver, dtype_name, empty, row_stride, views
from cupy_awq.weight import PackedWeight

WORTHWHILE = 0.95
"""The ratio of modelled times below which an "auto" layer quantizes x, which makes y less accurate."""


def quantize_activations(
    x: Array, /, *, block_size: int | None = None, symmetric: bool = False, rounding: str = "half_away"
) -> tuple[Array, Array, Array | None, Array]:
    """Quantize rows to int8 codes with a scale and an offset for each block of columns: x ~ code * scale + offset.

        asymmetric  scale = (max - min) / 255, or max / 255 - min / 255 if max - min overflows
                    offset = max - 127 * scale
                    If this scale is at most 1e-5, scale = 1 and offset = max. (Source: MNN's on-line quantization.)
        symmetric   scale = max|x| / 127, without an offset (with block_size=32: llama.cpp's q8_1)

        code = clamp(round((x - offset) / scale), -128, 127), where every operation is rounded to float32

    Args:
        x: [M, K] float16, bfloat16 or float32.
        block_size: number of columns per block, by default K; the last block may be shorter.
        symmetric: whether blocks have no offset.
        rounding: "half_away" rounds halves away from zero, "half_even" to the nearest even code.

    Returns:
        The codes, int8 [M, K]; the scales, float32 [M, blocks]; the offsets, float32 [M, blocks] (None if symmetric);
        and the sums of the codes, int32 [M, blocks]. A block with an infinity or a NaN has scale NaN and codes 0.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value; the message names the argument.

    >>> quantize_activations(np.array([[-1.0, 0.25, 1.0]], np.float32), symmetric=True)[0]
    array([[-127,   32,  127]], dtype=int8)
    """
    (x,) = views(x=x)
    size = min(block_check.validate_x_block_size(x, block_size), max(1, x.shape[1]))
    symmetric = check_scalar.validate_flag(symmetric, "symmetric")
    if not (isinstance(rounding, str) and rounding in ("half_away", "half_even")):
        raise ValueError(f"rounding: expected 'half_away' or 'half_even', got {rounding!r}")
    if check.device_id(x, "x") == HOST:
        return block_reference.quantize(x, size, symmetric, rounding)
    return _quantize_on_gpu(x, size, symmetric, rounding)


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
    activation: Clamp = None,
    out: Array | None = None,
) -> Array:
    """Compute y [M, N] = activation(A @ W^T + bias) for quantized activations A and a quantized weight W.

        A @ W^T = sum over blocks of sA*(C*sW + sumA*oW) + oA*(sumW*sW + k*oW),  C = A_q W_q^T in int32

    s are scales, o offsets and sum the sums of the codes of a block of k columns. The result equals the product of the
    dequantized operands, except for the rounding of the float32 sum over blocks.

    Args:
        xq, x_scale, x_offset, x_sums: the results of `quantize_activations`; if x_offset is None, all offsets are 0.
        weight: [N, 1, 1, K] of 4 or 8 bits.
        block_size: block size of xq; by default K if each row of xq is one block, otherwise the weight's block size. If
            the rows of xq and of the weight both have several blocks, it must divide the weight's block size.
        bias: [N] float16, bfloat16 or float32.
        activation: None, "relu", "relu6", or (low, high) to clamp.
        out: [M, N] float16, bfloat16 or float32 array to fill and return; by default y has the dtype of the weight's
            scale.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value; the message names the argument.

    Source of the formula: MNN's DequantAndAcc.

    >>> weight = BlockQuantizedWeight(np.full((1, 1, 1, 4), 9, np.uint8), np.full((1, 1), 0.5, np.float32), None)
    >>> gemm_int8(*quantize_activations(np.array([[1, 2, 3, 4]], np.float32)), weight)
    array([[5.]], dtype=float32)
    """
    weight = block_check.validate_block_weight(weight)
    xq, x_scale, x_offset, x_sums, bias, out = views(
        xq=xq, x_scale=x_scale, x_offset=x_offset, x_sums=x_sums, bias=bias, out=out
    )
    product = block_check.validate_quantized_product(xq, x_scale, x_offset, x_sums, weight, block_size, bias, out)
    epilogue = check_activation(activation)
    if weight.device == HOST:
        target = np.empty((product.m, product.n), product.dtype) if out is None else out
        if product.row_scales:
            x_scale, x_offset, x_sums = _in_blocks(xq, x_scale, x_offset, product.block_size)
        return block_reference.gemm(xq, x_scale, x_offset, x_sums, weight, product, bias, epilogue, target)
    return _multiply_on_gpu(xq, x_scale, x_offset, x_sums, weight, product, bias, epilogue, out)


def linear_int8(
    x: Array,
    weight: BlockQuantizedWeight,
    /,
    *,
    bias: Array | None = None,
    activation: Clamp = None,
    out: Array | None = None,
) -> Array:
    """Compute a W4A8 or W8A8 linear layer, y [M, N] = activation(x @ W^T + bias), with x quantized to int8.

    x is quantized symmetrically in blocks of the weight's block size. The error of an element of x is at most half of
    the block's scale, max|x| / 254. The error of an element of y is at most the sum over blocks of max|x| / 254 times
    the sum of |W| over the block; for normally distributed x and W, the relative error of y is about 1/200.

    Args:
        x: [M, K] float16, bfloat16 or float32.
        weight: [N, 1, 1, K]; `from_packed` converts an AWQ weight to this form.
        bias, activation: as in `gemm_int8`.
        out: [M, N] array of x's dtype to fill and return.

    Returns:
        y with the dtype of x; on a GPU, two kernels compute it.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value; the message names the argument.

    >>> weight = BlockQuantizedWeight(np.full((1, 1, 1, 4), 9, np.uint8), np.full((1, 1), 0.5, np.float32), None)
    >>> linear_int8(np.array([[127, 2, 3, 4]], np.float16), weight)
    array([[68.]], dtype=float16)
    """
    weight = block_check.validate_block_weight(weight)
    x, bias, out = views(x=x, bias=bias, out=out)
    product = block_check.validate_float_product(x, weight, bias, out)
    check_activation(activation)
    block_size = min(weight.block_size, product.k)
    quantized = quantize_activations(x, block_size=block_size, symmetric=True)
    if out is None:
        out = empty((product.m, product.n), x.dtype, weight.device)
    return gemm_int8(*quantized, weight, block_size=block_size, bias=bias, activation=activation, out=out)


def linear_fp8(
    x: Array,
    weight: BlockQuantizedWeight,
    /,
    *,
    bias: Array | None = None,
    activation: Clamp = None,
    out: Array | None = None,
) -> Array:
    """Compute a linear layer with INT4 weights, y [M, N] = activation(x @ W^T + bias), with x rounded to e4m3 (float8).

    Each row of x has a scale, max|x| / 448 (at least 2**-100 / 448). The error of an element of x is at most 1/17 of
    the element or 2**-10 times the scale, whichever is larger. The error of an element of y is at most the sum over k
    of this error times |W|. For normally distributed x and W, the relative error of y is about 1/38: larger than with
    `linear_int8`, but small elements of x keep their precision next to elements that are a thousand times as large.

    Hopper's tensor cores shift all products of a sum to the exponent of the largest one and keep about 14 bits
    (DeepSeek-V3 Technical Report, 3.5.2). The products of this operation have 8 significant bits, and at most 128 of
    them are added before the sum is added to a float32 accumulator. In a simulation, this adds a relative error of
    1/4000 to y. For many rows on Hopper, products of zero points and scales, and the sums of the codes of x by which
    they are multiplied, are rounded to float16, which adds a relative error of 1/2500 to y.

    Args:
        x: [M, K] float16, bfloat16 or float32. A row with an infinity or a NaN gives a row of NaN in y.
        weight: [N, 1, 1, K] of 4 bits; `from_packed` converts an AWQ weight to this form.
        bias, activation: as in `gemm_int8`.
        out: [M, N] array of x's dtype to fill and return.

    Returns:
        y with the dtype of x; on a GPU, two kernels compute it.

    A GPU must be sm_89 or newer. On a GPU, K must be a multiple of 16, and the weight's block size a multiple of 32
    unless it is at least K.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value, or the GPU has no kernel for the weight; the
            message names the argument.

    >>> weight = BlockQuantizedWeight(np.full((1, 1, 1, 4), 9, np.uint8), np.full((1, 1), 0.5, np.float32), None)
    >>> linear_fp8(np.array([[448, 17, 3, 4]], np.float16), weight)  # 17 is half-way between 16 and 18
    array([[235.5]], dtype=float16)
    """
    weight = block_check.validate_block_weight(weight)
    x, bias, out = views(x=x, bias=bias, out=out)
    product = block_check.validate_float_product(x, weight, bias, out)
    if weight.bits != 4:
        raise ValueError(f"weight: expected 4 bits for a float8 product, got {weight.bits}")
    epilogue = check_activation(activation)
    if weight.device == HOST:
        target = np.empty((product.m, product.n), product.dtype) if out is None else out
        return block_reference.linear_fp8(x, weight, product, bias, epilogue, target)
    check_layer(weight, activation, "fp8")
    return _linear_fp8_on_gpu(x, weight, product, bias, epilogue, out)


def convert_weight(weight: PackedWeight, activation: Any, x_dtype: str) -> BlockQuantizedWeight:
    """Convert a weight for a layer that quantizes x to ``x_dtype``. Raises the same errors as `check_layer`."""
    with placement.use_device(weight.spec.device):
        block_weight = from_packed(weight)
    check_layer(block_weight, activation, x_dtype)
    return block_weight


def check_activation(activation: Any) -> Activation:
    """Return an activation that GEMMs with quantized x support. Raises TypeError or ValueError for any other."""
    return block_check.validate_supported_activation(activation, EPILOGUE_ACTIVATIONS)


def check_layer(weight: BlockQuantizedWeight, activation: Any, x_dtype: str) -> None:
    """Check that `linear_int8` (x_dtype "int8") or `linear_fp8` ("fp8") supports an activation, a weight and its GPU.

    Raises:
        TypeError, ValueError: the activation, the weight or the GPU is not supported; the message gives the reason.
    """
    check_activation(activation)
    if x_dtype == "fp8" and weight.device != HOST:
        reason = int8_problem.fp8_refusal(weight.block_size, weight.shape[3], device.of(weight.device))
        if reason:
            raise ValueError(f"weight: expected one that a float8 kernel takes, got one that {reason}")


def int8_preference(
    operand: PackedWeight, weight: BlockQuantizedWeight | RepackedWeight, bias: Array | None, activation: Any
) -> Callable[[Array], bool]:
    """Return a function of x: whether `linear_int8` is expected to take less than WORTHWHILE of the time of `gemm`.

    The function compares the cost models once per M and dtype of x. It returns False for a weight on the CPU and for an
    x that is empty or has another shape or dtype than both operations take.

    Args:
        operand, weight: the same weight for `gemm` and for `linear_int8` or `linear_repacked`.
        bias, activation: as in `gemm`.
    """
    spec = operand.spec
    form = check_activation(activation)
    bias_dtype = None if bias is None else bias.dtype.name
    epilogue: dict[str, Any] = {"bias_dtype": bias_dtype, "activation": form.kind, "limits": form.limits}

    def make_problems(m: int, dtype: str) -> tuple[KernelProblem, Int8Problem]:
        if isinstance(weight, RepackedWeight):
            return repacked_linear.make_problems(spec, m, dtype, **epilogue)
        wide = spec.k % 8 == 0 and spec.group_size % 8 == 0
        quantization = RowQuantization(
            m, spec.k, spec.group_size, dtype, symmetric=True, half_even=False, wide=wide, x_stride=spec.k
        )
        form_of_weight = {"zero_points": weight.zero_points is not None, "scale_dtype": weight.exact_scale_dtype}
        sizes = spec.n, spec.k, spec.group_size, weight.bits, False, weight.offset is not None
        return quantization, Int8Problem(m, *sizes, dtype, **epilogue | form_of_weight)

    @functools.lru_cache(maxsize=1024)
    def is_int8_faster(m: int, dtype: np.dtype[Any]) -> bool:
        gemm = gemm_problem(operand, form, m, dtype, bias_dtype=bias_dtype)
        quantization, product = make_problems(m, dtype.name)
        gpu = device.of(spec.device)
        kernel = GEMM_W4A8_MMA.NAME if isinstance(weight, RepackedWeight) else None
        quantized_us = select.modelled_us(quantization, gpu) + select.modelled_us(product, gpu, kernel)
        return quantized_us < WORTHWHILE * select.modelled_us(gemm, gpu)

    dtypes = ("float16", "bfloat16") if isinstance(weight, RepackedWeight) else tuple(ITEMSIZE)

    def prefers_int8(x: Array) -> bool:
        (x,) = views(x=x)
        is_here = check.device_id(x, "x") == spec.device != HOST
        is_valid = is_here and x.dtype.name in dtypes and x.size > 0 and x.shape[-1:] == (spec.k,)
        return is_valid and is_int8_faster(x.size // spec.k, x.dtype)

    return prefers_int8


def _quantize_on_gpu(
    x: Array, block_size: int, symmetric: bool, rounding: str
) -> tuple[Array, Array, Array | None, Array]:
    import cupy

    index = check.device_id(x, "x")
    with placement.use_device(index):
        m, k = x.shape
        shape = m, -(-k // block_size)
        codes, scale, sums = (cupy.empty(s, t) for s, t in (((m, k), np.int8), (shape, np.float32), (shape, np.int32)))
        offset = None if symmetric else cupy.empty(shape, np.float32)
        if m:
            if row_stride(x) is None:
                x = cupy.ascontiguousarray(x)
            wide = k % 8 == 0 and block_size % 8 == 0 and (x.data.ptr | x.strides[0]) % (8 * x.dtype.itemsize) == 0
            half_even = rounding == "half_even"
            problem = RowQuantization(
                m, k, block_size, dtype_name(x.dtype), symmetric, half_even, wide, row_stride(x) or 0
            )
            buffers = {"x": x, "codes": codes, "scale": scale, "offset": offset, "sums": sums}
            choose_kernel(problem, index).launch(buffers)
        return codes, scale, offset, sums


def _multiply_on_gpu(
    xq: Array,
    x_scale: Array,
    x_offset: Array | None,
    x_sums: Array,
    weight: BlockQuantizedWeight,
    product: QuantizedProduct,
    bias: Array | None,
    activation: Activation,
    out: Array | None,
    *,
    half_sums: Array | None = None,
) -> Array:
    """Compute `gemm_int8` on the GPU.

    With ``half_sums`` of the kernel `quantize_fp8`, xq is e4m3, x_scale is [M], and x_sums is float32.
    """
    import cupy

    with placement.use_device(weight.device):
        y = cupy.empty((product.m, product.n), product.dtype) if out is None or row_stride(out) is None else out
        if product.m:
            xq, x_scale, x_offset, x_sums = (
                a if a is None else cupy.ascontiguousarray(a) for a in (xq, x_scale, x_offset, x_sums)
            )
            y_bits = y.data.ptr | y.strides[0]
            problem = Int8Problem(
                product.m,
                product.n,
                product.k,
                product.block_size,
                weight.bits,
                x_offset is not None,
                weight.offset is not None,
                dtype_name(product.dtype),
                None if bias is None else dtype_name(bias.dtype),
                activation.kind,
                activation.limits,
                aligned=xq.data.ptr % 16 == 0,
                even=y_bits % (2 * y.dtype.itemsize) == 0,
                wide=y_bits % 16 == 0,
                y_stride=row_stride(y),
                fp8=half_sums is not None,
                row_scales=product.row_scales,
                zero_points=weight.zero_points is not None,
                scale_dtype=weight.exact_scale_dtype,
            )
            chosen = choose_kernel(problem, weight.device)
            buffers = chosen.weight_buffers(weight)
            buffers |= {"xq": xq, "x_row_scale": x_scale, "bias": bias, "y": y}
            if product.row_scales and "x_scale" in chosen.launcher.buffers:
                x_scale, x_offset, x_sums = _in_blocks(xq, x_scale, x_offset, product.block_size)
            buffers |= {"x_scale": x_scale, "x_offset": x_offset, "x_sums": x_sums, "x_half_sums": half_sums}
            chosen.launch(buffers)
        return deliver(y, out)


def _linear_fp8_on_gpu(
    x: Array,
    weight: BlockQuantizedWeight,
    product: QuantizedProduct,
    bias: Array | None,
    activation: Activation,
    out: Array | None,
) -> Array:
    import cupy

    with placement.use_device(weight.device):
        m, k = product.m, product.k
        block_size = int8_problem.fp8_block_size(product.block_size, k)
        sums = cupy.empty((m, -(-k // block_size)), np.float32)
        half_sums = cupy.empty((m, half_sum_stride(k, block_size)), np.float16)
        codes, scale = cupy.empty((m, k), np.uint8), cupy.empty(m, np.float32)
        if m:
            stride = row_stride(x)
            if stride is None or (x.data.ptr | stride * x.dtype.itemsize) % 16:
                x, stride = cupy.array(x, order="C"), k
            problem = Fp8Quantization(m, k, block_size, dtype_name(x.dtype), stride)
            buffers = {"x": x, "codes": codes, "scale": scale, "sums": sums, "half_sums": half_sums}
            choose_kernel(problem, weight.device).launch(buffers)
        product = product._replace(block_size=block_size)
        return _multiply_on_gpu(codes, scale, None, sums, weight, product, bias, activation, out, half_sums=half_sums)


def _in_blocks(xq: Array, x_scale: Array, x_offset: Array | None, size: int) -> tuple[Array, Array | None, Array]:
    """Return x_scale, x_offset and x_sums [M, blocks] for blocks of ``size`` columns; blocks have their row's scale."""
    xp = namespace(xq)
    m, k = xq.shape
    blocks = -(-k // size)
    padded = xp.zeros((m, blocks * size), np.int8)
    padded[:, :k] = xq
    sums = padded.reshape(m, blocks, size).sum(2, dtype=np.int32)
    scale, offset = (a if a is None else xp.repeat(a, blocks, axis=1) for a in (x_scale, x_offset))
    return scale, offset, sums
