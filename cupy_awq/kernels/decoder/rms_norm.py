# SPDX-License-Identifier: Apache-2.0
"""``rms_norm``: RMSNorm of the residual stream, to which a result may be added first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.decoder.common import int32s, plan_launch
from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES
from cupy_awq.kernels.family import FunctionFamily, MemoryBoundProblem, SoleConfig, sole_configs, traffic_us
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan

NAME = "rms_norm"


@dataclass(frozen=True)
class RmsNormalization(MemoryBoundProblem):
    """An RMSNorm x [m, width] of the residual stream h [m, width], which is float32.

    Attributes:
        m: number of rows; each row is one token.
        width: number of columns.
        dtype: dtype of x and delta, "float16" or "bfloat16".
        eps: epsilon of the RMSNorm.
        delta: whether delta [m, width] is added to h first.
    """

    m: int
    width: int
    dtype: str
    eps: float
    delta: bool

    COMMON = tuple(
        (1, width, dtype, 1e-6, delta)
        for dtype in ("float16", "bfloat16")
        for width, delta in ((2048, False), (2048, True), (4096, True))
    )

    def __str__(self) -> str:
        added = " += delta" if self.delta else ""
        return f"x[{self.m}, {self.width}] {self.dtype} = rms_norm(h{added})"

    @property
    def nbytes(self) -> int:
        """The size of h, x and, with ``delta``, delta and the new h in bytes."""
        itemsize = ITEMSIZE[self.dtype]
        return self.m * self.width * (4 + itemsize + (4 + itemsize if self.delta else 0))


def plan(config: SoleConfig, problem: RmsNormalization, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are h, delta, weight, x and inverse_rms."""
    threads = 256 if problem.width <= 4096 else 1024
    vectors = ceil_div(problem.width, 4 * threads)
    defines: dict[str, int | str] = {
        "X": TYPES[problem.dtype],
        "HAS_DELTA": int(problem.delta),
        "VECTORS": vectors,
    }
    buffers = ("h", "delta", "weight", "x", "inverse_rms")
    arguments = (*buffers, *int32s(problem.width), np.float32(problem.eps))
    return plan_launch(device, NAME, defines, (problem.m, 1, 1), threads, arguments)


RMS_NORM = FunctionFamily(NAME, sole_configs, traffic_us, plan)
