# SPDX-License-Identifier: Apache-2.0
"""Run layers on a CUDA stream of your own and order them after another stream's work.

    python tests/examples/use_own_stream.py

Every operation launches on CuPy's current stream and does not synchronize. Without a GPU, the layer runs on the CPU.
"""

import contextlib

import numpy as np

import cupy_awq

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
    has_gpu = True
except Exception:  # CuPy is not installed, or there is no GPU
    xp, has_gpu = np, False

rng = np.random.default_rng(0)
w = rng.standard_normal((512, 256), np.float32)
host = rng.standard_normal((8, 512)).astype(np.float16)

copying, computing = (xp.cuda.Stream(non_blocking=True) if has_gpu else contextlib.nullcontext() for _ in range(2))
with computing:  # a layer is repacked on the current stream, too
    layer = cupy_awq.AwqLinear(cupy_awq.quantize(xp.asarray(w)))
with copying:
    x = xp.asarray(host)
    copied = copying.record() if has_gpu else None
with computing:
    if copied is not None:
        computing.wait_event(copied)
    y = layer(x)
    y = layer(x, out=y)  # an output that is reused allocates nothing
if has_gpu:
    computing.synchronize()
print(f"y {y.shape}, largest element {float(abs(y).max()):.1f}")
