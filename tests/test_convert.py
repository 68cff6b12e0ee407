# SPDX-License-Identifier: Apache-2.0
"""Tests of the command ``convert`` and of GGUF files: equal weights, logits and tokens, and clear refusals."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from cupy_awq import llm, reference
from cupy_awq.checkpoint import CheckpointError, Contents, Module, Tensor, read
from cupy_awq.checkpoint.gguf import container
from cupy_awq.checkpoint.gguf.write import write_gguf
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.files import gguf_metadata
from cupy_awq.llm.files.convert import convert
from cupy_awq.tools.command_line import main
from tests import llm_models, packers
from tests.format_files import save_folder
from tests.logits import logits_of
from tests.packers import Packed, weights

Array = npt.NDArray[Any]

IDS = [5, 17, 256, 9, 100, 33]


def dense(module: Module | Tensor) -> Array:
    """Return the values of a tensor, or the weight W [K, N] to which a module dequantizes, in float64."""
    if isinstance(module, Tensor):
        return module.array.astype(np.float64)
    weight = module.weight
    codes = reference.unpack_int4(weight.qweight).astype(np.float64)
    groups = np.arange(len(codes)) // weight.group_size
    scales = weight.scales.astype(np.float64)[groups]
    if weight.qzeros is None:
        return (codes - 8) * scales
    if weight.spec.zeros == "float":
        return codes * scales + weight.qzeros.astype(np.float64)[groups]
    return (codes - reference.unpack_int4(weight.qzeros)[groups]) * scales


def fits_gguf(w: Packed) -> bool:
    """Return whether float16 holds the scales and, unless all zero points are 8, their products with zero points."""
    scales = w.scales.astype(np.float64)
    values = [scales] if w.is_symmetric else [scales, scales * w.zeros]
    with np.errstate(over="ignore"):
        return all(np.array_equal(v.astype(np.float16).astype(np.float64), v) for v in values)


@given(w=weights((32, 64, 96)), data=st.data())
def test_gguf_files_hold_equal_weights(w: Packed, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["gptq", "mlx", "short scales"]))
    if kind == "short scales":  # scales of seven bits: their products with zero points are exact in float16
        short = np.asarray(w.scales, np.float16).view(np.uint16) & np.uint16(0xFFF0)
        w = Packed(w.codes, w.zeros, short.view(np.float16), w.group_size, w.g_idx)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        table: dict[str, Any]
        if kind == "mlx":
            offsets = packers.offsets_of(w)
            parts = packers.mlx(w, offsets)
            table = {"quantization": {"bits": 4, "group_size": w.group_size}}
            fits = all(
                np.array_equal(v.astype(np.float16).astype(np.float32), v.astype(np.float32))
                for v in (w.scales, offsets)
            )
        else:
            parts = packers.gptq(w, 2)
            table = {
                "quantization_config": {
                    "quant_method": "gptq",
                    "bits": 4,
                    "group_size": w.group_size,
                    "checkpoint_format": "gptq_v2",
                }
            }
            fits = fits_gguf(w)
        name = "model.layers.3.mlp.up_proj"
        norm = np.array([0.1, -3, 7], w.scales.dtype)
        tensors = {f"{name}.{part}": array for part, array in parts.items()}
        contents = read(save_folder(path / "in", tensors | {"model.norm.weight": norm}, table))
        out = path / "out.gguf"
        if not fits:
            with pytest.raises(ValueError, match=r"module 'model\.layers\.3\.mlp\.up_proj': .*float16 holds exactly"):
                write_gguf(out, contents, {})
            assert [file.name for file in path.iterdir()] == ["in"]
            return
        write_gguf(out, contents, {})
        again = read(out)
        np.testing.assert_array_equal(dense(again[name]), dense(contents[name]))
        np.testing.assert_array_equal(again.read("model.norm.weight"), norm.astype(np.float32))
        original, module = contents[name], again[name]
        assert isinstance(original, Module)
        assert isinstance(module, Module)
        np.testing.assert_array_equal(module.weight.qweight, original.weight.qweight)
        reader = gguf.GGUFReader(out)
        (theirs,) = (tensor for tensor in reader.tensors if tensor.name == "blk.3.ffn_up.weight")
        assert theirs.tensor_type.name == ("Q4_0" if original.weight.qzeros is None else "Q4_1")
        values = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
        np.testing.assert_allclose(values.T, dense(module), rtol=1e-6, atol=1e-6 * np.abs(values).max())


def model_folder(path: Path, config: dict[str, Any], group: int = 32) -> Path:
    """Write a model whose scales have seven bits: float16 holds their products with zero points, as GGUF needs."""
    llm_models.folder(path, config, group)
    tensors = load_file(path / "model.safetensors")
    for name, array in tensors.items():
        if name.endswith(".scales"):
            tensors[name] = (array.view(np.uint16) & np.uint16(0xFFF0)).view(np.float16)
    save_file(tensors, path / "model.safetensors")
    return path


def logits(path: Path) -> Array:
    files = llm.read(path)
    model = build_model(files, NumpyOps(files.config, expand_weights=False))
    return logits_of(model, IDS)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
MODELS = {
    **llm_models.FAMILIES,
    "llama3": {**llm_models.LLAMA, "rope_scaling": LLAMA3},
    "linear": {**llm_models.LLAMA, "rope_scaling": LINEAR},
}


@pytest.mark.parametrize("family", MODELS)
def test_models_keep_their_logits_and_tokens_in_gguf(tmp_path: Path, family: str) -> None:
    path = model_folder(tmp_path / "in", MODELS[family], 32)
    assert main(["convert", str(path), str(tmp_path / "m.gguf")]) == 0
    np.testing.assert_allclose(logits(tmp_path / "m.gguf"), logits(path), rtol=0, atol=2e-5)
    files = [llm.read(p) for p in (path, tmp_path / "m.gguf")]
    first, second = (file.load_tokenizer() for file in files)
    assert files[0].stop_ids == (258,)
    # A GGUF file has no name for <|end|> as a stop token: readers know it by its text.
    assert files[1].stop_ids == (258, 256)
    text = "Hello <|im_end|> wörld\n 12"
    assert first.encode(text) == second.encode(text)
    messages = [{"role": "user", "content": "Hi"}]
    assert first.encode_chat(messages) == second.encode_chat(messages)
    convert(str(tmp_path / "m.gguf"), tmp_path / "again.gguf", "gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()


@pytest.mark.parametrize("name", ["autoawq", "compressed-tensors", "gptq", "ak48"])
def test_models_keep_their_logits_in_other_formats(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model_folder(tmp_path / "in", llm_models.QWEN3)
    (path / "quantize_config.json").write_text("{}")
    out = tmp_path / "in" / "m.ak48" if name == "ak48" else tmp_path / "out"
    assert main(["convert", str(path), str(out), "--format", name]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{out}: ")
    assert shown.endswith(" MB\n")
    np.testing.assert_array_equal(logits(out), logits(path))
    assert llm.read(out).load_tokenizer().encode("Hello") == llm.read(path).load_tokenizer().encode("Hello")
    if name != "ak48":
        names = {file.name for file in out.iterdir()}
        assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_a_symmetric_gguf_becomes_a_folder(tmp_path: Path) -> None:
    kinds = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), "Q4_0")
    llm_models.gguf_file(tmp_path / "m.gguf", kinds)
    convert(str(tmp_path / "m.gguf"), tmp_path / "out", "compressed-tensors")
    np.testing.assert_allclose(logits(tmp_path / "out"), logits(tmp_path / "m.gguf"), rtol=0, atol=2e-5)
    first, second = (llm.read(tmp_path / p).load_tokenizer() for p in ("m.gguf", "out"))
    assert first.encode("ab  12 ab") == second.encode("ab  12 ab")
    assert first.template == second.template


def test_mlx_settings_do_not_survive_in_a_folder(tmp_path: Path) -> None:
    w = Packed(
        np.ones((64, 16), np.uint8),
        np.ones((2, 16), np.uint8),
        np.ones((2, 16), np.float16),
        32,
        np.arange(64) // 32,
    )
    tensors = {f"m.{part}": array for part, array in packers.compressed_tensors(w).items()}
    nested = {"text_config": {"quantization_config": {"quant_method": "awq"}, "x": 1}, "quantization": {"old": 1}}
    config = {"quantization_config": packers.compressed_tensors_config(w), "a": 2, **nested}
    convert(str(save_folder(tmp_path / "in", tensors, config)), tmp_path / "out", "gptq")
    table = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {**table, "quantization_config": 0} == {"a": 2, "text_config": {"x": 1}, "quantization_config": 0}
    assert read(tmp_path / "out").format_name == "gptq v2"


def one_module(path: Path, group_size: int, *, order: bool = False, name: str = "m", n: int = 16) -> Contents:
    k = 2 * group_size
    g_idx = np.arange(k)[::-1] // group_size if order else np.arange(k) // group_size
    w = Packed(np.ones((k, n), np.uint8), np.ones((2, n), np.uint8), np.ones((2, n), np.float16), group_size, g_idx)
    config = {"quant_method": "gptq", "bits": 4, "group_size": group_size, "checkpoint_format": "gptq_v2"}
    tensors = {f"{name}.{part}": array for part, array in packers.gptq(w, 2).items()}
    return read(save_folder(path, tensors, {"quantization_config": config}))


def test_gguf_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"module 'm': expected a group size that is a multiple of 32 .*, got 16"):
        write_gguf(tmp_path / "m.gguf", one_module(tmp_path / "a", 16), {})
    with pytest.raises(ValueError, match=r"module 'm': expected no activation order for gguf, got one"):
        write_gguf(tmp_path / "m.gguf", one_module(tmp_path / "b", 32, order=True), {})
    flags = Contents({"t": Tensor(np.ones((2, 2), np.bool_), tmp_path)}, "", "")
    with pytest.raises(ValueError, match=r"t: expected a float or int tensor of 1 to 4 axes, got bool \[2, 2\]"):
        write_gguf(tmp_path / "m.gguf", flags, {})
    heads = {"general.architecture": "llama", "llama.attention.head_count": 3}
    q = one_module(tmp_path / "c", 32, name="model.layers.0.self_attn.q_proj")
    with pytest.raises(ValueError, match=r"q_proj: expected rows in multiples of 6, got 16"):
        write_gguf(tmp_path / "m.gguf", q, heads)
    gap = one_module(tmp_path / "d", 32, name="model.layers.0.mlp.experts.1.up_proj")
    with pytest.raises(ValueError, match=r"ffn_up_exps\.weight: expected experts 0 to 0, got none number 0"):
        write_gguf(tmp_path / "m.gguf", gap, {})
    assert not list(tmp_path.glob("*.gguf*"))


def test_experts_become_one_tensor(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors: dict[str, Array] = {}
    for expert in range(3):
        codes = rng.integers(0, 16, (64, 8), dtype=np.uint8)
        w = Packed(codes, np.full((2, 8), 8, np.uint8), np.ones((2, 8), np.float16), 32, np.arange(64) // 32)
        at = f"model.layers.1.mlp.experts.{expert}.down_proj"
        tensors |= {f"{at}.{part}": array for part, array in packers.compressed_tensors(w).items()}
    config = {"quantization_config": packers.compressed_tensors_config(w)}
    contents = read(save_folder(tmp_path / "in", tensors, config))
    write_gguf(tmp_path / "m.gguf", contents, {})
    assert container.read(tmp_path / "m.gguf")[1]["blk.1.ffn_down_exps.weight"].shape == (3, 8, 64)
    again = read(tmp_path / "m.gguf")
    assert sorted(again) == sorted(contents)
    for name in contents:
        np.testing.assert_array_equal(dense(again[name]), dense(contents[name]))


@given(st.data())
def test_metadata_is_read_as_it_was_written(data: st.DataObject) -> None:
    numbers = st.integers(-(2**63), 2**64 - 1) | st.booleans() | st.floats(allow_nan=False)
    values = numbers | st.text() | st.lists(st.text(), max_size=3)
    fields = data.draw(st.dictionaries(st.text(), values, max_size=4))
    fields["array"] = np.arange(3, dtype=data.draw(st.sampled_from(["<i4", "<f4", "<u2", "<f8"])))
    fields.pop("general.alignment", None)
    with tempfile.TemporaryDirectory() as folder:
        write_gguf(Path(folder) / "m.gguf", Contents({}, "", ""), fields)
        found = container.read(Path(folder) / "m.gguf")[0]
    assert found.pop("array").tolist() == fields.pop("array").tolist()
    assert found == fields


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["OUT", "--format", "exl2"], "invalid choice: 'exl2'"),
        (["OUT"], "--format: expected one of autoawq, compressed-tensors, gptq, gguf, ak48 for the folder"),
        (["OUT", "--format", "ak48"], "DST: expected a file name that ends in .ak48, got"),
        (["OUT.gguf", "--format", "gptq"], "DST: expected a folder for gptq, got"),
        (["FULL", "--format", "gptq"], "expected a new or empty folder, got one with files"),
        (["FILE", "--format", "gptq"], "expected a new or empty folder, got a file"),
        ([".", "--format", "gptq"], "expected a folder that can be replaced, got the current one"),
        (["OUT.gguf"], "group size that is a multiple of 32 for gguf, got 16"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    one_module(tmp_path / "in", 16)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    before = sorted(tmp_path.iterdir())
    places = {"OUT": "out", "OUT.gguf": "out.gguf", "FULL": "in", "FILE": "file"}
    given_ = [str(tmp_path / places[a]) if a in places else a for a in arguments]
    assert main(["convert", str(tmp_path / "in"), *given_]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_conversion_creates_folders_and_follows_a_link(tmp_path: Path) -> None:
    one_module(tmp_path / "in", 32)
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for out in (tmp_path / "a" / "b", tmp_path / "link"):
        assert main(["convert", str(tmp_path / "in"), str(out), "--format", "gptq"]) == 0
        assert (out / "model.safetensors").is_file()
    assert (tmp_path / "link").is_symlink()


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    one_module(tmp_path / "in", 16)
    (tmp_path / "in" / "config.json").write_text("{}")
    # GPTQ's two versions differ in what zero points mean, and checkpoint_format says which one a file has
    with pytest.raises(CheckpointError, match="checkpoint_format"):
        convert(str(tmp_path / "in"), tmp_path / "out", "autoawq")
    one_module(tmp_path / "in", 16, order=True)
    with pytest.raises(ValueError, match="expected no activation order for autoawq"):
        convert(str(tmp_path / "in"), tmp_path / "out", "autoawq")
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def test_rope_that_gguf_has_no_fields_for_is_refused() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}
    config = llm_models.decoder(rope_scaling=yarn)
    with pytest.raises(ValueError, match="rope_scaling: expected factor and original_max_position_embeddings alone"):
        gguf_metadata.describe_model(config)
    fields, divisors = gguf_metadata.describe_model(
        llm_models.decoder(rope_scaling={"rope_type": "yarn", "factor": 4.0})
    )
    assert divisors is None
    assert (fields["llama.rope.scaling.type"], fields["llama.rope.scaling.factor"]) == ("yarn", 4.0)
    assert math.isclose(fields["llama.rope.freq_base"], 10000)
