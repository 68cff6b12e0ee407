# SPDX-License-Identifier: Apache-2.0
"""Fit the constants of the cost models of gemm_sm90 and gemm_sm90_large to times that sweep.py measured; needs no GPU.

    python -m tests.peers.fit sweep.jsonl --model wgmma
    python -m tests.peers.fit sweep.jsonl other.jsonl --model mma --steps 30
    python -m tests.peers.fit sweep.jsonl --model all --steps 80

Prints the constants in the order of the dataclass that holds them, and for each range of M the ratio of the first
choice of all kernels to the fastest configuration, before and after. The fit minimizes squared errors by
Levenberg-Marquardt, in the logarithms of the constants. An error is log(estimate / time) minus its mean over the
problem: the choice depends on the ratios of times within a problem, while the clock changes from problem to problem. A
configuration x% slower than the fastest one of its problem has the weight exp(-x / 12) + 0.01.

With ``--model all``, the constants of wgmma and of gemm_sm90_large, and those of mma for more than 8 rows, start
halfway between the present ones and such a fit. Then Adam minimizes the expected logarithm of the time of the first
choice over the fastest time, plus the mean square above. The probability of a choice is a softmax of -log(estimate) at
the temperature TEMPERATURE.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

from cupy_awq.kernels import gemm_sm90, gemm_sm90_costs, gemm_sm90_large
from cupy_awq.kernels.gemm_sm90_config import MMA, WGMMA, GemmSm90Config
from cupy_awq.kernels.problem import Problem
from cupy_awq.runtime.device import nominal
from tests.peers.random_problems import BANDS, geometric_mean

MODELS: dict[str, tuple[ModuleType, str, ModuleType, str | None]] = {
    "mma": (gemm_sm90_costs, "MMA_COSTS", gemm_sm90, MMA),
    "wgmma": (gemm_sm90_costs, "WGMMA_COSTS", gemm_sm90, WGMMA),
    "large": (gemm_sm90_large, "COSTS", gemm_sm90_large, None),
}
"""By model: the module and the name of its constants, the kernel family, and the kernel (None: the only one)."""
PRIOR = 0.03
"""The weight of the distance to the present constants, which keeps those that the times do not determine."""
TEMPERATURE = 0.03
"""The error of log(estimate) that the expected time of a first choice assumes."""
RATE = 0.02
"""The learning rate of Adam at the start; it falls to 30% of this value."""


class Times:
    """The measured times of all models' kernels: arrays of times ``us`` and of the numbers ``ids`` of their problems.

    Attributes:
        rows: the configuration and the problem of each time.
        parts: the slice of the times of each model's kernel.
        weights: the weight of each time.
    """

    def __init__(self, paths: list[str]) -> None:
        records = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
        known = {f.name for f in fields(Problem)} - {"limits"}
        numbers: dict[Problem, int] = {}
        self.rows: list[tuple[Any, Problem]] = []
        self.parts: dict[str, slice] = {}
        times: list[float] = []
        ids: list[int] = []
        for model, (_, _, family, kernel) in MODELS.items():
            kind = GemmSm90Config if kernel else gemm_sm90_large.GemmSm90LargeConfig
            begin = len(times)
            for record in records:
                if record["family"] != family.NAME or record["config"].get("name") != kernel:
                    continue
                problem = Problem(**{name: value for name, value in record["problem"].items() if name in known})
                self.rows.append((kind(**record["config"]), problem))
                times.append(record["us"])
                ids.append(numbers.setdefault(problem, len(numbers)))
            self.parts[model] = slice(begin, len(times))
        self.us, self.ids = np.array(times), np.array(ids)
        best = np.full(len(numbers), np.inf)
        np.minimum.at(best, self.ids, self.us)
        self.best = best[self.ids]
        self.weights = np.exp(-(self.us / self.best - 1) / 0.12) + 0.01

    def estimates(self, model: str) -> np.ndarray:
        """Return the modelled times of one model's kernel."""
        device, family = nominal(90), MODELS[model][2]
        return np.array([family.estimate_us(*row, device) for row in self.rows[self.parts[model]]])

    def all_estimates(self) -> np.ndarray:
        """Return the modelled time of each row."""
        return np.concatenate([self.estimates(model) for model in self.parts])

    def errors(self, estimates: np.ndarray) -> np.ndarray:
        """Return the weighted error of each row: log(estimate / time) minus its mean over the problem."""
        logarithms = np.log(estimates / self.us)
        means = np.bincount(self.ids, self.weights * logarithms) / np.bincount(self.ids, self.weights)
        return np.sqrt(self.weights) * (logarithms - means[self.ids])

    def loss(self, estimates: np.ndarray) -> float:
        """Return the expected log(time of the first choice / fastest time) of a problem plus the mean square error."""
        logarithms = np.log(estimates)
        least = np.full(self.ids.max() + 1, np.inf)
        np.minimum.at(least, self.ids, logarithms)
        chances = np.exp((least[self.ids] - logarithms) / TEMPERATURE)
        lost = np.bincount(self.ids, chances * np.log(self.us / self.best)) / np.bincount(self.ids, chances)
        return float(lost.mean() + (self.errors(estimates) ** 2).sum() / self.weights.sum())

    def first_choices(self, estimates: np.ndarray) -> Iterator[tuple[int, float]]:
        """Yield, for each problem, M and the time of the first choice over that of the fastest configuration."""
        for i in np.unique(self.ids):
            mine = np.flatnonzero(self.ids == i)
            yield self.rows[mine[0]][1].m, self.us[mine[np.argmin(estimates[mine])]] / self.us[mine].min()


