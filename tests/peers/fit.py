# SPDX-License-Identifier: Apache-2.0
"""Fit the constants of the cost models of Hopper's kernels to times that sweep.py measured; needs no GPU.

    python -m tests.peers.fit sweep.jsonl --models wgmma-32 --rows 17-32 --absolute 0.3
    python -m tests.peers.fit sweep.jsonl other.jsonl --models mma --steps 30
    python -m tests.peers.fit sweep.jsonl --models mma wgmma large --choices --steps 80
    python -m tests.peers.fit fp8.jsonl --models w4a8 int8 --choices --steps 120 --rows 33-4096

Prints the constants in the order of the dataclass that holds them, and sweep.py's table of the first choices of the
kernels in MODELS, before and after; other kernels are left out. Files of several GPUs give constants for all of them.

The fit minimizes squared errors by Levenberg-Marquardt, in the logarithms of the constants. An error is log(estimate /
time) minus its mean over the problem: the choice depends on the ratios of times within a problem, while the clock
changes from problem to problem. The squared errors of the model's estimates themselves have the weight ``--absolute``,
because ``x_dtype="auto"`` compares them. A configuration x% slower than the fastest one of its problem has the weight
exp(-x / 12) + 0.01. A constant of zero stays zero.

With ``--choices``, the constants, of mma only those for more than 8 rows, start halfway between the present ones and
such a fit. Then Adam minimizes the expected logarithm of the time of the first choice over the fastest time, plus
ERRORS times the mean square above, plus ``--absolute`` times that of log(estimate / time) of each model. The
probability of a choice is a softmax of -log(estimate) at the temperature TEMPERATURE.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from cupy_awq.kernels.gemm import gemm_mma_fragments, gemm_sm90_costs, gemm_sm90_large
from cupy_awq.kernels.gemm.gemm_mma_fragments import GEMM_MMA_FRAGMENTS
from cupy_awq.kernels.gemm.gemm_sm90 import GEMM_SM90
from cupy_awq.kernels.gemm.gemm_sm90_config import MMA, WGMMA, GemmSm90Config
from cupy_awq.kernels.gemm.gemm_sm90_large import GEMM_SM90_LARGE
from cupy_awq.kernels.gemm.problem import Problem
from cupy_awq.kernels.int8 import gemm_int8_sm90, gemm_w4a8_sm90
from cupy_awq.kernels.int8.gemm_int8_sm90 import GEMM_INT8_SM90
from cupy_awq.kernels.int8.gemm_w4a8_sm90 import GEMM_W4A8_SM90
from cupy_awq.kernels.int8.problem import Int8Problem
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.rates import DeviceRates
from tests.peers.sweep import FirstChoice, table


class Model(NamedTuple):
    """A cost model whose constants can be fitted: where they are, and which measured times they explain.

    Attributes:
        module: the module that holds the constants.
        constants: the name of the constants in the module.
        family: the kernel family whose times the model estimates.
        config: the type of the family's configurations.
        serves: a function that returns whether the constants serve a configuration and a problem.
    """

    module: ModuleType
    constants: str
    family: Any
    config: type
    serves: Callable[[Any, Any], bool]


def _main(shares: list[tuple[Any, float]]) -> Any:
    """Return the constants with the largest share of a modelled time."""
    return max(shares, key=lambda item: item[1])[0]


def _wgmma(constants: str) -> Model:
    def serves(config: Any, problem: Any) -> bool:
        return config.name == WGMMA and _main(costs.wgmma_costs(problem.m)) is getattr(costs, constants)

    costs = gemm_sm90_costs
    return Model(costs, constants, GEMM_SM90, GemmSm90Config, serves)


MODELS = {
    "fragments": Model(
        gemm_mma_fragments,
        "COSTS",
        GEMM_MMA_FRAGMENTS,
        gemm_mma_fragments.GemmFragmentsConfig,
        lambda config, problem: True,
    ),
    "mma": Model(gemm_sm90_costs, "MMA_COSTS", GEMM_SM90, GemmSm90Config, lambda c, p: c.name == MMA),
    "wgmma-16": _wgmma("WGMMA_COSTS_16"),
    "wgmma-32": _wgmma("WGMMA_COSTS_32"),
    "wgmma-64": _wgmma("WGMMA_COSTS_64"),
    "wgmma": _wgmma("WGMMA_COSTS"),
    "large": Model(gemm_sm90_large, "COSTS", GEMM_SM90_LARGE, gemm_sm90_large.GemmSm90LargeConfig, lambda c, p: True),
    "w4a8": Model(gemm_w4a8_sm90, "COSTS", GEMM_W4A8_SM90, gemm_w4a8_sm90.GemmW4A8Config, lambda c, p: True),
    "int8": Model(gemm_int8_sm90, "COSTS", GEMM_INT8_SM90, gemm_int8_sm90.GemmInt8Sm90Config, lambda c, p: True),
}
PRIOR = 0.03
"""The weight of the distance to the present constants, which determines constants on which no time depends."""
TEMPERATURE = 0.02
"""The standard error of log(estimate) that the expected time of a first choice assumes."""
ERRORS = 0.2
"""The weight of the mean square error in the loss that ``--choices`` minimizes."""
RATE = 0.02
"""The learning rate of Adam at the start; it falls to 30% of this value."""


class Times:
    """The times that sweep.py measured: arrays of microseconds, ``us``, and of problem numbers, ``ids``.

    Attributes:
        rows: the configuration, the problem and the GPU of each time.
        parts: the slice of the times that belongs to each model's kernel.
        weights: the weight of each time.
    """

    def __init__(self, paths: list[str], low: int, high: int) -> None:
        numbers: dict[Any, int] = {}
        found: dict[str, list[tuple[tuple[Any, Any, Device], float, int]]] = {model: [] for model in MODELS}
        for record in (json.loads(line) for path in paths for line in Path(path).read_text().splitlines()):
            models = {name: model for name, model in MODELS.items() if record["family"] == model.family.NAME}
            if not models:
                continue
            problem, rates = read_problem(record["problem"]), DeviceRates(**record["device"]["rates"])
            device = Device(**{**record["device"], "rates": rates, "without": ()})
            if not low <= problem.m <= high:
                continue
            for name, model in models.items():
                config = model.config(**record["config"])
                if model.serves(config, problem):
                    number = numbers.setdefault((problem, record["op"], device), len(numbers))
                    found[name].append(((config, problem, device), record["us"], number))
        every = [row for rows in found.values() for row in rows]
        ends = np.cumsum([len(rows) for rows in found.values()]).tolist()
        self.parts = {name: slice(end - len(rows), end) for (name, rows), end in zip(found.items(), ends, strict=True)}
        self.rows, us, ids = zip(*every, strict=True)
        self.us, self.ids = np.array(us), np.array(ids)
        best = np.full(len(numbers), np.inf)
        np.minimum.at(best, self.ids, self.us)
        self.best = best[self.ids]
        self.weights = np.exp(-(self.us / self.best - 1) / 0.12) + 0.01

    def estimates(self, model: str, costs: Any) -> np.ndarray:
        """Return the microseconds that a cost model with the constants ``costs`` predicts for its rows."""
        family = MODELS[model].family
        with with_constants(model, costs):
            return np.array([family.estimate_us(*row) for row in self.rows[self.parts[model]]])

    def all_estimates(self) -> np.ndarray:
        """Return the microseconds that the present constants predict for every measured row."""
        return np.concatenate([self.estimates(model, present(model)) for model in self.parts])

    def errors(self, estimates: np.ndarray) -> np.ndarray:
        """Return the weighted errors: log(estimate / time) minus its mean over the problem, times sqrt(weight)."""
        logarithms = np.log(estimates / self.us)
        means = np.bincount(self.ids, self.weights * logarithms) / np.bincount(self.ids, self.weights)
        return np.sqrt(self.weights) * (logarithms - means[self.ids])

    def loss(self, estimates: np.ndarray, models: Sequence[str], absolute: float) -> float:
        """Return the loss that ``--choices`` minimizes, for the modelled times ``estimates`` of all rows.

        It is the mean over problems of the expected log(time of the first choice / fastest time), plus weighted errors.
        """
        logarithms = np.log(estimates)
        least = np.full(self.ids.max() + 1, np.inf)
        np.minimum.at(least, self.ids, logarithms)
        chances = np.exp((least[self.ids] - logarithms) / TEMPERATURE)
        lost = np.bincount(self.ids, chances * np.log(self.us / self.best)) / np.bincount(self.ids, chances)
        squares, own = self.errors(estimates) ** 2, 0.0
        for part in (self.parts[model] for model in models):
            own += np.average(np.log(estimates[part] / self.us[part]) ** 2, weights=self.weights[part])
        return float(lost.mean() + ERRORS * squares.sum() / self.weights.sum() + absolute * own)

    def first_choices(self, estimates: np.ndarray) -> Iterator[FirstChoice]:
        """Yield for each problem the configuration with the lowest modelled time, compared with the fastest one."""
        for i in np.unique(self.ids):
            mine = np.flatnonzero(self.ids == i)
            first = mine[np.argmin(estimates[mine])]
            _, problem, device = self.rows[first]
            us, best_us = self.us[first], self.best[first]
            yield FirstChoice(device.name, problem.m, best_us, us / best_us, estimates[first] / us)


def read_problem(record: dict[str, Any]) -> Any:
    """Return the problem of one record that sweep.py wrote."""
    kind = Problem if "group_size" in record else Int8Problem
    known = {f.name for f in fields(kind)} - {"limits", "layouts"}
    return kind(**{name: value for name, value in record.items() if name in known})


def flat(costs: Any) -> np.ndarray:
    """Return the logarithms of all constants as one array; zero gives -inf, from which `unflat` restores zero."""
    with np.errstate(divide="ignore"):
        return np.log([float(x) for f in fields(costs) for x in _parts(getattr(costs, f.name)).values()])


def unflat(costs: Any, logarithms: np.ndarray) -> Any:
    """Return the constants whose logarithms `flat` returned."""
    values = iter(np.exp(logarithms).tolist())
    changed: dict[str, Any] = {}
    for f in fields(costs):
        old = getattr(costs, f.name)
        new = {key: next(values) for key in _parts(old)}
        changed[f.name] = new if isinstance(old, dict) else tuple(new.values()) if isinstance(old, tuple) else new[None]
    return replace(costs, **changed)


def _parts(value: Any) -> dict[Any, float]:
    """Return the constants of one field of a cost dataclass by their keys or indices; a single one has the key None."""
    return value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, tuple) else {None: value}


def present(model: str) -> Any:
    """Return the constants that a cost model has now."""
    return getattr(MODELS[model].module, MODELS[model].constants)


def with_constants(model: str, costs: Any) -> Any:
    """Return a context in which the cost model called ``model`` uses ``costs`` as its constants."""
    return mock.patch.object(MODELS[model].module, MODELS[model].constants, costs)


def fit(times: Times, model: str, steps: int, absolute: float) -> Any:
    """Return a cost model's constants after a least-squares fit of the logarithms of times (Levenberg-Marquardt)."""
    part = times.parts[model]
    costs, estimates = present(model), times.all_estimates()
    begin = flat(costs)
    free = np.isfinite(begin)

    def changed_by(change: np.ndarray) -> Any:
        at = begin.copy()
        at[free] += change
        return unflat(costs, at)

    def residuals(change: np.ndarray) -> np.ndarray:
        estimates[part] = times.estimates(model, changed_by(change))
        own = np.sqrt(absolute * times.weights[part]) * np.log(estimates[part] / times.us[part])
        return np.concatenate([times.errors(estimates), own, PRIOR * change])

    change, damping = np.zeros(free.sum()), 1e-2
    now = residuals(change)
    for step in range(steps):
        jacobian = np.stack([(residuals(change + 1e-4 * unit) - now) / 1e-4 for unit in np.eye(len(change))], axis=1)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ now
        while damping < 1e6:
            move = np.clip(np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient), -1, 1)
            found = residuals(change + move)
            if found @ found < now @ now:
                break
            damping *= 4
        else:
            break
        gain = 1 - (found @ found) / (now @ now)
        change, now, damping = change + move, found, max(damping / 3, 1e-6)
        print(f"step {step + 1}: sum of squares {now @ now:.3f}", flush=True)
        if gain < 1e-5:
            break
    return changed_by(change)


