# SPDX-License-Identifier: Apache-2.0
"""The simulation of a CTA's named barriers (``bar``) and of the barriers of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.simt.machine import Machine

Array = Any
NAMES = 16


class Barriers:
    """The arrivals at the named barriers of each CTA and at cluster barriers, whole warps at a time."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.arrived = np.zeros((NAMES, machine.threads), bool)
        self.waiting = np.zeros((NAMES, machine.threads), bool)
        # By barrier and CTA, the number of threads that must arrive; 0 stands for all threads that have not exited.
        self.expected = np.zeros((NAMES, machine.blocks), np.int64)
        self.resume = np.zeros(machine.threads, np.int64)
        # The instruction at which each thread waits, for the report of a deadlock.
        self.since = np.zeros(machine.threads, np.int64)
        self.votes = np.zeros((NAMES, machine.threads), bool)
        self.reductions: dict[int, tuple[str, str]] = {}
        clusters = machine.threads // machine.cluster_threads
        self.cluster_phase = np.zeros(clusters, np.int64)
        self.cluster_arrived = np.zeros(machine.threads, bool)
        self.cluster_ticket = np.full(machine.threads, -1)
        self.initialised = np.zeros(machine.threads, bool)  # whether each thread has executed fence.mbarrier_init
        columns = machine.cluster_threads // 32
        # By cluster barrier, the merged vector clocks of the threads that have arrived in the current phase.
        self.cluster_clocks = np.zeros((3, clusters, columns), np.int64)
        # The merged clocks of the last complete phase, which waiting threads acquire.
        self.cluster_closed = np.zeros_like(self.cluster_clocks)

    def arrive(
        self,
        active: Array,
        name: Array,
        count: Array,
        following: int,
        wait: bool,
        at: int,
        reduction: tuple[str, Array, str] | None = None,
    ) -> None:
        """Execute ``bar.sync``, ``bar.arrive`` or ``bar.red``; threads then continue at block ``following``."""
        machine = self.machine
        names = [int(name)] if np.ndim(name) == 0 else np.unique(name[active])
        if count is not None and np.any((np.asarray(count)[active] if np.ndim(count) else count) % 32):
            machine.fail("barrier", f"count {count} is no multiple of 32", at, machine.lanes(active))
        for one in names:
            if not 0 <= one < NAMES:
                machine.fail("barrier", f"no barrier is named {one}", at, machine.lanes(active))
            mine = active & (name == one)
            twice = mine & self.arrived[one]
            if twice.any():
                machine.fail("barrier", f"arrives twice at barrier {one}", at, machine.lanes(twice))
            self.arrived[one] |= mine
            if reduction:
                operation, votes, register = reduction
                self.votes[one] |= mine & votes
                self.reductions[one] = operation, register
            if wait:
                self.waiting[one] |= mine
                self.resume[mine] = following
                self.since[mine] = at
            if count is not None:
                counts = count[mine] if np.ndim(count) else np.full(np.count_nonzero(mine), count)
                self.expected[one][machine.block_of[mine]] = counts
            self._complete(int(one), at)
        if not wait:
            machine.enqueue(following, active)

    def _complete(self, name: int, at: int) -> None:
        """Let the waiting threads of each CTA in which the expected number of threads has arrived continue."""
        machine = self.machine
        warps = self.arrived[name].reshape(machine.blocks, -1, 32).any(axis=2).sum(axis=1) * 32
        living = machine.live.reshape(machine.blocks, -1, 32).any(axis=2).sum(axis=1) * 32
        expected = np.where(self.expected[name] > 0, self.expected[name], living)
        if np.any(warps > expected):
            block = int(np.flatnonzero(warps > expected)[0])
            text = f"{warps[block]} threads arrived at barrier {name}, which expects {expected[block]}"
            first = np.flatnonzero(self.arrived[name] & (machine.block_of == block))
            machine.fail("barrier", text, at, first)
        done = (warps == expected) & (warps > 0)
        if not done.any():
            return
        members = self.arrived[name] & done[machine.block_of]
        released = members & self.waiting[name]
        if machine.races:
            machine.races.meet(members, released)
        if name in self.reductions:
            self._reduce(name, members, released)
        self.arrived[name] &= ~members
        self.waiting[name] &= ~members
        self.votes[name] &= ~members
        self.expected[name][done] = 0
        for following in np.unique(self.resume[released]):
            machine.enqueue(int(following), released & (self.resume == following))

    def _reduce(self, name: int, members: Array, released: Array) -> None:
        machine = self.machine
        operation, register = self.reductions[name]
        votes = (self.votes[name] & members).reshape(machine.blocks, -1).sum(axis=1)
        asked = (members & machine.live).reshape(machine.blocks, -1).sum(axis=1)
        old = machine.registers[register]
        result = {"popc": votes, "and": votes == asked, "or": votes > 0}[operation].astype(old.dtype)
        machine.registers[register] = np.where(released, result[machine.block_of], old)

    def on_exit(self) -> None:
        """Complete the barriers that expect all living threads, if the exit of some threads left only arrived ones."""
        for name in np.flatnonzero(self.arrived.any(axis=1)):
            self._complete(int(name), int(self.since[np.flatnonzero(self.arrived[name])[0]]))
        self._complete_clusters()

    def fence_initialised(self, active: Array) -> None:
        """Execute ``fence.mbarrier_init``: the next relaxed cluster arrival also releases earlier writes."""
        self.initialised |= active

    def cluster_arrive(self, active: Array, release: bool, at: int) -> None:
        machine = self.machine
        twice = active & self.cluster_arrived
        if twice.any():
            machine.fail("barrier", "arrives twice at the cluster barrier", at, machine.lanes(twice))
        self.cluster_arrived |= active
        self.cluster_ticket = np.where(active, self.cluster_phase[machine.cluster_of], self.cluster_ticket)
        releasing = active if release else active & self.initialised
        if machine.races and releasing.any():
            machine.races.cluster_release(releasing, self.cluster_clocks)
        self.initialised &= ~active
        self._complete_clusters()

    def _complete_clusters(self) -> None:
        machine = self.machine
        living = machine.live.reshape(len(self.cluster_phase), -1)
        arrived = self.cluster_arrived.reshape(living.shape)
        done = np.asarray((arrived | ~living).all(axis=1) & arrived.any(axis=1))
        if done.any():
            self.cluster_phase += done
            self.cluster_closed[:, done] = self.cluster_clocks[:, done]
            self.cluster_arrived &= ~done[machine.cluster_of]
            machine.wake()

    def cluster_wait(self, active: Array, here: int, following: int, at: int) -> None:
        machine = self.machine
        early = active & (self.cluster_ticket < 0)
        if early.any():
            machine.fail("barrier", "waits for the cluster barrier before arriving", at, machine.lanes(early))
        passed = active & (self.cluster_phase[machine.cluster_of] > self.cluster_ticket)
        if passed.any():
            if machine.races:
                machine.races.cluster_acquire(passed, self.cluster_closed)
            self.cluster_ticket = np.where(passed, -1, self.cluster_ticket)
            machine.enqueue(following, passed)
        machine.park(here, active & ~passed)
