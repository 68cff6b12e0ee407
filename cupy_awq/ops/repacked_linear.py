# SPDX-License-Identifier: Apache-2.0
"""`linear_repacked_int8`: int8 activations times the repacked weight of an `AwqLinear`, which 16-bit x shares."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq import check
from cupy_awq.check import HOST, Array, WeightSpec
from cupy_awq.kernels import select
from cupy_awq.kernels.gemm.layouts import FragmentLayout
from cupy_awq.kernels.gemm.problem import FRAGMENTS
from cupy_awq.kernels.int8.gemm_w4a8_mma import GEMM_W4A8_MMA
from cupy_awq.kernels.int8.problem import Int8Problem
from cupy_awq.kernels.int8.quantize_rows import RowQuantization
from cupy_awq.ops.chosen_kernel import choose_kernel
from cupy_awq.ops.repack import RepackedWeight
from cupy_awq.runtime import device, placement
from cupy_awq.runtime.arrays import dtype_name, row_stride


def multiplies_repacked(spec: WeightSpec) -> bool:
    """Return whether `linear_repacked_int8` multiplies by the repacked copy of a weight on its device."""
    if spec.device == HOST:
        return False
    form = spec.k, spec.n, spec.group_size, spec.dtype.name, spec.zeros
    gpu = device.of(spec.device)
    _, product = make_problems(spec, 1, "float16")
    is_legal = GEMM_W4A8_MMA.refusal(product, gpu) is None and FragmentLayout(*form).groups == 1
    return is_legal and FRAGMENTS in select.weight_layouts(*form, gpu)


def make_problems(
    spec: WeightSpec, m: int, dtype: str, x_stride: int | None = None, **options: Any
) -> tuple[RowQuantization, Int8Problem]:
    """Return the quantization of x [m, K] and the GEMM of a layer; ``options`` are further fields of the latter."""
    k, has_zeros = spec.k, spec.zeros != "symmetric"
    quantization = RowQuantization(
        m, k, spec.group_size, dtype, symmetric=True, half_even=False, wide=True, x_stride=x_stride or k, fragments=True
    )
    options |= {"zero_points": spec.zeros == "packed", "scale_dtype": spec.dtype.name}
    return quantization, Int8Problem(m, spec.n, k, spec.group_size, 4, False, has_zeros, dtype, **options)


def linear_repacked_int8(
    x: Array, weight: RepackedWeight, /, *, bias: Array | None, activation: Any, out: Array | None
) -> Array:
    """Compute `linear_int8` for a weight of which `multiplies_repacked` is true; x [M, K] has 16 bits.

    ``out`` is contiguous, or None.
    """
    import cupy

    spec, form = weight.spec, check.validate_activation(activation)
    m, shape = len(x), (len(x), spec.k // spec.group_size)
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
            bias_dtype=None if bias is None else dtype_name(bias.dtype),
            activation=form.kind,
            limits=form.limits,
            even=y.data.ptr % 4 == 0,
            wide=y.data.ptr % 16 == 0,
        )
        codes, scale = cupy.empty((m, spec.k), np.int8), cupy.empty(shape, np.float32)
        buffers = {"x": x, "codes": codes, "scale": scale, "offset": None, "sums": cupy.empty(shape, np.int32)}
        choose_kernel(quantization, spec.device).launch(buffers)
        buffers = {"xq": codes, "x_scale": scale, "weight": weight.repacked, "bias": bias, "y": y}
        choose_kernel(product, spec.device, GEMM_W4A8_MMA.NAME).launch(buffers)
    return y
