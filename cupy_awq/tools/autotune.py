# SPDX-License-Identifier: Apache-2.0
"""The measurement of tuned configurations on this GPU: ``python -m cupy_awq tune 4096x12288``.

For each shape and M, the configurations with the lowest modelled times are timed in alternation, with weights that are
cold in L2. `select.forced` makes an operation use a given configuration. The fastest configuration is stored in the
user's cache folder, from which `cupy_awq.kernels.tuned` reads it.

Any operation of `operations.OPERATIONS` whose problem has a `tuning_key` can be tuned.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cupy_awq.kernels import select, tuned
from cupy_awq.kernels.family import KernelProblem, TuningKey
from cupy_awq.kernels.select import Candidate
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device as devices
from cupy_awq.runtime import placement
from cupy_awq.runtime.launch_plan import LaunchPlan
from cupy_awq.tools import table, timing
from cupy_awq.tools.expert_operations import ALL_OPERATIONS as OPERATIONS
from cupy_awq.tools.operations import Operation, Settings, Shape

FINAL_ROUNDS = 3
"""The number of additional rounds in which the two fastest configurations are timed."""


@dataclass(frozen=True)
class Row:
    """The fastest configuration for one shape and M.

    Attributes:
        key: the key of shape and M in the tables of tuned configurations.
        best: the fastest configuration, with its modelled time.
        source: the source file of its kernel.
        us: the measured time of the fastest configuration, in microseconds.
        modelled_us: the measured time of the configuration that the cost models rank first, in microseconds.
        tried: the number of configurations that were timed.
    """

    key: TuningKey
    best: Candidate
    source: str
    us: float
    modelled_us: float
    tried: int


def require_native(index: int) -> devices.Device:
    """Return a GPU; raise ValueError if ``CUPY_AWQ_ARCH`` is set, with which no tuned configuration is used."""
    gpu = devices.of(index)
    if not gpu.is_native:
        raise ValueError(f"tune: expected kernels for sm_{gpu.native}, got CUPY_AWQ_ARCH={gpu.arch}")
    return gpu


def run(
    op: str, shapes: Sequence[Shape], ms: Sequence[int], settings: Settings, tries: int, progress: Callable[[str], None]
) -> Iterator[Row]:
    """Yield the fastest of the ``tries`` configurations with the lowest modelled times, for each shape and M.

    ``settings.cached`` must be False. ``progress`` is a callback that receives a line of text before each step.

    Raises:
        ValueError: a shape is not supported, or ``CUPY_AWQ_ARCH`` is set, with which no tuned configuration is used.
    """
    make, device = OPERATIONS[op], settings.device
    for shape in shapes:
        make.check(shape, settings)
    gpu = require_native(device)
    with placement.use_device(device):
        for shape in shapes:
            progress(f"{shape[0]}x{shape[1]}: random weight")
            operation = make(shape, settings)
            tuned_ms = sorted({_key(_problem(operation, m)).tuned_m for m in ms})
            problems = {m: _problem(operation, m) for m in tuned_ms}
            trials = {m: ranked(problem, gpu, tries) for m, problem in problems.items()}
            progress(f"{operation.label}: compiling")
            build_kernels([c.family.plan(c.config, problems[m], gpu) for m in tuned_ms for c in trials[m]])
            for m in tuned_ms:
                progress(f"{operation.label}: M={m}")
                calls = operation.calls(m)
                best, times = fastest([_timer(calls, candidate) for candidate in trials[m]])
                first = trials[m][best]
                source = first.family.plan(first.config, problems[m], gpu).kernel.source
                yield Row(_key(problems[m]), first, source, times[best], times[0], len(times))


def _problem(operation: Operation, m: int) -> KernelProblem:
    """Return the problem that one call of the operation with M = ``m`` passes to kernel selection."""
    with select.recorded() as choices:
        operation.calls(m)[0]()
    return choices[-1].problem


def _key(problem: KernelProblem) -> TuningKey:
    key = problem.tuning_key
    if key is None:
        raise ValueError(f"tune: expected an operation with configurations to tune, got {problem}")
    return key


def ranked(problem: KernelProblem, gpu: devices.Device, tries: int) -> list[Candidate]:
    """Return the ``tries`` configurations of all families with the lowest modelled times, in ascending order."""
    legal = [
        candidate
        for some in select.candidates(problem, gpu).values()
        if not isinstance(some, str)
        for candidate in some
    ]
    return sorted(legal, key=lambda candidate: candidate.us)[:tries]


def build_kernels(plans: Sequence[LaunchPlan]) -> None:
    """Compile the kernels of the plans with one thread per core."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda plan: compiler.build(plan.kernel), plans))


def _timer(calls: Sequence[timing.Call], candidate: Candidate) -> Callable[[], float]:
    """Return a function that returns the time of the calls with one configuration, in microseconds."""

    def time_calls() -> float:
        with select.forced(candidate):
            return timing.on_gpu(calls)

    return time_calls


def fastest(timers: Sequence[Callable[[], float]]) -> tuple[int, list[float]]:
    """Return the index of the timer with the lowest median, and the medians of all timers.

    Each round calls the timers in order and then in reverse, since clocks drift as the GPU warms up. After each round
    the slower half is dropped. The last two timers run FINAL_ROUNDS more rounds, with the first timer as baseline.

    >>> fastest([lambda: 3.0, lambda: 1.0, lambda: 2.0])
    (1, [3.0, 1.0, 2.0])
    """
    times: list[list[float]] = [[] for _ in timers]

    def median(index: int) -> float:
        return statistics.median(times[index])

    live = list(range(len(timers)))
    finals = 0
    while finals < FINAL_ROUNDS:
        if len(live) <= 2:
            finals += 1
            live = sorted({0, *live})
        for index in (*live, *reversed(live)):
            times[index].append(timers[index]())
        live = sorted(live, key=median)[: max(2, math.ceil(len(live) / 2))]
    return live[0], [median(index) for index in range(len(timers))]


def driver_version() -> str:
    """Return the CUDA version of the driver, such as "13.0"."""
    import cupy

    version = cupy.cuda.runtime.driverGetVersion()
    return f"{version // 1000}.{version % 1000 // 10}"


def keep(row: Row, device: int) -> Path:
    """Add a configuration to the user's tuning table, which each process reads once; return the table's path."""
    text = tuned.entry(row.best.label, row.us, row.source, driver_version())
    return tuned.write(devices.of(device), {row.key.shapes[0]: {str(row.key.tuned_m): text}})


def render(rows: Sequence[Row]) -> str:
    """Return a text table of the fastest configurations, with their measured times."""
    header = ["shape", "fastest configuration", "M", "us", "cost model's choice, us", "gain", "tried"]
    cells = []
    for row in rows:
        figures = (table.number(row.us), table.number(row.modelled_us), f"{row.modelled_us / row.us:.2f}x")
        label = row.best.label
        cells.append([row.key.shapes[0], label, str(row.key.tuned_m), *figures, str(row.tried)])
    return table.render(header, cells, left=2)
