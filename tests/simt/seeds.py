# SPDX-License-Identifier: Apache-2.0
"""Planted bugs: faults in copies of the library's kernels, and the check that the simulator catches each of them.

A check is the kind of a simulator's `Fault`, or "values" if the kernel ran to its end with a wrong result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from cupy_awq.kernels.family import AnyFamily, Config
from cupy_awq.kernels.gemm.problem import Problem
from cupy_awq.kernels.registry import FAMILIES
from cupy_awq.runtime import device
from tests import simt
from tests.simt.kernels import patched
from tests.test_kernels import check_matmul

RACE, VALUES = ("race", "race"), ("values", "values")
OUTSIDE, DEADLOCK = ("out of bounds", "out of bounds"), ("deadlock", "deadlock")
"""Pairs of checks that catch a bug: with copies that land as late as PTX allows, and at once."""


@dataclass(frozen=True)
class Seed:
    """A planted bug: in ``file``, ``new`` replaces ``old``; the kernel then runs ``problem`` on the path of ``arch``.

    ``caught`` has the checks that catch it with copies that land as late, and as early, as PTX allows.
    """

    kernel: str
    arch: int
    file: str
    old: str
    new: str
    caught: tuple[str, str]
    problem: Problem = field(default_factory=lambda: Problem(40, 224, 320, 64))
    config: dict[str, Any] = field(default_factory=dict)


Case: TypeAlias = tuple[AnyFamily, Config, device.Device, Problem]
"""A launch to simulate: the kernel's family and configuration, the GPU, and the problem."""
Outcome: TypeAlias = Callable[[Any, str], str]
"""A function of a launch, and of when copies land, that returns the check that fails, or "nothing"."""


def make_case(seed: Seed) -> Case:
    """Return the launch for a planted bug, with the last configuration that has the values ``seed.config``.

    If no configuration for the problem has them, such as a tile far higher than M, the last one gets these values.
    """
    here = device.nominal(seed.arch)
    family = FAMILIES[seed.kernel.removesuffix("_mma")]
    configs = list(family.configs(seed.problem, here))
    suited = [c for c in configs if all(getattr(c, name) == value for name, value in seed.config.items())]
    return family, suited[-1] if suited else replace(configs[-1], **seed.config), here, seed.problem


def outcome(case: Case, landing: str) -> str:
    """Return the check that fails when a launch is simulated, or "nothing" if it passes."""
    family, config, here, problem = case
    run = functools.partial(simt.run, landing=landing)
    return caught_by(lambda: check_matmul(run, problem, family, config, here, seed=0))


def caught_by(check: Callable[[], None]) -> str:
    """Run a check on the simulator; return the kind of its fault, "values" for wrong values, or "nothing"."""
    try:
        check()
    except simt.Fault as fault:
        return fault.kind
    except AssertionError:
        return "values"
    return "nothing"


@functools.cache
def is_right(outcome: Outcome, case: Any) -> bool:
    """Return whether the launch passes with unchanged sources. Results are cached, because bugs share launches."""
    return outcome(case, "latest") == "nothing"


def assert_caught(seed: Seed) -> None:
    """Check that the kernel passes without the planted bug, and that with it the expected checks fail."""
    assert_caught_by(outcome, make_case(seed), seed.file, seed.old, seed.new, seed.caught)


def assert_caught_by(outcome: Outcome, case: Any, file: str, old: str, new: str, caught: tuple[str, str]) -> None:
    """Check a planted bug as `assert_caught` does, for launches that another function simulates."""
    assert is_right(outcome, case), "the kernel must be right before the bug is planted"
    with patched(file, old, new):
        found = outcome(case, "latest"), outcome(case, "earliest")
    assert found == caught, found
