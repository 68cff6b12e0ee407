# SPDX-License-Identifier: Apache-2.0
"""Tests of `PackedWeight`: properties, slices, copies and the ``@`` operator."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import ml_dtypes
import numpy as np
import pytest

from cupy_awq import reference
from cupy_awq.tools.testing import random_activations, random_weight
from cupy_awq.weight import PackedWeight


@pytest.fixture
def weight() -> PackedWeight:
    return random_weight(np.random.default_rng(0), 96, 64, 32)


def test_properties_follow_from_the_shapes(weight: PackedWeight) -> None:
    assert weight.shape == (96, 64)
    assert weight.group_size == 32
    assert weight.dtype == np.float16
    assert weight.nbytes == 96 * 64 // 2 + 3 * 64 * 2 + 3 * 64 // 2


def test_arrays_are_not_copied(weight: PackedWeight) -> None:
    again = PackedWeight(weight.qweight, weight.scales, weight.qzeros)
    assert again.qweight is weight.qweight
    assert again.scales is weight.scales
    assert again.qzeros is weight.qzeros


def test_slices_of_rows_and_columns_need_no_copy(weight: PackedWeight) -> None:
    assert weight.qzeros is not None
    part = PackedWeight(weight.qweight[32:, 2:5], weight.scales[1:, 16:40], weight.qzeros[1:, 2:5])
    assert part.shape == (64, 24)
    whole = reference.dequantize(weight.qweight, weight.scales, weight.qzeros)
    np.testing.assert_array_equal(reference.dequantize(part.qweight, part.scales, part.qzeros), whole[32:, 16:40])


@pytest.mark.parametrize("zeros", ["packed", "symmetric", "float"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_repr_shows_shape_dtype_and_size(zeros: str, dtype: type) -> None:
    weight = random_weight(np.random.default_rng(0), 576, 1536, 64, dtype=dtype, zeros=zeros)
    size = {"packed": "0.48", "symmetric": "0.47", "float": "0.50"}[zeros]
    name = np.dtype(dtype).name
    assert repr(weight) == f"PackedWeight(K=576, N=1536, group_size=64, {name}, {zeros} zeros, {size} MB)"


def test_weight_is_immutable(weight: PackedWeight) -> None:
    for name in ("qweight", "spec", "shape", "new"):
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
            setattr(weight, name, None)


def test_equality_is_identity_not_elementwise(weight: PackedWeight) -> None:
    assert weight == weight
    assert weight != copy.copy(weight)
    assert len({weight, weight}) == 1


def test_copied_and_pickled_weights_compute_the_same(weight: PackedWeight) -> None:
    expected = reference.dequantize(weight.qweight, weight.scales, weight.qzeros)
    for twin in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        np.testing.assert_array_equal(reference.dequantize(twin.qweight, twin.scales, twin.qzeros), expected)
        assert twin.spec == weight.spec


def test_matmul_operator_returns_the_product_in_the_dtype_of_x(weight: PackedWeight) -> None:
    x = random_activations(np.random.default_rng(1), 2, 3, 96)
    y = x @ weight
    assert y.dtype == np.float16
    np.testing.assert_array_equal(y, reference.matmul(x, weight.qweight, weight.scales, weight.qzeros))
    with pytest.raises(ValueError, match=r"^x: expected \w+ \[\.\.\., K\] with K = 96, got \w+ \[.*95\]$"):
        x[..., 1:] @ weight


def test_constructor_validates_the_weight(weight: PackedWeight) -> None:
    with pytest.raises(
        ValueError, match=r"^scales: expected .* with N = 64 and .*, as in qweight, got \w+ \[\d+, 56\]$"
    ):
        PackedWeight(weight.qweight, weight.scales[:, :56], weight.qzeros)
