# SPDX-License-Identifier: Apache-2.0
"""Chat templates are rendered as transformers renders them.

The file chat_templates.json has snippets that use jinja2's features, public templates, and what transformers renders
(tests/tools/render_chat_templates.py). Each is also compared with plain jinja2, set up as in transformers.
"""

from __future__ import annotations

import datetime
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.llm.text import chat_template
from cupy_awq.llm.text.tokenizer import Tokenizer
from tests import llm_models

TABLE = json.loads((Path(__file__).parent / "chat_templates.json").read_text(encoding="utf-8"))
CHATS, VARIABLES = TABLE["chats"], TABLE["variables"]
DATE = re.compile(r"\b\d{1,2} [A-Z][a-z]+ \d{4}\b|\b[A-Z][a-z]+ \d{1,2}, \d{4}\b|\b\d{4}-\d\d-\d\d\b")
CASES = [
    pytest.param(entry["template"], chat, wanted, id=f"{entry.get('name', entry['template'][:50])}-{i}")
    for entry in [*TABLE["snippets"], *TABLE["templates"]]
    for i, (chat, wanted) in enumerate(zip(CHATS, entry["rendered"], strict=False))
]


def render(template: str, chat: list[dict[str, str]]) -> dict[str, str]:
    """Return {"text": the text that a template renders to}, or {"error": the exception's class name}, as recorded."""
    try:
        return {"text": chat_template.render(template, chat, VARIABLES, "file")}
    except CheckpointError as error:
        message = str(error)
        assert message.startswith("file: chat template: expected ")
        if "expected other messages, got its error: " in message:
            return {"error": "TemplateError"}
        return {"error": message.removeprefix("file: chat template: expected valid jinja2, got ").split(":")[0]}


def without_dates(rendered: dict[str, str]) -> dict[str, str]:
    return {key: DATE.sub("DATE", text) for key, text in rendered.items()}


@pytest.mark.parametrize(("template", "chat", "wanted"), CASES)
def test_a_template_renders_as_in_transformers(
    template: str, chat: list[dict[str, str]], wanted: dict[str, str]
) -> None:
    assert without_dates(render(template, chat)) == without_dates(wanted)


class Generation(jinja2.ext.Extension):
    """The tag {% generation %} of transformers, as an extension of jinja2: it renders its body."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("emit"), [], [], body).set_lineno(line)

    def emit(self, caller: Any) -> str:
        return caller()


def render_plainly(template: str, chat: list[dict[str, str]]) -> str | None:
    """Return what plain jinja2, set up as in transformers, renders in this process, or None if it fails."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    variables = {"tools": None, "documents": None, "add_generation_prompt": True, **VARIABLES}
    try:
        return environment.from_string(template).render(messages=chat, **variables)
    except Exception:
        return None


@pytest.mark.parametrize("entry", TABLE["templates"], ids=lambda entry: entry["name"])
def test_a_public_template_renders_as_in_plain_jinja2(entry: dict[str, Any]) -> None:
    for chat in CHATS:
        assert render(entry["template"], chat).get("text") == render_plainly(entry["template"], chat)


def test_the_file_has_as_many_cases_as_it_says() -> None:
    assert len(TABLE["snippets"]) >= 80
    assert len(TABLE["templates"]) >= 30
    assert sum("text" in rendered for entry in TABLE["templates"] for rendered in entry["rendered"]) >= 100


def test_variables_of_the_user_replace_special_tokens_and_reach_the_template() -> None:
    template = "{{ bos_token }}{{ enable_thinking }}{{ tools | tojson }}{{ messages | length }}"
    tokenizer = Tokenizer(llm_models.tokenizer(), template, {"bos_token": "<s>"})
    arguments = {"enable_thinking": False, "bos_token": "B", "tools": [{"name": "f"}]}
    ids = tokenizer.encode_chat(CHATS[0], template_args=arguments)
    assert tokenizer.decode(ids) == 'BFalse[{"name": "f"}]3'
    wrong: Any
    for wrong in ({"messages": []}, {"add_generation_prompt": False}, {"a b": 1}, {"": 1}):
        with pytest.raises(ValueError, match="template_args: expected names of variables"):
            tokenizer.encode_chat(CHATS[0], template_args=wrong)
    for wrong in (3, {"a": object()}, {1: 2}, [("a", 1)]):
        with pytest.raises(TypeError, match="template_args: expected"):
            tokenizer.encode_chat(CHATS[0], template_args=wrong)


def test_special_tokens_in_variables_are_plain_text() -> None:
    tokenizer = Tokenizer(llm_models.tokenizer(), "<|im_start|>{{ documents[0].text }}", {})
    arguments = {"documents": [{"text": "a<|im_end|>b"}]}
    ids = tokenizer.encode_chat(CHATS[0], template_args=arguments)
    assert [i for i in ids if i >= 256] == [tokenizer.special_ids["<|im_start|>"]]
    assert tokenizer.decode(ids) == "a<|im_end|>b"
    allowed = tokenizer.encode_chat(CHATS[0], template_args=arguments, special_tokens=True)
    assert sum(i >= 256 for i in allowed) == 2


def test_a_chat_of_20_turns_renders_in_2_ms() -> None:
    """A chat of 20 turns renders in at most 2 ms by the fastest of many tries, as others may wait for the processor."""
    chat = [{"role": ("user", "assistant")[i % 2], "content": "word " * 50} for i in range(40)]
    for entry in TABLE["templates"]:
        if entry["name"] not in ("chatml", "qwen2_5", "smollm3", "granite3_3"):
            continue
        render(entry["template"], chat)
        seconds = []
        for _ in range(60):
            began = time.perf_counter()
            render(entry["template"], chat)
            seconds.append(time.perf_counter() - began)
        assert min(seconds) < 2e-3, (entry["name"], min(seconds), statistics.median(seconds))
