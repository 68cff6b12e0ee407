# SPDX-License-Identifier: Apache-2.0
"""Drafts without a model: the tokens that followed the last tokens when these occurred before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LONGEST = 8
"""The largest number of a text's last tokens that are searched for in the text before; the smallest is 2."""

WINDOW = 4096
"""The number of a text's last tokens in which a draft is searched for."""


def draft_ngram(tokens: Sequence[int], room: int) -> list[int]:
    """Return ``room`` tokens, those after the most recent occurrence of the longest ending that occurs before, or none.

    At the end of the tokens it starts again after the occurrence, as if they went on to repeat themselves.

    >>> draft_ngram([5, 1, 2, 3, 4, 9, 1, 2, 3], 2)
    [4, 9]
    >>> draft_ngram([1, 2, 3], 2)
    []
    """
    text = np.array(tokens[-WINDOW:])
    # The places where the last token has occurred before; each round keeps those where one more token agrees.
    ends = np.flatnonzero(text[:-1] == text[-1])
    found = -1
    for size in range(2, LONGEST + 1):
        ends = ends[ends >= size - 1]
        ends = ends[text[ends - (size - 1)] == text[-size]] if size <= len(text) else ends[:0]
        if not len(ends):
            break
        found = int(ends[-1])
    if found < 0:
        return []
    return [int(text[found + 1 + i % (len(text) - 1 - found)]) for i in range(room)]