def flat(costs: Any) -> np.ndarray:
    """Return the logarithms of all constants."""
    values = [getattr(costs, f.name) for f in fields(costs)]
    return np.log([float(x) for v in values for x in (v.values() if isinstance(v, dict) else [v])])


def unflat(costs: Any, logarithms: np.ndarray) -> Any:
    """Return the constants with these logarithms."""
    values = iter(np.exp(logarithms).tolist())
    changed = {}
    for f in fields(costs):
        old = getattr(costs, f.name)
        changed[f.name] = {key: next(values) for key in old} if isinstance(old, dict) else next(values)
    return replace(costs, **changed)


def fit(times: Times, model: str, steps: int) -> Any:
    """Return the fitted constants of a model."""
    module, name, *_ = MODELS[model]
    costs, estimates = getattr(module, name), times.all_estimates()
    begin = flat(costs)

    def residuals(at: np.ndarray) -> np.ndarray:
        with mock.patch.object(module, name, unflat(costs, at)):
            estimates[times.parts[model]] = times.estimates(model)
        return np.concatenate([times.errors(estimates), PRIOR * (at - begin)])

    at, damping = begin, 1e-2
    now = residuals(at)
    for step in range(steps):
        jacobian = np.stack([(residuals(at + 1e-4 * unit) - now) / 1e-4 for unit in np.eye(len(at))], axis=1)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ now
        while damping < 1e6:
            change = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            found = residuals(at + np.clip(change, -1, 1))
            if found @ found < now @ now:
                break
            damping *= 4
        else:
            break
        gain = 1 - (found @ found) / (now @ now)
        at, now, damping = at + np.clip(change, -1, 1), found, max(damping / 3, 1e-6)
        print(f"step {step + 1}: sum of squares {now @ now:.3f}", flush=True)
        if gain < 1e-5:
            break
    return unflat(costs, at)


def is_free(model: str, costs: Any) -> np.ndarray:
    """Return which constants `fit_choices` changes: of mma, which alone serves M <= 8, those for 16 rows."""
    values = [getattr(costs, f.name) for f in fields(costs)]
    keys = [key for v in values for key in (v if isinstance(v, dict) else [None])]
    return np.array([model != "mma" or key == 16 for key in keys])


def fit_choices(times: Times, steps: int) -> dict[str, Any]:
    """Return the constants of all models, fitted for the time of the first choice."""
    costs = {model: getattr(*MODELS[model][:2]) for model in MODELS}
    at = {}
    for model in MODELS:
        begin = flat(costs[model])
        at[model] = np.where(is_free(model, costs[model]), (begin + flat(fit(times, model, 8))) / 2, begin)

    def estimates(model: str, values: np.ndarray) -> np.ndarray:
        with mock.patch.object(*MODELS[model][:2], unflat(costs[model], values)):
            return times.estimates(model)

    means = {model: (np.zeros(len(v)), np.zeros(len(v))) for model, v in at.items()}
    for step in range(steps):
        now = {model: estimates(model, values) for model, values in at.items()}
        loss = times.loss(np.concatenate(list(now.values())))
        print(f"step {step}: loss {loss:.5f}", flush=True)
        changes = {}
        for model, values in at.items():
            gradient = np.zeros(len(values))
            for i in np.flatnonzero(is_free(model, costs[model])):
                other = {**now, model: estimates(model, values + 1e-3 * np.eye(len(values))[i])}
                gradient[i] = (times.loss(np.concatenate(list(other.values()))) - loss) / 1e-3
            first, second = (0.9 * means[model][0] + 0.1 * gradient, 0.98 * means[model][1] + 0.02 * gradient**2)
            means[model] = first, second
            size = np.sqrt(second / (1 - 0.98 ** (step + 1))) + 1e-6
            changes[model] = RATE * (1 - 0.7 * step / steps) * first / (1 - 0.9 ** (step + 1)) / size
        at = {model: values - changes[model] for model, values in at.items()}
    return {model: unflat(costs[model], values) for model, values in at.items()}


def show(times: Times, title: str) -> None:
    """Print the RMS error and the ratios of first choices."""
    estimates = times.all_estimates()
    rms = math.sqrt((times.errors(estimates) ** 2).sum() / times.weights.sum())
    choices = list(times.first_choices(estimates))
    parts = []
    for low, high in BANDS:
        ratios = [ratio for m, ratio in choices if low <= m <= high]
        if ratios:
            parts.append(f"M={low}-{high} {geometric_mean(ratios):.3f} (at most {max(ratios):.2f}, {len(ratios)})")
    print(f"{title}: RMS error {rms:.1%}; first choice / fastest: {', '.join(parts)}")


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="JSON lines of sweep.py")
    parser.add_argument("--model", choices=[*MODELS, "all"], required=True)
    parser.add_argument("--steps", type=int, default=20, help="largest number of steps (default: %(default)s)")
    arguments = parser.parse_args()
    times = Times(arguments.files)
    print(f"{len(times.us)} times of {len(np.unique(times.ids))} problems")
    show(times, "before")
    if arguments.model == "all":
        found = fit_choices(times, arguments.steps)
    else:
        found = {arguments.model: fit(times, arguments.model, arguments.steps)}
    with ExitStack() as stack:
        for model, costs in found.items():
            stack.enter_context(mock.patch.object(*MODELS[model][:2], costs))
        show(times, "after")
    for model, costs in found.items():
        print(model)
        for f in fields(costs):
            value = getattr(costs, f.name)
            rounded = (
                {k: float(f"{v:.4g}") for k, v in value.items()} if isinstance(value, dict) else float(f"{value:.4g}")
            )
            print(f"    {f.name} = {rounded}")


if __name__ == "__main__":
    main()
