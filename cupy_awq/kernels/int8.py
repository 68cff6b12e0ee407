# SPDX-License-Identifier: Apache-2.0
"""``quantize_rows`` and ``gemm_int8_*``: quantized activations, and integer products of them.

Those of few rows are `cupy_awq.kernels.gemv_int8`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cupy_awq.kernels import gemv_int8
from cupy_awq.kernels.gemv_int8 import GemvInt8Config
from cupy_awq.kernels.problem import ACTIVATIONS, ITEMSIZE, PTX_ARCH, TYPES, ceil_div, split_counts
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan, TensorMap

THREADS = 256
MAX_GRID = 65535
"""Thread blocks along the second and third axis of a grid."""
STEP_K = 32
BLOCK_K = 128
SIMT_TILE = 64
PAD_N = 128
"""Columns of the parameters are padded to it, so that whole tiles can be read."""
SHORT_BLOCK = 256
ASYNC_ARCH = 80
"""From it on stages are copied while others are multiplied."""

RECORD_N = 64
HOPPER_M, HOPPER_N = 128, 256
HOPPER_THREADS = 384
HOPPER_ROWS = 64
"""At least, for Hopper's kernel to be worth its tiles."""
MMA_OPERATIONS = 305e6
"""Operations a microsecond of gemm_int8_sm80 on an H100, where its tiles fill the chip."""
HOPPER_STAGES = 6
"""At most."""

FP8_ARCH = 89
"""From it on tensor cores multiply e4m3."""
FP8_VALUES = 8
"""That a thread of quantize_fp8 takes at a time."""


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
        lanes = THREADS if needed > 8 * 32 else min(32, max(1, 1 << (needed - 1).bit_length() >> 1))
        blocks = ceil_div(self.k, self.block)
        threads = min(THREADS, ceil_div(blocks * lanes, 32) * 32)
        defines = (
            ("X", TYPES[self.dtype]),
            ("LANES", lanes),
            ("ROUNDS", ceil_div(needed, lanes)),
            ("THREADS", threads),
            ("WIDE", int(self.wide)),
            ("SYMMETRIC", int(self.symmetric)),
            ("HALF_EVEN", int(self.half_even)),
        )
        kernel = Kernel("int8/quantize_rows.cu", "quantize_rows", defines, device.target)
        layers = ceil_div(self.m, MAX_GRID)
        grid = ceil_div(blocks * lanes, threads), ceil_div(self.m, layers), layers
        sizes = map(np.int32, (self.m, self.k, self.block, self.stride))
        return LaunchPlan(kernel, grid, (threads, 1, 1), ("x", "codes", "scale", "offset", "sums", *sizes))


@dataclass(frozen=True)
class Fp8Quantization:
    """x [m, k] to e4m3 with one scale a row, and sums of ``unit`` columns; rows start at multiples of 16 bytes."""

    m: int
    k: int
    unit: int
    dtype: str
    stride: int
    """Of x's rows, in values."""

    def plan(self, device: Device) -> LaunchPlan:
        defines = ("X", TYPES[self.dtype]), ("ROUNDS", ceil_div(self.k, THREADS * FP8_VALUES))
        kernel = Kernel("int8/quantize_fp8.cu", "quantize_fp8", defines, device.target)
        sizes = map(np.int32, (self.k, self.unit, self.stride))
        return LaunchPlan(kernel, (self.m, 1, 1), (THREADS, 1, 1), ("x", "codes", "scale", "sums", *sizes))


