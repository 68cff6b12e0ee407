# SPDX-License-Identifier: Apache-2.0
"""Quantize a weight to 8 bits with a scale per group of rows, and multiply 16-bit activations by it.

python tests/examples/multiply_int8_weight.py
"""

import numpy as np

from cupy_awq import BlockQuantizedWeight, Int8Linear

K, N, GROUP_SIZE = 256, 128, 64

rng = np.random.default_rng(0)
w = rng.standard_normal((K, N)).astype(np.float32) / 16
groups = w.T.reshape(N, K // GROUP_SIZE, GROUP_SIZE)
scale = np.abs(groups).max(2) / 127
codes = (np.rint(groups / scale[:, :, None]) + 128).astype(np.uint8).reshape(N, 1, 1, K)
weight = BlockQuantizedWeight(codes, scale.astype(np.float16), None, bits=8)

layer = Int8Linear(weight, bias=np.zeros(N, np.float32), activation="silu")
print(layer)
x = rng.standard_normal((3, K)).astype(np.float16)
y = layer(x)
dense = x.astype(np.float32) @ w
error = np.linalg.norm(y - dense / (1 + np.exp(-dense))) / np.linalg.norm(y)
print(f"x {x.shape} -> y {y.shape} {y.dtype}, error {error:.1%}")
