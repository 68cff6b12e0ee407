# SPDX-License-Identifier: Apache-2.0
"""`Tokenizer`: text to token ids and back, by the package ``tokenizers``, and conversations to token ids."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.files import printable, read_object
from cupy_awq.llm.extra import import_extra
from cupy_awq.llm.text import chat_template
from cupy_awq.llm.text.chat_template import Message

MAX_GROWTH = 64
"""The largest factor by which the normalizer in a tokenizer.json may lengthen a text."""

MAX_PARTS = 2000
"""The largest number of JSON values in normalizer, pre-tokenizer, post-processor and decoder; Llama 3 has 100."""

MAX_TOKENS, MAX_MERGES = 1 << 19, 1 << 20
"""The largest sizes of a vocabulary and of its list of merges; Gemma 3 has 262,144 and 514,906."""

MAX_UNIGRAM = 256
"""The largest length in characters of a token in the vocabulary of a Unigram model."""

MAX_ADDED_TOKENS, MAX_ADDED_CHARACTERS = 1 << 14, 1 << 20
"""The largest number of added tokens, such as special tokens, and their largest total length in characters."""

OPEN, CLOSE = "\ue000", "\ue001"
"""The private-use characters that enclose an index in a template's input.

The index stands for the text of a special token, which the template must not see.
"""


class Tokenizer:
    """A tokenizer and a chat template.

    Args:
        inner: the ``tokenizers.Tokenizer``.
        template: the source text of the chat template (jinja2), or None.
        special: the values of the template's variables "bos_token" and "eos_token".
        bos: the id of the BOS token to prepend to texts that are not rendered by the template; None if the model has no
            BOS token or ``inner`` adds it.
        where: the path of the file, for error messages.
        continued: the normalizer for a text that continues an earlier text and so gets no leading space
            (SentencePiece); None to use the normalizer of ``inner``.

    Attributes:
        special_ids: the ids of the special tokens, which `decode` and `stream` omit, by text.
    """

    def __init__(
        self,
        inner: Any,
        template: str | None,
        special: Mapping[str, str],
        bos: int | None = None,
        where: str = "tokenizer",
        continued: Any = None,
    ) -> None:
        self.inner = inner
        self.template = template
        self.special = dict(special)
        self._bos = bos
        self._where = where
        self._continued = continued
        inner.no_truncation()
        inner.no_padding()
        added = {i: token for i, token in inner.get_added_tokens_decoder().items() if token.content}
        self.special_ids = {token.content: i for i, token in added.items() if token.special}
        special_texts = set(self.special_ids)
        user_texts = special_texts | {t.content for t in added.values() if t.content in (template or "")}
        self._always_plain = _any_of(special_texts)
        index = f"{OPEN}[0-9]+{CLOSE}"
        self._masked_in_answers = re.compile(f"{index}|{self._always_plain.pattern}")
        self._masked = re.compile(f"{index}|{_any_of(user_texts).pattern}")

    @classmethod
    def from_file(cls, file: Path, template: str | None, special: Mapping[str, str]) -> Tokenizer:
        """Load a tokenizer.json. Its truncation and padding are ignored, as in transformers.

        Raises CheckpointError if the package ``tokenizers`` cannot read the file, or if the tokenizer could lengthen a
        text without limit.
        """
        tokenizers = import_extra("tokenizers")
        _check_pipeline(read_object(file), str(file))
        with guarded(str(file)):
            return cls(tokenizers.Tokenizer.from_file(str(file)), template, special, where=str(file))

    def encode(self, text: str, *, add_special_tokens: bool = True, special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: the text.
            add_special_tokens: True to add the tokens that start a text, such as BOS.
            special_tokens: True to recognize special tokens in the text, False to encode them as plain text.

        Raises:
            CheckpointError: the tokenizer fails on this text.
            TypeError: ``text`` is not a str.
        """
        check_text("text", text)
        pieces = [(text, False)]
        if not special_tokens:
            pieces = [(piece, bool(i % 2)) for i, piece in enumerate(self._always_plain.split(text))]
        ids: list[int] = []
        for i, (piece, is_plain) in enumerate(pieces):
            ids += self._encode_piece(piece, is_plain, bool(ids), add_special_tokens and i == 0)
        return [self._bos, *ids] if add_special_tokens and self._bos is not None else ids

    def _encode_piece(
        self, text: str, is_plain: bool, continues: bool = False, add_special_tokens: bool = False
    ) -> list[int]:
        """Return the token ids of a piece of a text.

        Args:
            text: the piece.
            is_plain: whether the piece is the text of a special token, which is split so that it is not recognized.
            continues: whether another piece of the same text precedes this piece.
            add_special_tokens: True to add the tokens that start a text.
        """
        with guarded(self._where):
            if not is_plain:
                return self._encode(_encodable(text), continues, add_special_tokens)
            self.inner.encode_special_tokens = True
            try:
                return self._encode(text[:1], continues) + self._encode(text[1:], continues=True)
            finally:
                self.inner.encode_special_tokens = False

    def _encode(self, text: str, continues: bool, add_special_tokens: bool = False) -> list[int]:
        normalizer = self.inner.normalizer
        if continues and self._continued is not None:
            self.inner.normalizer = self._continued
        try:
            ids: list[int] = self.inner.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        finally:
            if continues and self._continued is not None:
                self.inner.normalizer = normalizer

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        with guarded(self._where):
            text: str = self.inner.decode(list(ids))
        return text

    def stream(self) -> DecodeStream:
        """Return an incremental decoder, which takes one token at a time."""
        return DecodeStream(self.inner, self._where)

    def encode_chat(self, messages: Sequence[Message], *, special_tokens: bool = False) -> list[int]:
        """Return the token ids of a conversation up to the beginning of the assistant's answer.

        Args:
            messages: the conversation.
            special_tokens: True to recognize special tokens in messages; by default only special tokens that the
                template writes are recognized, so that a message cannot forge a turn.

        Raises:
            CheckpointError: there is no chat template, or it fails for these messages.
            TypeError: ``messages`` is not a list of messages that have a role, a content and only texts as values.
        """
        chat_template.check_messages(messages)
        if self.template is None:
            raise CheckpointError(
                f"{self._where}: chat template: expected one, got none: use --raw or raw=True to complete plain text"
            )
        plain: list[str] = []
        if not special_tokens:
            messages = [self._mask(message, plain) for message in messages]
        text = chat_template.render(self.template, messages, self.special, self._where)
        if not plain:
            return self._encode_piece(text, False)
        ids: list[int] = []
        for i, piece in enumerate(re.split(f"{OPEN}([0-9]+){CLOSE}", text)):
            number = int(piece) if i % 2 and len(piece) < 10 else 0
            text = plain[number] if i % 2 and number < len(plain) else "" if i % 2 else piece
            ids += self._encode_piece(text, bool(i % 2), continues=bool(ids))
        return ids

    def _mask(self, message: Message, plain: list[str]) -> dict[str, str]:
        """Replace the special tokens in a message by indices into ``plain``, and append their texts to ``plain``.

        In messages of all roles but the assistant's, other added tokens of the tokenizer that occur in the template are
        also replaced. So is a text of the form of an index, which then remains as it is.
        """
        pattern = self._masked_in_answers if message["role"] == "assistant" else self._masked

        def number(match: re.Match[str]) -> str:
            plain.append(match[0])
            return f"{OPEN}{len(plain) - 1}{CLOSE}"

        return {key: pattern.sub(number, value) for key, value in message.items()}


