# SPDX-License-Identifier: Apache-2.0
"""Writers of valid and invalid checkpoint files for the tests, and the check of the errors of invalid ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.tensors import INDEX
from cupy_awq.tools import testing

K, N, G = 64, 16, 32
CONFIG = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": G, "zero_point": True}
Tensors = dict[str, npt.NDArray[Any]]
Header = dict[str, Any]


def module(name: str, k: int = K, n: int = N, g: int = G, seed: int = 0) -> Tensors:
    """Return the tensors of one quantized module [k, n] with group size g, by name, as AutoAWQ stores them."""
    weight = testing.random_weight(np.random.default_rng(seed), k, n, g)
    return {f"{name}.qweight": weight.qweight, f"{name}.qzeros": weight.qzeros, f"{name}.scales": weight.scales}


def folder(path: Path, tensors: Tensors, quantization: Any = CONFIG) -> Path:
    """Write a checkpoint with one safetensors file; return its folder."""
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return path


def sharded(path: Path, shards: list[Tensors], quantization: Any = CONFIG) -> dict[str, str]:
    """Write a sharded checkpoint with its index; return the index's weight_map (file name by tensor name)."""
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, path / name)
    weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return weight_map


def raw(path: Path, header: Header | bytes, data: bytes, length: int | None = None) -> Path:
    """Write a safetensors file with any header, valid or not, and any header ``length``; return its path."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F16", shape: Any = (4,), offsets: Any = (0, 8)) -> Header:
    """Return the entry of a tensor in the JSON header of a safetensors file."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def check_refusal(read: Callable[[Path], object], path: Path, *fragments: str) -> None:
    """Check that ``read(path)`` raises a CheckpointError of one short line with the path and all fragments."""
    with pytest.raises(CheckpointError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600 + len(str(path))
    assert str(path) in message
    for fragment in fragments:
        assert fragment in message
