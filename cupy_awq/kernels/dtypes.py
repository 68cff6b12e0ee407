# SPDX-License-Identifier: Apache-2.0
"""The C++ names and the sizes of dtypes and of kinds of zero points, for the compile-time constants of kernels."""

from __future__ import annotations

TYPES = {"float16": "half_t", "bfloat16": "bfloat16_t", "float32": "float"}
"""The C++ type of each dtype (``cuda_src/common/types.cuh``)."""

ZEROS = {"packed": "kPacked", "symmetric": "kSymmetric", "float": "kOffset"}
"""The C++ enumerator of each kind of zero points (``cuda_src/gemm/group.cuh``)."""

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
"""The size of one element of each dtype, in bytes."""
