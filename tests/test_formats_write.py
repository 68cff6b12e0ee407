# SPDX-License-Identifier: Apache-2.0
"""Tests of written checkpoints: they are read with equal bits, and are equal to what plain packers write."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq.checkpoint import Contents, Module, Tensor, read, safetensors, save, write
from tests import packers
from tests.format_files import save_folder
from tests.packers import Packed, weights

Array = npt.NDArray[Any]

PACKERS = {
    "autoawq": packers.awq_gemm,
    "compressed-tensors": packers.compressed_tensors,
    "gptq": lambda w: packers.gptq(w, 2),
}


def open_weight(path: Path, w: Packed, **plain: Array) -> Contents:
    """Write a GPTQ checkpoint with the weight ``w`` as module "a.m" and the tensors ``plain``, and open it."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": w.group_size, "checkpoint_format": "gptq_v2"}
    tensors = {f"a.m.{name}": array for name, array in packers.gptq(w, 2).items()}
    return read(save_folder(path, tensors | plain, {"quantization_config": config}))


def ones(group_size: int) -> Packed:
    """Return a weight [64, 16] of ones."""
    groups = 64 // group_size
    codes, zeros = np.ones((64, 16), np.uint8), np.ones((groups, 16), np.uint8)
    return Packed(codes, zeros, np.ones((groups, 16), np.float16), group_size, np.arange(64) // group_size)


def assert_equal(found: Array | None, wanted: Array | None) -> None:
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


@given(w=weights(ordered=True), name=st.sampled_from(sorted(PACKERS)))
def test_written_checkpoints_are_read_bit_by_bit(w: Packed, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        bias, norm = np.ones(w.codes.shape[1], np.float16), np.ones(3, ml_dtypes.bfloat16)
        contents = open_weight(path / "in", w, **{"a.m.bias": bias, "norm.weight": norm})
        original = contents["a.m"]
        assert isinstance(original, Module)
        if original.order is not None and name == "autoawq":
            with pytest.raises(ValueError, match=r"module 'a\.m': expected no activation order for autoawq, got one"):
                save(path / "out", contents, name)
            return
        save(path / "out", contents, name)
        again = read(path / "out")
        module = again["a.m"]
        assert isinstance(module, Module)
        assert again.read("norm.weight").tobytes() == norm.tobytes()
        assert_equal(module.weight.qweight, original.weight.qweight)
        assert_equal(module.weight.scales, original.weight.scales)
        if name == "autoawq" and original.weight.qzeros is None:
            assert (module.weight.qzeros.view(np.uint32) == 0x88888888).all()
        else:
            assert_equal(module.weight.qzeros, original.weight.qzeros)
        assert_equal(module.order, original.order)
        assert_equal(module.bias, original.bias)
        found = safetensors.read(path / "out" / "model.safetensors")
        for part, array in PACKERS[name](w).items():
            assert_equal(found[f"a.m.{part}"], array)


def test_checkpoint_above_the_size_of_a_shard_gets_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "SHARD_BYTES", 3000)
    w = ones(16)
    plain = {f"t{i}": np.full(600, i, np.float32) for i in range(3)}
    contents = open_weight(tmp_path / "in", w, **plain)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text('{"model_type": "llama"}')
    save(tmp_path / "out", contents, "compressed-tensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    again = read(tmp_path / "out")
    assert sorted(again) == sorted(contents)
    assert [again.read(f"t{i}")[0] for i in range(3)] == [0, 1, 2]


def test_many_small_tensors_are_written_in_linear_time(tmp_path: Path) -> None:
    value = Tensor(np.zeros(1, np.float16), tmp_path)
    start = time.process_time()
    save(tmp_path / "out", Contents({f"t{i}": value for i in range(30_000)}, "", ""), "compressed-tensors")
    assert time.process_time() - start < 6


def test_modules_of_different_groups_are_written_where_the_format_can(tmp_path: Path) -> None:
    tensors: dict[str, Array] = {"c.weight": np.ones((3, 4), np.float16)}
    for name, group_size in (("a", 16), ("b", 32)):
        tensors |= {f"{name}.{part}": array for part, array in packers.awq_gemm(ones(group_size)).items()}
    contents = read(save_folder(tmp_path / "in", tensors, {}))
    save(tmp_path / "out", contents, "compressed-tensors")
    assert {name: spec.group_size for name, spec in read(tmp_path / "out").specs.items()} == {"a": 16, "b": 32}
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["c"]
    assert [group["targets"] for group in config["config_groups"].values()] == [["a"], ["b"]]
    for name in ("autoawq", "gptq"):
        with pytest.raises(ValueError, match="expected modules of one group size, got 16, 32"):
            save(tmp_path / name, contents, name)
        assert not (tmp_path / name).exists()


def test_float_offsets_and_unknown_formats_are_refused(tmp_path: Path) -> None:
    w = ones(16)
    tensors = {f"m.{name}": array for name, array in packers.mlx(w, w.scales).items()}
    contents = read(save_folder(tmp_path / "in", tensors, {}))
    with pytest.raises(ValueError, match=r"module 'm': expected packed or symmetric .* for gptq, got float offsets"):
        save(tmp_path / "out", contents, "gptq")
    with pytest.raises(ValueError, match=r"format_name: expected autoawq, compressed-tensors, gptq, got 'exl3'"):
        save(tmp_path / "out", contents, "exl3")


@pytest.mark.parametrize("name", [name for name in safetensors.DTYPES if name != "C64"])
def test_written_tensors_of_every_dtype_are_read_by_the_package(tmp_path: Path, name: str) -> None:
    from safetensors import safe_open

    tensors = {"odd": np.ones(3, np.uint8), "t": np.arange(6).reshape(2, 3).astype(safetensors.DTYPES[name])}
    tensors |= {"scalar": np.array(2.5, np.float32), "empty": np.ones((0, 2), np.int64)}
    safetensors.write(tmp_path / "f", tensors)
    with safe_open(tmp_path / "f", "numpy") as opened:
        assert sorted(opened.keys()) == sorted(tensors)
    for key, value in safetensors.read(tmp_path / "f").items():
        assert_equal(value, tensors[key])
