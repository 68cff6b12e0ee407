# SPDX-License-Identifier: Apache-2.0
"""`Tokenizer`: text to token ids and back, by the package ``tokenizers``, and conversations to token ids."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.files import parse_object, printable
from cupy_awq.llm.extra import import_extra
from cupy_awq.llm.text import chat_template, pipeline
from cupy_awq.llm.text.chat_template import Message
from cupy_awq.llm.text.detokenizer import DecodeStream, TokenDecoder
from cupy_awq.llm.text.remote import RemoteEncoder
from cupy_awq.sandbox import encoder
from cupy_awq.sandbox.encoder import Encoder, TokenFinder

MAX_SEARCH = 1 << 28
"""The largest number of added tokens, times the characters of the chat template in which they are searched."""

FIRST_CHARACTERS = 8
"""The characters per token of the limit that `Tokenizer.encode` first tries on a long text."""

OPEN, CLOSE = "\ue000", "\ue001"
"""The private-use characters that enclose an index in a template's input.

The index stands for the text of a special token, which the template must not see.
"""

PYTHON_TAG = "<|python_tag|>"
"""The special token of Llama 3 after which calls of tools follow. Unlike others, it is part of a decoded text."""

_Result = TypeVar("_Result")

_INDEX = re.compile(f"{OPEN}([0-9]+){CLOSE}")


class Tokenizer:
    """A tokenizer and a chat template. Threads may share it: no call changes it.

    Args:
        inner: the ``tokenizers.Tokenizer``, an `Encoder`, or a `RemoteEncoder`.
        template: the source text of the chat template (jinja2), or None.
        special: the special tokens as the template's variables, such as "bos_token".
        bos: the id of the BOS token to prepend to texts that are not rendered by the template; None if the model has no
            BOS token or ``inner`` adds it.
        where: the path of the tokenizer's file, for error messages.
        template_where: the path of the template's file, for error messages; by default ``where``.

    Attributes:
        special_ids: the ids of the special tokens, which `decode` and `stream` omit, by text.
    """

    def __init__(
        self,
        inner: Any,
        template: str | None,
        special: Mapping[str, Any],
        bos: int | None = None,
        where: str = "tokenizer",
        template_where: str = "",
    ) -> None:
        self._encoder: Encoder | RemoteEncoder = (
            inner if isinstance(inner, (Encoder, RemoteEncoder)) else Encoder(inner)
        )
        self.template = template
        self.special = dict(special)
        self._bos = bos
        self._where, self._template_where = where, template_where or where
        described = self._encoder.describe()
        added = [(i, text, is_special) for i, text, is_special in described["added"] if text]
        self.special_ids = {text: i for i, text, is_special in added if is_special}
        if template is not None and len(added) * len(template) > MAX_SEARCH:
            raise CheckpointError(
                f"{where}: expected at most {MAX_SEARCH // len(template)} added tokens beside a chat template of"
                f" {len(template)} characters, got {len(added)}"
            )
        others = [text for _, text, is_special in added if not is_special and text in (template or "")]
        self._special_texts = TokenFinder(self.special_ids)
        self._user_texts = TokenFinder([*self.special_ids, *others])
        self._decoder = TokenDecoder(
            described["decoder"],
            frozenset(i for text, i in self.special_ids.items() if text != PYTHON_TAG),
            partial(self._call, self._encoder.id_to_token),
            partial(self._call, self._encoder.decode),
        )
        named = self.special.get("bos_token")
        first = self._encoder.token_to_id(named) if bos is None and isinstance(named, str) else bos
        self._double_bos = None if first is None else [first, first]

    @classmethod
    def from_file(
        cls,
        file: Path,
        template: str | None,
        special: Mapping[str, Any],
        *,
        added: Sequence[Mapping[str, Any]] = (),
        template_where: str = "",
    ) -> Tokenizer:
        """Load a tokenizer.json. Its truncation and padding are ignored, as in transformers.

        A tokenizer with parts that are not known to take time proportional to the text runs in a worker process.

        Args:
            file: the path of the tokenizer.json.
            template, special, template_where: as in the constructor.
            added: further tokens, as in `encoder.build`.

        Raises:
            CheckpointError: the package ``tokenizers`` cannot read the file, or loading it exceeds a limit.
        """
        import_extra("tokenizers")
        where = str(file)
        data, table = read_file(file)
        pipeline.check_table_size(table, added, where)
        with guarded(where):
            text = data.decode("utf-8")
            is_known = pipeline.is_known(table)
            # other parts, such as the vocabulary, are freed
            table = {name: table.get(name) for name in ("normalizer", "pre_tokenizer")}
            inner = encoder.build(text, table, added) if is_known else RemoteEncoder(text, added)
            return cls(inner, template, special, where=where, template_where=template_where)

    def prepare(self) -> None:
        """Start the worker process for the chat template, if there is one, without waiting for it."""
        if self.template is not None:
            chat_template.prepare()

    @property
    def inner(self) -> Any:
        """The ``tokenizers.Tokenizer``, or the `RemoteEncoder`, which has the methods of it that this library uses."""
        return self._encoder.inner if isinstance(self._encoder, Encoder) else self._encoder

    def encode(
        self, text: str, *, add_special_tokens: bool = True, special_tokens: bool = True, limit: int | None = None
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: the text.
            add_special_tokens: True to add the tokens that start a text, such as BOS.
            special_tokens: True to recognize special tokens in the text, False to encode them as plain text.
            limit: the largest number of ids that the caller can use: of a text with twice as many, only a part, with
                more than ``limit`` ids, is encoded.

        Raises:
            CheckpointError: the tokenizer fails on this text.
            TypeError: ``text`` is not a str.
        """
        check_text("text", text)

        def encode(part: str) -> list[int]:
            pieces = [(part, False)] if special_tokens else list(_cut(part, self._special_texts.spans(part)))
            return self._call(self._encoder.encode_pieces, pieces, add_special_tokens)

        ids = _encode_part(encode, _encodable(text), limit)
        if not add_special_tokens:
            return ids
        ids = [self._bos, *ids] if self._bos is not None else ids
        if ids[:2] == self._double_bos:
            self._double_bos = None  # one warning is enough
            warnings.warn(f"{self._where}: the text starts with the BOS token, which is added once more", stacklevel=3)
        return ids

    def _call(self, method: Callable[..., _Result], *args: Any) -> _Result:
        """Return the result of a method of the encoder; an error of the encoder becomes a CheckpointError."""
        with guarded(self._where):
            return method(*args)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self._decoder.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character; those of a special token are empty."""
        return self._decoder.bytes(token) if self._decoder.is_bytewise else self._decoder.decode([token]).encode()

    def stream(self, earlier: Sequence[int] = ()) -> DecodeStream:
        """Return an incremental decoder, which takes one token at a time; see `DecodeStream` for ``earlier``."""
        return DecodeStream(self._decoder, earlier)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        special_tokens: bool = False,
        template_args: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation up to the beginning of the assistant's answer.

        Args:
            messages: the conversation.
            special_tokens: True to recognize special tokens in messages; by default only special tokens that the
                template writes are recognized, so that a message cannot forge a turn.
            template_args: further variables of the template, such as {"enable_thinking": False}.
            limit: as in `encode`.

        Raises:
            CheckpointError: there is no chat template, or it fails for these messages.
            TypeError: ``messages`` is not a list of messages that have a role, a content and only texts as values, or
                ``template_args`` has values that JSON cannot represent.
            ValueError: ``template_args`` sets a variable that it may not set.
        """
        chat_template.check_messages(messages)
        arguments = chat_template.check_arguments(template_args)
        if self.template is None:
            raise CheckpointError(
                f"{self._where}: chat template: expected one, got none: use --raw or raw=True to complete plain text"
            )
        plain: list[str] = []
        if not special_tokens:
            messages = [
                {name: self._mask(value, plain, message["role"] == "assistant") for name, value in message.items()}
                for message in messages
            ]
            arguments = {name: self._mask(value, plain) for name, value in arguments.items()}
        text = chat_template.render(self.template, messages, self.special, self._template_where, arguments)

        def encode(part: str) -> list[int]:
            pieces = [(part, False)]
            if plain:
                pieces = []
                for i, piece in enumerate(_INDEX.split(part)):
                    number = int(piece) if i % 2 and len(piece) < 10 else 0
                    pieces.append((plain[number] if number < len(plain) else "", True) if i % 2 else (piece, False))
            return self._call(self._encoder.encode_pieces, pieces, False)

        return _encode_part(encode, _encodable(text), limit)

    def _mask(self, value: Any, plain: list[str], is_answer: bool = False) -> Any:
        """Replace the special tokens in all texts of a value by indices into ``plain``, which gets their texts.

        Unless ``is_answer``, other added tokens of the tokenizer that occur in the template are also replaced. So is a
        text of the form of an index, which then remains as it is.
        """
        if isinstance(value, dict):
            return {
                self._mask(name, plain, is_answer): self._mask(item, plain, is_answer) for name, item in value.items()
            }
        if isinstance(value, list):
            return [self._mask(item, plain, is_answer) for item in value]
        if not isinstance(value, str):
            return value
        finder = self._special_texts if is_answer else self._user_texts
        masked = []
        for piece, is_plain in _cut(value, [match.span() for match in _INDEX.finditer(value)]):
            spans = [(0, len(piece))] if is_plain else finder.spans(_encodable(piece))
            for text, is_token in _cut(piece, spans):
                plain += [text] if is_token else []
                masked.append(f"{OPEN}{len(plain) - 1}{CLOSE}" if is_token else text)
        return "".join(masked)


