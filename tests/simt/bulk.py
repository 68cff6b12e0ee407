# SPDX-License-Identifier: Apache-2.0
"""Bulk and tensor copies between global and shared memory, and between the shared memories of a cluster.

With landing "latest", a copy into shared memory lands when no thread can run; with "earliest", it lands at once. The
mbarrier counts its bytes when it lands. A copy out of shared memory reads its source when its thread waits for its bulk
group, or, with "earliest", at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simt.memory import IN_FLIGHT, PLAIN, READY, WINDOW_BITS, Buffer

if TYPE_CHECKING:
    from tests.simt.machine import Machine

Array = Any
CHUNK = 16


@dataclass
class _Load:
    """A copy into shared memory in flight; ``content()`` returns the bytes for its chunks at ``position``."""

    thread: int
    position: Array
    barrier: int
    content: Callable[[], Array]
    published: Array | None
    at: int


@dataclass
class _Store:
    """A copy out of shared memory in flight; ``write`` stores the contents of its chunks at ``position``."""

    thread: int
    group: int
    position: Array
    write: Callable[[Array], None]
    at: int


class BulkCopies:
    """The bulk and tensor copies in flight of all CTAs, in the order in which they were issued."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.loads: list[_Load] = []
        self.stores: list[_Store] = []
        self.groups = np.zeros(machine.threads, np.int64)

    def load(self, lanes: Any, target: Array, source: Array, size: Array, barrier: Array, space: str, at: int) -> None:
        """Copy ``size`` bytes of global memory, or of the CTA's own shared memory, to a CTA of the cluster."""
        for thread, to, start, count, signal in self._threads(lanes, target, source, size, barrier):
            content = self._bytes(thread, start, count, space, at)
            self._start_load(thread, to, np.arange(0, count, CHUNK), signal, content, at)

    def load_multicast(
        self, lanes: Any, target: Array, source: Array, size: Array, barrier: Array, ranks: Array, at: int
    ) -> None:
        """Copy ``size`` bytes of global memory to each CTA of the cluster whose bit is set in ``ranks``."""
        for thread, to, start, count, signal, bits in self._threads(lanes, target, source, size, barrier, ranks):
            content = self._bytes(thread, start, count, "global", at)
            self._multicast(thread, to, np.arange(0, count, CHUNK), signal, bits, content, at)

    def load_tensor(
        self,
        lanes: Any,
        target: Array,
        tensor: Array,
        coordinates: tuple[Array, ...],
        barrier: Array,
        ranks: Any,
        at: int,
    ) -> None:
        """Copy a box of a tensor, with zeros outside the tensor, to the CTAs in ``ranks`` (None: to the CTA itself)."""
        masks = 0 if ranks is None else ranks
        for thread, to, map_at, signal, bits, *place in self._threads(
            lanes, target, tensor, barrier, masks, *coordinates
        ):
            box = self._box(thread, map_at, place, at, write=False)
            to_one = to & 0xFFFFFF
            self._expect(to_one % 128 == 0, "expected a target at a multiple of 128", thread, to, at)
            offsets = box.swizzled(to_one) - to_one
            if ranks is None:
                self._start_load(thread, to, offsets, signal, box.read, at)
            else:
                self._multicast(thread, to, offsets, signal, bits, box.read, at)

    def store_async(self, lanes: Any, target: Array, values: tuple[Array, ...], barrier: Array, at: int) -> None:
        """Execute ``st.async``: store to a CTA of the cluster and count the bytes at its mbarrier, without delay."""
        machine = self.machine
        machine.memory.shared.store(target, lanes, values, at, "plain")
        size = sum(np.asarray(value).itemsize for value in values)
        signals = list(machine.mbarriers.each(barrier, lanes, at))
        for position, here in signals:
            machine.mbarriers.find(position, here, at)
        published = machine.races.release_warps(np.arange(machine.threads)[lanes]) if machine.races else {}
        for position, here in signals:
            for warp, count in zip(*np.unique(here >> 5, return_counts=True), strict=True):
                machine.mbarriers.complete(position, size * int(count), published.get(warp))

    def _multicast(
        self, thread: int, to: int, offsets: Array, signal: int, ranks: int, content: Callable[[], Array], at: int
    ) -> None:
        """Start a copy to the same offset in the shared memory of each CTA in ``ranks``."""
        for rank in range(16):
            if int(ranks) >> rank & 1:
                window = (rank + 1) << 24
                self._start_load(thread, (to & 0xFFFFFF) | window, offsets, (signal & 0xFFFFFF) | window, content, at)

    def _start_load(
        self, thread: int, to: int, offsets: Array, signal: int, content: Callable[[], Array], at: int
    ) -> None:
        machine, shared = self.machine, self.machine.memory.shared
        lane = np.array([thread])
        self._expect(to % CHUNK == 0, "expected a target at a multiple of 16", thread, to, at)
        lanes = np.repeat(lane, len(offsets))
        position = shared.locate(to + offsets, lanes, CHUNK, at)
        barrier = int(shared.locate(np.array([signal]), lane, 8, at)[0])
        machine.mbarriers.find(barrier, lane, at)
        published = None
        if machine.races:
            machine.races.start_write(position, CHUNK, lanes, at)
            published = machine.races.release(lane)
        shared.mark(position, CHUNK, IN_FLIGHT)
        load = _Load(thread, position, barrier, content, published, at)
        if machine.landing == "earliest":
            self._land(load)
        else:
            self.loads.append(load)

    def land(self) -> bool:
        """Land the oldest copy of each CTA, so that no CTA gets ahead of the others.

        Return False if no copy is in flight.
        """
        first: dict[int, _Load] = {}
        for load in self.loads:
            first.setdefault(int(self.machine.block_of[load.thread]), load)
        for load in first.values():
            self.loads.remove(load)
            self._land(load)
        return bool(first)

    def _land(self, load: _Load) -> None:
        machine, shared = self.machine, self.machine.memory.shared
        shared.data.reshape(-1, CHUNK)[load.position // CHUNK] = load.content().reshape(-1, CHUNK)
        shared.mark(load.position, CHUNK, READY)
        if machine.races and load.published is not None:
            lanes = np.full(len(load.position), load.thread)
            own = load.published[0, machine.races.column[load.thread >> 5]]
            machine.races.finish_write(load.position, CHUNK, lanes, load.at, own)
        machine.mbarriers.complete(load.barrier, CHUNK * len(load.position), load.published)

    def _bytes(self, thread: int, start: int, count: int, space: str, at: int) -> Callable[[], Array]:
        """Check a copy's source, and return a function that reads its bytes when the copy lands."""
        machine = self.machine
        self._expect(count % CHUNK == 0, f"{count} bytes: expected a multiple of 16", thread, start, at)
        self._expect(start % CHUNK == 0, "expected a source at a multiple of 16", thread, start, at)
        chunks = start + np.arange(0, count, CHUNK)
        lanes = np.full(len(chunks), thread)
        if space == "global":
            ((buffer, position, _),) = machine.memory.globals.chunks(chunks, lanes, CHUNK, at, write=False)
            machine.memory.globals.on_read(buffer, position, CHUNK, lanes, at, PLAIN)
            return lambda: buffer.data[position[0] : position[0] + count]
        position = machine.memory.shared.locate(chunks, lanes, CHUNK, at)
        machine.memory.shared.check_state(position, CHUNK, lanes, at)
        if machine.races:
            machine.races.read(position, CHUNK, lanes, at)
        return lambda: machine.memory.shared.data.reshape(-1, CHUNK)[position // CHUNK]

    def store(self, lanes: Any, target: Array, source: Array, size: Array, at: int) -> None:
        """Copy ``size`` bytes of the CTA's shared memory to global memory."""
        for thread, to, start, count in self._threads(lanes, target, source, size):
            self._expect(to % CHUNK == 0 and count % CHUNK == 0, "expected multiples of 16", thread, to, at)
            chunks = to + np.arange(0, count, CHUNK)
            who = np.full(len(chunks), thread)
            ((buffer, position, _),) = self.machine.memory.globals.chunks(chunks, who, CHUNK, at, write=True)
            self._start_store(thread, start, np.arange(0, count, CHUNK), _writer(buffer, int(position[0])), at)

    def store_tensor(self, lanes: Any, tensor: Array, coordinates: tuple[Array, ...], source: Array, at: int) -> None:
        """Copy a box from the CTA's shared memory to a tensor; parts outside the tensor are not written."""
        for thread, map_at, start, *place in self._threads(lanes, tensor, source, *coordinates):
            if min(place) < 0:
                self.machine.fail("invalid", f"negative coordinates {tuple(place)} of a store", at, [thread])
            box = self._box(thread, map_at, place, at, write=True)
            self._expect(start % 128 == 0, "expected a source at a multiple of 128", thread, start, at)
            self._start_store(thread, start, box.swizzled(start) - start, box.write, at)

    def _start_store(self, thread: int, start: int, offsets: Array, write: Callable[[Array], None], at: int) -> None:
        machine, shared = self.machine, self.machine.memory.shared
        self._expect(start % CHUNK == 0, "expected a source at a multiple of 16", thread, start, at)
        lanes = np.full(len(offsets), thread)
        position = shared.locate(start + offsets, lanes, CHUNK, at)
        shared.check_state(position, CHUNK, lanes, at)
        if machine.races:
            machine.races.start_read(position, CHUNK, lanes, at)
        store = _Store(thread, int(self.groups[thread]), position, write, at)
        if machine.landing == "earliest":
            self._put_away(store)
        self.stores.append(store)
        machine.progress()

    def commit(self, active: Array) -> None:
        self.groups = self.groups + active

    def wait(self, active: Array, newest: int) -> None:
        """Execute ``cp.async.bulk.wait_group``: complete all bulk groups of each thread but its ``newest`` ones."""
        machine, kept = self.machine, []
        for store in self.stores:
            if active[store.thread] and store.group < self.groups[store.thread] - newest:
                if machine.landing == "latest":
                    self._put_away(store)
                if machine.races:
                    machine.races.finish_read(
                        store.position, CHUNK, np.full(len(store.position), store.thread), store.at
                    )
            else:
                kept.append(store)
        self.stores = kept

    def _put_away(self, store: _Store) -> None:
        store.write(self.machine.memory.shared.data.reshape(-1, CHUNK)[store.position // CHUNK])

    def on_exit(self, active: Array) -> None:
        """Fail if a CTA exits while a copy still uses its shared memory."""
        machine = self.machine
        for store in self.stores:
            if active[store.thread]:
                text = "the thread exits before its bulk copy has read shared memory"
                machine.fail("in flight", text, store.at, [store.thread])
        gone = ~machine.live.reshape(machine.blocks, -1).max(axis=1)
        for load in self.loads:
            block = int(load.position[0]) // machine.memory.shared.stride
            if gone[block]:
                machine.fail("in flight", "the CTA exits before the copy has landed", load.at, [load.thread])

    def _threads(self, lanes: Any, *values: Array) -> zip[Any]:
        """Yield for each thread in ``lanes`` its number and, as Python integers, its values."""
        machine = self.machine
        numbers = range(machine.threads) if isinstance(lanes, slice) else lanes.tolist()
        return zip(numbers, *(machine.pick(np.asarray(value), lanes).tolist() for value in values), strict=True)

    def _expect(self, holds: bool, text: str, thread: int, address: int, at: int) -> None:
        if not holds:
            self.machine.fail("misaligned", text, at, [thread], 0, address)

    def _box(self, thread: int, map_at: int, place: list[int], at: int, write: bool) -> Box:
        machine = self.machine
        if map_at not in machine.tensor_maps:
            machine.fail("invalid", "no tensor map lies here", at, [thread], 0, map_at)
        tensor, base = machine.tensor_maps[map_at]
        if len(place) != len(tensor.dims):
            machine.fail("invalid", f"{len(place)} coordinates for {len(tensor.dims)} dimensions", at, [thread])
        buffer = machine.memory.globals.windows[base >> WINDOW_BITS]
        machine.memory.globals.check_allowed(buffer, np.array([base]), np.array([thread]), at, write)
        return Box(tensor, buffer, place)


def _writer(buffer: Buffer, position: int) -> Callable[[Array], None]:
    def write(chunks: Array) -> None:
        buffer.data[position : position + chunks.size] = chunks.ravel()

    return write


class Box:
    """The part of a tensor that one tensor copy moves, clipped to the bounds of the tensor."""

    def __init__(self, tensor: Any, buffer: Buffer, place: list[int]) -> None:
        self.tensor = tensor
        self.item = int(np.dtype(ITEM.get(tensor.dtype, tensor.dtype)).itemsize)
        self.row_bytes = tensor.box[0] * self.item
        first = place[0]
        low, high = max(first, 0), min(first + tensor.box[0], tensor.dims[0])
        clip = slice((low - first) * self.item, max(high - first, low - first) * self.item)
        start, inside = np.zeros(1, np.int64), np.full(1, low < high)
        steps = tensor.steps or (1,) * len(tensor.box)
        outer = zip(tensor.box[1:], steps[1:], place[1:], tensor.dims[1:], tensor.strides, strict=True)
        for extent, step, at, size, stride in reversed(list(outer)):
            index = at + np.arange(extent) * step
            start = (start[:, None] + index * stride).ravel()
            inside = (inside[:, None] & (index >= 0) & (index < size)).ravel()
        self.count = len(start)
        # The rows of the box that are inside the tensor; a load fills the others with zeros.
        self.rows = np.flatnonzero(inside)
        starts = start[inside] + low * self.item  # for each of these rows, the byte of the buffer at which it begins
        aligned = not np.any((starts | buffer.base | clip.start | clip.stop) % 8)
        self._unit = np.dtype(np.uint64 if aligned else np.uint8)
        self._clip = slice(clip.start // self._unit.itemsize, clip.stop // self._unit.itemsize)
        self._view, first_items = buffer.elements(starts, self._unit.type)
        self._items = first_items[:, None] + np.arange(self._clip.stop - self._clip.start)

    def swizzled(self, start: int) -> Array:
        """Return the swizzled shared-memory address of each 16-byte chunk of a box that is stored from ``start`` on."""
        address = start + np.arange(0, self.count * self.row_bytes, CHUNK)
        return swizzle(address, self.tensor.swizzle)

    def read(self) -> Array:
        content = np.zeros((self.count, self.row_bytes), np.uint8)
        content.view(self._unit)[self.rows, self._clip] = self._view[self._items]
        return content

    def write(self, chunks: Array) -> None:
        content = np.ascontiguousarray(chunks).reshape(self.count, self.row_bytes)
        self._view[self._items] = content.view(self._unit)[self.rows, self._clip]


ITEM = {"bfloat16": "uint16"}


def swizzle(address: Array, span: int) -> Array:
    """Return addresses swizzled by XORing bits 4 to 6 with bits 7 to 9.

    That is a span of 128 bytes; a span of 64 bytes changes only bits 4 and 5, one of 32 only bit 4, and 0 none.
    """
    mask = max(span, 1) - 1 & 0x70
    return address ^ (address >> 3 & mask)


def check_map(tensor: Any, address: int) -> None:
    """Raise ValueError for a tensor map that the driver would refuse to encode."""
    item = int(np.dtype(ITEM.get(tensor.dtype, tensor.dtype)).itemsize)
    inner = tensor.box[0] * item
    if address % 16 or any(stride % 16 for stride in tensor.strides):
        raise ValueError(f"TensorMap: expected address and strides in multiples of 16 bytes, got {tensor}")
    if not len(tensor.dims) == len(tensor.box) == len(tensor.strides) + 1:
        raise ValueError(f"TensorMap: expected as many box extents as dims, and one stride less, got {tensor}")
    steps = tensor.steps or (1,) * len(tensor.box)
    if steps[0] != 1 or any(not 1 <= step <= 8 for step in steps):
        raise ValueError(f"TensorMap: expected steps of 1 .. 8, and of 1 along the innermost axis, got {tensor}")
    spans = [(extent - 1) * step + 1 for extent, step in zip(tensor.box, steps, strict=True)]
    if inner % 16 or any(not 1 <= span <= 256 for span in spans):
        raise ValueError(f"TensorMap: expected a box of 1 .. 256 and rows in multiples of 16 bytes, got {tensor}")
    if tensor.swizzle not in (0, 32, 64, 128) or (tensor.swizzle and inner != tensor.swizzle):
        raise ValueError(f"TensorMap: expected rows as wide as the swizzle of {tensor.swizzle}, got {inner} bytes")
