# SPDX-License-Identifier: Apache-2.0
"""``dequantize``: the launch of the kernel that writes a weight in floating point."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.problem import PTX_ARCH, TYPES, ZEROS, ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

ROWS, THREADS = 4, 128


@dataclass(frozen=True)
class Dequantization:
    """A weight [k, n] to write as ``dtype``. Strides are those of rows, in elements (words for packed ones)."""

    k: int
    n: int
    group_size: int
    scales_dtype: str
    zeros: str
    dtype: str
    aligned: bool
    strides: tuple[int, int, int, int]
    """Of qweight, scales, qzeros and out."""

    def plan(self, device: Device) -> LaunchPlan:
        arch = {"float16": PTX_ARCH, "bfloat16": 80}[self.scales_dtype]
        defines: tuple[tuple[str, int | str], ...] = (
            ("SCALE", TYPES[self.scales_dtype]),
            ("OUT", TYPES[self.dtype]),
            ("ZEROS", ZEROS[self.zeros]),
            ("ALIGNED", int(self.aligned)),
            ("PTX_PATH", int(device.arch >= arch and self.dtype == self.scales_dtype)),
            ("ROWS", ROWS),
            ("THREADS", THREADS),
        )
        sizes = (self.k, self.n, self.group_size, *self.strides)
        arguments: tuple[Argument, ...] = ("qweight", "scales", "qzeros", "out", *map(np.int32, sizes))
        kernel = Kernel("dequant/dequantize.cu", "dequantize", defines, device.target)
        grid = (ceil_div(self.k, ROWS) * ceil_div(self.n // 8, THREADS), 1, 1)
        return LaunchPlan(kernel, grid, (THREADS, 1, 1), arguments)
