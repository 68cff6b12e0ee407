# SPDX-License-Identifier: Apache-2.0
"""Global, shared, local and generic memory: every access is checked for bounds and alignment.

Each global buffer has a window of 2**36 addresses to itself, so that an index error cannot land in another buffer.
Window 0 holds the generic addresses of shared and local memory; all else in it is a null pointer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.simt.machine import Machine

WINDOW_BITS = 36
SHARED_GENERIC, LOCAL_GENERIC = 1 << 32, 2 << 32
SHARED_START = 1024
"""The lowest address of a CTA's shared memory. As on sm_90 it is not 0, which is a null pointer."""
RANK_BITS = 24
"""The lowest bit of the field of a shared::cluster address that holds the CTA rank plus one; 0 means the own CTA."""
BASE_ALIGNMENT = 512
"""The alignment in bytes of the memory of arrays. A view keeps its offset in the array that owns its memory."""

READY, UNINITIALISED, IN_FLIGHT, BARRIER = 0, 1, 2, 3
"""The states of a byte of shared memory."""

PLAIN, ORDERED, ATOMIC, TOGETHER = "plain", "ordered", "atomic", "together"
"""The kinds of accesses: plain; volatile or relaxed, and atomic, which do not race together; by a whole warp."""

Array = Any
Lanes = Any  # The indices of the threads that make an access, or slice(None) for all threads.
Chunks = Iterator[tuple["Buffer", Array, Any]]


CONSTANT = frozenset(("qweight", "scales", "qzeros"))
"""The names of the buffers that a kernel with MAY_PREFETCH_WEIGHTS may read before the preceding kernel finishes."""
QUANTIZED = frozenset(("xq", "x_scale", "x_row_scale", "x_offset", "x_sums", "x_half_sums"))
FRESH = CONSTANT | QUANTIZED | {"x", "h", "delta", "residual", "square_sums", "previous_inverse_rms", "qkv"}
"""The names of the buffers that the preceding kernel may write: a dependent launch waits before it reads them."""


class Buffer:
    """A named range of bytes at an address, with typed views."""

    def __init__(self, name: str, base: int, data: np.ndarray, writable: bool = True) -> None:
        self.name, self.base, self.data, self.writable = name, base, data, writable
        self._views: dict[Any, tuple[np.ndarray, int]] = {}

    def elements(self, position: Array, dtype: Any) -> tuple[np.ndarray, Array]:
        """Return the buffer as an array of ``dtype``, and the index of the element at each byte position."""
        if dtype not in self._views:
            size = np.dtype(dtype).itemsize
            skip = -self.base % size
            whole = (len(self.data) - skip) // size
            self._views[dtype] = self.data[skip : skip + max(whole, 0) * size].view(dtype), skip
        view, skip = self._views[dtype]
        return view, (position - skip if skip else position) >> view.itemsize.bit_length() - 1


def flat_bytes(array: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the bytes from an array's first element to its last, and their offset in its memory."""
    if any(stride < 0 for stride in array.strides):
        raise ValueError(f"buffer: expected strides >= 0, got {array.strides}")
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    if array.size == 0:
        return np.zeros(0, np.uint8), offset
    extent = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) + array.itemsize
    first = np.lib.stride_tricks.as_strided(array, (1,), (array.itemsize,)).view(np.uint8)
    return np.lib.stride_tricks.as_strided(first, (extent,), (1,)), offset


