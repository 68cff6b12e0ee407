# SPDX-License-Identifier: Apache-2.0
"""Tools: which ones a request offers, the grammar of calls that it requires, and the calls in a model's text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from cupy_awq.llm.text.tokenizer import PYTHON_TAG
from cupy_awq.serve.constraint import JSON_OPTIONS
from cupy_awq.serve.errors import ApiError
from cupy_awq.serve.protocol import ChatBody


class Style(NamedTuple):
    """The form in which a model writes a call: a JSON object between two marks.

    Attributes:
        open, close: the marks. Without ``close``, the calls last until the end of the text, and they need no ``open``
            if there is no answer before them.
        arguments: the name of the arguments in the object.
    """

    open: str
    close: str
    arguments: str


QWEN = Style("<tool_call>", "</tool_call>", "arguments")
LLAMA3 = Style(PYTHON_TAG, "", "parameters")

BUILT_IN = re.compile(r"(\w+)\.call\((.*)\)", re.DOTALL)
ARGUMENT = re.compile(r'\s*(\w+)\s*=\s*("(?:[^"\\]|\\.)*"|[\w.+-]+)\s*(?:,|$)', re.DOTALL)
"""A call of Llama 3 such as `brave_search.call(query="x")`, and an argument of it. Both take linear time."""


class Call(NamedTuple):
    """A call of a tool: its name, and its arguments as a JSON text."""

    name: str
    arguments: str


class ToolUse:
    """The tools of one request.

    Args:
        body: the request.
        template: the model's chat template, which shows the form of calls.

    Raises:
        ApiError: the model has no tools, or the request names one that it does not offer.

    Attributes:
        offered: the tools for the chat template, or None.
    """

    def __init__(self, body: ChatBody, template: str) -> None:
        choice = "auto" if body.tool_choice is None else body.tool_choice
        tools = [] if choice == "none" else body.tools or []
        self._style = QWEN if QWEN.open in template else LLAMA3
        self._parameters = {tool.function.name: tool.function.parameters or {"type": "object"} for tool in tools}
        if tools and QWEN.open not in template and LLAMA3.arguments not in template:
            raise ApiError(400, "tools: expected none, as the model's template has none", param="tools")
        self.offered = [msgspec.to_builtins(tool) for tool in tools] or None
        self._is_forced = choice not in ("auto", "none")
        self._may_repeat = choice == "required" and body.parallel_tool_calls is not False and self._style is QWEN
        if isinstance(choice, dict):
            name = (choice.get("function") or {}).get("name") if choice.get("type") == "function" else None
            self._parameters = {key: value for key, value in self._parameters.items() if key == name}
        elif choice not in ("auto", "none", "required"):
            self._parameters = {}
        if self._is_forced and not self._parameters:
            message = "tool_choice: expected auto, none, required, or a function of tools, got another"
            raise ApiError(400, message, param="tool_choice")

    def grammar(self) -> tuple[str, str] | None:
        """Return the kind and the source of the grammar of a text that must be a call, or None."""
        if not self._is_forced:
            return None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, self._style.arguments: schema},
                "required": ["name", self._style.arguments],
                "additionalProperties": False,
            }
            for name, schema in self._parameters.items()
        ]
        schema = json.dumps({"anyOf": calls, "x-guidance": JSON_OPTIONS | {"whitespace_pattern": " ?"}})
        marks = [json.dumps(text) for text in (f"{self._style.open}\n", f"\n{self._style.close}")]
        call = f"{marks[0]} %json {schema} {marks[1]}" if self._style.close else f"%json {schema}"
        return "tools", f'start: call{" (NL call)*" if self._may_repeat else ""}\nNL: "\\n"\ncall: {call}\n'

    def parser(self) -> ToolParser | None:
        """Return the parser of a completion, or None if no tool is offered."""
        return ToolParser(self._style, self._parameters) if self.offered else None


class ToolParser:
    """An incremental splitter of a text into an answer and calls. It retains text that may be part of a call.

    A call that is no JSON object, or of a tool that is not offered, is part of the answer, as the model wrote it.

    Attributes:
        count: the number of calls so far.

    >>> parser = ToolParser(QWEN, ["add"])
    >>> parser.parse("Let me see.\\n<tool_")
    ('Let me see.', [])
    >>> parser.parse('call>{"name": "add", "arguments": {"x": 1}}</tool_call>')
    ('', [Call(name='add', arguments='{"x":1}')])
    """

    def __init__(self, style: Style, names: Collection[str]) -> None:
        self._style, self._names = style, names
        self._held, self._is_inside, self._is_answer, self._searched = "", False, False, 0
        self.count = 0

    def parse(self, text: str, is_last: bool = False) -> tuple[str, list[Call]]:
        """Return the answer and the calls that a piece of text adds; ``is_last`` releases retained text."""
        self._held += text
        answer, calls = self._parse_marked() if self._style.close else self._parse_objects(is_last)
        self.count += len(calls)
        if is_last:
            held = self._style.open * self._is_inside + self._held
            answer += "" if self.count and held.isspace() else held
            self._held, self._is_inside = "", False
        return answer, calls

    def _answer_before(self) -> str:
        """Return the text before the first mark; retain what follows the mark or may be its start."""
        mark = self._style.open
        before, found, rest = self._held.partition(mark)
        self._is_inside = bool(found)
        begun = 0 if found else max(i for i in range(len(mark)) if before.endswith(mark[:i]))
        kept = len(before[: len(before) - begun].rstrip())  # white space before a call is no answer
        self._held = rest if found else before[kept:]
        return before[:kept]

    def _parse_marked(self) -> tuple[str, list[Call]]:
        answer, calls = "", list[Call]()
        while True:
            if not self._is_inside:
                answer += self._answer_before()
                self._searched = 0
                if not self._is_inside:
                    return answer, calls
            end = self._held.find(self._style.close, self._searched)
            if end < 0:
                self._searched = max(0, len(self._held) - len(self._style.close))
                return answer, calls
            call = self._read(self._held[:end])
            self._searched = end + 1  # a text in the arguments may contain the mark
            if call is not None:
                calls.append(call)
                self._held, self._is_inside = self._held[end + len(self._style.close) :], False

    def _parse_objects(self, is_last: bool) -> tuple[str, list[Call]]:
        """Parse an answer, a mark and calls, or calls alone, with ";" between objects; calls are read at the end."""
        answer, calls = "", list[Call]()
        if not self._is_inside:
            self._is_answer = self._is_answer or not "{".startswith(self._held.lstrip()[:1])
            if self._is_answer or self._style.open in self._held:
                answer = self._answer_before()
        if is_last and (self._is_inside or not self._is_answer):
            text = self._held.strip()
            calls = self._read_built_in(text) or self._read_all(text)
            if calls:
                self._held, self._is_inside = "", False
        return answer, calls

    def _read_built_in(self, text: str) -> list[Call]:
        """Return the call in a text such as `brave_search.call(query="x")`, in a list, or an empty list."""
        found = BUILT_IN.fullmatch(text)
        arguments, at = dict[str, Any](), 0
        while found and at < len(found[2]):
            argument = ARGUMENT.match(found[2], at)
            if argument is None:
                return []
            try:
                arguments[argument[1]] = msgspec.json.decode(argument[2])
            except msgspec.MsgspecError:
                return []
            at = argument.end()
        call = self._read({"name": found[1], self._style.arguments: arguments}) if found else None
        return [call] if call else []

    def _read_all(self, text: str) -> list[Call]:
        decoder, calls = json.JSONDecoder(), list[Call]()
        while text:
            try:
                value, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return []
            call = self._read(value)
            if call is None:
                return []
            calls.append(call)
            text = text[end:].lstrip(" \n;")
        return calls

    def _read(self, value: Any) -> Call | None:
        """Return the call in a JSON text or its value, or None if it is none."""
        try:
            value = msgspec.json.decode(value) if isinstance(value, str) else value
            name, arguments = value["name"], value.get(self._style.arguments)
        except (msgspec.MsgspecError, RecursionError, TypeError, KeyError, AttributeError):
            return None
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict | None):
            return None
        return Call(name, msgspec.json.encode(arguments or {}).decode())
