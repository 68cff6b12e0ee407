# SPDX-License-Identifier: Apache-2.0
"""The forward pass against the formulas in float64, and the cache that it leaves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_awq import llm
from cupy_awq.llm import Config, Source
from cupy_awq.llm import kv_cache as cache
from cupy_awq.llm.model import Model, build
from cupy_awq.llm.numpy_ops import HostOps
from tests import llm_models
from tests.llm_models import FAMILIES, LLAMA

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
    model.ops.chunk = chunk
    kv = model.ops.cache(1, len(ids))
    return np.concatenate([model.logits(hidden)[0] for hidden in model.append(kv, 0, ids)])


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_follows_the_formulas(tmp_path: Path, family: str, keep: bool) -> None:
    """Biases, norms of q and k, tied and untied heads; with float32 weights kept, and dequantized in each product."""
    source = llm.read(llm_models.folder(tmp_path, FAMILIES[family]))
    model = build(source, HostOps(source.config, keep=keep))
    assert close(all_logits(model, IDS), llm_models.forward(source, IDS))


@pytest.mark.parametrize("keep", [True, False])
def test_modules_that_were_not_converted_are_taken_as_they_are(tmp_path: Path, keep: bool) -> None:
    config = {**FAMILIES["qwen2"], "tie_word_embeddings": True}
    source = llm.read(llm_models.folder(tmp_path, config, plain=("k_proj", "0.mlp.up_proj", "down_proj")))
    model = build(source, HostOps(source.config, keep=keep))
    assert close(all_logits(model, IDS), llm_models.forward(source, IDS))


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}])
def test_scaled_rope_reaches_the_logits(tmp_path: Path, scaling: dict[str, Any]) -> None:
    plain = llm.read(llm_models.folder(tmp_path / "plain", LLAMA))
    source = llm.read(llm_models.folder(tmp_path / "scaled", {**LLAMA, "rope_scaling": scaling}))
    logits = all_logits(build(source, HostOps(source.config)), IDS)
    assert close(logits, llm_models.forward(source, IDS))
    assert not close(logits, llm_models.forward(plain, IDS))


def config_of(**changes: Any) -> Config:
    sizes = {"hidden": 64, "intermediate": 96, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 128, "vocab": 9}
    return Config("llama", **{**sizes, "context": 131072, "rope_theta": 500000.0, **changes})


def test_llama3_frequencies_follow_their_definition() -> None:
    """Wave by wave, as the definition puts it: long ones divided, short ones kept, others interpolated."""
    scaling = {**LLAMA3, "original_max_position_embeddings": 8192}
    found, factor = config_of(rope_scaling=scaling).frequencies()
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


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_scales_attention() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    found, factor = config_of(rope_theta=1e6, rope_scaling=scaling).frequencies()
    plain = 1e6 ** (-np.arange(64) / 64)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    # 32 turns in 32768 positions are made by pair 23.6, one turn by pair 39.7 (the paper's formula, by hand).
    np.testing.assert_allclose(found[:24], plain[:24])
    np.testing.assert_allclose(found[40:], plain[40:] / 4)
    assert ((found[24:40] < plain[24:40]) & (found[24:40] > plain[24:40] / 4)).all()


@given(chunk=st.integers(1, 22), seed=st.integers(0, 9))
@settings(max_examples=8)
def test_chunks_do_not_change_the_logits(small: tuple[Source, Model], chunk: int, seed: int) -> None:
    _, model = small
    ids = np.random.default_rng(seed).integers(0, llm_models.VOCAB, 21).tolist()
    np.testing.assert_allclose(all_logits(model, ids, chunk), all_logits(model, ids), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Model]:
    source = llm.read(llm_models.folder(tmp_path_factory.mktemp("model"), FAMILIES["qwen3"]))
    return source, build(source, HostOps(source.config))


def test_sequences_of_different_length_do_not_see_each_other(small: tuple[Source, Model]) -> None:
    """One decode step of a batch against each sequence alone."""
    _, model = small
    kv = model.ops.cache(3, 32)
    prompts = [IDS[:3], IDS[3:12], IDS[12:13]]
    for i, prompt in enumerate(prompts):
        list(model.append(kv, i, prompt))
    batch = model.logits(model.forward(np.array([[7], [8], [9]]), kv))[:, 0]
    for i, prompt in enumerate(prompts):
        alone = all_logits(model, [*prompt, 7 + i])[-1]
        np.testing.assert_allclose(batch[i], alone, rtol=1e-4, atol=1e-4)


@given(data=st.data())
@settings(max_examples=10)
def test_a_reused_prefix_is_what_the_cache_holds(small: tuple[Source, Model], data: st.DataObject) -> None:
    """Any prompts one after the other, which share beginnings: the logits are those of an empty cache."""
    _, model = small
    kv = model.ops.cache(1, 24)
    for _ in range(3):
        keep = data.draw(st.integers(0, len(kv.tokens[0])))
        prompt = kv.tokens[0][:keep] + data.draw(st.lists(st.integers(0, 263), min_size=1, max_size=24 - keep))[:4]
        prompt = prompt[:24] or [0]
        same = kv.reuse(0, prompt)
        assert same <= len(prompt) - 1
        *_, hidden = model.append(kv, 0, prompt[same:])
        assert kv.tokens[0] == prompt
        assert kv.lengths[0] == len(prompt)
        np.testing.assert_allclose(model.logits(hidden)[0, -1], all_logits(model, prompt)[-1], rtol=1e-4, atol=1e-4)


def test_a_full_match_leaves_the_last_token_to_do(small: tuple[Source, Model]) -> None:
    _, model = small
    kv = model.ops.cache(1, 8)
    list(model.append(kv, 0, [1, 2, 3]))
    assert kv.reuse(0, [1, 2, 3]) == 2


def test_a_cache_larger_than_memory_is_refused_before_it_is_made() -> None:
    config = config_of()
    with pytest.raises(ValueError, match=r"the KV cache of 2 x 131072 tokens needs 0\.27 GB, and 0\.10 GB are free"):
        cache.create(config, 2, 131072, np.float16, np, 10**8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads=3 is not a multiple of kv_heads=2"),
        ({"head_dim": 15}, "head_dim must be even, got 15"),
        ({"layers": 10**9}, "layers must be an integer in 1..1024, got 1000000000"),
        ({"hidden": -1}, "hidden must be an integer"),
        ({"eps": math.nan}, "eps must be a positive number, got nan"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type must be default, linear, llama3 or yarn"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -2}}, "factor must be a positive number, got -2"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor must be below"),
        ({"rope_scaling": {"rope_type": "factors", "factors": (1.0,)}}, "rope factors must be 64 positive numbers"),
    ],
)
def test_config_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**changes)
