# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every format: vectors that the formats' own packers wrote, round trips, and refusals."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupy_awq import reference
from cupy_awq.checkpoint import Module, read
from cupy_awq.checkpoint.gguf_q4_k import open_q4_k
from tests.format_files import save_folder, save_torch

Array = npt.NDArray[Any]

_FILE = np.load(Path(__file__).parent / "formats_vectors.npz")
VECTORS = json.loads(_FILE["index"].tobytes())
DATA = _FILE["data"].tobytes()


def array_of(dtype: str, shape: list[int], offset: int) -> Array:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return np.frombuffer(DATA, kind, math.prod(shape), offset).reshape(shape)


def dense(module: Module) -> Array:
    """W [K, N] of a module, its rows in the order of the file."""
    weight = module.weight
    values = reference.dequantize(weight.qweight, weight.scales, weight.qzeros)
    if module.order is None:
        return values
    out = np.empty_like(values)
    out[module.order] = values
    return out


def saved(tmp_path: Path, case: dict[str, Any]) -> Path:
    """The files of a case: module "m" in a folder with its configuration, or in a file of llm-awq."""
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
