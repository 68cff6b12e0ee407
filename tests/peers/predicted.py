# SPDX-License-Identifier: Apache-2.0
"""Compare modelled with measured times of GEMMs on one GPU as it is, with older kernels and with fewer SMs.

    python -m tests.peers.predicted --json tests/peers/tables/predicted.json

Nothing is fitted to these times. Each SETTING is a GPU for which the cost models choose: this one, restricted to the
kernels of an architecture, to a number of SMs (a green context) and to an amount of shared memory. Its bandwidths and
its rate of mma.sync are measured inside the same limits, as `tune --rates` does, since bandwidth does not shrink with
the SMs. The random problems are those of sweep.py; of each, the configurations with the lowest modelled times are timed
round-robin with cold weights. The time of the first one is compared with its modelled time and with the fastest one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from cupy_awq.kernels import select
from cupy_awq.kernels.gemm.problem import FRAGMENTS, Problem
from cupy_awq.kernels.select import Candidate
from cupy_awq.runtime import device, placement
from cupy_awq.runtime.device import Device
from cupy_awq.tools import rate_tuning, timing
from cupy_awq.tools.table import render
from tests.peers import random_problems, sweep
from tests.peers.random_problems import geometric_mean, log_uniform


class Setting(NamedTuple):
    """The limits under which the GPU is modelled and measured; None stands for the GPU's own.

    Attributes:
        arch: the architecture whose kernels are used.
        sms: the number of SMs.
        shared_kib: the shared memory of an SM in KiB, of which a CTA gets all but one.
    """

    arch: int | None
    sms: int | None = None
    shared_kib: int | None = None

    def limit(self, gpu: Device) -> Device:
        """Return the properties of a GPU with these limits, and with its own rates."""
        kib = self.shared_kib
        shared = {"shared_bytes_per_block": (kib - 1) << 10, "shared_bytes_per_sm": kib << 10} if kib else {}
        return replace(gpu, arch=self.arch or gpu.arch, sm_count=self.sms or gpu.sm_count, **shared)

    def __str__(self) -> str:
        parts = [f"sm_{self.arch}" if self.arch else "its own"]
        parts += [f"{self.sms} SMs"] if self.sms else []
        return ", ".join([*parts, *([f"{self.shared_kib} KiB"] if self.shared_kib else [])])


SETTINGS = (
    Setting(None),
    Setting(80),
    Setting(75),
    Setting(80, shared_kib=100),
    *(Setting(80, sms) for sms in (108, 82, 46, 16)),
)
WITHIN_US = 1000.0
"""The longest modelled time of a problem that is timed, in microseconds."""
IGNORE_COSCHEDULING, DEFAULT_STREAM = 1, 1
"""The flags of green contexts; the names of their enumerations depend on the version of CUDA.

They are CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING, without which the number of SMs is a multiple of 8, so that
they can run clusters, and CU_GREEN_CTX_DEFAULT_STREAM.
"""
ROWS = ((1, 16), (17, 128), (129, 2048))
"""The ranges from which M is drawn in turn."""


def problems(seed: int, count: int) -> list[Problem]:
    """Return random problems with weights in the fragment layout."""
    rng = random.Random(f"predicted {seed}")
    found = []
    for i in range(count):
        k, n = random_problems.shape(rng)
        found.append(Problem(round(log_uniform(rng, *ROWS[i % len(ROWS)])), n, k, 128, layouts=(FRAGMENTS,)))
    return found


def first_candidates(problem: Problem, gpu: Device, count: int) -> list[Candidate]:
    """Return the ``count`` configurations with the lowest modelled times; none if all take longer than WITHIN_US."""
    listed = select.candidates(problem, gpu).values()
    found = sorted((c for some in listed if not isinstance(some, str) for c in some), key=lambda c: c.us)[:count]
    return found if found[0].us <= WITHIN_US else []


def stream_on(sms: int | None) -> Any:
    """Return a new stream whose kernels run on ``sms`` SMs, in a green context, or on all SMs for None."""
    import cupy
    from cuda.bindings import driver

    if sms is None:
        return cupy.cuda.Stream(non_blocking=True)

    def call(function: Any, *arguments: Any) -> Any:
        status, *found = function(*arguments)
        placement.check_status(status, function.__name__)
        return found[0]

    gpu = call(driver.cuDeviceGet, cupy.cuda.runtime.getDevice())
    every = call(driver.cuDeviceGetDevResource, gpu, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    (some, *_) = call(driver.cuDevSmResourceSplitByCount, 1, every, IGNORE_COSCHEDULING, sms)
    if some.sm.smCount != sms:
        raise RuntimeError(f"sms: expected a green context with {sms} SMs, got {some.sm.smCount}")
    description = call(driver.cuDevResourceGenerateDesc, [some], 1)
    context = call(driver.cuGreenCtxCreate, description, gpu, DEFAULT_STREAM)
    flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    return cupy.cuda.ExternalStream(int(call(driver.cuGreenCtxStreamCreate, context, int(flag), 0)))


def with_measured_rates(gpu: Device, stream: Any) -> Device:
    """Return a limited GPU with the rates that `tune --rates` would find on the stream's SMs."""
    with mock.patch.object(timing, "_stream", return_value=stream):
        found = rate_tuning.measure_within(gpu, 0, lambda step: None)
    return replace(gpu, rates=replace(gpu.rates, **found))


