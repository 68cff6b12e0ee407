# SPDX-License-Identifier: Apache-2.0
"""Capture a planned product in a CUDA graph and replay it; without a GPU, run the plan on the CPU.

python tests/examples/capture_cuda_graph.py
"""

import numpy as np

import cupy_awq


def has_gpu() -> bool:
    """Return whether CuPy finds a GPU."""
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # CuPy is not installed, or there is no driver
        return False


rng = np.random.default_rng(0)
w = rng.standard_normal((4096, 1024), np.float32).astype(np.float16)
x = rng.standard_normal((16, 4096), np.float32).astype(np.float16)

if has_gpu():
    import cupy

    layer = cupy_awq.AwqLinear(cupy_awq.quantize(cupy.asarray(w)))
    x, y = cupy.asarray(x), cupy.empty((16, 1024), cupy.float16)
    plan = layer.plan(x, out=y)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        plan(x, y)  # The first launch loads the kernel, which a capture cannot do.
        stream.begin_capture()
        plan(x, y)
        graph = stream.end_capture()
        for _ in range(100):
            graph.launch()
    stream.synchronize()
    print(f"replayed {plan.kernel} 100 times: y {y.shape}, largest element {float(abs(y).max()):.1f}")
else:
    print("no GPU: the plan runs on the CPU, without a CUDA graph")
    y = np.empty((16, 1024), np.float16)
    plan = cupy_awq.AwqLinear(cupy_awq.quantize(w)).plan(x, out=y)
    plan(x, y)
    print(f"{plan.kernel}: y {y.shape}, largest element {float(abs(y).max()):.1f}")
