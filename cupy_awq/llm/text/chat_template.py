# SPDX-License-Identifier: Apache-2.0
"""Chat templates: jinja2 programs from untrusted files, rendered in a worker process as transformers renders them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.llm.extra import import_extra
from cupy_awq.sandbox import worker

MAX_TEMPLATE_CHARACTERS = 1 << 17
"""The largest length of a template in characters. Templates of common models have at most 20,000."""

MAX_CHARACTERS = 1 << 24
"""The largest length of a conversation in characters; a context of a million tokens holds a quarter of it."""

MAX_OUTPUT_CHARACTERS = 1 << 18
"""The largest length of the output in characters, to which four times the conversation's length is added."""

RESERVED = ("messages", "add_generation_prompt")
"""The template's variables that its user cannot set, because `render` does."""

Message = Mapping[str, Any]
"""A message of a conversation: {"role": "user", "content": text}, with the roles "system", "user", "assistant" and
"tool". All values are texts but "tool_calls", a list of objects."""


def check_messages(messages: object) -> None:
    """Raise TypeError unless ``messages`` is a non-empty sequence of messages with the values of `Message`.

    A value of another type, such as a tuple of parts, could contain special tokens that `Tokenizer` does not see.
    """
    kind, wrong = "", [messages]
    if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)) and messages:
        kind, wrong = "the message ", [message for message in messages if not _is_message(message)]
    if wrong:
        got = f"{kind}{wrong[0]!r:.80}"
        raise TypeError(f"prompt: expected a text or messages {{'role': text, 'content': text}}, got {got}")


def _is_message(message: object) -> bool:
    return (
        isinstance(message, Mapping)
        and message.keys() >= {"role", "content"}
        and all(isinstance(value, str) or (name == "tool_calls" and _is_json(value)) for name, value in message.items())
    )


def _is_json(value: object, depth: int = 64) -> bool:
    """Return whether a value consists of what JSON reads, and of no subclasses, in at most ``depth`` levels."""
    if type(value) is dict:
        return depth > 0 and all(type(name) is str and _is_json(item, depth - 1) for name, item in value.items())
    if type(value) is list:
        return depth > 0 and all(_is_json(item, depth - 1) for item in value)
    return value is None or type(value) in (str, int, float, bool)


def _count_characters(value: object) -> int:
    """Return the number of characters of all texts in a value."""
    if isinstance(value, Mapping):
        return sum(len(name) + _count_characters(item) for name, item in value.items())
    return (
        sum(map(_count_characters, value)) if isinstance(value, list) else len(value) if isinstance(value, str) else 4
    )


def check_arguments(arguments: object) -> dict[str, Any]:
    """Return the variables that the user sets for a template, as JSON would read them back.

    Raises TypeError unless ``arguments`` is None or maps names to values that JSON can represent, and ValueError for a
    name that is no identifier or in `RESERVED`.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise TypeError(f"template_args: expected a dict from names to values, got {arguments!r:.80}")
    for name in arguments:
        if not name.isidentifier() or name in RESERVED:
            raise ValueError(f"template_args: expected names of variables other than {RESERVED}, got {name!r:.80}")
    try:
        table: dict[str, Any] = json.loads(json.dumps(dict(arguments)))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"template_args: expected values that JSON can represent, got {error}") from None
    return table


def prepare() -> None:
    """Start the worker process and import jinja2 there, without waiting for it."""

    def start() -> None:
        with contextlib.suppress(worker.LimitError, worker.ProgramError):  # no error here: the next call raises it
            worker.shared().call("render", template="", variables={}, max_characters=0)

    threading.Thread(target=start, daemon=True).start()


def render(
    template: str,
    messages: Sequence[Message],
    special: Mapping[str, Any],
    where: str,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a conversation up to the beginning of the assistant's answer.

    Args:
        template: the source text of the template.
        messages: the conversation.
        special: the special tokens as variables, such as "bos_token".
        where: the path of the template's file, for error messages.
        arguments: the variables that the user sets; they replace ``special``.

    Raises:
        CheckpointError: the template is invalid, exceeds a limit, or fails for these messages.
        ValueError: the conversation is longer than `MAX_CHARACTERS`, or jinja2 is not installed.
    """
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise CheckpointError(
            f"{where}: chat template: expected at most {MAX_TEMPLATE_CHARACTERS} characters, got {len(template)}"
        )
    if importlib.util.find_spec("jinja2") is None:
        import_extra("jinja2")  # raises the ValueError that says what to install
    characters = sum(map(_count_characters, [*messages, arguments]))
    if characters > MAX_CHARACTERS:
        raise ValueError(f"prompt: expected at most {MAX_CHARACTERS} characters, got {characters}")
    variables = {"tools": None, "documents": None, **special, **(arguments or {})}
    variables |= {"messages": [dict(message) for message in messages], "add_generation_prompt": True}
    limit = MAX_OUTPUT_CHARACTERS + 4 * characters
    try:
        text: str = worker.shared().call("render", template=template, variables=variables, max_characters=limit)
    except worker.ProgramError as error:
        if error.kind == "RaisedError":
            raise CheckpointError(
                f"{where}: chat template: expected other messages, got its error: {error!s:.300}"
            ) from None
        raise CheckpointError(
            f"{where}: chat template: expected valid jinja2, got {error.kind}: {error!s:.300}"
        ) from None
    except worker.LimitError as error:
        raise CheckpointError(f"{where}: chat template: {error}") from None
    return text
