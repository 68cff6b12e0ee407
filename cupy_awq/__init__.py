# SPDX-License-Identifier: Apache-2.0
"""AWQ INT4 weight-only linear algebra for NVIDIA GPUs, with no PyTorch.

y = x @ W for x [..., K] in float16, bfloat16 or float32 and W [K, N] as 4-bit codes with a scale and a zero point for
each group of ``group_size`` rows. NumPy arrays are computed on the CPU, CuPy arrays on their GPU.
"""

from cupy_awq.block_weight import BlockQuantizedWeight, from_mnn, from_packed
from cupy_awq.checkpoint import CheckpointError, load
from cupy_awq.linear import AwqLinear
from cupy_awq.ops.conv2d import conv2d
from cupy_awq.ops.conv2d_int8 import conv2d_int8
from cupy_awq.ops.convert import dequantize_s4_to_fp16x2, int8_to_fp16
from cupy_awq.ops.dequantize import dequantize
from cupy_awq.ops.gemm import explain, gemm, gemv
from cupy_awq.ops.plan import Plan, plan
from cupy_awq.ops.quantized_linear import gemm_int8, linear_fp8, linear_int8, quantize_activations
from cupy_awq.packing import pack_int4, unpack_int4
from cupy_awq.quantizer import quantize
from cupy_awq.weight import PackedWeight

__version__ = "0.1.0"

__all__ = [
    "AwqLinear",
    "BlockQuantizedWeight",
    "CheckpointError",
    "PackedWeight",
    "Plan",
    "conv2d",
    "conv2d_int8",
    "dequantize",
    "dequantize_s4_to_fp16x2",
    "explain",
    "from_mnn",
    "from_packed",
    "gemm",
    "gemm_int8",
    "gemv",
    "int8_to_fp16",
    "linear_fp8",
    "linear_int8",
    "load",
    "pack_int4",
    "plan",
    "quantize",
    "quantize_activations",
    "unpack_int4",
]
