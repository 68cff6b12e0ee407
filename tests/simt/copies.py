# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies from global to shared memory that are not bulk copies: ``cp.async`` and its groups.

With landing "latest", the bytes arrive at the instruction that waits for them, and are marked in flight until then;
with "earliest" they arrive at once. For the race detector, a copy is unordered with all accesses until it has been
waited for; unlike bulk copies, it writes through the generic proxy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simt.access import GENERIC
from tests.simt.memory import IN_FLIGHT, READY

if TYPE_CHECKING:
    from tests.simt.machine import Machine

Array = Any


@dataclass
class _Copy:
    """A ``cp.async`` instruction in flight: the threads ``lanes`` copy ``size`` bytes each to ``position``."""

    lanes: Array
    group: Array
    source: Array
    position: Array
    size: int
    taken: Array  # how many bytes to read; the rest of the ``size`` bytes is filled with zeros
    at: int


class AsyncCopies:
    """The ``cp.async`` copies in flight, and the number of groups that each thread has committed."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.pending: list[_Copy] = []
        # The mbarrier arrivals that wait for copies (``cp.async.mbarrier.arrive``): (threads, address, instruction).
        self.signals: list[tuple[Array, Array, int]] = []
        self.groups = np.zeros(machine.threads, np.int64)

    def start(self, target: Array, source: Array, lanes: Any, size: int, taken: Array, at: int) -> None:
        """Start copies of ``size`` bytes: ``taken`` bytes are read, and the rest is filled with zeros."""
        machine, shared = self.machine, self.machine.memory.shared
        if isinstance(lanes, slice):
            lanes = np.arange(machine.threads)
        if not len(lanes):
            return
        target, source, taken = (machine.pick(value, lanes) for value in (target, source, taken))
        if np.any(taken > size):
            machine.fail("invalid", f"source size above {size}", at, lanes, int(np.argmax(taken > size)))
        shared.check_alignment(target, size, lanes, at)
        machine.memory.globals.check_alignment(source, size, lanes, at)
        position = shared.locate(target, lanes, size, at)
        if machine.races:
            machine.races.start_write(position, size, lanes, at)
        copy = _Copy(lanes, self.groups[lanes], source, position, size, taken, at)
        if machine.landing == "earliest":
            self._move(copy)
        else:
            shared.mark(position, size, IN_FLIGHT)
        self.pending.append(copy)

    def commit(self, active: Array) -> None:
        self.groups = self.groups + active

    def wait(self, active: Array, newest: int | None) -> None:
        """Land all groups of each thread except the ``newest`` ones; with None all copies, also uncommitted ones."""
        kept = []
        for copy in self.pending:
            done = active[copy.lanes]
            if newest is not None:
                done = done & (copy.group < self.groups[copy.lanes] - newest)
            if done.any():
                self._land(_select(copy, done))
            if not done.all():
                kept.append(_select(copy, ~done))
        self.pending = kept

    def signal(self, address: Array, lanes: Any, count_it: bool, at: int) -> None:
        """Arrive at an mbarrier once the threads' copies have landed; ``count_it`` first expects one more arrival."""
        machine = self.machine
        lanes = np.arange(machine.threads) if isinstance(lanes, slice) else lanes
        if count_it:
            machine.mbarriers.arrive(address, lanes, np.int64(-1), np.int64(0), at)
        self.signals.append((lanes, machine.pick(address, lanes), at))
        if machine.landing == "earliest":
            self.land()

    def land(self) -> bool:
        """Land the copies whose threads have an arrival at an mbarrier outstanding. Return False if there are none."""
        signals, self.signals = self.signals, []
        for lanes, address, at in signals:
            self.wait(np.bincount(lanes, minlength=self.machine.threads) > 0, None)
            whole = self.machine.spread(address, lanes)
            self.machine.mbarriers.arrive(whole, lanes, np.int64(1), np.int64(0), at)
        return bool(signals)

    def _land(self, copy: _Copy) -> None:
        machine = self.machine
        if machine.landing == "latest":
            self._move(copy)
            machine.memory.shared.mark(copy.position, copy.size, READY)
        if machine.races:
            machine.races.finish_write(copy.position, copy.size, copy.lanes, copy.at | GENERIC)

    def _move(self, copy: _Copy) -> None:
        """Write the bytes of a copy to shared memory.

        Lanes that read fewer than ``size`` bytes are read byte by byte.
        """
        machine, shared = self.machine, self.machine.memory.shared
        words = np.zeros((len(copy.lanes), copy.size // 4), np.uint32)
        whole = copy.taken == copy.size
        if whole.any():
            lanes, source = copy.lanes[whole], copy.source[whole]
            words[whole] = np.stack(machine.memory.globals.fetch(source, lanes, np.uint32, copy.size // 4, copy.at), 1)
        for row in np.flatnonzero(~whole & (copy.taken > 0)):
            source = copy.source[row] + np.arange(copy.taken[row])
            lanes = np.full(len(source), copy.lanes[row])
            content = machine.memory.globals.fetch(source, lanes, np.uint8, 1, copy.at)[0]
            words.view(np.uint8)[row, : len(content)] = content
        view, index = shared.buffer.elements(copy.position, np.uint32)
        for k in range(words.shape[1]):
            view[index + k] = words[:, k]
        if machine.landing == "earliest":
            shared.mark(copy.position, copy.size, READY)


def _select(copy: _Copy, part: Array) -> _Copy:
    if part.all():
        return copy
    return _Copy(
        copy.lanes[part], copy.group[part], copy.source[part], copy.position[part], copy.size, copy.taken[part], copy.at
    )
