# SPDX-License-Identifier: Apache-2.0
"""``int_to_fp16``: conversion of packed 4-bit or 8-bit integers to float16, without zero points and scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.family import FunctionFamily, MemoryBoundProblem, SoleConfig, sole_configs, traffic_us
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "int_to_fp16"
VALUES = {"s4_to_fp16x2": 8, "int8_to_fp16": 4}
"""The number of values per 32-bit word, by the names of the kernels in ``cuda_src/dequantize/int_to_fp16.cu``."""
THREADS = 256
"""The number of threads per CTA, each for one word."""


@dataclass(frozen=True)
class Conversion(MemoryBoundProblem):
    """A validated conversion of ``count`` 32-bit words to float16.

    Attributes:
        entry: name of the kernel, a key of VALUES.
        count: number of 32-bit words.
        aligned: whether the result starts at a multiple of 16 bytes.
    """

    entry: str
    count: int
    aligned: bool

    COMMON = tuple((entry, 1, True) for entry in VALUES)

    def __str__(self) -> str:
        return f"float16[{self.count * VALUES[self.entry]}] = {self.entry}(words[{self.count}])"

    @property
    def nbytes(self) -> int:
        """The size of the words and of the result in bytes."""
        return self.count * (4 + 2 * VALUES[self.entry])


def plan(config: SoleConfig, problem: Conversion, device: Device) -> LaunchPlan:
    defines = (
        ("ALIGNED", int(problem.aligned)),
        ("PTX_PATH", int(device.has(Capability.INLINE_PTX))),
        ("THREADS", THREADS),
    )
    kernel = Kernel("dequantize/int_to_fp16.cu", problem.entry, defines, device.target)
    grid = (ceil_div(problem.count, THREADS), 1, 1)
    return LaunchPlan(kernel, grid, (THREADS, 1, 1), ("words", "out", np.int64(problem.count)))


INT_TO_FP16 = FunctionFamily(NAME, sole_configs, traffic_us, plan)
