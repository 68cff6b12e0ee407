# SPDX-License-Identifier: Apache-2.0
"""Multiply by a weight whose rows were sorted before they were grouped (GPTQ's desc_act, g_idx in a checkpoint).

python tests/examples/permute_activations.py
"""

import numpy as np

import cupy_awq

K, N, GROUP = 256, 128, 64
rng = np.random.default_rng(0)
# rows of unequal size, which lose least if similar ones share a group
w = rng.standard_normal((K, N), np.float32) * rng.lognormal(size=(K, 1)).astype(np.float32)
x = rng.standard_normal((4, K)).astype(np.float16)


def error(layer: cupy_awq.AwqLinear) -> float:
    """Return the error of a layer's output relative to the exact x @ w."""
    return float(np.linalg.norm(layer(x) - x @ w) / np.linalg.norm(x @ w))


# Rows of similar size share a group. (GPTQ sorts by the size of the inputs instead.)
order = np.argsort(abs(w).max(axis=1)).astype(np.int32)
weight = cupy_awq.quantize(w[order], group_size=GROUP)

# The layer computes x[:, order] @ W[order] = x @ W. On a GPU the gather is part of the GEMM, or one more launch.
print(f"rows sorted by size: {error(cupy_awq.AwqLinear(weight, order=order)):.1%}")
print(f"rows as they are:    {error(cupy_awq.AwqLinear(cupy_awq.quantize(w, group_size=GROUP))):.1%}")

# `cupy_awq.load` sets the order of layers that have one; `layer.order` returns it.
