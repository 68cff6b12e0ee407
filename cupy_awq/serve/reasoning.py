# SPDX-License-Identifier: Apache-2.0
"""The reasoning of models such as Qwen3, which write it before the answer, between <think> and </think>."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"
"""The texts around the reasoning."""


class ReasoningSplitter:
    """An incremental splitter of a text into reasoning and answer. It retains text that may be part of a mark.

    >>> splitter = ReasoningSplitter()
    >>> [splitter.split(part) for part in ("<thi", "nk>So it", " is.</th", "ink>", "\\n\\nYes")]
    [('', ''), ('So it', ''), (' is.', ''), ('', ''), ('', 'Yes')]
    """

    def __init__(self) -> None:
        self._held, self._state = "", "start"

    def split(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Return the reasoning and the answer that a piece of text adds; ``is_last`` releases retained text."""
        held, self._held, reasoning = self._held + text, "", ""
        if self._state == "start":
            begun = held.lstrip()
            if not is_last and len(begun) < len(OPEN) and OPEN.startswith(begun):
                self._held = held
                return "", ""
            self._state = "answer"
            if begun.startswith(OPEN):
                held, self._state = begun.removeprefix(OPEN), "reasoning"
        if self._state == "reasoning":
            reasoning, mark, rest = held.partition(CLOSE)
            if not mark:
                kept = max(i for i in range(len(CLOSE)) if held.endswith(CLOSE[:i])) if not is_last else 0
                self._held = held[len(held) - kept :]
                return held[: len(held) - kept], ""
            held, self._state = rest, "gap"
        if self._state == "gap":
            held = held.lstrip("\n")
            self._state = "answer" if held else "gap"
        return reasoning, held
