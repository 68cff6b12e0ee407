# SPDX-License-Identifier: Apache-2.0
"""Multiply with INT8 or FP8 activations, which use the 8-bit tensor cores of a GPU (W4A8).

python tests/examples/quantize_activations.py
"""

import numpy as np

import cupy_awq

rng = np.random.default_rng(0)
weight = cupy_awq.quantize(rng.standard_normal((1024, 512), np.float32))
x = rng.standard_normal((32, 1024)).astype(np.float16)
exact = cupy_awq.AwqLinear(weight)(x).astype(np.float32)

# A layer that quantizes x in each call. "auto" does so only where the cost models expect that to be faster.
for x_dtype in ("int8", "fp8"):
    y = cupy_awq.AwqLinear(weight, x_dtype=x_dtype)(x).astype(np.float32)
    print(f"{x_dtype}: y changes by {np.linalg.norm(y - exact) / np.linalg.norm(exact):.2%}")

# The two steps apart, for activations that several layers share.
blocks = cupy_awq.from_packed(weight)
codes, scale, offset, sums = cupy_awq.quantize_activations(x, block_size=128, symmetric=True)
y = cupy_awq.gemm_int8(codes, scale, offset, sums, blocks, block_size=128)
print(f"codes {codes.shape} {codes.dtype}, scales {scale.shape}, y {y.shape} {y.dtype}")
