# SPDX-License-Identifier: Apache-2.0
"""Tests of a model's config.json: RoPE as transformers computes it, and values that no model has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_awq import llm
from cupy_awq.checkpoint import CheckpointError
from cupy_awq.llm import Decoder
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.files.hugging_face import describe
from tests import llm_models
from tests.llm_models import LLAMA, QWEN2, QWEN3

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


def config_of(**changes: Any) -> Decoder:
    return describe({**LLAMA, **changes}, "config.json")


@pytest.mark.parametrize(
    ("extra", "frequencies", "attention"),
    [
        (
            {"mscale": 1.0, "mscale_all_dim": 0.5},
            "1 .22399 .041667 .0039528 .00125 .00039528 .000125 3.9528e-5",
            1.09418,
        ),
        (
            {"mscale": 0.7, "mscale_all_dim": 0},
            "1 .22399 .041667 .0039528 .00125 .00039528 .000125 3.9528e-5",
            1.207944,
        ),
        ({"truncate": False}, "1 .17898 .013194 .0039528 .00125 .00039528 .000125 3.9528e-5", 1.207944),
        (
            {"truncate": False, "beta_fast": 4.0, "beta_slow": 20},
            ".49183 .31623 .1 .031623 .01 .0031623 .001 .00031623",
            1.207944,
        ),
        ({"beta_slow": 50.0}, "1 .31623 .1 .031623 .01 .0031623 .001 .00031623", 1.207944),
        ({"factor": None}, "1 .23717 .05 .0079057 .0025 .00079057 .00025 7.9057e-5", 1.138629),
        ({"factor": 0.5}, "1 .42164 .16667 .063246 .02 .0063246 .002 .00063246", 1.0),
    ],
)
def test_yarn_gives_the_frequencies_of_transformers(extra: dict[str, Any], frequencies: str, attention: float) -> None:
    """YaRN frequencies equal those of transformers 5.23 for head dimension 16, theta 10000 and context 256."""
    found, factor = config_of(rope_scaling={**YARN, **extra}).rope_frequencies()
    np.testing.assert_allclose(found, [float(word) for word in frequencies.split()], rtol=1e-4)
    assert factor == pytest.approx(attention, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {**YARN, "alpha": 1}}, "rope_scaling: 'alpha': expected attention_factor, beta_fast"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}}, "'mscale': expected factor"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "'mrope_section': expected no keys"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0] * 8}}, "rope_type: expected default, linear"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type: expected default, linear"),
        ({"rope_scaling": {**YARN, "truncate": None}}, "truncate: expected true or false, got None"),
        ({"rope_scaling": {**YARN, "factor": 10**400}}, "factor: expected a positive number, got 1000"),
        ({"rope_scaling": {**YARN, "beta_fast": 5e-324}}, "beta_fast, beta_slow: expected numbers of turns"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta: expected above 1 for rope_type 'yarn', got 1.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 5e-324}}, "expected parameters of finite frequencies"),
        ({"rms_norm_eps": 10**400}, "eps: expected a positive number, got 1000"),
        ({"rope_theta": 10**400}, "rope_theta: expected a positive number, got 1000"),
        ({"rope_theta": None}, "rope_theta: expected a positive number, got None"),
        ({"model_type": ["llama"]}, "model_type: expected one of glm4_moe, llama, mixtral, "),
        ({"num_attention_heads": 10**400}, "num_attention_heads|heads: expected"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1"),
        ({"attention_bias": "no"}, "attention_bias: expected true or false, got 'no'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: expected 'full_attention'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0, got 0.5"),
        ({"head_dim": "x" * 10**6}, "head_dim: expected an integer"),
    ],
)
def test_a_configuration_of_no_supported_model_is_refused_with_the_name_of_the_file(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        config_of(**changes)
    assert str(caught.value).startswith("config.json: ")
    assert len(str(caught.value)) < 500


def test_absent_and_null_sizes_are_those_of_transformers() -> None:
    assert config_of(num_key_value_heads=None).layers[0].mixer.kv_heads == LLAMA["num_attention_heads"]
    head_dim = LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
    assert config_of(head_dim=None).layers[0].mixer.head_dim == head_dim
    table = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert describe(table, "config.json").layers[0].mixer.head_dim == 128
    table = {key: value for key, value in QWEN2.items() if key != "num_key_value_heads"}
    with pytest.raises(CheckpointError, match="heads: expected a multiple of kv_heads=32, got 2"):
        describe(table, "config.json")


def test_rope_scaling_has_precedence_over_rope_parameters_and_the_outer_context_over_the_inner() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    config = config_of(rope_scaling=linear, rope_parameters=YARN)
    assert config.layers[0].mixer.rope.scaling == linear
    inner, outer = config_of(rope_scaling=YARN), config_of(rope_scaling=YARN, original_max_position_embeddings=16)
    wanted = config_of(rope_scaling={**YARN, "original_max_position_embeddings": 16})
    np.testing.assert_array_equal(outer.rope_frequencies()[0], wanted.rope_frequencies()[0])
    assert (outer.rope_frequencies()[0] != inner.rope_frequencies()[0]).any()


@pytest.mark.parametrize(
    ("config", "changes", "drop", "add", "message"),
    [
        (LLAMA, {"attention_bias": True}, "", "", "q_proj: expected a bias as in the configuration, got none"),
        (QWEN2, {}, "model.layers.1.self_attn.k_proj.bias", "", "k_proj: expected a bias as in the configuration"),
        (LLAMA, {}, "", "model.layers.0.self_attn.v_proj.bias", "v_proj: expected no bias as in the configuration"),
        (LLAMA, {}, "", "lm_head.weight", "lm_head: expected the embedding table, as tie_word_embeddings says"),
    ],
)
def test_tensors_that_the_configuration_does_not_announce_are_refused(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], drop: str, add: str, message: str
) -> None:
    """A tensor that the configuration does not announce, or a missing one, is an error.

    transformers ignores or invents such tensors, and so computes other logits.
    """
    path = llm_models.folder(tmp_path, config)
    tensors = llm_models.tensors(config)
    if drop:
        del tensors[drop]
    if add == "lm_head.weight":
        tensors[add] = tensors["model.embed_tokens.weight"] + np.float16(1)
    elif add:
        tensors[add] = np.ones(32, np.float16)
    llm_models.save_file(tensors, path / "model.safetensors")
    table = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**table, **changes}))
    files = llm.read(path)
    with pytest.raises(CheckpointError, match=message):
        build_model(files, NumpyOps(files.config, expand_weights=False))
