# SPDX-License-Identifier: Apache-2.0
"""Models with experts on the GPU back end, with every kernel of their layers on the simulator."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_awq import llm
from cupy_awq.check import BFLOAT16, FLOAT16
from cupy_awq.kernels import select
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.ops import experts, packed_experts
from cupy_awq.runtime import arrays, device
from tests import llm_models, simt
from tests.backends import runner
from tests.experts import repack_experts, run_steps
from tests.golden_models import FILE, IDS, write_quantized
from tests.test_llm_device import SimulatedOps, simulated, simulated_logits

__all__ = ["simulated"]
NOWHERE = -7
"""A device ordinal that no array has: with it in place of HOST, operations on NumPy arrays launch kernels."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, simulated: None) -> list[str]:
    """Run the kernels of experts on the simulator and return the list of their names, which grows with each launch."""
    here, names = device.nominal(90), []

    def run(plan: Any, buffers: dict[str, Any]) -> None:
        names.append(plan.kernel.entry)
        simt.run(plan, {name: buffers[name] for name in plan.buffers})

    def choose(problem: Any, index: int) -> Any:
        return SimpleNamespace(launch=lambda buffers: run(select.choose(problem, here).plan, buffers))

    def repack(qweight: Any, scales: Any, qzeros: Any, form: Any, index: int) -> Any:
        parts = SimpleNamespace(qweight=qweight, scales=scales, qzeros=qzeros, form=form)
        return repack_experts(runner("latest"), parts, here)

    monkeypatch.setattr(arrays, "is_aligned", lambda *some: True)
    monkeypatch.setattr(arrays, "address", lambda a: a.ctypes.data)
    monkeypatch.setattr(experts, "HOST", NOWHERE)
    monkeypatch.setattr(packed_experts, "HOST", NOWHERE)
    monkeypatch.setattr(packed_experts, "_repack", repack)
    monkeypatch.setattr(experts, "choose_kernel", choose)
    monkeypatch.setattr(experts, "_launch", lambda steps, buffers, index: run_steps(run, steps, buffers, here))
    return names


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("glm4_moe", FLOAT16),
        *(pytest.param(family, FLOAT16, marks=pytest.mark.slow) for family in ("mixtral", "qwen2_moe", "qwen3_moe")),
        pytest.param("qwen2_moe", BFLOAT16, marks=pytest.mark.slow),
    ],
)
def test_logits_of_all_kernels_are_those_of_transformers(
    tmp_path: Path, launched: list[str], family: str, dtype: Any
) -> None:
    """A prompt and single tokens; the gate of a shared expert runs as the router of one expert."""
    files = llm.read(write_quantized(tmp_path, llm_models.EXPERT_FAMILIES[family]))
    model = build_model(files, SimulatedOps(files.config, 0, dtype))
    found, wanted = simulated_logits(model, IDS[:4], 3), np.load(FILE)[family][:4]
    assert np.abs(found - wanted).max() <= (0.01 if dtype == FLOAT16 else 0.08) * np.abs(wanted).max()
    assert {"choose_experts", "expert_gemm"} <= set(launched)
