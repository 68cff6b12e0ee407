# SPDX-License-Identifier: Apache-2.0
"""The choice of a kernel and a configuration for a problem.

`choose` returns the tuned configuration if there is one, and otherwise the legal configuration with the lowest time by
cost model, over all families. The functions are pure and serve every type of problem.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, NamedTuple, ParamSpec

from cupy_awq.kernels import tuned
from cupy_awq.kernels.family import AnyFamily, Config, KernelProblem, Reduction, config_text
from cupy_awq.kernels.gemm.layouts import LAYOUTS
from cupy_awq.kernels.gemm.problem import Problem
from cupy_awq.kernels.registry import FAMILIES_OF
from cupy_awq.kernels.tuned import TunedConfig
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan
from cupy_awq.runtime.workspace import COUNTERS, WORKSPACE_BYTES

ONE_TILE_M = 128
"""The largest M that fits in one CTA tile of most configurations."""

RUNNERS_UP = 2
"""The number of further configurations of the chosen family that `explain` shows."""

TUNED_LIMIT = 0.9
"""The ratio of modelled times, best to tuned, below which the best configuration replaces one tuned at a larger M.

Replacing saves 13% of the run time (geometric mean over ten shapes on an H100).
"""


class Candidate(NamedTuple):
    """A legal configuration of a kernel family.

    Attributes:
        family: the kernel family.
        config: the configuration.
        us: run time by the family's cost model, in microseconds.
    """

    family: AnyFamily
    config: Config
    us: float

    @property
    def label(self) -> str:
        """The label of the configuration in a tuned table."""
        return self.family.label(self.config)


@dataclass(frozen=True)
class Choice:
    """The kernel and configuration chosen for a problem.

    Attributes:
        problem: the problem.
        family: the kernel family.
        config: the configuration of the family.
        plan: the launch plan of the configuration.
        tuned: the entry of a tuned table that determined the choice, or None if the cost models did.
    """

    problem: KernelProblem
    family: AnyFamily
    config: Config
    plan: LaunchPlan
    tuned: TunedConfig | None = None

    @property
    def name(self) -> str:
        """The name of the kernel family, as ``kernel=`` takes it."""
        return self.family.NAME


def families(problem: KernelProblem) -> dict[str, AnyFamily]:
    """Return the kernel families for the type of ``problem``, by name."""
    return FAMILIES_OF[type(problem)]


def weight_layouts(k: int, n: int, group_size: int, scales_dtype: str, zeros: str, device: Device) -> tuple[str, ...]:
    """Return the names of the layouts in which `AwqLinear` stores a weight: those that kernels read on the GPU.

    The arguments are the fields of `WeightLayout`, and the GPU. The kernels are those for x in the dtype of the scales.

    >>> from cupy_awq.runtime.device import nominal
    >>> weight_layouts(4096, 4096, 128, "float16", "packed", nominal(90))
    ('awq', 'fragments')
    >>> weight_layouts(4096, 4096, 128, "float16", "packed", nominal(70))
    ('awq',)
    """
    problems = {
        name: Problem(1, n, k, group_size, scales_dtype, scales_dtype, zeros, layouts=(name,)) for name in LAYOUTS
    }
    return tuple(
        name
        for name, problem in problems.items()
        if any(family.refusal(problem, device) is None for family in FAMILIES_OF[Problem].values())
    )


def candidates(problem: KernelProblem, device: Device, split_k: int | None = None) -> dict[str, list[Candidate] | str]:
    """Return, by family name, the legal configurations (lowest modelled time first), or the reason why there are none.

    With ``split_k``, only configurations with this split-K factor are legal.
    """
    found: dict[str, list[Candidate] | str] = {}
    reasons = {name: family.refusal(problem, device) for name, family in families(problem).items()}
    reduction = None
    if problem.batch_invariant and None in reasons.values():
        reduction = choose_reduction(problem, device)
    for name, family in families(problem).items():
        reason = reasons[name]
        if reason is not None:
            found[name] = reason
            continue
        legal = [
            candidate
            for candidate in _legal(family, problem, device)
            if split_k in (None, candidate.config.split_k)
            and reduction in (None, family.reduction(candidate.config, problem))
        ]
        legal.sort(key=lambda candidate: candidate.us)
        if reduction is not None:
            found[name] = legal or "has no configuration with the batch-invariant order of additions along K"
            continue
        found[name] = legal or (f"has no configuration with split_k={split_k}" if split_k else "has no configuration")
    return found


def _legal(family: AnyFamily, problem: KernelProblem, device: Device) -> Iterator[Candidate]:
    for config in family.configs(problem, device):
        partial_bytes, counters = family.workspace(config, problem)
        if partial_bytes <= WORKSPACE_BYTES and counters <= COUNTERS:
            yield Candidate(family, config, family.estimate_us(config, problem, device))


def choose_reduction(problem: KernelProblem, device: Device) -> Reduction:
    """Return the reduction of the batch-invariant GEMMs with the weight of ``problem``.

    The result depends on the weight, the dtype of x and the device, and neither on M nor on the epilogue: it minimizes
    the largest modelled slowdown over `KernelProblem.reduction_samples`, compared with problems that are not
    batch-invariant.
    """
    return _choose_reduction(problem.reduction_samples(), device)


@functools.lru_cache(maxsize=1024)
def _choose_reduction(problems: tuple[Any, ...], device: Device) -> Reduction:
    tables = [_reduction_times(problem, device) for problem in problems]
    common = [reduction for reduction in tables[0] if all(reduction in table for table in tables)]
    default = [
        min(candidate.us for candidate in _all_legal(replace(problem, batch_invariant=False), device))
        for problem in problems
    ]

    def slowdown(reduction: Reduction) -> float:
        return max(table[reduction] / us for table, us in zip(tables, default, strict=True))

    return min(common, key=slowdown)


def _all_legal(problem: KernelProblem, device: Device) -> Iterator[Candidate]:
    for family in families(problem).values():
        if family.refusal(problem, device) is None:
            yield from _legal(family, problem, device)


def _reduction_times(problem: KernelProblem, device: Device) -> dict[Reduction, float]:
    """Return the lowest modelled time of each reduction, in microseconds."""
    times: dict[Reduction, float] = {}
    for family, config, us in _all_legal(problem, device):
        reduction = family.reduction(config, problem)
        if reduction is not None:
            times[reduction] = min(us, times.get(reduction, us))
    return times


@dataclass
class _Trial:
    """The state through which `forced`, `forced_shapes` and `recorded` change what `choose` does.

    Attributes:
        find: a function that returns the candidate that `choose` must return for a problem, or None to choose normally.
        choices: all choices that `choose` has returned in the context.
    """

    find: Callable[[KernelProblem], Candidate | None] = lambda problem: None
    choices: list[Choice] = field(default_factory=list)


_trial: ContextVar[_Trial | None] = ContextVar("trial", default=None)


@contextlib.contextmanager
def forced(candidate: Candidate) -> Iterator[None]:
    """Make `choose` return ``candidate`` for every problem of its family's type, so that `tune` can time it."""
    with _use(_Trial(lambda problem: candidate if candidate.family.NAME in families(problem) else None)):
        yield


