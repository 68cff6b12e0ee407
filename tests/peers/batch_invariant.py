# SPDX-License-Identifier: Apache-2.0
"""Time the batch-invariant mode of `AwqLinear` and `gemm` over the default, and write the table of RESULTS.md.

    python tests/peers/batch_invariant.py --json tests/peers/tables/batch_invariant.json

Weights are cold in L2. With ``--reductions``, also print the time of each order of additions along K that the mode
could have chosen, which shows whether the cost models chose well.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cupy_awq import AwqLinear, gemm
from cupy_awq.kernels import select
from cupy_awq.kernels.family import Reduction
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem
from cupy_awq.ops.prepared_gemm import run_gemm
from cupy_awq.ops.repack import repack
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device, placement
from cupy_awq.tools import testing, timing
from cupy_awq.tools.operations import cold_weights
from cupy_awq.tools.table import render

SHAPES = ((4096, 4096), (4096, 12288), (12288, 4096), (8192, 28672))
"""The (K, N) of the weights that are timed."""
ROWS = (1, 8, 64, 512)
"""The numbers of rows, M, that are timed."""
TEXT = (
    "Microseconds per call with the default order of additions along K and with batch_invariant=True, and their ratio."
    " AwqLinear reads its repacked weight, gemm the AWQ tensors."
)

Call = Callable[[], object]


def build_all(problems: list[Problem], here: device.Device) -> None:
    """Compile the kernels that the library chooses for the problems, with one thread per CPU core."""
    kernels = {select.choose(problem, here).plan.kernel: None for problem in problems}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compiler.build, kernels))


def measure(index: int) -> list[list[Any]]:
    """Time the default and the batch-invariant mode; return rows of (call, shape, M, default us, us, ratio)."""
    import cupy

    here = device.of(index)
    build_all(
        [
            Problem(m, n, k, 128, layouts=(AWQ, FRAGMENTS)[: 1 + repacked], batch_invariant=invariant)
            for k, n in SHAPES
            for m in ROWS
            for repacked in (False, True)
            for invariant in (False, True)
        ],
        here,
    )
    rows: list[list[Any]] = []
    for k, n in SHAPES:
        rng = np.random.default_rng(0)
        weights = cold_weights(testing.random_weight(rng, k, n, 128), index)
        layers = [[AwqLinear(w, batch_invariant=invariant) for w in weights] for invariant in (False, True)]
        for m in ROWS:
            x, y = cupy.asarray(testing.random_activations(rng, m, k)), cupy.empty((m, n), np.float16)
            calls: dict[str, list[list[Call]]] = {"AwqLinear": [], "gemm": []}
            for invariant in (False, True):
                calls["AwqLinear"].append([functools.partial(layer, x, out=y) for layer in layers[invariant]])
                tensors = [(w.qweight, w.scales, w.qzeros) for w in weights]
                calls["gemm"].append(
                    [functools.partial(gemm, x, *t, out=y, batch_invariant=invariant) for t in tensors]
                )
            for name, pair in calls.items():
                us = [timing.on_gpu(some) for some in pair]
                rows.append([name, f"{k}x{n}", m, round(us[0], 2), round(us[1], 2), round(us[1] / us[0], 2)])
                print(f"{name} {k}x{n} M={m}: {us[0]:.2f} us, {us[1]:.2f} us", file=sys.stderr, flush=True)
    return rows


def compare_reductions(index: int) -> str:
    """Return a table with the time of `AwqLinear`'s best configuration for each order of additions (`Reduction`)."""
    import cupy

    here = device.of(index)
    best: dict[tuple[int, int, int], dict[Reduction, select.Candidate]] = {}
    for k, n in SHAPES:
        for m in ROWS:
            problem = Problem(m, n, k, 128, layouts=(AWQ, FRAGMENTS), batch_invariant=True)
            found = best.setdefault((k, n, m), {})
            for family in select.families(problem).values():
                if family.refusal(problem, here) is not None:
                    continue
                for config in family.configs(problem, here):
                    reduction = family.reduction(config, problem)
                    us = family.estimate_us(config, problem, here)
                    if reduction is None or "scaled weights" not in reduction.math or reduction.turn > 1:
                        continue
                    if reduction not in found or us < found[reduction].us:
                        found[reduction] = select.Candidate(family, config, us)
    kernels = {
        candidate.family.plan(
            candidate.config, Problem(m, n, k, 128, layouts=(AWQ, FRAGMENTS), batch_invariant=True), here
        ).kernel: None
        for (k, n, m), found in best.items()
        for candidate in found.values()
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compiler.build, kernels))
    lines = []
    for k, n in SHAPES:
        rng = np.random.default_rng(0)
        weights = [repack(w) for w in cold_weights(testing.random_weight(rng, k, n, 128), index)]
        for m in ROWS:
            x, y = cupy.asarray(testing.random_activations(rng, m, k)), cupy.empty((m, n), np.float16)
            for reduction, candidate in best[k, n, m].items():
                with select.forced(candidate):
                    us = timing.on_gpu([functools.partial(run_gemm, x, w, out=y) for w in weights])
                label = f"{len(reduction.slices)} slices, {reduction.accumulators} accumulators"
                lines.append((f"{k}x{n}", str(m), label, f"{us:.2f}", f"{candidate.us:.2f}"))
                print(*lines[-1], file=sys.stderr, flush=True)
    return render(("shape", "M", "reduction", "us", "model us"), lines, left=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the table of RESULTS.md")
    parser.add_argument("--reductions", action="store_true", help="also time each order of additions")
    args = parser.parse_args()
    index = placement.resolve()
    columns = ["call", "shape", "M", "default", "batch-invariant", "ratio"]
    rows = measure(index)
    print(render(columns, [[str(cell) for cell in row] for row in rows], left=2))
    if args.json:
        table = {
            "title": "Batch-invariant mode",
            "gpu": placement.device_name(index),
            "commands": ["python tests/peers/batch_invariant.py --json tests/peers/tables/batch_invariant.json"],
            "text": TEXT,
            "columns": columns,
            "rows": sorted(rows, key=lambda row: str(row[0])),
        }
        args.json.write_text(json.dumps(table, indent=1) + "\n")
    if args.reductions:
        print(compare_reductions(index))


if __name__ == "__main__":
    main()
