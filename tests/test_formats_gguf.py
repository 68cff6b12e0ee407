# SPDX-License-Identifier: Apache-2.0
"""Tests of GGUF checkpoints: 4-bit types stay packed, others have the values of the package gguf."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import gguf
import gguf.constants
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupy_awq import load, reference
from cupy_awq.checkpoint import CheckpointError, Contents, Module, ModuleSpec, Tensor, files, read, save, summarize
from cupy_awq.checkpoint.gguf import container, dense
from cupy_awq.checkpoint.gguf.container import Blocks
from cupy_awq.checkpoint.gguf.write import write_gguf
from cupy_awq.checkpoint.module import Pending
from cupy_awq.tools.command_line import main

Array = npt.NDArray[Any]


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> Array:
    """Return rows of random blocks whose scales are small finite numbers."""
    _, values, size = next(entry for entry in container.TYPES.values() if entry[0] == kind)
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    for start in {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q4_1": [0, 2], "Q5_1": [0, 2]}.get(kind, [0]):
        scales = rng.standard_normal(data.shape[:2]).astype(np.float16)
        data[..., start : start + 2] = scales[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def values_of(data: Array, kind: str) -> Array:
    values: Array = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return values


def write(path: Path, tensors: dict[str, tuple[str, Array]], **metadata: int) -> Path:
    """Write a GGUF file of tensors, given as (type, rows of blocks) or as ("F32", float32 values); return its path."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_uint32(f"llama.{key.replace('__', '.')}", value)
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


HEADS = {"attention__head_count": 4, "attention__head_count_kv": 2}


def test_block_sizes_are_those_of_the_package() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
    assert all(theirs[kind] == entry for kind, entry in container.TYPES.items() if kind in theirs)


@pytest.mark.parametrize("kind", [*dense.CONVERTERS, "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS"])
def test_dense_values_are_those_of_the_package(kind: str) -> None:
    data = random_blocks(kind, 5, 512)
    wanted = values_of(data, kind)
    found = dense.read_values(Blocks(kind, (5, 512), data), "file")
    assert found.dtype == np.float16
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, wanted.astype(np.float16))


def test_types_that_numpy_has_are_read_without_a_cast(tmp_path: Path) -> None:
    """Tensors of bfloat16 and integers keep their values: as float16, 1e5 would become infinite and 3e-9 zero."""
    brain = np.array([[1e5, 3e-9, -1, 0.01]] * 8, ml_dtypes.bfloat16)
    integers = {f"i{bits}": np.array([-1, 2, 100], f"int{bits}") for bits in (8, 16, 32, 64)}
    tensors = {name: (name.upper(), array) for name, array in integers.items()}
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    }
    tensors |= {name: ("BF16", brain.view(np.uint8)) for name in names}
    contents = read(write(tmp_path / "m.gguf", tensors, **HEADS))
    write_gguf(tmp_path / "again.gguf", contents, {})
    for found in (contents, read(tmp_path / "again.gguf")):
        for name, array in integers.items():
            assert found.read(name).dtype == array.dtype
            np.testing.assert_array_equal(found.read(name), array)
        for name in names.values():
            assert found.dense_form(name) == ((8, 4), brain.dtype)
            assert found.read(name).tobytes() == brain.tobytes()
    assert summarize(contents).roundings == {}


def test_dense_tensors_of_any_rank_have_their_form_before_and_after_writing(tmp_path: Path) -> None:
    data = random_blocks("Q8_0", 6, 64)
    vector = random_blocks("Q8_0", 1, 64)[0]
    tensors = {"cube": ("Q8_0", data.reshape(3, 2, -1)), "vector.weight": ("Q8_0", vector)}
    contents = read(write(tmp_path / "m.gguf", tensors, **HEADS))
    assert contents.specs["cube"].n == 6
    write_gguf(tmp_path / "again.gguf", contents, {})
    again = read(tmp_path / "again.gguf")
    for name, shape in (("cube", (3, 2, 64)), ("vector.weight", (64,))):
        assert contents.dense_form(name) == (shape, np.float16)
        assert again.read(name).shape == shape
        np.testing.assert_array_equal(again.read(name), contents.read(name))
    awq = {"blk.0.ffn_up.weight": ("Q4_0", random_blocks("Q4_0", 8, 32))}
    save(tmp_path / "out", read(write(tmp_path / "m4.gguf", tensors | awq, **HEADS)), "gptq")
    # Neither tensor is a dense linear layer, so no rule says that one is not quantized.
    assert '"dynamic": {}' in (tmp_path / "out" / "config.json").read_text()