class Space:
    """A state space of PTX (global, shared, local). Subclasses map addresses to buffers and check each access."""

    name = ""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def chunks(self, address: Array, lanes: Lanes, size: int, at: int, write: bool) -> Chunks:
        """Yield each accessed buffer, byte positions in it, and the indices of their addresses (None: all)."""
        raise NotImplementedError

    def on_read(self, buffer: Buffer, position: Array, size: int, lanes: Lanes, at: int, how: str) -> None:
        """Check a read before it is executed, such as for races; subclasses override it."""

    def on_write(self, buffer: Buffer, position: Array, size: int, lanes: Lanes, at: int, how: str = PLAIN) -> None:
        """Check a write before it is executed, such as for races; subclasses override it."""

    def check_alignment(self, address: Array, size: int, lanes: Lanes, at: int) -> None:
        if size > 1 and int(np.bitwise_or.reduce(address)) & (size - 1):
            first = int(np.flatnonzero(address & (size - 1))[0])
            text = f"expected a multiple of {size}"
            self.machine.fail("misaligned", text, at, lanes, first, int(address[first]))

    def fetch(self, address: Array, lanes: Lanes, dtype: Any, count: int, at: int, how: str = PLAIN) -> list[Array]:
        """Return ``count`` adjacent items at each address, one address for each of ``lanes``."""
        size = np.dtype(dtype).itemsize * count
        self.check_alignment(address, size, lanes, at)
        values: list[Array] = []
        for buffer, position, part in self.chunks(address, lanes, size, at, write=False):
            self.on_read(buffer, position, size, lanes if part is None else self.machine.subset(lanes, part), at, how)
            view, index = buffer.elements(position, dtype)
            found = [view.take(index + k if k else index) for k in range(count)]
            if part is None:
                return found
            values = values or [np.zeros(len(address), dtype) for _ in range(count)]
            for whole, some in zip(values, found, strict=True):
                whole[part] = some
        return values

    def load(self, address: Array, lanes: Lanes, dtype: Any, count: int, at: int, how: str) -> list[Array]:
        """Load ``count`` adjacent items per thread, as registers: arrays over all threads, or scalars."""
        machine = self.machine
        once = np.ndim(address) == 0 and self.uniform
        address = machine.pick(address, lanes)
        if not len(address):
            return [dtype(0)] * count
        values = self.fetch(address[:1] if once else address, lanes, dtype, count, at, how)
        return [value[0] if once else machine.spread(value, lanes) for value in values]

    uniform = False
    """Whether equal addresses of all threads name the same byte, as in global memory but not in local memory."""

    def store(self, address: Array, lanes: Lanes, values: tuple[Array, ...], at: int, how: str) -> None:
        """Execute a store of adjacent items per thread. If several threads store to one address, the last one wins."""
        machine = self.machine
        address = machine.pick(address, lanes)
        if not len(address):
            return
        dtype = values[0].dtype
        size = dtype.itemsize * len(values)
        self.check_alignment(address, size, lanes, at)
        for buffer, position, part in self.chunks(address, lanes, size, at, write=True):
            some = lanes if part is None else machine.subset(lanes, part)
            self.on_write(buffer, position, size, some, at, how)
            view, index = buffer.elements(position, dtype.type)
            for k, value in enumerate(values):
                here = machine.pick(value, some)
                view[index + k] = here
                if machine.races:
                    self._check_agreement(view[index + k], here, address if part is None else address[part], some, at)

    def _check_agreement(self, stored: Array, wanted: Array, address: Array, lanes: Lanes, at: int) -> None:
        """Fail if threads store different values at one address in one step: hardware picks any of them."""
        same = stored.view(f"u{stored.itemsize}") == wanted.view(f"u{wanted.itemsize}")
        if not same.all():
            first = int(np.argmin(same))
            text = "another thread stores a different value at the same address in the same step"
            self.machine.fail("race", text, at, lanes, first, int(address[first]))

    def atomic(self, address: Array, lanes: Lanes, operation: str, values: tuple[Array, ...], at: int) -> Array:
        """Execute an atomic operation in the order of threads; return the previous values."""
        machine = self.machine
        address = machine.pick(address, lanes)
        if not len(address):
            return values[0]
        dtype = np.asarray(values[0]).dtype
        self.check_alignment(address, dtype.itemsize, lanes, at)
        before = np.zeros(len(address), dtype)
        for buffer, position, part in self.chunks(address, lanes, dtype.itemsize, at, write=True):
            some = lanes if part is None else machine.subset(lanes, part)
            self.on_read(buffer, position, dtype.itemsize, some, at, ATOMIC)
            self.on_write(buffer, position, dtype.itemsize, some, at, ATOMIC)
            view, index = buffer.elements(position, dtype.type)
            picked = [machine.pick(value, some) for value in values]
            before[slice(None) if part is None else part] = _combine(view, index, operation, picked)
        return machine.spread(before, lanes)


def _wrap_up(old: Array, limit: Array) -> Array:
    return np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))


