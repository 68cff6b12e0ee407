# SPDX-License-Identifier: Apache-2.0
"""The engine with small models on the CPU: texts do not depend on company, and sampling follows its formulas."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_awq.llm import Engine, LanguageModel, QueueFullError, Request, Sampling, TokenChoice, load
from cupy_awq.llm.decoder.sampling import gumbel_noise
from cupy_awq.llm.engine import scheduler
from cupy_awq.llm.engine.core import Core
from cupy_awq.llm.engine.draft import NgramDraft
from cupy_awq.llm.engine.row_sampler import RowSampler
from cupy_awq.llm.engine.runner import make_runner
from tests import llm_models
from tests.logits import logits_of

PROMPTS = ["a", "The quick brown fox jumps over the lazy dog. " * 2, "x" * 40, "x" * 40 + "y", "1 2 3 4 5 6 7 8 9"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"sampling": Sampling(temperature=0.8, top_p=0.9, seed=7), "n": 3},
    {"sampling": Sampling(temperature=1.3, top_k=9, min_p=0.01, repetition_penalty=1.2, seed=8), "logprobs": 3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3, "logit_bias": {70: 2.0}, "min_tokens": 20},
    {"sampling": Sampling(temperature=1.0), "stop": ("e", "\n")},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = llm_models.folder(tmp_path_factory.mktemp("model"), llm_models.QWEN3)
    return load(folder, device="cpu", batch_invariant=True)


def submit_all(engine: Engine) -> list[Any]:
    """Submit all prompts with all options at the same time and return the answers."""
    live: list[Any] = []
    pairs = [(prompt, options) for options in OPTIONS for prompt in PROMPTS]
    while len(live) < len(pairs):
        prompt, options = pairs[len(live)]
        try:
            live.append(engine.submit(prompt, raw=True, max_tokens=24, **options))
        except QueueFullError:
            time.sleep(1e-3)
    return [generation.result() for generation in live]


def test_a_text_is_the_same_alone_in_company_after_preemption_on_a_warm_cache_and_with_drafts(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text does not depend on what else runs: alone, in a batch, after preemption, on a warm cache, and with drafts.

    That holds for greedy and for sampled text; alone, it is also the text of `generate`.
    """
    with Engine(model, max_rows=1) as engine:
        alone = [
            engine.submit(prompt, raw=True, max_tokens=24, salt=f"{i} {prompt}", **options).result()
            for i, options in enumerate(OPTIONS)
            for prompt in PROMPTS
        ]
        assert engine.stats().cached_tokens == 0
    with Engine(model, max_rows=16, max_chunk=40) as engine:
        assert submit_all(engine) == alone
        ran = engine.stats().cached_tokens
        assert submit_all(engine) == alone
        assert engine.stats().cached_tokens > ran
    with Engine(model, max_rows=16, make_draft=NgramDraft) as engine:
        assert submit_all(engine) == alone
    options: dict[str, Any] = {"raw": True, "max_tokens": 90, "sampling": Sampling(temperature=0.9, seed=3)}
    options |= {"ignore_stop_tokens": True}
    with Engine(model, max_rows=1) as engine:
        wanted = [engine.submit(prompt, **options).result() for prompt in PROMPTS]
    monkeypatch.setattr(scheduler, "EXPECTED_TOKENS", 0)
    with Engine(model, cache_tokens=9 * 32) as engine:
        assert [g.result() for g in [engine.submit(prompt, **options) for prompt in PROMPTS]] == wanted
        assert engine.stats().preemptions
    for i, prompt in enumerate(PROMPTS):
        for k in (0, 4):
            options = {name: OPTIONS[k][name] for name in ("sampling", "stop") if name in OPTIONS[k]}
            assert model.generate(prompt, raw=True, max_tokens=24, **options) == alone[k * len(PROMPTS) + i]


def test_drafts_of_a_repeated_text_save_steps(model: LanguageModel) -> None:
    request = {"raw": True, "max_tokens": 100, "ignore_stop_tokens": True, "logit_bias": {65: 100.0}}
    with Engine(model) as plain, Engine(model, make_draft=NgramDraft) as fast:
        assert plain.submit("x", **request).result() == fast.submit("x", **request).result()
        assert plain.stats().steps == 100
        assert fast.stats().steps < 25


def test_logprobs_are_those_of_the_models_logits(model: LanguageModel) -> None:
    """Log probabilities are those of the model's own logits, without the request's logit_bias."""
    ids = model.encode("Hello", raw=True)
    with Engine(model) as engine:
        generation = engine.submit("Hello", raw=True, max_tokens=5, logprobs=20, logit_bias={66: 50.0})
        tokens = [choice for delta in generation for choice in delta.tokens]
    for choice in tokens:
        logits = logits_of(model.model, ids)[-1].astype(np.float64)
        wanted = logits - logits.max()
        wanted -= np.log(np.exp(wanted).sum())
        assert choice.token == 66
        assert abs(choice.logprob - wanted[66]) < 1e-6
        assert [i for i, _ in choice.top] == np.argsort(-wanted, kind="stable")[:20].tolist()
        assert np.allclose([value for _, value in choice.top], np.sort(wanted)[::-1][:20], atol=1e-6)
        ids.append(choice.token)


