# SPDX-License-Identifier: Apache-2.0
"""Clients of OpenAI's protocol against a server on loopback; each test needs the package of its client."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cupy_awq.llm import Engine, LanguageModel, load
from tests import llm_models
from tests.serving import Running
from tests.test_serve_tools import QWEN_TEMPLATE

pytestmark = pytest.mark.slow

ASK: Any = [{"role": "user", "content": "Hello"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs the package {module}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**llm_models.QWEN3, "max_position_embeddings": 4096}
    path = llm_models.folder(tmp_path_factory.mktemp("model"), config)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": QWEN_TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return load(folder, device="cpu", batch_invariant=True)


@pytest.fixture(scope="module")
def url(model: LanguageModel) -> Iterator[str]:
    with Running(Engine(model, cache_tokens=16_384)) as server:
        yield f"http://127.0.0.1:{server.port}/v1"


@needs("openai")
def test_openai(url: str, model: LanguageModel) -> None:
    openai = importlib.import_module("openai")
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    ask = client.chat.completions.create
    base: Any = {"model": client.models.list().data[0].id, "messages": ASK, "temperature": 0, "max_tokens": 20}
    whole = ask(**base, logprobs=True, top_logprobs=3)
    text = model.generate("Hello", max_tokens=20)[0].text
    assert whole.choices[0].message.content == text
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
    chunks = list(ask(**base, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    limit = {**base, "max_tokens": 200}
    assert json.loads(ask(**limit, response_format=form).choices[0].message.content)["x"] in (1, 2)
    forced: Any = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}}
    (call,) = ask(**limit, **forced).choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["x"] in (1, 2)
    messages = [*ASK, {"role": "assistant", "tool_calls": [call.model_dump()]}]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
    assert ask(**{**base, "messages": messages}, tools=TOOLS).choices[0].finish_reason in ("stop", "length")
    options: Any = {"max_tokens": 5, "logprobs": 2, "n": 2, "extra_body": {"ignore_eos": True}}
    pair = client.completions.create(model=base["model"], prompt=["1 2 3", "a b c"], **options)
    assert [len(choice.logprobs.tokens) for choice in pair.choices] == [5] * 4
    for wrong, kind in (({"model": "no"}, openai.NotFoundError), ({"max_tokens": 0}, openai.BadRequestError)):
        with pytest.raises(kind):
            ask(**{**base, **wrong})

    async def ask_many() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as many:
            return await asyncio.gather(*(many.chat.completions.create(**base) for _ in range(8)))

    assert [answer.choices[0].message.content for answer in asyncio.run(ask_many())] == [text] * 8


@needs("litellm")
def test_litellm(url: str, model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = importlib.import_module("litellm")
    base: Any = {"model": "openai/tiny", "api_base": url, "api_key": "x", "messages": ASK, "temperature": 0}
    text = model.generate("Hello", max_tokens=9)[0].text
    assert litellm.completion(**base, max_tokens=9).choices[0].message.content == text
    chunks = litellm.completion(**base, max_tokens=9, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    forced: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    for stream in (False, True):
        reply = litellm.completion(**base, **forced, stream=stream)
        reply = litellm.stream_chunk_builder(list(reply)) if stream else reply
        assert reply.choices[0].finish_reason == "tool_calls"
        assert reply.choices[0].message.tool_calls[0].function.name == "add"


@needs("langchain_openai")
def test_langchain(url: str) -> None:
    chat = importlib.import_module("langchain_openai").ChatOpenAI(
        model="tiny", base_url=url, api_key="x", max_tokens=200, temperature=0
    )
    assert chat.invoke("Hello").content == "".join(chunk.content for chunk in chat.stream("Hello"))
    schema = {"title": "Answer", "description": "An answer.", **SCHEMA}
    for method in ("json_schema", "function_calling"):
        assert chat.with_structured_output(schema, method=method).invoke("Hello")["x"] in (1, 2)


@needs("instructor")
def test_instructor(url: str) -> None:
    instructor, openai, pydantic = map(importlib.import_module, ("instructor", "openai", "pydantic"))
    Answer = pydantic.create_model("Answer", x=(bool, ...), __config__=pydantic.ConfigDict(extra="forbid"))

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="x"), mode=mode)
        options: Any = {"model": "tiny", "messages": ASK, "max_tokens": 300, "max_retries": 0, "temperature": 0}
        assert client.chat.completions.create(response_model=Answer, **options).x in (True, False)


def run(folder: Path, *command: str, **environment: str) -> str:
    """Run a module in a folder, where it may write files, and return its output."""
    variables, whole = {**os.environ, **environment}, [sys.executable, "-m", *command]
    result = subprocess.run(whole, capture_output=True, text=True, check=False, cwd=folder, env=variables)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@needs("llm")
def test_llm(url: str, model: LanguageModel, tmp_path: Path) -> None:
    entry = {"model_id": "tiny", "model_name": "tiny", "api_base": url, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    wanted = model.generate("Hello", max_tokens=9)[0].text
    for more in ([], ["--no-stream"]):
        options = ["-m", "tiny", "-o", "max_tokens", "9", "-o", "temperature", "0", *more, "Hello"]
        out = run(tmp_path, "llm", *options, LLM_USER_PATH=str(tmp_path), LLM_LOAD_PLUGINS="", OPENAI_API_KEY="x")
        assert out.strip().split() == wanted.strip().split()


@needs("lm_eval")
def test_lm_eval(url: str, model: LanguageModel, folder: Path, tmp_path: Path) -> None:
    """The log-likelihoods that lm_eval gets from the server are those of `score`."""
    questions = [{"q": f"{i}+1=", "c": [" no", f" {i + 1}"], "a": 1} for i in range(3)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "test.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{c}}",
        "doc_to_target": "a",
        "target_delimiter": "",
    }
    (tmp_path / "local.yaml").write_text(json.dumps(task))
    where = f"model=tiny,base_url={url}/completions,tokenizer={folder},max_length=2048"
    arguments = ["--model", "local-completions", "--model_args", where, "--tasks", "local", "--include_path"]
    arguments += [str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    run(tmp_path, "lm_eval", *arguments, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    (file,) = (tmp_path / "out").rglob("samples_local_*.jsonl")
    for sample in map(json.loads, file.read_text().splitlines()):
        question = sample["doc"]
        begun = model.score(question["q"]).log_likelihood
        wanted = [model.score(question["q"] + answer).log_likelihood - begun for answer in question["c"]]
        assert [float(answer[0][0]) for answer in sample["resps"]] == pytest.approx(wanted, abs=1e-4)


@needs("schemathesis")
def test_schemathesis(url: str, tmp_path: Path) -> None:
    """Requests made from /openapi.json get documented replies; one of an allowed type may be refused for its value."""
    options = ["--max-examples", "10", "--exclude-checks", "positive_data_acceptance", "--request-timeout", "300"]
    run(tmp_path, "schemathesis.cli", "run", f"{url.removesuffix('v1')}openapi.json", *options)
