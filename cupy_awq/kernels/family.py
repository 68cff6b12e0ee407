# SPDX-License-Identifier: Apache-2.0
"""The base classes of problems and kernel families, through which kernels are chosen, explained, tuned and compiled.

A family is an instance of a subclass of `Family`; `cupy_awq.kernels.registry` lists all of them. The functions of a
family are pure: they take a problem and a `Device` and need no GPU. A module with one family writes them as plain
functions for a `FunctionFamily`; a module with several families writes them as methods of a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.tiling import next_power_of_two, next_tuned_m
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import LaunchPlan


class Workspace(NamedTuple):
    """The device memory through which the CTAs of a split-K launch exchange partial sums.

    Attributes:
        partial_bytes: size of the float32 partial sums in bytes; the memory need not be initialized.
        counters: number of 32-bit counters, which are zero before and after the launch.
    """

    partial_bytes: int = 0
    counters: int = 0

    @classmethod
    def for_split_k(cls, split_k: int, tiles: int, elements: int) -> Workspace:
        """Return the workspace of ``split_k`` CTAs per tile of ``elements`` float32 sums, with a counter per tile."""
        return cls(4 * tiles * split_k * elements, tiles) if split_k > 1 else cls()


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


class Reduction(NamedTuple):
    """The arithmetic of one element of y: its rounding, and the order of the additions along K.

    A slice is a contiguous range of K. The products of a slice are added to one accumulator, or to several accumulators
    in turn. The accumulators of each slice are added up first, then the sums of all slices, both in a fixed order.

    Attributes:
        math: text that names the instruction and says how scales are applied.
        slices: the first k tile of each slice.
        accumulators: number of accumulators per slice.
        turn: number of successive k tiles that are added to the same accumulator; 0 with one accumulator.
    """

    math: str
    slices: tuple[int, ...]
    accumulators: int = 1
    turn: int = 0

    def __str__(self) -> str:
        turns = f", {self.accumulators} accumulators that take turns of {self.turn} k tiles" if self.turn else ""
        return f"{self.math}, slices of K that begin at k tiles {', '.join(map(str, self.slices))}{turns}"


class KernelProblem:
    """A validated operation, for which a kernel is chosen.

    Subclasses are frozen dataclasses whose ``str`` describes the operation.
    """

    COMMON: ClassVar[Iterable[tuple[Any, ...]]] = ()
    """The arguments of the constructor for each of `common_problems`."""

    @property
    def tuning_key(self) -> TuningKey | None:
        """The key of the problem in the tuned tables, or None if no family of this problem type is tuned."""
        return None

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a row of y must not depend on the number of rows."""
        return False

    def reduction_samples(self) -> tuple[KernelProblem, ...]:
        """Return problems with the same weight and various M, for which one `Reduction` is chosen.

        All problems with one weight return the same samples. Types of problem that are never ``batch_invariant``
        return none.
        """
        return ()

    @classmethod
    def common_problems(cls) -> Iterator[KernelProblem]:
        """Yield problems of common layers, whose kernels the compile command compiles in advance: those of COMMON."""
        return (cls(*arguments) for arguments in cls.COMMON)


class Config(Protocol):
    """A kernel configuration: a frozen dataclass that determines compile-time constants, grid and shared memory."""

    @property
    def split_k(self) -> int:
        """The split-K factor: the number of CTAs that compute one output tile, each over its slice of K."""
        ...


@dataclass(frozen=True)
class SoleConfig:
    """The configuration of a family that has one per problem; subclasses add constants that follow from the problem."""

    split_k = 1


def constants(config: Config, names: str) -> tuple[tuple[str, int | str], ...]:
    """Return compile-time constants (name, value): fields and properties of a configuration, by their names.

    ``names`` are separated by spaces; those of the constants are in upper case.

    >>> from cupy_awq.kernels.warp_tiles import WarpTileConfig
    >>> constants(WarpTileConfig(16, 1, 4, stages=3, split_k=1), "warp_m stages")
    (('WARP_M', 16), ('STAGES', 3))
    """
    values = ((name, getattr(config, name)) for name in names.split())
    return tuple((name.upper(), value if isinstance(value, str) else int(value)) for name, value in values)


DERIVED_FIELDS = ("stages", "slices")
"""The configuration fields that labels omit, because the other fields and the problem determine them."""

ProblemT = TypeVar("ProblemT", bound=KernelProblem)
ConfigT = TypeVar("ConfigT", bound=Config)


