# SPDX-License-Identifier: Apache-2.0
"""Tests of GGUF weights in 8 bits: their values against the package gguf, and models that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_awq import llm
from cupy_awq.check import BFLOAT16, FLOAT16
from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.gguf import q8
from cupy_awq.checkpoint.gguf.container import Blocks
from cupy_awq.llm.decoder.build import activation_dtype, build_model
from cupy_awq.llm.decoder.cuda_backend import CudaOps
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.families.description import LinearSpec
from cupy_awq.llm.files.model_files import Int8Module
from cupy_awq.runtime import device
from tests import llm_models
from tests.logits import logits_of
from tests.test_formats_gguf import random_blocks, values_of
from tests.test_llm_device import SimulatedOps, simulated

__all__ = ["simulated"]  # The import makes pytest find the fixture `simulated` in this module.

IDS = [int(i) for i in np.random.default_rng(4).integers(0, llm_models.VOCAB, 7)]
KINDS = {"attn_q": "Q8_0", "attn_k": "Q5_0", "attn_v": "Q5_0", "ffn_up": "Q8_0", "ffn_down": "Q8_0"}


@pytest.mark.parametrize("kind", list(q8.CONVERTERS))
def test_codes_and_scales_give_the_values_of_the_package_gguf(kind: str) -> None:
    data = random_blocks(kind, 11, 512)
    weight = q8.read_weight(Blocks(kind, (11, 512), data), "file")
    assert (weight.shape, weight.bits, weight.dtype) == ((11, 1, 1, 512), 8, FLOAT16)
    found, wanted = Int8Module(weight, None).dequantize().weight, values_of(data, kind)
    if kind == "Q6_K":
        # the reader rounds the product d * sc, which the package gguf does not
        assert (np.abs(found - wanted) <= 2.0**-10 * np.abs(wanted) + 2.0**-19).all()
    else:
        np.testing.assert_array_equal(found, wanted.astype(np.float16))


def test_a_scale_that_is_not_finite_is_refused() -> None:
    data = random_blocks("Q8_0", 2, 64)
    data[1, 34:36] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(CheckpointError, match=r"^file: expected finite float16 scales, got others$"):
        q8.read_weight(Blocks("Q8_0", (2, 64), data), "file")


def logits(path: Path, ops: Any, **options: Any) -> np.ndarray:
    """Return the logits of all but the last id as a prompt, then those of the last id as a decode step."""
    files = llm.read(path)
    model = build_model(files, ops(files.config, **options))
    return logits_of(model, IDS, len(IDS) - 1)


def test_every_8_bit_layer_of_a_file_is_found(tmp_path: Path) -> None:
    llm_models.gguf_file(tmp_path / "m.gguf", KINDS)
    files = llm.read(tmp_path / "m.gguf")
    names = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"}
    expected = {f"model.layers.{i}.{name}" for i in range(2) for name in names} | {"model.embed_tokens"}
    assert set(files.int8_weights) == expected
    for name in expected:
        n, k = files.tensors[f"{name}.weight"]().shape
        layer = files.read_int8_module(LinearSpec(name, k, n))
        assert layer is not None
        np.testing.assert_array_equal(layer.dequantize().weight, files.tensors[f"{name}.weight"]())
    assert files.read_int8_module(LinearSpec("mlp.gate_proj", 64, 96), "model.layers.0") is None
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight: expected shape \(96, 32\), got \(96, 64\)$"):
        files.read_int8_module(LinearSpec("mlp.up_proj", 32, 96), "model.layers.0")


LINEARS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        (KINDS, FLOAT16),
        ({"token_embd": "Q4_1"}, FLOAT16),
        ({"token_embd": "Q4_1", **dict.fromkeys(LINEARS, "BF16")}, BFLOAT16),
    ],
)
def test_8_bit_codes_and_then_4_bit_codes_decide_for_float16_activations(
    tmp_path: Path, kinds: dict[str, str], dtype: Any
) -> None:
    llm_models.gguf_file(tmp_path / "m.gguf", {**kinds, "attn_q": "BF16"})
    files = llm.read(tmp_path / "m.gguf")
    assert [activation_dtype(files, device.nominal(arch)) for arch in (70, 75, 80)] == [dtype, FLOAT16, dtype]


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
def test_a_gpu_multiplies_by_8_bit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    llm_models.gguf_file(tmp_path / "m.gguf", KINDS)
    monkeypatch.setattr(CudaOps, "int8_min_k", 0)
    entries, run = set(), SimulatedOps.run

    def recorded(ops: SimulatedOps, plan: Any, **arrays: Any) -> None:
        entries.add(plan.kernel.entry)
        run(ops, plan, **arrays)

    monkeypatch.setattr(SimulatedOps, "run", recorded)
    found = logits(tmp_path / "m.gguf", SimulatedOps, device_index=0, dtype=dtype)
    wanted = logits(tmp_path / "m.gguf", NumpyOps)
    assert np.abs(found - wanted).max() <= (0.01 if dtype == FLOAT16 else 0.08) * np.abs(wanted).max()
    assert ("dense_int8_mma" in entries, "dense_mma" in entries) == (dtype == FLOAT16, dtype == BFLOAT16)


@pytest.mark.usefixtures("simulated")
def test_a_layer_with_a_small_k_is_dequantized(tmp_path: Path) -> None:
    llm_models.gguf_file(tmp_path / "m.gguf", KINDS)
    files = llm.read(tmp_path / "m.gguf")

    class Ops(SimulatedOps):
        def _dense(self, part: Any, *rest: Any) -> Any:
            assert not isinstance(part, Int8Module)
            return super()._dense(part, *rest)

    build_model(files, Ops(files.config, 0, FLOAT16))
    assert max(linear.k for layer in files.config.layers for linear in layer.linears) < CudaOps.int8_min_k < 4096


@pytest.mark.gpu
def test_the_gpu_gives_the_logits_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaOps, "int8_min_k", 0)
    llm_models.gguf_file(tmp_path / "m.gguf", KINDS)
    found = logits(tmp_path / "m.gguf", CudaOps, device_index=0, dtype=FLOAT16)
    wanted = logits(tmp_path / "m.gguf", NumpyOps)
    assert np.abs(found - wanted).max() <= 0.01 * np.abs(wanted).max()
