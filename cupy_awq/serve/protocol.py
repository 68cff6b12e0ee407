# SPDX-License-Identifier: Apache-2.0
"""The requests of OpenAI's protocol, and their translation to `cupy_awq.llm.Request`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from cupy_awq.llm import Sampling
from cupy_awq.serve.errors import ApiError
from cupy_awq.serve.limits import Limits

TEMPLATE_ARGUMENTS = {"enable_thinking": bool, "reasoning_effort": str}
"""The variables of a chat template that a request may set, with their types."""

DEFAULT_TOKENS = 16
"""The number of tokens of a completion without max_tokens, as in OpenAI's protocol; a chat has no such default."""


class StreamOptions(msgspec.Struct):
    """The options of a stream: whether its last chunk reports the numbers of tokens."""

    include_usage: bool = False


class TextPart(msgspec.Struct):
    """A text, as an element of a message's content, which may be a list of parts."""

    type: Literal["text"]
    text: str


class FunctionCall(msgspec.Struct):
    """The function that an earlier answer called; the arguments are a JSON text."""

    name: str
    arguments: str = "{}"

    def to_template(self) -> dict[str, Any]:
        """Return the call for the chat template, which takes the arguments as an object."""
        return {"name": self.name, "arguments": _read_arguments(self.arguments)}


class ToolCall(msgspec.Struct):
    """A call in an earlier answer."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class Message(msgspec.Struct):
    """A message of a conversation: who speaks, and a text or a list of its parts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def to_template(self) -> dict[str, Any]:
        """Return the message for the chat template, with the arguments of calls as objects."""
        parts = self.content or ""
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.to_template()} for call in self.tool_calls
            ]
        return message


class Function(msgspec.Struct, omit_defaults=True):
    """A function that the model may call; the parameters are a JSON schema."""

    name: Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    """A tool that the model may use."""

    function: Function
    type: Literal["function"]


