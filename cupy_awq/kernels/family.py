# SPDX-License-Identifier: Apache-2.0
"""The interface of a kernel family, through which kernels are chosen, explained, tuned, timed and compiled.

A family is a module of this package, or an object with the same attributes where one module holds two families. Its
functions are pure: they need a problem and a `Device`, and no GPU. `cupy_awq.kernels.select` lists the families for
each type of problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan


class Workspace(NamedTuple):
    """The device memory through which the CTAs of a split-K launch exchange partial sums.

    Attributes:
        partial_bytes: size in bytes of the float32 partial sums, which need no initialization.
        counters: number of 32-bit counters; they are zero before and after the launch.
    """

    partial_bytes: int = 0
    counters: int = 0


class TuningKey(NamedTuple):
    """The key of a problem in the tables of tuned configurations (`cupy_awq.kernels.tuned`).

    Attributes:
        shapes: keys of the shape, the most specific first, such as ``("4096x12288",)`` for K = 4096, N = 12288.
        m: the size that varies from call to call: the number of rows of x, or the batch size of a convolution.
        tuned_m: the m at which `tune` measures the configuration that is used for ``m``.
    """

    shapes: tuple[str, ...]
    m: int
    tuned_m: int


class KernelProblem(Protocol):
    """A validated operation to be solved by a kernel: a frozen dataclass whose ``str`` is its equation with sizes."""

    @property
    def tuning_key(self) -> TuningKey | None:
        """The key of the problem in the tuned tables; None if its families have nothing to tune."""
        ...

    def __hash__(self) -> int: ...


class Config(Protocol):
    """A kernel configuration: a frozen dataclass of numbers that determine constants, grid and shared memory."""

    @property
    def split_k(self) -> int:
        """The split-K factor: the number of CTAs that divide K of one output tile among them."""
        ...


ProblemT = TypeVar("ProblemT", bound=KernelProblem, contravariant=True)
ConfigT = TypeVar("ConfigT", bound=Config)


class Family(Protocol[ProblemT, ConfigT]):
    """A kernel family: kernels with one algorithm, one cost model and one weight layout."""

    @property
    def NAME(self) -> str:
        """The name by which ``kernel=`` forces the family and `explain` lists it."""
        ...

    def refusal(self, problem: ProblemT, device: Device) -> str | None:
        """Return why the family cannot solve the problem on this device, or None if it can."""
        ...

    def configs(self, problem: ProblemT, device: Device) -> Sequence[ConfigT]:
        """Return every legal configuration of a problem that is not refused."""
        ...

    def estimate_us(self, config: ConfigT, problem: ProblemT, device: Device) -> float:
        """Return the run time that the cost model predicts, in microseconds; it is meant for ranking configurations."""
        ...

    def plan(self, config: ConfigT, problem: ProblemT, device: Device) -> LaunchPlan:
        """Return the launch plan of a legal configuration."""
        ...

    def workspace(self, config: ConfigT, problem: ProblemT) -> Workspace:
        """Return the size of the split-K workspace of a configuration."""
        ...


AnyFamily = Family[Any, Any]
