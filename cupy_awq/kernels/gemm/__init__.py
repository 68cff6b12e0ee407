# SPDX-License-Identifier: Apache-2.0
"""GEMM with a 4-bit weight: the problem, and its kernel families."""
