# SPDX-License-Identifier: Apache-2.0
"""The repacked weight of `AwqLinear` on Hopper: a copy in the layout that the fastest kernels read."""

from __future__ import annotations

import math

import numpy as np

from cupy_awq.check import HOST, Array
from cupy_awq.kernels.repack import RepackedLayout
from cupy_awq.runtime import arrays, device, placement
from cupy_awq.runtime.launch import launch
from cupy_awq.weight import PackedWeight


class RepackedWeight(PackedWeight):
    """A `PackedWeight` with a repacked copy, and possibly without the original arrays.

    Attributes:
        repacked: uint8, the weight in the repacked layout (`RepackedLayout`).
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
        """The bytes of the original arrays, or of the repacked copy without them."""
        return int(super().nbytes if self.has_original else self.repacked.nbytes)

    @property
    def has_original(self) -> bool:
        """Whether the weight still has its arrays in the AWQ layout."""
        return self.qweight is not None

    def without_original(self) -> RepackedWeight:
        """Return the weight without its arrays in the AWQ layout, which are freed unless others refer to them."""
        weight = object.__new__(RepackedWeight)
        for name in ("spec", *RepackedWeight.__slots__):
            object.__setattr__(weight, name, getattr(self, name))
        for name in ("qweight", "scales", "qzeros"):
            object.__setattr__(weight, name, None)
        return weight


def repack(weight: PackedWeight) -> PackedWeight:
    """Return the weight with a repacked copy if it lies on a GPU of sm_90 and the layout can hold it, else itself."""
    spec = weight.spec
    if spec.device == HOST or device.of(spec.device).arch != 90:
        return weight
    layout = RepackedLayout(spec.k, spec.n, spec.group_size, spec.dtype.name, spec.zeros)
    if layout.refuse() is not None:
        return weight
    import cupy

    with placement.use_device(spec.device):
        out = cupy.empty(layout.nbytes, cupy.uint8)
        buffers = {"qweight": weight.qweight, "scales": weight.scales, "qzeros": weight.qzeros}
        strides = (
            arrays.leading_dimension(weight.qweight),
            arrays.leading_dimension(weight.scales),
            arrays.leading_dimension(weight.qzeros),
        )
        launch(layout.plan(device.of(spec.device), strides), {**buffers, "out": out})
        # Kernels prefetch the repacked weight before the preceding kernel finishes (PDL), so the repacking must have
        # finished by then: the copy to the host below synchronizes.
        bits = weight.scales.view(np.uint16) & 0x7FFF
        extremes = cupy.stack([bits.max(), cupy.where(bits == 0, 0x7FFF, bits).min()]).get().astype(np.uint16)
    max_exponent = 15 if spec.dtype == np.float16 else 127  # enough for any float16 scale; the most that float32 allows
    largest, smallest = map(float, extremes.view(spec.dtype))
    return RepackedWeight(weight, out, *scale_range(largest, smallest, max_exponent))


def scale_range(largest: float, smallest: float, max_exponent: int) -> tuple[int, bool]:
    """Return the exponent of a power of two that normalizes the scales, and whether float16 cannot hold all of them.

    The power is the greatest one, up to 2^``max_exponent``, with which the largest scale is at most 64. A weight is 1
    to 15 times a scale in size, so float16 holds the weights if the smallest nonzero scale times the power is a normal
    number, at least 2^-14.

    Args:
        largest, smallest: size of the largest and of the smallest nonzero scale.
        max_exponent: the largest exponent to return.

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
