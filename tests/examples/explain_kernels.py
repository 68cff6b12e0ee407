# SPDX-License-Identifier: Apache-2.0
"""Ask which kernel runs for a shape and why, for any architecture, and force another one on a GPU.

python tests/examples/explain_kernels.py
"""

import numpy as np

import cupy_awq

# M, K, N of a layer on an H100: the kernels with their times, the choice, and the reason of each refusal.
print(cupy_awq.explain(16, 4096, 12288, arch=90, layer=True))

# Another architecture, for `gemm` on the tensors of a checkpoint as they are.
print(cupy_awq.explain(16, 4096, 12288, arch=80).splitlines()[-1])

try:
    import cupy

    cupy.cuda.runtime.getDeviceCount()
except Exception:  # CuPy is not installed, or there is no GPU
    print("no GPU: a kernel is forced only there; NumPy arrays are computed by NumPy")
else:
    rng = cupy.random.default_rng(0)
    weight = cupy_awq.quantize(rng.standard_normal((4096, 1024), dtype=np.float32))
    x = rng.standard_normal((16, 4096)).astype(np.float16)
    tensors = weight.qweight, weight.scales, weight.qzeros
    # CUPY_AWQ_ARCH=75 in the environment forces the path of an older architecture for a whole process.
    for kernel in (None, "gemm_simt"):
        y = cupy_awq.gemm(x, *tensors, kernel=kernel)
        print(f"kernel={kernel}: largest element {float(abs(y).max()):.1f}")
