# SPDX-License-Identifier: Apache-2.0
"""Tests of mixtures of experts in files: names, shapes, and errors that name the tensor."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from gguf import MODEL_ARCH, get_tensor_name_map
from safetensors.numpy import load_file

from cupy_awq import llm
from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.gguf import names
from cupy_awq.llm import families
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.files.convert import convert
from tests import llm_models
from tests.golden_models import write_quantized
from tests.logits import logits_of


def load(path: Path) -> None:
    """Build the model of a folder, which raises the error of a damaged one."""
    files = llm.read(path)
    build_model(files, NumpyOps(files.config, expand_weights=False))


def change_experts(found: dict[str, np.ndarray], change: str) -> None:
    """Damage the tensors of a layer with five experts in the way that ``change`` names."""
    layer = "model.layers.1.mlp"
    if change == "missing":
        for part in ("qweight", "scales", "qzeros"):
            del found[f"{layer}.experts.3.up_proj.{part}"]
    elif change == "groups":
        for part in ("scales", "qzeros"):
            name = f"{layer}.experts.3.up_proj.{part}"
            found[name] = np.repeat(found[name], 2, axis=0)
    elif change == "extra":
        for part in ("qweight", "scales", "qzeros"):
            found[f"{layer}.experts.5.down_proj.{part}"] = found[f"{layer}.experts.4.down_proj.{part}"].copy()
    elif change == "router":
        found[f"{layer}.gate.weight"] = found[f"{layer}.gate.weight"][:4].copy()
    else:
        for part in ("qweight", "scales", "qzeros"):
            split = [found[f"{layer}.experts.{expert}.up_proj.{part}"] for expert in range(5)]
            found[f"{layer}.experts.up_proj.{part}"] = np.stack(split)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"experts\.3\.up_proj"),
        ("groups", r"experts\.3\.up_proj': group_size: expected 16 as in"),
        ("extra", r"model\.layers\.1\.mlp\.experts\.5\.down_proj: expected 5 experts, got more"),
        ("router", r"model\.layers\.1\.mlp\.gate"),
        ("fused and split", r"experts\.\d\.up_proj"),
    ],
)
def test_bad_experts_are_named(tmp_path: Path, change: str, message: str) -> None:
    """An error names the tensor if an expert is missing, extra or has other groups, or if two tensors have one name.

    The router, too, may have another number of experts than the layer.
    """
    path = llm_models.folder(tmp_path / "m", llm_models.EXPERT_FAMILIES["qwen3_moe"])
    found = llm_models.tensors(llm_models.EXPERT_FAMILIES["qwen3_moe"])
    change_experts(found, change)
    llm_models.save_file(found, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_a_stacked_tensor_beside_one_of_an_expert_is_named(tmp_path: Path) -> None:
    """MLX files of Mixtral stack w3 of all experts in ``switch_mlp.up_proj``; another w3 of one expert is an error."""
    path = write_quantized(tmp_path, llm_models.EXPERT_FAMILIES["mixtral"], "mlx")
    found, layer = load_file(path / "model.safetensors"), "model.layers.1.block_sparse_moe"
    for part in ("weight", "scales", "biases"):
        found[f"{layer}.experts.3.w3.{part}"] = found[f"{layer}.switch_mlp.up_proj.{part}"][3].copy()
    llm_models.save_file(found, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"expected a unique name, got 'model.*1.*experts\.3\.w3' twice"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "groups: expected a divisor of 8 experts .*, got 3 and 2"),
        ({"n_group": 8, "topk_group": 4}, "groups: expected .* two experts a group, .*, got 8 and 4"),
        ({"topk_group": 0}, "topk_group: expected a positive integer, got 0"),
        ({"topk_group": 5}, "groups: expected .* at most as many to keep, got 4 and 5"),
        ({"topk_group": 1}, r"top_k: expected an integer in 1\.\.2, got 3"),
        (
            {"n_routed_experts": 6, "n_group": 1},
            r"mlp\.gate\.weight: expected shape \(6, 64\), got \(8, 64\)",
        ),
    ],
)
def test_a_configuration_that_the_experts_contradict_is_refused(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    config = llm_models.EXPERT_FAMILIES["glm4_moe"]
    path = write_quantized(tmp_path, config)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**settings, **changes}))
    with pytest.raises(CheckpointError, match=message):
        load(path)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "glm4_moe"])
def test_names_of_experts_are_those_of_the_gguf_package(family: str) -> None:
    """The gguf package has the same names; in GGUF, all experts of a projection are one tensor."""
    config = {**llm_models.EXPERT_FAMILIES[family], **({"mlp_only_layers": []} if family == "qwen2_moe" else {})}
    arch = {"qwen3_moe": MODEL_ARCH.QWEN3MOE, "qwen2_moe": MODEL_ARCH.QWEN2MOE, "glm4_moe": MODEL_ARCH.GLM4_MOE}[family]
    known = get_tensor_name_map(arch, config["num_hidden_layers"])
    ours = names.find({"general.architecture": families.find(family).GGUF_ARCHITECTURE})
    found = {name.rpartition(".")[0] for name in llm_models.tensors(config)}
    for name in found:
        gguf_name, expert = ours.to_gguf(f"{name}.weight")
        of_all = re.sub(r"\.experts\.\d+", ".experts", name)
        assert gguf_name == f"{known.get_name(of_all)}.weight"
        assert (expert is None) == (of_all == name)
    if family == "glm4_moe":
        assert ours.to_gguf("model.layers.1.mlp.gate.e_score_correction_bias") == ("blk.1.exp_probs_b.bias", None)


def all_logits(path: Path) -> np.ndarray:
    """Return the logits of a short prompt."""
    files = llm.read(path)
    model = build_model(files, NumpyOps(files.config))
    return logits_of(model, [5, 80, 200, 3, 17])


@pytest.mark.parametrize("family", llm_models.EXPERT_FAMILIES)
def test_a_gguf_file_of_experts_gives_the_logits_of_its_source(tmp_path: Path, family: str) -> None:
    """Experts are read back from GGUF's one tensor per projection, also for Mixtral, a "llama" in GGUF."""
    config = {**llm_models.EXPERT_FAMILIES[family], **({"mlp_only_layers": []} if family == "qwen2_moe" else {})}
    path = llm_models.folder(tmp_path / "m", config, group=32)
    convert(str(path), tmp_path / "m.gguf", "gguf", rounds=True)
    wanted = all_logits(path)
    assert np.abs(all_logits(tmp_path / "m.gguf") - wanted).max() <= 0.01 * np.abs(wanted).max()


def test_a_gate_may_be_a_vector(tmp_path: Path) -> None:
    """GGUF stores the gate of the shared expert, a matrix of one row, as a vector; both shapes are read."""
    config = llm_models.EXPERT_FAMILIES["qwen2_moe"]
    path = llm_models.folder(tmp_path / "m", config)
    found = llm_models.tensors(config)
    name = "model.layers.1.mlp.shared_expert_gate.weight"
    found[name] = found[name][0]
    llm_models.save_file(found, path / "model.safetensors")
    load(path)
