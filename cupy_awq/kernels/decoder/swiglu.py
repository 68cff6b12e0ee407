# SPDX-License-Identifier: Apache-2.0
"""``swiglu``: the SwiGLU activation of a gate and an up projection."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_awq.kernels.decoder.common import THREADS, int32s, plan_launch
from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES
from cupy_awq.kernels.family import FunctionFamily, MemoryBoundProblem, SoleConfig, sole_configs, traffic_us
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan

NAME = "swiglu"


@dataclass(frozen=True)
class GatedActivation(MemoryBoundProblem):
    """A SwiGLU activation y [m, width] = silu(gate) * up of x = (gate, up) [m, 2 * width].

    Attributes:
        m: number of rows; each row is one token.
        width: number of columns of y.
        dtype: dtype of x and y, "float16" or "bfloat16".
    """

    m: int
    width: int
    dtype: str

    COMMON = tuple((1, 8, dtype) for dtype in ("float16", "bfloat16"))

    def __str__(self) -> str:
        return f"y[{self.m}, {self.width}] {self.dtype} = silu(gate) * up"

    @property
    def nbytes(self) -> int:
        """The size of x and y in bytes."""
        return 3 * self.m * self.width * ITEMSIZE[self.dtype]


def plan(config: SoleConfig, problem: GatedActivation, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are x and y."""
    grid = (ceil_div(problem.width, THREADS), problem.m, 1)
    arguments = ("x", "y", *int32s(problem.width))
    return plan_launch(device, NAME, {"X": TYPES[problem.dtype]}, grid, THREADS, arguments)


SWIGLU = FunctionFamily(NAME, sole_configs, traffic_us, plan)
