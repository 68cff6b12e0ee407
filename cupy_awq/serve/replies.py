# SPDX-License-Identifier: Apache-2.0
"""The replies of OpenAI's protocol: whole completions, and the chunks of a stream."""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cupy_awq.llm import Delta, Generation
from cupy_awq.llm.text.tokenizer import Tokenizer
from cupy_awq.serve.errors import ApiError
from cupy_awq.serve.reasoning import OPEN, ReasoningSplitter
from cupy_awq.serve.tools import ToolParser


@dataclass
class Reply:
    """The reply to one request, whose chunks all have the same id and time.

    Attributes:
        tokenizer: the tokenizer, for the texts of tokens.
        model: the name of the model.
        is_chat: whether the endpoint is that of chats.
        logprobs: whether the reply has the log-probabilities of tokens.
        prompts: the texts to repeat before the completions, by prompt; empty texts without ``echo``.
        ids: the tokens of the prompts.
        n: the number of completions per prompt.
        make_parser: a function that returns the parser of a completion that may have calls of tools, or None.
        has_usage: whether a stream reports the numbers of tokens.
        id, created: the id, and the time in seconds since 1970.
    """

    tokenizer: Tokenizer
    model: str
    is_chat: bool
    logprobs: bool
    prompts: Sequence[str]
    ids: Sequence[Sequence[int]]
    n: int
    make_parser: Callable[[], ToolParser | None] = lambda: None
    has_usage: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.is_chat else "cmpl-") + secrets.token_hex(12)
        self._begun: set[int] = set()
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        self._splitters: dict[int, ReasoningSplitter] = {}
        self._parsers: dict[int, ToolParser | None] = {}
        self._offsets: dict[int, int] = {}
        self._frames: dict[tuple[int, str], list[bytes]] = {}
        self._has_reasoning = OPEN in (self.tokenizer.template or "")

    def whole(self, deltas: Sequence[tuple[int, Delta]], generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the reply without streaming, from all (index of the prompt, delta) pairs in order."""
        joined = {i * self.n + choice: Delta(choice) for i in range(len(self.prompts)) for choice in range(self.n)}
        for i, delta in deltas:
            joined[i * self.n + delta.choice] += delta
        choices = []
        for index, delta in joined.items():
            content: dict[str, Any] = {"index": index, "finish_reason": delta.reason}
            if self.is_chat:
                content["message"] = {"role": "assistant", "refusal": None} | self._split(index, delta)
                content["finish_reason"] = self._reason(index, delta)
            else:
                content["text"] = self.prompts[index // self.n] + delta.text
            content["logprobs"] = self._logprobs(index, delta)
            choices.append(content)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._frame(kind, choices) | {"usage": usage(generations)}

    def event(self, prompt: int, delta: Delta) -> bytes:
        """Return the event that streams one delta of a completion; ``prompt`` is the index of its prompt."""
        index = prompt * self.n + delta.choice
        is_first = index not in self._begun
        self._begun.add(index)
        if self.is_chat:
            parts = {name: part for name, part in self._split(index, delta).items() if part}
            if is_first:
                parts = {"role": "assistant", "content": "", **parts}
        else:
            parts = {"text": (self.prompts[prompt] if is_first else "") + delta.text}
        (name, text), *others = parts.items() or [("", None)]
        if others or not isinstance(text, str) or delta.reason or self.logprobs:
            return encode_event(self._chunk(index, parts, self._reason(index, delta), self._logprobs(index, delta)))
        # Most events differ from the one before in their text alone.
        if (index, name) not in self._frames:
            mark = self.id + " "
            event = encode_event(self._chunk(index, {name: mark}))
            self._frames[index, name] = event.split(_encode(mark))
        before, after = self._frames[index, name]
        return before + _encode(text) + after

    def end(self, generations: Sequence[Generation]) -> list[bytes]:
        """Return the last events of a stream; the first reports the numbers of tokens, if the client asks for them."""
        last = [encode_event(self._frame(self._kind, []) | {"usage": usage(generations)})] if self.has_usage else []
        return [*last, b"data: [DONE]\n\n"]

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(
        self, index: int, parts: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        choice |= {"delta": parts} if self.is_chat else parts
        return self._frame(self._kind, [choice]) | ({"usage": None} if self.has_usage else {})

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _split(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the text of a delta as "content", and the reasoning and the calls in it, if the model writes any."""
        parts: dict[str, Any] = {"content": delta.text}
        if self._has_reasoning:
            splitter = self._splitters.setdefault(index, ReasoningSplitter())
            reasoning, answer = splitter.split(delta.text, bool(delta.reason))
            parts = {"content": answer, "reasoning_content": reasoning}
        if index not in self._parsers:
            self._parsers[index] = self.make_parser()
        parser = self._parsers[index]
        if parser is None:
            return parts
        first = parser.count
        parts["content"], calls = parser.parse(parts["content"], bool(delta.reason))
        if calls:
            parts["content"] = parts["content"] or None
            parts["tool_calls"] = [
                {"index": i, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": call._asdict()}
                for i, call in enumerate(calls, first)
            ]
        return parts

    def _reason(self, index: int, delta: Delta) -> str | None:
        parser = self._parsers.get(index)
        return "tool_calls" if delta.reason == "stop" and parser and parser.count else delta.reason or None

    def _logprobs(self, index: int, delta: Delta) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        if self.is_chat:
            entries = [
                self._entry(choice.token, choice.logprob) | {"top_logprobs": [self._entry(*top) for top in choice.top]}
                for choice in delta.tokens
            ]
            return {"content": entries, "refusal": None}
        tokens: list[tuple[int, float | None, Any]] = [*delta.scored, *delta.tokens]
        if self.prompts[index // self.n] and index not in self._offsets:
            tokens.insert(0, (self.ids[index // self.n][0], None, None))
        texts = [self._text(token) for token, _, _ in tokens]
        offsets = []
        decoder = self._decoders.setdefault(index, codecs.getincrementaldecoder("utf-8")("replace"))
        for token, _, _ in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(decoder.decode(self._bytes(token)))
        return {
            "tokens": texts,
            "token_logprobs": [logprob for _, logprob, _ in tokens],
            "top_logprobs": [
                None if top is None else {self._text(token): value for token, value in reversed(top)}
                for _, _, top in tokens
            ],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}

    def _text(self, token: int) -> str:
        """Return the text of a token; that of a part of a character names the bytes, as in OpenAI's protocol."""
        data = self._bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes(self, token: int) -> bytes:
        special = (text for text, i in self.tokenizer.special_ids.items() if i == token)
        return self.tokenizer.token_bytes(token) or next(special, "").encode()


_encode = msgspec.json.Encoder().encode


def encode_event(content: Any) -> bytes:
    """Return the server-sent event of a JSON value."""
    return b"data: " + _encode(content) + b"\n\n"


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """Return the numbers of tokens; prompts count once, however many completions they have."""
    prompt = sum(len(generation.request.prompt) for generation in generations)
    completion = sum(generation.completion_tokens for generation in generations)
    cached = sum(generation.cached_tokens for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def check(delta: Delta) -> Delta:
    """Return a delta, or raise the ApiError for one that ends its completion with an error."""
    if delta.reason in ("timeout", "cancelled", "error"):
        status = 500 if delta.reason == "error" else 503
        raise ApiError(status, delta.error or "server: it is shutting down", code=delta.reason)
    return delta
