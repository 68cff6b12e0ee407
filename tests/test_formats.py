# SPDX-License-Identifier: Apache-2.0
"""Tests of checkpoints of every format: vectors by the formats' own packers, round trips, and refusals."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_awq import reference
from cupy_awq.checkpoint import CheckpointError, Module, experts, read, summarize
from cupy_awq.checkpoint.gguf.q4 import open_q4_k
from tests import packers
from tests.format_files import save_folder, save_torch
from tests.packers import Packed, offsets_of, round_once, weights

Array = npt.NDArray[Any]

_FILE = np.load(Path(__file__).parent / "formats_vectors.npz")
VECTORS = json.loads(_FILE["index"].tobytes())
DATA = _FILE["data"].tobytes()


def array_of(dtype: str, shape: list[int], offset: int) -> Array:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return np.frombuffer(DATA, kind, math.prod(shape), offset).reshape(shape)


def dense(module: Module) -> Array:
    """Return the dequantized weight W [K, N] of a module, whose row k belongs to column k of x in any order."""
    weight = module.weight
    values = reference.dequantize(weight.qweight, weight.scales, weight.qzeros)
    if module.order is None:
        return values
    out = np.empty_like(values)
    out[module.order] = values
    return out


def saved(tmp_path: Path, case: dict[str, Any]) -> Path:
    """Write the recorded checkpoint of a case, with the layer "m", as a folder or a .pt file; return its path."""
    tensors = {f"m.{name}": array_of(*where) for name, where in case["tensors"].items()}
    if case["format"] == "llm-awq-v2":
        return save_torch(tmp_path / "model-v2.pt", tensors)
    key = "quantization" if case["format"].startswith("mlx") else "quantization_config"
    return save_folder(tmp_path, tensors, {key: case["config"]})


@pytest.mark.parametrize("number", range(len(VECTORS)), ids=lambda i: f"{i}-{VECTORS[i]['format']}")
def test_modules_of_the_original_packers_dequantize_exactly(tmp_path: Path, number: int) -> None:
    case = VECTORS[number]
    if case["format"] == "gguf-q4_k":
        pending = open_q4_k(array_of(*case["tensors"]["data"]), "file")
        spec, module = pending.spec, pending.convert()
    else:
        contents = read(saved(tmp_path, case))
        assert list(contents) == ["m"]
        spec, module = contents.specs["m"], contents["m"]
    assert isinstance(module, Module)
    k, n = case["shape"]
    weight = module.weight
    assert weight.shape == (k, n) == (spec.k, spec.n)
    assert (weight.group_size, weight.spec.zeros, weight.dtype) == (spec.group_size, spec.zeros, spec.dtype)
    assert (module.order is not None) == spec.has_order
    found = dense(module)
    np.testing.assert_array_equal(found[:, :: case["step"]], array_of(*case["dense"]))
    assert hashlib.sha256((found + found.dtype.type(0)).tobytes()).hexdigest() == case["sha256"]


def assert_reads(tensors: dict[str, Array], config: dict[str, Any], wanted: Array, key: str = "m") -> Module:
    """Read a folder with the tensors of one module, check its dense weight and properties, and return the module."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_folder(Path(folder), {f"m.{name}": array for name, array in tensors.items()}, config)
        contents = read(path)
        module, spec = contents[key], contents.specs[key]
        assert isinstance(module, Module)
        found, weight = dense(module), module.weight
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == wanted.dtype
        assert (spec.k, spec.n, spec.group_size, spec.zeros) == (*weight.shape, weight.group_size, weight.spec.zeros)
        order_bytes = 0 if module.order is None else module.order.nbytes
        bias_bytes = 0 if module.bias is None else module.bias.nbytes
        assert spec.nbytes == weight.nbytes + bias_bytes + order_bytes
        return Module(weight, None if module.bias is None else module.bias.copy(), module.order)


