# SPDX-License-Identifier: Apache-2.0
"""`Reduction`: the order in which a GEMM kernel adds products along K.

A row of y has the same bits for every M if the kernels for all M use the same reduction. For a batch-invariant weight,
`select.choose_reduction` chooses one reduction, and only configurations with this reduction are used. A kernel family
returns the reduction of a configuration by the function ``reduction(config, problem)``; configurations of families
without this function, and those whose reduction is None, are not used for batch-invariant weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from cupy_awq.kernels.family import AnyFamily, Config, KernelProblem

WGMMA_FIELDS = frozenset(
    "name block_m weight_tiles m64_tiles consumers stages split_k k_tiles ctas_per_sm x_rows x_stages scaled"
    " prefetch_weights cluster ctas stream_k_units stream_k_clusters warpgroups".split()
)
"""The fields of configurations of ``gemm_sm90`` and ``gemm_sm90_large`` whose effect on the reduction is known."""


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


def slice_begins(k_tiles: int, slices: int) -> tuple[int, ...]:
    """Return the first k tile of each of ``slices`` slices of equal size.

    >>> slice_begins(5, 2)
    (0, 2)
    """
    return tuple(k_tiles * i // slices for i in range(slices))


def wgmma_reduction(
    config: Config, stages: int, k_tiles: int, split_k: int = 1, consumers: int = 1, *, scaled: bool = True
) -> Reduction | None:
    """Return the reduction of a wgmma kernel for the repacked layout.

    Return None if a field of ``config`` that is not in WGMMA_FIELDS differs from its default, because such a field may
    change the order.

    Args:
        config: the configuration.
        stages: number of stages of ``k_tiles`` k tiles that cover K.
        k_tiles: number of k tiles per stage.
        split_k: number of slices.
        consumers: number of consumers, which take turns at the stages.
        scaled: whether weights are multiplied by their scale before the wgmma.
    """
    if not has_only(config, WGMMA_FIELDS):
        return None
    math = "wgmma with scaled weights" if scaled else "wgmma with scaled accumulators"
    begins = tuple(begin * k_tiles for begin in slice_begins(stages, split_k))
    return Reduction(math, begins, consumers, k_tiles if consumers > 1 else 0)


def has_only(config: Config, known: Collection[str]) -> bool:
    """Return whether each field of a configuration is in ``known`` or has its default value."""
    found: Any = config
    unknown = (f for f in fields(found) if f.name not in known)
    return all(f.default is not MISSING and getattr(found, f.name) == f.default for f in unknown)


def reduction_of(family: AnyFamily, config: Config, problem: KernelProblem) -> Reduction | None:
    """Return the reduction of a configuration, or None if the family does not guarantee one for every M."""
    find = getattr(family, "reduction", None)
    found: Reduction | None = None if find is None else find(config, problem)
    return found
