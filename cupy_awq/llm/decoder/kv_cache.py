# SPDX-License-Identifier: Apache-2.0
"""The KV cache: the keys and values of the past tokens of every sequence in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_awq.check import Array
from cupy_awq.llm.config import ModelConfig


@dataclass(frozen=True)
class KvCache:
    """The keys and values of a batch of sequences, with memory for ``capacity`` tokens per sequence.

    Attributes:
        k, v: the keys and values, [layers, sequences, kv_heads, capacity, head_dim] in the back end's dtype.
        lengths: int32 [sequences], the number of cached tokens per sequence, which is the position of the next token.
        cos, sin: float32 [capacity, head_dim / 2], the RoPE factors for every position.
        tokens: for each sequence, the ids of the tokens whose keys and values are in the cache, in order.
    """

    k: Array
    v: Array
    lengths: Array
    cos: Array
    sin: Array
    tokens: list[list[int]]

    @property
    def capacity(self) -> int:
        """The largest number of tokens per sequence."""
        return int(self.k.shape[3])

    def select_sequence(self, i: int) -> KvCache:
        """Return sequence ``i`` as a cache of batch size 1 that shares the memory of this cache."""
        one = slice(i, i + 1)
        return KvCache(self.k[:, one], self.v[:, one], self.lengths[one], self.cos, self.sin, self.tokens[one])

    def reuse_prefix(self, i: int, prompt: Sequence[int]) -> int:
        """Truncate sequence ``i`` to the longest prefix that it shares with ``prompt``; return the new length.

        The prefix never includes the last token of the prompt: logits are not cached, so the model must run this token.
        """
        known = self.tokens[i]
        most = min(len(known), len(prompt) - 1)
        same = next((j for j in range(most) if known[j] != prompt[j]), most)
        del known[same:]
        self.lengths[i] = same
        return same


def cache_bytes(config: ModelConfig, sequences: int, capacity: int, itemsize: int) -> int:
    """Return the size in bytes of the keys and values for ``sequences`` x ``capacity`` tokens."""
    return 2 * config.layers * sequences * config.kv_width * capacity * itemsize


def allocate(config: ModelConfig, sequences: int, capacity: int, dtype: Any, xp: Any, free_bytes: int) -> KvCache:
    """Allocate an empty KV cache.

    Args:
        config: the configuration of the model.
        sequences, capacity: the batch size, and the largest number of tokens per sequence.
        dtype: the dtype of keys and values.
        xp: the array module, NumPy or CuPy.
        free_bytes: the largest size of the cache in bytes.

    Raises:
        ValueError: the cache needs more than ``free_bytes``. In this case nothing is allocated.
    """
    needed_bytes = cache_bytes(config, sequences, capacity, np.dtype(dtype).itemsize)
    if needed_bytes > free_bytes:
        raise ValueError(
            f"KV cache of {sequences} x {capacity} tokens: expected at most {free_bytes / 1e9:.2f} GB,"
            f" got {needed_bytes / 1e9:.2f} GB; use fewer tokens or fewer sequences"
        )
    frequencies, factor = config.rope_frequencies()
    angles = np.arange(capacity)[:, None] * frequencies
    cos, sin = (xp.asarray((f(angles) * factor).astype(np.float32)) for f in (np.cos, np.sin))
    shape = config.layers, sequences, config.kv_heads, capacity, config.head_dim
    k, v = xp.zeros(shape, dtype), xp.zeros(shape, dtype)
    return KvCache(k, v, xp.zeros(sequences, np.int32), cos, sin, [[] for _ in range(sequences)])