@given(w=weights(ordered=True, ragged=True), version=st.sampled_from([1, 2]))
def test_gptq_round_trip_with_orders_and_short_groups(w: Packed, version: int) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": w.group_size, "meta": {"quantizer": ["gptqmodel:7"]}}
    config["checkpoint_format"] = {1: "gptq", 2: "gptq_v2"}[version]
    module = assert_reads(packers.gptq(w, version), {"quantization_config": config}, w.dense())
    assert (module.weight.qzeros is None) == w.is_symmetric
    assert (module.order is None) == bool((np.diff(w.g_idx) >= 0).all())


@given(w=weights())
def test_auto_round_packings_agree(w: Packed) -> None:
    config = {"quant_method": "auto-round", "bits": 4, "group_size": w.group_size, "sym": w.is_symmetric}
    wanted = w.dense()
    for packing, tensors in (
        ("auto_round:auto_gptq", packers.gptq(w, 1)),
        ("auto_round:gptqmodel", packers.gptq(w, 2)),
        ("auto_round", packers.gptq(w, 2)),
        ("auto_round:auto_awq", packers.awq_gemm(w)),
    ):
        assert_reads(tensors, {"quantization_config": {**config, "packing_format": packing}}, wanted)


@given(w=weights((32, 64, 128)))
def test_awq_gemv_round_trip(w: Packed) -> None:
    w = replace(w, scales=w.scales.astype(np.float16))
    config = {"quant_method": "awq", "version": "gemv", "bits": 4, "group_size": w.group_size}
    assert_reads(packers.awq_gemv(w), {"quantization_config": config}, w.dense())


@settings(max_examples=30)
@given(w=weights((64, 128)))
def test_awq_gemv_fast_round_trip(w: Packed) -> None:
    offsets = offsets_of(w)
    config = {"quant_method": "awq", "version": "gemv_fast", "bits": 4, "group_size": w.group_size}
    assert_reads(packers.awq_gemv_fast(w, offsets), {"quantization_config": config}, w.dense(offsets))


@given(w=weights(ordered=True, ragged=True), old_zeros=st.booleans())
def test_compressed_tensors_round_trip_with_old_zero_points_and_orders(w: Packed, old_zeros: bool) -> None:
    config = packers.compressed_tensors_config(w)
    tensors = packers.compressed_tensors(w, old_zeros=old_zeros)
    assert_reads(tensors, {"quantization_config": config}, w.dense())


@given(w=weights(), unconfigured=st.booleans())
def test_mlx_round_trip(w: Packed, unconfigured: bool) -> None:
    biases = offsets_of(w)
    config = {} if unconfigured else {"quantization": {"bits": 4, "group_size": w.group_size}}
    bias = np.arange(w.codes.shape[1]).astype(np.float16)
    module = assert_reads({**packers.mlx(w, biases), "bias": bias}, config, w.dense(biases))
    np.testing.assert_array_equal(module.bias, bias)


@given(w=weights(), as_floats=st.booleans(), is_integral=st.booleans())
def test_hqq_round_trip_with_integral_and_other_zero_points(w: Packed, as_floats: bool, is_integral: bool) -> None:
    if is_integral:
        zeros, wanted = w.zeros.astype(w.scales.dtype), w.dense()
    else:
        zeros = (w.zeros + 0.25).astype(w.scales.dtype)
        offsets = round_once(-zeros.astype(np.float64) * w.scales.astype(np.float64), w.scales.dtype)
        wanted = w.dense(offsets)
    tensors = packers.hqq(w, zeros, as_floats=as_floats)
    module = assert_reads(tensors, {"quantization_config": packers.HQQ_CONFIG}, wanted)
    assert (module.weight.spec.zeros == "packed") == is_integral