@dataclass(frozen=True)
class IntegerProduct:
    """y [m, n] of quantized rows in blocks of ``block`` of k columns and a weight of 4 or 8 ``bits``.

    ``aligned``: xq starts at a multiple of 16 bytes; ``even``: y starts at, and steps by, a multiple of two values;
    ``wide``: of 16 bytes. ``fp8``: x is e4m3, as of `Fp8Quantization`. ``row_scales``: x has one scale a row, which
    Hopper's kernel takes as it is, if there are no offsets.
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
    wide: bool = True
    stride: int | None = None
    """Of y's rows, in values; by default n."""
    fp8: bool = False
    row_scales: bool = False

    @property
    def blocks(self) -> int:
        return ceil_div(self.k, self.block)

    @property
    def y_stride(self) -> int:
        return self.n if self.stride is None else self.stride

    def defines(self) -> tuple[tuple[str, int | str], ...]:
        """The constants of all kernels."""
        return (
            ("Y", TYPES[self.dtype]),
            ("BITS", self.bits),
            ("FP8", int(self.fp8)),
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
        sizes = (self.m, self.n, self.k, self.block, n_padded, self.y_stride)
        return (*buffers, *map(np.int32, sizes), *map(np.float32, self.limits))


@dataclass(frozen=True)
class SimtConfig:
    """CUDA cores; takes everything."""

    splits: int = 1

    def plan(self, problem: IntegerProduct, device: Device) -> LaunchPlan:
        whole = problem.block % STEP_K == 0 or problem.blocks == 1
        aligned = problem.aligned and whole and problem.k % 8 == 0
        defines = (*problem.defines(), ("ALIGNED", int(aligned)))
        kernel = Kernel("int8/gemm_int8_simt.cu", "gemm_int8_simt", defines, device.target)
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
            ("SHORT_BLOCKS", int(problem.block <= SHORT_BLOCK and not problem.fp8)),
            ("EVEN", int(problem.even)),
        )
        name = _mma_name(device)
        kernel = Kernel(f"int8/{name}.cu", name, defines, device.target)
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