@contextlib.contextmanager
def forced_shapes(candidates: Mapping[str, Candidate]) -> Iterator[None]:
    """Make `choose` return ``candidates[shape]`` for problems with this shape, the first of their `TuningKey`."""

    def find(problem: KernelProblem) -> Candidate | None:
        key = problem.tuning_key
        return None if key is None else candidates.get(key.shapes[0])

    with _use(_Trial(find)):
        yield


@contextlib.contextmanager
def recorded() -> Iterator[list[Choice]]:
    """Collect all choices that `choose` returns in the context, so that `bench` and `tune` know the launches."""
    trial = _Trial()
    with _use(trial):
        yield trial.choices


@contextlib.contextmanager
def _use(trial: _Trial) -> Iterator[None]:
    token = _trial.set(trial)
    _empty_planners()
    try:
        yield
    finally:
        _trial.reset(token)
        _empty_planners()


_planners: list[Any] = []


def _empty_planners() -> None:
    for cached in _planners:
        cached.cache_clear()


def choose(problem: KernelProblem, device: Device, kernel: str | None = None, split_k: int | None = None) -> Choice:
    """Return the tuned configuration of a problem if there is one, else the one with the lowest modelled time.

    Args:
        problem: a problem of any type in FAMILIES_OF.
        device: the GPU.
        kernel: name of the only family to consider, or None for all families.
        split_k: the only split-K factor to consider, or None for all factors.

    Raises:
        ValueError: no family has this name, or none can solve the problem; the message gives each family's reason.
    """
    trial = _trial.get()
    if trial is None:
        return _choose(problem, device, kernel, split_k)
    candidate = trial.find(problem)
    choice = _choose(problem, device, kernel, split_k) if candidate is None else _planned(candidate, problem, device)
    trial.choices.append(choice)
    return choice


