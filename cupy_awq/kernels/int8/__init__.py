# SPDX-License-Identifier: Apache-2.0
"""GEMM with 8-bit activations: the problem, its kernel families, and the quantization of x."""
