# SPDX-License-Identifier: Apache-2.0
"""Tests of the memory that loading a model takes: none of them permits a second copy of the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tools import loading_memory

LIMIT = 1.15
"""The largest peak, over the size of the weights."""
LAYERS = {**loading_memory.MODEL, "num_hidden_layers": 12, "hidden_size": 1024, "intermediate_size": 2048}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of 89 MB in 4 bits, a fifth of which is the embedding table."""
    config = {**LAYERS, "vocab_size": 8192}
    return loading_memory.write(tmp_path_factory.mktemp("models") / "model", config)


def peaks(folder: Path, *options: str) -> dict[str, Any]:
    """Return the figures of `loading_memory` in a process of its own, whose heap has no free memory to use again."""
    command = [sys.executable, "-m", "tests.tools.loading_memory", str(folder), *options]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def test_float32_weights_on_the_cpu_leave_no_pages_of_the_file_in_memory(folder: Path) -> None:
    found = peaks(folder)
    assert 0.8 * found["weights"] < found["peak"] < LIMIT * found["weights"]
    assert found["mapped"] < 0.5 * found["file"]


def test_weights_of_the_file_on_the_cpu_are_not_copied(folder: Path) -> None:
    found = peaks(folder, "--stream")
    assert found["anonymous"] < 0.05 * found["weights"]
    assert found["peak"] < LIMIT * found["weights"]


@pytest.mark.gpu
def test_weights_on_a_gpu_are_in_memory_once(tmp_path: Path) -> None:
    """CPU and GPU memory together, as where they are the same: on a Jetson. The model has 0.9 GB."""
    found = peaks(tmp_path / "model", "--device", "cuda")
    assert 0.8 * found["weights"] < found["gpu"]
    assert found["peak"] < LIMIT * found["weights"]