class DecodeStream:
    """An incremental decoder. A character that spans several tokens is emitted with its last token."""

    def __init__(self, inner: Any, where: str) -> None:
        self._inner, self._where = inner, where
        self._decoder = import_extra("tokenizers.decoders").DecodeStream(skip_special_tokens=True)

    def step(self, token: int) -> str:
        """Return the text that the next token adds, which may be empty."""
        with guarded(self._where):
            text: str | None = self._decoder.step(self._inner, token)
        return text or ""


class Detokenizer:
    """An incremental detokenizer for one completion. It retains text that may be the start of a stop string.

    Attributes:
        stopped: True once a stop string is complete.
    """

    def __init__(self, stream: DecodeStream, stop: Sequence[str]) -> None:
        self._stream = stream
        self._stop = [text for text in stop if text]
        self._held = ""
        self.stopped = False

    def step(self, token: int) -> str:
        """Add a token and return the new text, except for text that may be the start of a stop string."""
        text = self._held + self._stream.step(token)
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        longest = max(map(len, self._stop), default=0)
        tails = (text[i:] for i in range(max(0, len(text) - longest + 1), len(text)))
        self._held = next((tail for tail in tails if any(stop.startswith(tail) for stop in self._stop)), "")
        return text[: len(text) - len(self._held)]

    def flush(self) -> str:
        """Return the retained text. Call this function after the last token."""
        held, self._held = self._held, ""
        return held


