# SPDX-License-Identifier: Apache-2.0
"""A smoke test of an installed package without a GPU: the demo, products in NumPy, NVRTC, and the import of CuPy."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import numpy as np

import cupy_awq
from cupy_awq.kernels import select
from cupy_awq.kernels.gemm.problem import Problem
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device


def main() -> None:
    assert "site-packages" in cupy_awq.__file__, cupy_awq.__file__
    rows = json.loads(subprocess.check_output([sys.executable, "-m", "cupy_awq", "demo", "--json"]))
    assert rows, "the demo timed no layer"
    assert all(row["error"] < 5e-4 for row in rows), rows
    weight = cupy_awq.quantize(np.random.default_rng(0).standard_normal((256, 128)).astype(np.float32))
    assert cupy_awq.AwqLinear(weight)(np.ones((3, 256), np.float16)).shape == (3, 128)
    import cupy

    compiler.build(select.choose(Problem(16, 4096, 4096, 128), device.nominal(80)).plan.kernel)
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "ml_dtypes", "cuda-bindings")}
    print(f"Python {sys.version.split()[0]}, CuPy {cupy.__version__}, {versions}")


if __name__ == "__main__":
    main()
