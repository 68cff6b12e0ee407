# SPDX-License-Identifier: Apache-2.0
"""The order in which the GEMM kernels add products along K (`Reduction`).

A row of y has the same bits for every M if the kernels for all M use the same reduction. For a batch-invariant weight,
`select.choose_reduction` chooses one reduction, and only configurations with this reduction are used
(`Family.reduction`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Any

from cupy_awq.kernels.family import Config, Reduction

WGMMA_FIELDS = frozenset(
    "name block_m weight_tiles m64_tiles consumers stages split_k k_tiles ctas_per_sm x_rows x_stages scaled"
    " prefetch_weights cluster ctas stream_k_units stream_k_clusters warpgroups".split()
)
"""The fields of configurations of ``gemm_sm90`` and ``gemm_sm90_large`` whose effect on the reduction is known."""


def slice_begins(k_tiles: int, slices: int) -> tuple[int, ...]:
    """Return the first k tile of each of ``slices`` slices of equal size.

    >>> slice_begins(5, 2)
    (0, 2)
    """
    return tuple(k_tiles * i // slices for i in range(slices))


def wgmma_reduction(
    config: Config, stages: int, k_tiles: int, split_k: int = 1, consumers: int = 1, *, scaled: bool = True
) -> Reduction | None:
    """Return the reduction of a wgmma kernel for the fragment layout.

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