@contextlib.contextmanager
def guarded(where: str) -> Iterator[None]:
    """Convert any error of ``tokenizers``, including a Rust panic (a BaseException), to a CheckpointError."""
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise CheckpointError(f"{where}: expected a valid tokenizer, got {printable(str(error)):.300}") from None


def check_text(name: str, value: object) -> None:
    """Raise TypeError unless the argument ``name`` is a str."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a text, got {value!r:.80}")


def _encodable(text: str) -> str:
    """Return a text whose lone surrogates, which UTF-8 cannot encode, are replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _any_of(texts: set[str]) -> re.Pattern[str]:
    """Return a regular expression whose only group matches any of the texts, preferring longer texts."""
    words = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    return re.compile(f"({words})" if words else "((?!))")


def check_size(where: str, tokens: int, merges: int, added: Sequence[str]) -> None:
    """Raise CheckpointError unless tokens, merges and the texts of added tokens can be loaded within seconds."""
    if tokens > MAX_TOKENS or merges > MAX_MERGES:
        raise CheckpointError(
            f"{where}: expected at most {MAX_TOKENS} tokens and {MAX_MERGES} merges, got {tokens} and {merges}"
        )
    characters = sum(map(len, added))
    if len(added) > MAX_ADDED_TOKENS or characters > MAX_ADDED_CHARACTERS:
        raise CheckpointError(
            f"{where}: expected at most {MAX_ADDED_TOKENS} added tokens of {MAX_ADDED_CHARACTERS} characters, got"
            f" {len(added)} of {characters}"
        )


def _check_pipeline(table: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError if a tokenizer.json has components that can exhaust time or memory or abort the process.

    Replacement rules, repeated byte encoding and templates of special tokens can expand a few characters to gigabytes,
    and damaged data of the normalizer "Precompiled" abort the process.
    """
    model = table.get("model")
    vocabulary, merges = (model.get(name) if isinstance(model, dict) else None for name in ("vocab", "merges"))
    tokens, pairs = (len(part) if isinstance(part, (dict, list)) else 0 for part in (vocabulary, merges))
    added = table.get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    check_size(where, tokens, pairs, [str(entry.get("content")) for entry in entries])
    if isinstance(vocabulary, list):  # a Unigram model; its encoding time is proportional to its longest token
        texts = (entry[0] for entry in vocabulary if isinstance(entry, list) and entry)
        longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
        if longest > MAX_UNIGRAM:
            raise CheckpointError(f"{where}: vocab: expected tokens of at most {MAX_UNIGRAM} characters, got {longest}")
    growth, parts = 1.0, 0
    pending = [table.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
    while pending:
        part = pending.pop()
        parts += 1
        if parts > MAX_PARTS:
            raise CheckpointError(f"{where}: expected at most {MAX_PARTS} values of normalizer to decoder, got more")
        if isinstance(part, list):
            pending.extend(part)
        if not isinstance(part, dict):
            continue
        pending.extend(part.values())
        kind = part.get("type")
        if kind == "Precompiled":
            raise CheckpointError(f"{where}: normalizer: expected one without precompiled tables, got 'Precompiled'")
        if kind == "ByteLevel":
            growth *= 2
        if kind in ("Replace", "Prepend"):
            pattern = part.get("pattern")
            old = pattern.get("String") if isinstance(pattern, dict) else None
            new = part.get("content", part.get("prepend"))
            shortest = len(old) if isinstance(old, str) and old else 1
            growth *= max(1.0, (len(new) if isinstance(new, str) else 0) / shortest + (not old))
        if isinstance(single := part.get("single"), list):  # a template may repeat the text ("Sequence")
            growth *= max(1, sum(isinstance(item, dict) and "Sequence" in item for item in single))
        if growth > MAX_GROWTH:
            raise CheckpointError(
                f"{where}: normalizer: expected one that lengthens a text at most {MAX_GROWTH} times, got {growth:.0f}"
            )
