# SPDX-License-Identifier: Apache-2.0
"""Measure on this GPU which configuration is the fastest for a shape: ``python -m cupy_awq tune 4096x12288``.

For each number of rows the configurations that the model ranks first are timed in turns as `timing` does, with cold
weights; the fastest is kept in the user's cache, where `tuning` finds it. AwqLinear then uses it for these K and N,
whatever the group size and dtype, wherever it is legal and `select` does not know better for a number of rows between
those that are measured, the powers of two.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_awq import check
from cupy_awq.check import Array
from cupy_awq.kernels import select, tuned
from cupy_awq.kernels.family import AnyFamily, Config
from cupy_awq.kernels.problem import Problem, next_power_of_two
from cupy_awq.kernels.select import Candidate
from cupy_awq.ops.plan import BUFFERS, problem_of, weight_addresses
from cupy_awq.ops.repack import repack
from cupy_awq.runtime import arrays, placement
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device as devices
from cupy_awq.runtime import workspace as workspaces
from cupy_awq.runtime.launch import Launcher
from cupy_awq.tools import bench, table, testing, timing
from cupy_awq.weight import PackedWeight


@dataclass(frozen=True)
class Row:
    """The fastest configuration for M rows, its time, that of the model's first, and how many were tried."""

    k: int
    n: int
    m: int
    family: AnyFamily
    config: Config
    us: float
    model_us: float
    tried: int


def run(
    shapes: Sequence[tuple[int, int]],
    ms: Sequence[int],
    *,
    group_size: int,
    tries: int,
    device: int,
    progress: Callable[[str], None],
) -> list[Row]:
    """Time the ``tries`` first configurations for every (K, N) and every M, in float16."""
    bench.check_shapes(shapes, group_size)
    rows = []
    with placement.use_device(device):
        for k, n in shapes:
            progress(f"{k}x{n}: random weight")
            weights = _weights(k, n, group_size, device)
            problems = {m: _problem(weights[0], m) for m in sorted(set(map(next_power_of_two, ms)))}
            ranked = {m: _ranked(problem, device, tries) for m, problem in problems.items()}
            progress(f"{k}x{n}: compiling")
            facts = devices.of(device)
            _compile([c.family.plan(c.config, problems[m], facts) for m in ranked for c in ranked[m]])
            for m, some in ranked.items():
                progress(f"{k}x{n}: M={m}")
                best, times = fastest(_measures(problems[m], some, weights, device))
                rows.append(Row(k, n, m, some[best].family, some[best].config, times[best], times[0], len(some)))
    return rows


def _weights(k: int, n: int, group_size: int, device: int) -> list[PackedWeight]:
    """Copies that are cold in L2 when their turn comes, prepared as AwqLinear prepares them."""
    import cupy

    first = testing.random_weight(np.random.default_rng(0), k, n, group_size)
    parts = [placement.to_device(part, device) for part in (first.qweight, first.scales, first.qzeros)]
    copies = max(2, math.ceil(3 * devices.of(device).l2_bytes / first.nbytes))
    return [repack(PackedWeight(*map(cupy.array, parts))) for _ in range(copies)]


def _problem(weight: PackedWeight, m: int) -> Problem:
    return problem_of(weight, check.activation(None), m, np.dtype(np.float16))


def _ranked(problem: Problem, device: int, tries: int) -> list[Candidate]:
    found = select.candidates(problem, devices.of(device))
    legal = [candidate for some in found.values() if not isinstance(some, str) for candidate in some]
    return sorted(legal, key=lambda candidate: candidate.us)[:tries]


def _compile(plans: Sequence[Any]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda plan: compiler.build(plan.kernel), plans))


FINAL_ROUNDS = 3


def fastest(measures: Sequence[Callable[[], float]]) -> tuple[int, list[float]]:
    """The index of what measures least, and the median of each.

    They take turns, there and back, for clocks differ after a pause and as the chip warms up. The slower half leaves
    after each round, and the last two have more rounds, in which the first takes part again, to compare with.

    >>> fastest([lambda: 3.0, lambda: 1.0, lambda: 2.0])
    (1, [3.0, 1.0, 2.0])
    """
    found: list[list[float]] = [[] for _ in measures]

    def median(index: int) -> float:
        return statistics.median(found[index])

    live = list(range(len(measures)))
    finals = 0
    while finals < FINAL_ROUNDS:
        if len(live) <= 2:
            finals += 1
            live = sorted({0, *live})
        for index in (*live, *reversed(live)):
            found[index].append(measures[index]())
        live = sorted(live, key=median)[: max(2, math.ceil(len(live) / 2))]
    return live[0], [median(index) for index in range(len(measures))]


def _measures(
    problem: Problem, some: Sequence[Candidate], weights: Sequence[PackedWeight], device: int
) -> list[Callable[[], float]]:
    """For each configuration what measures its microseconds."""
    import cupy

    rng = np.random.default_rng(0)
    x = placement.to_device(testing.random_activations(rng, problem.m, problem.k), device)
    y = cupy.empty((problem.m, problem.n), x.dtype)
    launchers = [Launcher(c.family.plan(c.config, problem, devices.of(device))) for c in some]
    calls = [[functools.partial(_launch, launcher, x, y, w, device) for w in weights] for launcher in launchers]
    return [functools.partial(timing.on_gpu, each) for each in calls]


def _launch(launcher: Launcher, x: Array, y: Array, weight: PackedWeight, device: int) -> None:
    import cupy

    stream = cupy.cuda.get_current_stream().ptr
    workspace = workspaces.workspace_address(device, stream)
    addresses = arrays.address(x), 0, arrays.address(y), workspace + workspaces.COUNTER_BYTES, workspace
    named = dict(zip(BUFFERS, (*addresses, *weight_addresses(weight, None)), strict=True))
    launcher(tuple(named[name] for name in launcher.buffers), stream)


def keep(rows: Sequence[Row], device: int) -> str:
    """Store the choices for the processes to come; the path of their file."""
    table: tuned.Table = {}
    for row in rows:
        label = tuned.label(row.family, row.config)
        table.setdefault(f"{row.k}x{row.n}", {})[str(row.m)] = tuned.entry(label, row.us)
    return str(tuned.write(devices.of(device), table))


def render(rows: Sequence[Row]) -> str:
    """The run as text."""
    header = ["shape", "fastest configuration", "M", "us", "model's choice, us", "gain", "tried"]
    cells = []
    for row in rows:
        gain = f"{row.model_us / row.us:.2f}x"
        figures = (table.number(row.us), table.number(row.model_us), gain, str(row.tried))
        cells.append([f"{row.k}x{row.n}", tuned.label(row.family, row.config), str(row.m), *figures])
    return table.render(header, cells, left=2)
