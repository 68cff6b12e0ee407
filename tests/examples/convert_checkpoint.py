# SPDX-License-Identifier: Apache-2.0
"""Convert an AutoAWQ checkpoint to compressed-tensors without rounding, and compare the results of a layer.

    python tests/examples/convert_checkpoint.py

On the command line: python -m cupy_awq convert SRC DST --format compressed-tensors
"""

import tempfile
from pathlib import Path

import numpy as np

import cupy_awq
from cupy_awq import checkpoint

source = Path(cupy_awq.__file__).parent / "data" / "smollm2-mlp"

with tempfile.TemporaryDirectory() as folder:
    contents = checkpoint.read(source)  # NumPy arrays, read from the mapped file when they are accessed
    checkpoint.save(folder, contents, "compressed-tensors")  # other formats: "autoawq", "gptq"
    print(*sorted(path.name for path in Path(folder).iterdir()))

    before, after = (cupy_awq.load(path, device="cpu") for path in (source, folder))
    x = np.ones((1, 576), np.float16)
    name = "model.layers.0.mlp.up_proj"
    print(f"{name}: equal bits {bool((before[name](x) == after[name](x)).all())}")
    del after  # close the mapped files first: Windows cannot delete a folder with open files
