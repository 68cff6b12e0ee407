# SPDX-License-Identifier: Apache-2.0
"""``refine_group``: the best scale and zero point of one group of input channels for each output channel."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from cupy_awq.kernels.gemm.problem import TYPES, ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "refine_group"
THREADS = 128
"""The number of threads per CTA."""


@functools.lru_cache(maxsize=1024)
def plan(
    device: Device,
    group_size: int,
    n: int,
    stride: int,
    scale_dtype: str,
    limits: tuple[float, float],
    *,
    symmetric: bool,
) -> LaunchPlan:
    """Return the launch plan for a group of ``group_size`` input channels of a weight with ``n`` output channels.

    The buffers are ``codes``, ``curved``, ``gradient``, ``total``, ``scale``, ``zero`` and ``step``; see
    ``cuda_src/quantization/refine_group.cu`` for their shapes.

    Args:
        device: the GPU.
        group_size, n: the numbers of input and output channels.
        stride: the stride of ``scale`` and ``zero`` in elements.
        scale_dtype: the dtype of scales, float16 or bfloat16.
        limits: (smallest scale, largest finite value) of this dtype.
        symmetric: whether every zero point is 8.
    """
    smallest, largest = limits
    defines = (
        ("SCALE", TYPES[scale_dtype]),
        ("SMALLEST", smallest.hex()),
        ("LARGEST", largest.hex()),
        ("SYMMETRIC", int(symmetric)),
        ("THREADS", THREADS),
    )
    kernel = Kernel("quantization/refine_group.cu", NAME, defines, device.target)
    buffers = "codes", "curved", "gradient", "total", "scale", "zero", "step"
    sizes = map(np.int32, (n, group_size, stride))
    return LaunchPlan(kernel, (ceil_div(n, THREADS), 1, 1), (THREADS, 1, 1), (*buffers, *sizes))


def kernels(device: Device) -> Iterator[Kernel]:
    """Yield the kernel for asymmetric weights with float16 scales."""
    yield plan(device, 128, 4096, 32, "float16", (2.0**-24, 65504.0), symmetric=False).kernel
