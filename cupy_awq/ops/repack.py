# SPDX-License-Identifier: Apache-2.0
"""Weights in the repacked layout, which the fastest kernels of Hopper read."""

from __future__ import annotations

import math

import numpy as np

from cupy_awq.check import HOST, Array
from cupy_awq.kernels.repack import Repacking
from cupy_awq.runtime import arrays, device, placement
from cupy_awq.runtime.launch import launch
from cupy_awq.weight import PackedWeight


class RepackedWeight(PackedWeight):
    """A weight with a copy in the repacked layout.

    Attributes:
        repacked: the copy, uint8, in the layout of `Repacking`.
        scale_exponent, wide_scales: the range of the scales, as in `Problem`.
    """

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
        """The bytes of the AWQ tensors, or of the copy if it is alone."""
        return int(super().nbytes if self.kept else self.repacked.nbytes)

    @property
    def kept(self) -> bool:
        """Whether the weight still holds the AWQ tensors."""
        return self.qweight is not None

    def alone(self) -> RepackedWeight:
        """Return the weight without the AWQ tensors, so that their memory can be freed."""
        weight = object.__new__(RepackedWeight)
        for name in ("spec", *RepackedWeight.__slots__):
            object.__setattr__(weight, name, getattr(self, name))
        for name in ("qweight", "scales", "qzeros"):
            object.__setattr__(weight, name, None)
        return weight


def repack(weight: PackedWeight) -> PackedWeight:
    """Return the weight with a repacked copy, or the weight itself if the GPU or the layout cannot use one."""
    facts = weight.spec
    if facts.device == HOST or device.of(facts.device).arch != 90:
        return weight
    layout = Repacking(facts.k, facts.n, facts.group_size, facts.dtype.name, facts.zeros)
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
        # Kernels may read the copy before their predecessor in the stream finishes (PDL), so the host waits here until
        # the repack kernel has finished: reading the range of the scales synchronizes.
        bits = weight.scales.view(np.uint16) & 0x7FFF
        extremes = cupy.stack([bits.max(), cupy.where(bits == 0, 0x7FFF, bits).min()]).get().astype(np.uint16)
    max_exponent = 15 if facts.dtype == np.float16 else 127
    largest, smallest = map(float, extremes.view(facts.dtype))
    return RepackedWeight(weight, out, *scale_range(largest, smallest, max_exponent))


def scale_range(largest: float, smallest: float, max_exponent: int) -> tuple[int, bool]:
    """Return an exponent e, and whether float16 fails to hold some scales times 2^e.

    ``largest`` and ``smallest`` are the magnitudes of the scales that are not zero. e is the greatest exponent, at most
    ``max_exponent``, for which the largest scale times 2^e is at most 64. A weight is between 1 and 15 scales, so all
    weights are normal numbers of float16, 2^-14 to 65504, if the smallest scale times 2^e is at least 2^-14.

    >>> scale_range(0.02, 0.001, 15), scale_range(2.0**-20, 2.0**-24, 15), scale_range(1.0, 2.0**-21, 127)
    ((11, False), (15, False), (0, True))
    """
    if largest == 0:
        return 0, False
    if not np.isfinite(largest):
        return 0, True
    mantissa, power = math.frexp(largest)
    exponent = min(max_exponent, (7 if mantissa == 0.5 else 6) - power)
    wide = abs(exponent) > 100 or smallest * 2.0**exponent < 2.0**-14
    return (0, True) if wide else (exponent, False)
