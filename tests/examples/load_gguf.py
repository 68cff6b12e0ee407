# SPDX-License-Identifier: Apache-2.0
"""Load 4-bit layers of a GGUF file, with their codes as they are in the file.

    pip install ".[llm]"
    python tests/examples/load_gguf.py [FILE.gguf]

Without an argument, the script writes a small file by the package gguf of llama.cpp.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import cupy_awq


def write_example(path: Path) -> None:
    """Write a file with one Q4_0 matrix [256, 512], which is a weight of K = 512 and N = 256."""
    import gguf

    w = np.random.default_rng(0).standard_normal((256, 512), np.float32)
    kind = gguf.GGMLQuantizationType.Q4_0
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_tensor("blk.0.ffn_up.weight", gguf.quantize(w, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


with tempfile.TemporaryDirectory() as folder:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "example.gguf"
    if len(sys.argv) == 1:
        write_example(path)
    found = cupy_awq.load(path, device="cpu")  # without `device`, on the GPU; names are those of Hugging Face
    for name, layer in found.layers.items():
        y = layer(np.ones((1, layer.shape[0]), np.float16))
        print(f"{name}: {layer} -> y {y.shape}")
