# SPDX-License-Identifier: Apache-2.0
"""Convolutions and matrix products with blocks of INT4 and INT8 codes, and on-line quantization of activations.

NumPy arrays are computed on the CPU, CuPy arrays on their GPU.
"""

from cupy_awq.block_weight import BlockQuantizedWeight, from_mnn, from_packed
from cupy_awq.int8.operations import conv2d, gemm_int8, linear_fp8, linear_int8, quantize_activations
from cupy_awq.int8.requantized import conv2d_int8

__all__ = [
    "BlockQuantizedWeight",
    "conv2d",
    "conv2d_int8",
    "from_mnn",
    "from_packed",
    "gemm_int8",
    "linear_fp8",
    "linear_int8",
    "quantize_activations",
]
