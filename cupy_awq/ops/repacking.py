# SPDX-License-Identifier: Apache-2.0
"""A weight prepared for its GPU: beside AWQ's own layout the one from which the GPU's fastest kernels read it."""

from __future__ import annotations

from cupy_awq import device, placement
from cupy_awq.check import HOST, Array
from cupy_awq.kernels.repack import Repacking
from cupy_awq.launch import launch
from cupy_awq.ops import gpu
from cupy_awq.weight import PackedWeight


class RepackedWeight(PackedWeight):
    """A weight and, in ``repacked``, a copy of it in the layout of `Repacking`."""

    __slots__ = ("repacked",)

    repacked: Array

    def __init__(self, weight: PackedWeight, repacked: Array) -> None:
        super().__init__(weight.qweight, weight.scales, weight.qzeros)
        object.__setattr__(self, "repacked", repacked)


def repack(weight: PackedWeight) -> PackedWeight:
    """The weight with its repacked copy where that serves: on a GPU of sm_90, in a form that the layout has."""
    facts = weight.facts
    if facts.device == HOST or device.of(facts.device).arch != 90:
        return weight
    layout = Repacking(facts.k, facts.n, facts.group_size, facts.dtype.name, facts.zeros)
    if layout.refuse() is not None:
        return weight
    import cupy

    with placement.on(facts.device):
        out = cupy.empty(layout.nbytes, cupy.uint8)
        arrays = {"qweight": weight.qweight, "scales": weight.scales, "qzeros": weight.qzeros}
        steps = gpu.row_stride(weight.qweight), gpu.row_stride(weight.scales), gpu.row_stride(weight.qzeros)
        launch(layout.plan(device.of(facts.device), steps), {**arrays, "out": out})
        # Kernels that read it begin before their predecessor ends, which must not be this one.
        cupy.cuda.get_current_stream().synchronize()
    return RepackedWeight(weight, out)