def _wrap_down(old: Array, limit: Array) -> Array:
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


_COMBINE: dict[str, Any] = {
    "add": lambda old, new: old + new,
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "exch": lambda old, new: new,
    "inc": _wrap_up,
    "dec": _wrap_down,
    "cas": lambda old, expected, new: np.where(old == expected, new, old),
}


def _combine(view: np.ndarray, index: Array, operation: str, values: list[Array]) -> Array:
    combine = _COMBINE[operation]
    if len(np.unique(index)) == len(index):
        before = view[index]
        view[index] = combine(before, *values)
        return before
    before = np.empty(len(index), view.dtype)
    for k, where in enumerate(index):
        before[k] = view[where]
        view[where] = combine(before[k], *(value[k] for value in values))
    return before


class GlobalMemory(Space):
    """The global memory: named buffers, each with 2**36 addresses to itself."""

    name = "global"
    uniform = True

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.windows: dict[int, Buffer] = {}

    def add(self, name: str, window: int, data: np.ndarray, offset: int = 0, writable: bool = True) -> int:
        """Place bytes in a window and return their address."""
        base = (window << WINDOW_BITS) + offset % BASE_ALIGNMENT
        self.windows[window] = Buffer(name, base, data, writable)
        return base

    def chunks(self, address: Array, lanes: Lanes, size: int, at: int, write: bool) -> Chunks:
        low, high = int(address.min()), int(address.max())
        if low >> WINDOW_BITS == high >> WINDOW_BITS:
            yield self._checked(address, lanes, size, at, write, low, high), address - self._base, None
            return
        windows = address >> WINDOW_BITS
        for window in np.unique(windows):
            part = np.flatnonzero(windows == window)
            some = address[part]
            buffer = self._checked(some, self.machine.subset(lanes, part), size, at, write, some.min(), some.max())
            yield buffer, some - self._base, part

    def on_read(self, buffer: Buffer, position: Array, size: int, lanes: Lanes, at: int, how: str) -> None:
        races = self.machine.races
        if not races or not buffer.writable:
            return
        if how == PLAIN:
            races.globals.read(buffer, position, size, lanes, at)
        else:
            races.globals.atomic(buffer, position, lanes, reads=True, writes=how == ATOMIC)

    def on_write(self, buffer: Buffer, position: Array, size: int, lanes: Lanes, at: int, how: str = PLAIN) -> None:
        races = self.machine.races
        if not races:
            return
        if how == PLAIN:
            races.globals.write(buffer, position, size, lanes, at)
        elif how == ORDERED:
            races.globals.atomic(buffer, position, lanes, reads=False, writes=True)

    def _checked(self, address: Array, lanes: Lanes, size: int, at: int, write: bool, low: int, high: int) -> Buffer:
        buffer = self.windows.get(int(low) >> WINDOW_BITS)
        if buffer is None:
            kind = "null pointer" if 0 <= int(low) < 2**20 else "out of bounds"
            self.machine.fail(kind, "points into no buffer", at, lanes, 0, int(address[0]))
        self._base = buffer.base
        if low < buffer.base or high + size > buffer.base + len(buffer.data):
            inside = (address >= buffer.base) & (address + size <= buffer.base + len(buffer.data))
            first = int(np.flatnonzero(~inside)[0])
            place = int(address[first]) - buffer.base
            text = f"{size} bytes at offset {place} of {buffer.name!r}, which has {len(buffer.data)} bytes"
            self.machine.fail("out of bounds", text, at, lanes, first, int(address[first]))
        self.check_allowed(buffer, address, lanes, at, write)
        return buffer

    def check_allowed(self, buffer: Buffer, address: Array, lanes: Lanes, at: int, write: bool) -> None:
        """Fail for a write to a read-only buffer, or an access before ``griddepcontrol.wait`` that must follow it."""
        machine = self.machine
        if write and not buffer.writable:
            machine.fail("read-only", f"write to {buffer.name!r}", at, lanes, 0, int(address[0]))
        if write and not machine.may_write.all():
            early = np.flatnonzero(~machine.may_write[machine.block_of[lanes]])
            if early.size:
                text = f"write to {buffer.name!r} before griddepcontrol.wait"
                machine.fail("early", text, at, lanes, int(early[0]), int(address[early[0]]))
        if not write and buffer.name in machine.fresh and not machine.may_read.all():
            early = np.flatnonzero(~machine.may_read[lanes])
            if early.size:
                text = f"read of {buffer.name!r} before griddepcontrol.wait"
                machine.fail("early", text, at, lanes, int(early[0]), int(address[early[0]]))


