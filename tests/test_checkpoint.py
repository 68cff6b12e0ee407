# SPDX-License-Identifier: Apache-2.0
"""Tests of `cupy_awq.load`: supported files, lazy reading without copies, and the checkpoint in the package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save_file

import cupy_awq
from cupy_awq import AwqLinear, CheckpointError, PackedWeight, load
from cupy_awq.checkpoint import Module, ModuleSpec, detect, safetensors
from cupy_awq.checkpoint.autoawq import AutoAwq
from cupy_awq.checkpoint.module import Pending
from cupy_awq.checkpoint.module_tensors import SCALES, ModuleTensors
from cupy_awq.runtime import placement
from cupy_awq.tools import testing
from cupy_awq.tools.demo import SMOLLM2_MLP
from tests.checkpoint_files import CONFIG, G, K, N, Tensors, entry, folder, module, raw, sharded


def assert_right(layer: Any, tensors: Tensors, name: str) -> None:
    """Check a layer against the tensors that were written to the file, not against the layer's own weight."""
    weight = cupy_awq.PackedWeight(*(tensors.get(f"{name}.{part}") for part in ("qweight", "scales", "qzeros")))
    x = testing.random_activations(np.random.default_rng(1), 3, weight.shape[0])
    assert isinstance(layer, AwqLinear)
    assert testing.relative_error(layer(x), x, weight) < 5e-4


def test_folder_gives_layers_that_compute_and_the_other_tensors(tmp_path: Path) -> None:
    tensors = module("a.b") | {"norm.weight": np.arange(K, dtype=np.float32)}
    layers = load(folder(tmp_path, tensors), device="cpu")
    assert sorted(layers) == ["a.b", "norm.weight"]
    assert_right(layers["a.b"], tensors, "a.b")
    np.testing.assert_array_equal(layers["norm.weight"], tensors["norm.weight"])


def test_group_size_of_a_single_file_comes_from_the_shapes(tmp_path: Path) -> None:
    tensors = module("a", g=16)
    save_file(tensors, tmp_path / "any.name")
    layers = load(str(tmp_path / "any.name"), device="cpu")
    assert layers["a"].group_size == 16
    assert_right(layers["a"], tensors, "a")


def test_module_spread_over_shards_is_assembled(tmp_path: Path) -> None:
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
    with pytest.raises(
        CheckpointError, match=rf"expected the layout of awq gemv .version 'GEMV' in .*{file}., got .*awq gemm"
    ):
        load(tmp_path, device="cpu")


def test_newer_configuration_wins_over_an_older_file_beside_it(tmp_path: Path) -> None:
    folder(tmp_path, module("a"))
    (tmp_path / "quant_config.json").write_text('{"w_bit": 3, "version": "GEMV"}')
    assert len(load(tmp_path, device="cpu")) == 1


def test_unquantized_folder_without_a_configuration_gives_its_tensors(tmp_path: Path) -> None:
    save_file({"t": np.ones(3, np.float16)}, tmp_path / "weights.safetensors")
    assert load(tmp_path, device="cpu")["t"].tolist() == [1, 1, 1]


def test_a_format_that_a_configuration_names_needs_entries_of_two_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Transposed(AutoAwq):
        name = "transposed"

        def open_module(self, tensors: ModuleTensors) -> Pending:
            scales = np.ascontiguousarray(tensors.matrix("scales", SCALES, "[N, K/G]").T)
            weight = PackedWeight(tensors.raw("qweight"), scales, tensors.raw("qzeros"))
            spec = ModuleSpec(*weight.shape, weight.group_size, weight.spec.zeros, weight.dtype)
            return Pending(spec, lambda: Module(weight, None))

    monkeypatch.setitem(detect.METHODS, "transposed", lambda tensors, table, where: (Transposed(), "quant_method"))
    monkeypatch.setitem(detect.SHAPE_CHECKS, "transposed", lambda codes, scales: 8 * codes[1] == scales[0])
    tensors = module("a")
    transposed = tensors | {"a.scales": np.ascontiguousarray(tensors["a.scales"].T)}
    layers = load(folder(tmp_path, transposed, CONFIG | {"quant_method": "transposed"}), device="cpu")
    assert_right(layers["a"], tensors, "a")


def test_another_group_size_than_the_argument_says_is_refused(tmp_path: Path) -> None:
    save_file(module("a"), tmp_path / "f")
    message = "group_size: expected 16 as in the argument group_size, got 32 from the shapes"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "f", device="cpu", group_size=16)


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


def test_nothing_is_copied_on_the_cpu(tmp_path: Path) -> None:
    layers = load(folder(tmp_path, module("a") | {"t": np.ones(3, np.float32)}), device="cpu")
    weight = layers["a"].weight
    for array in (weight.qweight, weight.scales, weight.qzeros, layers["t"]):
        assert not array.flags.owndata
        assert not array.flags.writeable


def test_tensor_larger_than_memory_loads_because_nothing_is_read(tmp_path: Path) -> None:
    k, words = 1 << 20, 1 << 14
    nbytes = 4 * k * words  # a sparse file of 64 GiB: it must be mapped, not read
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


def test_repeated_access_returns_the_same_object(tmp_path: Path) -> None:
    layers = load(folder(tmp_path, module("a") | {"t": np.ones(3, np.float32)}), device="cpu")
    assert layers["a"] is layers["a"]
    assert layers["t"] is dict(layers)["t"]


def test_listing_a_checkpoint_places_nothing_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "to_device", lambda array, index: pytest.fail("a tensor was placed"))
    layers = load(folder(tmp_path, module("a")), device="cpu")
    assert "a" in layers
    assert "b" not in layers
    assert list(layers) == ["a"]
    assert repr(layers).startswith("Checkpoint(1 quantized modules, 0 other tensors, CPU")
    with pytest.raises(KeyError, match="'b'"):
        layers["b"]


def test_layer_computes_on_unaligned_tensors(tmp_path: Path) -> None:
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


def test_shipped_folder_is_small_and_holds_the_three_layers() -> None:
    files = {file.name: file.stat().st_size for file in SMOLLM2_MLP.iterdir()}
    assert files.keys() == {"config.json", "model.safetensors", "NOTICE"}
    assert sum(files.values()) < 2_000_000
    shapes = {name.rpartition(".")[2]: layer.shape for name, layer in load(SMOLLM2_MLP, device="cpu").items()}
    assert shapes == {"gate_proj": (576, 1536), "up_proj": (576, 1536), "down_proj": (1536, 576)}


def test_shipped_folder_names_its_origin_and_license() -> None:
    notice = (SMOLLM2_MLP / "NOTICE").read_text()
    assert re.search(r"SmolLM2-135M-Instruct.*HuggingFaceTB.*Apache License, Version 2\.0", notice, re.DOTALL)


@pytest.mark.gpu
@pytest.mark.parametrize("device", [None, 0, "cupy"])
def test_layers_compute_on_the_gpu_they_were_loaded_to(device: Any) -> None:
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
