# SPDX-License-Identifier: Apache-2.0
"""Random GEMM shapes and row counts, and parallel compilation, for compare.py and sweep.py."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor

from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem
from cupy_awq.kernels.select import choose
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel

SIZES = (1024, 32768)
"""The range of K and N of random shapes."""
ROWS = (1, 4096)
"""The range of M of random problems."""
MAX_WEIGHTS = 4e8
"""The largest K * N of a random shape."""
BANDS = ((1, 16), (17, 128), (129, 1024), (1025, 4096))
"""The ranges of M over which figures are summarized."""
LATENCY_US = 2.2
"""The time of an empty dependent launch and one memory round trip, in microseconds: no GEMM is faster."""


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """Return a random number between ``low`` and ``high`` whose logarithm is uniformly distributed."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def shape(rng: random.Random) -> tuple[int, int]:
    """Return a random (K, N): log-uniform in SIZES, K a multiple of 128, N of 64, K * N at most MAX_WEIGHTS."""
    while True:
        k, n = (step * round(log_uniform(rng, *SIZES) / step) for step in (128, 64))
        if k * n <= MAX_WEIGHTS:
            return k, n


def shapes(seed: int, count: int) -> list[tuple[int, int]]:
    """Return ``count`` random shapes (K, N), which depend only on the seed."""
    rng = random.Random(seed)
    return [shape(rng) for _ in range(count)]


def rows(seed: int, count: int = 9) -> list[int]:
    """Return ``count`` distinct values of M, one from each of equal parts of the logarithm of ROWS."""
    rng = random.Random(f"rows {seed}")
    ratio = ROWS[1] / ROWS[0]
    while True:
        found = [round(ROWS[0] * ratio ** ((i + rng.random()) / count)) for i in range(count)]
        if len(set(found)) == count:
            return found


def band(m: int) -> tuple[int, int]:
    """Return the range of BANDS that contains M."""
    return next((low, high) for low, high in BANDS if m <= high)


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive values: that of ratios does not depend on which side is divided."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def build(kernel: Kernel, form: str = "cubin") -> None:
    """Compile a kernel into the disk cache; a function of the module, so that worker processes can import it."""
    compiler.build(kernel, form)


def compile_pool() -> ProcessPoolExecutor:
    """Return a pool of processes for `build`, with one process less than there are CPU cores."""
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))


def submit_chosen(
    pool: ProcessPoolExecutor, cells: Iterable[tuple[int, int, int]], device: Device
) -> list[Future[None]]:
    """Start the compilation of the kernels that AwqLinear chooses for the cells (K, N, M)."""
    problems = [Problem(m, n, k, 128, layouts=(AWQ, FRAGMENTS)) for k, n, m in cells]
    kernels = dict.fromkeys(choose(problem, device).plan.kernel for problem in problems)
    form = "cubin" if device.is_native else "ptx"
    return [pool.submit(build, kernel, form) for kernel in kernels]
