# SPDX-License-Identifier: Apache-2.0
"""The race detector of shared memory, which finds unordered accesses whatever the order in which they are simulated.

Each warp has a clock that counts its synchronizations, and a vector clock: for every other warp of its cluster, the
time up to which that warp's accesses are ordered before its own. A grain is the width of the narrowest access. Each
grain of shared memory stores its last write and, for every warp, the last read. An access races with an earlier one
that is later than its warp's vector clock. Lanes of one warp also race, unless a ``__syncwarp`` or a barrier is between
their accesses.

The asynchronous proxy (bulk copies, wgmma) makes accesses of a second kind: stores of a thread are ordered before them
only through ``fence.proxy.async``. So each warp has a second vector clock, of fenced accesses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from tests.simt.access import AT_BITS, GENERIC, NEVER, PENDING, TIME_SHIFT, access_code, thread_of
from tests.simt.global_races import GlobalRaces

if TYPE_CHECKING:
    from tests.simt.machine import Machine

Array = Any
MAX_RECENT = 256
"""The number of reads that are collected before they are entered into the table `reads` together, which is faster."""


class _Readers:
    """The threads of one access as a column, to compare each with all grains (equal pieces of memory) of the access."""

    def __init__(self, races: Races, threads: Array) -> None:
        self.threads = threads[:, None]
        self.warps = self.threads >> 5
        self.bits = self.threads << AT_BITS
        # Where each thread's warp has its row in the table of reads.
        self.rows = races.column[self.warps] * races.grains


class Races:
    """The vector clocks of all warps, and the last accesses to each grain of all CTAs' shared memory."""

    def __init__(self, machine: Machine, grains: tuple[int, int]) -> None:
        self.machine, self.grain = machine, grains[0]
        warps = machine.threads // 32
        self.columns = machine.cluster_threads // 32  # the number of warps per cluster
        self.column = np.arange(warps) % self.columns
        self.alive = machine.live.reshape(warps, 32).any(axis=1)
        # known[0, u, v] is the time up to which warp u is ordered behind warp v's accesses. known[1] is the same for
        # the asynchronous proxy of warp u, known[2] for CTAs that are ordered behind warp u (`fence`).
        self.known = np.zeros((3, warps, self.columns), np.int64)
        self.known[:, :, ~self.alive[: self.columns]] = PENDING  # no padding thread ever accesses memory
        self.time = np.ones(warps, np.int64)
        self._stamp = np.zeros(warps, np.int64)  # each warp's time, shifted to where an access code has it
        # Each warp is ordered behind its own accesses whose codes are below this.
        self._limit = np.zeros(warps, np.int64)
        self._all = np.arange(warps)
        self._update(self._all)
        # For each thread, its warp's time at the thread's last access.
        self.touched = np.zeros(machine.threads, np.int64)
        self.grains = machine.memory.shared.data.size // self.grain
        self.writes = np.zeros(self.grains, np.int64)
        self.reads = np.zeros(self.columns * self.grains, np.int64)
        self._has_reads = False
        # Reads that are not in the table `reads` yet: (grains, threads, access code).
        self._recent: list[tuple[Array, _Readers, Array]] = []
        self.globals = GlobalRaces(machine, self, grains[1])
        # By CTA and warp of its cluster: the time of the warp's last access to the CTA's shared memory from another
        # CTA.
        self.visited = np.zeros((machine.blocks, self.columns), np.int64)
        self._everyone = _Readers(self, np.arange(machine.threads))
        self._last: tuple[Array, _Readers] = (self._everyone.threads, self._everyone)

    def _update(self, warps: Any) -> None:
        """Recompute the tables that speed up checks, `_stamp` and `_limit`, from the clocks of these warps."""
        time = self.time[warps]
        self.known[0, warps, self.column[warps]] = time
        self._stamp[warps] = time << TIME_SHIFT
        self._limit[warps] = np.minimum(self.known[0, warps].min(axis=-1) + 1, time) << TIME_SHIFT

    def _advance(self, warps: Any) -> None:
        self.time[warps] += 1
        self._update(warps)

    # Accesses. ``position`` is the first byte in the array of all CTAs' shared memory, by thread in ``lanes``.

    def read(self, position: Array, size: int, lanes: Any, at: int, together: bool = False) -> None:
        """Record a read.

        ``together`` says that a whole warp reads at once (ldmatrix), so that its lanes do not race.
        """
        grains, readers = self._grains(position, size), self._readers(lanes)
        self._check_writes(grains, readers, at, "read")
        self._recent.append((grains, readers, self._stamp[readers.warps] | readers.bits | at))
        if len(self._recent) == MAX_RECENT:
            self._settle_reads()
        if not together:
            self.touched[lanes] = self.time[readers.warps[:, 0]]

    def write(self, position: Array, size: int, lanes: Any, at: int) -> None:
        """Record a write by ordinary stores."""
        grains, writers = self._grains(position, size), self._readers(lanes)
        self._check_writes(grains, writers, at, "write")
        self._check_reads(grains, writers, at, "write")
        self.writes[grains] = self._stamp[writers.warps] | writers.bits | (at | GENERIC)
        self.touched[lanes] = self.time[writers.warps[:, 0]]

    def start_write(self, position: Array, size: int, lanes: Any, at: int) -> None:
        """Begin the write of an asynchronous copy; it races with any access until `finish_write`."""
        grains, writers = self._grains(position, size), self._readers(lanes)
        self._check_writes(grains, writers, at, "asynchronous write")
        self._check_reads(grains, writers, at, "asynchronous write")
        self.writes[grains] = access_code(PENDING, writers.threads, at)

    def check_known(self, position: Array, size: int, lanes: Any, at: int) -> None:
        """Fail unless the last write to these bytes is ordered before the threads ``lanes``."""
        self._check_writes(self._grains(position, size), self._readers(lanes), at, "use")

    def finish_write(self, position: Array, size: int, lanes: Any, at: int, time: Array | None = None) -> None:
        """End the write of a copy that has landed, at the waiting warp's time or at ``time``."""
        grains, writers = self._grains(position, size), self._readers(lanes)
        stamp = self._stamp[writers.warps] if time is None else time << TIME_SHIFT
        self.writes[grains] = stamp | writers.bits | at

    def start_read(self, position: Array, size: int, lanes: Any, at: int) -> None:
        """Begin a read by the asynchronous proxy, which ``fence.proxy.async`` orders behind stores."""
        grains, readers = self._grains(position, size), self._readers(lanes)
        self._check_writes(grains, readers, at, "asynchronous read", proxy=1)
        self._settle_reads()
        self.reads[readers.rows + grains] = access_code(PENDING, readers.threads, at)
        self._has_reads = True

    def finish_read(self, position: Array, size: int, lanes: Any, at: int) -> None:
        """End a read by the asynchronous proxy, at the time of the waiting thread's warp."""
        grains, readers = self._grains(position, size), self._readers(lanes)
        self.reads[readers.rows + grains] = self._stamp[readers.warps] | readers.bits | at

    def remote(self, owner: Array, threads: Array) -> None:
        """Record that threads access the shared memory of other CTAs, ``owner``, of their cluster."""
        warps = threads >> 5
        self.visited[owner, self.column[warps]] = self.time[warps]

    def on_exit(self, active: Array) -> None:
        """Fail if a CTA exits while other CTAs of its cluster may still access its shared memory."""
        machine = self.machine
        self.alive = machine.live.reshape(-1, 32).any(axis=1)
        rows = active.reshape(machine.blocks, -1)
        gone = rows.any(axis=1) & ~machine.live.reshape(machine.blocks, -1).any(axis=1)
        known = self.known[0].reshape(machine.blocks, -1, self.columns).max(axis=1)
        for block in np.flatnonzero(gone & (self.visited > known).any(axis=1)):
            text = "the CTA exits while others of its cluster may still use its shared memory"
            machine.fail("race", text, len(machine.program.instructions), np.flatnonzero(rows[block])[:1])

    def _grains(self, position: Array, size: int) -> Array:
        first = (position >> self.grain.bit_length() - 1)[:, None]
        return first + np.arange(size // self.grain) if size > self.grain else first

    def _readers(self, lanes: Any) -> _Readers:
        if isinstance(lanes, slice):
            return self._everyone
        if lanes is not self._last[0]:
            self._last = lanes, _Readers(self, lanes)
        return self._last[1]

    def _address(self, grains: Array) -> Array:
        return grains * self.grain % self.machine.memory.shared.stride

    def _check_writes(self, grains: Array, users: _Readers, at: int, verb: str, proxy: int = 0) -> None:
        access, warps, threads = self.writes.take(grains), users.warps, users.threads
        if (access < self._limit[warps]).all() and not (proxy and (access & GENERIC).any()):
            return
        time, writer, generic = access >> TIME_SHIFT, thread_of(access), (access & GENERIC) != 0
        bad = time > self.known[0, warps, self.column[writer >> 5]]
        if proxy:
            unfenced = generic & (time > self.known[1, warps, self.column[writer >> 5]])
            if unfenced.any() and not bad.any():
                why = "; no fence.proxy.async is between them"
                self.fail(unfenced, access, threads, at, verb, "write", self._address(grains), why)
        else:
            bad |= generic & (writer >> 5 == warps) & (writer != threads) & (time == self.time[warps])
        if bad.any():
            self.fail(bad, access, threads, at, verb, "write", self._address(grains))

    def _check_reads(self, grains: Array, users: _Readers, at: int, verb: str) -> None:
        self._settle_reads()
        if not self._has_reads:
            return
        warps, threads = users.warps, users.threads
        history = self.reads.reshape(self.columns, -1).take(grains, axis=1)
        late = (history >= self._limit[warps]).any(axis=(1, 2))
        for column in np.flatnonzero(late):
            access = history[column]
            time = access >> TIME_SHIFT
            bad = time > self.known[0, warps, column]
            bad |= (column == self.column[warps]) & (thread_of(access) != threads) & (time == self.time[warps])
            if bad.any():
                self.fail(bad, access, threads, at, verb, "read", self._address(grains))

    def _settle_reads(self) -> None:
        """Enter collected reads into the table, unless all living warps of the cluster are ordered behind them."""
        if not self._recent:
            return
        known = np.where(self.alive[:, None], self.known[0], PENDING).reshape(-1, self.columns, self.columns)
        limit = np.minimum(known.min(axis=1).ravel() + 1, self.time) << TIME_SHIFT
        for grains, readers, access in self._recent:
            if (access < limit[readers.warps]).all():
                continue
            index = readers.rows + grains
            # The table may hold an asynchronous read in progress, which must not be overwritten.
            self.reads[index] = np.maximum(self.reads.take(index), access)
            self._has_reads = True
        self._recent.clear()

    def fail(
        self,
        bad: Array,
        access: Array,
        threads: Array,
        at: int,
        verb: str,
        earlier: str,
        address: Array = None,
        why: str = "",
    ) -> NoReturn:
        """Raise a Fault for the first of the accesses [threads, grains] that is ``bad``.

        The message names the earlier ``access`` of the pair.
        """
        machine = self.machine
        row, column = (int(index[0]) for index in np.nonzero(bad))
        other = int(np.broadcast_to(access, bad.shape)[row, column])
        block, thread = machine.thread(int(thread_of(other)))
        where = machine.program.instructions[other & ((1 << AT_BITS) - 1)].source
        text = f"{verb} without synchronization after the {earlier} by thread {thread} of CTA {block} at {where}{why}"
        where_at = None if address is None else int(address[row, column])
        machine.fail("race", text, at, threads[:, 0], row, where_at)

    def meet(self, members: Array, released: Array) -> None:
        """Complete a barrier of a CTA: order the threads ``released`` behind all ``members``."""
        blocks = self.machine.blocks
        arrived = self._warps(members)
        joined = np.where(arrived[:, None], self.known, NEVER).reshape(3, blocks, -1, self.columns).max(axis=2)
        joined = np.repeat(joined, len(arrived) // blocks, axis=1)
        self.known = np.where(self._warps(released)[:, None], np.maximum(self.known, joined), self.known)
        self.globals.meet(arrived, self._warps(released), blocks)
        self._update(self._all)
        self._advance(np.flatnonzero(arrived))

    def warp_barrier(self, active: Array) -> None:
        self._advance(np.flatnonzero(self._warps(active)))

    def release(self, lanes: Array) -> Array:
        """Return the vector clock that the threads ``lanes`` of one warp release.

        It leaves out the latest accesses of the warp if other lanes made some since the warp last synchronized.
        """
        warp = int(lanes[0]) >> 5
        published = self.known[:, warp].copy()
        touching = self.touched[32 * warp : 32 * warp + 32] == self.time[warp]
        touching[lanes - 32 * warp] = False
        if touching.any():
            published[0, self.column[warp]] -= 1
        self._advance(warp)
        return published

    def release_warps(self, lanes: Array) -> dict[int, Array]:
        """Return the vector clock that the threads ``lanes`` release, by warp."""
        warps = lanes >> 5
        return {int(warp): self.release(lanes[warps == warp]) for warp in np.unique(warps)}

    def acquire(self, warps: Array, published: Array) -> None:
        """Merge released vector clocks, [3, columns] or [3, warps, columns], into those of warps."""
        if published.ndim == 2:
            published = published[:, None]
        self.known[:, warps] = np.maximum(self.known[:, warps], published)
        self._update(warps)

    def fence_proxy(self, active: Array) -> None:
        """Execute ``fence.proxy.async``: order the async proxy behind all accesses known to the warps."""
        warps = np.flatnonzero(self._warps(active))
        self.known[1, warps] = np.maximum(self.known[1, warps], self.known[0, warps])
        self._advance(warps)

    def fence(self, active: Array) -> None:
        """Execute ``__threadfence``: publish what the warps know; acquire what their atomics have read."""
        warps = np.flatnonzero(self._warps(active))
        self.known[2, warps] = np.maximum(self.known[2, warps], self.known[0, warps])
        self.globals.fence(warps)
        self._advance(warps)

    def nothing_known(self) -> Array:
        return np.zeros((3, self.columns), np.int64)

    def cluster_release(self, active: Array, clocks: Array) -> None:
        """Merge the vector clocks of arriving threads into those of their cluster barriers.

        ``clocks`` is [3, clusters, warps per cluster]: three clocks, as in ``known``.
        """
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
