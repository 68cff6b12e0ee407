# SPDX-License-Identifier: Apache-2.0
"""The requests of OpenAI's protocol, and their translation to `cupy_awq.llm.Request`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from cupy_awq.llm import Sampling
from cupy_awq.serve.errors import ApiError

MAX_MESSAGES, MAX_PROMPTS, MAX_TOOLS, MAX_STOPS, MAX_DEPTH = 2048, 64, 128, 16, 64
"""The largest numbers of messages, of prompts, of tools, of stop strings, and of levels of nested JSON values."""

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

    def sampling(self) -> Sampling:
        """Return the sampling parameters; without a seed, each request gets a random one."""
        given = {name: getattr(self, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ApiError(400, f"seed: expected a 64-bit integer, got {self.seed:.3g}", param="seed")
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            seed=secrets.randbits(64) if self.seed is None else self.seed % 2**64,
            **{name: value for name, value in given.items() if value is not None},
        )

    def options(self) -> dict[str, Any]:
        """Return the fields of `cupy_awq.llm.Request` that this body sets, besides prompt and limits."""
        names = {name: name for name in ("presence_penalty", "frequency_penalty", "n", "min_tokens")}
        names["ignore_stop_tokens"] = "ignore_eos"
        given = {target: getattr(self, name) for target, name in names.items()}
        options = {name: value for name, value in given.items() if value is not None}
        options["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(options["stop"]) > MAX_STOPS:
            message = f"stop: expected at most {MAX_STOPS} texts, got {len(options['stop'])}"
            raise ApiError(400, message, param="stop")
        if self.logit_bias:
            options["logit_bias"] = dict(map(_read_bias, self.logit_bias.items()))
        return options | {"sampling": self.sampling()}

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
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template."""
        if not 1 <= len(self.messages) <= MAX_MESSAGES:
            got = len(self.messages)
            raise ApiError(400, f"messages: expected 1 to {MAX_MESSAGES} of them, got {got}", param="messages")
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

    def options(self) -> dict[str, Any]:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: expected logprobs=true, got false", param="top_logprobs")
        _refuse(self, "chat_template", "functions", "function_call", "audio")
        if self.modalities not in (None, ["text"]):
            raise ApiError(400, 'modalities: expected ["text"], got others', param="modalities")
        options = super().options()
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
            return "json", {"type": "object"}
        schema = (form or {}).get("json_schema")
        if kind != "json_schema" or not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            message = "response_format: expected text, json_object or json_schema with a schema, got another"
            raise ApiError(400, message, param="response_format")
        return "json", schema["schema"]


class CompletionBody(Body, kw_only=True):
    """The JSON body of /v1/completions, which asks for the continuation of one or several prompts."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids."""
        given = self.prompt
        kinds = set(map(type, given))
        if isinstance(given, str) or kinds == {int}:
            return [given]
        are_ids = kinds == {list} and all(set(map(type, item)) <= {int} for item in given)
        if not 1 <= len(given) <= MAX_PROMPTS or not (kinds == {str} or are_ids):
            message = f"prompt: expected a text, token ids, or up to {MAX_PROMPTS} of either, got {len(given)} items"
            raise ApiError(400, message, param="prompt")
        return given

    def options(self) -> dict[str, Any]:
        _refuse(self, "suffix")
        if self.best_of not in (None, self.n or 1):
            raise ApiError(400, f"best_of: expected n={self.n or 1}, got {self.best_of:.3g}", param="best_of")
        tokens = DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        scored = self.logprobs if self.echo else None
        return super().options() | {"max_tokens": tokens, "logprobs": self.logprobs, "prompt_logprobs": scored}


B = TypeVar("B", bound=Body)


def decode(data: bytes, kind: type[B]) -> B:
    """Parse a body. Raises ApiError if it is no valid JSON, nested too deeply, or has values of other types."""
    try:
        body = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        path = str(error).rpartition("`$.")[2].rstrip("`") if "`$." in str(error) else ""
        raise ApiError(400, f"body: {error!s:.200}", param=path.partition("[")[0] or None) from None
    free = (getattr(body, name, None) for name in ("response_format", "tools", "tool_choice", "chat_template_kwargs"))
    if any(_is_deep(msgspec.to_builtins(value)) for value in free):
        raise ApiError(400, f"body: expected at most {MAX_DEPTH} nested values, got more")
    return body


def _is_deep(value: Any) -> bool:
    """Return whether a value is nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for outer in level for item in _items(outer)]
    return bool(level)


def _items(value: Any) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())


def _read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of an earlier call."""
    try:
        arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        message = f"messages: expected arguments of tool calls that are JSON objects, got {error!s:.80}"
        raise ApiError(400, message, param="messages") from None
    if _is_deep(arguments):
        raise ApiError(400, f"messages: expected at most {MAX_DEPTH} nested values, got more", param="messages")
    return arguments


def _read_bias(item: tuple[str, float]) -> tuple[int, float]:
    try:
        return int(item[0]), item[1]
    except ValueError:
        message = f"logit_bias: expected token ids, got {item[0]!r:.40}"
        raise ApiError(400, message, param="logit_bias") from None


def _refuse(body: Body, *names: str) -> None:
    """Raise ApiError if one of the fields, which are known but not supported, is set."""
    for name in names:
        if getattr(body, name):
            raise ApiError(400, f"{name}: expected nothing, as it is not supported", param=name, code="unsupported")