def test_tensor_of_another_size_than_its_header_says_is_not_written(tmp_path: Path) -> None:
    spec = ModuleSpec(4, 4, 4, "symmetric", np.dtype(np.float16), bits=8)
    wrong = Pending(spec, lambda: Tensor(np.ones((2, 4), np.float16), tmp_path), is_dense=True)
    with pytest.raises(ValueError, match="t: expected 32 bytes in the file, got 16"):
        write_gguf(tmp_path / "m.gguf", Contents({"t": wrong}, "", "gguf"), {})
    assert not list(tmp_path.iterdir())


def test_load_gives_hugging_face_names_layers_and_dense_tensors(tmp_path: Path) -> None:
    tensors = {
        "token_embd.weight": ("Q6_K", random_blocks("Q6_K", 24, 256)),
        "output_norm.weight": ("F32", np.ones(256, np.float32)),
        "blk.3.attn_q.weight": ("Q4_K", random_blocks("Q4_K", 64, 256)),
        "blk.3.attn_q.bias": ("F32", np.arange(64, dtype=np.float32)),
        "blk.3.attn_k.weight": ("Q5_0", random_blocks("Q5_0", 32, 256)),
        "blk.3.ffn_down.weight": ("Q4_0", random_blocks("Q4_0", 16, 96)),
        "blk.3.ffn_up.weight": ("Q4_1", random_blocks("Q4_1", 12, 96)),
        "rope_freqs.weight": ("F32", np.ones(8, np.float32)),
    }
    path = write(tmp_path / "m.gguf", tensors, **HEADS)
    contents = read(path)
    assert list(contents) == [
        *("model.embed_tokens.weight", "model.norm.weight", "model.layers.3.self_attn.q_proj"),
        *(
            "model.layers.3.self_attn.k_proj.weight",
            "model.layers.3.mlp.down_proj",
            "model.layers.3.mlp.up_proj.weight",
        ),
        "rope_freqs.weight",
    ]
    q = contents["model.layers.3.self_attn.q_proj"]
    assert isinstance(q, Module)
    order = np.arange(64).reshape(4, 8, 2).swapaxes(1, 2).reshape(-1)
    wanted = values_of(tensors["blk.3.attn_q.weight"][1], "Q4_K")[order].T
    found = reference.dequantize(q.weight.qweight, q.weight.scales, q.weight.qzeros, dtype=np.float32)
    bound = 2.0**-11 * (15 * np.abs(q.weight.scales.astype(np.float64)) + np.abs(q.weight.qzeros.astype(np.float64)))
    assert (np.abs(found - wanted) <= np.repeat(1.01 * bound, 32, axis=0) + 1e-6).all()
    np.testing.assert_array_equal(q.bias, order)
    down = contents["model.layers.3.mlp.down_proj"]
    assert isinstance(down, Module)
    found = reference.dequantize(down.weight.qweight, down.weight.scales, None, dtype=np.float32)
    np.testing.assert_array_equal(found, values_of(tensors["blk.3.ffn_down.weight"][1], "Q4_0").T)
    k = contents["model.layers.3.self_attn.k_proj.weight"]
    assert isinstance(k, Tensor)
    order = np.arange(32).reshape(2, 8, 2).swapaxes(1, 2).reshape(-1)
    np.testing.assert_array_equal(
        k.array, values_of(tensors["blk.3.attn_k.weight"][1], "Q5_0")[order].astype(np.float16)
    )
    summary = summarize(contents)
    assert (summary.format, summary.bits, summary.group_size) == ("gguf", 4, 32)
    assert summary.exceptions["model.embed_tokens.weight"].startswith("6 bits")
    layers = load(path, device="cpu")
    assert layers["model.layers.3.mlp.down_proj"].shape == (96, 16)
    assert repr(layers).startswith("Checkpoint(2 quantized modules, 5 other tensors")


