# SPDX-License-Identifier: Apache-2.0
"""``gather_columns``: gather the columns of x in the order in which a weight's rows are sorted (activation order)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES
from cupy_awq.kernels.family import FunctionFamily, MemoryBoundProblem, SoleConfig, sole_configs, traffic_us
from cupy_awq.kernels.gemm.gemm_sm90 import GEMM_SM90
from cupy_awq.kernels.gemm.problem import Problem
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "gather_columns"
DIRECT_ROWS = 16
"""The largest M for which columns are gathered from global memory; for larger M, rows are staged in shared memory."""
DIRECT_THREADS, STAGED_THREADS = 64, 512
"""The numbers of threads per CTA without and with staging in shared memory."""
MAX_GRID = 65535
"""The largest value of gridDim.y."""
THREADS_PER_SM = 2048
"""The number of resident threads per SM for which the grid is sized."""


@dataclass(frozen=True)
class ColumnGather(MemoryBoundProblem):
    """A gather y [m, k] = x [m, order].

    Attributes:
        m, k: numbers of rows and columns of x.
        dtype: dtype of x and y: float16, bfloat16 or float32.
        x_stride: row stride of x in elements.
        x_aligned: whether all rows of x start at multiples of 16 bytes, 32 for float32.
    """

    m: int
    k: int
    dtype: str
    x_stride: int
    x_aligned: bool

    COMMON = tuple((m, 4096, dtype, 4096, True) for dtype in ("float16", "float32") for m in (1, 2 * DIRECT_ROWS))

    def __str__(self) -> str:
        return f"y[{self.m}, {self.k}] {self.dtype} = x[:, order]"

    @property
    def row_bytes(self) -> int:
        """The size of a row of x in bytes."""
        return self.k * ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """The size of x, y and the order in bytes."""
        return 2 * self.m * self.row_bytes + 4 * self.k


def plan(config: SoleConfig, problem: ColumnGather, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are ``x``, ``order`` (int32 [k], a permutation) and ``y`` (contiguous); ``order`` and ``y`` are
    aligned to 32 bytes.
    """
    m, k, row_bytes = problem.m, problem.k, problem.row_bytes
    is_wide = k % 8 == 0
    is_staged = m > DIRECT_ROWS and row_bytes <= device.shared_bytes_per_block
    threads = STAGED_THREADS if is_staged else DIRECT_THREADS
    if is_staged:
        by_memory = device.shared_bytes_per_sm // (row_bytes + 1024)
        ctas = device.sm_count * max(1, min(by_memory, THREADS_PER_SM // threads))
        grid = 1, min(m, ctas), 1
    else:
        grid = ceil_div(k // 8 if is_wide else k, threads), min(m, MAX_GRID), 1
    is_dependent = device.has(Capability.DEPENDENT_LAUNCH)
    defines = (
        ("X", TYPES["float16" if ITEMSIZE[problem.dtype] == 2 else problem.dtype]),
        ("WIDE", int(is_wide)),
        ("X_ALIGNED", int(problem.x_aligned and is_wide)),
        ("STAGED", int(is_staged)),
        ("THREADS", threads),
        ("DEPENDENT", int(is_dependent)),
    )
    return LaunchPlan(
        Kernel("gemm/gather_columns.cu", NAME, defines, device.target),
        grid,
        (threads, 1, 1),
        ("x", "order", "y", *map(np.int32, (m, k, problem.x_stride))),
        row_bytes if is_staged else 0,
        dependent=is_dependent,
    )


GATHER_COLUMNS = FunctionFamily(NAME, sole_configs, traffic_us, plan)


def estimate_added_us(k: int, gemm_us: float) -> float:
    """Return the microseconds that a launch of this kernel adds to a GEMM of up to 16 rows that takes ``gemm_us``.

    Fitted on an H100 so that `is_fused` is right for five weights at 1, 2, 4 and 8 rows, where the launch adds 1.2 to
    3.4 microseconds and a gather in the GEMM 0.6 to 6.
    """
    return 0.45 + 0.1 * k / 1024 + 0.07 * gemm_us


@functools.lru_cache(maxsize=4096)
def is_fused(problem: Problem, device: Device) -> bool:
    """Return whether the GEMM kernel gathers the columns of x itself, which a launch of this kernel otherwise does.

    Args:
        problem: a GEMM with ``gathers_x``.
        device: the GPU.
    """
    if refusal(problem, device) is not None:
        return False
    fused, with_launch = _times(problem, device)
    return fused < with_launch


def refusal(problem: Problem, device: Device) -> str | None:
    """Return the reason why no GEMM kernel gathers the columns of x for a problem with ``gathers_x``, or None."""
    if problem.batch_invariant:
        return "no batch-invariant GEMM gathers the columns of x"
    reason = GEMM_SM90.refusal(problem, device)
    return reason and f"{GEMM_SM90.NAME} {reason}"


def _times(problem: Problem, device: Device) -> tuple[float, float]:
    """Return the modelled microseconds of two ways: the GEMM gathers the columns of x, or a launch before it does."""
    fused, plain = (
        min((GEMM_SM90.estimate_us(config, p, device) for config in GEMM_SM90.configs(p, device)), default=math.inf)
        for p in (problem, replace(problem, gathers_x=False))
    )
    return fused, plain + estimate_added_us(problem.k, plain)


def explain(problem: Problem, device: Device) -> str:
    """Return a line that says whether the GEMM or a launch of this kernel gathers the columns of x, and why.

    The arguments are those of `is_fused`.
    """
    reason = refusal(problem, device)
    if reason is not None:
        return f"activation order: a launch of {NAME} before the GEMM; {reason}"
    fused, with_launch = _times(problem, device)
    times = f"modelled: the GEMM {fused:.1f} us, a launch and a GEMM {with_launch:.1f} us"
    by = "gathered by the GEMM" if is_fused(problem, device) else f"a launch of {NAME} before the GEMM"
    return f"activation order: {by}; {times}"