def is_free(model: str, costs: Any) -> np.ndarray:
    """Return which constants `fit_choices` may change: of mma only those for more than 8 rows."""
    keys = [key for f in fields(costs) for key in _parts(getattr(costs, f.name))]
    return np.isfinite(flat(costs)) & np.array([model != "mma" or key == 16 for key in keys])


def fit_choices(times: Times, models: Sequence[str], steps: int, absolute: float) -> dict[str, Any]:
    """Return constants of some models that minimize the expected time of the first choice, by name of the model."""
    costs = {model: present(model) for model in models}
    at = {}
    for model in models:
        begin, fitted = flat(costs[model]), flat(fit(times, model, 8, absolute))
        at[model] = np.where(is_free(model, costs[model]), (begin + fitted) / 2, begin)
    estimates = times.all_estimates()

    def set_estimates(target: np.ndarray, model: str, values: np.ndarray) -> None:
        target[times.parts[model]] = times.estimates(model, unflat(costs[model], values))

    means = {model: (np.zeros(len(v)), np.zeros(len(v))) for model, v in at.items()}
    for step in range(steps):
        for model, values in at.items():
            set_estimates(estimates, model, values)
        now = times.loss(estimates, models, absolute)
        print(f"step {step}: loss {now:.5f}", flush=True)
        changes = {}
        for model, values in at.items():
            gradient = np.zeros(len(values))
            for i in np.flatnonzero(is_free(model, costs[model])):
                moved = estimates.copy()
                set_estimates(moved, model, values + 1e-3 * (np.arange(len(values)) == i))
                gradient[i] = (times.loss(moved, models, absolute) - now) / 1e-3
            first, second = (0.9 * means[model][0] + 0.1 * gradient, 0.98 * means[model][1] + 0.02 * gradient**2)
            means[model] = first, second
            size = np.sqrt(second / (1 - 0.98 ** (step + 1))) + 1e-6
            changes[model] = RATE * (1 - 0.7 * step / steps) * first / (1 - 0.9 ** (step + 1)) / size
        at = {model: values - changes[model] for model, values in at.items()}
    return {model: unflat(costs[model], values) for model, values in at.items()}


