# SPDX-License-Identifier: Apache-2.0
"""The engine on a GPU's paged cache: its kernels on the simulator, with CUDA graphs replaced by eager launches."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from cupy_awq import llm
from cupy_awq.check import FLOAT16
from cupy_awq.llm import Engine, LanguageModel, Request, Sampling
from cupy_awq.llm.decoder import cuda_steps
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.cuda_steps import next_size
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.engine.core import Core
from cupy_awq.llm.engine.draft import NgramDraft
from cupy_awq.llm.engine.runner import DeviceRunner, Launch
from cupy_awq.llm.engine.scheduler import Sequence
from cupy_awq.llm.text.tokenizer import Tokenizer
from cupy_awq.runtime import launcher
from tests import llm_models
from tests.llm_models import LLAMA
from tests.test_llm_device import SimulatedOps, simulated

__all__ = ["simulated"]

IDS = [int(i) for i in np.random.default_rng(2).integers(0, llm_models.VOCAB - 8, 70)]


class SteppingOps(SimulatedOps):
    prefill_chunk = 64
    loaded: ClassVar[dict[Any, None]] = {}

    def run(self, plan: Any, **arrays: Any) -> None:
        collected = launcher._collected.get()
        if collected is not None:
            collected[plan.kernel] = None
        else:
            assert plan.kernel in self.loaded
            super().run(plan, **arrays)


@pytest.fixture
def steps(simulated: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let kernels run only if they have been loaded before; return the events that are waited for."""

    def load_functions(kernels: Any, progress: Any) -> None:
        SteppingOps.loaded = kernels

    monkeypatch.setattr(cuda_steps, "load_functions", load_functions)
    return simulated


def load(folder: Path, ops: Any = SteppingOps, **options: Any) -> tuple[LanguageModel, Any]:
    files = llm.read(llm_models.folder(folder, LLAMA))
    model = build_model(files, ops(files.config, 0, FLOAT16, **options))
    tokenizer = Tokenizer(llm_models.tokenizer(), llm_models.TEMPLATE, {})
    return LanguageModel(files.config, model, tokenizer, [llm_models.VOCAB]), files


def check_greedy(files: Any, prompt: list[int], tokens: list[int]) -> None:
    """Check that each token has almost the largest logit after those before it, by the float64 formulas."""
    logits = llm_models.forward(files, prompt + tokens)[len(prompt) - 1 : -1]
    chosen = logits[np.arange(len(tokens)), tokens]
    assert (logits.max(axis=1) - chosen <= 0.01 * np.abs(logits).max()).all()


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("batch_invariant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sequences_in_blocks_get_their_tokens_at_once_and_after_a_shared_prefix(
    tmp_path: Path, batch_invariant: bool
) -> None:
    """Prompts of several lengths get the greedy tokens, from decode steps launched ahead and from a reused block."""
    model, files = load(tmp_path, batch_invariant=batch_invariant)
    options: dict[str, Any] = {"max_tokens": 4, "ignore_stop_tokens": True}
    prompts = [IDS[:66], IDS[:30], IDS[3:8]]
    with Engine(model, max_rows=3, cache_tokens=320, make_runner=DeviceRunner) as engine:
        live = [engine.submit(Request(tuple(prompt), **options)) for prompt in prompts]
        found = [generation.result()[0].tokens for generation in live]
        for prompt, tokens in zip(prompts, found, strict=True):
            assert len(tokens) == 4
            check_greedy(files, prompt, tokens)
        again = engine.submit(Request(tuple(prompts[0]), **options))
        tokens = again.result()[0].tokens
        check_greedy(files, prompts[0], tokens)
        assert again.cached_tokens == 64
        assert tokens == found[0] or not batch_invariant
        assert engine.stats().free_blocks == engine.stats().blocks == 10


def test_each_part_of_a_prompt_is_waited_for(tmp_path: Path, steps: list[Any]) -> None:
    """The scheduler learns the time that a part of a prompt takes, also if the part chooses no token."""
    model, _ = load(tmp_path)
    with Engine(model, max_rows=1, cache_tokens=320, max_chunk=32, make_runner=DeviceRunner) as engine:
        engine.submit(Request(tuple(IDS), max_tokens=1, ignore_stop_tokens=True)).result()
        assert engine.stats().steps == 3
    assert len(set(steps)) >= 3


