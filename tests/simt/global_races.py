# SPDX-License-Identifier: Apache-2.0
"""The race detector of global memory: CTAs are ordered by atomics and fences, warps of one CTA by barriers.

CTAs synchronize at atomically accessed words: a writer releases what it has fenced by ``__threadfence``, and a reader
acquires it by a later ``__threadfence``. The history holds writes, not reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simt.access import TIME_SHIFT, access_code, thread_of

if TYPE_CHECKING:
    from tests.simt.machine import Machine
    from tests.simt.memory import Buffer
    from tests.simt.races import Races

Array = Any


class GlobalRaces:
    """The last write to each part of each buffer, and what each warp knows of the accesses of other clusters' warps.

    `Races` has the vector clocks within a cluster.
    """

    def __init__(self, machine: Machine, races: Races, grain: int) -> None:
        self.machine, self.races, self.grain = machine, races, grain
        self._writes: dict[str, Array] = {}
        # By address of an atomically accessed word, the clocks that releases have left there.
        self._published: dict[int, Array] = {}
        warps = machine.threads // 32
        self._empty = np.zeros((warps, warps), np.int64)
        # The clocks that each warp has read by atomics; only a later fence acquires them.
        self._known = self._seen = self._empty

    def read(self, buffer: Buffer, position: Array, size: int, lanes: Any, at: int) -> None:
        if buffer.name in self._writes:
            self._check(buffer, self._grains(position, size), self._threads(lanes), at, "read")

    def write(self, buffer: Buffer, position: Array, size: int, lanes: Any, at: int) -> None:
        grains, threads = self._grains(position, size), self._threads(lanes)
        if buffer.name not in self._writes:
            self._writes[buffer.name] = np.zeros(len(buffer.data) // self.grain + 1, np.int64)
        else:
            self._check(buffer, grains, threads, at, "write")
        self._writes[buffer.name][grains] = access_code(self.races.time[threads >> 5], threads, at)

    def _grains(self, position: Array, size: int) -> Array:
        return (position >> self.grain.bit_length() - 1)[:, None] + np.arange(max(size // self.grain, 1))

    def _threads(self, lanes: Any) -> Array:
        return (np.arange(self.machine.threads) if isinstance(lanes, slice) else lanes)[:, None]

    def _check(self, buffer: Buffer, grains: Array, threads: Array, at: int, verb: str) -> None:
        access, warps, races = self._writes[buffer.name][grains], threads >> 5, self.races
        if not access.any():
            return
        writer = thread_of(access) >> 5
        here = writer // races.columns == warps // races.columns
        known = np.where(here, races.known[0, warps, races.column[writer]], self._known[warps, writer])
        bad = access >> TIME_SHIFT > known
        if bad.any():
            races.fail(bad, access, threads, at, verb, "write")

    def atomic(self, buffer: Buffer, position: Array, lanes: Any, reads: bool, writes: bool) -> None:
        """Record atomic accesses in the order of threads: each acquires what its word has released, then releases."""
        if self._known is self._empty:
            self._known, self._seen = self._empty.copy(), self._empty.copy()
        warps = self._threads(lanes)[:, 0] >> 5
        pairs = np.stack([np.broadcast_to(position, warps.shape) + buffer.base, warps], axis=1)
        _, first = np.unique(pairs, axis=0, return_index=True)
        for address, warp in pairs[np.sort(first)].tolist():
            published = self._published.get(address)
            if reads and published is not None:
                self._seen[warp] = np.maximum(self._seen[warp], published)
            if writes:
                mine = self._fenced(warp)
                self._published[address] = mine if published is None else np.maximum(published, mine)

    def _fenced(self, warp: int) -> Array:
        """Return the clocks of all warps that an atomic of ``warp`` publishes: what ``warp`` knew at its last fence."""
        races = self.races
        first = warp // races.columns * races.columns
        times = self._known[warp].copy()
        times[first : first + races.columns] = races.known[2, warp]
        return times

    def fence(self, warps: Array) -> None:
        if self._known is not self._empty:
            self._known[warps] = np.maximum(self._known[warps], self._seen[warps])

    def meet(self, members: Array, released: Array, groups: int) -> None:
        """Give the warps ``released`` the clocks of the ``members`` of their CTA or cluster at a barrier."""
        if self._known is self._empty:
            return
        for table in (self._known, self._seen):
            joined = np.where(members[:, None], table, 0).reshape(groups, -1, len(table)).max(axis=1)
            joined = np.repeat(joined, len(table) // groups, axis=0)
            table[released] = np.maximum(table, joined)[released]