def read_file(file: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes of a tokenizer.json, and its object.

    Raises CheckpointError if the file is larger than `pipeline.MAX_FILE_BYTES` or contains no object.
    """
    with open(file, "rb") as opened:
        data = opened.read(pipeline.MAX_FILE_BYTES + 1)
    if len(data) > pipeline.MAX_FILE_BYTES:
        raise CheckpointError(f"{file}: expected at most {pipeline.MAX_FILE_BYTES} bytes, got more")
    return data, parse_object(data, str(file))


def _cut(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[str, bool]]:
    """Yield the non-empty parts of a text that ``spans`` cut out and leave, and whether each is one of the spans."""
    end = 0
    for start, stop in [*spans, (len(text), len(text))]:
        for part, is_span in ((text[end:start], False), (text[start:stop], True)):
            if part:
                yield part, is_span
        end = stop


def _encode_part(encode: Callable[[str], list[int]], text: str, limit: int | None) -> list[int]:
    """Return the ids of a text, or of a first part of it that has more than twice ``limit`` of them."""
    size = len(text) if limit is None else FIRST_CHARACTERS * (limit + 1)
    while size < len(text):
        ids = encode(text[:size])
        if limit is not None and len(ids) > 2 * limit:
            return ids
        size *= FIRST_CHARACTERS
    return encode(text)


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
