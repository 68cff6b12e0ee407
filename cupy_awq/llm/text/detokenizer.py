# SPDX-License-Identifier: Apache-2.0
"""Conversion of token ids to text, at once or token by token, and search for stop strings in it."""

from __future__ import annotations

import codecs
import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Protocol

SPACE = "\u2581"
"""The character that stands for a space in the tokens of SentencePiece."""

CONTEXT = 8
"""The number of earlier tokens that an unknown decoder sees when it decodes the next one."""


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character in the tokens of byte-level BPE, as defined by GPT-2."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_characters()


class TokenDecoder:
    """The text of token ids, by the decoder of a tokenizer.json.

    The common decoders, byte-level BPE and SentencePiece, map each token to bytes, and the bytes of all tokens are
    UTF-8; each invalid part becomes U+FFFD. So a text is the same whether it is decoded at once or token by token.

    Args:
        decoder: the part "decoder" of the tokenizer.json.
        special: the ids of special tokens, which have no text.
        token: a function that returns the token of an id in the vocabulary, or None.
        decode: a function that decodes ids, for other decoders.
    """

    def __init__(
        self,
        decoder: Any,
        special: frozenset[int],
        token: Callable[[int], str | None],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._to_bytes, self.strip = _read_decoder(decoder)
        self._special, self._token, self._decode = special, token, decode
        self._known: dict[int, bytes] = {}

    @property
    def is_bytewise(self) -> bool:
        """Whether each token stands for fixed bytes, so that a text can be decoded token by token."""
        return self._to_bytes is not None

    def bytes(self, token: int) -> bytes:
        """Return the bytes of a token; those of a special or unknown token are empty."""
        found = self._known.get(token)
        if found is None:
            text = None if token in self._special else self._token(token)
            found = b"" if text is None or self._to_bytes is None else self._to_bytes(text)
            self._known[token] = found
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        if self._to_bytes is None:
            return self._decode(ids)
        data = b"".join(map(self.bytes, ids))
        spaces = min(self.strip, len(data) - len(data.lstrip(b" ")))
        return data[spaces:].decode("utf-8", "replace")


def _read_decoder(decoder: Any) -> tuple[Callable[[str], bytes] | None, int]:
    """Return the function from a token to its bytes, None if there is none, and the number of first spaces to strip."""
    steps = [decoder] if decoder else []
    if steps and decoder.get("type") == "Sequence":
        steps = decoder["decoders"]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _from_byte_level, 0
    strip = 0
    if kinds[-1:] == ["Strip"] and (steps[-1]["content"], steps[-1]["stop"]) == (" ", 0):
        strip = steps[-1]["start"]
        kinds.pop()
    replaced = [(step["pattern"].get("String"), step["content"]) for step in steps if "pattern" in step]
    if kinds == ["Replace", "ByteFallback", "Fuse"] and replaced == [(SPACE, " ")]:
        return _from_sentence_piece, strip
    return None, 0


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(BYTES[character] for character in token)
    except KeyError:  # an added token is plain text, whose characters need not stand for bytes
        return token.encode("utf-8", "replace")


def _from_sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        with contextlib.suppress(ValueError):
            return bytes([int(token[3:5], 16)])
    return token.replace(SPACE, " ").encode("utf-8", "replace")


class DecodeStream:
    """An incremental decoder. A character that spans several tokens is emitted with its last token.

    Args:
        decoder: the decoder of token ids.
        earlier: the ids of the text that the tokens continue. The first space of a text, which SentencePiece adds to
            it, is not emitted, but the first space of a continuation is.
    """

    def __init__(self, decoder: TokenDecoder, earlier: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_bytewise, self._is_partial = decoder.is_bytewise, False
        self._strip = 0 if earlier else decoder.strip
        self._ids = list(earlier[-CONTEXT:])
        self._emitted = len(self._ids)

    def step(self, token: int) -> str:
        """Return the text that the next token adds, which may be empty."""
        if not self._is_bytewise:
            self._ids.append(token)
            return self._take(is_last=False)
        data = self._decoder.bytes(token)
        while self._strip and data:
            if not data.startswith(b" "):
                self._strip = 0
                break
            data, self._strip = data[1:], self._strip - 1
        if data.isascii() and not self._is_partial:
            return data.decode()
        text = self._text.decode(data)
        self._is_partial = bool(self._text.getstate()[0])
        return text

    def _take(self, is_last: bool) -> str:
        """Return what the tokens since the last output add to the text; nothing while they end within a character."""
        before, text = self._decoder.decode(self._ids[: self._emitted]), self._decoder.decode(self._ids)
        if len(text) <= len(before) or (text.endswith("\ufffd") and not is_last):
            return ""
        start = max(0, len(self._ids) - CONTEXT)
        self._ids, self._emitted = self._ids[start:], len(self._ids) - start
        return text[len(before) :]

    def flush(self) -> str:
        """Return the text of an incomplete character. Call this function after the last token."""
        return self._text.decode(b"", True) if self._is_bytewise else self._take(is_last=True)


class TextStream(Protocol):
    """The interface of a decoder that `Detokenizer` asks for the text of each token, such as `DecodeStream`."""

    def step(self, token: int, /) -> str:
        """Return the text that the next token adds."""


class StopStrings:
    """Stop strings, sorted so that those that continue a text are a range, however many there are.

    Args:
        texts: the stop strings; empty ones are ignored.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = sorted({text for text in texts if text})

    def narrow(self, low: int, high: int, depth: int, character: str) -> tuple[int, int]:
        """Return the range of those texts in [low, high) that have ``character`` at position ``depth``."""

        def key(text: str) -> str:
            return text[depth : depth + 1]

        first = bisect_left(self.texts, character, low, high, key=key)
        return first, bisect_right(self.texts, character, first, high, key=key)


class Detokenizer:
    """An incremental detokenizer for one completion. It retains text that may be the start of a stop string.

    Attributes:
        stopped: True once a stop string is complete.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str] | StopStrings) -> None:
        self._stream = stream
        self._stop = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        self._held = ""
        # for each place where a stop string may begin: the number of matched characters, and the range of stop strings
        self._begun: list[tuple[int, int, int]] = []
        self.stopped = False

    def step(self, token: int) -> str:
        """Add a token and return the new text, except for text that may be the start of a stop string."""
        text, texts = self._held + self._stream.step(token), self._stop.texts
        for at in range(len(self._held), len(text)):
            begun = []
            for depth, low, high in [*self._begun, (0, 0, len(texts))]:
                low, high = self._stop.narrow(low, high, depth, text[at])
                if low == high:
                    continue
                if len(texts[low]) == depth + 1:  # complete; of several stop strings, the first to begin counts
                    self.stopped, self._held = True, ""
                    return text[: at - depth]
                begun.append((depth + 1, low, high))
            self._begun = begun
        held = self._begun[0][0] if self._begun else 0
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return the retained text. Call this function after the last token."""
        held, self._held, self._begun = self._held, "", []
        return held
