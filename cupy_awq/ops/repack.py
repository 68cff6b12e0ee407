# SPDX-License-Identifier: Apache-2.0
"""A weight prepared for its GPU: beside AWQ's own layout the one from which the GPU's fastest kernels read it."""

from __future__ import annotations

import math

import numpy as np

from cupy_awq.check import HOST, Array
from cupy_awq.kernels.repack import RepackedLayout
from cupy_awq.runtime import arrays, device, placement
from cupy_awq.runtime.launch import launch
from cupy_awq.weight import PackedWeight


class RepackedWeight(PackedWeight):
    """A weight; ``repacked``: a copy of it in the repacked layout; and its scales' range as `Problem` has it."""

    __slots__ = ("repacked", "scale_exponent", "wide_scales")

    repacked: Array
    scale_exponent: int
    wide_scales: bool

    def __init__(self, weight: PackedWeight, repacked: Array, scale_exponent: int, wide_scales: bool) -> None:
        super().__init__(weight.qweight, weight.scales, weight.qzeros)
        object.__setattr__(self, "repacked", repacked)
        object.__setattr__(self, "scale_exponent", scale_exponent)
        object.__setattr__(self, "wide_scales", wide_scales)

    @property
    def nbytes(self) -> int:
        return int(super().nbytes if self.kept else self.repacked.nbytes)

    @property
    def kept(self) -> bool:
        """Whether AWQ's own arrays are still there."""
        return self.qweight is not None

    def alone(self) -> RepackedWeight:
        """The weight without AWQ's own arrays, whose memory is free when nobody else holds them."""
        weight = object.__new__(RepackedWeight)
        for name in ("spec", *RepackedWeight.__slots__):
            object.__setattr__(weight, name, getattr(self, name))
        for name in ("qweight", "scales", "qzeros"):
            object.__setattr__(weight, name, None)
        return weight


def repack(weight: PackedWeight) -> PackedWeight:
    """The weight with its repacked copy where that serves: on a GPU of sm_90, in a form that the layout has."""
    facts = weight.spec
    if facts.device == HOST or device.of(facts.device).arch != 90:
        return weight
    layout = RepackedLayout(facts.k, facts.n, facts.group_size, facts.dtype.name, facts.zeros)
    if layout.refuse() is not None:
        return weight
    import cupy

    with placement.use_device(facts.device):
        out = cupy.empty(layout.nbytes, cupy.uint8)
        buffers = {"qweight": weight.qweight, "scales": weight.scales, "qzeros": weight.qzeros}
        steps = (
            arrays.leading_dimension(weight.qweight),
            arrays.leading_dimension(weight.scales),
            arrays.leading_dimension(weight.qzeros),
        )
        launch(layout.plan(device.of(facts.device), steps), {**buffers, "out": out})
        # Kernels that read it begin before their predecessor ends: this one must have ended by then, so the host waits
        # for what comes after it.
        bits = weight.scales.view(np.uint16) & 0x7FFF
        ends = cupy.stack([bits.max(), cupy.where(bits == 0, 0x7FFF, bits).min()]).get().astype(np.uint16)
    most = 15 if facts.dtype == np.float16 else 127  # enough for what float16 holds, and the largest that it does
    largest, smallest = map(float, ends.view(facts.dtype))
    return RepackedWeight(weight, out, *scale_range(largest, smallest, most))


def scale_range(largest: float, smallest: float, most: int) -> tuple[int, bool]:
    """The exponent of a power of two for all scales, and whether float16 fails to hold some of them times that.

    The power is the greatest, up to 2^``most``, with which the ``largest`` is at most 64; ``smallest`` is that of the
    scales which are not zero.

    A weight is at most 15 scales, and at least one: within float16's normal numbers from 2^-14 to 65504.

    >>> scale_range(0.02, 0.001, 15), scale_range(2.0**-20, 2.0**-24, 15), scale_range(1.0, 2.0**-21, 127)
    ((11, False), (15, False), (0, True))
    """
    if largest == 0:
        return 0, False
    if not np.isfinite(largest):
        return 0, True
    mantissa, power = math.frexp(largest)
    exponent = min(most, (7 if mantissa == 0.5 else 6) - power)
    wide = abs(exponent) > 100 or smallest * 2.0**exponent < 2.0**-14
    return (0, True) if wide else (exponent, False)
