# SPDX-License-Identifier: Apache-2.0
"""Which kernel makes a product, and how: pure functions of the problem and of the device's facts."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from cupy_awq.kernels import tuned as tuning
from cupy_awq.kernels.gemm_mma import GEMM_SM75, GEMM_SM80
from cupy_awq.kernels.gemm_simt import GemmSimt
from cupy_awq.kernels.gemm_sm90 import GemmSm90
from cupy_awq.kernels.gemm_sm90_large import GemmSm90Large
from cupy_awq.kernels.gemm_sm90_raw import GemmSm90Raw
from cupy_awq.kernels.gemv import GemmSmall, Gemv
from cupy_awq.kernels.problem import Config, Family, Problem
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan
from cupy_awq.runtime.workspace import COUNTERS, WORKSPACE_BYTES

FAMILIES: dict[str, Family] = {
    family.NAME: family
    for family in (Gemv(), GemmSmall(), GemmSimt(), GEMM_SM75, GEMM_SM80, GemmSm90Raw(), GemmSm90(), GemmSm90Large())
}
ON_REPACKED = ("gemm_sm90", "gemm_sm90_large")
ONE_TILE = 128
"""Up to so many rows are one tile for most configurations."""


@dataclass(frozen=True)
class Choice:
    """A kernel family, its configuration and the launch that follows from them."""

    name: str
    config: Config
    plan: LaunchPlan


def candidates(problem: Problem, device: Device, split_k: int | None = None) -> dict[str, list[Config] | str]:
    """Of each family the legal configurations, the fastest by the model first, or the reason why there is none."""
    found: dict[str, list[Config] | str] = {}
    for name, family in FAMILIES.items():
        reason = family.refuse(problem, device)
        if name not in ON_REPACKED and not problem.raw:
            reason = "needs AWQ's own arrays, which the layer has let go"
        if name != GemmSm90.NAME and problem.fusion:
            reason = "cannot fuse the residual add or RMSNorm of a decoder"
        if reason is not None:
            found[name] = reason
            continue
        configs = [config for config in family.configs(problem, device) if _fits(config, problem, split_k)]
        configs.sort(key=lambda config: config.estimate_us(problem, device))
        nothing = f"cannot split K={problem.k} into {split_k} parts here" if split_k else "has no configuration for it"
        found[name] = configs or nothing
    return found


def _fits(config: Config, problem: Problem, split_k: int | None) -> bool:
    partials, counters = config.workspace(problem)
    return partials <= WORKSPACE_BYTES and counters <= COUNTERS and split_k in (None, config.splits)


@functools.lru_cache(maxsize=4096)
def choose(problem: Problem, device: Device, kernel: str | None = None, split_k: int | None = None) -> Choice:
    """The fastest configuration, of every family or of the one named ``kernel``: as measured, else as the model ranks.

    What was measured serves other rows as `_serves` tells.

    Raises ValueError if there is none, with the reason.
    """
    if kernel is not None and kernel not in FAMILIES:
        raise ValueError(f"kernel: expected one of {', '.join(FAMILIES)}, got {kernel!r}")
    found = candidates(problem, device, split_k)
    if kernel is not None:
        found = {kernel: found[kernel]}
    legal = {name: configs for name, configs in found.items() if not isinstance(configs, str)}
    if not legal:
        reasons = "; ".join(f"{name} {reason}" for name, reason in found.items())
        raise ValueError(f"no kernel fits: {reasons}")
    name = min(legal, key=lambda name: legal[name][0].estimate_us(problem, device))
    config = legal[name][0]
    wanted = tuning.preferred(problem, device)
    least = config.estimate_us(problem, device)
    for other, configs in legal.items() if wanted else ():
        for measured in configs:
            if tuning.label(measured) == wanted and _serves(measured, least, problem, device):
                name, config = other, measured
    return Choice(name, config, config.plan(problem, device))


def _serves(measured: Config, least: float, problem: Problem, device: Device) -> bool:
    """Whether to take what was measured, for these rows or for the next power of two.

    Fewer rows may make fewer tiles, so that another number of blocks fits: where the model's first took less than 0.9
    times as long by the model, it took 0.87 times as long (geometric mean of ten cases on an H100; 0.71 to 0.99).
    """
    rows = problem.m
    return rows <= ONE_TILE or rows == tuning.rows(rows) or least >= 0.9 * measured.estimate_us(problem, device)


def explain(problem: Problem, device: Device) -> str:
    """A line for each kernel family: its best configuration and expected time, or why it is not legal."""
    choice = choose(problem, device)
    m, n, k, group_size = problem.m, problem.n, problem.k, problem.group_size
    product = f"x[{m}, {k}] {problem.dtype} @ W[{k}, {n}] group size {group_size}"
    lines = [f"{product} on {device.name} (sm_{device.arch})"]
    width = max(map(len, FAMILIES))
    for name, configs in candidates(problem, device).items():
        mark = "->" if name == choice.name else "  "
        if isinstance(configs, str):
            lines.append(f"{mark} {name:{width}} not legal: {configs}")
        else:
            config = choice.config if name == choice.name else configs[0]
            lines.append(f"{mark} {name:{width}} {config.estimate_us(problem, device):8.1f} us expected  {config}")
    return "\n".join(lines)
