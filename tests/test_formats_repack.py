# SPDX-License-Identifier: Apache-2.0
"""Tests that codes are repacked to the same bits on the CPU, on several threads, and on a GPU."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupy_awq import load, loader
from cupy_awq.checkpoint import Module, nibbles, read, threads
from cupy_awq.checkpoint.gguf import dense
from cupy_awq.checkpoint.gguf.container import Blocks
from tests import packers, test_formats
from tests.format_files import save_folder
from tests.packers import Packed
from tests.test_formats_gguf import random_blocks
from tests.tools import synthetic_checkpoint

Array = npt.NDArray[Any]


def first_cases() -> dict[str, dict[str, Any]]:
    """Return the first recorded checkpoint of each format that is stored as a folder."""
    cases: dict[str, dict[str, Any]] = {}
    for case in test_formats.VECTORS:
        if case["format"] not in ("gguf-q4_k", "llm-awq-v2"):
            cases.setdefault(case["format"], case)
    return cases


CASES = first_cases()


def ordered(path: Path) -> Path:
    """Write a GPTQ folder with an activation order and return it."""
    rng = np.random.default_rng(0)
    g_idx = rng.permutation(np.arange(256) // 32)
    codes, zeros = (rng.integers(0, 16, shape, dtype=np.uint8) for shape in ((256, 24), (8, 24)))
    w = Packed(codes, zeros, rng.standard_normal((8, 24)).astype(ml_dtypes.bfloat16), 32, g_idx)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    tensors = {f"m.{part}": array for part, array in packers.gptq(w, 2).items()}
    return save_folder(path, tensors, {"quantization_config": config})


def short_group(path: Path) -> Path:
    """Write a compressed-tensors folder whose last group is shorter than the others, and return it."""
    rng = np.random.default_rng(1)
    codes, zeros = (rng.integers(0, 16, shape, dtype=np.uint8) for shape in ((88, 16), (3, 16)))
    w = Packed(codes, zeros, rng.standard_normal((3, 16)).astype(np.float16), 32, np.arange(88) // 32)
    tensors = {f"m.{part}": array for part, array in packers.compressed_tensors(w, old_zeros=True).items()}
    return save_folder(path, tensors, {"quantization_config": packers.compressed_tensors_config(w)})


def arrays_of(module: Module) -> list[Array | None]:
    weight = module.weight
    return [weight.qweight, weight.scales, weight.qzeros, module.bias, module.order]


def test_placed_arrays_are_repacked_to_the_same_module(tmp_path: Path) -> None:
    contents = read(ordered(tmp_path))
    placed: list[Array] = []

    def place(array: Array) -> Array:
        placed.append(array)
        return array.copy()

    first, second = contents["m"], contents.convert("m", place)
    assert isinstance(first, Module)
    assert isinstance(second, Module)
    # three tensors: codes, zero points and scales, but no bias
    assert [array.shape for array in placed] == [(32, 24), (8, 3), (8, 24)]
    placed.clear()
    assert isinstance(contents.convert("m", place, min_bytes=1 << 20), Module)
    assert not placed
    for a, b in zip(arrays_of(first), arrays_of(second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_threads_give_the_bits_of_one_thread(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    rng = np.random.default_rng(2)
    rows = rng.integers(-(2**31), 2**31, (24, 136), np.int64).astype(np.int32)
    columns = np.ascontiguousarray(rows.T)
    blocks = random_blocks("Q6_K", 37, 512)

    def convert() -> list[Array]:
        return [
            nibbles.convert_row_words(rows),
            nibbles.convert_column_words(columns),
            nibbles.convert_to_column_words(rows),
            dense.read_values(Blocks("Q6_K", (37, 512), blocks), "file"),
        ]

    wanted = convert()
    monkeypatch.setattr(threads, "MIN_BYTES", 1)
    monkeypatch.setattr(threads, "count_cores", lambda: count)
    monkeypatch.setattr(nibbles, "CHUNK_BYTES", 1024)
    for found, array in zip(convert(), wanted, strict=True):
        np.testing.assert_array_equal(found, array)


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "count_cores", lambda: 2)
    covered: list[tuple[int, int]] = []

    def run(start: int, stop: int) -> None:
        covered.append((start, stop))
        if start:
            raise ValueError("expected")

    with pytest.raises(ValueError, match="expected"):
        threads.run_ranges(run, 10, 1 << 30, multiple=4)
    assert sorted(covered) == [(0, 8), (8, 10)]


def test_the_synthetic_checkpoint_has_the_modules_of_an_index(tmp_path: Path) -> None:
    synthetic_checkpoint.write(tmp_path / "moe", 8, 2, hidden=128, intermediate=128)
    figures = synthetic_checkpoint.measure(tmp_path / "moe", "cpu")
    assert figures["entries"] == 8 * (4 + 2 * 3 + 3)
    assert figures["bytes"] == sum(file.stat().st_size for file in (tmp_path / "moe").glob("*.safetensors"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, "order", "short group"])
def test_codes_are_repacked_on_a_gpu_to_the_bits_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import cupy

    if name in CASES:
        test_formats.saved(tmp_path, CASES[name])
    else:
        {"order": ordered, "short group": short_group}[name](tmp_path)
    monkeypatch.setattr(loader, "REPACK_BYTES", 0)
    contents, layers = read(tmp_path), load(tmp_path, device=0)
    for key in contents:
        module = contents[key]
        if not isinstance(module, Module):
            continue
        found = contents.convert(key, cupy.asarray)
        assert isinstance(found, Module)
        for a, b in zip(arrays_of(module), arrays_of(found), strict=True):
            if a is None or b is None:
                assert a is b
            else:
                np.testing.assert_array_equal(cupy.asnumpy(b).view(f"u{a.itemsize}"), a.view(f"u{a.itemsize}"))
        assert isinstance(found.weight.qweight, cupy.ndarray)
        assert layers[key].shape == module.weight.shape


@pytest.mark.parametrize("name", ["compressed-tensors", "gptq with an order", "mlx"])
def test_loading_needs_little_memory_beside_the_model(tmp_path: Path, name: str) -> None:
    """Loading needs, beyond the layers, less than 1.2 times the size of the largest module."""
    rng = np.random.default_rng(3)
    k = n = 2048
    tensors: dict[str, Array] = {}
    for module in "abc":
        codes, scales = rng.integers(0, 2**32, (n, k // 8), np.uint32), np.ones((n, k // 128), np.float16)
        if name == "mlx":
            parts = {"weight": codes, "scales": scales, "biases": scales}
        elif name == "compressed-tensors":
            parts = {"weight_packed": codes.view(np.int32), "weight_scale": scales}
            parts["weight_shape"] = np.array([n, k], np.int64)
        else:
            parts = {"qweight": codes.view(np.int32).reshape(k // 8, n), "scales": scales.reshape(k // 128, n)}
            parts["qzeros"] = np.zeros((k // 128, n // 8), np.int32)
            parts["g_idx"] = rng.permutation(np.arange(k, dtype=np.int32) // 128)
        tensors |= {f"{module}.{part}": array for part, array in parts.items()}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2"}
    config = {"quantization_config": gptq} if "gptq" in name else {}
    contents = read(save_folder(tmp_path, tensors, config))
    tracemalloc.start()
    try:
        modules = [contents[key] for key in contents]
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    sizes = [sum(a.nbytes for a in arrays_of(module) if a is not None) for module in modules]
    assert kept > 0.8 * sum(sizes)
    assert peak - kept < 1.2 * max(sizes)
