# SPDX-License-Identifier: Apache-2.0
"""The groups of rows of a packed weight that represent the groups of a file exactly."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cupy_awq.checkpoint.module_tensors import ModuleTensors
from cupy_awq.checkpoint.tensors import Array
from cupy_awq.packing import namespace


def resolve_group_size(tensors: ModuleTensors, k: int, group_size: int | None) -> int:
    """Return the group size of a module with K rows: the setting ``group_size``, or K if the setting is -1 or None.

    Raises CheckpointError for a setting that is neither -1, None nor a positive integer.
    """
    if group_size is None or group_size == -1:
        return k
    if type(group_size) is not int or group_size < 1:
        raise tensors.error(f"group_size: expected -1 or a positive integer, got {group_size!r:.80}")
    return group_size


class Groups(NamedTuple):
    """The groups and the row order of a packed weight, and the mapping from the groups of the file to these groups."""

    size: int
    """The number of rows of W per group in the packed weight."""
    repeats: tuple[int, int] | None
    """(The number of packed groups per group of the file, the total number of packed groups).

    None if the groups of the file are not split into smaller groups of the packed weight.
    """
    order: npt.NDArray[np.int32] | None
    """The permutation of the last axis of x, int32 [K]; None without an activation order."""

    def expand(self, values: Array) -> Array:
        """Return scales or zero points [groups of the file, ...], repeated to [groups of the packed weight, ...]."""
        if self.repeats is None:
            return values
        times, rows = self.repeats
        repeated: Array = namespace(values).repeat(values, times, axis=0)
        return repeated[:rows]


def regroup(tensors: ModuleTensors, k: int, group_size: int, g_idx: Array | None, name: str) -> Groups:
    """Return the groups that a packed weight needs to represent the groups of a file exactly.

    If the last group is short, all groups are split into groups of gcd(G, K mod G) rows. For G = 128, the new groups
    have 64 rows, which the fastest kernels support, if K is a multiple of 64; else 32 or 16 rows if K is a multiple of
    32 or 16.

    Args:
        tensors: the module, for error messages.
        k: the number of rows of W.
        group_size: the group size G of the file.
        g_idx: int32 [K], the group index of each row; None if row k belongs to group k // G.
        name: the suffix of the tensor ``g_idx``, for error messages.

    Raises:
        CheckpointError: an index is out of range, or an activation order has groups of different sizes.
    """
    group_size = min(group_size, k)  # a group size above K means one group
    count = -(-k // group_size)
    order = None if g_idx is None else _find_order(tensors, k, group_size, count, g_idx, name)
    if k % group_size == 0:
        return Groups(group_size, None, order)
    size = math.gcd(group_size, k % group_size)
    return Groups(size, (group_size // size, k // size), order)


def _find_order(
    tensors: ModuleTensors, k: int, group_size: int, count: int, g_idx: Array, name: str
) -> npt.NDArray[np.int32] | None:
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= count:
        raise tensors.error(f"{name}: expected groups 0 to {count - 1}, got {low if low < 0 else high}")
    if high == 0 or np.array_equal(g_idx, np.arange(k, dtype=np.int64) // group_size):
        return None  # no activation order; older files then store a g_idx of zeros
    sizes = np.bincount(g_idx, minlength=count)
    if (sizes != group_size).any():
        found = f"{sizes.min()} and {sizes.max()} rows"
        raise tensors.error(f"{name}: expected groups of {group_size} rows, got groups of {found}")
    return np.argsort(g_idx, kind="stable").astype(np.int32)