class SharedMemory(Space):
    """The shared memory of all CTAs: ``stride`` bytes per CTA, each byte with a state, such as IN_FLIGHT."""

    name = "shared"

    def __init__(self, machine: Machine, size: int) -> None:
        super().__init__(machine)
        self.size = size
        self.stride = -(-(SHARED_START + size) // 1024) * 1024
        self.data = np.zeros(machine.blocks * self.stride, np.uint8)
        self.state = np.full(machine.blocks * self.stride, UNINITIALISED, np.uint8)
        self.buffer = Buffer("shared memory", 0, self.data)
        self.states = Buffer("states", 0, self.state)
        self.origin = machine.block_of * self.stride

    def locate(self, address: Array, lanes: Lanes, size: int, at: int) -> Array:
        """Return positions in ``data`` (all CTAs' memories) for shared addresses in the own CTA or cluster."""
        machine = self.machine
        origin = self.origin[lanes]
        high = int(address.max())
        if high >> RANK_BITS:
            rank = (address >> RANK_BITS) - 1
            wrong = rank >= machine.cluster_size
            if wrong.any():
                first = int(np.flatnonzero(wrong)[0])
                machine.fail(
                    "out of bounds", "no CTA of the cluster has this rank", at, lanes, first, int(address[first])
                )
            owner = machine.cluster_origin[lanes] + rank
            living = machine.live.reshape(machine.blocks, -1).max(axis=1)
            gone = (rank >= 0) & ~living[owner]
            if gone.any():
                first = int(np.flatnonzero(gone)[0])
                machine.fail("invalid", "the CTA that owns this shared memory has exited", at, lanes, first)
            if machine.races:
                machine.races.remote(owner[rank >= 0], np.arange(machine.threads)[lanes][rank >= 0])
            origin = np.where(rank >= 0, machine.cluster_origin[lanes] * self.stride + rank * self.stride, origin)
            address = address & ((1 << RANK_BITS) - 1)
            high = int(address.max())
        if int(address.min()) < SHARED_START or high + size > SHARED_START + self.size:
            first = int(np.flatnonzero((address < SHARED_START) | (address + size > SHARED_START + self.size))[0])
            place = int(address[first]) - SHARED_START
            text = f"{size} bytes at offset {place} of shared memory, which has {self.size} bytes"
            machine.fail("out of bounds", text, at, lanes, first, int(address[first]))
        return origin + address

    def chunks(self, address: Array, lanes: Lanes, size: int, at: int, write: bool) -> Chunks:
        yield self.buffer, self.locate(address, lanes, size, at), None

    def on_read(self, buffer: Buffer, position: Array, size: int, lanes: Lanes, at: int, how: str) -> None:
        self.check_state(position, size, lanes, at)
        races = self.machine.races
        if races and how not in (ORDERED, ATOMIC):
            races.read(position, size, lanes, at, together=how == TOGETHER)

    def on_write(self, buffer: Buffer, position: Array, size: int, lanes: Lanes, at: int, how: str = PLAIN) -> None:
        races = self.machine.races
        if races and how not in (ORDERED, ATOMIC):
            races.write(position, size, lanes, at)
        self.mark(position, size, READY)

    def mark(self, position: Array, size: int, state: int) -> None:
        """Set the state of ``size`` bytes at each position; positions are multiples of min(size, 16)."""
        dtype, each = _unit(size)
        view, index = self.states.elements(position, dtype)
        value = dtype(state * (0x0101010101010101 & (1 << 8 * each) - 1))
        for k in range(size // each):
            view[index + k] = value

    def check_state(self, position: Array, size: int, lanes: Lanes, at: int) -> None:
        """Fail if a byte is uninitialized, in flight or part of an mbarrier."""
        dtype, each = _unit(size)
        view, index = self.states.elements(position, dtype)
        for k in range(size // each):
            found = view.take(index + k if k else index)
            if found.any():
                first = int(np.flatnonzero(found)[0])
                state = self.state[position[first] + k * each :][:each].max()
                kind, text = {
                    UNINITIALISED: ("uninitialised", "read of uninitialized shared memory"),
                    IN_FLIGHT: ("in flight", "read of shared memory before an asynchronous copy to it has landed"),
                    BARRIER: ("invalid", "read of an mbarrier's bytes"),
                }[int(state)]
                self.machine.fail(kind, text, at, lanes, first, int(position[first]) % self.stride + k * each)


_UNITS: dict[int, tuple[Any, int]] = {1: (np.uint8, 1), 2: (np.uint16, 2), 4: (np.uint32, 4), 8: (np.uint64, 8)}


def _unit(size: int) -> tuple[Any, int]:
    """Return the largest integer type that divides ``size`` bytes, and its size in bytes."""
    return _UNITS.get(size & -size, _UNITS[8])


class LocalMemory(Space):
    """The local memory of each thread."""

    name = "local"

    def __init__(self, machine: Machine, size: int) -> None:
        super().__init__(machine)
        self.size = -(-size // 16) * 16
        self.buffer = Buffer("local memory", 0, np.zeros(machine.threads * self.size, np.uint8))
        self.origin = np.arange(machine.threads, dtype=np.int64) * self.size

    def chunks(self, address: Array, lanes: Lanes, size: int, at: int, write: bool) -> Chunks:
        outside = (address < 0) | (address + size > self.size)
        if outside.any():
            first = int(np.flatnonzero(outside)[0])
            text = f"{size} bytes of local memory, which has {self.size}"
            self.machine.fail("out of bounds", text, at, lanes, first, int(address[first]))
        yield self.buffer, self.origin[lanes] + address, None


class Memory:
    """The state spaces by name, as generated code uses them. A generic address determines its own space."""

    def __init__(self, machine: Machine, shared_bytes: int, local_bytes: int) -> None:
        self.machine = machine
        self.globals = GlobalMemory(machine)
        self.shared = SharedMemory(machine, shared_bytes)
        self.local = LocalMemory(machine, local_bytes)
        self.spaces: dict[str, Space] = {"global": self.globals, "shared": self.shared, "local": self.local}

    def _split(self, address: Array, lanes: Lanes) -> Iterator[tuple[Space, Array, Lanes]]:
        """Yield each state space in which generic addresses lie, with these addresses and their threads."""
        if np.ndim(address) == 0:
            address = np.full(self.machine.threads, address)
        picked = address[lanes]
        kind = np.where(picked >> WINDOW_BITS, 0, picked >> 32)
        bases = (self.globals, 0), (self.shared, SHARED_GENERIC), (self.local, LOCAL_GENERIC)
        for code, (space, base) in enumerate(bases):
            part = np.flatnonzero(kind == code)
            if len(part):
                yield space, address - base, self.machine.subset(lanes, part)

    def load(self, space: str, address: Array, lanes: Lanes, dtype: Any, count: int, at: int, how: str) -> list[Array]:
        if space != "generic":
            return self.spaces[space].load(address, lanes, dtype, count, at, how)
        results = [np.zeros(self.machine.threads, dtype) for _ in range(count)]
        for target, there, some in self._split(address, lanes):
            for result, value in zip(results, target.load(there, some, dtype, count, at, how), strict=True):
                result[some] = value[some]
        return results

    def store(self, space: str, address: Array, lanes: Lanes, values: tuple[Array, ...], at: int, how: str) -> None:
        if space != "generic":
            self.spaces[space].store(address, lanes, values, at, how)
            return
        for target, there, some in self._split(address, lanes):
            target.store(there, some, values, at, how)

    def atomic(
        self, space: str, address: Array, lanes: Lanes, operation: str, values: tuple[Array, ...], at: int
    ) -> Array:
        if space != "generic":
            return self.spaces[space].atomic(address, lanes, operation, values, at)
        result = np.zeros(self.machine.threads, np.asarray(values[0]).dtype)
        for target, there, some in self._split(address, lanes):
            result[some] = target.atomic(there, some, operation, values, at)[some]
        return result
