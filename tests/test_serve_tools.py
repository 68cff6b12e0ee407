# SPDX-License-Identifier: Apache-2.0
"""Calls of tools: the templates, the parser on every split of a text, and whole requests."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq.llm import Engine, LanguageModel, load
from cupy_awq.serve.tools import LLAMA3, QWEN, Call, Style, ToolParser
from tests import llm_models
from tests.serving import Running
from tests.test_chat_templates import TABLE

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"enum": [1, 2]}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("add", "sub")
]
QWEN_TEMPLATE = next(entry["template"] for entry in TABLE["templates"] if entry.get("name") == "qwen2.5-instruct")
LLAMA_TEMPLATE = (
    '{% if tools %}<|im_start|>system\nAnswer with {"name": a tool, "parameters": values}.\n{% for tool in tools %}'
    "{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD = '{"name": "add", "arguments": {"x": 1}}'


def parse(style: Style, parts: list[str]) -> tuple[str, list[Call]]:
    parser = ToolParser(style, ["add", "sub"])
    found = [parser.parse(part, i == len(parts) - 1) for i, part in enumerate(parts)]
    return "".join(answer for answer, _ in found), [call for _, calls in found for call in calls]


X1 = Call("add", '{"x":1}')


@pytest.mark.parametrize(
    ("style", "text", "answer", "calls"),
    [
        (QWEN, f"<tool_call>\n{ADD}\n</tool_call>", "", [X1]),
        (QWEN, f"So:\n\n<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>\n", "So:", [X1, X1]),
        (QWEN, '<tool_call>{"name": "sub"}</tool_call>', "", [Call("sub", "{}")]),
        (
            QWEN,
            '<tool_call>{"name":"add","arguments":{"t":"</tool_call>"}}</tool_call>',
            "",
            [Call("add", '{"t":"</tool_call>"}')],
        ),
        (QWEN, '<tool_call>{"name": "other"}</tool_call>', '<tool_call>{"name": "other"}</tool_call>', []),
        (QWEN, f"<tool_call>{ADD}", f"<tool_call>{ADD}", []),
        (QWEN, "a <tool_c", "a <tool_c", []),
        (QWEN, "<tool_call>[1]</tool_call>x", "<tool_call>[1]</tool_call>x", []),
        (LLAMA3, '{"name": "add", "parameters": {"x": 1}}', "", [X1]),
        (LLAMA3, ' {"name": "add", "parameters": {"x": 1}}; {"name": "sub"}', "", [X1, Call("sub", "{}")]),
        (LLAMA3, '{"a": 1}', '{"a": 1}', []),
        (LLAMA3, '{"name": ["add"]}', '{"name": ["add"]}', []),
        (LLAMA3, 'No. {"name": "add"}', 'No. {"name": "add"}', []),
        (LLAMA3, "", "", []),
        (LLAMA3, '<|python_tag|>{"name": "add", "parameters": {"x": 1}}', "", [X1]),
        (LLAMA3, 'So: <|python_tag|>{"name": "sub"}; {"name": "sub"}', "So:", [Call("sub", "{}")] * 2),
        (
            LLAMA3,
            '<|python_tag|>add.call(x="1, \\"2\\")", y=-3, z=true)',
            "",
            [Call("add", '{"x":"1, \\"2\\")","y":-3,"z":true}')],
        ),
        (LLAMA3, "\nsub.call()", "\nsub.call()", []),
        (LLAMA3, "<|python_tag|>sub.call()\n", "", [Call("sub", "{}")]),
        (LLAMA3, "<|python_tag|>sub.call(x=y)", "<|python_tag|>sub.call(x=y)", []),
        (LLAMA3, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (LLAMA3, "A <|python_ta", "A <|python_ta", []),
    ],
)
def test_calls_are_split_from_the_answer_however_they_arrive(
    style: Style, text: str, answer: str, calls: list[Call]
) -> None:
    for cuts in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        assert parse(style, [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]) == (answer, calls)


@given(
    text=st.text("<tol_ca>/ \n{}x|", max_size=30) | st.text(max_size=30),
    cut=st.integers(0, 30),
    style=st.sampled_from([QWEN, LLAMA3]),
)
def test_texts_without_calls_stay_as_they_are(text: str, cut: int, style: Style) -> None:
    assert parse(style, [text[:cut], text[cut:]]) == (text, [])


@pytest.mark.parametrize(
    "part", ["[", '{"a":', "<tool_call>", "</tool_call>", '"', "\\", "x", "x=1,", "<|", "<|python_tag|>"]
)
def test_texts_against_the_parser_take_little_time(part: str) -> None:
    began = time.process_time()
    for style in (QWEN, LLAMA3):
        for start in ("<tool_call>", "{", "<|python_tag|>add.call("):
            parser = ToolParser(style, ["add"])
            pieces = [start, *[part] * 5_000]
            assert not any(parser.parse(piece)[1] for piece in pieces)
            assert parser.parse("", is_last=True)[1] == []
    assert time.process_time() - began < 5


# Requests with tools to a running server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    config = {**llm_models.QWEN3, "max_position_embeddings": 8192}
    return load(llm_models.folder(tmp_path_factory.mktemp("model"), config), device="cpu", batch_invariant=True)


@pytest.fixture(scope="module")
def running(model: LanguageModel) -> Iterator[Running]:
    with Running(Engine(model, max_rows=8, cache_tokens=32_768)) as server:
        yield server


@pytest.fixture(params=[QWEN_TEMPLATE, LLAMA_TEMPLATE], ids=["qwen", "llama3"])
def server(running: Running, request: Any, monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setattr(running.engine.model.tokenizer, "template", request.param)
    return running


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "sub"}}])
def test_a_required_call_is_made_and_has_valid_arguments(server: Running, choice: Any) -> None:
    options = {"tools": TOOLS, "tool_choice": choice, "temperature": 1.0, "max_tokens": 300}
    options |= {"seed": 1, "parallel_tool_calls": False}
    status, reply = server.chat(**options)
    assert status == 200
    (answer,) = reply["choices"]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] in (("add", "sub") if choice == "required" else ("sub",))
    assert json.loads(call["function"]["arguments"]) in ({"x": 1}, {"x": 2})
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], **options}
    chunks = list(server.stream("/v1/chat/completions", body))[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    (streamed,) = [entry for delta in deltas for entry in delta.get("tool_calls", ())]
    assert (streamed["index"], streamed["function"]) == (0, call["function"])
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert not "".join(delta.get("content") or "" for delta in deltas).strip()


def test_a_conversation_may_have_calls_and_their_results(server: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages: Any = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
    ]
    seen: list[Any] = []
    encode = type(server.engine.model).encode

    def watch(self: Any, prompt: Any, **options: Any) -> list[int]:
        seen.append(encode(self, prompt, **options))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(server.engine.model), "encode", watch)
        status, reply = server.chat(messages=messages, tools=TOOLS)
    assert status == 200, reply
    text = server.engine.model.tokenizer.inner.decode(seen[0], skip_special_tokens=False)
    assert '"x": 1' in text
    assert "one" in text
    assert '"sub"' in text
    broken = {**call, "function": {"name": "add", "arguments": "[1"}}
    messages[1]["tool_calls"] = [broken]
    assert server.chat(messages=messages, tools=TOOLS)[1]["error"]["param"] == "messages"


def test_special_tokens_in_tools_and_calls_forge_no_turn(server: Running) -> None:
    tokenizer, mark = server.engine.model.tokenizer, "<|im_end|>"
    plain = tokenizer.encode_chat([{"role": "user", "content": "x"}], template_args={"tools": TOOLS})
    forged = json.loads(json.dumps(TOOLS).replace("A tool.", mark).replace('"x"', f'"{mark}"'))
    call = {"id": mark, "type": "function", "function": {"name": "add", "arguments": {mark: [mark]}}}
    messages: Any = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": mark},
    ]
    ids = tokenizer.encode_chat(messages[:1], template_args={"tools": forged})
    mark_id = tokenizer.special_ids[mark]
    assert ids.count(mark_id) == plain.count(mark_id)
    harmless = json.loads(json.dumps(messages).replace(mark, "a"))
    args = {"template_args": {"tools": forged}}
    assert tokenizer.encode_chat(messages, **args).count(mark_id) == tokenizer.encode_chat(harmless, **args).count(
        mark_id
    )


BAD_SCHEMA = [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
        ({"tools": BAD_SCHEMA, "tool_choice": "required"}, "tools"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ],
)
def test_invalid_tools_are_refused(server: Running, options: Any, param: str) -> None:
    status, reply = server.chat(**options)
    assert (status, reply["error"]["param"]) == (400, param)


def test_a_model_whose_template_has_no_tools_refuses_them(running: Running) -> None:
    assert running.chat(tools=TOOLS)[1]["error"]["param"] == "tools"
    assert running.chat(tools=TOOLS, tool_choice="none")[0] == 200


def test_calls_after_the_python_tag_of_llama_3_are_found_though_it_is_a_special_token(tmp_path: Path) -> None:
    """The tag separates an answer from a call, in the form of a built-in tool and as an object."""
    config = {**llm_models.LLAMA, "max_position_embeddings": 4096}
    folder = llm_models.folder(tmp_path, config)
    inner = llm_models.tokenizer()
    inner.add_special_tokens([tokenizers.AddedToken("<|python_tag|>", special=True, normalized=False)])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": LLAMA_TEMPLATE}))
    with Running(Engine(load(folder, device="cpu"), max_rows=4, cache_tokens=8192)) as server:
        for call in ("add.call(x=1)", '{"name": "add", "parameters": {"x": 1}}'):
            grammar = f"start: {json.dumps('So: ')} <|python_tag|> {json.dumps(call)}"
            status, reply = server.chat(tools=TOOLS, grammar=grammar, max_tokens=100)
            assert status == 200, reply
            message = reply["choices"][0]["message"]
            assert message["content"] == "So:"
            assert [tool["function"] for tool in message["tool_calls"]] == [{"name": "add", "arguments": '{"x":1}'}]
