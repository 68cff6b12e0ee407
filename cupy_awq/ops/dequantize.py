# SPDX-License-Identifier: Apache-2.0
"""``dequantize``: dequantization of a 4-bit weight in the AWQ layout to a floating-point matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq import check, reference
from cupy_awq.check import Array
from cupy_awq.kernels.dequantize.dequantize import Dequantization
from cupy_awq.ops.chosen_kernel import choose_kernel
from cupy_awq.runtime import arrays, placement
from cupy_awq.weight import PackedWeight


def dequantize(
    qweight: Array, scales: Array, qzeros: Array | None, /, *, dtype: Any = None, out: Array | None = None
) -> Array:
    """Return W [K, N], W[k, n] = (q[k, n] - z[g, n]) * s[g, n] with g = k // group_size, rounded once to ``dtype``.

    Args:
        qweight: [K, N/8] int32, codes in AWQ order (see `PackedWeight`).
        scales: [K/G, N] float16 or bfloat16.
        qzeros: [K/G, N/8] int32 zero points; None if all zero points are 8; or [K/G, N] offsets o with the dtype of the
            scales, for W = q * s + o.
        dtype: dtype of W: float16, bfloat16 or float32; by default the dtype of the scales.
        out: [K, N] array of ``dtype`` to fill and return.

    Either all arrays are in host memory (NumPy), or all are on one GPU. Slices are not copied, because any row stride
    is supported.

    Returns:
        W: a NumPy array, or a CuPy array on the GPU.

    Raises:
        TypeError, ValueError: an array has a wrong dtype, shape or device; the message names the array.

    >>> import numpy as np
    >>> import cupy_awq
    >>> qweight = cupy_awq.pack_int4(np.arange(16, dtype=np.uint8)[None].repeat(32, 0))
    >>> cupy_awq.dequantize(qweight, np.ones((1, 16), np.float16), None)[0, :4]
    array([-8., -7., -6., -5.], dtype=float16)
    """
    qweight, scales, qzeros, out = arrays.views(qweight=qweight, scales=scales, qzeros=qzeros, out=out)
    weight = PackedWeight(qweight, scales, qzeros)
    spec, to = weight.spec, reference.validate_dequantization(weight, dtype, out)
    if spec.device == check.HOST:
        return reference.dequantize_validated(weight, np.empty(weight.shape, to) if out is None else out)
    import cupy

    with placement.use_device(spec.device):
        w = out if out is not None and arrays.row_stride(out) is not None else cupy.empty((spec.k, spec.n), to)
        offsets = qzeros if spec.zeros == "float" else None
        strides = tuple(map(arrays.leading_dimension, (qweight, scales, qzeros, w)))
        problem = Dequantization(
            spec.k,
            spec.n,
            spec.group_size,
            arrays.dtype_name(spec.dtype),
            spec.zeros,
            arrays.dtype_name(to),
            arrays.is_aligned(scales, offsets, w),
            strides,
        )
        choose_kernel(problem, spec.device).launch(weight.tensors | {"out": w})
        return arrays.deliver(w, out)
