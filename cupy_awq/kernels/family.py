# SPDX-License-Identifier: Apache-2.0
"""The contract of a kernel family: every kernel is chosen, explained, tuned, timed and compiled through it.

A family is a module of this package, or an object with the same attributes where one module holds two families. It is
pure: it needs a problem and a `Device`, and no GPU. `cupy_awq.kernels.select` lists the families of each type of
problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan


class Workspace(NamedTuple):
    """The device memory that the CTAs of a split-K launch share.

    Attributes:
        partial_bytes: size of the float32 partial sums, which need no initial value.
        counters: number of 32-bit counters, zero before and after the launch.
    """

    partial_bytes: int = 0
    counters: int = 0


class TuningKey(NamedTuple):
    """The place of a problem in the tables of tuned configurations (`cupy_awq.kernels.tuned`).

    Attributes:
        shapes: keys of the shape, the most specific first, such as ``("4096x12288",)`` for K = 4096, N = 12288.
        m: the size that varies from call to call: rows of x, or images.
        tuned_m: the m at which the configuration for this m is measured.
    """

    shapes: tuple[str, ...]
    m: int
    tuned_m: int


class KernelProblem(Protocol):
    """A validated operation to choose a kernel for; a frozen dataclass whose ``str`` is its equation with sizes."""

    @property
    def tuning_key(self) -> TuningKey | None:
        """The key of the problem in the tuned tables; None if its families have nothing to tune."""
        ...

    def __hash__(self) -> int: ...


class Config(Protocol):
    """One way to launch a family: a frozen dataclass of the numbers that fix constants, grid and shared memory."""

    @property
    def split_k(self) -> int:
        """The number of CTAs that share each accumulator over K."""
        ...


ProblemT = TypeVar("ProblemT", bound=KernelProblem, contravariant=True)
ConfigT = TypeVar("ConfigT", bound=Config)


class Family(Protocol[ProblemT, ConfigT]):
    """The kernels that share one algorithm, one cost model and one layout of the weight."""

    @property
    def NAME(self) -> str:
        """The name by which ``kernel=`` forces the family and `explain` lists it."""
        ...

    def refuse(self, problem: ProblemT, device: Device) -> str | None:
        """Return why the family cannot solve the problem on this device, or None if it can."""
        ...

    def configs(self, problem: ProblemT, device: Device) -> Sequence[ConfigT]:
        """Return every legal configuration of a problem that is not refused."""
        ...

    def estimate_us(self, config: ConfigT, problem: ProblemT, device: Device) -> float:
        """Return the run time that the family's cost model predicts, in microseconds: a rank, not a promise."""
        ...

    def plan(self, config: ConfigT, problem: ProblemT, device: Device) -> LaunchPlan:
        """Return the launch of a legal configuration."""
        ...

    def workspace(self, config: ConfigT, problem: ProblemT) -> Workspace:
        """Return the memory that the launch needs for split-K."""
        ...


AnyFamily = Family[Any, Any]
