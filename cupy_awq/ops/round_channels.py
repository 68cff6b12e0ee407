# SPDX-License-Identifier: Apache-2.0
"""The rounding of a block of input channels on a GPU, for the quantizer."""

from __future__ import annotations

import numpy as np

from cupy_awq import check
from cupy_awq.check import Array
from cupy_awq.kernels import round_channels as kernel
from cupy_awq.runtime import arrays, device
from cupy_awq.runtime.launch import get_launcher


def round_channels(target: Array, old: Array, factors: Array, bottom: Array, top: Array) -> tuple[Array, Array]:
    """Return (codes, changes), float32 [B, N] each, of B channels on the current GPU, which are rounded in order.

    The change of channel j is its code minus ``old[j]``. It reduces the target of every later channel k by
    factors[j, k] * change.

    Args:
        target: the codes before rounding, float32 [B, N], B at most 64; it is not modified.
        old: the codes that changes refer to, float32 [B, N]; ``target`` itself for the reduced targets.
        factors: the factors of the changes, float32 [B, B].
        bottom, top: the smallest and the largest code of each output channel, float32 [N].
    """
    import cupy

    index = check.device_id(target, "target")
    contiguous = [cupy.ascontiguousarray(a, np.float32) for a in (target, factors, bottom, top)]
    before = None if old is target else cupy.ascontiguousarray(old, np.float32)
    codes, changes = (cupy.empty(target.shape, np.float32) for _ in range(2))
    launcher = get_launcher(kernel.plan(device.of(index), *target.shape), index)
    inputs = contiguous[0], before, *contiguous[1:]
    launcher(tuple(map(arrays.address, (*inputs, codes, changes))), cupy.cuda.get_current_stream().ptr)
    return codes, changes
