# SPDX-License-Identifier: Apache-2.0
"""``quantize_rows``, ``gemm_int8_simt`` and ``gemm_int8_sm80``: quantized activations, and integer products of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupy_awq.device import Device
from cupy_awq.kernels.problem import ACTIVATIONS, TYPES, ceil_div, split_counts
from cupy_awq.launch_plan import Argument, Kernel, LaunchPlan

THREADS = 256
STEP_K = 32
BLOCK_K = 128
SIMT_TILE = 64
PAD_N = 128
"""Columns of the parameters are padded to it, so that whole tiles can be read."""
SHORT_BLOCK = 256


@dataclass(frozen=True)
class RowQuantization:
    """x [m, k] to quantize in blocks of ``block`` columns. ``wide``: 16 bytes of x can be read at a time."""

    m: int
    k: int
    block: int
    dtype: str
    symmetric: bool
    half_even: bool
    wide: bool
    stride: int
    """Of x's rows, in values."""

    def plan(self, device: Device) -> LaunchPlan:
        values = 8 if self.wide else 1
        needed = ceil_div(self.block, values)
        # A warp takes up to eight rounds, more are shared by a whole thread block.
        lanes = THREADS if needed > 8 * 32 else min(32, 1 << (needed - 1).bit_length())
        defines = (
            ("X", TYPES[self.dtype]),
            ("LANES", lanes),
            ("THREADS", THREADS),
            ("WIDE", int(self.wide)),
            ("SYMMETRIC", int(self.symmetric)),
            ("HALF_EVEN", int(self.half_even)),
        )
        kernel = Kernel("quantize_rows.cu", "quantize_rows", defines, device.target)
        grid = ceil_div(self.m * ceil_div(self.k, self.block) * lanes, THREADS)
        sizes = map(np.int32, (self.m, self.k, self.block, self.stride))
        return LaunchPlan(kernel, (grid, 1, 1), (THREADS, 1, 1), ("x", "codes", "scale", "offset", "sums", *sizes))


@dataclass(frozen=True)
class IntegerProduct:
    """y [m, n] of quantized rows in blocks of ``block`` of k columns and a weight of 4 or 8 ``bits``.

    ``aligned``: xq starts at a multiple of 16 bytes; ``even``: y starts at, and steps by, a multiple of two values.
    """

    m: int
    n: int
    k: int
    block: int
    bits: int
    x_offset: bool
    weight_offset: bool
    dtype: str
    bias_dtype: str | None = None
    activation: str | None = None
    limits: tuple[float, float] = (0.0, 0.0)
    aligned: bool = True
    even: bool = True
    stride: int | None = None
    """Of y's rows, in values; by default n."""

    @property
    def blocks(self) -> int:
        return ceil_div(self.k, self.block)

    def defines(self) -> tuple[tuple[str, int | str], ...]:
        """The constants of both kernels."""
        return (
            ("Y", TYPES[self.dtype]),
            ("BITS", self.bits),
            ("X_OFFSET", int(self.x_offset)),
            ("WEIGHT_OFFSET", int(self.weight_offset)),
            ("ACTIVATION", ACTIVATIONS[self.activation]),
            ("GATED", 0),
            ("HAS_BIAS", int(self.bias_dtype is not None)),
            ("BIAS", TYPES[self.bias_dtype or "float16"]),
            ("HAS_RESIDUAL", 0),
        )

    def arguments(self) -> tuple[Argument, ...]:
        buffers = ("xq", "x_scale", "x_offset", "x_sums", "codes", "parameters", "bias", "y", "partials", "counters")
        n_padded = ceil_div(self.n, PAD_N) * PAD_N
        sizes = (self.m, self.n, self.k, self.block, n_padded, self.n if self.stride is None else self.stride)
        return (*buffers, *map(np.int32, sizes), *map(np.float32, self.limits))


@dataclass(frozen=True)
class SimtConfig:
    """CUDA cores; takes everything."""

    splits: int = 1

    def plan(self, problem: IntegerProduct, device: Device) -> LaunchPlan:
        whole = problem.block % STEP_K == 0 or problem.blocks == 1
        aligned = problem.aligned and whole and problem.k % 8 == 0
        defines = (*problem.defines(), ("ALIGNED", int(aligned)))
        kernel = Kernel("gemm_int8_simt.cu", "gemm_int8_simt", defines, device.target)
        grid = (ceil_div(problem.m, SIMT_TILE), ceil_div(problem.n, SIMT_TILE), 1)
        return LaunchPlan(kernel, grid, (THREADS, 1, 1), problem.arguments())

    def workspace(self, problem: IntegerProduct) -> tuple[int, int]:
        return 0, 0


