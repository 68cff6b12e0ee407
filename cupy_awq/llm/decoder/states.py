# SPDX-License-Identifier: Apache-2.0
"""The memory of a decoder of the past tokens of every sequence in a batch: one state per layer, in a `Cache`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupy_awq.check import Array
from cupy_awq.llm.families.description import Attention, LayerSpec
from cupy_awq.llm.families.rope import Rope


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

    def select(self, i: int) -> KvState:
        """Return the state of sequence ``i`` as one of batch size 1 that shares its memory."""
        return KvState(self.k[i : i + 1], self.v[i : i + 1])

    def truncate(self, i: int, length: int) -> int:
        """Return the largest length up to ``length`` at which sequence ``i`` can go on, and forget what follows.

        Keys and values can be cut anywhere: those past the length are overwritten.
        """
        return length


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

    def select_sequence(self, i: int) -> Cache:
        """Return sequence ``i`` as a cache of batch size 1 that shares the memory of this cache."""
        one = slice(i, i + 1)
        layers = tuple(state.select(i) for state in self.layers)
        return replace(self, layers=layers, lengths=self.lengths[one], tokens=self.tokens[one])

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


def count_bytes(layers: Sequence[LayerSpec], sequences: int, tokens: int, itemsize: int) -> int:
    """Return the size in bytes of the states of all layers for ``sequences`` x ``tokens`` tokens."""
    return sum(KvState.count_bytes(layer.mixer, sequences, tokens, itemsize) for layer in layers)


def allocate(layers: Sequence[LayerSpec], sequences: int, capacity: int, dtype: Any, xp: Any, free_bytes: int) -> Cache:
    """Allocate an empty cache.

    Args:
        layers: the descriptions of the layers.
        sequences, capacity: the batch size, and the largest number of tokens per sequence.
        dtype: the dtype of keys and values.
        xp: the array module, NumPy or CuPy.
        free_bytes: the largest size of the states in bytes.

    Raises:
        ValueError: the states need more than ``free_bytes``. In this case nothing is allocated.
    """
    needed_bytes = count_bytes(layers, sequences, capacity, np.dtype(dtype).itemsize)
    if needed_bytes > free_bytes:
        raise ValueError(
            f"KV cache of {sequences} x {capacity} tokens: expected at most {free_bytes / 1e9:.2f} GB,"
            f" got {needed_bytes / 1e9:.2f} GB; use fewer tokens or fewer sequences"
        )
    ropes = dict.fromkeys(layer.mixer.rope for layer in layers)
    rotations = {rope: tuple(map(xp.asarray, rope.table(capacity))) for rope in ropes}
    states = tuple(KvState.allocate(layer.mixer, sequences, capacity, dtype, xp) for layer in layers)
    return Cache(states, xp.zeros(sequences, np.int32), rotations, [[] for _ in range(sequences)], capacity)
