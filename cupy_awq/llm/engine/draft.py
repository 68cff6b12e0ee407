# SPDX-License-Identifier: Apache-2.0
"""Drafts without a model: the tokens that followed the last tokens when these occurred before."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 8
"""The largest number of a text's last tokens that are searched for in the text before; the smallest is 2."""

CANDIDATES = 32
"""The number of earlier occurrences, the most recent ones, that are compared."""

MAX_NEW = 4096
"""The largest number of tokens that a call notes, about 6 ms: a long prompt is noted in several steps."""


class NgramDraft:
    """A function of one text, which only grows between two calls: it returns a draft, or no tokens.

    A draft has the ``room`` tokens after the most recent occurrence of the longest ending that occurs before. At the
    end of the tokens it starts again after the occurrence, as if they went on to repeat themselves.

    >>> draft = NgramDraft()
    >>> draft([1, 2, 3], 2)
    []
    >>> draft([1, 2, 3, 4, 9, 1, 2, 3], 2)
    [4, 9]
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}  # where each pair of tokens ends, but for the last pair
        self._known = 1

    def __call__(self, tokens: Sequence[int], room: int) -> list[int]:
        last = len(tokens) - 1
        stop = min(last, self._known + MAX_NEW)
        for end in range(self._known, stop):
            self._ends.setdefault((tokens[end - 1], tokens[end]), []).append(end)
        self._known = max(self._known, stop)
        found, longest = -1, 1
        for end in reversed(self._ends.get(tuple(tokens[-2:]), ())[-CANDIDATES:]):
            size = 2
            while size < LONGEST and size <= end and tokens[end - size] == tokens[last - size]:
                size += 1
            if size > longest:
                found, longest = end, size
        return [] if found < 0 else [tokens[found + 1 + i % (last - found)] for i in range(room)]