@dataclass(frozen=True)
class MmaConfig:
    """A tile of ``warps_m * warp_m`` rows and 32 columns for each of ``warps_n`` warps, in ``stages`` stages."""

    warp_m: int
    warps_m: int
    warps_n: int
    stages: int
    splits: int

    @property
    def block_m(self) -> int:
        return self.warp_m * self.warps_m

    @property
    def block_n(self) -> int:
        return 32 * self.warps_n

    def shared_bytes(self, problem: IntegerProduct) -> int:
        codes = BLOCK_K * self.block_m + BLOCK_K * problem.bits // 8 * self.block_n
        return self.stages * (codes + 12 * _blocks_in_tile(problem.block) * (self.block_m + self.block_n))

    def plan(self, problem: IntegerProduct, device: Device) -> LaunchPlan:
        defines = (
            *problem.defines(),
            ("WARP_M", self.warp_m),
            ("WARPS_M", self.warps_m),
            ("WARPS_N", self.warps_n),
            ("STAGES", self.stages),
            ("X_BLOCKS", _blocks_in_tile(problem.block)),
            ("SHORT_BLOCKS", int(problem.block <= SHORT_BLOCK)),
            ("EVEN", int(problem.even)),
        )
        kernel = Kernel("gemm_int8_sm80.cu", "gemm_int8_sm80", defines, device.target)
        grid = (*self._tiles(problem), self.splits)
        threads = 32 * self.warps_m * self.warps_n
        return LaunchPlan(kernel, grid, (threads, 1, 1), problem.arguments(), self.shared_bytes(problem))

    def workspace(self, problem: IntegerProduct) -> tuple[int, int]:
        """Bytes of partial sums and number of counters."""
        if self.splits == 1:
            return 0, 0
        rows, columns = self._tiles(problem)
        return rows * columns * self.splits * self.block_m * self.block_n * 4, rows * columns

    def _tiles(self, problem: IntegerProduct) -> tuple[int, int]:
        return ceil_div(problem.m, self.block_m), ceil_div(problem.n, self.block_n)


TILES = ((64, 2, 4), (64, 1, 4), (32, 1, 4), (16, 1, 4))
"""(rows of a warp, warps along m, warps along n), the largest tile first."""


def _blocks_in_tile(block: int) -> int:
    """How many blocks of x may meet in a tile of K."""
    if BLOCK_K % block == 0:
        return BLOCK_K // block
    return 1 if block % BLOCK_K == 0 else 2


def refuse(problem: IntegerProduct, device: Device) -> str | None:
    """Why the tensor cores cannot take a problem, or None."""
    if device.arch < 80:
        return f"needs sm_80 or newer, not sm_{device.arch}"
    if problem.k % 16 or not problem.aligned:
        return "needs rows of xq that start at multiples of 16 bytes"
    if problem.block % STEP_K and problem.blocks > 1:
        return f"needs blocks that are multiples of {STEP_K} columns, not {problem.block}"
    return None


def configs(problem: IntegerProduct, device: Device) -> list[MmaConfig]:
    """All that tensor cores can launch for a problem that is not refused; the preferred tile's splits first."""
    found = []
    for warp_m, warps_m, warps_n in TILES:
        for splits in split_counts(ceil_div(problem.k, BLOCK_K)):
            options = [MmaConfig(warp_m, warps_m, warps_n, stages, splits) for stages in (4, 3, 2)]
            fitting = [c for c in options if c.shared_bytes(problem) <= device.shared_bytes_per_block]
            found += fitting[:1]
    return found


def choose(problem: IntegerProduct, device: Device) -> SimtConfig | MmaConfig:
    """The smallest tile that holds all rows, or the largest; split until the multiprocessors are busy."""
    if refuse(problem, device):
        return SimtConfig()
    legal = configs(problem, device)
    rows = [c.block_m for c in legal if c.block_m >= problem.m]
    block_m = min(rows) if rows else max(c.block_m for c in legal)
    tiles = ceil_div(problem.m, block_m)
    best = None
    for config in legal:
        if config.block_m != block_m:
            continue
        blocks = tiles * ceil_div(problem.n, config.block_n) * config.splits
        if best is None or (blocks <= 2 * device.sm_count and config.splits <= 8):
            best = config
    if best is None:
        raise RuntimeError(f"no configuration for {problem}")
    return best


def kernels(device: Device) -> Iterator[Kernel]:
    """Those of common layers: 4 and 8 bits in blocks of 128, 64 and 32 columns, for few and for many rows."""
    for dtype in ("float16", "bfloat16", "float32"):
        for block, symmetric in ((128, False), (128, True), (32, True), (4096, False)):
            yield RowQuantization(1, 4096, block, dtype, symmetric, False, True, 4096).plan(device).kernel
    for dtype, bits, block, x_offset, weight_offset in (
        ("float16", 4, 128, False, True),
        ("float16", 4, 128, False, False),
        ("float16", 4, 128, True, True),
        ("float16", 8, 128, False, True),
        ("float16", 8, 4096, False, False),
        ("float16", 4, 32, False, True),
        ("bfloat16", 4, 128, False, True),
    ):
        for m in (1, 32, 64, 1024):
            problem = IntegerProduct(m, 4096, 4096, block, bits, x_offset, weight_offset, dtype)
            yield choose(problem, device).plan(problem, device).kernel
    yield SimtConfig().plan(IntegerProduct(1, 64, 66, 66, 4, True, True, "float16"), device).kernel
