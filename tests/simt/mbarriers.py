# SPDX-License-Identifier: Apache-2.0
"""The mbarrier objects: 64-bit words of shared memory that count arrivals and bytes of asynchronous copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simt.memory import BARRIER, UNINITIALISED

if TYPE_CHECKING:
    from tests.simt.machine import Machine

Array = Any


@dataclass
class Mbarrier:
    """An mbarrier; phase ``phase`` completes after ``pending`` arrivals and ``bytes`` bytes of copies."""

    count: int
    pending: int
    clock: Array  # the vector clocks that arrivals published, in this phase and in earlier ones
    bytes: int = 0
    phase: int = 0

    def __str__(self) -> str:
        return f"phase {self.phase} misses {self.pending} of {self.count} arrivals and {self.bytes} bytes"


class Mbarriers:
    """The initialized mbarriers by their position in shared memory."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.objects: dict[int, Mbarrier] = {}
        # By basic block, the shared-memory position of the mbarrier that its threads last waited for.
        self._awaited: dict[int, int] = {}

    def each(self, address: Array, lanes: Any, at: int) -> Iterator[tuple[int, Array]]:
        """Yield the position of each mbarrier that threads address, with the threads that do so."""
        machine = self.machine
        if isinstance(lanes, slice):
            lanes = np.arange(machine.threads)
        if not len(lanes):
            return
        address = machine.pick(address, lanes)
        shared = machine.memory.shared
        shared.check_alignment(address, 8, lanes, at)
        position = shared.locate(address, lanes, 8, at)
        if (position == position[0]).all():
            yield int(position[0]), lanes
            return
        for one in np.unique(position):
            yield int(one), lanes[position == one]

    def find(self, position: int, lanes: Array, at: int) -> Mbarrier:
        """Return the mbarrier at a position. Fail unless its initialization is ordered before the threads' access."""
        machine = self.machine
        if position not in self.objects:
            address = position % machine.memory.shared.stride
            machine.fail("invalid", "no initialized mbarrier is here", at, lanes, 0, address)
        if machine.races:
            machine.races.check_known(np.full(len(lanes), position), 8, lanes, at)
        return self.objects[position]

    def init(self, address: Array, lanes: Any, count: Array, at: int) -> None:
        machine = self.machine
        for position, here in self.each(address, lanes, at):
            if position in self.objects:
                text = "an initialized mbarrier is here already; invalidate it first"
                machine.fail("invalid", text, at, here, 0, position % machine.memory.shared.stride)
            wanted = int(machine.pick(count, here)[0])
            if not 1 <= wanted < 2**20:
                machine.fail("invalid", f"mbarrier count {wanted}: expected 1 .. 2**20 - 1", at, here)
            where = np.full(len(here), position)
            machine.memory.shared.on_write(machine.memory.shared.buffer, where, 8, here, at)
            machine.memory.shared.mark(where, 8, BARRIER)
            clock = machine.races.nothing_known() if machine.races else None
            self.objects[position] = Mbarrier(wanted, wanted, clock)

    def invalidate(self, address: Array, lanes: Any, at: int) -> None:
        for position, here in self.each(address, lanes, at):
            self.find(position, here, at)
            del self.objects[position]
            self.machine.memory.shared.mark(np.array([position]), 8, UNINITIALISED)

    def arrive(
        self, address: Array, lanes: Any, count: Array, transfers: Array, at: int, *, drop: bool = False
    ) -> Array:
        """Expect ``transfers`` more bytes, then arrive ``count`` times (0: only expect). Return the phase as state."""
        machine = self.machine
        state = np.zeros(machine.threads, np.uint64)
        for position, here in self.each(address, lanes, at):
            barrier = self.find(position, here, at)
            arrivals = int(machine.pick(count, here).sum())
            state[here] = barrier.phase
            barrier.bytes += int(machine.pick(transfers, here).sum())
            if arrivals > barrier.pending:
                text = f"{arrivals} arrivals, but {barrier}"
                machine.fail("barrier", text, at, here, 0, position % machine.memory.shared.stride)
            barrier.pending -= arrivals
            barrier.count -= arrivals if drop else 0
            if machine.races and arrivals > 0:
                for published in machine.races.release_warps(here).values():
                    barrier.clock = np.maximum(barrier.clock, published)
            self._advance(barrier)
        return state

    def complete(self, position: int, count: int, published: Array | None) -> None:
        """Count ``count`` bytes of a copy; ``published`` is the vector clock of its issuer."""
        barrier = self.objects[position]
        barrier.bytes -= count
        if published is not None:
            barrier.clock = np.maximum(barrier.clock, published)
        self._advance(barrier)

    def _advance(self, barrier: Mbarrier) -> None:
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.phase += 1
            barrier.pending = barrier.count
            self.machine.wake()

    def test(self, address: Array, lanes: Any, phase: Array, parity: bool, at: int) -> Array:
        """Return per thread whether the phase with the given parity, or state token, is complete; if so, acquire it."""
        machine = self.machine
        done = np.zeros(machine.threads, bool)
        for position, here in self.each(address, lanes, at):
            barrier = self.find(position, here, at)
            asked = machine.pick(phase, here).astype(np.int64)
            passed = (barrier.phase & 1) != asked if parity else barrier.phase > asked
            done[here] = passed
            if machine.races and passed.any():
                machine.races.acquire(np.unique(here[passed] >> 5), barrier.clock)
        return done

    def wait(
        self, active: Array, address: Array, phase: Array, parity: bool, result: str, here: int, following: int, at: int
    ) -> None:
        """Execute ``try_wait``: threads whose phase is complete go on at block ``following``, with ``result`` true.

        The others are suspended before block ``here`` and try again later.
        """
        machine = self.machine
        done = self.test(address, machine.lanes(active), phase, parity, at)
        passed = active & done
        if passed.any():
            machine.registers[result] = np.where(passed, True, machine.registers[result])
            machine.enqueue(following, passed)
        elif active.any():
            first = np.flatnonzero(active)[:1]
            self._awaited[here] = next(self.each(address, first, at))[0]
        machine.park(here, active & ~done)

    def awaited(self, here: int) -> str:
        """Return the state of the mbarrier that a block's threads wait for, to report a deadlock."""
        barrier = self.objects.get(self._awaited.get(here, -1))
        return f"({barrier})" if barrier else ""