@dataclass(frozen=True)
class HopperConfig:
    """Clusters of ``cluster`` of ``blocks`` persistent blocks make units of ``cluster`` * 128 rows and 256 columns."""

    cluster: int
    blocks: int

    splits = 1

    def units(self, problem: IntegerProduct) -> tuple[int, int]:
        """Rows and columns of units."""
        return ceil_div(problem.m, HOPPER_M * self.cluster), ceil_div(problem.n, HOPPER_N)

    def plan(self, problem: IntegerProduct, device: Device) -> LaunchPlan:
        """The launch. Buffers: x_scale, x_offset, x_sums, parameters and codes (of `forms`), bias, y, xq."""
        x_blocks, parts = self._parts(problem)
        stage = (HOPPER_M + HOPPER_N) * (BLOCK_K + 4 * x_blocks * parts) + 16
        size = ITEMSIZE[problem.dtype]
        store = 2 * 32 // size * (HOPPER_N * size + 16)
        stages = min(HOPPER_STAGES, (device.shared_bytes_per_block - store) // stage)
        common = (item for item in problem.defines() if item[0] != "BITS")
        defines = (*common, ("X_BLOCKS", x_blocks), ("STAGES", stages), ("CLUSTER", self.cluster))
        defines += (("ROW_SCALES", int(problem.row_scales or problem.fp8)),)
        boxes = {"xq": (problem.m, HOPPER_M), "codes": (problem.n, HOPPER_N // self.cluster)}
        xq, codes = (
            TensorMap(
                name,
                "int8",
                dims=(problem.k, rows, 1),
                strides=(problem.k, problem.k * rows),
                box=(BLOCK_K, box, 1),
                swizzle=128,
            )
            for name, (rows, box) in boxes.items()
        )
        sizes = (problem.m, problem.n, problem.k, problem.block, *self.units(problem), problem.y_stride, problem.wide)
        scalars = (*map(np.int32, sizes), *map(np.float32, problem.limits))
        return LaunchPlan(
            Kernel("int8/gemm_int8_sm90.cu", "gemm_int8_sm90", defines, device.target),
            (self.blocks, 1, 1),
            (HOPPER_THREADS, 1, 1),
            ("x_scale", "x_offset", "x_sums", "parameters", "bias", "y", xq, codes, *scalars),
            stages * stage + store,
            cluster=(self.cluster, 1, 1),
            dependent=True,
        )

    def estimate_us(self, problem: IntegerProduct, device: Device) -> float:
        """Fitted to 16 times on an H100, 3% off (root mean square)."""
        x_blocks, parts = self._parts(problem)
        rounds = ceil_div(math.prod(self.units(problem)), self.blocks // self.cluster)
        return 0.7 + rounds * ceil_div(problem.k, BLOCK_K) * (0.53 + 0.27 * x_blocks * (1.5 + parts))

    def workspace(self, problem: IntegerProduct) -> tuple[int, int]:
        return 0, 0

    def _parts(self, problem: IntegerProduct) -> tuple[int, int]:
        """Blocks in 128 k, and the numbers that a row or a column has in each."""
        x_blocks = BLOCK_K // problem.block if problem.block < BLOCK_K and problem.blocks > 1 else 1
        return x_blocks, 1 + problem.weight_offset + problem.x_offset


Config = SimtConfig | GemvInt8Config | MmaConfig | HopperConfig

TILES = {
    "gemm_int8_sm75": ((32, 2, 4), (32, 1, 4), (16, 1, 4)),
    "gemm_int8_sm80": ((64, 2, 4), (64, 1, 4), (32, 1, 4), (16, 1, 4)),
}
"""(rows of a warp, warps along m, warps along n), the largest tile first; 64 rows would lack registers on sm_75, and
on sm_90 and sm_100 for e4m3."""


def _mma_name(device: Device) -> str:
    return "gemm_int8_sm80" if device.arch >= ASYNC_ARCH else "gemm_int8_sm75"


def _blocks_in_tile(block: int) -> int:
    """How many blocks of x may meet in a tile of K."""
    if BLOCK_K % block == 0:
        return BLOCK_K // block
    return 1 if block % BLOCK_K == 0 else 2


def refuse_layout(problem: IntegerProduct) -> str | None:
    """Why gemm_int8_simt alone can take a problem, or None."""
    if problem.k % 16 or not problem.aligned:
        return "needs rows of xq that start at multiples of 16 bytes"
    if problem.block % STEP_K and problem.blocks > 1:
        return f"needs blocks that are multiples of {STEP_K} columns, not {problem.block}"
    return None


def refuse(problem: IntegerProduct, device: Device) -> str | None:
    """Why the tensor cores cannot take a problem, or None."""
    if device.arch < PTX_ARCH:
        return f"needs sm_{PTX_ARCH} or newer, not sm_{device.arch}"
    return refuse_layout(problem)


def refuse_hopper(problem: IntegerProduct, device: Device) -> str | None:
    """Why Hopper's tensor cores cannot take a problem, or None."""
    if device.arch != 90:
        return f"needs sm_90, not sm_{device.arch}"
    if problem.block not in (32, 64) and problem.block % BLOCK_K and problem.blocks > 1:
        return f"needs blocks of 32, 64, or a multiple of {BLOCK_K} columns, not {problem.block}"
    return refuse(problem, device)


def fp8_unit(block_size: int, k: int) -> int:
    """Columns of x that quantize_fp8 adds up: those of 128 that share a weight's scale in all of its blocks."""
    return math.gcd(block_size, BLOCK_K) if block_size < k else BLOCK_K


def refuse_fp8(block_size: int, k: int, device: Device) -> str | None:
    """Why no kernel can multiply e4m3 by a weight of k columns in blocks, or None."""
    if device.arch < FP8_ARCH:
        return f"needs sm_{FP8_ARCH} or newer, not sm_{device.arch}"
    if k % 16:
        return f"needs a multiple of 16 columns, not {k}"
    if fp8_unit(block_size, k) < STEP_K:
        return f"needs blocks that are multiples of {STEP_K} columns, not {block_size}"
    return None


def hopper_configs(problem: IntegerProduct, device: Device) -> list[HopperConfig]:
    found = []
    for cluster in (1, 2):
        config = HopperConfig(cluster, device.sm_count // cluster * cluster)
        found.append(replace(config, blocks=min(config.blocks, math.prod(config.units(problem)) * cluster)))
    return found


def configs(problem: IntegerProduct, device: Device) -> list[MmaConfig]:
    """All that tensor cores can launch for a problem that is not refused; the preferred tile's splits first."""
    found = []
    depths = (4, 3, 2) if device.arch >= ASYNC_ARCH else (2,)
    for warp_m, warps_m, warps_n in TILES["gemm_int8_sm75" if problem.fp8 else _mma_name(device)]:
        for splits in split_counts(ceil_div(problem.k, BLOCK_K)):
            options = [MmaConfig(warp_m, warps_m, warps_n, stages, splits) for stages in depths]
            fitting = [c for c in options if c.shared_bytes(problem) <= device.shared_bytes_per_block]
            found += fitting[:1]
    return found


def choose(problem: IntegerProduct, device: Device) -> Config:
    """gemv_int8 for few rows; for more Hopper's kernel where it takes less than the other at the rate of large tiles.

    Of e4m3, for which `refuse_fp8` has no reason, tensor cores take any number of rows.
    """
    if not problem.fp8 and problem.m <= gemv_int8.MAX_ROWS and refuse_layout(problem) is None:
        gemv = gemv_int8.choose(problem, device)
        if device.arch < ASYNC_ARCH or gemv.estimate_us(problem, device) <= _small_mma_estimate_us(problem, device):
            return gemv
    if refuse(problem, device):
        return SimtConfig()
    config = _choose_mma(problem, device)
    if problem.m < HOPPER_ROWS or refuse_hopper(problem, device):
        return config
    hopper = min(hopper_configs(problem, device), key=lambda c: (c.estimate_us(problem, device), -c.cluster))
    rows = ceil_div(problem.m, config.block_m) * config.block_m
    microseconds = 4.0 + 2 * rows * problem.n * problem.k / MMA_OPERATIONS
    return hopper if problem.fp8 or hopper.estimate_us(problem, device) < microseconds else config


def _small_mma_estimate_us(problem: IntegerProduct, device: Device) -> float:
    """Of gemm_int8_sm80 for up to 16 rows: 12 times on an H100, 5 to 13% off."""
    parts = 1 + problem.weight_offset + problem.x_offset
    return 5.0 + problem.n * (problem.k * problem.bits / 8 + 4 * parts * problem.blocks) / (720 * device.read_gbs)


def _choose_mma(problem: IntegerProduct, device: Device) -> MmaConfig:
    """The smallest tile that holds all rows, or the largest; split until the multiprocessors are busy."""
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
    """Those of common layers: 4 and 8 bits in blocks of 128 and 32 columns or one, for few rows and for many."""
    for dtype in ("float16", "bfloat16", "float32"):
        for block, symmetric in ((128, False), (128, True), (32, True), (4096, False)):
            yield RowQuantization(1, 4096, block, dtype, symmetric, False, True, 4096).plan(device).kernel
    common = ("float16", 4, 128, False, True)
    for dtype, bits, block, x_offset, weight_offset in (
        common,
        ("float16", 4, 128, False, False),
        ("float16", 4, 128, True, True),
        ("float16", 8, 128, False, True),
        ("float16", 8, 4096, False, False),
        ("float16", 4, 32, False, True),
        ("bfloat16", 4, 128, False, True),
    ):
        for m in (1, 4, 8, 16, 64, 1024) if (dtype, bits, block, x_offset, weight_offset) == common else (1, 1024):
            problem = IntegerProduct(m, 4096, 4096, block, bits, x_offset, weight_offset, dtype)
            yield choose(problem, device).plan(problem, device).kernel
    rows = IntegerProduct(1024, 4096, 4096, 128, 4, False, False, "float16", row_scales=True)
    if refuse_hopper(rows, device) is None:
        yield choose(rows, device).plan(rows, device).kernel
    if not refuse_fp8(128, 4096, device):
        for dtype in ("float16", "bfloat16"):
            yield Fp8Quantization(1, 4096, 128, dtype, 4096).plan(device).kernel
            for m in (1, 1024):
                problem = IntegerProduct(m, 4096, 4096, 128, 4, False, True, dtype, fp8=True)
                yield choose(problem, device).plan(problem, device).kernel
    yield SimtConfig().plan(IntegerProduct(1, 64, 66, 66, 4, True, True, "float16"), device).kernel
