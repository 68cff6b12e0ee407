# SPDX-License-Identifier: Apache-2.0
"""Tests of files that are refused: one error that names file, module, key and value."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupy_awq import load
from cupy_awq.checkpoint import CheckpointError, read
from cupy_awq.checkpoint.gguf.q4 import open_q4_k
from tests import packers
from tests.checkpoint_files import check_refusal
from tests.format_files import save_folder
from tests.packers import Packed

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

K, N, G = 64, 16, 32
RNG = np.random.default_rng(0)
WEIGHT = Packed(
    RNG.integers(0, 16, (K, N), dtype=np.uint8),
    RNG.integers(1, 16, (2, N), dtype=np.uint8),
    RNG.standard_normal((2, N)).astype(np.float16),
    G,
    np.arange(K, dtype=np.int32) // G,
)
OFFSETS = RNG.standard_normal((2, N)).astype(np.float16)

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": G, "checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": G, "version": "gemm"}
GEMV = AWQ | {"version": "gemv"}
FAST = AWQ | {"version": "gemv_fast"}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": G, "packing_format": "auto_round"}
COMPRESSED = packers.compressed_tensors_config(WEIGHT)
MLX = {"bits": 4, "group_size": G}
HQQ = packers.HQQ_CONFIG


def tensors_of(config: dict[str, Any]) -> Tensors:
    """Return the tensors of module "a.m" in the format of a configuration."""
    method = config.get("quant_method")
    if method == "compressed-tensors":
        tensors = packers.compressed_tensors(WEIGHT)
    elif method == "hqq":
        tensors = packers.hqq(WEIGHT, WEIGHT.zeros.astype(np.float16))
    elif method in ("gptq", "auto-round"):
        tensors = packers.gptq(WEIGHT, 2)
    elif method is None:
        tensors = packers.mlx(WEIGHT, OFFSETS)
    else:
        version = {"gemm": packers.awq_gemm, "gemv": packers.awq_gemv}
        fast = config["version"] == "gemv_fast"
        tensors = packers.awq_gemv_fast(WEIGHT, OFFSETS) if fast else version[config["version"]](WEIGHT)
    return {f"a.m.{name}": array for name, array in tensors.items()}


def refused(path: Path, tensors: Tensors, config: dict[str, Any], *fragments: str) -> None:
    key = "quantization" if "quant_method" not in config else "quantization_config"
    check_refusal(read, save_folder(path, tensors, {key: config}), *fragments)


@pytest.mark.parametrize("config", [GPTQ, AWQ, GEMV, FAST, ROUND, COMPRESSED, MLX, HQQ], ids=str)
def test_files_of_this_module_load_before_they_are_changed(tmp_path: Path, config: dict[str, Any]) -> None:
    key = "quantization" if "quant_method" not in config else "quantization_config"
    assert list(read(save_folder(tmp_path, tensors_of(config), {key: config}))) == ["a.m"]


def compressed(**changes: Any) -> dict[str, Any]:
    """Return the configuration COMPRESSED with changed settings for the weights of its only group."""
    group = COMPRESSED["config_groups"]["group_0"]
    return COMPRESSED | {"config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


def compressed_group(**changes: Any) -> dict[str, Any]:
    """Return the configuration COMPRESSED with changed settings of its only group."""
    return COMPRESSED | {"config_groups": {"group_0": {**COMPRESSED["config_groups"]["group_0"], **changes}}}


@pytest.mark.parametrize(
    ("config", "fragments"),
    [
        *[
            (base | {"bits": bits}, ["bits: expected 4", f"got {bits}"])
            for base in (GPTQ, AWQ, ROUND)
            for bits in (2, 3, 8)
        ],
        (GPTQ | {"bits": "Q4_K_M"}, ["bits", "'Q4_K_M'"]),
        (GPTQ | {"checkpoint_format": "marlin"}, ["checkpoint_format", "'marlin'", "convert"]),
        (GPTQ | {"checkpoint_format": "gptq_p"}, ["checkpoint_format", "'gptq_p'"]),
        (GPTQ | {"is_marlin_format": True}, ["is_marlin_format", "True", "convert"]),
        (GPTQ | {"pack_dtype": "int16"}, ["pack_dtype", "'int16'"]),
        (GPTQ | {"group_size": 0}, ["group_size", "got 0"]),
        (GPTQ | {"dynamic": {r".*\.m": {"bits": 8}}}, ["module 'a.m'", "dynamic", "got 8"]),
        (GPTQ | {"dynamic": {r"+:a\.": {"bits": 3}, r".*\.m": {"bits": 4}}}, ["module 'a.m'", "dynamic", "got 3"]),
        (GPTQ | {"dynamic": {"(": {"bits": 8}}}, ["dynamic", "regular expression"]),
        (GPTQ | {"dynamic": {"a" * 501: {"bits": 8}}}, ["dynamic", "at most 500"]),
        (GPTQ | {"dynamic": [1]}, ["dynamic", "[1]"]),
        (AWQ | {"version": "marlin"}, ["version", "'marlin'"]),
        (ROUND | {"extra_config": {"a.m": {"bits": 8}}}, ["module 'a.m'", "extra_config", "got 8"]),
        (ROUND | {"extra_config": {"a.m": {"group_size": 16}}}, ["module 'a.m'", "scales", "[4, 16]", "[2, 16]"]),
        (ROUND | {"packing_format": "auto_round:llm_compressor"}, ["packing_format", "'auto_round:llm_compressor'"]),
        (ROUND | {"data_type": "mx_fp"}, ["data_type", "'mx_fp'"]),
        (ROUND | {"act_bits": 8}, ["act_bits", "got 8"]),
        (compressed(num_bits=8), ["num_bits: expected 4", "got 8"]),
        (compressed(num_bits=None), ["num_bits: expected 4", "got None"]),
        (compressed(type="float"), ["type", "'float'"]),
        (compressed(strategy="block"), ["strategy", "'block'"]),
        (compressed(strategy=None, group_size=None), ["strategy", "'tensor'"]),
        (compressed(group_size=16), ["module 'a.m'", "weight_scale", "[16, 4]", "[16, 2]"]),
        (compressed(symmetric=True), ["module 'a.m'", "weight_zero_point", "symmetric is true"]),
        (compressed_group(input_activations={"num_bits": 8}), ["input_activations", "'num_bits': 8"]),
        (compressed_group(output_activations={"num_bits": 8}), ["output_activations"]),
        (compressed_group(format="nvfp4-pack-quantized"), ["format", "'nvfp4-pack-quantized'"]),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, ["format", "'nvfp4-pack-quantized'"]),
        (COMPRESSED | {"quantization_status": "frozen"}, ["quantization_status", "'frozen'"]),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config", "'sparse-24-bitmask'"]),
        (COMPRESSED | {"transform_config": {"config_groups": {"R1": 1}}}, ["transform_config", "R1"]),
        (COMPRESSED | {"config_groups": {"W8A16": ["Linear"]}}, ["config_groups", "'W8A16'"]),
        (COMPRESSED | {"config_groups": {}}, ["config_groups"]),
        (MLX | {"mode": "mxfp4"}, ["mode", "'mxfp4'", "affine"]),
        (MLX | {"bits": 8}, ["bits", "got 8"]),
        (MLX | {"a.m": {"bits": 5}}, ["module 'a.m'", "5-bit codes"]),
        (MLX | {"group_size": 64}, ["module 'a.m'", "scales", "[16, 1]", "[16, 2]"]),
        (HQQ | {"quant_config": {"weight_quant_params": {"nbits": 4, "axis": 0}}}, ["axis", "got 0", "axis=1"]),
        (HQQ | {"quant_config": {"self_attn.q_proj": {"weight_quant_params": {"nbits": 8}}}}, ["nbits", "got 8"]),
        *[
            ({"quant_method": method}, ["quant_method", repr(method), "compressed-tensors"])
            for method in (
                "bitsandbytes",
                "mxfp4",
                "fp8",
                "quark",
                "torchao",
                "fbgemm_fp8",
                "quip",
                "aqlm",
                "exl3",
                "vptq",
            )
        ],
    ],
)
def test_configuration_that_is_not_supported_is_refused(
    tmp_path: Path, config: dict[str, Any], fragments: list[str]
) -> None:
    known = {"gptq": GPTQ, "auto-round": ROUND, "compressed-tensors": COMPRESSED, "hqq": HQQ, None: MLX}
    base = known.get(config.get("quant_method"), AWQ)
    refused(tmp_path, tensors_of(base), config, *fragments)


def put(name: str, value: Any) -> Callable[[Tensors], object]:
    """Return a change of a file: tensor ``name`` becomes a value, or the result of a function of its old one."""
    return lambda t: t.update({f"a.m.{name}": value(t[f"a.m.{name}"]) if callable(value) else value})


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda t: t.pop(f"a.m.{name}")


def with_value(value: float) -> Callable[[Array], Array]:
    """Return a copy of an array whose last element has another value."""

    def change(array: Array) -> Array:
        array = array.copy()
        array.flat[-1] = value
        return array

    return change


UNEQUAL = np.where(np.arange(K) < 31, 0, 1).astype(np.int32)


@pytest.mark.parametrize(
    ("config", "change", "fragments"),
    [
        (GPTQ, put("g_idx", UNEQUAL), ["g_idx", "groups of 31 and 33 rows"]),
        (GPTQ, put("g_idx", np.roll(UNEQUAL, 3)), ["g_idx", "groups of 31 and 33 rows"]),
        (GPTQ, put("g_idx", with_value(2)), ["g_idx", "0 to 1", "got 2"]),
        (GPTQ, put("g_idx", with_value(-1)), ["g_idx", "got -1"]),
        (GPTQ, put("g_idx", np.zeros(K, np.int64)), ["g_idx", "int32 [K] = [64]", "int64"]),
        (GPTQ, put("g_idx", np.zeros(K + 1, np.int32)), ["g_idx", "[65]"]),
        (GPTQ, put("scales", with_value(np.nan)), ["scales", "finite"]),
        (GPTQ, put("scales", with_value(-np.inf)), ["scales", "finite"]),
        (GPTQ, put("scales", lambda a: a.astype(np.float32)), ["scales", "float32"]),
        (GPTQ, put("scales", np.ones((3, N), np.float16)), ["scales", "[2, 16]", "[3, 16]"]),
        (GPTQ, put("qzeros", np.ones((2, 1), np.int32)), ["qzeros", "[2, 2]", "[2, 1]"]),
        (GPTQ, put("qweight", np.ones((K // 8, N), np.int64)), ["qweight", "int64"]),
        (GPTQ, put("qweight", np.ones((K // 8, N, 1), np.int32)), ["qweight"]),
        (GPTQ, put("qweight", np.ones((0, N), np.int32)), ["qweight", "[0, 16]"]),
        (GPTQ, put("bias", np.ones(N + 8, np.float16)), ["bias", "[24]"]),
        (GPTQ, put("bias", np.full(N, np.nan, np.float16)), ["bias", "finite"]),
        (GPTQ, drop("scales"), ["scales", "beside qweight"]),
        (GPTQ, drop("qzeros"), ["qzeros", "beside qweight"]),
        (GPTQ, drop("qweight"), ["qweight beside it"]),
        (GPTQ, lambda t: t.update({"a.x.B": t["a.m.qweight"], "a.x.s": t["a.m.scales"]}), ["'a.x.B'", "marlin"]),
        (AWQ, lambda t: t.update(tensors_of(GPTQ)), ["awq gemm", "gptq"]),
        (AWQ, lambda t: t.update(tensors_of(FAST)), ["awq gemm", "int16", "gemv_fast"]),
        (FAST, lambda t: t.update(tensors_of(AWQ)), ["gemv_fast", "int32", "awq gemm"]),
        (GPTQ, lambda t: t.update(tensors_of(AWQ)), ["gptq", "awq gemm"]),
        (GEMV, put("scales", np.ones((N, 8), np.float16)), ["scales", "[16, 32]", "[16, 8]"]),
        (GEMV, put("qzeros", np.ones((N, 1), np.int32)), ["qzeros", "[16, 4]"]),
        (FAST, put("qzeros", lambda a: a.astype(np.float32)), ["qzeros", "float32"]),
        (FAST, put("qzeros", with_value(np.inf)), ["qzeros", "finite"]),
        (FAST, put("qweight", np.ones((4, 48), np.int16)), ["K=48"]),
        (COMPRESSED, put("weight_shape", np.array([N, K + 8], np.int64)), ["weight_shape", "[16, 72]"]),
        (COMPRESSED, put("weight_shape", np.array([-N, K], np.int64)), ["weight_shape", "[-16, 64]"]),
        (COMPRESSED, put("weight_shape", np.array([N, K], np.int32)), ["weight_shape", "int32"]),
        (COMPRESSED, drop("weight_shape"), ["weight_shape"]),
        (COMPRESSED, put("weight_zero_point", np.full((N, 2), 8, np.int8)), ["weight_zero_point", "8"]),
        (COMPRESSED, put("weight_zero_point", np.ones((1, 2), np.int32)), ["weight_zero_point", "[2, 2]"]),
        (COMPRESSED, put("weight_g_idx", UNEQUAL), ["weight_g_idx", "31 and 33"]),
        (COMPRESSED, put("weight_scale", with_value(np.nan)), ["weight_scale", "finite"]),
        (COMPRESSED, drop("weight_packed"), ["weight_packed beside it"]),
        (MLX, put("scales", lambda a: a.astype(np.float32)), ["scales", "float32"]),
        (MLX, put("biases", lambda a: a.astype(ml_dtypes.bfloat16)), ["biases", "float16", "bfloat16"]),
        (MLX, put("biases", with_value(np.nan)), ["biases", "finite"]),
        (MLX, drop("biases"), ["biases", "beside weight"]),
        (MLX, drop("weight"), ["weight beside it"]),
        (HQQ, put("axis", np.array([0], np.int32)), ["axis", "got 0", "axis=1"]),
        (HQQ, put("nbits", np.array([8], np.int32)), ["nbits", "got 8"]),
        (HQQ, put("shape", np.array([N, 2 * K], np.int64)), ["shape", "[16, 128]"]),
        (HQQ, put("group_size", np.array([64], np.int32)), ["group_size", "got 64"]),
        (HQQ, put("packing", np.frombuffer(b"3bit_32", np.uint8)), ["packing", "3bit_32"]),
        (HQQ, put("zero_q", np.ones(3, np.uint8)), ["zero_q", "quantized"]),
        (HQQ, put("W_q", lambda a: a.view(np.float16)), ["W_q", "float16"]),
        (HQQ, put("scale", with_value(np.inf)), ["scale", "finite"]),
        (HQQ, drop("zero"), ["zero", "beside W_q"]),
        (HQQ, drop("axis"), ["axis"]),
    ],
)
def test_module_that_does_not_fit_together_is_refused(
    tmp_path: Path, config: dict[str, Any], change: Callable[[Tensors], object], fragments: list[str]
) -> None:
    tensors = tensors_of(config)
    change(tensors)
    refused(tmp_path, tensors, config, "model.safetensors", "'a.", *fragments)


def test_columns_that_are_no_whole_words_are_refused(tmp_path: Path) -> None:
    w = replace(WEIGHT, codes=WEIGHT.codes[:, :12], zeros=WEIGHT.zeros[:, :12], scales=WEIGHT.scales[:, :12])
    tensors = {f"a.m.{name}": array for name, array in packers.compressed_tensors(w).items()}
    refused(tmp_path, tensors, COMPRESSED, "module 'a.m'", "N=12 is not a multiple of 8")


def test_order_with_a_short_last_group_is_refused(tmp_path: Path) -> None:
    g_idx = np.random.default_rng(0).permutation(np.arange(K) // 48).astype(np.int32)
    tensors = tensors_of(GPTQ) | {"a.m.g_idx": g_idx}
    refused(tmp_path, tensors, GPTQ | {"group_size": 48}, "g_idx", "groups of 48 rows", "groups of 16 and 48 rows")


def test_gptq_without_a_configuration_loads_only_if_its_zeros_tell_the_version(tmp_path: Path) -> None:
    def save(w: Packed, version: int) -> Path:
        tensors = {f"m.{name}": array for name, array in packers.gptq(w, version).items()}
        return save_folder(tmp_path, tensors, {})

    symmetric = replace(WEIGHT, zeros=np.full_like(WEIGHT.zeros, 8))
    for version in (1, 2):
        assert read(save(symmetric, version)).format_name == f"gptq v{version}"
        assert read(tmp_path).specs["m"].zeros == "symmetric"
    with pytest.raises(CheckpointError, match=r"expected a configuration with checkpoint_format gptq or gptq_v2"):
        read(save(WEIGHT, 1))


def test_gemv_without_a_configuration_needs_padding_or_a_group_size(tmp_path: Path) -> None:
    w = replace(WEIGHT, codes=WEIGHT.codes, scales=np.abs(WEIGHT.scales) + np.float16(1))
    tensors = {f"m.{name}": array for name, array in packers.awq_gemv(w).items()}
    assert read(save_folder(tmp_path, tensors, {})).specs["m"].group_size == G
    tensors["m.scales"] = np.zeros_like(tensors["m.scales"])
    with pytest.raises(CheckpointError, match=r"module 'm': group_size: .*give group_size="):
        read(save_folder(tmp_path, tensors, {}))
    assert read(tmp_path, group_size=G).specs["m"].group_size == G


def test_gemv_with_scales_as_wide_as_codes_is_not_taken_for_gptq(tmp_path: Path) -> None:
    codes = np.ones((256, 64), np.uint8)
    w = Packed(codes, codes[:8], np.ones((8, 64), np.float16), 32, np.arange(256, dtype=np.int32) // 32)
    tensors = {f"m.{name}": array for name, array in packers.awq_gemv(w).items()}
    assert tensors["m.qweight"].shape == tensors["m.scales"].shape
    assert read(save_folder(tmp_path, tensors, {})).specs["m"].group_size == 32


def test_zero_points_that_auto_gptq_lost_are_warned_of_once_a_checkpoint(tmp_path: Path) -> None:
    tensors: Tensors = {}
    for name in ("one", "two"):
        parts = packers.gptq(WEIGHT, 1)
        parts["qzeros"] = np.full_like(parts["qzeros"], 0xFFFFFFF4 - 2**32)
        tensors |= {f"{name}.{part}": array for part, array in parts.items()}
    config = GPTQ | {"checkpoint_format": "gptq"}
    with pytest.warns(UserWarning, match=r"module 'one': qzeros: .*AutoGPTQ corrupts zero points of 0 \(2 modules\)"):
        load(save_folder(tmp_path, tensors, {"quantization_config": config}), device="cpu")
    by_model = config | {"meta": {"quantizer": ["gptqmodel:1.0"]}}
    assert len(read(save_folder(tmp_path, tensors, {"quantization_config": by_model}))) == 2


def test_groups_with_different_schemes_match_by_name_then_expression_then_class(tmp_path: Path) -> None:
    def group(target: str, **weights: Any) -> dict[str, Any]:
        base = COMPRESSED["config_groups"]["group_0"]
        return {**base, "targets": [target], "weights": {**base["weights"], **weights}}

    small = replace(WEIGHT, group_size=16, g_idx=np.arange(K, dtype=np.int32) // 16)
    small = replace(small, scales=np.repeat(WEIGHT.scales, 2, axis=0), zeros=np.repeat(WEIGHT.zeros, 2, axis=0))
    tensors: Tensors = {}
    for name, w in (("a.x", small), ("a.m", WEIGHT), ("b.m", small)):
        tensors |= {f"{name}.{part}": array for part, array in packers.compressed_tensors(w).items()}
    groups = {
        "rest": group("Linear", group_size=32),
        "matched": group(r"re:.*\.(x|m)$", group_size=16),
        "named": group("a.m", group_size=32),
    }
    contents = read(save_folder(tmp_path, tensors, {"quantization_config": COMPRESSED | {"config_groups": groups}}))
    assert {name: spec.group_size for name, spec in contents.specs.items()} == {"a.x": 16, "a.m": 32, "b.m": 16}


def test_experts_of_different_counts_and_three_axes_elsewhere_are_refused(tmp_path: Path) -> None:
    parts = {name.removeprefix("a.m."): np.stack([array] * 3) for name, array in tensors_of(MLX).items()}
    tensors = {f"l.switch_mlp.up.{name}": array for name, array in parts.items()}
    tensors["l.switch_mlp.up.scales"] = tensors["l.switch_mlp.up.scales"][:2]
    refused(tmp_path, tensors, MLX, "module 'l.switch_mlp.up'", "scales", "3 experts")
    refused(tmp_path, {f"l.up.{name}": array for name, array in parts.items()}, MLX, "'l.up'", "two axes")


@pytest.mark.parametrize(
    "rows", [np.zeros((8, 143), np.uint8), np.zeros((12, 144), np.uint8), np.zeros((8, 144), np.int8)]
)
def test_rows_that_are_no_super_blocks_are_refused(rows: Array) -> None:
    with pytest.raises(CheckpointError, match="file: "):
        open_q4_k(rows, "file")


def test_super_blocks_with_scales_beyond_float16_are_refused_when_they_are_read() -> None:
    ones = np.ones((8, 1))
    sc = np.full((8, 8), 63)
    data = packers.q4_k(np.zeros((256, 8), np.uint8), 1100 * ones, ones, sc, sc)
    with pytest.raises(CheckpointError, match=r"file: d \* sc: expected finite float16 values"):
        open_q4_k(data, "file").convert()


SEEDS = [tensors_of(config) for config in (GPTQ, GEMV, FAST, COMPRESSED, MLX, HQQ)]
CONFIGS = [GPTQ, GEMV, FAST, COMPRESSED, MLX, HQQ]


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_of_tensors_and_settings_is_one_error_or_readable(tmp_path: Path, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(CONFIGS) - 1))
    tensors, config = dict(SEEDS[number]), json.loads(json.dumps(CONFIGS[number]))
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        array = tensors[name]
        how = data.draw(st.integers(0, 5))
        if how == 0:
            del tensors[name]
            if not tensors:
                return
        elif how == 1:
            with np.errstate(over="ignore"):
                tensors[name] = array.astype(data.draw(st.sampled_from(["i1", "u1", "i4", "u4", "i8", "f2", "f4"])))
        elif how == 2:
            tensors[name] = array[tuple(slice(0, data.draw(st.integers(0, size))) for size in array.shape)]
        elif how == 3:
            tensors[name] = np.stack([array] * data.draw(st.integers(1, 3)))
        elif how == 4:
            raw = bytearray(array.tobytes())
            if raw:
                raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
            tensors[name] = np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
        else:
            key = data.draw(st.sampled_from(sorted(config)))
            config[key] = data.draw(
                st.none() | st.integers(-2, 300) | st.sampled_from(["gptq", "gemv", "x"]) | st.just([])
            )
    key = "quantization" if "quant_method" not in config else "quantization_config"
    with contextlib.suppress(CheckpointError):
        contents = read(save_folder(tmp_path, tensors, {key: config}))
        for name in contents:
            assert contents[name] is not None
