# SPDX-License-Identifier: Apache-2.0
"""Tests of experts under every name that writers use: one module per expert, and routers as plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cupy_awq import reference
from cupy_awq.checkpoint import CheckpointError, Module, experts, files, read
from tests import packers
from tests.format_files import save_folder
from tests.packers import Packed

Array = npt.NDArray[Any]

COUNT, K, N, GROUP = 3, 64, 16, 32
LAYER = "model.layers.1"

AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"}


def weight(seed: int) -> Packed:
    rng = np.random.default_rng(seed)
    codes, zeros = (rng.integers(0, 16, (rows, N), dtype=np.uint8) for rows in (K, K // GROUP))
    return Packed(codes, zeros, rng.standard_normal((K // GROUP, N)).astype(np.float16), GROUP, np.arange(K) // GROUP)


WEIGHTS = [weight(seed) for seed in range(COUNT)]
COMPRESSED = packers.compressed_tensors_config(WEIGHTS[0])


def mlx(w: Packed) -> dict[str, Array]:
    return packers.mlx(w, packers.offsets_of(w))


Pack = Callable[[Packed], dict[str, Array]]
PER_EXPERT: list[tuple[str, dict[str, Any], Pack]] = [
    ("mlp.experts.{}.gate_proj", {"quantization_config": AWQ}, packers.awq_gemm),
    ("mlp.experts.{}.gate_proj", {"quantization_config": GPTQ}, lambda w: packers.gptq(w, 2)),
    ("mlp.experts.{}.down_proj", {"quantization_config": COMPRESSED}, packers.compressed_tensors),
    ("block_sparse_moe.experts.{}.w1", {"quantization_config": AWQ}, packers.awq_gemm),
    ("block_sparse_moe.experts.{}.w2", {"quantization_config": COMPRESSED}, packers.compressed_tensors),
    ("block_sparse_moe.experts.{}.gate_proj", {"quantization_config": COMPRESSED}, packers.compressed_tensors),
]
FUSED: list[tuple[str, str, dict[str, Any], Pack]] = [
    (
        "mlp.switch_mlp.gate_proj.{}",
        "mlp.experts.{}.gate_proj",
        {"quantization": {"bits": 4, "group_size": GROUP}},
        mlx,
    ),
    (
        "block_sparse_moe.switch_mlp.up_proj.{}",
        "block_sparse_moe.experts.{}.w3",
        {"quantization": {"bits": 4, "group_size": GROUP}},
        mlx,
    ),
    (
        "mlp.experts.gate_up_proj.{}",
        "mlp.experts.{}.gate_up_proj",
        {"quantization_config": COMPRESSED},
        packers.compressed_tensors,
    ),
]


def check(path: Path, tensors: dict[str, Array], config: dict[str, Any], key: str) -> None:
    router = np.ones((COUNT, K), np.float16)
    tensors = {**tensors, f"{LAYER}.mlp.gate.weight": router}
    contents = read(save_folder(path, tensors, config))
    names = [f"{LAYER}.{key}".format(expert) for expert in range(COUNT)]
    assert sorted(contents) == sorted([*names, f"{LAYER}.mlp.gate.weight"])
    np.testing.assert_array_equal(contents.read(f"{LAYER}.mlp.gate.weight"), router)
    for w, name in zip(WEIGHTS, names, strict=True):
        module = contents[name]
        assert isinstance(module, Module)
        found = reference.dequantize(module.weight.qweight, module.weight.scales, module.weight.qzeros)
        offsets = packers.offsets_of(w) if "quantization" in config else None
        np.testing.assert_array_equal(found, w.dense(offsets))
    parent, _, projection = names[0].rpartition(".experts.0.")
    stack = experts.stack(contents, parent, projection, COUNT)
    assert stack.qweight.shape == (COUNT, K, N // 8)


@pytest.mark.parametrize(("key", "config", "pack"), PER_EXPERT)
def test_modules_of_each_expert_keep_their_names(tmp_path: Path, key: str, config: dict[str, Any], pack: Pack) -> None:
    tensors = {
        f"{LAYER}.{key}.{part}".format(expert): array
        for expert, w in enumerate(WEIGHTS)
        for part, array in pack(w).items()
    }
    check(tmp_path, tensors, config, key)


@pytest.mark.parametrize(("name", "key", "config", "pack"), FUSED)
def test_fused_modules_become_one_module_per_expert(
    tmp_path: Path, name: str, key: str, config: dict[str, Any], pack: Pack
) -> None:
    packed = [pack(w) for w in WEIGHTS]
    tensors = {f"{LAYER}.{name}".format(part): np.stack([parts[part] for parts in packed]) for part in packed[0]}
    check(tmp_path, tensors, config, key)


def test_fused_tensors_without_a_dot_are_those_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = [packers.compressed_tensors(w) for w in WEIGHTS]
    tensors = {
        f"{LAYER}.mlp.experts.gate_up_proj_{part.removeprefix('weight_')}": np.stack([parts[part] for parts in packed])
        for part in packed[0]
    }
    check(tmp_path, tensors, {"quantization_config": COMPRESSED}, "mlp.experts.{}.gate_up_proj")
    assert list(read(tmp_path / "model.safetensors")) == list(read(tmp_path))
    twice = tensors | {f"{LAYER}.mlp.experts.gate_up_proj.weight_scale": np.ones((COUNT, N, 2), np.float16)}
    save_folder(tmp_path / "twice", twice, {"quantization_config": COMPRESSED})
    for path in (tmp_path / "twice", tmp_path / "twice" / "model.safetensors"):
        with pytest.raises(CheckpointError, match=r"expected a unique name, got '.*gate_up_proj\.weight_scale' twice"):
            read(path)
    monkeypatch.setattr(files, "MAX_MODULES", COUNT - 1)
    with pytest.raises(CheckpointError, match=r"gate_up_proj': expected at most 2 modules and tensors, got 3"):
        read(tmp_path)


def test_a_list_of_modules_that_are_not_converted_is_not_evaluated(tmp_path: Path) -> None:
    """AutoAWQ excludes the router "gate" from quantization by a list of names.

    "gate" is also a part of "gate_proj": if the list were applied to the names of experts, these would not be read.
    """
    tensors = {
        f"{LAYER}.mlp.experts.{expert}.gate_proj.{part}": array
        for expert, w in enumerate(WEIGHTS)
        for part, array in packers.awq_gemm(w).items()
    }
    config = {"quantization_config": {**AWQ, "modules_to_not_convert": ["gate"]}}
    check(tmp_path, tensors, config, "mlp.experts.{}.gate_proj")


def test_the_router_of_mlx_in_8_bits_and_dense_experts_are_plain_tensors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    router = Packed(
        rng.integers(0, 256, (K, 8), dtype=np.uint8),
        np.zeros((K // GROUP, 8), np.uint8),
        np.ones((K // GROUP, 8), np.float16),
        GROUP,
        np.arange(K) // GROUP,
    )
    biases = np.full((K // GROUP, 8), -3, np.float16)
    at = f"{LAYER}.mlp"
    tensors = {f"{at}.gate.{part}": array for part, array in packers.mlx(router, biases, bits=8).items()}
    tensors |= {f"{at}.switch_mlp.up_proj.{part}": np.stack([a, a]) for part, a in mlx(WEIGHTS[0]).items()}
    tensors[f"{at}.experts.gate_up_proj"] = np.ones((2, 16, 8), np.float16)
    quantization = {"bits": 4, "group_size": GROUP, f"{at}.gate": {"bits": 8, "group_size": GROUP}}
    contents = read(save_folder(tmp_path, tensors, {"quantization": quantization}))
    np.testing.assert_array_equal(contents.read(f"{at}.gate.weight"), router.codes.T.astype(np.float16) - 3)
    assert contents.read(f"{at}.experts.gate_up_proj").shape == (2, 16, 8)
    assert contents.is_module(f"{at}.experts.1.up_proj")