class Family(Generic[ProblemT, ConfigT]):
    """A kernel family: kernels with one algorithm, one cost model and one weight layout.

    Attributes:
        NAME: name, which ``kernel=`` accepts and `explain` prints.
        needs: capabilities that the kernels need of a GPU, for every problem.
        layout: name of the layout of 4-bit weights that the kernels read (`cupy_awq.kernels.gemm.layouts`), or None if
            they read none of them.
    """

    NAME: str
    needs: tuple[Capability, ...] = ()
    layout: str | None = None

    def refusal(self, problem: ProblemT, device: Device) -> str | None:
        """Return the reason why the family cannot solve the problem on this device, or None if it can.

        The reason is a predicate such as "needs M <= 16, not 32", to which messages add the name of the family.
        """
        return device.refusal(self.needs)

    def configs(self, problem: ProblemT, device: Device) -> Sequence[ConfigT]:
        """Return every legal configuration for a problem that the family can solve."""
        raise NotImplementedError

    def estimate_us(self, config: ConfigT, problem: ProblemT, device: Device) -> float:
        """Return the run time in microseconds that the cost model predicts, which ranks configurations."""
        raise NotImplementedError

    def plan(self, config: ConfigT, problem: ProblemT, device: Device) -> LaunchPlan:
        """Return the launch plan of a legal configuration."""
        raise NotImplementedError

    def workspace(self, config: ConfigT, problem: ProblemT) -> Workspace:
        """Return the split-K workspace that a configuration needs; by default none."""
        return Workspace()

    def prepare_weight(
        self, weight: BlockQuantizedWeight, config: ConfigT, problem: ProblemT
    ) -> Mapping[str, Array | None]:
        """Return the buffers of a block-quantized weight by name, in the configuration's layout; by default none.

        They are created on first use and cached in the weight.
        """
        return {}

    def reduction(self, config: ConfigT, problem: ProblemT) -> Reduction | None:
        """Return the order in which a configuration adds up an element of y, or None.

        Configurations for which it is None are not used for batch-invariant problems; this is the default.
        """
        return None

    def describe_work(self, config: ConfigT, problem: ProblemT) -> str | None:
        """Return how the work is divided among the CTAs, which `explain` prints, or None."""
        return None

    def time_parts(self, config: ConfigT, problem: ProblemT, device: Device) -> object | None:
        """Return an object whose ``str`` gives the parts of the modelled time, which `explain` prints, or None."""
        return None

    def label(self, config: ConfigT) -> str:
        """Return the label of a configuration in a tuned table; group size and dtype do not matter."""
        return f"{self.NAME}({config_text(config, DERIVED_FIELDS)})"

    def labels(self, config: ConfigT) -> set[str]:
        """Return the labels that denote a configuration: its own, and those with ``block_m`` rounded up like M.

        Kernels split M rows into tiles of nearly equal height: the configuration for M = 40 that corresponds to tiles
        of 64 rows at M = 64, and to tiles of 48 rows at M = 48, has tiles of 40 rows.
        """
        values = {name: value for name, value in vars(config).items() if name not in DERIVED_FIELDS}
        found = {self.label(config)}
        if "block_m" in values:
            heights = next_tuned_m(values["block_m"]), next_power_of_two(values["block_m"])
            found |= {f"{self.NAME}({_text({**values, 'block_m': height})})" for height in heights}
        return found


class MemoryBoundProblem(KernelProblem):
    """A problem whose run time is modelled by the memory that its kernels read and write."""

    @property
    def nbytes(self) -> int:
        """The number of bytes that are read and written."""
        raise NotImplementedError


MemoryBoundT = TypeVar("MemoryBoundT", bound=MemoryBoundProblem)


def sole_configs(problem: KernelProblem, device: Device) -> Sequence[SoleConfig]:
    """Return `SoleConfig` as the only configuration of every problem."""
    return (SoleConfig(),)


def traffic_us(config: Config, problem: MemoryBoundProblem, device: Device) -> float:
    """Return the run time in microseconds: launch overhead, and the memory traffic at the nominal bandwidth."""
    return device.rates.launch_us + device.read_us(problem.nbytes)


class SoleConfigFamily(Family[MemoryBoundT, SoleConfig]):
    """A kernel family with one configuration per problem, whose modelled time is that of the memory traffic."""

    configs = staticmethod(sole_configs)

    def estimate_us(self, config: SoleConfig, problem: MemoryBoundT, device: Device) -> float:
        return traffic_us(config, problem, device)


class FunctionFamily(Family[ProblemT, ConfigT]):
    """A kernel family whose methods are functions of its module; the arguments are named as in `Family`."""

    def __init__(
        self,
        name: str,
        configs: Callable[[ProblemT, Device], Sequence[ConfigT]],
        estimate_us: Callable[[ConfigT, ProblemT, Device], float],
        plan: Callable[[ConfigT, ProblemT, Device], LaunchPlan],
        refusal: Callable[[ProblemT, Device], str | None] | None = None,
        *,
        needs: tuple[Capability, ...] = (),
        layout: str | None = None,
        workspace: Callable[[ConfigT, ProblemT], Workspace] | None = None,
        prepare_weight: Callable[[BlockQuantizedWeight, ConfigT, ProblemT], Mapping[str, Array | None]] | None = None,
        reduction: Callable[[ConfigT, ProblemT], Reduction | None] | None = None,
        describe_work: Callable[[ConfigT, ProblemT], str | None] | None = None,
        time_parts: Callable[[ConfigT, ProblemT, Device], object] | None = None,
    ) -> None:
        self.NAME, self.needs, self.layout = name, needs, layout
        methods = {
            "configs": configs,
            "estimate_us": estimate_us,
            "plan": plan,
            "refusal": refusal,
            "workspace": workspace,
            "prepare_weight": prepare_weight,
            "reduction": reduction,
            "describe_work": describe_work,
            "time_parts": time_parts,
        }
        vars(self).update((method, function) for method, function in methods.items() if function is not None)


AnyFamily = Family[Any, Any]


def config_text(config: Config, without: Sequence[str] = ()) -> str:
    """Return the fields of a configuration, except ``without``, as ``name=value`` separated by commas."""
    return _text({name: value for name, value in vars(config).items() if name not in without})


def _text(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
