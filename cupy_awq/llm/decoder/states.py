# SPDX-License-Identifier: Apache-2.0
"""The memory of a decoder of past tokens: one state per layer, in blocks that any number of sequences share.

`Pages` are the blocks, and `PagedRows` is a batch of some sequences with any number of new tokens each, which the
forward pass takes. `cuda_steps` has those of a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupy_awq.check import Array
from cupy_awq.llm.decoder.block_pool import BLOCK, DUMMY, count_blocks
from cupy_awq.llm.families.description import LayerSpec
from cupy_awq.llm.families.rope import Rope
from cupy_awq.packing import namespace


class Places(NamedTuple):
    """The places of the tokens of a sequence in `Pages`: slices, which need no copy, if its blocks are consecutive.

    Attributes:
        known: the places of all tokens, including the new ones.
        new: the places of the new tokens.
    """

    known: Any
    new: Any

    @classmethod
    def of(cls, blocks: Sequence[int], start: int, count: int) -> Places:
        """Return the places of ``start`` tokens and of ``count`` new ones."""
        ids = np.array(blocks[: count_blocks(start + count)])
        if (np.diff(ids) == 1).all():
            first = int(ids[0]) * BLOCK
            return cls(slice(first, first + start + count), slice(first + start, first + start + count))
        places = (ids[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)[: start + count]
        return cls(places, places[start:])


class Run(NamedTuple):
    """The new tokens of one sequence: consecutive rows of a batch.

    Attributes:
        rows: the rows.
        places: where the states have the sequence.
        start: the number of tokens before the new ones.
    """

    rows: slice
    places: Places
    start: int


@dataclass(frozen=True)
class KvState:
    """The state of an attention layer: the keys and values of `BLOCK` tokens per block.

    Attributes:
        k, v: the keys and values, [kv_heads, blocks * BLOCK, head_dim] in the back end's dtype.
    """

    k: Array
    v: Array

    def append(self, run: Run, k: Array, v: Array) -> None:
        """Append the keys and values of the new tokens of a run, [rows, kv_heads, head_dim] each."""
        self.k[:, run.places.new] = k.swapaxes(0, 1)
        self.v[:, run.places.new] = v.swapaxes(0, 1)

    def read(self, run: Run) -> tuple[Array, Array]:
        """Return the keys and values of all tokens of the sequence of a run, [kv_heads, tokens, head_dim] each."""
        return self.k[:, run.places.known], self.v[:, run.places.known]


@dataclass(frozen=True)
class Pages:
    """The states of all sequences of an engine, in blocks that a `block_pool.BlockPool` gives to sequences.

    Attributes:
        layers: the state of each layer.
        rotations: the cosines and sines of each RoPE, float32 [positions, dim / 2] each.
    """

    layers: tuple[KvState, ...]
    rotations: Mapping[Rope, tuple[Array, Array]]

    @property
    def blocks(self) -> int:
        """The number of blocks that sequences can own."""
        return int(self.layers[0].k.shape[1]) // BLOCK - 1

    def make_rows(self, runs: Sequence[tuple[int, int, Sequence[int]]]) -> PagedRows:
        """Return a batch of new tokens: (number of tokens before them, number of new tokens, blocks) by sequence."""
        found, positions, row = [], [], 0
        for start, count, blocks in runs:
            found.append(Run(slice(row, row + count), Places.of(blocks, start, count), start))
            positions.append(np.arange(start, start + count))
            row += count
        xp = namespace(self.layers[0].k)
        return PagedRows(self.layers, self.rotations, xp.asarray(np.concatenate(positions)), tuple(found))


@dataclass(frozen=True)
class PagedRows:
    """A ragged batch: each sequence has any number of new tokens, and all of them are the rows of one [1, M].

    Attributes:
        layers, rotations: those of the `Pages`.
        positions: the position of each row, integers [M].
        runs: the rows by sequence.
    """

    layers: tuple[KvState, ...]
    rotations: Mapping[Rope, tuple[Array, Array]]
    positions: Array
    runs: tuple[Run, ...]


def count_bytes(layers: Sequence[LayerSpec], tokens: int, itemsize: int) -> int:
    """Return the size in bytes of the keys and values of some tokens in all layers."""
    return 2 * tokens * itemsize * sum(layer.mixer.kv_width for layer in layers)


def check_size(needed_bytes: int, free_bytes: int, tokens: int) -> None:
    """Raise ValueError if a cache of so many tokens does not fit into memory."""
    if needed_bytes > free_bytes:
        raise ValueError(
            f"KV cache of {tokens} tokens: expected at most {free_bytes / 1e9:.2f} GB,"
            f" got {needed_bytes / 1e9:.2f} GB; use fewer tokens or fewer sequences"
        )


def make_rotations(
    layers: Sequence[LayerSpec], positions: int, xp: Any, whole_heads: bool = False
) -> dict[Rope, tuple[Array, Array]]:
    """Return the cosines and sines of each RoPE of the layers, float32 [positions, dim / 2] each.

    With ``whole_heads`` they are [positions, head_dim / 2]: angles of 0 follow for the elements that are not rotated.
    """
    found = {}
    for rope, head_dim in dict.fromkeys((layer.mixer.rope, layer.mixer.head_dim) for layer in layers):
        others = (0, 0), (0, (head_dim - rope.dim) // 2 if whole_heads else 0)
        cos, sin = (np.pad(a, others, constant_values=i) for a, i in zip(rope.table(positions), (1, 0), strict=True))
        found[rope] = xp.asarray(cos), xp.asarray(sin)
    return found


def allocate_pages(layers: Sequence[LayerSpec], blocks: int, positions: int, dtype: Any, xp: Any) -> Pages:
    """Allocate the blocks of all layers, and the one that padding rows use, for sequences of ``positions`` tokens."""
    sizes = [(layer.mixer.kv_heads, (DUMMY + 1 + blocks) * BLOCK, layer.mixer.head_dim) for layer in layers]
    states = tuple(KvState(xp.zeros(size, dtype), xp.zeros(size, dtype)) for size in sizes)
    return Pages(states, make_rotations(layers, positions, xp))