@pytest.mark.usefixtures("steps")
def test_the_source_of_a_copy_is_kept_until_the_step_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that shares memory with the CPU may read it after the copy has been enqueued."""
    sources: list[weakref.ref[Any]] = []
    ends = [0]  # the number of copies of the steps that have ended

    def enqueue_copy(target: Any, source: Any, stream: Any) -> None:
        target[...] = source
        sources.append(weakref.ref(source))

    def launch(self: DeviceRunner, *args: Any) -> Launch:
        launched, end = original(self, *args), len(sources)

        def finish() -> Any:
            assert all(source() is not None for source in sources[ends[-1] : end])
            ends.append(end)
            return launched.finish()

        return launched._replace(finish=finish)

    original = DeviceRunner.launch
    monkeypatch.setattr(cuda_steps, "enqueue_copy", enqueue_copy)
    monkeypatch.setattr(DeviceRunner, "launch", launch)
    model, _ = load(tmp_path)
    with Engine(model, max_rows=2, cache_tokens=320, max_chunk=32, make_runner=DeviceRunner) as engine:
        ends.append(len(sources))  # those of the warm-up
        bias: dict[str, Any] = {"logit_bias": {5: 60.0}}
        requests = [Request(tuple(IDS[i:]), max_tokens=4, ignore_stop_tokens=True, **bias) for i in (0, 20)]
        for generation in [engine.submit(request) for request in requests]:
            generation.result()
    assert len(ends) > 6
    assert sum(source() is not None for source in sources) < len(sources) / 2


@pytest.mark.usefixtures("steps")
def test_tokens_are_sampled_on_the_device_or_on_the_host_as_on_the_cpu(tmp_path: Path) -> None:
    """A request samples the same tokens whether the device or, because of an option, the host chooses them.

    The bias leaves two tokens, between which the penalties decide.
    """
    model, _ = load(tmp_path, batch_invariant=True)
    sampling = Sampling(temperature=1.3, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=3)
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.75, "logit_bias": {5: 60.0, 9: 60.0, 40: -100.0}}
    options: dict[str, Any] = {"max_tokens": 6, "ignore_stop_tokens": True, "sampling": sampling, **penalties}
    with Engine(model, max_rows=2, cache_tokens=320, make_runner=DeviceRunner) as engine:
        live = [engine.submit(Request(tuple(IDS[:5]), **options, **more)) for more in ({}, {"logprobs": 2})]
        first, second = (generation.result()[0].tokens for generation in live)
    assert first == second
    assert set(first) == {5, 9}


@pytest.mark.usefixtures("steps")
def test_a_preempted_sequence_keeps_its_penalties(tmp_path: Path) -> None:
    model, _ = load(tmp_path, batch_invariant=True)
    bias = {5: 60.0, 9: 60.0, 12: 59.5}
    request = Request((1, 2, 3), max_tokens=5, ignore_stop_tokens=True, frequency_penalty=2.0, logit_bias=bias)

    def run(preempts: bool) -> list[int]:
        core = Core(model, DeviceRunner(model.model, 1, 128, 320), max_rows=1)
        core.begin([one := Sequence(request, 0, 8, 0.0)])
        tokens: list[int] = []
        while one in core:
            found = core.step()
            if preempts and tokens:
                found += core.run(None)  # no step is ahead of one that preempts
                core.scheduler._preempt(one)
                preempts = False
            tokens += [choice.token for _, delta in found for choice in delta.tokens]
        return tokens

    tokens = run(preempts=True)
    assert tokens == run(preempts=False)
    assert set(tokens) <= set(bias)
    assert len(set(tokens)) > 1


@pytest.mark.usefixtures("steps")
def test_a_sequence_cancelled_while_its_prompt_runs_is_forgotten(tmp_path: Path) -> None:
    model, _ = load(tmp_path)
    runner = DeviceRunner(model.model, 2, 128, 320)
    core = Core(model, runner, max_rows=2)

    def begin(size: int, tokens: int) -> Sequence:
        request = Request(tuple(IDS[:size]), max_tokens=tokens, ignore_stop_tokens=True)
        sequence = Sequence(request, 0, size + tokens, 0.0)
        core.begin([sequence])
        return sequence

    begin(5, 20)
    for _ in range(3):
        core.run(core.scheduler.next_step(0.0))
    cancelled = begin(40, 5)
    step, times = core.scheduler.next_step(0.0), core.scheduler._prompt_times._sums
    assert step is not None
    assert step.is_prompt
    core.run(step)
    core.end([cancelled])
    for _ in range(2):
        core.run(core.scheduler.next_step(0.0))
    assert times == core.scheduler._prompt_times._sums, "the time of a part that is gone says nothing about the others"
    assert cancelled not in runner._landed
    assert cancelled not in runner._slots


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_drafts_change_no_token(tmp_path: Path, batch_invariant: bool) -> None:
    """Right and wrong drafts across the edge of a block, of a row that is chosen on the host, and beside other rows."""
    model, files = load(tmp_path, batch_invariant=batch_invariant)
    options: dict[str, Any] = {"max_tokens": 6, "ignore_stop_tokens": True}
    penalized = Sampling(repetition_penalty=1.5)  # on the device without drafts, on the host with them
    requests = [Request(tuple(IDS[:29]), **options), Request(tuple(IDS[3:8]), sampling=penalized, **options)]
    sizes: dict[str, Any] = {"max_rows": 2, "cache_tokens": 320, "make_runner": DeviceRunner}

    def run(**more: Any) -> tuple[list[list[int]], int]:
        with Engine(model, **sizes, **more) as engine:
            live = [engine.submit(request) for request in requests]
            return [generation.result()[0].tokens for generation in live], engine.stats().steps

    plain, steps = run()
    texts = [[*request.prompt, *tokens] for request, tokens in zip(requests, plain, strict=True)]

    def draft(tokens: Any, room: int) -> list[int]:
        """Return two right drafts and then wrong ones."""
        text = next((text for text in texts if text[: len(tokens)] == list(tokens)), [])
        right = text[len(tokens) : len(tokens) + 2]
        return [*right, *[7] * room][:room] if right else []

    found, fewer = run(make_draft=lambda: draft)
    for request, tokens, wanted in zip(requests, found, plain, strict=True):
        if request.sampling is not penalized:
            check_greedy(files, list(request.prompt), tokens)
        assert tokens == wanted or not batch_invariant
    assert fewer < steps


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_an_engine_on_a_gpu_generates_what_the_formulas_say(tmp_path: Path, batch_invariant: bool) -> None:
    """Long and short prompts share chunks, some tokens are chosen on the host, and drafts change no text."""
    folder = llm_models.folder(tmp_path, LLAMA)
    files, model = llm.read(folder), llm.load(folder, device="cuda", batch_invariant=batch_invariant)
    options: dict[str, Any] = {"max_tokens": 12, "ignore_stop_tokens": True}
    requests = [Request((*IDS, *IDS)[:count], **options) for count in (1, 5, 31, 32, 33, 64, 65, 100)]
    requests.append(Request(tuple(IDS), logprobs=3, **options))
    found = []
    for make_draft in (None, NgramDraft):
        with Engine(model, max_rows=6, cache_tokens=2000, make_draft=make_draft) as engine:
            live = [engine.submit(request) for request in requests]
            found.append([generation.result()[0].tokens for generation in live])
            assert engine.stats().free_blocks == engine.stats().blocks
    for texts in found:
        for request, tokens in zip(requests, texts, strict=True):
            check_greedy(files, list(request.prompt), tokens)
    assert found[0] == found[1] or not batch_invariant


def test_sizes_of_graphs_waste_less_than_half_of_the_rows() -> None:
    for rows in range(1, 1025):
        assert rows <= next_size(rows) < 2 * rows + 1


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("batch_invariant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_generate_chat_and_score_on_the_device_give_the_texts_of_the_cpu(tmp_path: Path, batch_invariant: bool) -> None:
    """Decode steps run eagerly, then captured; tokens are penalized on the device; a conversation keeps its cache."""
    model, files = load(tmp_path, SimulatedOps, batch_invariant=batch_invariant)
    host = LanguageModel(files.config, build_model(files, NumpyOps(files.config)), model.tokenizer, [llm_models.VOCAB])
    prompts = ["Hello", "a b " * 12]

    def run(model: LanguageModel) -> tuple[list[Any], float]:
        sampling = Sampling(temperature=0.8, top_k=40, repetition_penalty=1.4, seed=3)
        found: list[Any] = [model.generate(prompts, raw=True, max_tokens=5, sampling=s) for s in (None, sampling)]
        assert (model.stats.tokens, model.stats.steps) == (8, 4)
        chat = model.chat(capacity=128)
        found += [list(chat.say(text, max_tokens=3)) for text in ("x" * 40, "y")]
        assert model.stats.prompt_tokens < 60
        return found, model.score(prompts[1]).log_likelihood

    (wanted, score), (found, close) = run(host), run(model)
    assert found == wanted
    assert close == pytest.approx(score, rel=2e-3)


@pytest.mark.usefixtures("simulated")
def test_a_small_cache_is_no_larger_than_its_sequences(tmp_path: Path) -> None:
    model, _ = load(tmp_path, SimulatedOps)
    chat = model.chat(capacity=100)
    assert chat._core.scheduler.pool.size == 4