def show(times: Times, title: str) -> None:
    """Print the RMS error of the estimates and the table of first choices."""
    estimates = times.all_estimates()
    rms = math.sqrt((times.errors(estimates) ** 2).sum() / times.weights.sum())
    print(f"{title}: RMS error {rms:.1%}\n{table(list(times.first_choices(estimates)))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="JSON lines of sweep.py")
    parser.add_argument("--models", nargs="+", choices=MODELS, required=True)
    parser.add_argument("--choices", action="store_true", help="fit for the time of the first choice")
    parser.add_argument("--steps", type=int, default=20, help="largest number of steps (default: %(default)s)")
    parser.add_argument("--absolute", type=float, default=0.1, help="weight of absolute errors (default: %(default)s)")
    parser.add_argument("--rows", default="1-4096", help="range of M (default: %(default)s)")
    arguments = parser.parse_args()
    times = Times(arguments.files, *map(int, arguments.rows.split("-")))
    print(f"{len(times.us)} times of {len(np.unique(times.ids))} problems")
    show(times, "before")
    if arguments.choices:
        found = fit_choices(times, arguments.models, arguments.steps, arguments.absolute)
    else:
        found = {model: fit(times, model, arguments.steps, arguments.absolute) for model in arguments.models}
    with ExitStack() as stack:
        for model, costs in found.items():
            stack.enter_context(with_constants(model, costs))
        show(times, "after")
    for model, costs in found.items():
        print(model)
        for f in fields(costs):
            print(f"    {f.name} = {', '.join(f'{value:.4g}' for value in _parts(getattr(costs, f.name)).values())}")


if __name__ == "__main__":
    main()
