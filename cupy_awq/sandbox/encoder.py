# SPDX-License-Identifier: Apache-2.0
"""`Encoder`: the package ``tokenizers`` without state that changes, so that threads can share it.

The library uses it for tokenizers whose parts are all known, and the worker process for others.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_ALTERNATIVES, MAX_CHARACTERS = 300, 1 << 15
"""The largest number of tokens that `TokenFinder` tries one by one, and their largest total length in characters.

Llama 3 has 256 special tokens of 7,000 characters.
"""

MAX_COMPARISONS = 1 << 29
"""The largest work of the regular expression: all characters of the tokens, times the places where one may start."""

MAX_TOKEN_CHARACTERS = 1 << 12
"""The largest number of characters per token that a decoder may return."""

EMPTY_MODEL = {"type": "BPE", "vocab": {}, "merges": []}


class TokenFinder:
    """A search for the texts of tokens.

    Few tokens become the alternatives of a regular expression, which is fast if all start with the same character, as
    special tokens do. Otherwise it would try each token at each character, so ``tokenizers`` searches for all at once.
    """

    def __init__(self, contents: Iterable[str]) -> None:
        self._texts = sorted({content for content in contents if content}, key=len, reverse=True)
        self._characters, self._starts = sum(map(len, self._texts)), {text[0] for text in self._texts}
        self._pattern: re.Pattern[str] | None = None
        if len(self._texts) <= MAX_ALTERNATIVES and self._characters <= MAX_CHARACTERS:
            self._pattern = re.compile("|".join(map(re.escape, self._texts)) or "(?!)")

    @functools.cached_property
    def _inner(self) -> Any:
        import tokenizers

        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        added = [tokenizers.AddedToken(text, special=True, normalized=False) for text in self._texts]
        inner.add_special_tokens(added)
        return inner

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the [start, end) of each token in ``text``; of overlapping ones the leftmost, then the longest."""
        if self._pattern is not None and self._characters * sum(map(text.count, self._starts)) <= MAX_COMPARISONS:
            return [match.span() for match in self._pattern.finditer(text)]
        found: list[tuple[int, int]] = self._inner.encode(text, add_special_tokens=False).offsets
        return found


