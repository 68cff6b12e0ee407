# SPDX-License-Identifier: Apache-2.0
"""``s4_to_fp16x2`` and ``int8_to_fp16``: the launch of the kernels that convert words and do no more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.problem import PTX_ARCH, ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

THREADS = 256


@dataclass(frozen=True)
class Conversion:
    """``count`` words to convert by the kernel ``entry``, which makes ``values`` values of each.

    ``aligned``: the result starts at a multiple of 16 bytes.
    """

    entry: str
    values: int
    count: int
    aligned: bool

    def plan(self, device: Device) -> LaunchPlan:
        defines = (
            ("ALIGNED", int(self.aligned)),
            ("PTX_PATH", int(device.arch >= PTX_ARCH)),
            ("THREADS", THREADS),
        )
        kernel = Kernel("dequant/convert.cu", self.entry, defines, device.target)
        arguments = ("words", "out", np.int64(self.count))
        return LaunchPlan(kernel, (ceil_div(self.count, THREADS), 1, 1), (THREADS, 1, 1), arguments)