@pytest.mark.parametrize("part", ["d", "dmin"])
def test_scales_beyond_float16_make_the_weight_dense_with_one_warning(tmp_path: Path, part: str) -> None:
    data = random_blocks("Q4_K", 8, 512).reshape(8, 2, 144)
    data[:, :, 4:16] = 0xFF  # all 6-bit scales and minima get the largest value, 63
    start = {"d": 0, "dmin": 2}[part]
    # In float16, 63 * 1040 is infinite.
    largest = np.array([1039, 1040], np.float16).view(np.uint8).reshape(2, 2)
    data[:, 0, start : start + 2] = largest[0]
    packed, dense = data.copy(), data
    dense[5, 1, start : start + 2] = largest[1]
    tensors = {
        "blk.0.ffn_up.weight": ("Q4_K", packed.reshape(8, -1)),
        "blk.0.ffn_down.weight": ("Q4_K", dense.reshape(8, -1)),
        "blk.0.ffn_down.bias": ("F32", np.ones(8, np.float32)),
        "blk.0.attn_q.weight": ("Q4_K", dense.reshape(8, -1)),
    }
    write(tmp_path / "m.gguf", tensors, attention__head_count=1, attention__head_count_kv=1)
    with pytest.warns(
        UserWarning, match=r"ffn_down.*beyond the range of float16.*dense bfloat16 \(2 modules\)"
    ) as caught:
        contents = read(tmp_path / "m.gguf")
    assert len(caught) == 1
    assert isinstance(contents["model.layers.0.mlp.up_proj"], Module)
    weight = contents.read("model.layers.0.mlp.down_proj.weight")
    assert weight.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(weight, values_of(dense.reshape(8, -1), "Q4_K").astype(ml_dtypes.bfloat16))
    assert contents.read("model.layers.0.mlp.down_proj.bias").sum() == 8
    order = np.arange(8).reshape(1, 4, 2).swapaxes(1, 2).reshape(-1)
    np.testing.assert_array_equal(contents.read("model.layers.0.self_attn.q_proj.weight"), weight[order])
    assert "Q4_K to dense bfloat16" in summarize(contents).roundings


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    data = random_blocks("Q4_K", 8, 256).reshape(8, 1, 144)
    data[2, 0, 0:2] = np.array([value], np.float16).view(np.uint8)
    contents = read(write(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": ("Q4_K", data.reshape(8, -1))}, **HEADS))
    with pytest.raises(CheckpointError, match=r"ffn_up\.weight.*: d \* sc: expected finite"):
        contents["model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize(
    ("kind", "bias", "message"),
    [
        ("F64", np.ones(8), r"expected float16 or bfloat16 or float32 \[N\] = \[8\], got float64 \[8\]"),
        ("I32", np.ones(8, np.int32), r"got int32 \[8\]"),
        ("F32", np.ones(7, np.float32), r"got float32 \[7\]"),
        ("F32", np.full(8, np.nan, np.float32), "expected finite values, got NaN or infinity"),
        ("F16", np.full(8, np.inf, np.float16), "expected finite values, got NaN or infinity"),
    ],
)
def test_biases_that_no_layer_can_add_are_refused(tmp_path: Path, kind: str, bias: Array, message: str) -> None:
    tensors = {"blk.0.attn_q.weight": ("Q4_0", random_blocks("Q4_0", 8, 32)), "blk.0.attn_q.bias": (kind, bias)}
    with pytest.raises(CheckpointError, match=rf"m\.gguf: tensor 'blk\.0\.attn_q\.weight': bias: .*{message}"):
        read(write(tmp_path / "m.gguf", tensors, **HEADS))


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    tensors = {name: ("F32", np.ones(4096, np.float32)) for name in ("first", "other")}
    path = write(tmp_path / "m.gguf", tensors, **HEADS)
    content = path.read_bytes()
    offset = (4 * 4096).to_bytes(8, "little")
    assert content.count(offset) == 1
    path.write_bytes(content.replace(offset, bytes(8)))  # both tensors now begin at the first byte of the data
    # Overlapping tensors are accepted as long as their total size fits in the file.
    assert sorted(read(path)) == ["first", "other"]
    path.write_bytes(content.replace(offset, bytes(8))[: -4 * 4096])
    with pytest.raises(CheckpointError, match=r"m\.gguf: expected tensors that do not overlap, got 32768 bytes in"):
        read(path)


def test_number_of_experts_and_tensors_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"blk.0.ffn_up_exps.weight": ("F32", np.ones((9, 1, 1), np.float32))}
    vectors = {f"v{i}": ("F32", np.ones(1, np.float32)) for i in range(9)}
    for name, tensors in (("experts", experts), ("vectors", vectors)):
        path = write(tmp_path / f"{name}.gguf", tensors, **HEADS)
        monkeypatch.setattr(files, "MAX_MODULES", 9)
        assert len(read(path)) == 9
        monkeypatch.setattr(files, "MAX_MODULES", 8)
        with pytest.raises(CheckpointError, match=rf"{name}\.gguf.*: expected at most 8 modules and tensors, got 9"):
            read(path)


def test_summary_of_groups_and_zero_points_is_that_of_4_bit_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {
        "blk.0.ffn_up.weight": ("Q4_1", random_blocks("Q4_1", 8, 512)),
        "blk.0.ffn_gate.weight": ("Q4_1", random_blocks("Q4_1", 8, 512)),
        "blk.0.ffn_down.weight": ("Q6_K", random_blocks("Q6_K", 8, 512)),
    }
    path = write(tmp_path / "m.gguf", tensors, **HEADS)
    summary = summarize(read(path))
    assert (summary.bits, summary.group_size, summary.symmetric) == (4, 32, False)
    assert summary.exceptions == {"model.layers.0.mlp.down_proj.weight": "6 bits"}
    assert main(["info", str(path)]) == 0
    assert "\n4 bits, group size 32, asymmetric\n" in capsys.readouterr().out
    path = write(tmp_path / "dense.gguf", {"output.weight": tensors["blk.0.ffn_down.weight"]}, **HEADS)
    assert main(["info", str(path)]) == 0
    assert "\n6 bits, all read as dense tensors\n" in capsys.readouterr().out
    path = write(tmp_path / "plain.gguf", {"blk.0.attn_q.weight": ("F16", np.zeros((64, 1024), np.uint8))}, **HEADS)
    assert main(["info", str(path)]) == 0
    assert "\nno quantized tensors\n" in capsys.readouterr().out


def test_convert_prints_what_reading_has_rounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {
        "blk.0.ffn_up.weight": ("Q4_0", random_blocks("Q4_0", 8, 256)),
        "blk.0.ffn_down.weight": ("Q6_K", random_blocks("Q6_K", 8, 256)),
    }
    path = write(tmp_path / "m.gguf", tensors, **HEADS)
    # a file without an architecture holds layers but no model
    path.write_bytes(path.read_bytes().replace(b"general.architecture", b"general.architectura"))
    assert main(["convert", str(path), str(tmp_path / "out"), "--format", "gptq"]) == 0
    assert capsys.readouterr().err == "rounded: Q6_K to dense float16 (1 module)\n"
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "again"), "--format", "autoawq"]) == 0
    assert capsys.readouterr().err == ""