class Body(msgspec.Struct, kw_only=True):
    """The fields that the bodies of chats and of completions share. Fields that are not known are ignored."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    regex: str | None = None
    grammar: str | None = None

    def check(self, limits: Limits) -> None:
        """Raise ApiError if a number of values is above its limit."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        _check_count("stop", len(stops), limits.stops, " texts")
        _check_count("stop", max(map(len, stops), default=0), limits.stop_characters, " characters")
        _check_count("n", self.n or 0, limits.n)

    def sampling(self, defaults: Mapping[str, Any]) -> Sampling:
        """Return the sampling parameters; without a seed, each request gets a random one."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ApiError(400, f"seed: expected a 64-bit integer, got {self.seed!r:.40}", param="seed")
        seed = secrets.randbits(64) if self.seed is None else self.seed % 2**64
        return Sampling(**{"temperature": 1.0, **defaults, **given}, seed=seed)

    def options(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of `cupy_awq.llm.Request` that this body sets, besides prompt and limits.

        ``defaults`` are sampling parameters of the model, which the body may change.
        """
        names = {name: name for name in ("presence_penalty", "frequency_penalty", "n", "min_tokens")}
        names["ignore_stop_tokens"] = "ignore_eos"
        given = {target: getattr(self, name) for target, name in names.items()}
        options = {name: value for name, value in given.items() if value is not None}
        options["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if self.logit_bias:
            options["logit_bias"] = dict(map(_read_bias, self.logit_bias.items()))
        return options | {"sampling": self.sampling(defaults)}

    def constraint(self) -> tuple[str, Any] | None:
        """Return the kind of grammar that the text must follow and its source, or None."""
        given = [(kind, value) for kind in ("regex", "grammar") if (value := getattr(self, kind)) is not None]
        if len(given) > 1:
            raise ApiError(400, "grammar: expected one of regex, grammar and response_format, got two", param="grammar")
        return given[0] if given else None


class ChatBody(Body, kw_only=True):
    """The JSON body of /v1/chat/completions, which asks for the next message of a conversation."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None

    def check(self, limits: Limits) -> None:
        super().check(limits)
        _check_count("tools", len(self.tools or ()), limits.tools)
        _check_count("messages", len(self.messages), limits.messages)
        if not self.messages:
            raise ApiError(400, "messages: expected at least one, got none", param="messages")
        calls = [call.function.arguments for message in self.messages for call in message.tool_calls or ()]
        _check_values("".join(calls).encode(), "messages", limits)

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template."""
        return [message.to_template() for message in self.messages]

    def template_arguments(self) -> dict[str, Any]:
        """Return the variables of the chat template that the request sets."""
        arguments = self.chat_template_kwargs or {}
        for name, value in arguments.items():
            if type(value) is not TEMPLATE_ARGUMENTS.get(name):
                names = ", ".join(TEMPLATE_ARGUMENTS)
                message = f"chat_template_kwargs: expected {names} with valid values, got {name!r:.40}"
                raise ApiError(400, message, param="chat_template_kwargs")
        return arguments

    def options(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: expected logprobs=true, got false", param="top_logprobs")
        _refuse(self, "chat_template", "functions", "function_call", "audio")
        if self.modalities not in (None, ["text"]):
            raise ApiError(400, 'modalities: expected ["text"], got others', param="modalities")
        options = super().options(defaults)
        tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        options |= {} if tokens is None else {"max_tokens": tokens}
        return options | {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}

    def constraint(self) -> tuple[str, Any] | None:
        form, other = self.response_format, super().constraint()
        kind = "text" if form is None else form.get("type")
        if kind == "text":
            return other
        if other is not None:
            raise ApiError(400, "response_format: expected it alone, got a grammar too", param="response_format")
        if kind == "json_object":
            return "response_format", {"type": "object"}
        schema = (form or {}).get("json_schema")
        if kind != "json_schema" or not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            message = "response_format: expected text, json_object or json_schema with a schema, got another"
            raise ApiError(400, message, param="response_format")
        return "response_format", schema["schema"]


class CompletionBody(Body, kw_only=True):
    """The JSON body of /v1/completions, which asks for the continuation of one or several prompts."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def check(self, limits: Limits) -> None:
        super().check(limits)
        is_one = isinstance(self.prompt, str) or set(map(type, self.prompt)) == {int}
        _check_count("prompt", 1 if is_one else len(self.prompt), limits.prompts)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids."""
        given = self.prompt
        kinds = set(map(type, given))
        if isinstance(given, str) or kinds == {int}:
            return [given]
        are_ids = kinds == {list} and all(set(map(type, item)) <= {int} for item in given)
        if not (kinds == {str} or are_ids):
            raise ApiError(400, "prompt: expected a text, token ids, or several of either, got others", param="prompt")
        return given

    def options(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        _refuse(self, "suffix")
        if self.best_of not in (None, self.n or 1):
            raise ApiError(400, f"best_of: expected n={self.n or 1}, got {self.best_of!r:.40}", param="best_of")
        tokens = DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        scored = self.logprobs if self.echo else None
        return super().options(defaults) | {"max_tokens": tokens, "logprobs": self.logprobs, "prompt_logprobs": scored}


B = TypeVar("B", bound=Body)


def decode(data: bytes, kind: type[B], limits: Limits) -> B:
    """Parse a body. Raises ApiError if it is no valid JSON, exceeds a limit, or has values of other types."""
    _check_values(data, "body", limits)
    try:
        body = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        path = str(error).rpartition("`$.")[2].rstrip("`") if "`$." in str(error) else ""
        raise ApiError(400, f"body: {error!s:.200}", param=path.partition("[")[0] or None) from None
    body.check(limits)
    return body


def _check_count(name: str, count: int, most: int, unit: str = "") -> None:
    if count > most:
        raise ApiError(400, f"{name}: expected at most {most}{unit}, got {count!r:.40}", param=name)


OPENING, CLOSING = b"[{", b"]}"
OTHERS = bytes(set(range(256)) - set(OPENING + CLOSING + b'"'))
"""The bytes without a meaning for the nesting of JSON values, once no string has an escaped quote."""


def _check_values(data: bytes, name: str, limits: Limits) -> None:
    """Raise ApiError if a JSON text has too many values or too many levels of them, in linear time."""
    marks = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, OTHERS)
    if len(marks) <= min(limits.nesting, limits.values):
        return
    found = np.frombuffer(marks, np.uint8)
    found = found[~np.logical_xor.accumulate(found == ord('"'))]  # brackets outside of strings, and ends of strings
    opened, closed = (np.isin(found, np.frombuffer(kind, np.uint8)) for kind in (OPENING, CLOSING))
    if np.cumsum(np.subtract(opened, closed, dtype=np.int8), dtype=np.int32).max(initial=0) > limits.nesting:
        raise ApiError(400, f"{name}: expected at most {limits.nesting} nested values, got more", param=name)
    _check_count(name, len(found) - int(np.count_nonzero(closed)), limits.values)


def _read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of an earlier call."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        message = f"messages: expected arguments of tool calls that are JSON objects, got {error!s:.80}"
        raise ApiError(400, message, param="messages") from None


def _read_bias(item: tuple[str, float]) -> tuple[int, float]:
    if not (item[0].isascii() and item[0].isdigit() and len(item[0]) < 20):
        raise ApiError(400, f"logit_bias: expected token ids, got {item[0]!r:.40}", param="logit_bias")
    return int(item[0]), item[1]


def _refuse(body: Body, *names: str) -> None:
    """Raise ApiError if one of the fields, which are known but not supported, is set."""
    for name in names:
        if getattr(body, name):
            raise ApiError(400, f"{name}: expected nothing, as it is not supported", param=name, code="unsupported")
