# SPDX-License-Identifier: Apache-2.0
"""`RemoteEncoder`: a tokenizer that runs in a worker process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cupy_awq.sandbox.worker import ProgramError, Worker

SAVED_SECONDS = 1.0
"""The largest CPU time in seconds that earlier calls can leave to a call."""

CALL_SECONDS = 0.01
"""The CPU time in seconds that each call adds; a step of a decoder takes microseconds."""

CHARACTERS_PER_SECOND = 1 << 18
"""The number of characters that add a second to the CPU time."""


class RemoteEncoder:
    """An `Encoder` in a worker process, with the same methods. After a limit, the next call loads it again.

    All calls share their CPU time, so that many short ones are not slower than the texts that they process allow.

    Args:
        text: the tokenizer.json.
        added: further tokens, as in `cupy_awq.sandbox.encoder.build`.

    Raises:
        LimitError, ProgramError: the tokenizer cannot be loaded, or not within the limits.
    """

    pre_tokenizer = None
    """None: no other format has a name for the pre-tokenizer of a tokenizer that must run in a worker process."""

    def __init__(self, text: str, added: Sequence[Mapping[str, Any]]) -> None:
        self._text, self._added = text, [dict(entry) for entry in added]
        self._worker = Worker()
        self._left = SAVED_SECONDS
        self._description = self._load()

    def _load(self) -> dict[str, Any]:
        description: dict[str, Any] = self._worker.call("load_tokenizer", text=self._text, added=self._added)
        return description

    def _use(self, method: str, characters: int = 0, **arguments: Any) -> Any:
        left = min(self._left, SAVED_SECONDS) + CALL_SECONDS + characters / CHARACTERS_PER_SECOND
        self._left = SAVED_SECONDS  # holds if the call fails, which ends a generation
        while True:
            try:
                result, seconds = self._worker.call("use_tokenizer", cpu_seconds=left, method=method, **arguments)
                self._left = max(left - seconds, 0)
                return result
            except ProgramError as error:
                if error.kind != "NotLoadedError":
                    raise
            self._load()

    def encode(self, text: str, continues: bool = False, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text in which added tokens are recognized."""
        options = {"continues": continues, "add_special_tokens": add_special_tokens}
        ids: list[int] = self._use("encode", len(text), text=text, **options)
        return ids

    def encode_plain(self, text: str, continues: bool = False) -> list[int]:
        """Return the token ids of a text in which no added token is recognized."""
        ids: list[int] = self._use("encode_plain", len(text), text=text, continues=continues)
        return ids

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], add_special_tokens: bool) -> list[int]:
        """Return the token ids of the pieces of a text: (piece, whether no added token is recognized in it)."""
        characters = sum(len(piece) for piece, _ in pieces)
        ids: list[int] = self._use("encode_pieces", characters, pieces=pieces, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        numbers = [int(i) for i in ids]
        text: str = self._use("decode", len(numbers), ids=numbers, skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, token: int) -> str | None:
        """Return the text of a token in the vocabulary, or None if there is none."""
        text: str | None = self._use("id_to_token", token=int(token))
        return text

    def token_to_id(self, text: str) -> int | None:
        """Return the id of a token, or None if there is none."""
        token: int | None = self._use("token_to_id", text=text)
        return token

    def to_str(self) -> str:
        """Return the tokenizer as the JSON text of a tokenizer.json."""
        text: str = self._use("to_str", len(self._text))
        return text

    def save(self, path: str) -> None:
        """Write the tokenizer as a tokenizer.json to ``path``."""
        Path(path).write_text(self.to_str(), encoding="utf-8")

    def describe(self) -> dict[str, Any]:
        """Return the added tokens [id, text, is special] and the decoder's part of the tokenizer.json."""
        return self._description
