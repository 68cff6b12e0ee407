# SPDX-License-Identifier: Apache-2.0
"""`save`: own weights and arrays, read again by `load` bit by bit."""

from __future__ import annotations

import json
import stat
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupy_awq
from cupy_awq import AwqLinear, PackedWeight
from cupy_awq.check import FLOATS, SCALES
from cupy_awq.tools import testing
from tests.test_atomic import all_files

Array = np.ndarray[Any, Any]


@st.composite
def own_weights(draw: st.DrawFn) -> PackedWeight | AwqLinear | Array:
    """Draw a weight with packed or symmetric zero points, a layer with a bias or an order, or a plain array."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if draw(st.integers(0, 3)) == 0:
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        return rng.standard_normal(shape).astype(draw(st.sampled_from([*FLOATS, np.dtype(np.int64)])))
    group_size, groups, n = draw(st.sampled_from([8, 16, 40])), draw(st.integers(1, 3)), 8 * draw(st.integers(1, 3))
    made = testing.random_weight(rng, group_size * groups, n, group_size)
    scales = made.scales.astype(draw(st.sampled_from(SCALES)))
    weight = PackedWeight(made.qweight, scales, made.qzeros if draw(st.booleans()) else None)
    if draw(st.booleans()):
        return weight
    bias = rng.standard_normal(n).astype(draw(st.sampled_from(FLOATS))) if draw(st.booleans()) else None
    order = rng.permutation(weight.shape[0]).astype(np.int32) if draw(st.booleans()) else None
    return AwqLinear(weight, bias=bias, order=order)


def parts_of(item: PackedWeight | AwqLinear | Array) -> list[Array | None]:
    if isinstance(item, PackedWeight):
        return [item.qweight, item.scales, item.qzeros]
    if isinstance(item, AwqLinear):
        return [*parts_of(item.weight), item.bias]
    return [item]


@given(st.dictionaries(st.sampled_from(["a", "a.b", "model.layers.0.up_proj", "π"]), own_weights()), st.booleans())
def test_load_returns_what_was_saved(weights: dict[str, Any], is_file: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("w.safetensors" if is_file else "w")
        cupy_awq.save(path, weights)
        found = cupy_awq.load(path, device="cpu")
        assert set(found) == set(weights)
        for name, item in weights.items():
            wanted = parts_of(item) + ([None] if isinstance(item, PackedWeight) else [])
            for part, again in zip(wanted, parts_of(found[name]), strict=True):
                assert (part is None) == (again is None)
                if part is not None and again is not None:
                    assert (part.dtype, part.shape) == (again.dtype, again.shape)
                    if not isinstance(item, AwqLinear) or item.order is None:
                        assert part.tobytes() == again.tobytes()
            if isinstance(item, AwqLinear):
                x = np.random.default_rng(0).standard_normal((2, item.shape[0])).astype(np.float32)
                layer = found[name]
                assert isinstance(layer, AwqLinear)
                np.testing.assert_allclose(layer(x), item(x), rtol=1e-5, atol=1e-5)


def test_saving_again_replaces_the_checkpoint_and_keeps_other_files(tmp_path: Path) -> None:
    first = cupy_awq.quantize(np.eye(64, 16, dtype=np.float32), group_size=16)
    cupy_awq.save(tmp_path / "w", {"a": first, "b": np.ones(3)})
    (tmp_path / "w" / "notes.txt").write_text("mine")
    (tmp_path / "w" / "model.safetensors").chmod(0o600)
    cupy_awq.save(tmp_path / "w", {"c": first})
    assert list(cupy_awq.load(tmp_path / "w", device="cpu")) == ["c"]
    assert set(all_files(tmp_path / "w")) == {"config.json", "model.safetensors", "notes.txt"}
    assert stat.S_IMODE((tmp_path / "w" / "model.safetensors").stat().st_mode) == 0o600


WEIGHT = cupy_awq.quantize(np.eye(64, 16, dtype=np.float32), group_size=16)
FLOATS_OFFSETS = PackedWeight(WEIGHT.qweight, WEIGHT.scales, np.ones((4, 16), np.float16))
NARROW = cupy_awq.quantize(np.eye(36, 8, dtype=np.float32), group_size=12)


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([WEIGHT], TypeError, "weights: expected a mapping from names to weights, got list"),
        ({3: WEIGHT}, TypeError, "weights: expected names of type str, got int"),
        ({"": WEIGHT}, ValueError, "weights: expected names, got an empty one"),
        ({"a": [1.0]}, TypeError, "weights: 'a': expected a NumPy or CuPy array, got list"),
        ({"a": np.array(["x"])}, ValueError, "tensor 'a': expected a dtype of BOOL, .*, got <U1"),
        (
            {"a": AwqLinear(WEIGHT, activation="silu")},
            ValueError,
            "'a': expected a layer without activation, got 'silu'",
        ),
        (
            {"a": FLOATS_OFFSETS},
            ValueError,
            "module 'a': expected packed or symmetric zero points .*, got float offsets",
        ),
        ({"a": NARROW}, ValueError, "module 'a': expected K to be a multiple of 8 for compressed-tensors, got 36"),
        ({"a": WEIGHT, "a.weight_packed": np.ones(2)}, ValueError, "clash|twice|int32"),
        ({"__metadata__": np.ones(2)}, ValueError, "tensor '__metadata__': expected another name"),
        ({"a": WEIGHT, "x.weight_scale": np.ones(2)}, ValueError, "expected weight_packed beside it, got none"),
    ],
)
@pytest.mark.parametrize("name", ["w", "w.safetensors"])
def test_what_cannot_be_saved_is_refused_and_the_old_checkpoint_stays(
    tmp_path: Path, name: str, weights: Any, error: type[Exception], message: str
) -> None:
    cupy_awq.save(tmp_path / name, {"old": WEIGHT})
    before = all_files(tmp_path)
    with pytest.raises(error, match=message):
        cupy_awq.save(tmp_path / name, weights)
    assert all_files(tmp_path) == before


def test_a_folder_without_modules_has_no_quantization(tmp_path: Path) -> None:
    cupy_awq.save(tmp_path, {"a": np.ones((2, 3), np.float16)})
    assert json.loads((tmp_path / "config.json").read_text()) == {}
    assert cupy_awq.load(tmp_path, device="cpu")["a"].shape == (2, 3)
