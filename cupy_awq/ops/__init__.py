# SPDX-License-Identifier: Apache-2.0
"""The public operations, each: check the arguments, select a kernel, plan the launch, launch it.

NumPy arrays go to `cupy_awq.reference`; arrays of a GPU to its kernels, on the current stream, with no copy to the host
and no synchronisation.
"""

from cupy_awq.ops.conversion import dequantize_s4_to_fp16x2, int8_to_fp16
from cupy_awq.ops.dequantization import dequantize
from cupy_awq.ops.matmul import explain, gemm, gemv
from cupy_awq.ops.planning import Plan, plan

__all__ = [
    "Plan",
    "dequantize",
    "dequantize_s4_to_fp16x2",
    "explain",
    "gemm",
    "gemv",
    "int8_to_fp16",
    "plan",
]
