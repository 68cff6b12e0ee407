# SPDX-License-Identifier: Apache-2.0
"""The interface of a kernel family, through which kernels are chosen, explained, tuned, timed and compiled.

A family is a module of this package, or an object with the same attributes where one module holds two families. The
functions of a family are pure: they take a problem and a `Device` and need no GPU. `cupy_awq.kernels.select` lists the
families for each type of problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan


class Workspace(NamedTuple):
    """The device memory through which the CTAs of a split-K launch exchange partial sums.

    Attributes:
        partial_bytes: size of the float32 partial sums in bytes; the memory need not be initialized.
        counters: number of 32-bit counters, which are zero before and after the launch.
    """

    partial_bytes: int = 0
    counters: int = 0


class TuningKey(NamedTuple):
    """The key of a problem in the tables of tuned configurations (`cupy_awq.kernels.tuned`).

    Attributes:
        shapes: keys of the shape, the most specific first, such as ``("4096x12288",)`` for K = 4096, N = 12288.
        m: number of rows of x, or batch size of a convolution.
        tuned_m: number of rows or batch size at which `tune` measures the configuration that is used for ``m``.
    """

    shapes: tuple[str, ...]
    m: int
    tuned_m: int


class KernelProblem(Protocol):
    """A validated operation, for which a kernel is chosen: a frozen dataclass whose ``str`` describes the operation."""

    @property
    def tuning_key(self) -> TuningKey | None:
        """The key of the problem in the tuned tables, or None if no family of this problem type is tuned."""
        ...

    def __hash__(self) -> int: ...


class Config(Protocol):
    """A kernel configuration: a frozen dataclass that determines compile-time constants, grid and shared memory."""

    @property
    def split_k(self) -> int:
        """The split-K factor: the number of CTAs that compute one output tile, each over its slice of K."""
        ...


ProblemT = TypeVar("ProblemT", bound=KernelProblem, contravariant=True)
ConfigT = TypeVar("ConfigT", bound=Config)


class Family(Protocol[ProblemT, ConfigT]):
    """A kernel family: kernels with one algorithm, one cost model and one weight layout."""

    @property
    def NAME(self) -> str:
        """The name of the family, which ``kernel=`` accepts and `explain` prints."""
        ...

    def refusal(self, problem: ProblemT, device: Device) -> str | None:
        """Return the reason why the family cannot solve the problem on this device, or None if it can.

        The reason is a predicate such as "needs M <= 16, not 32", to which messages add the name of the family.
        """
        ...

    def configs(self, problem: ProblemT, device: Device) -> Sequence[ConfigT]:
        """Return every legal configuration for a problem that the family can solve."""
        ...

    def estimate_us(self, config: ConfigT, problem: ProblemT, device: Device) -> float:
        """Return the run time in microseconds that the cost model predicts, which ranks configurations."""
        ...

    def plan(self, config: ConfigT, problem: ProblemT, device: Device) -> LaunchPlan:
        """Return the launch plan of a legal configuration."""
        ...

    def workspace(self, config: ConfigT, problem: ProblemT) -> Workspace:
        """Return the split-K workspace that a configuration needs."""
        ...


AnyFamily = Family[Any, Any]