class Trial(NamedTuple):
    """A problem under a setting, with the configurations to time: those with the lowest modelled times."""

    setting: Setting
    problem: Problem
    candidates: list[Candidate]


def compile_kernels(trials: list[Trial], limited: dict[Setting, Device]) -> None:
    """Compile the kernels of all trials in other processes, into the form that the driver loads on this GPU."""
    kernels = {}
    for trial in trials:
        for family, config, _ in trial.candidates:
            kernel = family.plan(config, trial.problem, limited[trial.setting]).kernel
            kernels[kernel] = "ptx" if trial.setting.arch else "cubin"
    with random_problems.compile_pool() as pool:
        list(pool.map(random_problems.build, kernels, kernels.values()))


def measure(trial: Trial, operation: sweep.Gemm, here: Device, stream: Any) -> dict[str, Any]:
    """Time the configurations of a trial on a limited GPU and return modelled and measured times."""
    import cupy

    cupy.cuda.Device().synchronize()
    with mock.patch.object(sweep, "gpu", return_value=here), stream:
        us = sweep.times_us(operation, trial.candidates, stream)
    return {
        "setting": str(trial.setting),
        **{name: getattr(trial.problem, name) for name in ("k", "n", "m")},
        "us": us,
        "estimate_us": [candidate.us for candidate in trial.candidates],
        "labels": [candidate.label for candidate in trial.candidates],
    }


COLUMNS = ("kernels and limits", "problems", "modelled / measured", "mean error", "first / fastest", "worst")


def summarize(records: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the rows of the table, one per setting, in the order of COLUMNS."""
    rows: list[list[Any]] = []
    for name in dict.fromkeys(record["setting"] for record in records):
        some = [record for record in records if record["setting"] == name]
        ratios = [record["estimate_us"][0] / record["us"][0] for record in some]
        slower = [record["us"][0] / min(record["us"]) for record in some]
        error = sum(abs(ratio - 1) for ratio in ratios) / len(ratios)
        means = [f"{geometric_mean(ratios):.2f}", f"{error:.1%}", f"{geometric_mean(slower):.3f}", f"{max(slower):.2f}"]
        rows.append([name, len(some), *means])
    return rows


TEXT = (
    "Random GEMMs of AwqLinear with 1 to 2048 rows, to which no model was fitted, with the kernels of an architecture,"
    " on some of the SMs (a green context) or with less shared memory per SM. Bandwidths and the rate of mma.sync are"
    " those that `tune --rates` finds within the limits. Modelled / measured is the geometric mean of the first choice,"
    " the mean error that of its time, and the fastest is that of the {} configurations with the lowest modelled times."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--problems", type=int, default=30, help="number of random problems (default: %(default)s)")
    parser.add_argument("--candidates", type=int, default=6, help="configurations per problem (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="measure no problem after this time")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the table for RESULTS.md to this file")
    parser.add_argument("--records", metavar="FILE", type=Path, help="also write every time to this file")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    gpu, limited, records = device.current(), {}, []
    for setting in SETTINGS:
        stream = stream_on(setting.sms)
        limited[setting] = with_measured_rates(setting.limit(gpu), stream), stream
        print(f"{setting}: {limited[setting][0].rates}", flush=True)
    trials = [
        Trial(setting, problem, found)
        for problem in problems(arguments.seed, arguments.problems)
        for setting, (here, _) in limited.items()
        if (found := first_candidates(problem, here, arguments.candidates))
    ]
    compile_kernels(trials, {setting: here for setting, (here, _) in limited.items()})
    for problem, some in itertools.groupby(trials, lambda trial: trial.problem):
        operation = sweep.Gemm(problem.k, problem.n, problem.m)
        for trial in some:
            if time.monotonic() < deadline:
                records.append(measure(trial, operation, *limited[trial.setting]))
        del operation
    if arguments.records:
        arguments.records.write_text(json.dumps(records))
    rows = summarize(records)
    print(render(COLUMNS, [list(map(str, row)) for row in rows]))
    if arguments.json:
        table = {
            "title": "Modelled and measured times with fewer SMs and older kernels",
            "gpu": gpu.name,
            "commands": [
                f"python -m tests.peers.predicted --seed {arguments.seed} --problems {arguments.problems}"
                f" --candidates {arguments.candidates} --json tests/peers/tables/predicted.json"
            ],
            "text": TEXT.format(arguments.candidates),
            "columns": COLUMNS,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
