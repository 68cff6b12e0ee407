# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmarks' models with random weights: they run, and count the bytes that a decode step reads."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cupy_awq.tools import bench_llm as speed
from cupy_awq.tools.command_line import main
from tests import llm_models
from tests.logits import logits_of

TINY = llm_models.decoder(
    model_type="qwen3",
    hidden_size=256,
    intermediate_size=512,
    head_dim=64,
    vocab_size=1000,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(speed.SHAPES, "tiny", TINY)


def test_step_bytes_count_all_weights_keys_and_values_of_a_decode_step() -> None:
    """The bytes of a decode step are those of all weights, keys and values; a quantized weight has 0.5 bytes and 5/256.

    5/256 bytes are its part of a scale and a zero point.
    """
    one, three = speed.measure("tiny", batches=(1, 3), prompt_tokens=10, steps=4, index=-1)
    values = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512)
    weights = values // 2 + values // 128 * 5 // 2 + 2 * 1000 * 256
    assert one.step_bytes == weights + 2 * 2 * 128 * 12 * 4
    assert three.step_bytes == weights + 3 * 2 * 2 * 128 * 12 * 4
    assert min(one.prompt_seconds, one.step_seconds, one.gbs) > 0


@pytest.mark.parametrize("family", ["glm4_moe", "qwen2_moe"])
def test_step_bytes_of_experts_count_those_that_are_touched(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 128, "num_experts": 8}
    config = {**llm_models.EXPERT_FAMILIES[family], **sizes, "shared_expert_intermediate_size": 128}
    monkeypatch.setitem(speed.SHAPES, "tiny", llm_models.decoder(**config))
    one, many, few = (
        speed.measure("tiny", batches=(batch,), prompt_tokens=5, steps=2, index=-1, layers=layers)[0].step_bytes
        for batch, layers in ((1, None), (9, None), (1, 1))
    )
    states = 2 * 2 * config["num_key_value_heads"] * config["head_dim"] * 6 * 4
    expert = 3 * 256 * 128 * (128 + 5) // 256
    top_k = config["num_experts_per_tok"]
    touched = [8 * (1 - (1 - top_k / 8) ** batch) for batch in (1, 9)]
    assert many - one - 8 * states == pytest.approx((touched[1] - touched[0]) * expert, abs=1)
    assert few < one - touched[0] * expert - states // 2


def test_random_weights_give_finite_and_different_logits() -> None:
    from cupy_awq.llm.decoder.build import build_model
    from cupy_awq.llm.decoder.numpy_backend import NumpyOps

    model = build_model(speed.synthetic(TINY), NumpyOps(TINY))
    logits = logits_of(model, [1, 2, 3])
    assert np.isfinite(logits).all()
    assert (logits.std(axis=1) > 0.01).all()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", *llm_models.EXPERT_FAMILIES])
def test_a_model_whose_weights_are_created_on_the_gpu_runs(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    if family != "qwen3":
        sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 128, "num_experts": 8}
        config = {**llm_models.EXPERT_FAMILIES[family], **sizes, "shared_expert_intermediate_size": 128}
        monkeypatch.setitem(speed.SHAPES, "tiny", llm_models.decoder(**config))
    (row,) = speed.measure("tiny", batches=(1,), prompt_tokens=10, steps=4, index=0)
    assert min(row.prompt_seconds, row.step_seconds, row.gbs) > 0


@pytest.mark.parametrize("name", list(speed.SHAPES))
def test_the_shapes_have_the_published_numbers_of_parameters(name: str) -> None:
    c = speed.SHAPES[name]
    linears = sum(linear.k * linear.n for layer in c.layers for linear in layer.linears)
    billions = (linears + c.vocab * c.hidden * (1 if c.tied else 2)) / 1e9
    wanted = {"qwen3-8b": 8.19, "qwen3-0.6b": 0.596, "llama-3-8b": 8.03, "llama-3-70b": 70.55, "llama-3.2-1b": 1.236}
    wanted |= {"qwen3-30b-a3b": 30.53, "qwen3-235b-a22b": 235.1, "mixtral-8x7b": 46.70, "glm-4.5-air": 106.85}
    assert billions == pytest.approx(wanted[name], rel=2e-3)


def test_bench_prints_the_speed_of_a_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = speed.Speed("tiny", 1, 1024, 0.5, 0.002, 5 * 10**9)
    seen: list[tuple[int, ...]] = []

    def measure(name: str, batches: tuple[int, ...], layers: None, progress: object) -> list[speed.Speed]:
        seen.append(batches)
        return [row]

    monkeypatch.setattr(speed, "measure", measure)
    assert main(["bench", "--model", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["step_bytes"] == 5 * 10**9
    assert main(["bench", "--model", "tiny"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["tiny", "x", "1", "2048", "500.0", "5.000", "2500"]
    for wrong in (["bench"], ["bench", "64x64", "--model", "tiny"]):
        assert main(wrong) == 2
        assert "expected shapes KxN or a --model" in capsys.readouterr().err
    assert main(["bench", "--model", "tiny", "--dtype", "bfloat16"]) == 2
    assert "--model takes no --dtype" in capsys.readouterr().err
    assert main(["bench", "--model", "tiny", "--m", "1,4"]) == 0
    assert seen == [speed.BATCHES, speed.BATCHES, (1, 4)]


def test_an_unknown_model_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"expected one of qwen3-8b, qwen3-0\.6b"):
        speed.measure("gpt-9", index=-1)
