# SPDX-License-Identifier: Apache-2.0
"""Finds unordered accesses to shared memory, whatever order the simulator happened to execute them in.

Each warp has a clock, which counts its synchronisations, and knows up to which time of every other warp of its cluster
it is ordered behind that warp (a vector clock). Each grain of shared memory remembers its last write and, for every
warp, the last read. An access races with an earlier one that its warp does not know to be over. Lanes of one warp race
too, unless ``__syncwarp`` or a barrier lies between.

The asynchronous proxy (bulk copies, wgmma) is a second kind of access: what a thread stored is ordered before it only
through ``fence.proxy.async``, so there is a second table of what is known to be fenced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from tests.simt.access import AT_BITS, GENERIC, NEVER, PENDING, TIME_SHIFT, access_code, thread_of
from tests.simt.global_races import GlobalRaces

if TYPE_CHECKING:
    from tests.simt.machine import Machine

Array = Any


class Races:
    """The clocks of all warps and the access history of all shared memory."""

    def __init__(self, machine: Machine, grains: tuple[int, int]) -> None:
        self.machine, self.grain = machine, grains[0]
        warps = machine.threads // 32
        self.columns = machine.cluster_threads // 32  # warps of a cluster
        self.column = np.arange(warps) % self.columns
        # known[0, u, v]: warp u is ordered behind warp v up to this time; known[1]: so is its asynchronous proxy;
        # known[2]: so are other blocks that learn from u.
        self.known = np.zeros((3, warps, self.columns), np.int64)
        self.known[:, :, ~machine.live.reshape(warps, 32).max(axis=1)[: self.columns]] = PENDING  # padding
        self.time = np.ones(warps, np.int64)
        self._set_own()
        self.touched = np.zeros(machine.threads, np.int64)  # when a lane last used shared memory by itself
        count = machine.memory.shared.data.size // self.grain
        self.writes = np.zeros(count, np.int64)
        self.reads = np.zeros((self.columns, count), np.int64)
        self.has_pending_reads = False
        self.globals = GlobalRaces(machine, self, grains[1])
        self.visited = np.zeros((machine.blocks, self.columns), np.int64)  # last use of a block's memory by others

    def _set_own(self) -> None:
        self.known[0, np.arange(len(self.time)), self.column] = self.time
        # All accesses up to this time are ordered before the warp, whoever made them.
        self.floor = np.minimum(self.known[0].min(axis=1), self.time - 1)

    def _advance(self, warps: Array) -> None:
        self.time[warps] += 1
        self._set_own()

    # ---- accesses: byte positions in shared memory, one for each thread in ``lanes``

    def read(self, position: Array, size: int, lanes: Any, at: int, together: bool = False) -> None:
        """A read; ``together``: by a warp as a whole, so that its lanes do not race."""
        grains, threads = self._grains(position, size), self._threads(lanes)
        warps = threads >> 5
        self._check_writes(grains, threads, at, "read")
        access = access_code(self.time[warps], threads, at)
        if self.has_pending_reads:
            access = np.maximum(self.reads[self.column[warps], grains], access)
        self.reads[self.column[warps], grains] = access
        if not together:
            self.touched[threads[:, 0]] = self.time[warps[:, 0]]

    def write(self, position: Array, size: int, lanes: Any, at: int) -> None:
        grains, threads = self._grains(position, size), self._threads(lanes)
        warps = threads >> 5
        self._check_writes(grains, threads, at, "write")
        self._check_reads(grains, threads, at, "write")
        self.writes[grains] = access_code(self.time[warps], threads, at) | GENERIC
        self.touched[threads[:, 0]] = self.time[warps[:, 0]]

    def start_write(self, position: Array, size: int, lanes: Any, at: int) -> None:
        """An asynchronous copy begins to write: ordered with nothing until ``finish_write``."""
        grains, threads = self._grains(position, size), self._threads(lanes)
        self._check_writes(grains, threads, at, "asynchronous write")
        self._check_reads(grains, threads, at, "asynchronous write")
        self.writes[grains] = access_code(PENDING, threads, at)

    def check_known(self, position: Array, size: int, lanes: Any, at: int) -> None:
        """Fail unless the last write is ordered before the threads."""
        self._check_writes(self._grains(position, size), self._threads(lanes), at, "use")

    def finish_write(self, position: Array, size: int, lanes: Any, at: int, time: Array | None = None) -> None:
        """The copy is over; its time is that of the waiting thread's warp, or ``time``."""
        grains, threads = self._grains(position, size), self._threads(lanes)
        self.writes[grains] = access_code(self.time[threads >> 5] if time is None else time, threads, at)

    def start_read(self, position: Array, size: int, lanes: Any, at: int) -> None:
        """The asynchronous proxy begins to read: stores must be fenced before it."""
        grains, threads = self._grains(position, size), self._threads(lanes)
        self._check_writes(grains, threads, at, "asynchronous read", proxy=1)
        self.reads[self.column[threads >> 5], grains] = access_code(PENDING, threads, at)
        self.has_pending_reads = True

    def finish_read(self, position: Array, size: int, lanes: Any, at: int) -> None:
        grains, threads = self._grains(position, size), self._threads(lanes)
        warps = threads >> 5
        self.reads[self.column[warps], grains] = access_code(self.time[warps], threads, at)

    def remote(self, owner: Array, threads: Array) -> None:
        """Threads use the shared memory of the blocks ``owner`` through the cluster."""
        warps = threads >> 5
        self.visited[owner, self.column[warps]] = self.time[warps]

    def on_exit(self, active: Array) -> None:
        """The uses of a block's memory by others must be ordered before its exit."""
        machine = self.machine
        rows = active.reshape(machine.blocks, -1)
        gone = rows.any(axis=1) & ~machine.live.reshape(machine.blocks, -1).max(axis=1)
        known = self.known[0].reshape(machine.blocks, -1, self.columns).max(axis=1)
        for block in np.flatnonzero(gone & (self.visited > known).any(axis=1)):
            text = "the block exits while others of its cluster may still use its shared memory"
            machine.fail("race", text, len(machine.program.instructions), np.flatnonzero(rows[block])[:1])

    def _grains(self, position: Array, size: int) -> Array:
        first = (position >> self.grain.bit_length() - 1)[:, None]
        return first + np.arange(size // self.grain) if size > self.grain else first

    def _threads(self, lanes: Any) -> Array:
        numbers = np.arange(self.machine.threads) if isinstance(lanes, slice) else lanes
        return numbers[:, None]

    def _address(self, grains: Array) -> Array:
        return grains * self.grain % self.machine.memory.shared.stride

    def _check_writes(self, grains: Array, threads: Array, at: int, verb: str, proxy: int = 0) -> None:
        access = self.writes[grains]
        time, warps = access >> TIME_SHIFT, threads >> 5
        if not proxy and (time <= self.floor[warps]).all():
            return
        writer, generic = thread_of(access), (access & GENERIC) != 0
        bad = time > self.known[0, warps, self.column[writer >> 5]]
        if proxy:
            unfenced = generic & (time > self.known[1, warps, self.column[writer >> 5]])
            if unfenced.any() and not bad.any():
                self.fail(
                    unfenced,
                    access,
                    threads,
                    at,
                    verb,
                    "wrote",
                    "no fence.proxy.async lies between",
                    self._address(grains),
                )
        else:
            bad |= generic & (writer >> 5 == warps) & (writer != threads) & (time == self.time[warps])
        if bad.any():
            self.fail(bad, access, threads, at, verb, "wrote", "nothing orders the two", self._address(grains))

    def _check_reads(self, grains: Array, threads: Array, at: int, verb: str) -> None:
        warps = threads >> 5
        for column, reads in enumerate(self.reads):
            access = reads.take(grains)
            time = access >> TIME_SHIFT
            if (time <= self.floor[warps]).all():
                continue
            bad = time > self.known[0, warps, column]
            bad |= (column == self.column[warps]) & (thread_of(access) != threads) & (time == self.time[warps])
            if bad.any():
                self.fail(bad, access, threads, at, verb, "read", "nothing orders the two", self._address(grains))

    def fail(
        self,
        bad: Array,
        access: Array,
        threads: Array,
        at: int,
        verb: str,
        earlier: str,
        why: str,
        address: Array = None,
    ) -> NoReturn:
        """Report the first of the accesses [threads, grains] that are ``bad``; ``access`` are the earlier ones."""
        machine = self.machine
        row, column = (int(index[0]) for index in np.nonzero(bad))
        other = int(np.broadcast_to(access, bad.shape)[row, column])
        block, thread = machine.thread(int(thread_of(other)))
        where = machine.program.instructions[other & ((1 << AT_BITS) - 1)].source
        text = f"{verb} of what thread {thread} of block {block} {earlier} at {where}; {why}"
        where_at = None if address is None else int(address[row, column])
        machine.fail("race", text, at, threads[:, 0], row, where_at)

    # ---- synchronisation

    def meet(self, members: Array, released: Array) -> None:
        """A barrier of a block is complete: the threads ``released`` are ordered behind all ``members``."""
        blocks = self.machine.blocks
        arrived = self._warps(members)
        joined = np.where(arrived[:, None], self.known, NEVER).reshape(3, blocks, -1, self.columns).max(axis=2)
        joined = np.repeat(joined, len(arrived) // blocks, axis=1)
        self.known = np.where(self._warps(released)[:, None], np.maximum(self.known, joined), self.known)
        self.globals.meet(arrived, self._warps(released), blocks)
        self._set_own()
        self._advance(np.flatnonzero(arrived))

    def warp_barrier(self, active: Array) -> None:
        self._advance(np.flatnonzero(self._warps(active)))

    def release(self, lanes: Array) -> Array:
        """What the threads ``lanes`` of one warp publish: their knowledge and their own past.

        The past of lanes that used shared memory since the warp last synchronised, and are not among them, is not.
        """
        warp = int(lanes[0]) >> 5
        published = self.known[:, warp].copy()
        others = np.arange(32 * warp, 32 * warp + 32)
        others = others[~np.isin(others, lanes)]
        if np.any(self.touched[others] == self.time[warp]):
            published[0, self.column[warp]] -= 1
        self._advance(np.array([warp]))
        return published

    def acquire(self, warps: Array, published: Array) -> None:
        """Warps learn what was published; ``published`` is [3, columns] or [3, warps, columns]."""
        if published.ndim == 2:
            published = published[:, None]
        self.known[:, warps] = np.maximum(self.known[:, warps], published)
        self._set_own()

    def fence_proxy(self, active: Array) -> None:
        """``fence.proxy.async``: all that the warp knows of is now fenced."""
        warps = np.flatnonzero(self._warps(active))
        self.known[1, warps] = np.maximum(self.known[1, warps], self.known[0, warps])
        self._advance(warps)

    def fence(self, active: Array) -> None:
        """``__threadfence``: all that the warp knows of is now fenced, and what it saw at atomics is known."""
        warps = np.flatnonzero(self._warps(active))
        self.known[2, warps] = np.maximum(self.known[2, warps], self.known[0, warps])
        self.globals.fence(warps)
        self._advance(warps)

    def nothing_known(self) -> Array:
        return np.zeros((3, self.columns), np.int64)

    def cluster_release(self, active: Array, clocks: Array) -> None:
        """Threads arrive at the cluster barriers whose published knowledge is ``clocks`` [3, clusters, columns]."""
        warps = np.flatnonzero(self._warps(active))
        for warp in warps:
            cluster = warp // self.columns
            clocks[:, cluster] = np.maximum(clocks[:, cluster], self.known[:, warp])
        self._advance(warps)

    def cluster_acquire(self, active: Array, clocks: Array) -> None:
        warps = np.flatnonzero(self._warps(active))
        self.acquire(warps, clocks[:, warps // self.columns])
        everyone = np.ones(len(self.time), bool)
        self.globals.meet(everyone, self._warps(active), len(self.time) // self.columns)

    def _warps(self, active: Array) -> Array:
        return np.asarray(active.reshape(-1, 32).any(axis=1))
