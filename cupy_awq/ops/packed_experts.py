# SPDX-License-Identifier: Apache-2.0
"""`PackedExperts`: the stacked 4-bit weights of the experts of one projection."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from cupy_awq import check, check_scalar, expert_check
from cupy_awq.check import HOST, Array
from cupy_awq.kernels.experts.layer import ExpertForm, reads_fragments
from cupy_awq.kernels.gemm.layouts import FragmentLayout
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS
from cupy_awq.ops.repack import find_scaling
from cupy_awq.runtime import arrays, device, placement
from cupy_awq.runtime.launcher import launch


@dataclass(frozen=True, eq=False, repr=False, init=False)
class PackedExperts:
    """The weights W[e] [K, N] of E experts as 4-bit codes in AutoAWQ's "gemm" layout, stacked along a first axis.

        W[e, k, n] = (q[e, k, n] - z[e, g, n]) * s[e, g, n],  g = k // group_size

    `moe` and `gemm_grouped` take them. NumPy arrays are not copied. On a GPU with tensor cores of sm_75 or newer, the
    weights are repacked once, into the order in which the tensor cores consume them; this synchronizes the stream.
    `cupy_awq.checkpoint.stack` reads stacked weights from a file.

    Args:
        qweight: the codes, int32 [E, K, N/8], packed like those of `PackedWeight`.
        scales: the scales, float16 or bfloat16 [E, K/G, N].
        qzeros: the zero points, int32 [E, K/G, N/8]; None if every zero point is 8; or offsets o [E, K/G, N] in the
            dtype of the scales, for W = q * s + o.
        bias: the biases [E, N], float16, bfloat16 or float32, or None.
        keep_weight: True to keep the arrays besides the repacked weights, for x in float32.

    Attributes:
        qweight, scales, qzeros: the arrays, or None if they are not kept.
        bias: the biases, or None.
        repacked: the repacked weights, uint8 [E, bytes of an expert], or None.
        spec: the properties of the arrays.
        form: the same for the kernels, with the layout that they read.

    Raises:
        TypeError: an argument is not an array, lies on another device than the others, or has an unsupported dtype.
        ValueError: the shapes contradict each other, or an array is not contiguous.
        MemoryError: the memory of the GPU is exhausted.

    >>> import numpy as np
    >>> PackedExperts(np.zeros((8, 64, 2), np.int32), np.ones((8, 2, 16), np.float16), None)
    PackedExperts(E=8, K=64, N=16, group_size=32, float16, symmetric zeros)
    """

    qweight: Array | None
    scales: Array | None
    qzeros: Array | None
    bias: Array | None
    repacked: Array | None
    spec: expert_check.ExpertsSpec
    form: ExpertForm

    def __init__(
        self,
        qweight: Array,
        scales: Array,
        qzeros: Array | None,
        /,
        *,
        bias: Array | None = None,
        keep_weight: bool = False,
    ) -> None:
        qweight, scales, qzeros, bias = arrays.views(qweight=qweight, scales=scales, qzeros=qzeros, bias=bias)
        spec = expert_check.validate_experts(qweight, scales, qzeros, bias)
        check_scalar.validate_flag(keep_weight, "keep_weight")
        weight = spec.weight
        form = ExpertForm(
            spec.experts,
            weight.k,
            weight.n,
            weight.group_size,
            weight.dtype.name,
            weight.zeros,
            None if bias is None else bias.dtype.name,
        )
        repacked = None
        if weight.device != HOST:
            repacked, form = _repack(qweight, scales, qzeros, form, weight.device)
        if repacked is not None and not keep_weight:
            qweight = scales = qzeros = None
        values = qweight, scales, qzeros, bias, repacked, spec, form
        for field, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)  # the dataclass is frozen

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (E, K, N)."""
        return self.spec.experts, self.spec.weight.k, self.spec.weight.n

    @property
    def buffers(self) -> dict[str, Array | None]:
        """The arrays by the names of the kernels' buffers."""
        return {
            "weight": self.repacked,
            "qweight": self.qweight,
            "scales": self.scales,
            "qzeros": self.qzeros,
            "bias": self.bias,
        }

    def form_for(self, dtype: np.dtype[np.generic]) -> ExpertForm:
        """Return the properties of the weights in the layout that kernels read for x of a dtype.

        Raises:
            TypeError: no kernel reads the repacked weights for x of this dtype, such as float32, and the arrays in the
                AWQ layout are not kept.
        """
        if self.repacked is None:
            return self.form
        gpu = device.of(self.spec.weight.device)
        served = [name for name in ("float16", "bfloat16") if reads_fragments(self.form, name, gpu)]
        if dtype.name in served:
            return self.form
        if self.qweight is None:
            raise TypeError(f"x: expected {' or '.join(served)} for weights without keep_weight=True, got {dtype}")
        return self.form._replace(layout=AWQ)

    def __repr__(self) -> str:
        experts, (k, n, group_size, zeros, dtype, index, _) = self.spec
        place = "" if index == check.HOST else f", GPU {index}"
        return f"PackedExperts(E={experts}, K={k}, N={n}, group_size={group_size}, {dtype}, {zeros} zeros{place})"


def _repack(
    qweight: Array, scales: Array, qzeros: Array | None, form: ExpertForm, index: int
) -> tuple[Array | None, ExpertForm]:
    """Return the weights in the fragment layout and their properties, or None if no kernel of the GPU reads it."""
    gpu = device.of(index)
    layout = FragmentLayout(form.k, form.n, form.group_size, form.scales_dtype, form.zeros)
    if not reads_fragments(form, form.scales_dtype, gpu):
        return None, form
    import cupy

    with placement.use_device(index):
        out = cupy.empty((form.experts, layout.nbytes), cupy.uint8)
        plan = layout.pack(gpu)
        for expert in range(form.experts):
            zeros = None if qzeros is None else qzeros[expert]
            parts = {"qweight": qweight[expert], "scales": scales[expert], "qzeros": zeros, "out": out[expert]}
            launch(plan, parts, index)
        # Kernels may read the weights before the preceding kernel finishes (PDL); a copy to the host synchronizes.
        exponent, is_wide = find_scaling(scales, qzeros, form.zeros)
    return out, form._replace(layout=FRAGMENTS, scale_exponent=exponent, wide_scales=is_wide)


def check_experts(weight: object, name: str) -> None:
    """Raise TypeError unless ``weight``, the argument called ``name``, is a `PackedExperts`."""
    if not isinstance(weight, PackedExperts):
        raise TypeError(f"{name}: expected a PackedExperts, got {type(weight).__name__}")
