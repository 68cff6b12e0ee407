# SPDX-License-Identifier: Apache-2.0
"""Kernels of a mixture of experts: router, sort, grouped GEMM with 4-bit weights, sum over a token's experts."""
