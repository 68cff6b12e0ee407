# SPDX-License-Identifier: Apache-2.0
"""Warp-level operations, executed for all warps at once on registers as [warps, 32]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simt.memory import TOGETHER
from tests.simt.numerics import bf16_to_f32, e4m3_to_f32, f16_to_f32, f32_to_f16

if TYPE_CHECKING:
    from tests.simt.machine import Machine

Array = Any
LANE = np.arange(32)
ABSENT = np.uint32(0x7FFFDEAD)
"""The value that a shuffle returns from a lane that does not participate: a conspicuous pattern, NaN as float32."""


class Warps:
    """The execution of shuffle, vote, match, redux and elect for all warps at once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._sources: dict[tuple[str, int, int], tuple[Array, Array]] = {}

    def rows(self, value: Array) -> Array:
        """Return register values ([threads] or a scalar) as [warps, 32]."""
        threads = self.machine.threads
        return (value if np.ndim(value) else np.full(threads, value)).reshape(-1, 32)

    def bits(self, mask: Array) -> Array:
        """Return for each thread a 32-bit word in which bit i says whether lane i of its warp is in ``mask``."""
        words = np.packbits(self.rows(mask), axis=1, bitorder="little").view("<u4")
        return np.repeat(words, 32, axis=1).ravel()

    def shuffle(self, mode: str, value: Array, offset: Array, clamp: Array, active: Array) -> tuple[Array, Array]:
        """Execute ``shfl``: return the values and whether the source lane was in range."""
        if np.ndim(offset) or np.ndim(clamp):
            source, valid = self._source(mode, self.rows(offset), self.rows(clamp))
        else:
            key = mode, int(offset), int(clamp)
            if key not in self._sources:
                self._sources[key] = self._source(mode, self.rows(offset), self.rows(clamp))
            source, valid = self._sources[key]
        found = value.take(source) if np.ndim(value) else value
        if np.count_nonzero(active) < self.machine.threads:
            found = np.where(active.take(source), found, ABSENT)
        return found, valid

    def _source(self, mode: str, offset: Array, clamp: Array) -> tuple[Array, Array]:
        """Return the source thread of each thread by the PTX ISA's formulas, and whether its lane is in range."""
        offset = offset & 31
        segment = clamp >> np.uint32(8) & np.uint32(31)
        limit = (LANE & segment) | (clamp & 31 & ~segment)
        first = LANE & segment
        source = {
            "up": lambda: LANE - offset.astype(np.int64),
            "down": lambda: LANE + offset,
            "bfly": lambda: LANE ^ offset,
            "idx": lambda: first | (offset & ~segment & 31),
        }[mode]()
        valid = source >= limit if mode == "up" else source <= limit
        source = np.where(valid, source, LANE).astype(np.int64)
        return (source + np.arange(0, self.machine.threads, 32)[:, None]).ravel(), valid.ravel()

    def vote(self, mode: str, predicate: Array, active: Array, members: Array) -> Array:
        yes, asked = self.ballot(predicate, active, members), self.bits(active) & members
        return {"all": yes == asked, "any": yes != 0, "uni": (yes == asked) | (yes == 0)}[mode]

    def ballot(self, predicate: Array, active: Array, members: Array) -> Array:
        return self.bits(active & predicate) & members

    def match(self, mode: str, value: Array, active: Array, members: Array) -> tuple[Array, Array]:
        """Execute ``match``: return the lanes with the same value (any), or all lanes if their values agree (all)."""
        rows = self.rows(value)
        equal = (rows[:, :, None] == rows[:, None, :]) & self.rows(active)[:, None, :]
        words = np.packbits(equal, axis=2, bitorder="little").view("<u4")[..., 0].ravel() & members
        if mode == "any":
            return words, words != 0
        same = words == (self.bits(active) & members)
        return np.where(same, words, np.uint32(0)), same

    def reduce(self, operation: str, value: Array, active: Array, members: Array) -> Array:
        """Execute ``redux``: return to each lane the reduction over its member mask."""
        rows = self.rows(value)
        taking = self.rows(active & ((self.rows(members) >> LANE.astype(np.uint32)) & 1).astype(bool).ravel())
        info = np.iinfo(rows.dtype)
        function, neutral = {
            "add": (np.add, 0),
            "min": (np.minimum, info.max),
            "max": (np.maximum, info.min),
            "and": (np.bitwise_and, -1 if info.min else info.max),
            "or": (np.bitwise_or, 0),
            "xor": (np.bitwise_xor, 0),
        }[operation]
        result = function.reduce(np.where(taking, rows, rows.dtype.type(neutral)), axis=1, dtype=rows.dtype)
        return np.repeat(result, 32)

    def elect(self, active: Array, members: Array) -> tuple[Array, Array]:
        """Execute ``elect``: return the lowest participating lane, and for each thread whether it is that lane."""
        taking = self.rows(active & ((self.rows(members) >> LANE.astype(np.uint32)) & 1).astype(bool).ravel())
        lowest = taking.argmax(axis=1)[:, None]
        return np.repeat(lowest.astype(np.uint32), 32), (taking & (lowest == LANE)).ravel()


