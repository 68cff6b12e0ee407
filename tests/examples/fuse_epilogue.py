# SPDX-License-Identifier: Apache-2.0
"""Fuse bias, activation and residual into the launch of a GEMM, and SwiGLU into that of two.

python tests/examples/fuse_epilogue.py
"""

import numpy as np

from cupy_awq import AwqLinear, gemm, quantize

rng = np.random.default_rng(0)
x = rng.standard_normal((4, 256)).astype(np.float16)  # the activations x [M, K]
bias = rng.standard_normal(512).astype(np.float16)  # one value per column of W [K, N]
weight = quantize(rng.standard_normal((256, 512), np.float32) / 16)

# `gemm` takes the tensors as a checkpoint holds them: activation(x @ W + bias).
y = gemm(x, weight.qweight, weight.scales, weight.qzeros, bias=bias, activation="gelu")
print(f"gelu(x @ W + bias): {y.shape} {y.dtype}")

# A layer owns its bias and activation; a call passes the residual, which is added last.
down = AwqLinear(quantize(rng.standard_normal((512, 256), np.float32) / 23))
print(f"x + y @ W2: {down(y, residual=x).shape}")

# The gate and up projections of an MLP as one layer with half as many columns: silu(x @ gate) * (x @ up).
gate, up = (quantize(rng.standard_normal((256, 512), np.float32) / 16) for _ in range(2))
gated = AwqLinear.concatenate([gate, up], activation="swiglu")
print(f"silu(x @ gate) * (x @ up): {gated(x).shape} from a weight {gated.shape}")

# Three projections that share x as one launch, and their results as views of one array.
qkv = AwqLinear.concatenate([gate, up, weight])
q, k, v = qkv.split(qkv(x))
print(f"q, k, v: {q.shape} {k.shape} {v.shape}")
