# SPDX-License-Identifier: Apache-2.0
"""Families of decoders: descriptions and their configurations, names of tensors, and decoders inside other models."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cupy_awq import llm
from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.gguf import container, names
from cupy_awq.llm import Decoder, families
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.families.description import Experts
from cupy_awq.llm.families.table import Table
from cupy_awq.llm.files import gguf, gguf_metadata, hugging_face
from cupy_awq.llm.files.convert import convert
from tests import llm_models
from tests.llm_models import LLAMA, QWEN2, QWEN3
from tests.logits import logits_of
from tests.test_llm_quantize import OPTIONS, TEXT, dense_folder

PACKAGE = Path(llm.__file__).parents[1]
ALL_FAMILIES = {**llm_models.FAMILIES, **llm_models.EXPERT_FAMILIES}
IDS = [5, 80, 200, 3, 17, 90]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": YARN},
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {**LINEAR, "rope_theta": 50.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": None}, "original_max_position_embeddings": 32},
        {"num_nextn_predict_layers": 1},
        {"head_dim": 8, "rms_norm_eps": 0.1},
    ],
)
def test_the_settings_of_a_description_describe_it_again(family: str, changes: dict[str, Any]) -> None:
    table = {**ALL_FAMILIES[family], **changes}
    decoder = families.describe(Table(table))
    settings = families.find(family).settings(decoder)
    json.dumps(settings)
    assert families.describe(Table(settings)) == decoder
    assert families.describe(Table({**settings, "rms_norm_eps": 0.5})) != decoder


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("scaling", [None, YARN, LINEAR])
def test_the_gguf_fields_of_a_description_describe_it_again(
    family: str, scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    table = {**ALL_FAMILIES[family], "rms_norm_eps": 0.125, "rope_scaling": scaling, "mlp_only_layers": []}
    decoder = families.describe(Table(table, biases_as_stored=True))
    fields, divisors = gguf_metadata.describe_model(decoder)
    assert divisors is None
    llm_models.gguf_file(tmp_path / "m.gguf", {})
    _, blocks = container.read(tmp_path / "m.gguf")
    if not decoder.tied:
        blocks = {**blocks, "output.weight": blocks["token_embd.weight"]}
    blocks = {**blocks, "blk.0.attn_q_norm.weight": blocks["output_norm.weight"]}
    assert gguf._describe(fields, blocks) == decoder


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_tensor_of_a_description_has_a_gguf_name(family: str) -> None:
    decoder = families.describe(Table(ALL_FAMILIES[family]))
    arch = families.find(family).GGUF_ARCHITECTURE
    known = names.find({"general.architecture": arch, **({"llama.expert_count": 4} if family == "mixtral" else {})})
    found = [known.to_gguf(name) for name in tensor_names(decoder)]
    assert len(set(found)) == len(found)
    found = [name for name, _ in found]
    assert not [name for name in found if name.startswith("model.") or name == "lm_head.weight"]


def tensor_names(decoder: Decoder) -> list[str]:
    """Return the names of all weights that a description of a decoder expects in a file."""
    parts = [f"{layer.name}.{part.name}" for layer in decoder.layers for part in (*layer.linears, *layer.norms)]
    for layer in decoder.layers:
        if isinstance(block := layer.feed_forward, Experts):
            parts += [f"{layer.name}.{part.name}" for part in (block.router.linear, block.shared_gate) if part]
    return [f"{name}.weight" for name in (*parts, decoder.norm.name, decoder.embedding, decoder.head.name)]


def test_names_of_tensors_stand_in_families_and_in_the_names_of_gguf_alone() -> None:
    decoder = llm_models.decoder()
    words = {name for layer in decoder.layers for part in (*layer.linears, *layer.norms) for name in [part.name]}
    words |= {name.partition(".")[0] + "." for name in words if "." in name}
    assert {"self_attn.", "mlp.", "input_layernorm", "self_attn.q_proj"} <= words
    allowed = {PACKAGE / "checkpoint" / "gguf" / "names.py", *(PACKAGE / "llm" / "families").glob("*.py")}
    found = {
        file: [text for text in literals(ast.parse(file.read_text())) if any(word in text for word in words)]
        for file in PACKAGE.rglob("*.py")
    }
    places = {file for file, texts in found.items() if texts}
    # Names that the package may contain: the demo's folder, MLX's experts, and an example in a command's help.
    exceptions = {PACKAGE / name for name in ("tools/demo.py", "checkpoint/experts.py", "tools/quantize_command.py")}
    assert places - exceptions == allowed & places
    experts = {"glm4_moe.py", "qwen2_moe.py", "qwen3_moe.py"}
    assert {file.name for file in allowed & places} == {"names.py", "llama.py", *experts}


def literals(tree: ast.Module) -> Iterator[str]:
    """Yield the string constants of a module except docstrings."""
    alone = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in alone:
            yield node.value


def rename(name: str, prefix: str, head: str) -> str:
    return head if name == "lm_head.weight" else name.replace("model.", prefix, 1)


def nest(path: Path, prefix: str, head: str, outer: tuple[str, ...] = ()) -> None:
    """Turn the folder of a model into that of a model for images and texts, with renamed and additional tensors.

    The values of config.json move into ``text_config``, except for those with the names ``outer``.
    """
    tensors = {rename(name, prefix, head): a for name, a in load_file(path / "model.safetensors").items()}
    other = np.ones((4, 4), np.float16)
    save_file({**tensors, "model.visual.blocks.0.weight": other, "mtp.fc.weight": other}, path / "model.safetensors")
    table = json.loads((path / "config.json").read_text())
    top = {name: table.pop(name) for name in (*outer, "quantization_config") if name in table}
    nested = {"model_type": "some_vl", "hidden_size": 9, "vision_config": {}, "text_config": table, **top}
    (path / "config.json").write_text(json.dumps(nested))


def all_logits(path: Path) -> np.ndarray:
    files = llm.read(path)
    model = build_model(files, NumpyOps(files.config))
    return logits_of(model, IDS)


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3])
@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
    ],
)
def test_a_decoder_inside_of_another_model_gives_the_logits_of_the_decoder(
    tmp_path: Path, config: dict[str, Any], prefix: str, head: str
) -> None:
    plain, nested = (llm_models.folder(tmp_path / name, config) for name in ("plain", "nested"))
    nest(nested, prefix, head, ("tie_word_embeddings",))
    assert llm.read(nested).config == llm.read(plain).config
    assert llm.read(nested).stop_ids == llm.read(plain).stop_ids
    np.testing.assert_array_equal(all_logits(nested), all_logits(plain))


def test_text_config_overrides_the_values_beside_it(tmp_path: Path) -> None:
    path = llm_models.folder(tmp_path, LLAMA)
    nest(path, "model.", "lm_head.weight")
    assert llm.read(path).config.hidden == LLAMA["hidden_size"]
    table = json.loads((path / "config.json").read_text())
    table["text_config"]["model_type"] = "some_text"
    (path / "config.json").write_text(json.dumps(table))
    with pytest.raises(
        CheckpointError,
        match=f"model_type: expected one of {', '.join(families.FAMILIES)}, got 'some_text'",
    ):
        llm.read(path)


def test_a_decoder_with_a_prefix_is_neither_quantized_nor_converted_to_gguf(tmp_path: Path) -> None:
    path = dense_folder(tmp_path / "dense", LLAMA)
    nest(path, "model.language_model.", "lm_head.weight")
    message = r"expected a text model with model\.embed_tokens\.weight, got one with other names"
    with pytest.raises(ValueError, match=message):
        llm.quantize(path, tmp_path / "out", [TEXT], **OPTIONS)
    with pytest.raises(ValueError, match=message):
        convert(str(path), tmp_path / "m.gguf", "gguf")
    assert [file.name for file in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize(
    ("arch", "biases", "found"),
    [
        ("llama", "", False),
        ("llama", "qkvo", True),
        ("llama", "qkv", None),
        ("qwen2", "qkv", False),
        ("qwen2", "", None),
        ("qwen2", "qkvo", None),
    ],
)
def test_the_written_configuration_describes_the_biases_of_a_gguf_file(
    tmp_path: Path, arch: str, biases: str, found: bool | None
) -> None:
    (tmp_path / "out").mkdir()
    llm_models.gguf_file(
        tmp_path / "m.gguf", dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), "F16"), arch=arch
    )
    files = llm.read(tmp_path / "m.gguf")
    tensors = dict(files.tensors)
    for layer in files.config.layers:
        for linear in layer.linears[:4]:
            if linear.name.rpartition(".")[2][0] in biases:
                tensors[f"{layer.name}.{linear.name}.bias"] = partial(np.ones, linear.n, np.float16)
    files = dataclasses.replace(files, tensors=tensors)
    if found is None:
        with pytest.raises(ValueError, match=f"expected biases as {arch} has, got "):
            hugging_face.write_settings(files, tmp_path / "out")
        return
    hugging_face.write_settings(files, tmp_path / "out")
    table = json.loads((tmp_path / "out" / "config.json").read_text())
    assert table["attention_bias"] == found
    assert table["architectures"] == [families.find(arch).CLASS]
    layer = families.describe(Table(table)).layers[0]
    assert {linear.name[10] for linear in layer.linears if linear.bias} == set(biases)


def add_layer(tensors: dict[str, np.ndarray]) -> None:
    for name in ("input_layernorm.weight", "eh_proj.weight", "shared_head.norm.weight"):
        tensors[f"model.layers.2.{name}"] = np.ones((4, 4), np.float16)


@pytest.mark.parametrize(("count", "is_read"), [(1, True), (0, False), (None, False)])
def test_layers_for_multi_token_prediction_are_announced_by_the_configuration(
    tmp_path: Path, count: int | None, is_read: bool
) -> None:
    plain, path = (llm_models.folder(tmp_path / name, QWEN3) for name in ("plain", "more"))
    tensors = load_file(path / "model.safetensors")
    add_layer(tensors)
    save_file(tensors, path / "model.safetensors")
    table = json.loads((path / "config.json").read_text())
    changes = {} if count is None else {"num_nextn_predict_layers": count}
    (path / "config.json").write_text(json.dumps({**table, **changes}))
    if is_read:
        np.testing.assert_array_equal(all_logits(path), all_logits(plain))
        return
    with pytest.raises(CheckpointError, match="expected 2 layers, got more"):
        all_logits(path)


@pytest.mark.parametrize(
    ("family", "theta", "eps"), [("mixtral", 1e6, 1e-5), ("glm4_moe", 1e4, 1e-5), ("qwen3_moe", 1e4, 1e-6)]
)
def test_values_that_a_configuration_leaves_out_are_those_of_transformers(
    family: str, theta: float, eps: float
) -> None:
    table = {name: a for name, a in ALL_FAMILIES[family].items() if name not in ("rope_theta", "rms_norm_eps")}
    decoder = families.describe(Table(table))
    assert (decoder.layers[0].mixer.rope.theta, decoder.norm.eps) == (theta, eps)


def scaled(**fields: Any) -> Callable[[Path], Decoder]:
    """Return a function that writes a GGUF file with fields of ``llama.rope`` and describes its decoder."""

    def describe(path: Path) -> Decoder:
        llm_models.gguf_file(path, {})
        metadata, blocks = container.read(path)
        return gguf._describe({**metadata, **{f"llama.rope.{name}": value for name, value in fields.items()}}, blocks)

    return describe


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({}, 1.0),
        ({"scale_linear": 4.0}, 0.25),
        ({"scaling.factor": 4.0}, 0.25),
        ({"scaling.factor": 4.0, "scale_linear": 8.0}, 0.25),
        ({"scaling.type": "linear", "scale_linear": 8}, 0.125),
        ({"scaling.type": "none", "scaling.factor": 4.0}, 1.0),
        ({"scaling.finetuned": True}, 1.0),
    ],
)
def test_the_names_and_defaults_of_rope_fields_are_those_of_llama_cpp(
    tmp_path: Path, fields: dict[str, Any], first: float
) -> None:
    assert scaled(**fields)(tmp_path / "m.gguf").rope_frequencies()[0][0] == first


@pytest.mark.parametrize(
    "name", ["dimension_sections", "freq_base_swa", "scaling.yarn_beta_fast", "scaling.yarn.more", "new"]
)
def test_an_unknown_rope_field_is_refused(tmp_path: Path, name: str) -> None:
    message = rf"^llama\.rope\.{name}: expected (dimension_count|factor), .* got this field$"
    with pytest.raises(ValueError, match=message):
        scaled(**{name: 1})(tmp_path / "m.gguf")


def test_divisors_and_scaling_of_a_gguf_file_both_apply(tmp_path: Path) -> None:
    decoder = scaled(scale_linear=4.0)(tmp_path / "m.gguf")
    _, blocks = container.read(tmp_path / "m.gguf")
    data = np.full(8, 2, np.float32)
    freqs = blocks["output_norm.weight"]._replace(shape=(8,), data=data.view(np.uint8).reshape(1, -1))
    metadata, _ = container.read(tmp_path / "m.gguf")
    both = gguf._describe({**metadata, "llama.rope.scale_linear": 4.0}, {**blocks, "rope_freqs.weight": freqs})
    np.testing.assert_array_equal(both.rope_frequencies()[0], decoder.rope_frequencies()[0] / 2)


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"rope_scaling": YARN}, 256),
        ({"rope_scaling": {**YARN, "factor": 8}}, 512),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 512),
        ({"rope_scaling": {**YARN, "factor": None}}, 256),
        ({"rope_scaling": LINEAR}, 256),
    ],
)
def test_the_context_of_yarn_is_the_original_one_times_the_factor(changes: dict[str, Any], context: int) -> None:
    decoder = hugging_face.describe({**LLAMA, **changes}, "config.json")
    assert decoder.context == context
    assert decoder.layers[0].mixer.rope.context == LLAMA["max_position_embeddings"] == 256


def test_back_ends_refuse_an_option_that_they_do_not_execute(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = llm_models.decoder(**QWEN3)
    assert {"Attention", "Attention.q_norm", "Attention.k_norm"} <= decoder.options
    monkeypatch.setattr(NumpyOps, "options", NumpyOps.options - {"Attention.q_norm", "Mlp"})
    with pytest.raises(ValueError, match=r"^qwen3: expected no Attention\.q_norm and no Mlp on a CPU, got some$"):
        NumpyOps(decoder)


def test_every_module_with_the_attributes_of_a_family_is_found() -> None:
    folder = PACKAGE / "llm" / "families"
    found = {file.stem for file in folder.glob("*.py") if "\nMODEL_TYPE = " in file.read_text()}
    assert found == set(families.FAMILIES)
