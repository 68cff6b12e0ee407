# SPDX-License-Identifier: Apache-2.0
"""Sampling of the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NAN_LOGITS = "logits: expected finite values, got NaN: the weights are damaged, or activations overflow"
"""The error message of all back ends for logits that contain NaN."""


GREEDY_BELOW = 1e-6
"""The temperature below which sampling is greedy, because logits / temperature could overflow float32."""

MAX_TEMPERATURE = 1e6
"""The largest temperature, at which all tokens are about equally likely."""


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of the next token. By default, the most likely token is taken (greedy sampling).

    Attributes:
        temperature: the divisor of the logits, at most `MAX_TEMPERATURE`. Below `GREEDY_BELOW`, sampling is greedy and
            ignores top_k, top_p and min_p.
        top_k: the number of most likely tokens to keep; tokens that tie with the last of them are also kept. 0 keeps
            all tokens.
        top_p: the smallest total probability of the tokens to keep, relative to those that top_k keeps. The fewest most
            likely tokens that reach it are kept.
        min_p: the smallest probability of a token to keep, as a fraction of the highest probability.
        repetition_penalty: the divisor of positive logits, and the factor of negative logits, of tokens already in the
            text.
        seed: the seed of the random numbers, 0 to 2**64 - 1; with equal seeds, the same prompt at the same
            index of a batch gets the same text.

    Raises:
        ValueError: a value is out of range.
        TypeError: a value is not a number, or top_k or seed is not an integer.

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
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name}: expected an integer, got {value!r:.80}")
            object.__setattr__(self, name, int(value))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
                raise TypeError(f"{name}: expected a number, got {value!r:.80}")
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(f"temperature: expected 0 to 1e6, got {self.temperature}")
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_k < 0:
            raise ValueError(f"top_k: expected at least 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: expected 0 to 1, got {self.min_p}")
        if not 1e-6 <= self.repetition_penalty <= 1e6:
            raise ValueError(f"repetition_penalty: expected 1e-6 to 1e6, got {self.repetition_penalty}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed: expected 0..2**64-1, got {self.seed}")


class Offsets:
    """The numbers that are added to the logits of some tokens of one completion, in float32.

    Args:
        bias: the first offsets by token id.
        presence: the penalty that is subtracted from the offset of a token when it is first generated.
        frequency: the penalty that is subtracted whenever it is generated.
        generated: the tokens of the completion so far.

    Attributes:
        values: the offsets by token id; others are 0.
        generated: the tokens that the completion contains.

    >>> offsets = Offsets({5: 1.0}, presence=0.5, frequency=0.25, generated=[5, 7, 5])
    >>> {token: float(value) for token, value in offsets.values.items()}
    {5: 0.0, 7: -0.75}
    """

    def __init__(
        self, bias: Mapping[int, float], presence: float, frequency: float, generated: Iterable[int] = ()
    ) -> None:
        self.presence, self.frequency = np.float32(presence), np.float32(frequency)
        self.values = {token: np.float32(value) for token, value in bias.items()}
        self.generated: set[int] = set()
        for token in generated:
            self.add(token)

    def __bool__(self) -> bool:
        return bool(self.values or self.presence or self.frequency)

    def add(self, token: int) -> None:
        """Record a generated token."""
        if self.presence or self.frequency:
            first = np.float32(0) if token in self.generated else self.presence
            self.values[token] = self.values.get(token, np.float32(0)) - first - self.frequency
            self.generated.add(token)

    def apply(self, logits: Array) -> None:
        """Add the offsets to logits, float32 [V]."""
        logits[list(self.values)] += np.array(list(self.values.values()), np.float32)


def choose_token(logits: Array, sampling: Sampling, *, seen: Array, sequence: int, position: int) -> int:
    """Return the next token of one sequence.

    Args:
        logits: the logits of the next token, float32 [V].
        sampling: the sampling parameters.
        seen: bool [V], True for tokens already in the text; used only for the repetition penalty.
        sequence: the index of the sequence in its batch, from which the random numbers are derived.
        position: the position of the new token, from which the random numbers are derived.

    Raises:
        ValueError: the logits contain NaN.

    >>> choose_token(np.array([1, 3, 2], np.float32), Sampling(), seen=np.zeros(3, bool), sequence=0, position=0)
    1
    """
    if sampling.repetition_penalty != 1:
        penalty = np.float32(sampling.repetition_penalty)
        logits = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    best = int(logits.argmax())  # argmax returns the index of a NaN if there is one
    if np.isnan(logits[best]):
        raise ValueError(NAN_LOGITS)
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
    # The Gumbel-max trick: the argmax of logits + Gumbel noise is distributed as softmax(logits).
    return int(ids[(scaled[ids] + gumbel_noise(sampling.seed, sequence, position, ids)).argmax()])


def gumbel_noise(seed: int, sequence: int, position: int, ids: Array) -> Array:
    """Return Gumbel noise, float32 [len(ids)], as a deterministic function of all arguments."""
    key = _mix(np.array([seed], np.uint64) + np.array([sequence << 32 | position], np.uint64) * _STEP)
    bits = _mix(key + ids.astype(np.uint64) * _STEP) >> np.uint64(41)
    uniform = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)  # within (0, 1), exact
    noise: Array = -np.log(-np.log(uniform))
    return noise


_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: Array) -> Array:
    """Return a 64-bit hash of each element: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Array = z ^ (z >> np.uint64(31))
    return result
