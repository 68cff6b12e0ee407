# SPDX-License-Identifier: Apache-2.0
"""The public operations, each: check the arguments, select a kernel, plan the launch, launch it.

NumPy arrays go to `cupy_awq.reference`; arrays of a GPU to its kernels, on the current stream, with no copy to the host
and no synchronisation.
"""

from cupy_awq.ops.dequantization import dequantize
from cupy_awq.ops.matmul import explain, gemm, gemv

__all__ = ["dequantize", "explain", "gemm", "gemv"]
