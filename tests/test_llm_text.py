# SPDX-License-Identifier: Apache-2.0
"""Tests of text generation: chat templates, chats, scores and the commands."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq import llm
from cupy_awq.checkpoint import CheckpointError
from cupy_awq.llm import LanguageModel, Sampling
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.engine.core import Core
from cupy_awq.llm.text.detokenizer import Detokenizer
from cupy_awq.llm.text.tokenizer import Tokenizer
from cupy_awq.runtime import placement
from cupy_awq.tools.command_line import main
from tests import llm_models
from tests.logits import logits_of

PROMPTS = ["Hello", "Why is the sky blue?", "é"]


def test_a_batch_generates_what_each_prompt_generates_alone(model: LanguageModel) -> None:
    pieces = [""] * 3

    def on_text(i: int, text: str) -> None:
        pieces[i] += text

    batch = model.generate(PROMPTS, max_tokens=12, on_text=on_text)
    alone = [model.generate(prompt, max_tokens=12)[0] for prompt in PROMPTS]
    assert batch == alone
    assert pieces == [completion.text for completion in batch]


def test_equal_seeds_generate_equal_texts_and_other_seeds_other_texts(model: LanguageModel) -> None:
    texts = [
        model.generate("Hello", max_tokens=20, sampling=Sampling(temperature=1.0, seed=seed))[0].text
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_more_prompts_than_rows_wait_for_each_other(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, sampling = ["a", "bc", "def", "g" * 40, "h"], Sampling(temperature=0.9, repetition_penalty=1.3)
    wanted = model.generate(prompts, max_tokens=8, raw=True, sampling=sampling)
    monkeypatch.setattr("cupy_awq.llm.language_model.MAX_ROWS", 2)
    assert model.generate(prompts, max_tokens=8, raw=True, sampling=sampling) == wanted


def test_decode_steps_agree_with_one_forward_pass_over_the_whole_text(model: LanguageModel) -> None:
    completion = model.generate("Hello", max_tokens=10, raw=True)[0]
    ids = model.tokenizer.encode("Hello") + completion.tokens
    wanted = logits_of(model.model, ids)[4:-1].argmax(axis=1)
    assert completion.tokens == wanted.tolist()


def test_the_chat_template_is_applied_unless_the_prompt_is_raw(model: LanguageModel) -> None:
    assert model.encode("hi", raw=True) == model.tokenizer.encode("hi")
    ids = model.encode("hi")
    assert ids == model.encode([{"role": "user", "content": "hi"}])
    text = model.tokenizer.inner.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_stop_token_ends_a_text_and_is_not_part_of_it(path: Path) -> None:
    model = llm.load(path, device="cpu")
    first = model.generate("Hello", max_tokens=6)[0]
    stop = first.tokens[3]
    at = first.tokens.index(stop)
    model.stop_ids = frozenset([stop])
    again = model.generate("Hello", max_tokens=6)[0]
    assert (again.tokens, again.reason) == (first.tokens[: at + 1], "stop")
    assert again.text == model.tokenizer.decode(first.tokens[:at])


def test_a_stop_string_that_is_a_special_token_ends_a_text(path: Path) -> None:
    model = llm.load(path, device="cpu")
    end = model.tokenizer.special_ids["<|im_end|>"]
    logits = np.eye(llm_models.VOCAB, dtype=np.float32)[end]
    model.model = dataclasses.replace(model.model, head=lambda x: np.broadcast_to(logits, (*x.shape[:-1], len(logits))))
    model.stop_ids = frozenset()
    endless = model.generate("Hello", max_tokens=3, stop=["im_end"])[0]
    assert (endless.tokens, endless.reason) == ([end] * 3, "length")
    ended = model.generate("Hello", max_tokens=3, stop=["x", "<|im_end|>"])[0]
    assert (ended.tokens, ended.reason, ended.text) == ([end], "stop", "")


class CharacterStream:
    """A stand-in for a detokenizer whose tokens are single characters."""

    def step(self, token: int) -> str:
        return chr(token)


@given(text=st.text("ab<", max_size=12), stop=st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3))
def test_a_stop_string_ends_the_text_even_if_tokens_split_it(text: str, stop: list[str]) -> None:
    detokenizer = Detokenizer(CharacterStream(), stop)
    out = ""
    for c in text:
        piece = detokenizer.step(ord(c))
        assert not any(s in out + piece for s in stop)
        out += piece
        if detokenizer.stopped:
            break
    out += detokenizer.flush()
    # The stop string that is completed first ends the text, which is cut before that string's first character.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    last = min(end for end, _ in ends) if ends else 0
    assert detokenizer.stopped == bool(ends)
    assert out == (text[: min(begin for end, begin in ends if end == last)] if ends else text)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {"raw": True}, "prompt: expected at least one token, got none"),
        ("x" * 256, {"raw": True}, "prompt: expected fewer tokens than the context of 256, got 256"),
        ("x", {"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ([], {}, "prompts: expected at least one prompt, got none"),
        ([{"role": "user", "content": "x"}], {"raw": True}, "prompt: expected a text with raw=True, got messages"),
    ],
)
def test_invalid_arguments_of_generate_are_refused(
    model: LanguageModel, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(prompt, **options)


def test_the_models_gpu_is_current_during_its_work_and_never_during_the_callers(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = 0  # the current GPU is number 0, but the model is on number 1

    @contextlib.contextmanager
    def on(index: int) -> Iterator[None]:
        nonlocal here
        before, here = here, index
        yield
        here = before

    def watched(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            assert here == 1
            return function(*arguments, **options)

        return call

    for owner, names in (
        (NumpyOps, ("make_pages", "prepare_tokens", "embed", "run")),
        (Core, ("begin", "step", "end")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    monkeypatch.setattr(placement, "use_device", on)
    monkeypatch.setattr(model.model.ops, "device_index", 1)
    found = []
    model.generate("Hello", max_tokens=8, on_text=lambda i, text: found.append(here))
    found += [here for _ in model.chat().say("Hello", max_tokens=8)]
    model.score("Hello")
    assert set(found) == {0}
    assert here == 0


def test_a_stop_text_outside_a_list_is_refused_instead_of_read_letter_by_letter(model: LanguageModel) -> None:
    with pytest.raises(TypeError, match="stop: expected a list of texts, got the text 'end'"):
        model.generate("x", stop="end")
    with pytest.raises(TypeError, match="stop: expected a list"):
        said(model.chat(), "x", stop="end")


def test_an_answer_ends_at_the_end_of_the_context(model: LanguageModel) -> None:
    completion = model.generate("x" * 250, raw=True, max_tokens=100)[0]
    assert (len(completion.tokens), completion.reason) == (6, "length")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "chat template: expected one, got none"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "chat template: expected other messages, got its error: roles must alternate",
        ),
        ("{% for", "chat template: expected valid jinja2, got TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "chat template: expected valid jinja2, got ZeroDivisionError"),
        ("{{ messages[5].content.x.y }}", "chat template: expected valid jinja2, got UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "chat template: expected valid jinja2, got SecurityError"),
        ("{{ messages.append(1) }}", "chat template: expected valid jinja2, got SecurityError"),
    ],
)
def test_a_failing_or_malicious_chat_template_is_a_checkpoint_error(template: str | None, message: str) -> None:
    tokenizer = Tokenizer(llm_models.tokenizer(), template, {})
    with pytest.raises(CheckpointError, match=message):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_chat_templates_may_use_break_tojson_strftime_and_special_tokens() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ bos_token }}{{ m | tojson }}"
        "{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    tokenizer = Tokenizer(llm_models.tokenizer(), template, {"bos_token": "<s>"})
    ids = tokenizer.encode_chat([{"role": "user", "content": "<é>"}, {"role": "user", "content": "no"}])
    assert tokenizer.decode(ids) == '<s>{"role": "user", "content": "<é>"}4'


def said(chat: llm.Chat, text: str, **options: Any) -> str:
    return "".join(chat.say(text, **options))


def test_a_chat_answers_as_a_new_prompt_with_the_whole_conversation(model: LanguageModel) -> None:
    chat = model.chat(system="Be brief.")
    assert chat.last is None
    answers = [said(chat, text, max_tokens=8) for text in ("Hi", "And now?", "More")]
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    for text, answer in zip(("Hi", "And now?", "More"), answers, strict=True):
        messages.append({"role": "user", "content": text})
        assert model.generate([messages], max_tokens=8)[0].text == answer
        messages.append({"role": "assistant", "content": answer})
    assert chat.messages == messages
    assert chat.last == model.generate([messages[:-1]], max_tokens=8)[0]


def test_an_unfinished_answer_ends_when_the_next_turn_begins(model: LanguageModel) -> None:
    chat, other = model.chat(), model.chat()
    left = chat.say("Hi", max_tokens=8)
    next(left)
    answer = said(chat, "And now?", max_tokens=8)
    assert not list(left)
    assert answer == said(other, "And now?", max_tokens=8)
    assert chat.messages == other.messages
    assert said(chat, "More", max_tokens=8) == said(other, "More", max_tokens=8)


def test_a_turn_runs_only_the_new_tokens_of_the_conversation(model: LanguageModel) -> None:
    chat = model.chat()
    said(chat, "x" * 100, max_tokens=2)
    said(chat, "y", max_tokens=2)
    assert model.stats.prompt_tokens < 60


def test_a_closed_answer_joins_the_conversation(model: LanguageModel) -> None:
    chat = model.chat()
    pieces = chat.say("Hi", max_tokens=30)
    first = next(pieces)
    pieces.close()
    assert chat.last is not None
    assert (chat.last.text, chat.last.reason) == (first, "")
    assert chat.messages[-1] == {"role": "assistant", "content": first}
    answer = said(chat, "Go on", max_tokens=6)
    fresh = model.chat()
    fresh.messages = chat.messages[:-2]
    assert said(fresh, "Go on", max_tokens=6) == answer


def test_a_message_beyond_the_capacity_is_refused_and_the_conversation_stays(model: LanguageModel) -> None:
    chat = model.chat(capacity=64)
    said(chat, "Hi", max_tokens=2)
    before = list(chat.messages)
    with pytest.raises(ValueError, match="conversation: expected fewer tokens than its capacity of 64"):
        said(chat, "x" * 64)
    with pytest.raises(ValueError, match="max_tokens: expected at least 1, got 0"):
        said(chat, "x", max_tokens=0)
    assert chat.messages == before
    with pytest.raises(ValueError, match=r"capacity: expected 2\.\.256"):
        model.chat(capacity=257)


def test_a_score_is_the_sum_of_log_probabilities(model: LanguageModel, path: Path) -> None:
    text = "The sky is blue because of scattering."
    ids = model.tokenizer.encode(text)
    logits = llm_models.forward(llm.read(path), ids)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    wanted = log_p[np.arange(len(ids) - 1), ids[1:]].sum()
    score = model.score(text)
    assert score.tokens == len(ids) - 1
    assert score.log_likelihood == pytest.approx(wanted, rel=1e-4)
    assert score.perplexity == pytest.approx(math.exp(-wanted / (len(ids) - 1)), rel=1e-4)


def test_a_text_longer_than_the_context_is_scored_in_windows(model: LanguageModel) -> None:
    """A text that is longer than the context of 256 tokens is scored in windows that overlap by one token.

    Each token is scored once: 600 tokens are windows of 256, 256 and 90.
    """
    text = "abcdefghij" * 60
    parts = [text[0:256], text[255:511], text[510:600]]
    scores = [model.score(part) for part in parts]
    whole = model.score(text)
    assert whole.tokens == 599 == sum(score.tokens for score in scores)
    assert whole.log_likelihood == pytest.approx(sum(score.log_likelihood for score in scores), rel=1e-5)


def test_a_score_of_a_text_of_one_token_is_refused(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="text: expected at least 2 tokens, got 1"):
        model.score("x")


def run(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_generate_command_prints_what_the_library_generates(
    path: Path, model: LanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(path), "Hello", "--max-tokens", "9", "--device", "cpu", "--stats"]
    code, out, err = run(capsys, command)
    assert (code, out) == (0, model.generate("Hello", max_tokens=9)[0].text + "\n")
    assert "tokens/s" in err
    code, out, _ = run(capsys, [*command[:3], "Two", *command[3:], "--temperature", "1", "--top-p", "0.5"])
    sampling = Sampling(temperature=1.0, top_p=0.5)
    texts = [c.text for c in model.generate(["Hello", "Two"], max_tokens=9, sampling=sampling)]
    assert (code, out) == (0, f"Hello\n{texts[0]}\n\nTwo\n{texts[1]}\n\n")


def test_prompts_come_from_arguments_files_and_standard_input(
    path: Path,
    model: LanguageModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    (tmp_path / "prompt.txt").write_text("thrée\n", encoding="utf-8")
    options = ["--file", str(tmp_path / "prompt.txt"), "--max-tokens", "4", "--device", "cpu"]
    code, out, _ = run(capsys, ["generate", str(path), "one", "-", *options])
    prompts = ["one", "two\nlines", "thrée"]
    texts = [completion.text for completion in model.generate(prompts, max_tokens=4)]
    assert (code, out) == (0, "".join(f"{a}\n{b}\n\n" for a, b in zip(prompts, texts, strict=True)))


def test_the_chat_command_reads_lines_until_the_end_of_input(path: Path, model: LanguageModel) -> None:
    command = [sys.executable, "-m", "cupy_awq", "chat", str(path), "--max-tokens", "5", "--device", "cpu"]
    result = subprocess.run(command, input=b"Hi\nMore\n", capture_output=True, check=True)
    chat = model.chat()
    answers = [said(chat, text, max_tokens=5) for text in ("Hi", "More")]
    assert result.stdout.decode() == f"{answers[0]}\n{answers[1]}\n"


def test_the_score_command_prints_the_perplexity(
    path: Path, model: LanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("Some text.")
    code, out, _ = run(capsys, ["score", str(path), str(tmp_path / "text.txt"), "--device", "cpu"])
    assert code == 0
    assert f"perplexity      {model.score('Some text.').perplexity:.4f}\n" in out
    code, out, _ = run(capsys, ["score", str(path), str(path), str(tmp_path / "text.txt"), "--device", "cpu", "--json"])
    (row, again), score = json.loads(out), model.score("Some text.")
    assert row == again
    assert row["model"] == str(path)
    assert (row["tokens"], row["log_likelihood"]) == (score.tokens, score.log_likelihood)
    assert row["perplexity"] == score.perplexity
    missing = run(capsys, ["score", str(path), "nothing", str(tmp_path / "text.txt"), "--device", "cpu"])
    assert missing[:2] == (2, "")  # the missing file is reported before the first model is scored


def test_the_convert_command_writes_a_file_that_generates_the_same_text(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = path / "m.ak48"
    code, text, _ = run(capsys, ["convert", str(path), str(out)])
    assert (code, text) == (0, f"{out}: {out.stat().st_size / 1e6:.1f} MB\n")
    texts = [run(capsys, ["generate", str(p), "Hello", "--max-tokens", "9", "--device", "cpu"])[1] for p in (path, out)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "nothing", "x"], "nothing: expected a file, a folder or one of smollm2, got none"),
        (["generate", "MODEL", "x", "--top-p", "2"], "top_p: expected above 0 and at most 1, got 2.0"),
        (["generate", "MODEL", "x", "--device", "gpu"], "device: expected cpu, cuda, cuda:N or the number of a GPU"),
        (["generate", "MODEL", "x", "--device", "99"], "device: expected "),
        (["score", "MODEL", "nothing.txt"], "nothing.txt"),
        (["generate", "nothing"], "PROMPT: expected a text, - for standard input, or --file, got none"),
        (["generate", "nothing", "-", "-"], "PROMPT: expected - once, got it several times"),
        (["generate", "nothing", "x", "--file", "nothing.txt"], "nothing.txt"),
        (["generate", "nothing", "x", "--max-tokens", "0"], "max_tokens: expected at least 1, got 0"),
        (["chat", "nothing", "--stop", "x" * 1025], "stop: expected texts of at most 1024 characters, got 1025"),
        (["convert", "MODEL", "out"], "--format: expected one of autoawq"),
    ],
)
def test_a_wrong_argument_is_one_line_on_stderr(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, [str(path) if a == "MODEL" else a for a in arguments])
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_the_numpy_back_end_imports_no_cupy(path: Path) -> None:
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "from cupy_awq import llm\n"
        f"print(llm.load({str(path)!r}, device='cpu').generate('Hello', max_tokens=3)[0].reason)\n"
        "assert 'cupy_awq.llm.decoder.cuda_backend' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("length\n", "")


def test_a_missing_package_is_an_error_with_the_pip_command(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="tokenizers: expected an installed package, got none: pip install tokenizers"):
        llm.load(path, device="cpu")
