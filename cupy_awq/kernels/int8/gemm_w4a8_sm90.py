# SPDX-License-Identifier: Apache-2.0
"""``gemm_w4a8_sm90``: a wgmma GEMM of int8 or e4m3 activations and packed 4-bit codes, for M up to hundreds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES
from cupy_awq.kernels.family import Config, FunctionFamily, constants
from cupy_awq.kernels.hopper import (
    HOPPER,
    available_ctas,
    could_hold_three_launches,
    is_excessive,
    most_stages,
    p_norm,
    prefetch_waits,
    resident_clusters,
    resident_ctas,
    tile_heights,
    wgmma_cycles,
)
from cupy_awq.kernels.int8.problem import BLOCK_K, Int8Problem, layout_refusal
from cupy_awq.kernels.int8.quantize_fp8 import half_sum_stride
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.packing import namespace
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan, TensorMap
from cupy_awq.runtime.rates import READ_FRACTION

NAME = "gemm_w4a8_sm90"
TILE_N = 64
"""The number of columns of y per weight tile; equal to wgmma's M."""
MAX_BLOCK_M = 128
"""The largest number of rows per CTA tile."""
MAX_HEIGHTS = 3
"""The largest number of values of ``block_m`` to try, for one tile width and split-K factor."""
SPLITS = (1, 2, 3, 4, 6, 8)
"""The split-K factors to try."""
OFFSET_TILES_MIN_M = 33
"""The smallest M for which tiles of offsets are worthwhile; smaller M were not measured."""
OFFSET_TILE_GROUPS = 32
"""The number of k tiles whose offsets are in one tile of offsets."""
SPARE_BYTES = 1280
"""The shared memory per CTA that is left for a CTA of the kernel that quantizes x, in bytes.

A CTA of the GEMM can then start beside it, and copy its weight while x is quantized (PDL).
"""
ABSENT = "absent"
"""The name of a buffer that is always a null pointer, for values of x that a configuration does not read."""
SYMMETRIC_ZERO = 8
"""The code of zero of a weight without offsets."""

WAVE_LATENCIES, SHARE_LATENCIES = 4, 2
"""The time of a further wave of CTAs, and that of a cluster that shares x, in latencies of device memory."""
SHARED_BYTES_PER_CYCLE = 128
"""The bytes that an SM writes to or reads from shared memory per clock cycle."""


@dataclass(frozen=True)
class GemmW4A8Costs:
    """Fitted constants of the cost model. Cycles are per k tile (128 k).

    Attributes:
        dequantize: issue cycles to dequantize a weight tile.
        product: issue cycles per row and instruction that scales a product of 64 columns.
        turn: issue cycles per pipeline stage, if a k tile has parameters of rows of x, times the square of the number
            of consumers beyond two, which take turns at the stages.
        chain: cycles of a warpgroup that is alone on its SM, apart from ``chain_row``.
        chain_row: further cycles per m64 tile and row of the CTA tile.
        shared_copies: number of SMs that share a read from L2 (on average).
        first_stage: cycles until the first stage is computed, per row and weight tile of a stage beyond the first.
        norm: exponent of the p-norm of times that overlap.
    """

    dequantize: float = 47.1
    product: float = 0.57
    turn: float = 7.5
    chain: float = 261.0
    chain_row: float = 3.04
    shared_copies: float = 2.02
    first_stage: float = 3.58
    norm: float = 2.4


COSTS = GemmW4A8Costs()


