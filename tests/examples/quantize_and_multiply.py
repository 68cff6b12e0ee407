# SPDX-License-Identifier: Apache-2.0
"""Quantize a weight to 4 bits and multiply by it, as a function and as a layer.

    python tests/examples/quantize_and_multiply.py

The arrays are NumPy's, so the CPU computes; CuPy arrays run on the GPU.
"""

import numpy as np

import cupy_awq

rng = np.random.default_rng(0)
w = rng.standard_normal((1024, 512), np.float32) / 32  # the weight W [K, N]
x = rng.standard_normal((8, 1024), np.float32)  # the activations x [M, K]

weight = cupy_awq.quantize(w, group_size=128)
print(f"{weight}: {weight.nbytes / (2 * w.size):.0%} of the bytes in float16")

y = x @ weight  # the same as cupy_awq.gemm(x, weight.qweight, weight.scales, weight.qzeros)
exact = x @ w
print(f"error of 4 bits: {np.linalg.norm(y - exact) / np.linalg.norm(exact):.1%}")

layer = cupy_awq.AwqLinear(weight, bias=np.ones(512, np.float16), activation="relu")
print(f"{layer}: {layer(x).shape}, smallest element {layer(x).min():.1f}")
