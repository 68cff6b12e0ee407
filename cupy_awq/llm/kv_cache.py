# SPDX-License-Identifier: Apache-2.0
"""Keys and values of the tokens that sequences have seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_awq.check import Array
from cupy_awq.llm.config import Config


@dataclass(frozen=True)
class Cache:
    """Memory for ``sequences`` of at most ``capacity`` tokens.

    Attributes:
        k, v: [layers, sequences, kv_heads, capacity, head_dim].
        lengths: int32 [sequences]: where each sequence goes on.
        cos, sin: float32 [capacity, head_dim/2], of RoPE.
        tokens: of each sequence, the tokens whose keys and values are in the cache, in order.
    """

    k: Array
    v: Array
    lengths: Array
    cos: Array
    sin: Array
    tokens: list[list[int]]

    @property
    def capacity(self) -> int:
        return int(self.k.shape[3])

    def sequence(self, i: int) -> Cache:
        """A view of one sequence."""
        one = slice(i, i + 1)
        return Cache(self.k[:, one], self.v[:, one], self.lengths[one], self.cos, self.sin, self.tokens[one])

    def reuse(self, i: int, prompt: Sequence[int]) -> int:
        """Go back to the longest beginning of ``prompt`` that sequence ``i`` holds, short of its last token.

        What is reused is exactly what is there: tokens are noted as they are appended. The last token is always left
        to do, because its logits are not kept.
        """
        known = self.tokens[i]
        most = min(len(known), len(prompt) - 1)
        same = next((j for j in range(most) if known[j] != prompt[j]), most)
        del known[same:]
        self.lengths[i] = same
        return same


def nbytes(config: Config, sequences: int, capacity: int, itemsize: int) -> int:
    """Bytes of keys and values."""
    return 2 * config.layers * sequences * config.kv_width * capacity * itemsize


def create(config: Config, sequences: int, capacity: int, dtype: Any, xp: Any, free: int | None) -> Cache:
    """An empty cache in the arrays of ``xp``.

    Raises ValueError if it needs more than ``free`` bytes, or where the memory is refused; nothing is allocated then.
    """
    wanted = nbytes(config, sequences, capacity, np.dtype(dtype).itemsize)
    if free is not None and wanted > free:
        raise ValueError(
            f"the KV cache of {sequences} x {capacity} tokens needs {wanted / 1e9:.2f} GB, and {free / 1e9:.2f} GB are"
            " free: ask for fewer tokens or fewer sequences"
        )
    frequencies, factor = config.frequencies()
    angles = np.arange(capacity)[:, None] * frequencies
    cos, sin = (xp.asarray((f(angles) * factor).astype(np.float32)) for f in (np.cos, np.sin))
    shape = config.layers, sequences, config.kv_heads, capacity, config.head_dim
    k, v = xp.zeros(shape, dtype), xp.zeros(shape, dtype)
    return Cache(k, v, xp.zeros(sequences, np.int32), cos, sin, [[] for _ in range(sequences)])
