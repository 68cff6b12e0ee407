# SPDX-License-Identifier: Apache-2.0
"""The server on loopback: OpenAI's protocol, streams, structured output, keys, metrics and the end of the process."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from cupy_awq.llm import Engine, LanguageModel, load
from cupy_awq.serve.protocol import ChatBody
from cupy_awq.serve.reasoning import ReasoningSplitter
from tests import llm_models
from tests.serving import Running
from tests.test_project import ROOT, python

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = llm_models.folder(tmp_path_factory.mktemp("model"), llm_models.QWEN3)
    return load(folder, device="cpu", batch_invariant=True)


@pytest.fixture(scope="module")
def server(model: LanguageModel) -> Iterator[Running]:
    with Running(Engine(model, max_rows=16)) as running:
        yield running


def test_a_chat_has_the_text_of_generate_and_its_usage(server: Running, model: LanguageModel) -> None:
    (wanted,) = model.generate("Hello", max_tokens=8)
    status, reply = server.chat()
    assert status == 200
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted.text, "refusal": None}
    assert choice["finish_reason"] == wanted.reason
    usage, prompt = reply["usage"], len(model.encode("Hello"))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, len(wanted.tokens))
    assert usage["total_tokens"] == prompt + len(wanted.tokens)
    assert (reply["object"], reply["model"]) == ("chat.completion", "tiny")
    assert server.chat()[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == (prompt - 1) // 32 * 32


def test_completions_of_texts_and_tokens_have_an_index_each(server: Running, model: LanguageModel) -> None:
    texts = [model.generate(text, raw=True, max_tokens=8)[0].text for text in ("ab", "Hello")]
    assert [c["text"] for c in server.complete(["ab", "Hello"])[1]["choices"]] == texts
    ids = [model.encode(text, raw=True) for text in ("ab", "Hello")]
    reply = server.complete(ids, n=2, echo=True)[1]
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in reply["choices"]] == [
        p + t for p, t in zip(("ab", "Hello"), texts, strict=True) for _ in "nn"
    ]
    assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert server.complete(ids[0])[1]["choices"][0]["text"] == texts[0]


def test_content_is_a_text_or_parts_or_null(server: Running) -> None:
    whole = server.chat("Hello")[1]["choices"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    assert server.chat(messages=parts)[1]["choices"] == whole
    assert server.chat(messages=[{"role": "user", "content": None}])[0] == 200
    status, reply = server.chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert (status, reply["error"]["param"]) == (400, "messages")


def test_stop_seed_and_max_tokens(server: Running) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    text = server.chat(**options)[1]["choices"][0]["message"]["content"]
    assert server.chat(**options)[1]["choices"][0]["message"]["content"] == text
    assert server.chat(**{**options, "seed": -6})[1]["choices"][0]["message"]["content"] != text
    stop = text[4:6]
    for given in (stop, [stop, "never"]):
        (choice,) = server.chat(stop=given, **options)[1]["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    reply = server.chat(**{**options, "max_tokens": 9, "max_completion_tokens": 3})[1]
    assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (3, "length")


def test_logprobs_of_both_endpoints(server: Running) -> None:
    content = server.chat(logprobs=True, top_logprobs=3, max_tokens=4)[1]["choices"][0]["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert [entry["top_logprobs"][0]["logprob"] for entry in content] == [entry["logprob"] for entry in content]
    assert all(bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"] for entry in content)
    assert server.chat(logprobs=True, max_tokens=2)[1]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    found = server.complete(logprobs=2, max_tokens=4)[1]["choices"][0]
    assert all(text[:8] == "bytes:\\x" or len(text) <= 1 or text[0] == "<" for text in found["logprobs"]["tokens"])
    assert [len(top) for top in found["logprobs"]["top_logprobs"]] == [2] * 4
    assert found["logprobs"]["text_offset"][0] == 0
    assert server.complete(logprobs=0, max_tokens=1)[1]["choices"][0]["logprobs"]["top_logprobs"] == [{}]


def test_a_repeated_prompt_has_its_logprobs_in_one_piece_and_in_a_stream(server: Running, model: LanguageModel) -> None:
    score = model.score("Hello there")
    found = server.complete("Hello there", echo=True, logprobs=1, max_tokens=2)[1]["choices"][0]
    logprobs, size = found["logprobs"], score.tokens + 1
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert sum(logprobs["token_logprobs"][1:size]) == pytest.approx(score.log_likelihood)
    assert "".join(logprobs["tokens"][:size]) == "Hello there"
    assert len(logprobs["tokens"]) == size + 2
    assert logprobs["text_offset"][:size] == list(range(size))
    body = {"model": "tiny", "prompt": "Hello there", "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
    chunks = [chunk["choices"][0] for chunk in list(server.stream(COMPLETE, body))[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == found["text"]
    assert [token for chunk in chunks for token in chunk["logprobs"]["tokens"]] == logprobs["tokens"]


def test_the_tokens_of_a_character_have_its_offset_in_the_text(server: Running) -> None:
    text = "aé€😀b"
    logprobs = server.complete(text, echo=True, logprobs=0, max_tokens=1)[1]["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [*(i for i, char in enumerate(text) for _ in char.encode()), len(text)]


# Streamed replies


def test_a_stream_has_the_chunks_of_the_protocol(server: Running) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8}
    *chunks, done = server.stream(CHAT, body | {"stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    *content, last = chunks
    assert content[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in content[1:])
    assert [chunk["choices"][0]["finish_reason"] is None for chunk in content] == [True] * (len(content) - 1) + [False]
    assert all(chunk["usage"] is None for chunk in content)
    assert last["choices"] == []
    whole = server.chat()[1]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in content)
    assert text == whole["choices"][0]["message"]["content"]
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all("usage" not in chunk for chunk in list(server.stream(CHAT, body))[:-1])


def test_a_stream_of_many_completions_with_everything_at_once(server: Running) -> None:
    body = {"model": "tiny", "prompt": ["ab", "Hello"], "temperature": 1.0, "seed": 3, "max_tokens": 12, "n": 8}
    body |= {"logprobs": 2, "echo": False, "stop": ["e"]}
    whole = server.post(COMPLETE, body)[1]["choices"]
    *chunks, done = server.stream(COMPLETE, body | {"stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    for choice in whole:
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [t for c in mine for t in c["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
        assert [o for c in mine for o in c["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]


def test_requests_at_the_same_time_have_the_texts_of_requests_alone(server: Running) -> None:
    prompts = [f"{i} " * (1 + i % 7) for i in range(24)]
    alone = [server.complete(prompt)[1]["choices"][0]["text"] for prompt in prompts]
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        status, reply = server.complete(prompts[i])
        while status == 429:
            time.sleep(0.01)
            status, reply = server.complete(prompts[i])
        found[i] = reply["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(24)] == alone
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>a<b</thi</think>\n\nc </think>", "a<b</thi", "c </think>"),
        ("\n<think></think>x", "", "x"),
        ("<thin", "", "<thin"),
        ("no <think>x</think>", "", "no <think>x</think>"),
        ("<think>never </th", "never </th", ""),
    ],
)
def test_reasoning_is_split_from_the_answer_however_it_arrives(text: str, reasoning: str, answer: str) -> None:
    for cuts in itertools.combinations(range(1, len(text)), 2):
        splitter, edges = ReasoningSplitter(), [0, *cuts, len(text)]
        parts = [splitter.split(text[a:b], b == len(text)) for a, b in itertools.pairwise(edges)]
        assert ("".join(r for r, _ in parts), "".join(a for _, a in parts)) == (reasoning, answer)


def test_replies_have_the_reasoning_of_models_that_write_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine.model.tokenizer, "template", llm_models.TEMPLATE + "{# <think> #}")
    options: dict[str, Any] = {"regex": "<think>abc</think>\n\nde", "max_tokens": 60}
    message = server.chat(**options)[1]["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("abc", "de")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **options}
    deltas = [chunk["choices"][0]["delta"] for chunk in list(server.stream(CHAT, body))[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "abc"
    assert "".join(delta.get("content", "") for delta in deltas) == "de"


def test_texts_follow_a_schema_a_regular_expression_and_a_grammar(server: Running) -> None:
    properties = {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for seed in range(4):
        options = {"temperature": 1.0, "seed": seed, "max_tokens": 200}
        (choice,) = server.chat(response_format=form, **options)[1]["choices"]
        value = json.loads(choice["message"]["content"])
        assert value["a"] in ("x", "yy")
        assert type(value["b"]) is bool
        assert choice["finish_reason"] == "stop"
        text = server.complete(regex="[0-9]{3}-(ab|cd)", **options)[1]["choices"][0]["text"]
        assert re.fullmatch("[0-9]{3}-(ab|cd)", text)
        text = server.complete(grammar='start: "<" /[a-c]+/ ">"', **options)[1]["choices"][0]["text"]
        assert re.match("<[a-c]+", text)
    status, reply = server.chat(response_format={"type": "json_object"}, max_tokens=30)
    assert status == 200
    assert reply["choices"][0]["message"]["content"].lstrip().startswith("{")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 9}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
        ({"regex": "("}, "regex"),
        ({"grammar": "start: ("}, "grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
        ({"regex": "a", "grammar": "b"}, "grammar"),
        ({"messages": []}, "messages"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {" 1_0": 1}}, "logit_bias"),
    ],
)
def test_invalid_fields_are_named(server: Running, options: Any, param: str) -> None:
    status, reply = server.chat(**options)
    assert (status, reply["error"]["param"], reply["error"]["type"]) == (400, param, "invalid_request_error")
    assert param in reply["error"]["message"]


def test_unknown_fields_models_and_paths(server: Running) -> None:
    assert server.chat(new_field=[1, 2], user="me", tools=[], tool_choice="none")[0] == 200
    assert server.chat(model="../tiny")[1]["error"]["code"] == "model_not_found"
    for method, path, status in (
        ("GET", "/v1/models/tiny", 200),
        ("GET", "/v1/models/../../etc/passwd", 404),
        ("GET", "/v1/%2e%2e/health", 404),
        ("GET", CHAT, 405),
        ("GET", "/static/chat.html", 404),
        ("HEAD", "/health", 200),
    ):
        assert server.request(method, path)[0] == status
    assert json.loads(server.request("GET", "/v1/models")[2])["data"][0]["id"] == "tiny"
    status, headers, content = server.request("DELETE", CHAT)
    assert headers["allow"] == "POST"
    assert json.loads(content)["error"]["message"] == "method: expected POST, got 'DELETE'"


def test_the_description_has_all_endpoints_and_fields(server: Running) -> None:
    described = json.loads(server.request("GET", "/openapi.json")[2])
    routes = {route.path for route in server.listener.config.app.routes}  # type: ignore[union-attr]
    assert set(described["paths"]) == routes - {"/v1/models/{name:path}"}
    schemas = described["components"]["schemas"]
    assert set(schemas["ChatBody"]["properties"]) == set(ChatBody.__struct_fields__)
    assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(described))) <= set(schemas)


def test_keys_are_required_and_compared_as_a_whole(model: LanguageModel) -> None:
    with Running(Engine(model), keys=("secret", "other")) as running:
        for given in (None, "Bearer secre", "Bearer secretsecret", "secret", "Basic secret", "Bearer", "Bearer \u00e9"):
            headers = {} if given is None else {"Authorization": given}
            status, reply_headers, content = running.request("GET", "/v1/models", headers=headers)
            assert (status, reply_headers["www-authenticate"]) == (401, "Bearer")
            assert b"secret" not in content
        body = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 2}
        cached = []
        for key in ("secret", "other", "other"):
            status, reply = running.post(COMPLETE, body, {"Authorization": f"Bearer {key}", "Host": "any.name"})
            assert status == 200
            cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert running.request("GET", "/v1/models", headers={"Authorization": "bearer other"})[0] == 200
        assert cached == [0, 0, 96]  # a key cannot tell by timing what another key has asked
        assert running.request("GET", "/health")[0] == 200
        assert running.request("GET", "/metrics")[0] == 401
        assert running.request("GET", "/", headers={"Host": "any.name"})[0] == 200  # it asks for a key


def test_the_page_loads_nothing_from_elsewhere_and_shows_texts_as_texts(server: Running) -> None:
    status, headers, content = server.request("GET", "/", headers={"Range": "bytes=0-5,0-9"})
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in headers["content-security-policy"]
    page = content.decode()
    assert page.endswith("</html>\n")
    assert not re.search(r"https?://|innerHTML|document\.write|eval\(|\bsrc=", page)
    assert server.request("GET", "/", headers={"Host": "evil.example"})[0] == 403


DOM = """
const make = () => ({ value: "", textContent: "", className: "", children: [], handlers: {}, append(x) {
  this.children.push(x); }, replaceChildren() { this.children = []; }, scrollIntoView() {}, requestSubmit() {},
  addEventListener(name, f) { this.handlers[name] = f; } });
