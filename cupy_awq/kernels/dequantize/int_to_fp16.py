# SPDX-License-Identifier: Apache-2.0
"""``convert``: conversion of packed 4-bit or 8-bit integers to float16, without zero points and scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.family import FunctionFamily, KernelProblem
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "int_to_fp16"
VALUES = {"s4_to_fp16x2": 8, "int8_to_fp16": 4}
"""The number of values per 32-bit word, by the names of the kernels in ``cuda_src/dequantize/int_to_fp16.cu``."""


@dataclass(frozen=True)
class Conversion(KernelProblem):
    """A validated conversion of ``count`` 32-bit words to float16.

    Attributes:
        entry: name of the kernel, a key of VALUES.
        count: number of 32-bit words.
        aligned: whether the result starts at a multiple of 16 bytes.
    """

    entry: str
    count: int
    aligned: bool

    def __str__(self) -> str:
        return f"float16[{self.count * VALUES[self.entry]}] = {self.entry}(words[{self.count}])"

    @classmethod
    def common_problems(cls) -> Iterator[Conversion]:
        """Yield a conversion of each kind, which the compile command compiles in advance."""
        for entry in VALUES:
            yield cls(entry, 1, True)


@dataclass(frozen=True)
class ConvertConfig:
    """A configuration of ``convert``, which has one thread per 32-bit word.

    Attributes:
        threads: number of threads per CTA.
    """

    threads: int = 256

    split_k = 1


def configs(problem: Conversion, device: Device) -> list[ConvertConfig]:
    return [ConvertConfig()]


def estimate_us(config: ConvertConfig, problem: Conversion, device: Device) -> float:
    """Return the run time in microseconds: the memory traffic at the nominal bandwidth."""
    return device.rates.launch_us + device.read_us(problem.count * (4 + 2 * VALUES[problem.entry]))


def plan(config: ConvertConfig, problem: Conversion, device: Device) -> LaunchPlan:
    defines = (
        ("ALIGNED", int(problem.aligned)),
        ("PTX_PATH", int(device.has(Capability.INLINE_PTX))),
        ("THREADS", config.threads),
    )
    kernel = Kernel("dequantize/int_to_fp16.cu", problem.entry, defines, device.target)
    grid = (ceil_div(problem.count, config.threads), 1, 1)
    return LaunchPlan(kernel, grid, (config.threads, 1, 1), ("words", "out", np.int64(problem.count)))


INT_TO_FP16 = FunctionFamily(NAME, configs, estimate_us, plan)