def test_experts_have_a_key_each(tmp_path: Path) -> None:
    data = random_blocks("Q4_K", 3 * 8, 256).reshape(3, 8, -1)
    router = np.ones((3, 256), np.float32)
    tensors = {"blk.0.ffn_up_exps.weight": ("Q4_K", data), "blk.0.ffn_gate_inp.weight": ("F32", router)}
    contents = read(write(tmp_path / "m.gguf", tensors, **HEADS))
    names = [f"model.layers.0.mlp.experts.{i}.up_proj" for i in range(3)]
    assert list(contents) == [*names, "model.layers.0.mlp.gate.weight"]
    for i, name in enumerate(names):
        module = contents[name]
        assert isinstance(module, Module)
        found = reference.dequantize(module.weight.qweight, module.weight.scales, module.weight.qzeros)
        np.testing.assert_allclose(found.T, values_of(data[i], "Q4_K"), rtol=0.02, atol=0.3)


@pytest.mark.parametrize("heads", [None, 0, 5])
def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path: Path, heads: int | None) -> None:
    metadata = {} if heads is None else {"attention__head_count": heads}
    tensors = {"blk.0.attn_q.weight": ("Q4_0", random_blocks("Q4_0", 64, 64))}
    with pytest.raises(CheckpointError, match=r"m\.gguf: .*expected (a positive integer|rows in multiples of 10)"):
        read(write(tmp_path / "m.gguf", tensors, **metadata))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_of_the_file_is_one_error_or_readable(tmp_path: Path, data: st.DataObject) -> None:
    if not (tmp_path / "whole.gguf").exists():
        tensors = {
            "blk.0.attn_q.weight": ("Q4_K", random_blocks("Q4_K", 8, 256)),
            "blk.0.ffn_up_exps.weight": ("Q4_0", random_blocks("Q4_0", 16, 32).reshape(2, 8, -1)),
            "output.weight": ("Q6_K", random_blocks("Q6_K", 8, 256)),
        }
        write(tmp_path / "whole.gguf", tensors, **HEADS)
    content = bytearray((tmp_path / "whole.gguf").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, 600))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(4, len(content)) | st.just(len(content))) :]
    (tmp_path / "m.gguf").write_bytes(content)
    with contextlib.suppress(CheckpointError):
        contents = read(tmp_path / "m.gguf")
        for name in contents:
            assert contents[name] is not None
