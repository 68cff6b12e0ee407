# SPDX-License-Identifier: Apache-2.0
"""The memory of a decoder of past tokens: one state per layer.

A `Cache` has memory of its own for each sequence of a batch with equally many new tokens per sequence. `Pages` are
blocks of memory that any number of sequences share; `PagedRows` is a batch of some of them, with any number of new
tokens each. The forward pass takes either: it needs `layers`, `rotations`, `positions` and `runs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from cupy_awq.check import Array
from cupy_awq.llm.decoder.block_pool import BLOCK, DUMMY, count_blocks
from cupy_awq.llm.families.description import Attention, LayerSpec
from cupy_awq.llm.families.rope import Rope


class Run(NamedTuple):
    """The new tokens of one sequence: consecutive rows of a batch.

    Attributes:
        rows: the rows.
        sequence: where a state has the sequence: its index in a `Cache`, or its `Places` in `Pages`.
        start: the number of tokens before the new ones.
    """

    rows: slice
    sequence: Any
    start: int


class Past(Protocol):
    """A batch as the forward pass needs it: the states of the past tokens, and the places of the new ones."""

    @property
    def layers(self) -> Sequence[LayerState]:
        """The state of each layer."""
        ...

    @property
    def rotations(self) -> Mapping[Rope, tuple[Array, Array]]:
        """The cosines and sines of each RoPE, float32 [positions, dim / 2] each."""
        ...

    def positions(self, offsets: Array) -> Array:
        """Return the position of each new token, integers [B, S], where ``offsets`` is arange(S) on the device."""
        ...

    def runs(self, steps: int) -> Sequence[Run]:
        """Return the new tokens by sequence, as rows of [B * steps]."""
        ...


class LayerState(Protocol):
    """The interface of the state of an attention layer, which keeps the keys and values of past tokens."""

    def append(self, run: Run, k: Array, v: Array) -> None:
        """Append the keys and values of the new tokens of a run, [rows, kv_heads, head_dim] each."""
        ...

    def read(self, run: Run, length: int) -> tuple[Array, Array]:
        """Return the keys and values of the first ``length`` tokens of a sequence, [kv_heads, length, head_dim]."""
        ...


@dataclass(frozen=True)
class KvState:
    """The state of an attention layer: the keys and values of all past tokens.

    Attributes:
        k, v: the keys and values, [sequences, kv_heads, capacity, head_dim] in the back end's dtype.
    """

    k: Array
    v: Array

    @classmethod
    def allocate(cls, spec: Attention, sequences: int, capacity: int, dtype: Any, xp: Any) -> KvState:
        """Allocate an empty state for ``sequences`` x ``capacity`` tokens; ``xp`` is NumPy or CuPy."""
        shape = sequences, spec.kv_heads, capacity, spec.head_dim
        return cls(xp.zeros(shape, dtype), xp.zeros(shape, dtype))

    @staticmethod
    def count_bytes(spec: Attention, sequences: int, tokens: int, itemsize: int) -> int:
        """Return the size in bytes of the keys and values of ``sequences`` x ``tokens`` tokens."""
        return 2 * sequences * tokens * spec.kv_width * itemsize

    def select(self, sequences: slice) -> KvState:
        """Return the state of some sequences, which shares its memory."""
        return KvState(self.k[sequences], self.v[sequences])

    def append(self, run: Run, k: Array, v: Array) -> None:
        """Append the keys and values of the new tokens of a run, [rows, kv_heads, head_dim] each."""
        new = slice(run.start, run.start + len(k))
        self.k[run.sequence, :, new] = k.swapaxes(0, 1)
        self.v[run.sequence, :, new] = v.swapaxes(0, 1)

    def read(self, run: Run, length: int) -> tuple[Array, Array]:
        """Return the keys and values of the first ``length`` tokens of a sequence, [kv_heads, length, head_dim]."""
        return self.k[run.sequence, :, :length], self.v[run.sequence, :, :length]

    def truncate(self, i: int, length: int) -> int:
        """Return the largest length up to ``length`` at which sequence ``i`` can go on, and forget what follows.

        Keys and values can be cut anywhere: those past the length are overwritten.
        """
        return length


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


@dataclass(frozen=True)
class PagedKvState:
    """The state of an attention layer in blocks: the keys and values of `BLOCK` tokens each.

    Attributes:
        k, v: the keys and values, [kv_heads, blocks * BLOCK, head_dim] in the back end's dtype.
    """

    k: Array
    v: Array

    def append(self, run: Run, k: Array, v: Array) -> None:
        """Append the keys and values of the new tokens of a run, [rows, kv_heads, head_dim] each."""
        self.k[:, run.sequence.new] = k.swapaxes(0, 1)
        self.v[:, run.sequence.new] = v.swapaxes(0, 1)

    def read(self, run: Run, length: int) -> tuple[Array, Array]:
        """Return the keys and values of the first ``length`` tokens of a sequence, [kv_heads, length, head_dim]."""
        return self.k[:, run.sequence.known], self.v[:, run.sequence.known]


@dataclass(frozen=True)
class Cache:
    """The states of a batch of sequences, with memory for ``capacity`` tokens per sequence.

    Attributes:
        layers: the state of each layer.
        lengths: int32 [sequences], the number of cached tokens per sequence, which is the position of the next token.
        rotations: the cosines and sines of each RoPE, float32 [capacity, dim / 2] each.
        tokens: for each sequence, the ids of the tokens in the cache, in order.
        capacity: the largest number of tokens per sequence.
    """

    layers: tuple[KvState, ...]
    lengths: Array
    rotations: Mapping[Rope, tuple[Array, Array]]
    tokens: list[list[int]]
    capacity: int

    def positions(self, offsets: Array) -> Array:
        """Return the position of each new token, integers [sequences, S], where ``offsets`` is arange(S)."""
        return self.lengths[:, None] + offsets

    def runs(self, steps: int) -> list[Run]:
        """Return the new tokens by sequence, as rows of [sequences * steps]."""
        return [Run(slice(i * steps, (i + 1) * steps), i, n) for i, n in enumerate(self.lengths.tolist())]

    def select_sequence(self, i: int) -> Cache:
        """Return sequence ``i`` as a cache of batch size 1 that shares the memory of this cache."""
        return self.select(slice(i, i + 1))

    def select(self, sequences: slice) -> Cache:
        """Return some sequences as a cache that shares the memory of this cache."""
        layers = tuple(state.select(sequences) for state in self.layers)
        return replace(self, layers=layers, lengths=self.lengths[sequences], tokens=self.tokens[sequences])

    def reuse_prefix(self, i: int, prompt: Sequence[int]) -> int:
        """Truncate sequence ``i`` to the longest prefix that it can share with ``prompt``; return the new length.

        The prefix never includes the last token of the prompt: logits are not cached, so the model must run this token.
        """
        known = self.tokens[i]
        most = min(len(known), len(prompt) - 1)
        same = next((j for j in range(most) if known[j] != prompt[j]), most)
        for state in self.layers:
            same = state.truncate(i, same)
        del known[same:]
        self.lengths[i] = same
        return same


@dataclass(frozen=True)
class Pages:
    """The states of all sequences of an engine, in blocks that a `block_pool.BlockPool` gives to sequences.

    Attributes:
        layers: the state of each layer.
        rotations: the cosines and sines of each RoPE, float32 [positions, dim / 2] each.
    """

    layers: tuple[PagedKvState, ...]
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
        return PagedRows(self.layers, self.rotations, np.concatenate(positions), tuple(found))


@dataclass(frozen=True)
class PagedRows:
    """A ragged batch: each sequence has any number of new tokens, and all of them are the rows of one [1, M].

    Attributes:
        layers, rotations: those of the `Pages`.
        row_positions: the position of each row, integers [M].
        row_runs: the rows by sequence.
    """

    layers: tuple[PagedKvState, ...]
    rotations: Mapping[Rope, tuple[Array, Array]]
    row_positions: Array
    row_runs: tuple[Run, ...]

    def positions(self, offsets: Array) -> Array:
        """Return the position of each row, integers [1, M]."""
        return self.row_positions[None]

    def runs(self, steps: int) -> tuple[Run, ...]:
        """Return, for each sequence of the batch, which rows its new tokens are and where its state lies."""
        return self.row_runs


def count_bytes(layers: Sequence[LayerSpec], sequences: int, tokens: int, itemsize: int) -> int:
    """Return the size in bytes of the states of all layers for ``sequences`` x ``tokens`` tokens."""
    return sum(KvState.count_bytes(layer.mixer, sequences, tokens, itemsize) for layer in layers)


def allocate(
    layers: Sequence[LayerSpec],
    sequences: int,
    capacity: int,
    dtype: Any,
    xp: Any,
    free_bytes: int,
    *,
    whole_heads: bool = False,
) -> Cache:
    """Allocate an empty cache.

    Args:
        layers: the descriptions of the layers.
        sequences, capacity: the batch size, and the largest number of tokens per sequence.
        dtype: the dtype of keys and values.
        xp: the array module, NumPy or CuPy.
        free_bytes: the largest size of the states in bytes.
        whole_heads: whether the rotations are those of whole heads, as in `make_rotations`.

    Raises:
        ValueError: the states need more than ``free_bytes``. In this case nothing is allocated.
    """
    needed_bytes = count_bytes(layers, sequences, capacity, np.dtype(dtype).itemsize)
    check_size(needed_bytes, free_bytes, f"{sequences} x {capacity}")
    rotations = make_rotations(layers, capacity, xp, whole_heads)
    states = tuple(KvState.allocate(layer.mixer, sequences, capacity, dtype, xp) for layer in layers)
    return Cache(states, xp.zeros(sequences, np.int32), rotations, [[] for _ in range(sequences)], capacity)


def check_size(needed_bytes: int, free_bytes: int, tokens: str) -> None:
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
    states = tuple(PagedKvState(xp.zeros(size, dtype), xp.zeros(size, dtype)) for size in sizes)
    return Pages(states, make_rotations(layers, positions, xp))
