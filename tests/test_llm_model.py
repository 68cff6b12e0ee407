# SPDX-License-Identifier: Apache-2.0
"""Tests of the CPU back end's forward pass against float64 formulas, of the KV cache, and of RoPE frequencies."""

from __future__ import annotations

import math
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_awq import llm
from cupy_awq.llm import Decoder, LanguageModel, ModelFiles
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.model import Model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.tools.bench_llm import WARM_UP_STEPS, _measure
from tests import llm_models
from tests.llm_models import EXPERT_FAMILIES, FAMILIES, LLAMA
from tests.logits import logits_of

IDS = [int(i) for i in np.random.default_rng(1).integers(0, llm_models.VOCAB, 21)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def all_logits(model: Model, ids: list[int], chunk: int = 512) -> np.ndarray:
    return logits_of(model, ids, *[chunk] * (len(ids) // chunk))


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("expand_weights", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, *EXPERT_FAMILIES])
def test_every_model_family_matches_the_float64_formulas(tmp_path: Path, family: str, expand_weights: bool) -> None:
    """Logits of the CPU back end agree with float64 formulas for every family, also of mixtures of experts.

    Weights are expanded to float32 once, or dequantized in each product.
    """
    files = llm.read(llm_models.folder(tmp_path, {**FAMILIES, **EXPERT_FAMILIES}[family]))
    model = build_model(files, NumpyOps(files.config, expand_weights=expand_weights))
    assert close(all_logits(model, IDS), llm_models.forward(files, IDS))


@pytest.mark.parametrize("expand_weights", [True, False])
def test_layers_that_are_not_quantized_match_the_float64_formulas(tmp_path: Path, expand_weights: bool) -> None:
    config = {**FAMILIES["qwen2"], "tie_word_embeddings": True}
    files = llm.read(llm_models.folder(tmp_path, config, plain=("k_proj", "0.mlp.up_proj", "down_proj")))
    model = build_model(files, NumpyOps(files.config, expand_weights=expand_weights))
    assert close(all_logits(model, IDS), llm_models.forward(files, IDS))


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}])
def test_scaled_rope_reaches_the_logits(tmp_path: Path, scaling: dict[str, Any]) -> None:
    plain = llm.read(llm_models.folder(tmp_path / "plain", LLAMA))
    files = llm.read(llm_models.folder(tmp_path / "scaled", {**LLAMA, "rope_scaling": scaling}))
    logits = all_logits(build_model(files, NumpyOps(files.config)), IDS)
    assert close(logits, llm_models.forward(files, IDS))
    assert not close(logits, llm_models.forward(plain, IDS))


def config_of(**changes: Any) -> Decoder:
    sizes = {"num_hidden_layers": 1, "head_dim": 128, "vocab_size": 9, "max_position_embeddings": 131072}
    return llm_models.decoder(**{**sizes, "rope_theta": 500000.0, **changes})


def frequencies_of(**changes: Any) -> tuple[np.ndarray, float]:
    return config_of(**changes).layers[0].mixer.rope.frequencies()


def test_llama3_rope_frequencies_follow_their_definition() -> None:
    """The frequencies of long waves are divided by the factor, those of short ones kept, others interpolated."""
    scaling = {**LLAMA3, "original_max_position_embeddings": 8192}
    found, factor = frequencies_of(rope_scaling=scaling)
    assert factor == 1
    kinds = set()
    for i, frequency in enumerate(found):
        plain = 500000.0 ** (-2 * i / 128)
        wave = 2 * math.pi / plain
        if wave < 8192 / 4:
            wanted, kind = plain, "kept"
        elif wave > 8192 / 1:
            wanted, kind = plain / 8, "stretched"
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            wanted, kind = (1 - smooth) * plain / 8 + smooth * plain, "between"
        assert frequency == pytest.approx(wanted, rel=1e-12)
        kinds.add(kind)
    assert kinds == {"kept", "stretched", "between"}


