# SPDX-License-Identifier: Apache-2.0
"""Warpgroup products (``wgmma``): A from registers or shared memory, B from shared memory, both by descriptors.

A product is computed when it is issued. Its reads of shared memory count as in progress until ``wgmma.wait_group``, so
that the race detector finds a stage that is released too early.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simt.bulk import CHUNK, swizzle
from tests.simt.warp import elements, matmul

if TYPE_CHECKING:
    from tests.simt.machine import Machine
    from tests.simt.races import Races

Array = Any
ROWS = 64
SWIZZLE = np.array([0, 128, 64, 32])
"""The swizzle width in bytes by the layout number in bits 62 and 63 of a descriptor."""


@dataclass
class _Reads:
    """Pending reads of 16-byte chunks by wgmma: ``lanes`` names the warps, ``group`` the wgmma group of each."""

    lanes: Array
    position: Array
    group: Array
    at: int


@dataclass(frozen=True)
class Shape:
    """The shape, types and flags of a wgmma opcode.

    ``depth`` is its K in elements. ``negative`` and ``transposed`` are flags of (A, B).
    """

    columns: int
    depth: int
    added: str
    left: str
    right: str
    negative: tuple[bool, bool] = (False, False)
    transposed: tuple[bool, bool] = (False, False)


class Warpgroups:
    """The ``wgmma`` state of every warp: reads in progress, number of committed groups, and whether it has fenced."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        warps = machine.threads // 32
        self.reads: list[_Reads] = []
        self.groups = np.zeros(warps, np.int64)
        self.fenced = np.zeros(warps, bool)

    def fence(self, active: Array) -> None:
        self.fenced |= active.reshape(-1, 32).any(axis=1)

    def multiply(
        self, shape: Shape, active: Array, a: Any, b: Array, accumulate: Array, c: tuple[Array, ...], at: int
    ) -> list[Array]:
        """Execute ``wgmma.mma_async``; ``a`` is a tuple of registers, or a descriptor of shared memory."""
        machine, matrices = self.machine, self.machine.matrices
        warps = matrices.whole_warps(active)
        unfenced = warps[~self.fenced[warps]]
        if len(unfenced):
            machine.fail("invalid", "no wgmma.fence since the registers were last free", at, unfenced * 32)
        groups = warps[::4] // 4
        if isinstance(a, tuple):
            left = matrices.left(a, warps, 16, shape.left).reshape(len(groups), ROWS, -1)
        else:
            left = self._tile(a, groups, ROWS, shape.depth, shape.left, shape.transposed[0], False, at)
        right = self._tile(b, groups, shape.columns, shape.depth, shape.right, shape.transposed[1], True, at)
        product = matmul(left, right)
        if shape.negative[0] != shape.negative[1]:
            product = -product
        if np.ndim(accumulate) or not accumulate:
            c = tuple(np.where(accumulate, value, value.dtype.type(0)) for value in c)
        return matrices.accumulate(product.reshape(len(warps), 16, -1), c, warps, shape.added, False)

    def commit(self, active: Array) -> None:
        self.groups += active.reshape(-1, 32).any(axis=1)

    def wait(self, active: Array, newest: int) -> None:
        """Execute ``wgmma.wait_group``: complete all groups except the newest ones."""
        warps = active.reshape(-1, 32).any(axis=1)
        self.fenced &= ~warps
        races = self.machine.races
        if not races:
            return
        kept = []
        for reads in self.reads:
            warp = reads.lanes >> 5
            done = warps[warp] & (reads.group < self.groups[warp] - newest)
            races.finish_read(reads.position[done], CHUNK, reads.lanes[done], reads.at)
            if not done.all():
                kept.append(_Reads(reads.lanes[~done], reads.position[~done], reads.group[~done], reads.at))
        self.reads = kept

    def _tile(
        self,
        descriptor: Array,
        groups: Array,
        rows: int,
        depth: int,
        kind: str,
        transposed: bool,
        shared: bool,
        at: int,
    ) -> Array:
        """Return an operand in shared memory as float32 [groups, rows, depth], and record that it is being read.

        If ``shared``, as for B, each of the four warps reads all of it; else, as for A, each warp reads 16 rows.
        """
        machine = self.machine
        lanes = groups * 128
        words = machine.pick(descriptor, lanes).astype(np.uint64)
        address = self._addresses(words, rows, depth, 1 if kind in ("s8", "u8", "e4m3") else 2, transposed, lanes, at)
        flat = address.reshape(-1)
        owners = np.repeat(lanes, flat.size // len(groups))
        memory = machine.memory.shared
        position = memory.locate(flat, owners, CHUNK, at)
        memory.check_state(position, CHUNK, owners, at)
        if machine.races:
            self._record(machine.races, position.reshape(address.shape), lanes, shared, at)
        chunks = memory.data.reshape(-1, CHUNK)[position // CHUNK].reshape(*address.shape, CHUNK)
        if transposed:  # the chunks are [groups, depth, rows / 8], each with 8 rows
            values = elements(chunks.view(np.uint32), kind)
            return values.reshape(len(groups), depth, rows).swapaxes(1, 2)
        return elements(chunks.view(np.uint32), kind).reshape(len(groups), rows, depth)

    def _addresses(
        self, words: Array, rows: int, depth: int, item: int, transposed: bool, lanes: Array, at: int
    ) -> Array:
        """Return the addresses of the 16-byte chunks [groups, rows or depth, chunks] in the canonical layouts."""

        def field(first: int, bits: int) -> Array:
            return ((words >> np.uint64(first)) & np.uint64(2**bits - 1)).astype(np.int64)[:, None, None]

        start, leading, stride = field(0, 14) * 16, field(16, 14) * 16, field(32, 14) * 16
        span = SWIZZLE[field(62, 2)]
        if field(49, 3).any():
            self.machine.fail("invalid", "a descriptor's base offset is not implemented", at, lanes)
        if len(np.unique(span)) > 1:
            self.machine.fail("invalid", "warpgroups with different layouts in one step", at, lanes)
        wide = int(span.flat[0])
        if transposed:
            k, chunk = np.arange(depth)[:, None], np.arange(rows * item // CHUNK)
            if wide:
                place = (
                    k // 8 * stride
                    + k % 8 * wide
                    + chunk % (wide // CHUNK) * CHUNK
                    + chunk // (wide // CHUNK) * leading
                )
            else:
                place = chunk * stride + k // 8 * leading + k % 8 * CHUNK
        else:
            row, chunk = np.arange(rows)[:, None], np.arange(depth * item // CHUNK)
            if wide:
                place = row // 8 * stride + row % 8 * wide + chunk * CHUNK
            else:
                place = row // 8 * stride + row % 8 * CHUNK + chunk * leading
        return swizzle(start + place, wide)

    def _record(self, races: Races, position: Array, lanes: Array, shared: bool, at: int) -> None:
        """Record reads of an operand: each warp reads all rows (B), or its fourth of the rows (A)."""
        warps = lanes[:, None] + 32 * np.arange(4)
        count = position[0].size
        if shared:
            readers = np.repeat(warps.ravel(), count)
            positions = np.repeat(position.reshape(len(lanes), 1, count), 4, axis=1).ravel()
        else:
            readers = np.repeat(warps.ravel(), count // 4)
            positions = position.ravel()
        races.start_read(positions, CHUNK, readers, at)
        self.reads.append(_Reads(readers, positions, self.groups[readers >> 5], at))