const elements = {};
globalThis.document = { getElementById: (id) => elements[id] ??= make(), createElement: make };
const ask = fetch, base = process.argv[1];
globalThis.fetch = (path, options) => ask(base + path, options);
%s
(async () => {
  for (const text of ["Hello", "And now?"]) await send(text);
  await new Promise((wait) => { const real = call; call = (...all) => { wait(); return real(...all); }; send("x"); });
  elements.stop.handlers.click();
  element("clear").handlers.click();
  const log = elements.log.children.length;
  console.log(JSON.stringify({ messages: globalThis.said, log }));
})();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_page_streams_answers_and_remembers_the_conversation(server: Running, model: LanguageModel) -> None:
    page = server.request("GET", "/")[2].decode()
    script = page.partition("<script>")[2].partition("</script>")[0]
    script = script.replace("stream: true", "stream: true, temperature: 0, max_tokens: 6")
    script = script.replace("if (answer) messages = ", "if (answer) globalThis.said = messages = ")
    command = ["node", "-e", DOM % script, f"http://127.0.0.1:{server.port}/"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    messages: list[dict[str, str]] = []
    for text in ("Hello", "And now?"):
        messages.append({"role": "user", "content": text})
        (answer,) = model.generate([messages], max_tokens=6)
        messages.append({"role": "assistant", "content": answer.text})
    assert found == {"messages": messages, "log": 0}


def test_metrics_count_tokens_and_have_no_labels_of_users(server: Running) -> None:
    with server.survives():
        for i in range(50):
            server.chat(model="x" * 50 + str(i))
    text = server.request("GET", "/metrics")[2].decode()
    assert re.search(r"^cupy_awq_completion_tokens_total [1-9]", text, re.MULTILINE)
    assert 'cupy_awq_http_requests_total{status="404"}' in text
    assert "x" * 50 not in text
    assert set(re.findall(r"(\w+)=\"", text)) <= {"status", "le"}


def test_the_package_imports_nothing_of_the_server() -> None:
    names = "uvicorn starlette msgspec prometheus_client llguidance h11 anyio cupy_awq.serve"
    program = (
        f"import sys; from cupy_awq import *; import cupy_awq.llm; print(set({names.split()!r}) & set(sys.modules))"
    )
    assert python("-c", program).strip() == "set()"


@pytest.mark.slow
def test_the_extra_installs_no_torch() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    names = re.findall(r'"([^"]+)"', text.partition("\nserve = [")[2].partition("]")[0])
    options = ["--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    found = json.loads(python("-m", "pip", "install", *options, *names))["install"]
    installed = {entry["metadata"]["name"].lower() for entry in found}
    assert {"uvicorn", "starlette", "msgspec", "prometheus-client", "llguidance"} <= {
        name.replace("_", "-") for name in installed
    }
    assert len(installed) < 40
    assert not {"torch", "triton", "transformers", "pydantic"} & installed


def test_nothing_that_reads_pickles_or_listens_elsewhere_is_imported() -> None:
    program = "import sys, cupy_awq.serve.listener; print({'zmq', 'dill', 'cloudpickle', 'torch'} & set(sys.modules))"
    assert python("-c", program).strip() == "set()"
    for part in ("serve", "llm"):  # NumPy and the standard library import pickle, but nothing here reads one
        for path in (ROOT / "cupy_awq" / part).rglob("*.py"):
            assert not re.search(r"\bpickle\b|\bmarshal\b|\bshelve\b", path.read_text()), path


def test_a_failed_engine_ends_the_server(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running(Engine(model))
    monkeypatch.setattr(running.engine._core._runner, "launch", lambda *_: 1 / 0)
    status, reply = running.chat()
    assert (status, reply["error"]["code"]) == (500, "error")
    running._thread.join(10)
    assert not running._thread.is_alive()
    assert isinstance(running.engine.error, ZeroDivisionError)


def test_running_streams_end_with_an_error_event_when_the_server_ends(model: LanguageModel) -> None:
    with Running(Engine(model), drain_seconds=0.1) as running:
        events: list[Any] = []
        body = {"model": "tiny", "prompt": "x", "max_tokens": 250, "ignore_eos": True, "temperature": 0, "n": 8}
        thread = threading.Thread(target=lambda: events.extend(running.stream(COMPLETE, body)))
        thread.start()
        while not running.engine.stats().running:
            time.sleep(1e-3)
        running.stop()
        thread.join()
    assert "error" in events[-1] or events[-1] == "[DONE]"


@pytest.mark.slow
def test_smollm2_answers_from_the_command_line() -> None:
    command = [sys.executable, "-m", "cupy_awq", "serve", "smollm2", "--device", "cpu", "--port", "0", "--speculate"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port = next(
            m[1]
            for line in process.stderr
            if (m := re.search(r"serving smollm2 at http://127\.0\.0\.1:(\d+)/v1", line))
        )
        body = {"model": "smollm2", "temperature": 0, "max_tokens": 20}
        body["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{CHAT}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            assert "Paris" in json.load(reply)["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
