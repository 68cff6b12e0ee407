# SPDX-License-Identifier: Apache-2.0
"""The operations on arrays of a GPU."""

from __future__ import annotations

from typing import Any

from cupy_awq.ops.gpu import views

__all__ = ["conv2d", "conv2d_int8", "gemm", "quantize", "views"]


def _refuse(*arguments: Any) -> Any:
    raise TypeError("x must be a NumPy array: there are no kernels for GPUs yet")


conv2d = conv2d_int8 = gemm = _refuse


def quantize(x: Any, block: int, symmetric: bool, rounding: str) -> tuple[Any, Any, Any, Any]:
    raise TypeError("x must be a NumPy array: there are no kernels for GPUs yet")
