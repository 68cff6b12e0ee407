# SPDX-License-Identifier: Apache-2.0
"""Launch plans of plain_read.cu, which has the memory traffic of a GEMM without its arithmetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

SOURCE = str(Path(__file__).with_suffix(".cu"))
"""The path of the CUDA source of the plain read."""
GRIDS = ((1, 1024), (2, 512), (4, 512))
"""The grids that are tried, of which the fastest counts: (CTAs per SM, threads per CTA)."""


def kernels() -> list[Kernel]:
    """Return the plain-read kernels for all of GRIDS, to be compiled for Hopper before the measurement."""
    threads = dict.fromkeys(threads for _, threads in GRIDS)
    return [Kernel(SOURCE, "plain_read", (("THREADS", count),), "90a") for count in threads]


def plan(weight_bytes: int, x_bytes: int, y_bytes: int, sms: int, grid: tuple[int, int]) -> LaunchPlan:
    """Return the launch plan of a plain read with one of GRIDS, on a GPU with ``sms`` SMs.

    Its buffers are "weight", "x" and "y", whose sizes are multiples of 16 bytes.
    """
    ctas, threads = grid
    sizes = tuple(np.int64(size // 16) for size in (weight_bytes, x_bytes, y_bytes))
    kernel = Kernel(SOURCE, "plain_read", (("THREADS", threads),), "90a")
    return LaunchPlan(kernel, (ctas * sms, 1, 1), (threads, 1, 1), ("weight", "x", "y", *sizes), dependent=True)