class Matrices:
    """The execution of ``ldmatrix``, ``stmatrix`` and ``mma`` for all warps at once.

    The fragments' layouts follow the ISA's figures. With group = lane // 4 and t = lane % 4, register r of A holds row
    group + 8 * (r % 2) and, for e elements a register, columns 4 * e * (r // 2) + e * t + (0 .. e - 1).
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def whole_warps(self, active: Array) -> Array:
        """Return the numbers of the active warps. Fail if only some lanes of a warp are active."""
        return np.flatnonzero(active.reshape(-1, 32)[:, 0])

    def load(self, address: Array, active: Array, count: int, transposed: bool, at: int) -> list[Array]:
        """Execute ``ldmatrix``: lane 8 j + i has the address of row i of matrix j."""
        machine, warps = self.machine, self.whole_warps(active)
        lanes = (warps[:, None] * 32 + np.arange(8 * count)).ravel()
        words = machine.memory.shared.fetch(machine.pick(address, lanes), lanes, np.uint32, 4, at, TOGETHER)
        rows = np.stack(words, axis=-1).reshape(len(warps), count, 8, 4)
        if transposed:
            rows = np.ascontiguousarray(rows.view(np.uint16).swapaxes(2, 3)).view(np.uint32)
        return self._to_registers(rows.reshape(len(warps), count, 32).swapaxes(0, 1), warps)

    def store(self, address: Array, active: Array, values: tuple[Array, ...], transposed: bool, at: int) -> None:
        """Execute ``stmatrix``, the inverse of ``load``."""
        machine, warps = self.machine, self.whole_warps(active)
        rows = self._from_registers(values, warps).swapaxes(0, 1).reshape(len(warps), len(values), 8, 4)
        if transposed:
            rows = np.ascontiguousarray(np.ascontiguousarray(rows).view(np.uint16).swapaxes(2, 3)).view(np.uint32)
        lanes = (warps[:, None] * 32 + np.arange(8 * len(values))).ravel()
        columns = []
        for k in range(4):
            column = np.zeros(machine.threads, np.uint32)
            column[lanes] = rows[..., k].ravel()
            columns.append(column)
        machine.memory.shared.store(address, lanes, tuple(columns), at, TOGETHER)

    def multiply(
        self,
        rows: int,
        depth: int,
        left: str,
        right: str,
        added: str,
        saturate: bool,
        active: Array,
        a: tuple[Array, ...],
        b: tuple[Array, ...],
        c: tuple[Array, ...],
    ) -> list[Array]:
        """Execute ``mma``. The sum of products is rounded once; hardware may round more often."""
        warps = self.whole_warps(active)
        product = matmul(self.left(a, warps, rows, left), self.right(b, warps, right))
        return self.accumulate(product, c, warps, added, saturate)

    def left(self, a: tuple[Array, ...], warps: Array, rows: int, kind: str) -> Array:
        """Return operand A as float32 [warps, rows, depth] from its registers."""
        values = elements(self._from_registers(a, warps), kind)  # axes [register, warp, lane, element]
        count, each = len(a), values.shape[-1]
        high = rows // 8
        values = values.reshape(count // high, high, len(warps), 8, 4, each).transpose(2, 1, 3, 0, 4, 5)
        return values.reshape(len(warps), rows, -1)

    def right(self, b: tuple[Array, ...], warps: Array, kind: str) -> Array:
        """Return operand B, transposed, as float32 [warps, 8, depth] from its registers."""
        values = elements(self._from_registers(b, warps), kind)
        values = values.reshape(len(b), len(warps), 8, 4, -1).transpose(1, 2, 0, 3, 4)
        return values.reshape(len(warps), 8, -1)

    def accumulate(self, product: Array, c: tuple[Array, ...], warps: Array, kind: str, saturate: bool) -> list[Array]:
        """Return [warps, rows, columns] plus C, as registers.

        One register has columns 8 j + 2 t, the next one 8 j + 2 t + 1.
        """
        count, rows, columns = product.shape
        blocks = product.reshape(count, rows // 8, 8, columns // 8, 4, 2)
        added = self._from_registers(c, warps)
        if kind == "f16":
            tiles = blocks.transpose(3, 1, 0, 2, 4, 5).reshape(-1, count, 32, 2)
            sums = f32_to_f16(tiles + elements(added, "f16"))
            return self._to_registers(np.ascontiguousarray(sums).view(np.uint32)[..., 0], warps)
        tiles = blocks.transpose(3, 1, 5, 0, 2, 4).reshape(-1, count, 32)
        if kind == "f32":
            return self._to_registers(tiles + added, warps)
        total = tiles.astype(np.int64) + added.view(np.int32)
        if saturate:
            total = np.clip(total, -(2**31), 2**31 - 1)
        return self._to_registers(total.astype(np.uint32), warps)

    def _from_registers(self, values: tuple[Array, ...], warps: Array) -> Array:
        """Return register values as [registers, warps, 32]."""
        threads = self.machine.threads
        rows = np.stack([(v if np.ndim(v) else np.full(threads, v)) for v in values]).reshape(len(values), -1, 32)
        return rows if len(warps) * 32 == threads else rows[:, warps]

    def _to_registers(self, rows: Array, warps: Array) -> list[Array]:
        threads = self.machine.threads
        if len(warps) * 32 == threads:
            return list(np.ascontiguousarray(rows).reshape(len(rows), threads))
        whole = np.zeros((len(rows), threads // 32, 32), rows.dtype)
        whole[:, warps] = rows
        return list(whole.reshape(len(rows), threads))


def matmul(left: Array, right: Array) -> Array:
    """Return left @ right^T for stacks of float32 matrices, with each element rounded once.

    BLAS in float32 is no substitute: its order of additions depends on the position of a row, while tensor cores
    compute all rows alike.
    """
    return (left.astype(np.float64) @ right.astype(np.float64).swapaxes(1, 2)).astype(np.float32)


def elements(words: Array, kind: str) -> Array:
    """Convert uint32 [...] to the float32 values [..., elements per word] that the words hold."""
    words = np.ascontiguousarray(words)[..., None]
    if kind in ("s8", "u8"):
        return words.view(np.int8 if kind == "s8" else np.uint8).astype(np.float32)
    if kind == "e4m3":
        return e4m3_to_f32(words.view(np.uint8))
    halves = words.view(np.uint16)
    return f16_to_f32(halves) if kind == "f16" else bf16_to_f32(halves)
