# SPDX-License-Identifier: Apache-2.0
"""Logits of tiny mixtures of experts, dense and in 4 bits, against those that transformers computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cupy_awq import llm
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.packing import pack_int4
from tests import llm_models
from tests.golden_models import FILE, IDS, golden_codes, golden_scale, golden_tensors, write_folder


def write_quantized(path: Path, config: dict[str, Any]) -> Path:
    """Write the model with the linear layers of its decoder layers in AutoAWQ's format and return its folder."""
    path, found = write_folder(path, config), golden_tensors(config)
    for module, (k, n) in llm_models.linears(config).items():
        name = f"{module}.weight"
        del found[name]
        found[f"{module}.qweight"] = pack_int4(np.ascontiguousarray(golden_codes(name, (n, k)).T))
        found[f"{module}.scales"] = np.full((k // 16, n), golden_scale(name, (n, k)), np.float16)
        found[f"{module}.qzeros"] = pack_int4(np.full((k // 16, n), 8, np.uint8))
    save_file(found, path / "model.safetensors")
    quantization = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 16, "zero_point": True}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return path


@pytest.mark.parametrize("family", llm_models.EXPERT_FAMILIES)
@pytest.mark.parametrize("write", [write_folder, write_quantized])
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, write: Any) -> None:
    files = llm.read(write(tmp_path, llm_models.EXPERT_FAMILIES[family]))
    model = build_model(files, NumpyOps(files.config))
    (hidden,) = model.prefill(model.ops.make_cache(1, len(IDS)), 0, IDS)
    found, wanted = model.logits(hidden)[0], np.load(FILE)[family]
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
    np.testing.assert_array_equal(found.argmax(axis=-1), wanted.argmax(axis=-1))
