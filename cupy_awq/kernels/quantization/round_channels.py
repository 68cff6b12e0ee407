# SPDX-License-Identifier: Apache-2.0
"""``round_channels``: round a block of input channels in order; each rounding error changes the later targets."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from cupy_awq.kernels.gemm.problem import ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "round_channels"
MAX_CHANNELS = 64
"""The largest number of channels per block."""
THREADS = 64
"""The number of threads per CTA."""


@functools.lru_cache(maxsize=1024)
def plan(device: Device, channels: int, n: int) -> LaunchPlan:
    """Return the launch plan for a block of ``channels`` input channels of a weight with ``n`` output channels.

    The buffers are ``target``, ``old`` (or None), ``factors``, ``bottom``, ``top``, ``codes`` and ``changes``, all
    contiguous float32; see ``cuda_src/quantization/round_channels.cu`` for their shapes.
    """
    kernel = Kernel(
        "quantization/round_channels.cu", NAME, (("CHANNELS", channels), ("THREADS", THREADS)), device.target
    )
    buffers = "target", "old", "factors", "bottom", "top", "codes", "changes"
    return LaunchPlan(kernel, (ceil_div(n, THREADS), 1, 1), (THREADS, 1, 1), (*buffers, np.int32(n)))


def kernels(device: Device) -> Iterator[Kernel]:
    """Yield the kernels for the group sizes that are powers of two."""
    for channels in (16, 32, 64):
        yield plan(device, channels, 4096).kernel