@dataclass(frozen=True)
class GemmW4A8Config:
    """A configuration of ``gemm_w4a8_sm90``.

    Attributes:
        block_m: number of rows per CTA tile, which are wgmma's N.
        warpgroups: number of warpgroups per consumer.
        m64_tiles: number of m64 tiles (64 columns of y each) per warpgroup.
        consumers: number of consumers, which take turns at the pipeline stages.
        stages: number of pipeline stages.
        k_tiles: number of k tiles (128 rows of W) per stage.
        split_k: number of CTAs per tile; each computes the CTA tile over its slice of K.
        ctas_per_sm: number of resident CTAs per SM for which the kernel is compiled (``__launch_bounds__``).
        share_x: number of CTAs with the same rows and adjacent columns that share the copies of x by multicast; a
            cluster has ``split_k * share_x`` CTAs.
        offset_tiles: whether the tensor cores add the terms of the zero points, for float8 activations.
    """

    block_m: int
    warpgroups: int
    m64_tiles: int
    consumers: int
    stages: int
    k_tiles: int
    split_k: int
    ctas_per_sm: int = 1
    share_x: int = 1
    offset_tiles: bool = False

    @property
    def block_n(self) -> int:
        """The number of columns per CTA tile."""
        return self.warpgroups * self.m64_tiles * TILE_N

    @property
    def all_warpgroups(self) -> int:
        """The number of warpgroups of all consumers."""
        return self.warpgroups * self.consumers

    @property
    def registers(self) -> int:
        """The number of registers that a consumer thread needs: accumulators of y and of a k tile, and others."""
        return self.block_m * (self.m64_tiles + 1) // 2 + (28 if self.offset_tiles else 32)

    @property
    def register_ctas(self) -> int:
        """The number of CTAs for which an SM has registers."""
        return available_ctas(self.all_warpgroups * 128 + 64, self.registers)

    def threads(self, problem: Int8Problem) -> int:
        """Return the number of threads per CTA: consumers, producer, and the warp that copies values per row of x."""
        others = 2 if self.has_x_parameters(problem) else 1
        return (self.all_warpgroups * 4 + others) * 32

    def has_x_parameters(self, problem: Int8Problem) -> bool:
        """Return whether a k tile has a parameter per row of x: the scale of its products, or the sum of its codes."""
        return not self.offset_tiles if problem.fp8 else not problem.row_scales

    def shared_bytes(self, problem: Int8Problem) -> int:
        """Return the dynamic shared memory per CTA in bytes; SharedStorage in CUDA static_asserts the same value."""
        x_tile = self.block_m * (BLOCK_K + 4 * self.has_x_parameters(problem))
        stage = self.k_tiles * (self.warpgroups * self.m64_tiles * weight_tile_bytes(problem) + x_tile)
        row_bytes = (self.block_n + 4) * 4
        received = 0
        if self.split_k > 1:
            received = 16 + (self.split_k - 1) * ceil_div(self.block_m, self.split_k) * row_bytes
        return max(self.stages * stage, self.consumers * self.block_m * row_bytes) + self.stages * 16 + received

    def resident(self, problem: Int8Problem, device: Device) -> int:
        """Return the largest number of resident CTAs per SM."""
        return resident_ctas(device, self.shared_bytes(problem), self.threads(problem), self.register_ctas)

    def starts_next_late(self, problem: Int8Problem, device: Device) -> bool:
        """Return whether this kernel lets the next one start only after its own PDL wait, not at once.

        This holds where CTAs of three kernels could otherwise be resident at once, as in `GemmSm90Config`.
        """
        return could_hold_three_launches(self.ctas(problem), self.resident(problem, device), device)

    def tiles(self, problem: Int8Problem) -> tuple[int, int]:
        """Return the numbers of CTA tiles along m and along n; CTAs that share x have a tile each, even if past N."""
        return ceil_div(problem.m, self.block_m), ceil_div(problem.n, self.block_n * self.share_x) * self.share_x

    def ctas(self, problem: Int8Problem) -> int:
        """Return the number of CTAs: ``split_k`` per tile."""
        return math.prod(self.tiles(problem)) * self.split_k


