# SPDX-License-Identifier: Apache-2.0
"""Logits of tiny mixtures of experts, dense and in 4 bits, against those that transformers computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cupy_awq import llm
from cupy_awq.llm.decoder.build import build_model, make_ops
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from tests import llm_models
from tests.golden_models import FILE, FORMATS, IDS, write_folder, write_quantized
from tests.logits import logits_of


@pytest.mark.parametrize("family", llm_models.EXPERT_FAMILIES)
@pytest.mark.parametrize("form", [None, *FORMATS])
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, form: str | None) -> None:
    """The logits of dense and of quantized files are those of transformers; so are those of the papers' formulas."""
    config = llm_models.EXPERT_FAMILIES[family]
    files = llm.read(write_folder(tmp_path, config) if form is None else write_quantized(tmp_path, config, form))
    model = build_model(files, NumpyOps(files.config))
    found, wanted = logits_of(model, IDS), np.load(FILE)[family]
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
    np.testing.assert_array_equal(found.argmax(axis=-1), wanted.argmax(axis=-1))
    if form == "awq":
        assert np.abs(llm_models.forward(files, IDS) - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.gpu
@pytest.mark.parametrize("family", llm_models.EXPERT_FAMILIES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logits_on_the_gpu_are_those_of_transformers(
    tmp_path: Path, family: str, form: str, batch_invariant: bool
) -> None:
    files = llm.read(write_quantized(tmp_path, llm_models.EXPERT_FAMILIES[family], form))
    model = build_model(files, make_ops(files, 0, batch_invariant=batch_invariant))
    found, wanted = logits_of(model, IDS), np.load(FILE)[family]
    assert np.abs(found - wanted).max() <= 0.01 * np.abs(wanted).max()
