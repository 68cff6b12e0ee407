# SPDX-License-Identifier: Apache-2.0
"""``repack``: a weight from AWQ's own layout to the private one of the sm_90 kernels (``cuda_src/repacked.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from cupy_awq.kernels.problem import TYPES, ZEROS, ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

Bits: TypeAlias = np.ndarray[Any, Any]

THREADS = 256
BLOCK_N = 128
"""Columns that a block turns; the layout pads N to a multiple of it."""
RECORD_COLUMNS, RECORD_K = 32, 128


@dataclass(frozen=True)
class Repacking:
    """The layout of a weight [k, n]: contiguous records of 32 columns and 128 k, those of the same columns in a run.

    ``scales_dtype`` and ``zeros`` are named as in `Problem`. The plan's buffers are qweight, scales, qzeros and out, of
    ``nbytes`` bytes that start at a multiple of 16.

    >>> layout = Repacking(k=4096, n=4096, group_size=128)
    >>> layout.record_bytes, layout.nbytes / (4096 * 4096 / 2)
    (2144, 1.046875)
    """

    k: int
    n: int
    group_size: int
    scales_dtype: str = "float16"
    zeros: str = "packed"

    def refuse(self) -> str | None:
        """Why the weight cannot have this layout, or None."""
        if self.zeros == "float":
            return "takes zero points as 4-bit codes or none, not float offsets"
        if self.k % 64:
            return f"needs K to be a multiple of 64, not {self.k}"
        size = self.group_size
        if size not in (32, 64, self.k) and size % RECORD_K:
            return f"needs a group size of 32, 64, K or a multiple of {RECORD_K}, not {size}"
        return None

    @property
    def groups(self) -> int:
        """Groups that a record has scales of."""
        return max(1, RECORD_K // self.group_size)

    @property
    def group_bytes(self) -> int:
        return 96 if self.zeros == "packed" else 64

    @property
    def record_bytes(self) -> int:
        return RECORD_COLUMNS * RECORD_K // 2 + self.groups * self.group_bytes

    @property
    def records_k(self) -> int:
        return ceil_div(self.k, RECORD_K)

    @property
    def records_n(self) -> int:
        return ceil_div(self.n, BLOCK_N) * BLOCK_N // RECORD_COLUMNS

    @property
    def nbytes(self) -> int:
        return self.records_n * self.records_k * self.record_bytes

    def defines(self) -> tuple[tuple[str, int | str], ...]:
        """The constants that ``gemm/repacked.cuh`` takes."""
        return ("SCALE", TYPES[self.scales_dtype]), ("ZEROS", ZEROS[self.zeros]), ("GROUPS", self.groups)

    def plan(self, device: Device, strides: tuple[int, int, int] | None = None) -> LaunchPlan:
        """The launch; ``strides`` are those of rows of qweight, scales, qzeros, by default those of contiguous arrays.

        A dependent launch reads its weight before it waits for its predecessor, which thus must not be this launch:
        synchronise once in between.
        """
        kernel = Kernel("gemm/repack.cu", "repack", (*self.defines(), ("BLOCK_N", BLOCK_N)), device.target)
        sizes = (self.n, self.k, self.group_size, *(strides or (self.n // 8, self.n, self.n // 8)))
        arguments: tuple[Argument, ...] = ("qweight", "scales", "qzeros", "out", *(np.int32(size) for size in sizes))
        grid = (self.records_k, ceil_div(self.n, BLOCK_N), 1)
        return LaunchPlan(kernel, grid, (THREADS, 1, 1), arguments)

    def unpack(self, out: Bits, /) -> tuple[Bits, Bits, Bits | None]:
        """The inverse, in NumPy: codes uint8 [K, N], bits of the scales uint16 [K/G, N], zero points uint8 or None.

        Raises ValueError if the padding does not hold zeros.
        """
        records = out.view(np.uint8).reshape(self.records_n, self.records_k, self.record_bytes)
        code_bytes = RECORD_COLUMNS * RECORD_K // 2
        words = records[:, :, :code_bytes].copy().view("<u4").reshape(self.records_n, self.records_k, 2, 2, 8, 4, 4)
        codes = np.zeros((self.records_k, 2, 4, 2, 4, 2, self.records_n, 2, 2, 8), np.uint8)
        for i in range(8):
            odd, column, upper = i % 2, i // 2 % 2, i // 4
            nibbles = (words >> (16 * odd + 4 * column + 8 * upper)) & 15
            # [n, k, k64, tile, g, t, k16] -> [k, k64, k16, (upper), t, (odd), n, tile, (column), g]
            codes[:, :, :, upper, :, odd, :, :, column] = nibbles.transpose(1, 2, 6, 5, 0, 3, 4)
        flat = codes.reshape(self.records_k * RECORD_K, self.records_n * RECORD_COLUMNS)

        groups = records[:, :, code_bytes:].reshape(self.records_n, self.records_k, self.groups, 2, -1)
        scales = groups[..., :32].copy().view("<u2").reshape(*groups.shape[:4], 8, 2)
        by_row = 1, 2, 0, 3, 5, 4  # [n, k, group, tile, g, column] -> [k, group, n, tile, column, g]
        scales = scales.transpose(by_row).reshape(-1, flat.shape[1])
        zeros = None
        if self.zeros == "packed":
            zeros = groups[..., 32:].reshape(*groups.shape[:4], 8, 2).transpose(by_row).reshape(-1, flat.shape[1])
        if flat[self.k :].any() or flat[:, self.n :].any() or scales[:, self.n :].any():
            raise ValueError("out: expected zeros in the padding")
        # A group that spans records has its scales in each of them.
        first = np.arange(self.k // self.group_size) * max(1, self.group_size // RECORD_K)
        return flat[: self.k, : self.n], scales[first, : self.n], None if zeros is None else zeros[first, : self.n]
