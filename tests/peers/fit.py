# SPDX-License-Identifier: Apache-2.0
"""Fit the constants of the cost models of gemm_sm90 and gemm_sm90_large to times that sweep.py measured; needs no GPU.

    python -m tests.peers.fit sweep.jsonl --model wgmma
    python -m tests.peers.fit sweep.jsonl other.jsonl --model mma --steps 30

Prints the constants in the order of the dataclass that holds them, and for each range of M the ratio of the first
choice to the fastest configuration of the model's kernel, before and after. The fit minimizes squared logarithms of
estimate / time by Levenberg-Marquardt, in the logarithms of the constants. A configuration x% slower than the fastest
one of its problem has the weight exp(-x / 12) + 0.01.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
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


class Times:
    """Measured times: arrays of times ``us`` and of problem numbers, and the configurations and problems of each."""

    def __init__(self, paths: list[str], family: ModuleType, kernel: str | None) -> None:
        self.family = family
        kind = GemmSm90Config if kernel else gemm_sm90_large.GemmSm90LargeConfig
        self.rows: list[tuple[Any, Problem]] = []
        known = {f.name for f in fields(Problem)} - {"limits"}
        numbers: dict[Problem, int] = {}
        times, ids = [], []
        for record in (json.loads(line) for path in paths for line in Path(path).read_text().splitlines()):
            if record["family"] != family.NAME or record["config"].get("name") != kernel:
                continue
            problem = Problem(**{name: value for name, value in record["problem"].items() if name in known})
            self.rows.append((kind(**record["config"]), problem))
            times.append(record["us"])
            ids.append(numbers.setdefault(problem, len(numbers)))
        self.us, self.ids = np.array(times), np.array(ids)
        self.best = np.array([self.us[self.ids == i].min() for i in range(len(numbers))])[self.ids]
        self.weights = np.sqrt(np.exp(-(self.us / self.best - 1) / 0.12) + 0.01)

    def estimates(self) -> np.ndarray:
        """Return the modelled time of each row."""
        device = nominal(90)
        return np.array([self.family.estimate_us(config, problem, device) for config, problem in self.rows])

    def first_choices(self, estimates: np.ndarray) -> Iterator[tuple[int, float]]:
        """Yield, for each problem, M and the time of the first choice over that of the fastest configuration."""
        for i in range(self.ids.max() + 1):
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


def fit(times: Times, module: ModuleType, name: str, steps: int) -> Any:
    """Return the fitted constants."""
    costs = getattr(module, name)
    begin = flat(costs)

    def residuals(at: np.ndarray) -> np.ndarray:
        with mock.patch.object(module, name, unflat(costs, at)):
            return np.concatenate([times.weights * np.log(times.estimates() / times.us), PRIOR * (at - begin)])

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


def show(times: Times, title: str) -> None:
    """Print the RMS error and the ratios of first choices."""
    estimates = times.estimates()
    squares = np.sum((times.weights * np.log(estimates / times.us)) ** 2) / np.sum(times.weights**2)
    choices = list(times.first_choices(estimates))
    parts = []
    for low, high in BANDS:
        ratios = [ratio for m, ratio in choices if low <= m <= high]
        if ratios:
            parts.append(f"M={low}-{high} {geometric_mean(ratios):.3f} (at most {max(ratios):.2f}, {len(ratios)})")
    print(f"{title}: RMS error {math.sqrt(squares):.1%}; first choice / fastest: {', '.join(parts)}")


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="JSON lines of sweep.py")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, default=20, help="largest number of steps (default: %(default)s)")
    arguments = parser.parse_args()
    module, name, family, kernel = MODELS[arguments.model]
    times = Times(arguments.files, family, kernel)
    print(f"{len(times.us)} times of {times.ids.max() + 1} problems")
    show(times, "before")
    found = fit(times, module, name, arguments.steps)
    with mock.patch.object(module, name, found):
        show(times, "after")
    for f in fields(found):
        value = getattr(found, f.name)
        rounded = {k: float(f"{v:.4g}") for k, v in value.items()} if isinstance(value, dict) else float(f"{value:.4g}")
        print(f"    {f.name} = {rounded}")


if __name__ == "__main__":
    main()