def modelled_us(problem: KernelProblem, device: Device, kernel: str | None = None) -> float:
    """Return the modelled run time of the configuration that `choose` returns, in microseconds."""
    choice = _choose(problem, device, kernel, None)
    return choice.family.estimate_us(choice.config, problem, device)


Arguments = ParamSpec("Arguments")


def planner(
    make_problem: Callable[Arguments, KernelProblem],
) -> Callable[Concatenate[Device, Arguments], LaunchPlan]:
    """Return a function that returns the launch plan that `choose` chooses for ``make_problem(*arguments)``.

    Its arguments are a device and those of ``make_problem``. Plans are cached by these arguments, because creating a
    problem for each launch of a decoder would take longer than finding its plan; `forced` and the like empty the cache.
    """

    def choose_plan(device: Device, /, *arguments: Arguments.args, **options: Arguments.kwargs) -> LaunchPlan:
        return choose(make_problem(*arguments, **options), device).plan

    cached: Any = functools.lru_cache(maxsize=1024)(choose_plan)
    _planners.append(cached)
    found: Callable[Concatenate[Device, Arguments], LaunchPlan] = cached
    return found


@functools.lru_cache(maxsize=4096)
def _choose(problem: KernelProblem, device: Device, kernel: str | None, split_k: int | None) -> Choice:
    if kernel is not None and kernel not in families(problem):
        raise ValueError(f"kernel: expected one of {', '.join(families(problem))}, got {kernel!r}")
    found = candidates(problem, device, split_k)
    if kernel is not None:
        found = {kernel: found[kernel]}
    legal = [candidate for some in found.values() if not isinstance(some, str) for candidate in some]
    if not legal:
        reasons = "; ".join(f"{name} {reason}" for name, reason in found.items())
        raise ValueError(f"no kernel fits: {reasons}")
    best = min(legal, key=lambda candidate: candidate.us)
    key, entry = problem.tuning_key, tuned.lookup(problem, device)
    if key is not None and entry is not None:
        for candidate in legal:
            if _has_label(key.m, candidate, entry) and _applies(key.m, candidate, entry, best):
                choice = _planned(candidate, problem, device, entry)
                if not entry.is_outdated(choice.plan.kernel.source):
                    return choice
    return _planned(best, problem, device)


def _planned(candidate: Candidate, problem: KernelProblem, device: Device, entry: TunedConfig | None = None) -> Choice:
    family, config, _ = candidate
    return Choice(problem, family, config, family.plan(config, problem, device), entry)


def _has_label(m: int, candidate: Candidate, entry: TunedConfig) -> bool:
    """Return whether ``entry.label`` denotes a candidate; at another small M, ``block_m`` may be rounded up."""
    if m == entry.m or m > ONE_TILE_M:
        return candidate.label == entry.label
    return entry.label in candidate.family.labels(candidate.config)


def _applies(m: int, candidate: Candidate, entry: TunedConfig, best: Candidate) -> bool:
    """Return whether ``candidate``, which was tuned at ``entry.m``, is used at ``m``.

    For M > ONE_TILE_M, ``m`` may have fewer tiles than ``entry.m``, so that ``best``, the candidate with the lowest
    modelled time, utilizes the SMs better; see TUNED_LIMIT.
    """
    return m <= ONE_TILE_M or m == entry.m or best.us >= TUNED_LIMIT * candidate.us


