# SPDX-License-Identifier: Apache-2.0
"""The choice of the next token from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; by default the likeliest one, and of equal ones the one of the smallest id.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token and heeds none of the next three.
        top_k: only the k likeliest tokens, and those as likely as the last of them; 0 for all.
        top_p: of these, the fewest likeliest tokens that hold this share of the probability.
        min_p: of these, tokens at least this times as likely as the likeliest.
        repetition_penalty: divides positive logits of tokens that were seen, multiplies negative ones.
        seed: equal seeds give equal texts.

    Raises:
        ValueError: a value out of its range.

    >>> Sampling(temperature=0.7, top_p=0.9).top_k
    0
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in 0..1, got {self.min_p}")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be positive, got {self.repetition_penalty}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be in 0..2**64-1, got {self.seed}")


def choose(logits: Array, sampling: Sampling, *, seen: Array, row: int, position: int) -> int:
    """The token for one sequence.

    Args:
        logits: float32 [V].
        seen: bool [V], the tokens of the text so far; read only for a repetition penalty.
        row, position: of the sequence and of the token; with the seed, all that the chance depends on.

    Raises:
        ValueError: the logits hold NaN.

    >>> choose(np.array([1, 3, 2], np.float32), Sampling(), seen=np.zeros(3, bool), row=0, position=0)
    1
    """
    if sampling.repetition_penalty != 1:
        penalty = np.float32(sampling.repetition_penalty)
        logits = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    best = int(logits.argmax())  # of a NaN, if there is one
    if np.isnan(logits[best]):
        raise ValueError("the logits hold NaN: the model's weights are damaged, or its values overflow")
    if sampling.temperature == 0:
        return best
    scaled = logits / np.float32(sampling.temperature)
    top = scaled[best]
    limit = np.float32(-np.inf)
    if 0 < sampling.top_k < scaled.size:
        limit = np.partition(scaled, -sampling.top_k)[-sampling.top_k]
    if sampling.top_p < 1:
        kept = np.sort(scaled[scaled >= limit])[::-1]
        mass = np.cumsum(np.exp(kept - top, dtype=np.float64))
        limit = kept[np.searchsorted(mass, sampling.top_p * mass[-1])]
    if sampling.min_p > 0:
        limit = max(limit, top + np.float32(math.log(sampling.min_p)))
    ids = np.flatnonzero(scaled >= limit)
    # The largest of logit plus Gumbel noise falls on each token with its probability.
    return int(ids[(scaled[ids] + gumbel(sampling.seed, row, position, ids)).argmax()])


def gumbel(seed: int, row: int, position: int, ids: Array) -> Array:
    """Gumbel noise, float32, of tokens ``ids``: a function of its arguments alone, in whatever order it is made."""
    key = _mix(np.array([seed], np.uint64) + np.array([row << 32 | position], np.uint64) * _STEP)
    bits = _mix(key + ids.astype(np.uint64) * _STEP) >> np.uint64(41)
    uniform = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)  # in (0, 1), exact
    noise: Array = -np.log(-np.log(uniform))
    return noise


_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: Array) -> Array:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Array = z ^ (z >> np.uint64(31))
    return result
