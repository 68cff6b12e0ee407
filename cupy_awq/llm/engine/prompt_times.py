# SPDX-License-Identifier: Apache-2.0
"""The time of a step with prompts, learned from earlier steps."""

from __future__ import annotations

import math

DECAY = 0.9
"""The weight of a step relative to the one after it."""


class PromptTimes:
    """Predicts t = a n + b p seconds for a step of n tokens that attend to p keys in all, by weighted least squares.

    >>> times = PromptTimes()
    >>> for start in (0, 1000, 2000):
    ...     times.learn([(start, 1000)], 0.02 + 1e-8 * 1000 * (start + 500))
    >>> 900 < times.count_tokens(6000, 0.085) < 1100
    True
    >>> round(times.predict(6000, 1000), 3)
    0.085
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of n n, n p, p p, n t and p t

    def learn(self, parts: list[tuple[int, int]], seconds: float) -> None:
        """Note the time of a step, whose parts are (number of tokens before, number of tokens)."""
        n, p = sum(size for _, size in parts), sum(size * (start + size / 2) for start, size in parts)
        new = n * n, n * p, p * p, n * seconds, p * seconds
        self._sums = [DECAY * old + value for old, value in zip(self._sums, new, strict=True)]

    def predict(self, start: int, size: int) -> float:
        """Return the time in seconds of ``size`` tokens after ``start`` others; 0 before the first step."""
        a, b = self._rates()
        return size * (a + b * (start + size / 2))

    def count_tokens(self, start: int, seconds: float) -> float:
        """Return how many tokens after ``start`` others run in some seconds; 0 before the first step."""
        a, b = self._rates()
        if not a or seconds <= 0:
            return 0.0
        a += b * start
        return 2 * seconds / (a + math.sqrt(a * a + 2 * b * seconds))

    def _rates(self) -> tuple[float, float]:
        """Return a and b; 0 before the first step."""
        nn, np, pp, nt, pt = self._sums
        if not nt:
            return 0.0, 0.0
        # The factor keeps the system regular if n / p was the same in all steps; b is then about 0.
        b = max(0.0, (nn * pt - np * nt) / (1.001 * nn * pp - np * np))
        a = (nt - b * np) / nn
        return (a, b) if a > 0 else (nt / nn, 0.0)
