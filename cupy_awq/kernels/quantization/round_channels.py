# SPDX-License-Identifier: Apache-2.0
"""``round_channels``: round a block of input channels in order; each rounding error changes the later targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.family import FunctionFamily, MemoryBoundProblem, SoleConfig, sole_configs, traffic_us
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "round_channels"
MAX_CHANNELS = 64
"""The largest number of channels per block."""
THREADS = 64
"""The number of threads per CTA."""


@dataclass(frozen=True)
class ChannelRounding(MemoryBoundProblem):
    """A rounding of a block of input channels of a weight.

    Attributes:
        channels: number of input channels, up to MAX_CHANNELS.
        n: number of output channels.
    """

    channels: int
    n: int

    COMMON = tuple((channels, 4096) for channels in (16, 32, 64))

    def __str__(self) -> str:
        return f"round W[{self.channels}, {self.n}]"

    @property
    def nbytes(self) -> int:
        """The size of target, bottom, top, codes and changes in bytes."""
        return 20 * self.channels * self.n


def refusal(problem: ChannelRounding, device: Device) -> str | None:
    return None if problem.channels <= MAX_CHANNELS else f"takes {MAX_CHANNELS} channels, not {problem.channels}"


def plan(config: SoleConfig, problem: ChannelRounding, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are ``target``, ``old`` (or None), ``factors``, ``bottom``, ``top``, ``codes`` and ``changes``, all
    contiguous float32; see ``cuda_src/quantization/round_channels.cu`` for their shapes.
    """
    defines = (("CHANNELS", problem.channels), ("THREADS", THREADS))
    kernel = Kernel("quantization/round_channels.cu", NAME, defines, device.target)
    buffers = "target", "old", "factors", "bottom", "top", "codes", "changes"
    grid = (ceil_div(problem.n, THREADS), 1, 1)
    return LaunchPlan(kernel, grid, (THREADS, 1, 1), (*buffers, np.int32(problem.n)))


ROUND_CHANNELS = FunctionFamily(NAME, sole_configs, traffic_us, plan, refusal)