class Encoder:
    """A tokenizer without state that changes: it converts texts to token ids and back.

    Args:
        inner: the ``tokenizers.Tokenizer``.
        continued: the normalizer and the pre-tokenizer for a text that continues an earlier text and so gets no leading
            space; None if those of ``inner`` add none.
    """

    def __init__(self, inner: Any, continued: tuple[Any, Any] | None = None) -> None:
        self.inner = inner
        self._continued = continued
        inner.no_truncation()
        inner.no_padding()
        self._added = TokenFinder(token.content for token in inner.get_added_tokens_decoder().values())

    def encode(self, text: str, continues: bool = False, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text in which added tokens are recognized.

        Args:
            text: the text.
            continues: whether the text continues an earlier text.
            add_special_tokens: True to add the tokens that start a text.
        """
        head: list[int] = []
        if continues and self._continued is not None:
            start = next((start for start, _ in self._added.spans(text)), len(text))
            head, text = self.encode_plain(text[:start], continues=True), text[start:]
        rest: list[int] = self.inner.encode(text, add_special_tokens=add_special_tokens).ids
        return head + rest

    def encode_plain(self, text: str, continues: bool = False) -> list[int]:
        """Return the token ids of a text in which no added token is recognized."""
        normalizer, pre_tokenizer = self.inner.normalizer, self.inner.pre_tokenizer
        if continues and self._continued is not None:
            normalizer, pre_tokenizer = self._continued
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        words = [text] if pre_tokenizer is None else [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]
        model = self.inner.model
        return [token.id for word in words if word for token in model.tokenize(word)]

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]], add_special_tokens: bool) -> list[int]:
        """Return the token ids of the pieces of a text: (piece, whether no added token is recognized in it)."""
        ids: list[int] = []
        for i, (piece, is_plain) in enumerate(pieces):
            if is_plain:
                ids += self.encode_plain(piece, continues=bool(ids))
            else:
                adds = add_special_tokens and i == 0
                ids += self.encode(piece, continues=bool(ids), add_special_tokens=adds)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids by the decoder of ``inner``.

        Raises ValueError if it is longer than `MAX_TOKEN_CHARACTERS` per id.
        """
        text: str = self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        if len(text) > MAX_TOKEN_CHARACTERS * len(ids):
            raise ValueError(f"expected at most {MAX_TOKEN_CHARACTERS} characters per token, got {len(text)}")
        return text

    def id_to_token(self, token: int) -> str | None:
        """Return the text of a token in the vocabulary, or None if there is none."""
        text: str | None = self.inner.id_to_token(token)
        return text

    def token_to_id(self, text: str) -> int | None:
        """Return the id of a token, or None if there is none."""
        token: int | None = self.inner.token_to_id(text)
        return token

    def to_str(self) -> str:
        """Return the tokenizer as the JSON text of a tokenizer.json."""
        text: str = self.inner.to_str()
        return text

    def describe(self) -> dict[str, Any]:
        """Return the added tokens [id, text, is special] and the decoder's part of the tokenizer.json."""
        added = self.inner.get_added_tokens_decoder().items()
        decoder = self.inner.decoder
        return {
            "added": [[i, token.content, token.special] for i, token in added],
            "decoder": None if decoder is None else json.loads(decoder.__getstate__()),
        }


def build(text: str, table: Mapping[str, Any], added: Sequence[Mapping[str, Any]]) -> Encoder:
    """Return the encoder of a tokenizer.json.

    Args:
        text: the tokenizer.json.
        table: ``text`` as parsed from JSON.
        added: further tokens to add, as arguments of ``tokenizers.AddedToken`` and, in "id", the expected id or None
            for a token that is only marked as special if the vocabulary has it.

    Raises:
        ValueError: an added token gets another id.
        Exception: any other error of ``tokenizers``.
    """
    import tokenizers

    inner = tokenizers.Tokenizer.from_str(text)
    for entry in added:
        options = dict(entry)
        expected, content = options.pop("id"), options["content"]
        present = inner.token_to_id(content)
        if present is None and expected is None:
            continue
        inner.add_tokens([tokenizers.AddedToken(**options)])
        if present is None and inner.token_to_id(content) != expected:
            raise ValueError(f"added token {content!r:.80}: id {expected} does not follow the vocabulary")
    parts = {name: table.get(name) for name in ("normalizer", "pre_tokenizer")}
    bare = {name: _without_prefix(part) for name, part in parts.items()}
    if parts == bare:
        return Encoder(inner)
    small: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "post_processor": None,
        "decoder": None,
        "model": EMPTY_MODEL,
    }
    helper = tokenizers.Tokenizer.from_str(json.dumps({**small, "truncation": None, "padding": None, **bare}))
    return Encoder(inner, (helper.normalizer, helper.pre_tokenizer))


def _without_prefix(part: Any) -> Any:
    """Return a part of a tokenizer.json without the steps that add a space before a text."""
    if isinstance(part, list):
        return [_without_prefix(item) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    changes = {"add_prefix_space": False, "prepend_scheme": "never"}
    return {name: changes[name] if name in changes else _without_prefix(value) for name, value in part.items()}


class NotLoadedError(Exception):
    """The error for a call before `load`, as in a new process."""


_loaded: list[Encoder] = []


def load(text: str, added: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Load the only tokenizer of this process and return its description."""
    encoder = build(text, json.loads(text), added)
    _loaded[:] = [encoder]
    return encoder.describe()


def loaded() -> Encoder:
    """Return the tokenizer of this process. Raises NotLoadedError before `load`."""
    if not _loaded:
        raise NotLoadedError
    return _loaded[0]
