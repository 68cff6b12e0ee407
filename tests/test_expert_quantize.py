# SPDX-License-Identifier: Apache-2.0
"""Quantization of models with experts: what stays dense, experts with few tokens, and interrupted work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cupy_awq import llm
from cupy_awq.checkpoint import Module
from tests import llm_models
from tests.test_expert_files import all_logits
from tests.test_llm_quantize import OPTIONS, TEXT, dense_folder


@pytest.mark.parametrize(
    "family", ["qwen2_moe", *(pytest.param(x, marks=pytest.mark.slow) for x in ("glm4_moe", "mixtral"))]
)
def test_routers_and_gates_stay_dense(tmp_path: Path, family: str) -> None:
    """Only linear layers are quantized; experts have far smaller errors than from rounding to nearest."""
    config = llm_models.EXPERT_FAMILIES[family]
    source = dense_folder(tmp_path / "dense", config)
    report = llm.quantize(source, tmp_path / "out", [TEXT], **OPTIONS)
    files = llm.read(tmp_path / "out")
    dense = load_file(source / "model.safetensors")
    quantized = {name for name, read in files.tensors.items() if isinstance(read(), Module)}
    assert quantized == set(llm_models.linears(config))
    for name in files.tensors.keys() - quantized:
        if "norm" not in name:
            np.testing.assert_array_equal(files.tensors[name](), dense[name])
    for layer in report.layers:
        assert layer["output_error"] <= 0.8 * layer["nearest_output_error"]
        errors = [pair for name, pair in layer["errors"].items() if "experts" in name]
        assert all(error < 0.6 * nearest for nearest, error in errors)
    assert llm.load(tmp_path / "out").generate(["Hello"], max_tokens=3)


def test_experts_with_few_tokens_are_named(tmp_path: Path) -> None:
    """The bias keeps the router from the last group of experts; the others get all tokens."""
    config = llm_models.EXPERT_FAMILIES["glm4_moe"]
    source = dense_folder(tmp_path / "dense", config)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"][6:] = -9
    save_file(tensors, source / "model.safetensors")
    report = llm.quantize(source, tmp_path / "out", [TEXT], method="gptq", **OPTIONS)
    few: dict[str, Any] = json.loads((tmp_path / "out" / "quantization_report.json").read_text())["layers"][1]
    assert few["few_tokens"] == {"mlp.experts.6": 0, "mlp.experts.7": 0}
    assert (
        "layer 1: rounded to nearest for few calibration tokens: mlp.experts.6 (0), mlp.experts.7 (0)" in report.text()
    )
    assert "mlp.experts.6.up_proj" not in few["errors"]
    assert np.isfinite(all_logits(tmp_path / "out")).all()


def test_interrupted_work_is_continued(tmp_path: Path) -> None:
    source = dense_folder(tmp_path / "dense", llm_models.EXPERT_FAMILIES["qwen3_moe"])
    options = {**OPTIONS, "method": "awq"}
    llm.quantize(source, tmp_path / "whole", [TEXT], **options)

    def stop(done: int, total: int, layer: Any) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.quantize(source, tmp_path / "parts", [TEXT], progress=stop, **options)
    llm.quantize(source, tmp_path / "parts", [TEXT], resume=True, **options)
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    for name, a in whole.items():
        np.testing.assert_array_equal(a, parts[name])
