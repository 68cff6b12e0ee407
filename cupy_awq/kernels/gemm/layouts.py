# SPDX-License-Identifier: Apache-2.0
"""The layouts of a weight in GPU memory: the AWQ layout of checkpoints, and the fragment layout of `AwqLinear`.

A 4-bit weight has either, the 8-bit weight of an `Int8Linear` the fragment layout. A kernel family reads one of them
(`Family.layout`); `select.weight_layouts` returns those of a 4-bit weight that a GPU's kernels read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from cupy_awq.check import Array
from cupy_awq.kernels.dtypes import TYPES, ZEROS
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.packing import namespace
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

Bits: TypeAlias = np.ndarray[Any, Any]
LayoutT = TypeVar("LayoutT", bound="WeightLayout")

THREADS = 256
"""The number of threads per CTA of the kernel ``repack``."""
BLOCK_N = 128
"""The number of columns per CTA of ``repack``; the fragment layout pads N to a multiple of BLOCK_N."""
WEIGHT_TILE_N, WEIGHT_TILE_K = 32, 128
"""The numbers of columns and of rows of W per weight tile."""


@dataclass(frozen=True)
class WeightLayout:
    """A layout of a weight [k, n].

    Attributes:
        k: number of rows of the weight.
        n: number of columns of the weight.
        group_size: number of rows that share scales and zero points.
        scales_dtype: dtype of the scales.
        zeros: kind of zero points, as in `Problem`.
        bits: number of bits per code, 4 or 8.
    """

    k: int
    n: int
    group_size: int
    scales_dtype: str = "float16"
    zeros: str = "packed"
    bits: int = 4

    NAME: ClassVar[str]
    """The name in `Problem.layouts`."""

    @classmethod
    def of(cls: type[LayoutT], problem: Problem) -> LayoutT:
        """Return the layout of a problem's weight."""
        return cls(problem.k, problem.n, problem.group_size, problem.scales_dtype, problem.zeros, problem.bits)

    def refusal(self) -> str | None:
        """Return the reason why the weight cannot be stored in the layout, or None if it can."""
        return None

    def pack(self, device: Device, strides: tuple[int, ...] | None = None) -> LaunchPlan | None:
        """Return the launch plan that writes the layout from the AWQ tensors, or None if these are the layout.

        Args:
            device: the GPU.
            strides: row strides of ``qweight``, ``scales`` and ``qzeros`` in elements, or None if all are contiguous.
        """
        return None


class AwqLayout(WeightLayout):
    """The AWQ layout: the arrays ``qweight``, ``scales`` and ``qzeros`` of an AutoAWQ "gemm" checkpoint."""

    NAME = AWQ