def weight_tile_bytes(problem: Int8Problem) -> int:
    """Return the size in bytes of the codes, scales and zero points of 64 columns x 128 k of W."""
    return TILE_N * (BLOCK_K // 2 + ITEMSIZE[problem.scale_dtype] + 1)


def refusal(problem: Int8Problem, device: Device) -> str | None:
    return device.refusal(HOPPER) or packed_refusal(problem)


def packed_refusal(problem: Int8Problem) -> str | None:
    """Return the reason why kernels that read the tiles of `prepare_weight` cannot solve the problem, or None."""
    if problem.bits != 4:
        return f"needs 4-bit weights, not {problem.bits} bits"
    if problem.x_offset:
        return "needs activations without offsets"
    if problem.weight_offset and not problem.zero_points:
        return "needs offsets of the weight that are integer multiples of its scales"
    if problem.block_size % BLOCK_K and problem.blocks > 1:
        return f"needs blocks of a multiple of {BLOCK_K} columns, not {problem.block_size}"
    return layout_refusal(problem)


def configs(problem: Int8Problem, device: Device) -> list[GemmW4A8Config]:
    """Return every legal configuration."""
    all_k_tiles = ceil_div(problem.k, BLOCK_K)
    has_offset_tiles = problem.fp8 and problem.m >= OFFSET_TILES_MIN_M
    found: list[GemmW4A8Config] = []
    for warpgroups, m64_tiles, split_k in itertools.product((1, 2, 3, 4), (1, 2), SPLITS):
        heights = _heights(problem, warpgroups * m64_tiles * TILE_N, device.sm_count // split_k)
        for block_m, consumers, k_tiles, share_x, offset_tiles in itertools.product(
            heights, (1, 2, 3, 4), (1, 2), (1, 2), (False, True)
        ):
            # With tiles of offsets, CTAs that share copies of x are up to 26% slower.
            if offset_tiles and (k_tiles > 1 or share_x > 1 or not has_offset_tiles):
                continue
            if share_x > 1 and (block_m < 64 or block_m % 16 or share_x * split_k > 8):
                continue
            if warpgroups * consumers > 4 or consumers * split_k * k_tiles > all_k_tiles:
                continue
            if k_tiles > 1 and block_m > 64:
                continue
            config = GemmW4A8Config(
                block_m, warpgroups, m64_tiles, consumers, consumers, k_tiles, split_k, 1, share_x, offset_tiles
            )
            if not is_excessive(split_k, math.prod(config.tiles(problem)), device):
                found += _with_most_stages(config, problem, device)
    return found


def _heights(problem: Int8Problem, block_n: int, resident: int) -> list[int]:
    """Return the values of ``block_m`` to try if ``resident`` tiles are computed at the same time."""
    heights = tile_heights(problem.m, MAX_BLOCK_M, ceil_div(problem.n, block_n), resident)
    # An integer wgmma has N = 8, 24 or a multiple of 16.
    legal = (height if problem.fp8 or height <= 24 else ceil_div(height, 16) * 16 for height in heights)
    return list(dict.fromkeys(legal))[: 1 if problem.m <= 32 else MAX_HEIGHTS]


def _with_most_stages(config: GemmW4A8Config, problem: Int8Problem, device: Device) -> Iterator[GemmW4A8Config]:
    """Yield, for 2 and for 1 resident CTAs per SM, the configuration with the most stages that fit in shared memory."""
    # Each stage belongs to one consumer, and a consumer needs no more stages than iterations.
    enough = ceil_div(ceil_div(problem.k, BLOCK_K), config.split_k * config.consumers * config.k_tiles)
    counts = range(1 if config.consumers > 1 else 2, max(3, enough + 1))

    def shared_bytes(count: int) -> int:
        return replace(config, stages=count * config.consumers).shared_bytes(problem) + SPARE_BYTES

    for ctas_per_sm in (2, 1):
        if config.register_ctas < ctas_per_sm:
            continue
        most = most_stages(counts, ctas_per_sm, device, shared_bytes)
        if most is not None:
            yield replace(config, stages=most * config.consumers, ctas_per_sm=ctas_per_sm)


def estimate_us(config: GemmW4A8Config, problem: Int8Problem, device: Device) -> float:
    """Return the run time in microseconds: fixed times, and the p-norm of times that overlap.

    The latter are the times of the busiest SM, of a consumer that is alone on its SM, of all copies from L2, and of
    reading the weight from device memory.
    """
    rates, rows, clock = device.rates, config.block_m, device.rates.clock_mhz
    ctas, cluster = config.ctas(problem), config.split_k * config.share_x
    sms, resident = resident_clusters(device, cluster) * cluster, config.resident(problem, device)
    busiest = ceil_div(ctas, sms)
    waves = ceil_div(busiest, config.ctas_per_sm)
    k_tiles = ceil_div(ceil_div(problem.k, BLOCK_K), config.split_k)
    iterations = ceil_div(k_tiles, config.k_tiles)
    mine = ceil_div(iterations, config.consumers) * config.k_tiles
    # Instructions that scale a product: fewest with tiles of offsets, most with a scale per block of x.
    instructions = 0.9 if config.offset_tiles else 2.6 if problem.fp8 else 2 if problem.row_scales else 3.4
    issue_cycles = COSTS.dequantize + COSTS.product * instructions * rows
    if config.has_x_parameters(problem):
        issue_cycles += COSTS.turn * max(0, config.consumers - 2) ** 2 / config.k_tiles
    tile_cycles = 4 * wgmma_cycles(rows, device) + issue_cycles
    chain_cycles = COSTS.chain + COSTS.chain_row * config.m64_tiles * rows
    column_tiles = config.warpgroups * config.m64_tiles
    tile_bytes = weight_tile_bytes(problem)
    read_bytes = problem.n * problem.k * tile_bytes / (TILE_N * BLOCK_K)
    copied_bytes = ctas * k_tiles * (rows * BLOCK_K / config.share_x + column_tiles * tile_bytes)
    overlapping = (
        busiest * k_tiles * column_tiles * tile_cycles / clock,
        waves * mine * chain_cycles / clock,
        copied_bytes / (COSTS.shared_copies * rates.l2_gbs * 1e3),
        device.read_us(read_bytes) / READ_FRACTION,
    )
    queue, pause = prefetch_waits(ctas / (resident * sms), config.stages, iterations)
    latencies = 1 + WAVE_LATENCIES * (waves - 1) + queue + pause + SHARE_LATENCIES * (config.share_x > 1)
    accumulators = rows * config.block_n
    cycles = COSTS.first_stage * rows * (config.k_tiles * column_tiles - 1)
    cycles += 8 * config.consumers * accumulators / SHARED_BYTES_PER_CYCLE  # written and read
    sent_us = 4 * accumulators * (1 - 1 / config.split_k) * device.sm_count / (rates.l2_gbs * 1e3)
    fixed = rates.launch_us + latencies * rates.latency_us + cycles / clock + sent_us
    return fixed + p_norm(overlapping, COSTS.norm)


def plan(config: GemmW4A8Config, problem: Int8Problem, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are weight, offsets, units (see `prepare_weight`), bias, y and xq; of x also x_row_scale (one scale per
    row), x_scale (a scale per block), x_sums (float8) and x_half_sums (``offset_tiles``), or ABSENT in their place.
    """
    x_row_scale = "x_row_scale" if problem.row_scales or problem.fp8 else ABSENT
    x_values = ("x_sums" if problem.fp8 else "x_scale") if config.has_x_parameters(problem) else ABSENT
    defines = (
        *(item for item in problem.defines(weight_offset=False) if item[0] != "BITS"),
        ("SCALE", TYPES[problem.scale_dtype]),
        ("ROW_SCALES", int(problem.row_scales or problem.fp8)),
        *constants(config, "block_m warpgroups m64_tiles consumers stages k_tiles split_k share_x"),
        *constants(config, "ctas_per_sm offset_tiles"),
        ("START_NEXT_LATE", int(config.starts_next_late(problem, device))),
        ("SHARED_BYTES", config.shared_bytes(problem)),
    )
    x_map = TensorMap(
        "xq",
        "int8",
        dims=(problem.k, problem.m, 1),
        strides=(problem.k, problem.k * problem.m),
        box=(BLOCK_K, config.block_m // config.share_x, 1),
        swizzle=128,
    )
    sums_map = x_map
    if config.offset_tiles:
        stride = 2 * half_sum_stride(problem.k, BLOCK_K)
        sums_map = TensorMap(
            "x_half_sums",
            "float16",
            dims=(ceil_div(problem.k, BLOCK_K), problem.m, 1),
            strides=(stride, stride * problem.m),
            box=(64, config.block_m, 1),
            swizzle=128,
        )
    m_blocks, _ = config.tiles(problem)
    sizes = (problem.m, problem.n, problem.k, problem.block_size, m_blocks, problem.y_row_stride, problem.wide)
    scalars = (*map(np.int32, sizes), *map(np.float32, problem.limits))
    return LaunchPlan(
        Kernel("int8/gemm_w4a8_sm90.cu", NAME, defines, device.target),
        (config.ctas(problem), 1, 1),
        (config.threads(problem), 1, 1),
        (x_row_scale, x_values, "weight", "offsets", "units", "bias", "y", x_map, sums_map, *scalars),
        config.shared_bytes(problem),
        cluster=(config.split_k * config.share_x, 1, 1),
        dependent=True,
    )


def prepare_weight(weight: BlockQuantizedWeight, config: Config, problem: Int8Problem) -> dict[str, Array]:
    """Return the weight buffers, in the layouts of ``cuda_src/int8/gemm_w4a8_sm90.cu``.

    The buffers are "weight", "offsets" and "units", of which only products of float8 use the last two, and ABSENT.
    """
    key = "w4a8 tiles", problem.scale_dtype
    buffers = {"weight": weight.layout(key, lambda: _tiles(weight, problem.scale_dtype)), ABSENT: None}
    if not problem.fp8:
        return buffers | {"offsets": None, "units": None}
    offsets = weight.layout(("w4a8 offsets",), lambda: _offset_tiles(weight))
    return buffers | {"offsets": offsets, "units": weight.layout(("w4a8 units",), lambda: _units(weight))}


def _tiles(weight: BlockQuantizedWeight, scale_dtype: str) -> Array:
    """Return the weight tiles, uint8 [ceil(N / 64), ceil(K / 128), bytes]: codes, scales and zero points."""
    n, _, _, k = weight.shape
    xp = namespace(weight.stored)
    columns, k_tiles = ceil_div(n, TILE_N), ceil_div(k, BLOCK_K)
    codes = xp.zeros((columns * TILE_N, k_tiles * BLOCK_K), np.uint8)
    codes[:n, :k] = weight.codes.reshape(n, k)
    # [tile][warp][column half][g][k tile][k64][k32][nibble][t][byte], for lane 4 g + t of a warp
    codes = codes.reshape(columns, 4, 2, 8, k_tiles, 2, 2, 2, 4, 4)
    words = codes[:, :, :, :, :, :, :, 0] | codes[:, :, :, :, :, :, :, 1] << np.uint8(4)
    words = words.transpose(0, 4, 5, 1, 3, 7, 6, 2, 8)  # [tile][k tile][k64][warp][g][t][k32][column half][byte]
    blocks = xp.minimum(xp.arange(k_tiles) * BLOCK_K // weight.block_size, weight.blocks - 1)
    if weight.zero_points is None:
        zeros = xp.full(weight.scale.shape, SYMMETRIC_ZERO, np.uint8)
    else:
        zeros = (SYMMETRIC_ZERO - weight.zero_points).astype(np.uint8)
    parts = [words.reshape(columns, k_tiles, -1)]
    for values in (scale_bits(weight.scale, scale_dtype), zeros):
        padded = xp.zeros((columns * TILE_N, k_tiles), values.dtype)
        padded[:n] = values.take(blocks, axis=1)
        # [tile][warp][column half][g][k tile] to [tile][k tile][warp][g][column half]
        ordered = padded.reshape(columns, 4, 2, 8, k_tiles).transpose(0, 4, 1, 3, 2)
        parts.append(xp.ascontiguousarray(ordered).reshape(columns, k_tiles, TILE_N).view(np.uint8))
    return xp.ascontiguousarray(xp.concatenate(parts, axis=2))


def _offsets(weight: BlockQuantizedWeight) -> Array:
    """Return the zero points times the negative scales, float32 [N, blocks]."""
    zeros = SYMMETRIC_ZERO if weight.zero_points is None else SYMMETRIC_ZERO - weight.zero_points.astype(np.float32)
    return -weight.scale.astype(np.float32) * zeros


def _units(weight: BlockQuantizedWeight) -> Array:
    """Return float32 [2]: the scale of e4m3 codes in units of the accumulators, and this unit, a power of two.

    The unit is chosen such that the largest offset is between 2^14 and 2^15 units, within the range of float16.
    """
    xp = namespace(weight.scale)
    largest = xp.abs(_offsets(weight)).max()
    exponent = xp.where(largest > 0, xp.maximum(xp.frexp(largest)[1] - 15, -100), 0).astype(np.float32)
    return xp.stack([xp.exp2(9 - exponent), xp.exp2(exponent)]).astype(np.float32)


def _offset_tiles(weight: BlockQuantizedWeight) -> Array:
    """Return the tiles of offsets, float16 [ceil(N / 64), ceil(K / 4096), 64 * 32]."""
    n, _, _, k = weight.shape
    xp = namespace(weight.scale)
    columns, k_tiles = ceil_div(n, TILE_N), ceil_div(k, BLOCK_K)
    tiles = ceil_div(k_tiles, OFFSET_TILE_GROUPS)
    blocks = xp.minimum(xp.arange(k_tiles) * BLOCK_K // weight.block_size, weight.blocks - 1)
    offsets = xp.zeros((columns * TILE_N, tiles * OFFSET_TILE_GROUPS), np.float16)
    offsets[:n, :k_tiles] = (_offsets(weight) / _units(weight)[1]).astype(np.float16).take(blocks, axis=1)
    # [tile][warp][column half][g][offset tile][k16][k half][t][pair], for lane 4 g + t of a warp
    offsets = offsets.reshape(columns, 4, 2, 8, tiles, 2, 2, 4, 2).transpose(0, 4, 5, 1, 3, 7, 6, 2, 8)
    return xp.ascontiguousarray(offsets).reshape(columns, tiles, -1)


def scale_bits(scale: Array, dtype: str) -> Array:
    """Return the bits of scales in ``dtype``, which represents them exactly, as uint16 or uint32."""
    if scale.dtype.name == dtype:
        return scale.view(f"u{scale.dtype.itemsize}")
    if dtype == "bfloat16":
        return (scale.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return scale.astype(dtype).view(f"u{ITEMSIZE[dtype]}")


GEMM_W4A8_SM90 = FunctionFamily(NAME, configs, estimate_us, plan, refusal, needs=HOPPER, prepare_weight=prepare_weight)