def test_yarn_keeps_high_frequencies_divides_low_ones_and_scales_attention() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    found, factor = frequencies_of(rope_theta=1e6, rope_scaling=scaling)
    plain = 1e6 ** (-np.arange(64) / 64)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    # By YaRN's formula, index 23.6 makes 32 turns within 32768 positions, and index 39.7 one turn.
    np.testing.assert_allclose(found[:24], plain[:24])
    np.testing.assert_allclose(found[40:], plain[40:] / 4)
    assert ((found[24:40] < plain[24:40]) & (found[24:40] > plain[24:40] / 4)).all()


@given(chunk=st.integers(1, 22), seed=st.integers(0, 9))
@settings(max_examples=8)
def test_the_prefill_chunk_does_not_change_the_logits(small: tuple[ModelFiles, Model], chunk: int, seed: int) -> None:
    _, model = small
    ids = np.random.default_rng(seed).integers(0, llm_models.VOCAB, 21).tolist()
    np.testing.assert_allclose(all_logits(model, ids, chunk), all_logits(model, ids), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFiles, Model]:
    files = llm.read(llm_models.folder(tmp_path_factory.mktemp("model"), FAMILIES["qwen3"]))
    return files, build_model(files, NumpyOps(files.config))


def test_a_prompt_keeps_the_hidden_states_of_its_last_chunk_only(
    small: tuple[ModelFiles, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, model = small
    hidden_states = list[weakref.ref[Any]]()

    def watched(*arguments: Any) -> Any:
        assert all(state() is None for state in hidden_states[:-1])
        hidden = model.forward(*arguments)
        hidden_states.append(weakref.ref(hidden))
        return hidden

    seen = replace(model, forward=watched)
    monkeypatch.setattr(model.ops, "prefill_chunk", 4)
    LanguageModel(files.config, seen, files.load_tokenizer(), ()).generate("x" * 21, raw=True, max_tokens=1)
    assert len(hidden_states) == 6
    hidden_states.clear()
    _measure("small", files.config, seen, 1, 21, 1)
    assert len(hidden_states) == 3 * 6 + WARM_UP_STEPS + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 3}, "heads: expected a multiple of kv_heads=2, got 3"),
        ({"head_dim": 15}, "head_dim: expected an even number, got 15"),
        ({"num_hidden_layers": 10**9}, "layers: expected an integer in 1..1024, got 1000000000"),
        ({"hidden_size": -1}, "hidden_size: expected a positive integer"),
        ({"rms_norm_eps": math.nan}, "eps: expected a positive number, got nan"),
        (
            {"rope_scaling": {"rope_type": "dynamic"}},
            "rope_type: expected default, linear, llama3, yarn, got 'dynamic'",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -2}}, "factor: expected a positive number, got -2"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
            "low_freq_factor: expected less than high_freq_factor=4.0, got 4.0",
        ),
        ({"divisors": (1.0,)}, "rope_factors: expected 64 positive numbers"),
    ],
)
def test_an_invalid_model_configuration_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**changes)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return llm.load(llm_models.folder(tmp_path_factory.mktemp("model"), LLAMA), device="cpu")


def test_a_chat_is_reset_to_its_system_message(language_model: LanguageModel) -> None:
    chat = language_model.chat(system="Be brief.")
    first = "".join(chat.say("Hi", max_tokens=5))
    unfinished = chat.say("More", max_tokens=5)
    next(unfinished)
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert chat.last is None
    list(unfinished)
    assert "".join(chat.say("Hi", max_tokens=5)) == first
    assert len(chat.messages) == 3


def test_models_and_chats_have_a_short_repr(language_model: LanguageModel) -> None:
    form = r"LanguageModel\(llama, 2 layers, [\d.]+ MB of weights per step, context \d+, CPU \(.+\)\)"
    assert re.fullmatch(form, repr(language_model))
    assert repr(language_model.chat(capacity=64)) == f"Chat(0 messages, capacity of 64 tokens, {language_model!r})"