class FragmentLayout(WeightLayout):
    """The fragment layout, into which `AwqLinear` repacks: the codes of a thread's fragment of an mma are adjacent.

    The weight is divided into weight tiles of 128 rows x 32 columns, first along k, then along n.
    ``cuda_src/gemm/repacked_layout.cuh`` describes a tile.

    >>> layout = FragmentLayout(k=4096, n=4096, group_size=128)
    >>> layout.weight_tile_bytes, layout.nbytes / (4096 * 4096 / 2)
    (2144, 1.046875)
    """

    NAME = FRAGMENTS

    def refusal(self) -> str | None:
        if self.n % 8:
            return f"needs N to be a multiple of 8, not {self.n}"
        if self.k % 64:
            return f"needs K to be a multiple of 64, not {self.k}"
        size = self.group_size
        if size not in (16, 32, 64, self.k) and size % WEIGHT_TILE_K:
            return f"needs a group size of 16, 32, 64, K or a multiple of {WEIGHT_TILE_K}, not {size}"
        return None

    @property
    def groups(self) -> int:
        """The number of groups per weight tile; 1 if a group spans several weight tiles."""
        return max(1, WEIGHT_TILE_K // self.group_size)

    @property
    def group_bytes(self) -> int:
        """The size in bytes of the scales and zero points (or offsets) of one group in a weight tile."""
        return {"packed": 96, "symmetric": 64, "float": 128}[self.zeros]

    @property
    def weight_tile_bytes(self) -> int:
        """The size of a weight tile in bytes: codes, scales and zero points."""
        return WEIGHT_TILE_N * WEIGHT_TILE_K * self.bits // 8 + self.groups * self.group_bytes

    @property
    def k_tiles(self) -> int:
        """The number of weight tiles along k."""
        return ceil_div(self.k, WEIGHT_TILE_K)

    @property
    def tile_columns(self) -> int:
        """The number of weight tiles along n, including padding."""
        return ceil_div(self.n, BLOCK_N) * BLOCK_N // WEIGHT_TILE_N

    @property
    def nbytes(self) -> int:
        """The size of the weight in bytes, including padding."""
        return self.tile_columns * self.k_tiles * self.weight_tile_bytes

    def defines(self) -> tuple[tuple[str, int | str], ...]:
        """Return the compile-time constants (name, value) that ``cuda_src/gemm/repacked_layout.cuh`` needs."""
        return ("SCALE", TYPES[self.scales_dtype]), ("ZEROS", ZEROS[self.zeros]), ("GROUPS", self.groups)

    def pack(self, device: Device, strides: tuple[int, ...] | None = None) -> LaunchPlan:
        """Return the launch plan of the kernel ``repack``; the arguments are those of `WeightLayout.pack`.

        The buffers are ``qweight``, ``scales``, ``qzeros`` and ``out``; ``out`` has ``nbytes`` bytes and starts at a
        multiple of 16 bytes. GEMM kernels may read ``out`` before the preceding kernel finishes (PDL), so synchronize
        once after the launch.
        """
        kernel = Kernel("gemm/repack.cu", "repack", (*self.defines(), ("BLOCK_N", BLOCK_N)), device.target)
        zeros = self.n if self.zeros == "float" else self.n // 8
        sizes = (self.n, self.k, self.group_size, *(strides or (self.n // 8, self.n, zeros)))
        arguments: tuple[Argument, ...] = ("qweight", "scales", "qzeros", "out", *(np.int32(size) for size in sizes))
        grid = (self.k_tiles, ceil_div(self.n, BLOCK_N), 1)
        return LaunchPlan(kernel, grid, (THREADS, 1, 1), arguments)

    def arrange(self, codes: Array, parameters: Sequence[Array], /) -> Array:
        """Return a weight in the layout, uint8 [nbytes], with NumPy or CuPy.

        Args:
            codes: the codes, uint8 [N, K].
            parameters: the scales [N, ceil(K / group_size)] and, unless ``zeros`` is "symmetric", the zero points as
                uint8 or the offsets. Scales may have 32 bits, as ``gemm_w4a8_mma`` reads them.
        """
        xp = namespace(codes)
        columns, k_tiles = self.tile_columns, self.k_tiles
        padded = xp.zeros((columns * WEIGHT_TILE_N, k_tiles * WEIGHT_TILE_K), np.uint8)
        padded[: self.n, : self.k] = codes
        # The axes are (tile column, 16 columns, column half, g, k tile, k64, k32, k16, k half, t, pair), for lane
        # 4 g + t of an mma.
        axes = padded.reshape(columns, 2, 2, 8, k_tiles, 2, 2, 2, 2, 4, 2)
        if self.bits == 4:
            # To [tile column, k tile, k64, 16 columns, g, t, k32, k16][pair, k half, column half]; the last three axes
            # are the nibbles of a word, lowest first.
            nibbles = axes.transpose(0, 4, 5, 1, 3, 9, 6, 7, 10, 8, 2).reshape(columns, k_tiles, -1, 2)
            parts = [nibbles[..., 0] | nibbles[..., 1] << np.uint8(4)]
        else:
            # To [tile column, k tile, k64, 16 columns, k32, g, t, k16, k half][pair, column half]: the bytes of a word.
            parts = [axes.transpose(0, 4, 5, 1, 6, 3, 9, 7, 8, 10, 2).reshape(columns, k_tiles, -1)]

        # The groups of each k tile; a group that spans several k tiles is copied to each of them.
        first = np.arange(k_tiles * self.groups) * (WEIGHT_TILE_K // self.groups) // self.group_size
        inside = int((first < ceil_div(self.k, self.group_size)).sum())
        groups = []
        for a in parameters:
            values = xp.zeros((columns * WEIGHT_TILE_N, len(first)), a.dtype)
            values[: self.n, :inside] = a.take(xp.asarray(first[:inside]), axis=1)
            # From (tile column, 16 columns, column half, g, k tile, group) to [tile column, k tile, group, 16 columns,
            # g, column half].
            ordered = values.reshape(columns, 2, 2, 8, k_tiles, self.groups).transpose(0, 4, 5, 1, 3, 2)
            groups.append(xp.ascontiguousarray(ordered).view(np.uint8).reshape(columns, k_tiles, self.groups, 2, -1))
        parts.append(xp.concatenate(groups, axis=4).reshape(columns, k_tiles, -1))
        return xp.ascontiguousarray(xp.concatenate(parts, axis=2)).reshape(-1)

    def unpack(self, out: Bits, /) -> tuple[Bits, Bits, Bits | None]:
        """Unpack a weight with NumPy: the inverse of the kernel ``repack``.

        Args:
            out: the weight in the fragment layout, ``nbytes`` bytes.

        Returns:
            The codes, uint8 [K, N]; the bits of the scales, uint16 [K/G, N]; and the zero points, uint8 [K/G, N], the
            bits of the offsets, uint16 [K/G, N], or None if ``zeros`` is "symmetric".

        Raises:
            ValueError: the padding is not zero.
        """
        tiles = out.view(np.uint8).reshape(self.tile_columns, self.k_tiles, self.weight_tile_bytes)
        code_bytes = WEIGHT_TILE_N * WEIGHT_TILE_K // 2
        words = tiles[:, :, :code_bytes].copy().view("<u4").reshape(self.tile_columns, self.k_tiles, 2, 2, 8, 4, 4)
        codes = np.zeros((self.k_tiles, 2, 4, 2, 4, 2, self.tile_columns, 2, 2, 8), np.uint8)
        for i in range(8):
            odd, column, upper = i % 2, i // 2 % 2, i // 4
            nibbles = (words >> (16 * odd + 4 * column + 8 * upper)) & 15
            # Transpose [n, k, k64, half, g, t, k16] to [k, k64, k16, upper, t, odd, n, half, column, g], for
            # lane 4 g + t of a warp, where i determines upper, odd and column.
            codes[:, :, :, upper, :, odd, :, :, column] = nibbles.transpose(1, 2, 6, 5, 0, 3, 4)
        flat = codes.reshape(self.k_tiles * WEIGHT_TILE_K, self.tile_columns * WEIGHT_TILE_N)

        groups = tiles[:, :, code_bytes:].reshape(self.tile_columns, self.k_tiles, self.groups, 2, -1)
        # If a group spans several weight tiles, each of these tiles has a copy of the scales; the first copy is read.
        first = np.arange(self.k // self.group_size) * max(1, self.group_size // WEIGHT_TILE_K)

        def by_row(part: Bits, dtype: str) -> Bits:
            # From [tile column, k tile, group, 16-column half, g, upper 8 columns] to [k tile, group, tile column,
            # half, upper, g]; g = lane / 4, as in cuda_src/gemm/repacked_layout.cuh.
            values = part.copy().view(dtype).reshape(*groups.shape[:4], 8, 2).transpose(1, 2, 0, 3, 5, 4)
            return values.reshape(-1, flat.shape[1])

        scales = by_row(groups[..., :32], "<u2")
        if flat[self.k :].any() or flat[:, self.n :].any() or scales[:, self.n :].any():
            raise ValueError("out: expected zeros in the padding, got other values")
        zeros = None
        if self.zeros != "symmetric":
            zeros = by_row(groups[..., 32:], "u1" if self.zeros == "packed" else "<u2")[first, : self.n]
        return flat[: self.k, : self.n], scales[first, : self.n], zeros


LAYOUTS: dict[str, type[WeightLayout]] = {AWQ: AwqLayout, FRAGMENTS: FragmentLayout}
"""The layouts of a weight that kernels read, by name."""
