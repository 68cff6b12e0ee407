# SPDX-License-Identifier: Apache-2.0
"""Tests of the detection of formats: configurations of old and new versions, and files without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from cupy_awq.checkpoint import CheckpointError, read, save, summarize
from tests import packers
from tests.format_files import save_folder
from tests.packers import Packed

Array = npt.NDArray[Any]

K, N, G = 128, 16, 32
RNG = np.random.default_rng(0)
WEIGHT = Packed(
    RNG.integers(0, 16, (K, N), dtype=np.uint8),
    RNG.integers(1, 16, (4, N), dtype=np.uint8),
    RNG.uniform(0.5, 1, (4, N)).astype(np.float16),
    G,
    np.arange(K, dtype=np.int32) // G,
)
OFFSETS = RNG.standard_normal((4, N)).astype(np.float16)
GPTQ = {"bits": 4, "group_size": G, "desc_act": False, "sym": False}
MLX = {"bits": 4, "group_size": G}
COMPRESSED = packers.compressed_tensors_config(WEIGHT)


def named(parts: dict[str, Array]) -> dict[str, Array]:
    return {f"m.{name}": array for name, array in parts.items()}


@pytest.mark.parametrize(
    ("parts", "config", "name"),
    [
        (packers.awq_gemm(WEIGHT), {}, "awq gemm"),
        (packers.awq_gemv(WEIGHT), {}, "awq gemv"),
        (packers.awq_gemv_fast(WEIGHT, OFFSETS), {}, "awq gemv_fast"),
        (packers.compressed_tensors(WEIGHT), {}, "compressed-tensors"),
        (packers.hqq(WEIGHT, OFFSETS), {}, "hqq"),
        (packers.mlx(WEIGHT, OFFSETS), {}, "mlx"),
        (packers.mlx(WEIGHT, OFFSETS), {"quantization_config": MLX}, "mlx"),
        (packers.mlx(WEIGHT, OFFSETS), {"quantization": MLX, "quantization_config": MLX}, "mlx"),
        (packers.gptq(WEIGHT, 1), {"quantization_config": GPTQ}, "gptq v1"),
        (packers.gptq(WEIGHT, 1), {"quantization_config": GPTQ | {"quant_method": "GPTQ"}}, "gptq v1"),
        (
            packers.gptq(WEIGHT, 2),
            {"quantization_config": GPTQ | {"quant_method": "gptq", "format": "gptq_v2"}},
            "gptq v2",
        ),
        (
            packers.gptq(WEIGHT, 1),
            {"quantization_config": GPTQ | {"quant_method": "gptq", "provider": "auto-round"}},
            "gptq v1",
        ),
        (
            packers.awq_gemm(WEIGHT),
            {"quantization_config": GPTQ | {"quant_method": "awq", "checkpoint_format": "gemm"}},
            "awq gemm",
        ),
        (
            packers.gptq(WEIGHT, 1),
            {"quantization_config": GPTQ | {"quant_method": "intel/auto-round", "backend": "auto_round:auto_gptq"}},
            "gptq v1",
        ),
        (
            packers.compressed_tensors(WEIGHT),
            {"text_config": {"quantization_config": COMPRESSED}},
            "compressed-tensors",
        ),
        (packers.compressed_tensors(WEIGHT), {"compression_config": COMPRESSED}, "compressed-tensors"),
        (
            packers.compressed_tensors(WEIGHT),
            {"compression_config": {key: COMPRESSED[key] for key in ("format", "config_groups")}},
            "compressed-tensors",
        ),
    ],
)
def test_format_is_told_by_configurations_of_all_ages_and_by_tensors(
    tmp_path: Path, parts: dict[str, Array], config: dict[str, Any], name: str
) -> None:
    contents = read(save_folder(tmp_path, named(parts), config))
    assert contents.format_name == name
    assert contents.specs["m"].group_size == G
    assert contents.found.startswith(f"Format {name}: ")
    assert contents.found.endswith((str(tmp_path / "config.json") + ".", str(tmp_path / "model.safetensors") + "."))


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json", "quantization_config.json"])
def test_older_files_of_settings_are_read_with_the_names_of_auto_gptq(tmp_path: Path, file: str) -> None:
    save_file(named(packers.gptq(WEIGHT, 1)), tmp_path / "gptq_model-4bit-32g.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / file).write_text(json.dumps(GPTQ | {"model_file_base_name": "gptq_model-4bit-32g"}))
    assert read(tmp_path).format_name == "gptq v1"


def test_shards_of_auto_gptq_have_an_index_of_another_name(tmp_path: Path) -> None:
    tensors = named(packers.gptq(WEIGHT, 1))
    names = {}
    for i, (name, array) in enumerate(tensors.items()):
        names[name] = f"gptq_model-4bit-32g-{i}.safetensors"
        save_file({name: array}, tmp_path / names[name])
    (tmp_path / "gptq_model-4bit-32g.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "quantize_config.json").write_text(json.dumps(GPTQ))
    assert list(read(tmp_path)) == ["m"]


def test_presets_of_compressed_tensors_are_known(tmp_path: Path) -> None:
    weight = Packed(WEIGHT.codes, WEIGHT.zeros[:1], WEIGHT.scales[:1], 128, np.zeros(K, np.int32))
    config = COMPRESSED | {"config_groups": {"W4A16_ASYM": ["Linear"]}}
    contents = read(save_folder(tmp_path, named(packers.compressed_tensors(weight)), {"quantization_config": config}))
    assert contents.specs["m"].group_size == 128
    assert contents.specs["m"].zeros == "packed"


def test_symmetric_zero_points_of_auto_round_are_dropped_where_the_settings_say_so(tmp_path: Path) -> None:
    weight = Packed(WEIGHT.codes, np.full_like(WEIGHT.zeros, 8), WEIGHT.scales, G, WEIGHT.g_idx)
    config = {"quant_method": "awq", "bits": 4, "group_size": G, "zero_point": False, "version": "gemm"}
    save_folder(tmp_path, named(packers.awq_gemm(weight)), {"quantization_config": config})
    assert read(tmp_path).specs["m"].zeros == "symmetric"
    save_folder(tmp_path, named(packers.awq_gemm(WEIGHT)), {"quantization_config": config})
    assert read(tmp_path).specs["m"].zeros == "packed"


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_the_settings_of_compressed_tensors_hold_under_both_keys(tmp_path: Path, key: str) -> None:
    """Under both keys, wrong settings are refused, and `save` replaces the entry by one of its own format."""
    for name, change in (("num_bits", 8), ("type", "float")):
        weights = {**COMPRESSED["config_groups"]["group_0"]["weights"], name: change}
        config = {**COMPRESSED, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
        with pytest.raises(CheckpointError, match=f"{name}: expected .*, got {change!r}"):
            read(save_folder(tmp_path, named(packers.compressed_tensors(WEIGHT)), {key: config}))
    contents = read(save_folder(tmp_path / "in", named(packers.compressed_tensors(WEIGHT)), {key: COMPRESSED}))
    save(tmp_path / "in", contents, "gptq")
    assert json.loads((tmp_path / "in" / "config.json").read_text()).keys() == {"quantization_config"}
    assert read(tmp_path / "in").format_name == "gptq v2"


def test_kv_cache_scheme_is_warned_of(tmp_path: Path) -> None:
    config = COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}
    with pytest.warns(UserWarning, match="kv_cache_scheme is ignored"):
        read(save_folder(tmp_path, named(packers.compressed_tensors(WEIGHT)), {"quantization_config": config}))


def test_dynamic_settings_of_excluded_modules_and_other_group_sizes_hold(tmp_path: Path) -> None:
    small = Packed(WEIGHT.codes, np.repeat(WEIGHT.zeros, 2, 0), np.repeat(WEIGHT.scales, 2, 0), 16, np.arange(K) // 16)
    tensors = named(packers.gptq(WEIGHT, 2)) | {f"s.{name}": array for name, array in packers.gptq(small, 2).items()}
    dynamic = {"-:other": {}, "+:s": {"group_size": 16}, "s": {"bits": 8}}
    config = GPTQ | {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "dynamic": dynamic}
    contents = read(save_folder(tmp_path, tensors, {"quantization_config": config}))
    assert {name: spec.group_size for name, spec in contents.specs.items()} == {"m": 32, "s": 16}
    assert summarize(contents).exceptions in ({"s": "group size 16"}, {"m": "group size 32"})


def test_first_match_of_dynamic_settings_wins_even_before_an_equal_name(tmp_path: Path) -> None:
    config = GPTQ | {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
    config["dynamic"] = {"+:^m$": {"group_size": G}, "m": {"bits": 8}}
    contents = read(save_folder(tmp_path, named(packers.gptq(WEIGHT, 2)), {"quantization_config": config}))
    assert contents.specs["m"].group_size == G


def test_folder_without_anything_quantized_says_so(tmp_path: Path) -> None:
    contents = read(save_folder(tmp_path, {"t": np.ones(3, np.float16)}, {}))
    assert (contents.found, contents.format_name) == ("No quantized modules.", None)
    assert summarize(contents).format is None


def test_settings_that_tell_no_format_are_refused(tmp_path: Path) -> None:
    config = {"quantization_config": {"bits": 4, "group_size": G}}
    with pytest.raises(CheckpointError, match=r"config\.json: expected a quant_method or a version, got neither"):
        read(save_folder(tmp_path, named(packers.awq_gemm(WEIGHT)), config))
