# SPDX-License-Identifier: Apache-2.0
"""The execution of a program by the threads of several CTAs at once, grouped by their current basic block."""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

import numpy as np

from tests.simt.barriers import Barriers
from tests.simt.bulk import BulkCopies
from tests.simt.copies import AsyncCopies
from tests.simt.faults import Fault
from tests.simt.mbarriers import Mbarriers
from tests.simt.memory import CONSTANT, FRESH, Memory
from tests.simt.parser import Immediate
from tests.simt.program import Block, Program
from tests.simt.races import Races
from tests.simt.warp import Matrices, Warps
from tests.simt.wgmma import Warpgroups

Array = Any
Dim3 = tuple[int, int, int]
PATIENCE = 256
"""The number of scheduling steps after which a waiting group of threads runs first, so that every group advances."""
STALLED = 20_000
"""The number of steps without progress (a store, a barrier or an exit) after which a deadlock is reported."""
EVERYONE = 0xFFFFFFFF


class Machine:
    """CTAs ``first`` .. ``first + blocks - 1`` of a grid, all resident, with their registers and memories.

    Threads are numbered CTA after CTA, each CTA padded to whole warps (or warpgroups). A value that is equal
    in all threads may be held as a scalar.
    """

    def __init__(
        self,
        program: Program,
        grid: Dim3,
        block: Dim3,
        cluster: Dim3,
        first: int,
        blocks: int,
        shared_bytes: int,
        parameters: bytes,
        maps: dict[int, Any],
        *,
        dependent: bool,
        constant: bool,
        races: bool,
        landing: str,
    ) -> None:
        self.program, self.grid, self.block, self.cluster = program, grid, block, cluster
        self.first, self.blocks = first, blocks
        self.landing = landing
        size = block[0] * block[1] * block[2]
        padded = padded_threads(program, block)
        self.block_threads = padded
        self.threads = blocks * padded
        number = np.arange(self.threads)
        self.block_of = number // padded
        self.warp_of = number // 32
        self.live = number % padded < size
        self.living = int(self.live.sum())
        self.cluster_size = cluster[0] * cluster[1] * cluster[2]
        self.cluster_threads = self.cluster_size * padded
        self.cluster_of = number // self.cluster_threads
        self.cluster_origin = self.cluster_of * self.cluster_size
        self.may_write = np.full(blocks, not dependent)
        self.may_read = np.full(self.threads, not dependent)
        self.fresh = FRESH - CONSTANT if constant else FRESH
        self.registers = dict(program.registers)
        self._parameters, self.tensor_maps = parameters, maps
        self.memory = Memory(self, shared_bytes, program.local_bytes)
        self.races = Races(self, program.grains) if races else None
        self.special = self._special_registers(padded, shared_bytes)
        self.barriers = Barriers(self)
        self.async_copies = AsyncCopies(self)
        self.mbarriers = Mbarriers(self)
        self.bulk = BulkCopies(self)
        self.warpgroups = Warpgroups(self)
        self.warps = Warps(self)
        self.matrices = Matrices(self)
        self._queue: dict[int, Array] = {}
        self._since: dict[int, int] = {}
        self._parked: dict[int, Array] = {}
        self._step = 0
        self._progress = 0

    def _special_registers(self, padded: int, shared_bytes: int) -> dict[str, Array]:
        number = np.arange(self.threads)
        within, block = number % padded, number // padded + self.first
        values: dict[str, Array] = {}

        def three(name: str, index: Array, shape: Dim3) -> None:
            values[f"%{name}.x"] = index % shape[0]
            values[f"%{name}.y"] = index // shape[0] % shape[1]
            values[f"%{name}.z"] = index // (shape[0] * shape[1]) % shape[2]

        def block_index() -> tuple[Array, ...]:
            """Return the CTA indices; consecutive numbers share a cluster."""
            cluster, rank = block // self.cluster_size, block % self.cluster_size
            parts = []
            for axis in range(3):
                clusters_before = int(np.prod([self.grid[k] // self.cluster[k] for k in range(axis)]))
                ranks_before = int(np.prod(self.cluster[:axis]))
                cluster_at = cluster // clusters_before % (self.grid[axis] // self.cluster[axis])
                rank_at = rank // ranks_before % self.cluster[axis]
                parts.append(cluster_at * self.cluster[axis] + rank_at)
            return tuple(parts)

        three("tid", within, self.block)
        self.block_index = block_index()
        for axis, letter in enumerate("xyz"):
            values[f"%ctaid.{letter}"] = self.block_index[axis]
            values[f"%ntid.{letter}"] = self.block[axis]
            values[f"%nctaid.{letter}"] = self.grid[axis]
            values[f"%cluster_nctaid.{letter}"] = self.cluster[axis]
            values[f"%clusterid.{letter}"] = self.block_index[axis] // self.cluster[axis]
            values[f"%nclusterid.{letter}"] = self.grid[axis] // self.cluster[axis]
        three("cluster_ctaid", block % self.cluster_size, self.cluster)
        lane = within % 32
        one = np.int64(1)
        values |= {
            "%laneid": lane,
            "%warpid": within // 32,
            "%nwarpid": -(-self.block[0] * self.block[1] * self.block[2] // 32),
            "%cluster_ctarank": block % self.cluster_size,
            "%cluster_nctarank": self.cluster_size,
            "%lanemask_eq": one << lane,
            "%lanemask_lt": (one << lane) - 1,
            "%lanemask_le": (one << lane << 1) - 1,
            "%lanemask_gt": EVERYONE & ~((one << lane << 1) - 1),
            "%lanemask_ge": EVERYONE & ~((one << lane) - 1),
            "%dynamic_smem_size": shared_bytes - self.program.shared_bytes,
            "%total_smem_size": shared_bytes,
            "%smid": 0,
            "%nsmid": 1,
            "%clock": 0,
        }
        special = {name: _scalar_if_equal(np.asarray(value).astype(np.uint32)) for name, value in values.items()}
        special |= {"%clock64": np.uint64(0), "%globaltimer": np.uint64(0)}
        special["%is_explicit_cluster"] = np.bool_(self.cluster_size > 1)
        return special

    def run(self) -> None:
        """Run all threads to their end. Raises Fault."""
        with np.errstate(all="ignore"):
            self.enqueue(0, self.live.copy())
            while self.living:
                while self._queue:
                    number = self._next()
                    self._since.pop(number)
                    self._execute(number, self._queue.pop(number))
                if self.living and not self._land():
                    self._deadlock()

    def _land(self) -> bool:
        """Let asynchronous copies in flight arrive, because no thread can run; return False if there are none."""
        return self.bulk.land() or self.async_copies.land()

    def _next(self) -> int:
        """Return the lowest basic block that has threads, unless another has waited too long; spinning loops come last.

        If all runnable threads have been spinning for a while, asynchronous copies land.
        """
        self._step += 1
        stalled, blocks = self._step - self._progress, self.program.blocks
        if stalled > STALLED and not self._land():
            self._deadlock()
        if stalled > PATIENCE and all(blocks[number].spins for number in self._queue):
            self._land()
        if len(self._queue) > 1:
            oldest = min(self._since, key=self._since.__getitem__)
            if self._step - self._since[oldest] > PATIENCE:
                return oldest
        return min(self._queue, key=lambda number: (blocks[number].spins, number))

    def _execute(self, number: int, active: Array) -> None:
        block = self.program.blocks[number]
        full = np.count_nonzero(active) == self.living
        if block.width and not (full and block.members is None):
            active = self._whole(number, block, active)
            if active is None:
                return
        outcome = block.function(self, self.registers, active, full)
        if block.ending == "next":
            self.enqueue(block.targets[0], active)
        elif block.ending == "branch":
            self._fork(block, active, outcome)
        elif block.ending == "table":
            for choice in np.unique(outcome[active] if np.ndim(outcome) else outcome):
                self.enqueue(block.targets[choice], active & (outcome == choice))
        elif block.ending == "exit":
            self._exit(active)

    def _fork(self, block: Block, active: Array, jumps: Array) -> None:
        taken, skipped = block.targets
        if np.ndim(jumps) == 0:
            self.enqueue(taken if jumps else skipped, active)
            return
        away = active & jumps
        count = np.count_nonzero(away)
        if count == 0:
            self.enqueue(skipped, active)
        elif count == np.count_nonzero(active):
            self.enqueue(taken, active)
        else:
            self.enqueue(taken, away)
            self.enqueue(skipped, active & ~away)

    def enqueue(self, number: int, group: Array) -> None:
        """Schedule a group of threads at a basic block, merged with the threads already there."""
        parked = self._parked.pop(number, None)
        if parked is not None:
            group = group | parked
        if number in self._queue:
            self._queue[number] = self._queue[number] | group
        else:
            self._queue[number] = group
            self._since[number] = self._step

    def park(self, number: int, group: Array) -> None:
        """Suspend a group before a basic block, until the rest of its warp arrives or `wake` is called."""
        if group.any():
            self._parked[number] = self._parked[number] | group if number in self._parked else group

    def wake(self) -> None:
        """Reschedule all suspended groups, after an event that may let them continue, such as an exit."""
        self.progress()
        for number in list(self._parked):
            self.enqueue(number, self._parked.pop(number))

    def progress(self) -> None:
        self._progress = self._step

    def _whole(self, number: int, block: Block, active: Array) -> Array | None:
        """Return the threads whose whole warp (or warpgroup) has arrived; suspend the others."""
        if block.members is not None:
            members = self._member_masks(block)
            if np.ndim(members) == 0 and members == EVERYONE and np.count_nonzero(active) == self.living:
                return active
            outside = active & ((members >> self.special["%laneid"]) & np.uint32(1) == 0)
            if outside.any():
                lanes = np.flatnonzero(outside)
                self.fail("divergence", "the thread is not in its own member mask", block.start, lanes)
            there, alive = self.warps.bits(active), self.warps.bits(self.live)
            ready = active & ((members & alive & ~there) == 0)
        else:
            rows = (active | ~self.live).reshape(-1, block.width)
            ready = active & np.repeat(rows.all(axis=1), block.width)
        if np.count_nonzero(ready) == np.count_nonzero(active):
            return active
        self.park(number, active & ~ready)
        return ready if ready.any() else None

    def _member_masks(self, block: Block) -> Array:
        operand = block.members
        if isinstance(operand, Immediate):
            return np.uint32(int(operand.value) % 2**32)
        return self.registers[self.program.names.registers[operand]]  # type: ignore[index]

    def _exit(self, active: Array) -> None:
        self.live = self.live & ~active
        self.living = int(np.count_nonzero(self.live))
        self.bulk.on_exit(active)
        if self.races:
            self.races.on_exit(active)
        self.barriers.on_exit()
        self.wake()

    def _deadlock(self) -> NoReturn:
        """Raise a Fault that lists where every living thread waits."""
        lines = []
        waiting = dict(self._parked)
        for name, mask in enumerate(self.barriers.waiting):
            for at in np.unique(self.barriers.since[mask]):
                group = mask & (self.barriers.since == at)
                lines.append((int(at), group, f"wait at barrier {name}"))
        for n, group in waiting.items():
            lines.append((self.program.blocks[n].start, group, f"wait {self.mbarriers.awaited(n)}".strip()))
        lines += [(self.program.blocks[n].start, group, "spin") for n, group in self._queue.items()]
        parts = []
        for at, group, verb in lines:
            instruction = self.program.instructions[min(at, len(self.program.instructions) - 1)]
            count = np.count_nonzero(group)
            parts.append(f"{count} threads {verb} at {instruction.source} ({instruction.opcode})")
        at, group, _ = lines[0]
        self.fail("deadlock", "; ".join(parts), at, np.flatnonzero(group))

    def lanes(self, mask: Array) -> Any:
        """Return the indices of the threads in a mask; slice(None) for all threads, as it is faster."""
        if np.ndim(mask) == 0:
            mask = np.full(self.threads, mask)
        return slice(None) if np.count_nonzero(mask) == self.threads else np.flatnonzero(mask)

    def subset(self, lanes: Any, part: Array) -> Array:
        return part if isinstance(lanes, slice) else lanes[part]

    def pick(self, value: Array, lanes: Any) -> Array:
        """Return one value for each thread in ``lanes``, from an array over all threads or a scalar."""
        if np.ndim(value) == 0:
            return np.full(self.threads if isinstance(lanes, slice) else len(lanes), value)
        return value[lanes]

    def spread(self, values: Array, lanes: Any) -> Array:
        """Return an array over all threads from the values of the threads in ``lanes``; the other threads get 0."""
        if isinstance(lanes, slice):
            return values
        whole = np.zeros(self.threads, values.dtype)
        whole[lanes] = values
        return whole

    def parameter(self, offset: int, dtype: Any, count: int) -> list[Array]:
        """Return ``count`` items of the kernel's parameters, from byte ``offset`` on."""
        return list(np.frombuffer(self._parameters, np.uint8)[offset:][: count * np.dtype(dtype).itemsize].view(dtype))

    def warp_barrier(self, active: Array) -> None:
        if self.races:
            self.races.warp_barrier(active)

    def fence(self, active: Array) -> None:
        self.progress()
        if self.races:
            self.races.fence(active)

    def dependent_wait(self, active: Array) -> None:
        """Execute ``griddepcontrol.wait``: from here on the preceding kernel's buffers may be used."""
        self.may_write[self.block_of[active]] = True
        self.may_read[active] = True

    def fence_proxy(self, active: Array) -> None:
        if self.races:
            self.races.fence_proxy(active)

    def check_register_count(self, count: int, at: int, lanes: Any) -> None:
        if not 24 <= count <= 256 or count % 8:
            self.fail("invalid", f"setmaxnreg {count}: expected a multiple of 8 in 24..256", at, lanes)

    def fail(
        self, kind: str, text: str, at: int, lanes: Any = None, first: int = 0, address: int | None = None
    ) -> NoReturn:
        """Raise a Fault at instruction ``at``; ``first`` is the index of the offending thread in ``lanes``."""
        instruction = self.program.instructions[min(at, len(self.program.instructions) - 1)]
        thread = None
        if lanes is not None:
            number = first if isinstance(lanes, slice) else int(lanes[first])
            thread = self.thread(number)
        raise Fault(
            kind,
            text,
            source=instruction.source,
            opcode=instruction.opcode,
            ptx_line=instruction.line,
            thread=thread,
            address=address,
        )

    def thread(self, number: int) -> tuple[Dim3, Dim3]:
        """Return ((x, y, z) of the CTA, (x, y, z) in the CTA) of a thread."""
        names = itertools.product(("%ctaid", "%tid"), "xyz")
        place = [int(np.broadcast_to(self.special[f"{name}.{axis}"], self.threads)[number]) for name, axis in names]
        return (place[0], place[1], place[2]), (place[3], place[4], place[5])


def padded_threads(program: Program, block: Dim3) -> int:
    """Return the threads of a CTA, padded to whole warps, or to warpgroups if an instruction needs them."""
    width = max([32, *(part.width for part in program.blocks)])
    return -(-block[0] * block[1] * block[2] // width) * width


def _scalar_if_equal(values: Array) -> Array:
    return values.flat[0] if values.ndim == 0 or (values == values.flat[0]).all() else values
