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

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.simt.machine import Machine

Array = Any
NEVER, PENDING = 0, 2**30
"""Times before every access and after: an access that is under way is ordered with nothing."""


class Races:
    """The clocks of all warps and the access history of all shared memory."""

    def __init__(self, machine: Machine, grain: int) -> None:
        self.machine, self.grain = machine, grain
        warps = machine.threads // 32
        self.columns = machine.cluster_threads // 32  # warps of a cluster
        self.column = np.arange(warps) % self.columns
        # known[0, u, v]: warp u is ordered behind warp v up to this time; known[1]: so is its asynchronous proxy.
        self.known = np.zeros((2, warps, self.columns), np.int64)
        self.time = np.ones(warps, np.int64)
        self._set_own()
        self.touched = np.zeros(machine.threads, np.int64)  # when a lane last used shared memory by itself
        grains = machine.memory.shared.data.size // grain
        self.write_time = np.zeros(grains, np.int64)
        self.writer = np.zeros(grains, np.int32)  # thread
        self.written_at = np.zeros(grains, np.int32)  # instruction
        self.generic = np.zeros(grains, bool)  # written by a store, not by a copy
        self.read_time = np.zeros((grains, self.columns), np.int64)
        self.reader = np.full(grains, -32, np.int32)
        self.read_at = np.zeros(grains, np.int32)
        self.has_pending_reads = False
        self.visited = np.zeros((machine.blocks, self.columns), np.int64)  # last use of a block's memory by others

    def _set_own(self) -> None:
        self.known[0, np.arange(len(self.time)), self.column] = self.time

    def _advance(self, warps: Array) -> None:
        self.time[warps] += 1
        self.known[0, warps, self.column[warps]] = self.time[warps]

    # ---- accesses: byte positions in shared memory, one for each thread in ``lanes``

    def read(self, position: Array, size: int, lanes: Any, at: int, together: bool = False) -> None:
        """A read; ``together``: by a warp as a whole, so that its lanes do not race."""
        grains, threads = self._grains(position, size), self._threads(lanes)
        warps = threads >> 5
        self._check_writes(grains, threads, at, "read")
        column, time = self.column[warps], self.time[warps]
        if self.has_pending_reads:
            time = np.maximum(self.read_time[grains, column], time)
        self.read_time[grains, column] = time
        self.reader[grains], self.read_at[grains] = threads, at
        if not together:
            self.touched[threads[:, 0]] = self.time[warps[:, 0]]

    def write(self, position: Array, size: int, lanes: Any, at: int) -> None:
        grains, threads = self._grains(position, size), self._threads(lanes)
        warps = threads >> 5
        self._check_writes(grains, threads, at, "write")
        self._check_reads(grains, threads, at, "write")
        self.write_time[grains] = self.time[warps]
        self.writer[grains], self.written_at[grains], self.generic[grains] = threads, at, True
        self.touched[threads[:, 0]] = self.time[warps[:, 0]]

    def start_write(self, position: Array, size: int, lanes: Any, at: int) -> None:
        """An asynchronous copy begins to write: ordered with nothing until ``finish_write``."""
        grains, threads = self._grains(position, size), self._threads(lanes)
        self._check_writes(grains, threads, at, "asynchronous write")
        self._check_reads(grains, threads, at, "asynchronous write")
        self.write_time[grains] = PENDING
        self.writer[grains], self.written_at[grains], self.generic[grains] = threads, at, False

    def check_known(self, position: Array, size: int, lanes: Any, at: int) -> None:
        """Fail unless the last write is ordered before the threads."""
        self._check_writes(self._grains(position, size), self._threads(lanes), at, "use")

    def finish_write(self, position: Array, size: int, lanes: Any, time: Array | None = None) -> None:
        """The copy is over; its time is that of the waiting thread's warp, or ``time``."""
        grains = self._grains(position, size)
        self.write_time[grains] = self.time[self._threads(lanes) >> 5] if time is None else time

    def start_read(self, position: Array, size: int, lanes: Any, at: int) -> None:
        """The asynchronous proxy begins to read: stores must be fenced before it."""
        grains, threads = self._grains(position, size), self._threads(lanes)
        self._check_writes(grains, threads, at, "asynchronous read", proxy=1)
        self.read_time[grains, self.column[threads >> 5]] = PENDING
        self.reader[grains], self.read_at[grains] = threads, at
        self.has_pending_reads = True

    def finish_read(self, position: Array, size: int, lanes: Any) -> None:
        grains, warps = self._grains(position, size), self._threads(lanes) >> 5
        self.read_time[grains, self.column[warps]] = self.time[warps]

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
        first = position // self.grain
        return first[:, None] + np.arange(max(size // self.grain, 1))

    def _threads(self, lanes: Any) -> Array:
        numbers = np.arange(self.machine.threads) if isinstance(lanes, slice) else lanes
        return numbers[:, None]

    def _check_writes(self, grains: Array, threads: Array, at: int, verb: str, proxy: int = 0) -> None:
        time = self.write_time[grains]
        if not time.any():
            return
        writer, warps = self.writer[grains], threads >> 5
        known = self.known[0, warps, self.column[writer >> 5]]
        bad = time > known
        other_lane = (writer >> 5 == warps) & (writer != threads) & (time == self.time[warps])
        if proxy:
            unfenced = self.generic[grains] & (time > self.known[1, warps, self.column[writer >> 5]])
            if unfenced.any() and not bad.any():
                self._fail(unfenced, grains, threads, at, verb, "wrote", "no fence.proxy.async lies between")
        else:
            bad = bad | (other_lane & self.generic[grains])
        if bad.any():
            self._fail(bad, grains, threads, at, verb, "wrote", "nothing orders the two")

    def _check_reads(self, grains: Array, threads: Array, at: int, verb: str) -> None:
        warps = threads >> 5
        times = self.read_time[grains]
        bad = (times > self.known[0, warps[:, 0]][:, None, :]).any(axis=2)
        reader = self.reader[grains]
        own = np.take_along_axis(times, self.column[warps][:, :, None], axis=2)[..., 0]
        bad |= (reader >> 5 == warps) & (reader != threads) & (own == self.time[warps])
        if bad.any():
            self._fail(bad, grains, threads, at, verb, "read", "nothing orders the two")

    def _fail(self, bad: Array, grains: Array, threads: Array, at: int, verb: str, earlier: str, why: str) -> None:
        machine = self.machine
        row, column = (int(index[0]) for index in np.nonzero(bad))
        grain = int(grains[row, column])
        other, line = (self.writer, self.written_at) if earlier == "wrote" else (self.reader, self.read_at)
        block, thread = machine.thread(int(other[grain]))
        where = machine.program.instructions[int(line[grain])].source
        text = f"{verb} of what thread {thread} of block {block} {earlier} at {where}; {why}"
        address = grain * self.grain % machine.memory.shared.stride
        machine.fail("race", text, at, threads[:, 0], row, address)

    # ---- synchronisation

    def meet(self, members: Array, released: Array) -> None:
        """A barrier of a block is complete: the threads ``released`` are ordered behind all ``members``."""
        blocks = self.machine.blocks
        arrived = self._warps(members)
        joined = np.where(arrived[:, None], self.known, NEVER).reshape(2, blocks, -1, self.columns).max(axis=2)
        joined = np.repeat(joined, len(arrived) // blocks, axis=1)
        self.known = np.where(self._warps(released)[:, None], np.maximum(self.known, joined), self.known)
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
        """Warps learn what was published; ``published`` is [2, columns] or [2, warps, columns]."""
        if published.ndim == 2:
            published = published[:, None]
        self.known[:, warps] = np.maximum(self.known[:, warps], published)
        self._set_own()

    def fence_proxy(self, active: Array) -> None:
        """``fence.proxy.async``: all that the warp knows of is now fenced."""
        warps = np.flatnonzero(self._warps(active))
        self.known[1, warps] = np.maximum(self.known[1, warps], self.known[0, warps])
        self._advance(warps)

    def nothing_known(self) -> Array:
        return np.zeros((2, self.columns), np.int64)

    def cluster_release(self, active: Array, clocks: Array) -> None:
        """Threads arrive at the cluster barriers whose published knowledge is ``clocks`` [2, clusters, columns]."""
        warps = np.flatnonzero(self._warps(active))
        for warp in warps:
            cluster = warp // self.columns
            clocks[:, cluster] = np.maximum(clocks[:, cluster], self.known[:, warp])
        self._advance(warps)

    def cluster_acquire(self, active: Array, clocks: Array) -> None:
        warps = np.flatnonzero(self._warps(active))
        self.acquire(warps, clocks[:, warps // self.columns])

    def _warps(self, active: Array) -> Array:
        return np.asarray(active.reshape(-1, 32).any(axis=1))
