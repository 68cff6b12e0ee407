# SPDX-License-Identifier: Apache-2.0
"""Tests of layers from checkpoints in every format: products against float64, with NumPy and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_awq
from cupy_awq import AwqLinear, PackedWeight
from cupy_awq.checkpoint import Module
from cupy_awq.checkpoint.gguf.q4 import open_q4_k
from cupy_awq.tools.testing import random_activations
from tests.packers import Packed, gptq
from tests.products import FLOAT16, check_product, nan_like, put, tensors
from tests.test_formats import VECTORS, array_of, save_folder, saved

DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


def largest_cases() -> dict[str, int]:
    """Return the index of the recorded case with the largest weight, by format; GPTQ also with an order."""
    found: dict[str, tuple[bool, int, int]] = {}
    for number, case in enumerate(VECTORS):
        has_order = "g_idx" in case["tensors"] and bool((np.diff(array_of(*case["tensors"]["g_idx"])) < 0).any())
        size = case["shape"][0] * case["shape"][1]
        found[case["format"]] = max(found.get(case["format"], (False, 0, 0)), (has_order, size, number))
    return {name: number for name, (_, _, number) in found.items()}


def load(path: Path, device: str) -> AwqLinear:
    layer = cupy_awq.load(path, device="cpu" if device == "cpu" else None)["m"]
    assert isinstance(layer, AwqLinear)
    return layer


def on_host(weight: PackedWeight) -> PackedWeight:
    return PackedWeight(*(a if a is None or isinstance(a, np.ndarray) else a.get() for a in tensors(weight)))


def check_layer(layer: AwqLinear, m: int, device: str) -> tuple[np.ndarray, np.ndarray]:
    """Call a layer with m random rows, check y against float64, and return x and y."""
    k, n = layer.shape
    dtype = layer.weight.dtype
    x = random_activations(np.random.default_rng(m), m, k, dtype=dtype)
    out = np.full((m, n), np.nan, dtype) if device == "cpu" else nan_like((m, n), dtype)
    y = layer(x if device == "cpu" else put(x), out=out)
    y = y if device == "cpu" else y.get()
    order = layer.order if layer.order is None or device == "cpu" else layer.order.get()
    rounded = m > 32 or (device != "cpu" and layer.weight.spec.zeros == "float")
    check_product(y, x if order is None else x[:, order], on_host(layer.weight), rounded=rounded)
    return x, y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m", [1, 16, 256])
@pytest.mark.parametrize(("name", "number"), largest_cases().items(), ids=lambda value: str(value))
def test_a_layer_of_each_format(tmp_path: Path, device: str, m: int, name: str, number: int) -> None:
    case = VECTORS[number]
    if name == "gguf-q4_k":
        module = open_q4_k(array_of(*case["tensors"]["data"]), "file").convert()
        assert isinstance(module, Module)
        layer = AwqLinear(module.weight if device == "cpu" else put(module.weight))
    else:
        layer = load(saved(tmp_path, case), device)
    x, y = check_layer(layer, m, device)
    # What the format's own package dequantizes the file to, as recorded.
    dense = array_of(*case["dense"]).astype(np.float64)
    wanted = x.astype(np.float64) @ dense
    scale = np.sqrt((x.astype(np.float64) ** 2).sum(1, keepdims=True) * (dense**2).sum(0).mean())
    error = np.abs(y[:, :: case["step"]] - wanted) / scale
    assert np.sqrt((error**2).mean()) < (1e-3 if layer.weight.dtype == np.float16 else 8e-3)


def some_weight(k: int, n: int, group_size: int, dtype: Any = FLOAT16) -> Packed:
    rng = np.random.default_rng(k)
    count = -(-k // group_size)
    scales = (rng.uniform(0.5, 1, (count, n)) * rng.choice([-0.02, 0.02], (count, n))).astype(dtype)
    codes, zeros = (rng.integers(0, 16, shape, dtype=np.uint8) for shape in ((k, n), (count, n)))
    return Packed(codes, zeros, scales, group_size, np.arange(k, dtype=np.int32) // group_size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m", [1, 16, 256])
@pytest.mark.parametrize(
    ("k", "group_size"),
    [*((512, size) for size in (16, 32, 64, 128, 256, 512)), (576, 128), (528, 128), (200, 128), (320, 256)],
)
def test_group_sizes_and_short_last_groups(tmp_path: Path, device: str, m: int, k: int, group_size: int) -> None:
    w = some_weight(k, 96, group_size)
    configured = -1 if group_size == k else group_size
    config = {"quant_method": "gptq", "bits": 4, "group_size": configured, "checkpoint_format": "gptq_v2"}
    named = {f"m.{name}": array for name, array in gptq(w, 2).items()}
    layer = load(save_folder(tmp_path, named, {"quantization_config": config}), device)
    weight = on_host(layer.weight)
    np.testing.assert_array_equal(cupy_awq.dequantize(*tensors(weight)), w.dense())
    check_layer(layer, m, device)
