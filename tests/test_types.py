# SPDX-License-Identifier: Apache-2.0
"""The types that a user's type checker sees; mypy checks `assert_type`, and the test checks the values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

import cupy_awq
from cupy_awq import AwqLinear
from cupy_awq.activation import ACTIVATIONS
from cupy_awq.array_types import ActivationName, Clamp

if TYPE_CHECKING:
    from typing_extensions import assert_type
else:

    def assert_type(value, type_):
        return value


def test_results_have_the_type_of_x() -> None:
    """Results have the static type of x: a NumPy array for NumPy; for CuPy, which has no annotations, Any."""
    weight = cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16)
    layer = AwqLinear(weight)
    x: npt.NDArray[np.float16] = np.ones((2, 32), np.float16)
    vector: npt.NDArray[np.float16] = np.ones(32, np.float16)
    anything: npt.NDArray[Any] = x
    out: npt.NDArray[np.float16] = np.empty((2, 16), np.float16)
    results = [
        assert_type(layer(x, residual=out * 0), npt.NDArray[np.float16]),
        assert_type(x @ weight, npt.NDArray[np.float16]),
        assert_type(cupy_awq.gemm(x, weight), npt.NDArray[np.float16]),
        assert_type(cupy_awq.gemm(x, weight.qweight, weight.scales, weight.qzeros, split_k=1), npt.NDArray[np.float16]),
        assert_type(layer.plan(x)(x, out), npt.NDArray[np.float16]),
        assert_type(layer(anything), npt.NDArray[Any]),
        assert_type(cupy_awq.gemm(anything, weight), npt.NDArray[Any]),
    ]
    results += [np.stack([assert_type(cupy_awq.gemv(vector, weight, activation="relu"), npt.NDArray[np.float16])] * 2)]
    for y in results:
        np.testing.assert_array_equal(y, results[0])


def test_a_layer_of_a_checkpoint_has_one_type(tmp_path: Path) -> None:
    weight, bias = cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16), np.arange(16, dtype=np.float32)
    cupy_awq.save(tmp_path, {"up": AwqLinear(weight, bias=bias), "norm": bias})
    found = cupy_awq.load(tmp_path, device="cpu")
    x: npt.NDArray[np.float16] = np.ones((2, 32), np.float16)
    y = assert_type(assert_type(found["up"], AwqLinear)(x), npt.NDArray[np.float16])
    np.testing.assert_array_equal(y, (x @ weight + bias).astype(np.float16))
    assert assert_type(found.layers, Mapping[str, AwqLinear]) == {"up": found["up"]}
    norm: npt.NDArray[np.float32] = assert_type(found.tensors, Mapping[str, Any])["norm"]
    np.testing.assert_array_equal(norm, bias)
    assert [*found] == [*found.layers, *found.tensors]
    with pytest.raises(KeyError):
        found.tensors["up"]


def test_activations_have_literal_types() -> None:
    assert set(get_args(ActivationName)) == set(ACTIVATIONS)
    clamps = {name for name, activation in ACTIVATIONS.items() if activation.kind == "clamp"}
    assert {name for part in get_args(Clamp) for name in get_args(part) if isinstance(name, str)} == clamps