class ExplainedKernel(NamedTuple):
    """One line of the table that `explain` prints: a kernel family and its best configuration."""

    kernel: str
    """The name of the kernel family, as ``kernel=`` takes it."""
    us: float | None
    """The time in microseconds, or None if the family is not legal."""
    time: str | None
    """"modelled" by the cost model or "measured" by `tune`; None if the family is not legal."""
    configuration: str
    """The configuration, or the reason why the family is not legal."""
    is_chosen: bool = False
    """Whether this is the configuration that runs."""


def explain_kernels(problem: KernelProblem, device: Device) -> list[ExplainedKernel]:
    """Return the lines of the table of `explain`, in its order."""
    choice = choose(problem, device)
    lines = []
    for name, some in candidates(problem, device).items():
        if isinstance(some, str):
            lines.append(ExplainedKernel(name, None, None, some))
        elif name != choice.name:
            lines.append(ExplainedKernel(name, some[0].us, "modelled", config_text(some[0].config)))
        else:
            us, source = next(c.us for c in some if c.config == choice.config), "modelled"
            if choice.tuned is not None and choice.tuned.us is not None:
                us, source = choice.tuned.us, "measured"
            lines.append(ExplainedKernel(name, us, source, config_text(choice.config), is_chosen=True))
            others = [c for c in some if c.config != choice.config][:RUNNERS_UP]
            lines += [ExplainedKernel(name, c.us, "modelled", config_text(c.config)) for c in others]
    return lines


def explain(problem: KernelProblem, device: Device) -> str:
    """Return a table with each family's best configuration and its time, or the reason why the family has none.

    ``->`` marks the choice, which is followed by the RUNNERS_UP configurations of its family with the next lower times.
    The choice's time is "measured" if a tuned table records it; all other times are "modelled" by the cost models. If
    the family of the choice has `Family.describe_work` or `Family.time_parts`, a line says how the work is divided
    among the CTAs, or gives the parts that add up to the modelled time. The line "chosen" says whether a tuned table or
    the cost models determined the choice, and the last line of a batch-invariant problem gives its order of additions.
    """
    choice = choose(problem, device)
    width = max(map(len, families(problem)))
    lines = [f"{problem} on {device.name} (sm_{device.arch})"]
    lines.append(f"   {'kernel':{width}}       us  time      configuration")

    earlier = ""
    for name, us, source, text, is_chosen in explain_kernels(problem, device):
        time = "       -  -       " if us is None else f"{us:8.1f}  {source:8}"
        shown = "" if name == earlier else name
        lines.append(f"{'->' if is_chosen else '':2} {shown:{width}} {time}  {text}".rstrip())
        earlier = name
    work = choice.family.describe_work(choice.config, problem)
    if work is not None:
        lines.append(f"work: {work}")
    parts = choice.family.time_parts(choice.config, problem, device)
    if parts is not None:
        lines.append(f"modelled parts in us: {parts}")
    if choice.tuned is not None:
        lines.append(f"chosen: the tuned configuration, measured at M={choice.tuned.m} ({choice.tuned.origin})")
    else:
        lines.append(f"chosen: the lowest modelled time; {_explain_untuned(problem, device)}")
    if problem.batch_invariant:
        lines.append(f"batch-invariant for every M: {choose_reduction(problem, device)}")
    return "\n".join(lines)


def _explain_untuned(problem: KernelProblem, device: Device) -> str:
    """Return why no tuned configuration determines the choice for ``problem``."""
    key, entry = problem.tuning_key, tuned.lookup(problem, device)
    if key is None:
        return "kernels of this operation are not tuned"
    if entry is None:
        return tuned.explain_missing(key, device)
    legal = [
        candidate for some in candidates(problem, device).values() if not isinstance(some, str) for candidate in some
    ]
    found = f"{entry.label}, tuned at M={entry.m} ({entry.origin}),"
    for family, config, us in legal:
        if _has_label(key.m, Candidate(family, config, us), entry):
            if entry.is_outdated(family.plan(config, problem, device).kernel.source):
                return f"{found} was measured with other sources of the kernel"
            return f"{found} is modelled to be slower than this one at M={key.m}"
    return f"{found} is not among the legal configurations"
