# SPDX-License-Identifier: Apache-2.0
"""Validate a GEMM once and launch it many times: no allocation, no copy, no synchronization per call.

    python tests/examples/plan_with_workspace.py

Without a GPU, the plan runs on the CPU and needs no workspace.
"""

import numpy as np

import cupy_awq

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
except Exception:  # CuPy is not installed, or there is no GPU
    xp = np

rng = np.random.default_rng(0)
weight = cupy_awq.quantize(xp.asarray(rng.standard_normal((1024, 512), np.float32)))
layer = cupy_awq.AwqLinear(weight)

# A plan is for arguments of one layout: contiguous float16 for a shape, or that of an array.
plan = layer.plan((8, 1024))
print(f"{plan.kernel}: y {plan.shape}, workspace of {plan.workspace_bytes} bytes")

xs = xp.asarray(rng.standard_normal((3, 8, 1024))).astype(np.float16)
y = xp.empty(plan.shape, np.float16)
for x in xs:
    plan(x, y)

# The plan owns a workspace. Calls that may run at the same time, on several streams, need one each, zero before use.
workspace = xp.zeros(plan.workspace_bytes, np.uint8) if plan.workspace_bytes else None
plan(xs[0], y, workspace=workspace)
print(f"equal to the layer: {bool((y == layer(xs[0])).all())}")
