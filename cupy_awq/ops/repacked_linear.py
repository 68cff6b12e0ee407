# SPDX-License-Identifier: Apache-2.0
"""`linear_repacked`: 8-bit activations times the repacked weight of an `AwqLinear`, which 16-bit x shares."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq import check
from cupy_awq.check import HOST, Array, WeightSpec
from cupy_awq.kernels import select
from cupy_awq.kernels.gemm.layouts import FragmentLayout
from cupy_awq.kernels.gemm.problem import FRAGMENTS
from cupy_awq.kernels.int8.gemm_w4a8_mma import GEMM_W4A8_MMA
from cupy_awq.kernels.int8.problem import BLOCK_K, Int8Problem
from cupy_awq.kernels.int8.quantize_fp8 import Fp8Quantization, half_sum_stride
from cupy_awq.kernels.int8.quantize_rows import RowQuantization
from cupy_awq.ops.chosen_kernel import choose_kernel
from cupy_awq.ops.repack import RepackedWeight
from cupy_awq.runtime import device, placement
from cupy_awq.runtime.arrays import dtype_name, row_stride


def multiplies_repacked(spec: WeightSpec, x_dtype: str) -> bool:
    """Return whether `linear_repacked` multiplies by the repacked copy of a weight on its device.

    ``x_dtype`` is "int8" or "fp8".
    """
    if spec.device == HOST:
        return False
    form = spec.k, spec.n, spec.group_size, spec.dtype.name, spec.zeros
    gpu = device.of(spec.device)
    _, product = make_problems(spec, 1, "float16", fp8=x_dtype == "fp8")
    is_legal = GEMM_W4A8_MMA.refusal(product, gpu) is None and FragmentLayout(*form).groups == 1
    return is_legal and FRAGMENTS in select.weight_layouts(*form, gpu)


def make_problems(
    spec: WeightSpec, m: int, dtype: str, x_stride: int | None = None, *, fp8: bool = False, **options: Any
) -> tuple[RowQuantization | Fp8Quantization, Int8Problem]:
    """Return the quantization of x [m, K] and the GEMM of a layer; ``options`` are further fields of the latter."""
    k, has_zeros, x_stride = spec.k, spec.zeros != "symmetric", x_stride or spec.k
    block_size = BLOCK_K if fp8 else spec.group_size
    quantization: RowQuantization | Fp8Quantization
    if fp8:
        quantization = Fp8Quantization(m, k, block_size, dtype, x_stride, fragments=True)
    else:
        exact = {"symmetric": True, "half_even": False, "wide": True}
        quantization = RowQuantization(m, k, block_size, dtype, **exact, x_stride=x_stride, fragments=True)
    options |= {"zero_points": spec.zeros == "packed", "scale_dtype": spec.dtype.name, "fp8": fp8}
    return quantization, Int8Problem(m, spec.n, k, block_size, 4, False, has_zeros, dtype, **options)


def linear_repacked(
    x: Array, weight: RepackedWeight, x_dtype: str, /, *, bias: Array | None, activation: Any, out: Array | None
) -> Array:
    """Compute `linear_int8` or `linear_fp8` for a weight of which `multiplies_repacked` is true.

    x [M, K] has 16 bits; ``x_dtype`` is "int8" or "fp8"; ``out`` is contiguous, or None.
    """
    import cupy

    spec, form, fp8 = weight.spec, check.validate_activation(activation), x_dtype == "fp8"
    m = len(x)
    with placement.use_device(spec.device):
        y = cupy.empty((m, spec.n), x.dtype) if out is None else out
        if not m:
            return y
        stride = row_stride(x)
        if stride is None or (x.data.ptr | stride * x.itemsize) % 16:
            x, stride = cupy.array(x, order="C"), spec.k
        quantization, product = make_problems(
            spec,
            m,
            dtype_name(x.dtype),
            stride,
            fp8=fp8,
            bias_dtype=None if bias is None else dtype_name(bias.dtype),
            activation=form.kind,
            limits=form.limits,
            even=y.data.ptr % 4 == 0,
            wide=y.data.ptr % 16 == 0,
        )
        codes, blocks = cupy.empty((m, spec.k), np.int8), -(-spec.k // product.block_size)
        scale = cupy.empty((m, 1 if fp8 else blocks), np.float32)
        sums = cupy.empty((m, blocks), np.float32 if fp8 else np.int32)
        buffers = {"x": x, "codes": codes, "scale": scale, "offset": None, "sums": sums}
        if fp8:
            buffers["half_sums"] = cupy.empty((m, half_sum_stride(spec.k, product.block_size)), np.float16)
        choose_kernel(quantization, spec.device).launch(buffers)
        buffers = {"xq": codes, "x_scale": scale, "x_row_scale": scale, "x_sums": sums}
        buffers |= {"weight": weight.repacked, "bias": bias, "y": y}
        choose_kernel(product, spec.device, GEMM_W4A8_MMA.NAME).launch(buffers)
    return y
