# SPDX-License-Identifier: Apache-2.0
"""Compare the configuration that the cost models choose with the fastest one of all legal configurations.

`compare.py --best N` measures N random cells in this way. All configurations are timed round-robin, as sweep.py does;
then the first choice and the FINALISTS fastest ones again, so that noise does not favour the fastest of many.
"""

from __future__ import annotations

import itertools
import random
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from cupy_awq.kernels.gemm.problem import FRAGMENTS, Problem
from cupy_awq.runtime.device import Device
from tests.peers import sweep
from tests.peers.random_problems import build

WITHIN = 1.6
"""The largest modelled time, relative to the lowest one, of a configuration that is timed (reason: EXPERIMENTS.md)."""
FINALISTS = 6
"""The number of configurations, the fastest ones, that are timed again."""

Cell = tuple[int, int, int]
"""The sizes (K, N, M) of a GEMM."""


def sample(cells: list[Cell], count: int, seed: int) -> list[Cell]:
    """Return ``count`` random cells in which each value of M occurs about equally often."""
    rng = random.Random(f"first choice {seed}")
    by_m: dict[int, list[Cell]] = {}
    for cell in cells:
        by_m.setdefault(cell[2], []).append(cell)
    for some in by_m.values():
        rng.shuffle(some)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_m.values()))
    return [cell for cell in in_turn if cell is not None][:count]


def submit(pool: ProcessPoolExecutor, cells: list[Cell], device: Device) -> dict[Cell, list[Future[None]]]:
    """Start compiling all configurations' kernels in other processes, and return the futures by cell."""
    futures: dict[Any, Future[None]] = {}
    found: dict[Cell, list[Future[None]]] = {}
    for k, n, m in cells:
        problem = Problem(m, n, k, 128, layouts=(FRAGMENTS,))
        kernels = [c.family.plan(c.config, problem, device).kernel for c in sweep.legal(problem, WITHIN)]
        for kernel in kernels:
            if kernel not in futures:
                futures[kernel] = pool.submit(build, kernel)
        found[k, n, m] = [futures[kernel] for kernel in kernels]
    return found


def measure(cell: Cell, stream: Any) -> dict[str, Any]:
    """Time a shape's configurations; return K, N, M, their number, and the first choice and the best with times."""
    k, n, m = cell
    with stream:
        operation = sweep.Gemm(k, n, m)
        candidates = sweep.legal(operation.problem, WITHIN)
        times = sweep.times_us(operation, candidates, stream)
        finalists = list(dict.fromkeys([0, *sorted(range(len(times)), key=times.__getitem__)[:FINALISTS]]))
        us = sweep.times_us(operation, [candidates[i] for i in finalists], stream)
    best = min(range(len(us)), key=us.__getitem__)

    def label(i: int) -> str:
        return candidates[i].label

    return {
        "k": k,
        "n": n,
        "m": m,
        "legal": len(candidates),
        "first_us": round(us[0], 3),
        "best_us": round(us[best], 3),
        "first": label(0),
        "best": label(finalists[best]),
    }
