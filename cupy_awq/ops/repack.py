# SPDX-License-Identifier: Apache-2.0
"""The repacked weight of `AwqLinear`: a copy of the weight in the layout of the fastest kernels of its GPU."""

from __future__ import annotations

import math

import numpy as np

from cupy_awq.check import HOST, Array
from cupy_awq.kernels import select
from cupy_awq.kernels.gemm.layouts import FragmentLayout
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS
from cupy_awq.runtime import arrays, device, placement
from cupy_awq.runtime.launcher import launch
from cupy_awq.weight import PackedWeight

LARGEST_WEIGHT = 13
"""The exponent of the power of two up to which float16 weights are scaled; float16 ends at 2**16."""
MAX_EXPONENT = 100
"""The largest magnitude of the exponent: float32 holds its power of two and the inverse of it."""


class RepackedWeight(PackedWeight):
    """A `PackedWeight` with a repacked copy; the original arrays may have been freed.

    Attributes:
        repacked: weight in the fragment layout (`FragmentLayout`), as a uint8 array.
        scale_exponent: exponent such that every scale times 2**scale_exponent is at most 64.
        wide_scales: whether some scale times 2**scale_exponent would lose bits in float16.
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
        """The size in bytes of the arrays in the AWQ layout, or of the repacked copy if these arrays are freed."""
        return int(super().nbytes if self.has_original else self.repacked.nbytes)

    @property
    def has_original(self) -> bool:
        """Whether the weight still has its arrays in the AWQ layout."""
        return self.qweight is not None

    @property
    def layouts(self) -> tuple[str, ...]:
        """The names of the layouts in which the weight is available, as for `Problem.layouts`."""
        return (AWQ, FRAGMENTS) if self.has_original else (FRAGMENTS,)

    def without_original(self) -> RepackedWeight:
        """Return the weight without the arrays in the AWQ layout, which are freed unless referenced elsewhere."""
        weight = object.__new__(RepackedWeight)
        for name in ("spec", *RepackedWeight.__slots__):
            object.__setattr__(weight, name, getattr(self, name))
        for name in ("qweight", "scales", "qzeros"):
            object.__setattr__(weight, name, None)
        return weight


def repack(weight: PackedWeight) -> PackedWeight:
    """Return the weight with a repacked copy, or the unchanged weight if no kernel of its GPU would read the copy."""
    spec = weight.spec
    if spec.device == HOST:
        return weight
    form = spec.k, spec.n, spec.group_size, spec.dtype.name, spec.zeros
    if FRAGMENTS not in select.weight_layouts(*form, device.of(spec.device)):
        return weight
    layout = FragmentLayout(*form)
    import cupy

    with placement.use_device(spec.device):
        out = cupy.empty(layout.nbytes, cupy.uint8)
        buffers = weight.tensors
        strides = tuple(map(arrays.leading_dimension, buffers.values()))
        launch(layout.pack(device.of(spec.device), strides), {**buffers, "out": out}, spec.device)
        # Kernels may read the repacked weight before the preceding kernel finishes (PDL), so wait for the repacking:
        # the copy of the scales to the host synchronizes.
        return RepackedWeight(weight, out, *find_scaling(weight.scales, weight.qzeros, spec.zeros))


def find_scaling(scales: Array, qzeros: Array | None, zeros: str) -> tuple[int, bool]:
    """Return ``scale_exponent`` and ``wide_scales`` of `Problem` for a weight with these scales and zero points.

    ``zeros`` is the kind of the zero points, as in `Problem`. NumPy computes the extremes, because CuPy's reductions
    import SciPy, which takes 0.6 s.
    """
    host = scales if isinstance(scales, np.ndarray) else scales.get()
    # 2**15 makes the smallest float16 scale, 2**-24, a normal number; 2**127 is the largest power of two in float32.
    max_exponent = 15 if host.dtype == np.float16 else 127
    if zeros == "float":
        return min(max_exponent, scale_exponent(host, qzeros)), False
    magnitudes = host.view(np.uint16) & 0x7FFF
    # Subtracting 1 wraps the bits of a zero to the largest integer, so the minimum is that of the nonzero scales.
    extremes = np.array([magnitudes.max(), min((magnitudes - np.uint16(1)).min(), 0x7FFE) + 1], np.uint16)
    largest, smallest = map(float, extremes.view(host.dtype))
    return scale_range(largest, smallest, max_exponent)


def scale_range(largest: float, smallest: float, max_exponent: int) -> tuple[int, bool]:
    """Return ``scale_exponent`` and ``wide_scales`` of `Problem` for a weight.

    The exponent is the largest one, up to ``max_exponent``, for which the largest scale times 2**exponent is at most
    64. The magnitude of a nonzero weight is 1 to 15 times the scale, so float16 represents all weights as normal
    numbers if the smallest nonzero scale times 2**exponent is at least 2**-14.

    Args:
        largest: magnitude of the largest scale.
        smallest: magnitude of the smallest nonzero scale.
        max_exponent: largest exponent to return.

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


def scale_exponent(scales: Array, offsets: Array | None = None) -> int:
    """Return the exponent of the power of two that moves float16 weights up, so that small ones are normal numbers.

    The largest weight is then at most 2**LARGEST_WEIGHT.

    >>> scale_exponent(np.full((1, 1), 0.001)), scale_exponent(np.ones((1, 1)), np.full((1, 1), 4000.0))
    (15, 0)
    """
    arrays = (a.get() if hasattr(a, "get") else a for a in (scales, offsets) if a is not None)
    extremes = [float(np.abs(a).max()) for a in arrays]
    largest = 128 * extremes[0] + sum(extremes[1:])
    if not 0 < largest < math.inf:
        return 0
    return max(-MAX_EXPONENT, min(MAX_EXPONENT, LARGEST_WEIGHT - math.ceil(math.log2(largest))))
