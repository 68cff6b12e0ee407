# SPDX-License-Identifier: Apache-2.0
"""`Int8Weight`: the 8-bit weight of an `Int8Linear`, in the layout that the kernels of its GPU read."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import HOST, Array, WeightSpec
from cupy_awq.kernels.gemm.gemm_mma_fragments import GEMM_MMA_FRAGMENTS
from cupy_awq.kernels.gemm.layouts import FragmentLayout
from cupy_awq.kernels.gemm.problem import INT8_FRAGMENTS, INT8_ROWS, Problem
from cupy_awq.ops.repack import RepackedWeight, scale_exponent
from cupy_awq.runtime import device, placement


class Int8Weight(RepackedWeight):
    """An 8-bit weight in one of two layouts, with the attributes by which a `PreparedGemm` reads a weight.

    W[k, n] = (q[n, k] - 128) * s[n, g] + o[n, g] with g = k // group_size. In the fragment layout, all is in
    ``repacked``, and ``qweight``, ``scales`` and ``qzeros`` are None. Else these are q, uint8 [N, K], and s and o
    [N, groups], where ``qzeros`` is None without offsets.
    """

    __slots__ = ()

    def __init__(
        self, spec: WeightSpec, *arrays: Array | None, repacked: Array | None = None, scale_exponent: int = 0
    ) -> None:
        values = dict(zip(("qweight", "scales", "qzeros"), arrays or (None,) * 3, strict=True), spec=spec)
        values |= {"repacked": repacked, "scale_exponent": scale_exponent, "wide_scales": False}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def layouts(self) -> tuple[str, ...]:
        """The names of the layouts in which the weight is available, as `Problem.layouts` has them."""
        return (INT8_ROWS if self.has_original else INT8_FRAGMENTS,)

    def in_fragments(self) -> Int8Weight:
        """Return the weight in the fragment layout, with scales and offsets times 2**scale_exponent."""
        spec = self.spec
        parameters = [a for a in (self.scales, self.qzeros) if a is not None]
        exponent = scale_exponent(*parameters) if spec.dtype == np.float16 else 0
        layout = FragmentLayout(spec.k, spec.n, spec.group_size, spec.dtype.name, spec.zeros, spec.bits)
        scaled = [(a.astype(np.float32) * np.float32(2.0**exponent)).astype(spec.dtype) for a in parameters]
        return Int8Weight(spec, repacked=layout.arrange(self.qweight, scaled), scale_exponent=exponent)


def pack_int8(weight: BlockQuantizedWeight, dtype: np.dtype[Any], gated: bool) -> Int8Weight:
    """Return an 8-bit weight [N, 1, 1, K] for x of ``dtype``, in the fragment layout if kernels of its GPU read it.

    Scales and offsets are rounded to ``dtype``. On a GPU, the function synchronizes the current stream.
    """
    n, _, _, k = weight.shape
    zeros = "symmetric" if weight.offset is None else "float"
    spec = WeightSpec(k, n, min(weight.block_size, k), zeros, dtype, weight.device, bits=8)
    codes = weight.stored.reshape(n, k)
    if weight.device == HOST:
        return Int8Weight(spec, codes, *_rounded(weight, dtype))
    form = k, spec.group_size, dtype.name, dtype.name, zeros
    problem = Problem(1, n, *form, gated=gated, layouts=(INT8_FRAGMENTS,))
    with placement.use_device(weight.device):
        if GEMM_MMA_FRAGMENTS.refusal(problem, device.of(weight.device)) is None:
            packed = Int8Weight(spec, codes, weight.scale, weight.offset).in_fragments()
        else:
            if not codes.flags.c_contiguous or codes.data.ptr % 16:
                codes = codes.copy(order="C")
            packed = Int8Weight(spec, codes, *_rounded(weight, dtype))
    synchronize(weight.device)
    return packed


def synchronize(index: int) -> None:
    """Wait for the current stream of a GPU: kernels read a weight before the preceding kernel finishes (PDL)."""
    if index != HOST:
        import cupy

        with placement.use_device(index):
            cupy.cuda.get_current_stream().synchronize()


def _rounded(weight: BlockQuantizedWeight, dtype: np.dtype[Any]) -> list[Array | None]:
    """Return the scales and the offsets (or None), contiguous and rounded to ``dtype``."""
    return [a if a is None else a.astype(dtype, order="C") for a in (weight.scale, weight.offset)]
