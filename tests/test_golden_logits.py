# SPDX-License-Identifier: Apache-2.0
"""Logits of tiny mixtures of experts, dense and in 4 bits, against those that transformers computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_awq import llm
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from tests import llm_models
from tests.golden_models import FILE, IDS, write_folder, write_quantized
from tests.logits import logits_of


@pytest.mark.parametrize("family", llm_models.EXPERT_FAMILIES)
@pytest.mark.parametrize("write", [write_folder, write_quantized])
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, write: Any) -> None:
    files = llm.read(write(tmp_path, llm_models.EXPERT_FAMILIES[family]))
    model = build_model(files, NumpyOps(files.config))
    found, wanted = logits_of(model, IDS), np.load(FILE)[family]
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
    np.testing.assert_array_equal(found.argmax(axis=-1), wanted.argmax(axis=-1))