@given(blocks=st.integers(1, 3), rows=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_q4_k_round_trip_within_one_rounding_of_each_product(blocks: int, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    k, n = 256 * blocks, 8 * rows
    codes = rng.integers(0, 16, (k, n), dtype=np.uint8)
    d, dmin = (rng.standard_normal((n, blocks)).astype(np.float16) for _ in range(2))
    sc, m = (rng.integers(0, 64, (n, k // 32)) for _ in range(2))
    module = open_q4_k(packers.q4_k(codes, d, dmin, sc, m), "file").convert()
    assert isinstance(module, Module)
    scales = (np.repeat(d.astype(np.float64), 8, axis=1) * sc).T.astype(np.float16)
    offsets = (np.repeat(-dmin.astype(np.float64), 8, axis=1) * m).T.astype(np.float16)
    w = Packed(codes, codes, scales, 32, np.arange(k) // 32)
    np.testing.assert_array_equal(dense(module), w.dense(offsets))


@pytest.mark.parametrize("generation", ["first", "v1", "v2"])
def test_llm_awq_files_of_all_generations(tmp_path: Path, generation: str) -> None:
    rng = np.random.default_rng(0)
    k, n, group_size = 256, 16, 64
    codes = rng.integers(0, 16, (k, n), dtype=np.uint8)
    zeros = rng.integers(0, 16, (4, n), dtype=np.uint8)
    scales = rng.uniform(0.5, 1, (4, n)).astype(np.float16)
    w = Packed(codes, zeros, scales, group_size, np.arange(k) // group_size)
    wanted = w.dense()
    if generation == "v2":
        wanted = w.dense(offsets_of(w))
        tensors = packers.awq_gemv_fast(w, offsets_of(w), "scaled_zeros")
    else:
        tensors = packers.awq_gemm(w) if generation == "first" else packers.awq_gemv(w)
    named = {f"m.{name}": array for name, array in tensors.items()} | {"norm.weight": np.ones(3, np.float32)}
    contents = read(save_torch(tmp_path / "m.pt", named))
    module = contents["m"]
    assert isinstance(module, Module)
    assert module.weight.group_size == group_size
    np.testing.assert_array_equal(dense(module), wanted)
    np.testing.assert_array_equal(contents["norm.weight"].array, named["norm.weight"])


@pytest.mark.parametrize("default", [4, None], ids=["beside 4 bits", "alone"])
@pytest.mark.parametrize(("bits", "columns"), [(8, 16), (2, 16), (4, 12), (3, 16), (5, 16), (6, 16), (3, 12)])
def test_mlx_modules_of_other_widths_become_dense(tmp_path: Path, bits: int, columns: int, default: int | None) -> None:
    rng = np.random.default_rng(0)
    k, group_size = 64, 32
    codes = rng.integers(0, 2**bits, (k, columns), dtype=np.uint8)
    scales = rng.standard_normal((2, columns)).astype(ml_dtypes.bfloat16)
    w = Packed(codes, codes[:2], scales, group_size, np.arange(k) // group_size)
    biases = rng.standard_normal((2, columns)).astype(ml_dtypes.bfloat16)
    config: dict[str, Any] = {"bits": bits, "group_size": group_size}
    if default is not None:
        config = {"bits": default, "group_size": 64, "m": config, "n": False}
    tensors = {f"m.{name}": array for name, array in packers.mlx(w, biases, bits).items()}
    tensors["m.bias"] = np.ones(columns, np.float16)
    contents = read(save_folder(tmp_path, tensors, {"quantization": config}))
    assert list(contents) == ["m.weight", "m.bias"]
    np.testing.assert_array_equal(contents["m.weight"].array, w.dense(biases).T)


def test_folder_mixes_quantized_and_plain_modules(tmp_path: Path) -> None:
    w = some_weight()
    tensors = {f"a.m.{name}": array for name, array in packers.compressed_tensors(w).items()}
    plain = {"a.head.weight": np.ones((4, 3), ml_dtypes.bfloat16), "a.head.bias": np.ones(4, np.float32)}
    config = packers.compressed_tensors_config(w) | {"ignore": ["a.head", "re:.*x"]}
    contents = read(save_folder(tmp_path, tensors | plain, {"text_config": {"quantization_config": config}}))
    assert sorted(contents) == ["a.head.bias", "a.head.weight", "a.m"]
    assert contents.is_module("a.m")
    assert not contents.is_module("a.head.weight")
    assert contents.found.startswith("Format compressed-tensors: format 'pack-quantized' in ")
    summary = summarize(contents)
    assert (summary.format, summary.bits, summary.group_size, summary.symmetric, summary.act_order) == (
        *("compressed-tensors", 4, 16, False),
        False,
    )


def some_weight(group_size: int = 16, k: int = 64, n: int = 16, seed: int = 0) -> Packed:
    rng = np.random.default_rng(seed)
    groups = k // group_size
    codes = rng.integers(0, 16, (k, n), dtype=np.uint8)
    zeros = rng.integers(1, 16, (groups, n), dtype=np.uint8)
    scales = rng.standard_normal((groups, n)).astype(np.float16)
    return Packed(codes, zeros, scales, group_size, np.arange(k, dtype=np.int32) // group_size)


def test_fused_experts_are_read_and_stacked_one_by_one(tmp_path: Path) -> None:
    parts = [some_weight(32, seed=i) for i in range(3)]
    stacks = [packers.mlx(w, offsets_of(w)) for w in parts]
    tensors = {
        f"model.layers.0.mlp.switch_mlp.up_proj.{name}": np.stack([stack[name] for stack in stacks])
        for name in stacks[0]
    }
    contents = read(save_folder(tmp_path, tensors, {"quantization": {"bits": 4, "group_size": 32}}))
    assert list(contents) == [f"model.layers.0.mlp.experts.{i}.up_proj" for i in range(3)]
    for i, w in enumerate(parts):
        module = contents[f"model.layers.0.mlp.experts.{i}.up_proj"]
        assert isinstance(module, Module)
        np.testing.assert_array_equal(dense(module), w.dense(offsets_of(w)))
    stack = experts.stack(contents, "model.layers.0.mlp", "up_proj")
    assert stack.qweight.shape == (3, 64, 2)
    assert stack.qzeros is not None
    for i, w in enumerate(parts):
        found = reference.dequantize(stack.qweight[i], stack.scales[i], stack.qzeros[i])
        np.testing.assert_array_equal(found, w.dense(offsets_of(w)))


def test_stacked_experts_keep_their_own_orders(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    parts = [some_weight(seed=i) for i in range(2)]
    parts[1] = replace(parts[1], g_idx=rng.permutation(parts[1].g_idx))
    tensors = {
        f"e.experts.{i}.w1.{name}": array for i, w in enumerate(parts) for name, array in packers.gptq(w, 2).items()
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"}
    contents = read(save_folder(tmp_path, tensors, {"quantization_config": config}))
    stack = experts.stack(contents, "e", "w1")
    assert stack.order is not None
    np.testing.assert_array_equal(stack.order[0], np.arange(64))
    np.testing.assert_array_equal(parts[1].g_idx[stack.order[1]], np.arange(64) // 16)


def test_missing_and_odd_experts_are_named(tmp_path: Path) -> None:
    parts = {0: some_weight(), 2: some_weight(), 3: some_weight(32)}
    tensors = {
        f"l.experts.{i}.up.{name}": array for i, w in parts.items() for name, array in packers.awq_gemm(w).items()
    }
    contents = read(save_folder(tmp_path, tensors, {}))
    with pytest.raises(CheckpointError, match=r"'l\.experts\.1\.up': expected a quantized expert, got none"):
        experts.stack(contents, "l", "up")
    with pytest.raises(CheckpointError, match=r"'l\.experts\.3\.up': expected .*group_size=16, .* got .*group_size=32"):
        experts.stack({"l.experts.1.up": contents["l.experts.2.up"], **contents}, "l", "up")
    for index in (10**8, "9" * 5000):
        with pytest.raises(CheckpointError, match="module 'l': expected at most 131072 modules and tensors"):
            experts.stack({f"l.experts.{index}.up": contents["l.experts.2.up"], **contents}, "l", "up")