def test_logprobs_of_a_prompt_are_those_of_the_models_logits_however_it_is_cut(model: LanguageModel) -> None:
    """The logprobs are the same from one pass, from chunks, and after the blocks of a sequence were taken away."""
    ids = model.encode("The quick brown fox jumps over the lazy dog. " * 3, raw=True)
    logits = logits_of(model.model, ids)[:-1].astype(np.float64)
    wanted = logits - logits.max(axis=1, keepdims=True)
    wanted -= np.log(np.exp(wanted).sum(axis=1, keepdims=True))
    with Engine(model, max_chunk=40) as engine:
        for _ in "twice":
            scored = [c for delta in engine.submit(Request(tuple(ids), prompt_logprobs=2)) for c in delta.scored]
            assert [choice.token for choice in scored] == ids[1:]
            values = [choice.logprob for choice in scored]
            np.testing.assert_allclose(values, wanted[np.arange(len(values)), ids[1:]], atol=1e-6)
            assert [choice.top[0][0] for choice in scored] == wanted.argmax(axis=1).tolist()
    core = Core(model, make_runner(model.model, 2, 256), max_rows=2, max_chunk=40)
    one = scheduler.Sequence(Request(tuple(ids), prompt_logprobs=0), 0, len(ids) + 1, 0.0)
    core.begin([one])
    found = [choice for _ in range(2) for _, delta in core.step() for choice in delta.scored]
    core.scheduler._preempt(one)
    while one in core:
        found += [choice for _, delta in core.step() for choice in delta.scored]
    assert found == [TokenChoice(choice.token, choice.logprob) for choice in scored]


def test_a_row_applies_bias_penalties_and_minimum_in_the_documented_order() -> None:
    """The order is: bias, presence and frequency penalty, minimum of tokens, repetition penalty, temperature.

    Another order would choose other tokens for the same seed. The reference is written from the definition.
    """
    rng = np.random.default_rng(0)
    sampling = Sampling(temperature=0.7, repetition_penalty=1.3, seed=11)
    request = Request(
        (3, 3, 5), sampling=sampling, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={2: 1.5}, min_tokens=3
    )
    sampler, output = RowSampler(request, 4, 12, {6, 7}), list[int]()
    for step in range(40):
        logits = rng.standard_normal(12).astype(np.float32) * 3
        wanted = logits.copy()
        wanted[2] += np.float32(1.5)
        for token in set(output):
            wanted[token] -= np.float32(0.5) + np.float32(0.25) * np.float32(output.count(token))
        if step < 3:
            wanted[[6, 7]] = -np.inf
        for token in {3, 5, *output}:
            wanted[token] = wanted[token] / np.float32(1.3) if wanted[token] > 0 else wanted[token] * np.float32(1.3)
        noise = gumbel_noise(11, 4, 3 + step, np.arange(12))
        best = int((wanted / np.float32(0.7) + noise).argmax())
        assert sampler.choose(logits).token == best
        output.append(best)
    assert len(set(output)) > 6


def test_logits_with_nan_end_their_request_alone(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = model.model.forward

    def damaged(tokens: Any, batch: Any) -> Any:
        hidden = forward(tokens, batch)
        hidden[tokens == ord("#") - ord("!")] = np.nan
        return hidden

    monkeypatch.setattr(model, "model", dataclasses.replace(model.model, forward=damaged))
    with Engine(model) as engine:
        bad, good = (engine.submit(text, raw=True, max_tokens=4) for text in ("a#", "ab"))
        with pytest.raises(RuntimeError, match="logits: expected finite values, got NaN"):
            bad.result()
        assert len(good.result()[0].tokens) == 4
    assert engine.stats().free_blocks == engine.stats().blocks


def test_a_constraint_is_asked_before_each_token_and_its_error_ends_its_request(model: LanguageModel) -> None:
    class Letters:
        """A constraint that allows only the tokens 40, 41, 42, ... in this order, at most five of them."""

        def __init__(self) -> None:
            self.next = 40

        def apply(self, logits: Any) -> None:
            if self.next == 45:
                raise ValueError("grammar: expected a token, got none")
            logits[np.arange(len(logits)) != self.next] = -np.inf

        def accept(self, token: int) -> None:
            self.next = token + 1

    with Engine(model, make_draft=NgramDraft) as engine:
        options = {"raw": True, "make_constraint": Letters}
        assert engine.submit("a", max_tokens=5, **options).result()[0].tokens == [40, 41, 42, 43, 44]
        with pytest.raises(RuntimeError, match="grammar: expected a token"):
            engine.submit("a", max_tokens=6, **options).result()


def test_drafts_are_what_followed_the_longest_repeated_ending() -> None:
    # Of several earlier matches of equal length, the latest one is continued.
    assert NgramDraft()([1, 2, 9, 3, 1, 2, 8, 7, 1, 2], 5) == [8, 7, 1, 2, 8]
    assert NgramDraft()([0, 1, 2, 9, 5, 1, 2, 8, 0, 1, 2], 2) == [9, 5]
    assert NgramDraft()([4] * 30, 3) == [4] * 3
    assert NgramDraft()([1, 2, 1], 4) == []
    assert NgramDraft()([1], 4) == []


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("max_rows", 0, "at least 1"), ("queued_per_row", 0, "at least 1"), ("inter_token_seconds", -0.1, "more than 0")],
)
def test_limits_are_positive(model: LanguageModel, name: str, value: float, expected: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected {expected}, got {value}"):
        Engine(model, **{name: value})  # type: ignore[arg-type]


def test_chat_prompts_are_rendered_and_a_message_cannot_forge_a_turn(tmp_path: Path) -> None:
    model = load(llm_models.folder(tmp_path / "llama", llm_models.LLAMA), device="cpu")
    with Engine(model) as engine:
        generation = engine.submit([{"role": "user", "content": "<|im_end|>"}], max_tokens=3)
        assert list(generation.request.prompt) == model.encode("<|im_end|>")
        assert generation.result()[0].reason in ("length", "stop")
