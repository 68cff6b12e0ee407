# SPDX-License-Identifier: Apache-2.0
"""Tests that language models in other formats give the logits of the same weights in AutoAWQ's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from cupy_awq import llm
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.packing import unpack_int4
from tests import llm_models, packers
from tests.logits import logits_of
from tests.packers import Packed, round_once

Array = npt.NDArray[Any]

IDS = [int(i) for i in np.random.default_rng(1).integers(0, llm_models.VOCAB, 9)]
GROUP = 16
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"}
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quantization_config": GPTQ},
    "mlx": {"quantization": {"bits": 4, "group_size": GROUP}},
    "hqq": {"quantization_config": packers.HQQ_CONFIG},
}


def numbers(tensors: dict[str, Array], name: str, group: int = GROUP) -> Packed:
    """Return a layer's codes, zero points and scales from its AutoAWQ tensors, to be packed in other formats."""
    codes, zeros = (unpack_int4(tensors[f"{name}.{part}"]) for part in ("qweight", "qzeros"))
    groups = np.arange(len(codes), dtype=np.int32) // group
    return Packed(codes, zeros, tensors[f"{name}.scales"], group, groups)


def parts_of(layout: str, w: Packed) -> dict[str, Array]:
    if layout == "gptq":
        return packers.gptq(w, 2)
    if layout == "compressed-tensors":
        return packers.compressed_tensors(w)
    if layout == "hqq":
        return packers.hqq(w, w.zeros.astype(np.float16))
    return packers.mlx(w, round_once(-w.scales.astype(np.float64) * w.zeros, w.scales.dtype))


def logits(path: Path) -> Array:
    files = llm.read(path)
    model = build_model(files, NumpyOps(files.config, expand_weights=False))
    return logits_of(model, IDS)


def quantized_table(table: Array) -> tuple[dict[str, Array], Array]:
    """Return MLX's tensors for a quantized embedding table [vocab, hidden], and the values they dequantize to."""
    grouped = table.astype(np.float64).reshape(len(table), -1, GROUP)
    low = grouped.min(axis=-1)
    scales = round_once((grouped.max(axis=-1) - low).T / 15, table.dtype)
    biases = round_once(low.T, table.dtype)
    codes = np.rint((grouped - biases.T[..., None]) / scales.T[..., None]).clip(0, 15).astype(np.uint8)
    groups = np.arange(table.shape[1], dtype=np.int32) // GROUP
    w = Packed(codes.reshape(table.shape).T, codes[..., 0].T, scales, GROUP, groups)
    return packers.mlx(w, biases), w.dense(biases).T


@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors", "hqq", "mlx"])
def test_logits_are_those_of_the_same_weights_in_awq(tmp_path: Path, layout: str) -> None:
    config = {**llm_models.QWEN2, "tie_word_embeddings": layout == "mlx"}
    path = llm_models.folder(tmp_path / "awq", config, GROUP)
    tensors = llm_models.tensors(config, group=GROUP)
    changed = dict(tensors)
    for name in llm_models.linears(config):
        w = numbers(tensors, name)
        for part in ("qweight", "qzeros", "scales"):
            del changed[f"{name}.{part}"]
        changed |= {f"{name}.{part}": array for part, array in parts_of(layout, w).items()}
    if layout == "mlx":  # MLX also quantizes the embedding table.
        parts, table = quantized_table(changed.pop("model.embed_tokens.weight"))
        changed |= {f"model.embed_tokens.{part}": array for part, array in parts.items()}
        save_file(tensors | {"model.embed_tokens.weight": np.ascontiguousarray(table)}, path / "model.safetensors")
    wanted = logits(path)
    settings = CONFIGS.get(layout, {"quantization_config": packers.compressed_tensors_config(w)})
    (path / "config.json").write_text(json.dumps({**config, **settings}))
    save_file(changed, path / "model.safetensors")
    found = logits(path)
    if layout == "mlx":  # MLX rounds the offsets -scale * zero point, so logits differ slightly
        np.testing.assert_allclose(found, wanted, atol=0.02 * np.abs(wanted).max())
    else:
        np.testing.assert_array_equal(found, wanted)
