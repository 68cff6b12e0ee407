# SPDX-License-Identifier: Apache-2.0
"""``gemm_int8_sm90``: a wgmma GEMM for large M, with int8 or e4m3 activations and a weight of one byte per code."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cupy_awq.block_weight import MAX_ZERO_POINT, BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.dtypes import ITEMSIZE
from cupy_awq.kernels.family import FunctionFamily, constants
from cupy_awq.kernels.hopper import HOPPER, p_norm, resident_clusters
from cupy_awq.kernels.int8.problem import BLOCK_K, Int8Problem, block_parameters, layout_refusal
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.packing import namespace
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan, TensorMap
from cupy_awq.runtime.rates import READ_FRACTION

NAME = "gemm_int8_sm90"
MIN_ROWS = 5
"""The smallest M for which tiles of 128 rows can be worthwhile: `gemm_int8_sm80` takes longer for large weights."""
TILE_M = 128
"""The number of rows per CTA tile."""
M64_TILES = (4, 3, 2)
"""The numbers of m64 tiles per CTA tile."""
MAX_STAGES = 6
"""The largest number of pipeline stages."""
PARAMETER_TILE_N = 64
"""The number of columns of y whose scales and offsets are adjacent in memory; equal to wgmma's M."""
LEAST_CODE = -8 - MAX_ZERO_POINT
"""The smallest value of a signed 4-bit code plus a zero point."""
E4M3_BITS = np.arange(LEAST_CODE, -LEAST_CODE).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
"""The e4m3 bits of the integers LEAST_CODE to -LEAST_CODE - 1, all of which e4m3 represents exactly."""


WAVE_LATENCIES, SPLIT_LATENCIES = 2, 6
"""The times of a further wave of tiles and of the split-K reduction, in latencies of device memory."""


@dataclass(frozen=True)
class GemmInt8Sm90Costs:
    """Fitted constants of the cost model.

    Attributes:
        mma: time of a pipeline stage on the tensor cores, relative to that at the nominal rate.
        scaling: cycles per stage to apply one parameter of one quantization block to 256 columns.
        int8_sums, fp8_sums: time to accumulate the products, as a multiple of ``scaling``.
        stage: further cycles per pipeline stage, for tiles of any width.
        share_us: additional time if two CTAs share the copies of the weight, in microseconds.
        power: throughput at which the power limit lowers the clock, relative to the peak.
        norm: exponent of the p-norm of times that overlap.
    """

    mma: float = 0.741
    scaling: float = 425.0
    int8_sums: float = 1.36
    fp8_sums: float = 0.849
    stage: float = 248.0
    share_us: float = 1.35
    power: float = 1.1
    norm: float = 2.44


COSTS = GemmInt8Sm90Costs()


@dataclass(frozen=True)
class GemmInt8Sm90Config:
    """A configuration of ``gemm_int8_sm90``, with persistent CTAs.

    Attributes:
        cluster: number of CTAs, 1 or 2, that compute adjacent tiles along m and share copies of the weight by
            multicast.
        ctas: number of CTAs of the launch.
        split_k: number of CTAs per tile, 1 or 2; each computes the tile over its slice of K. If it is 2, ``cluster`` is
            1, and each pair of CTAs computes one tile.
        m64_tiles: number of m64 tiles (64 columns of y each) per CTA tile, 2 to 4.
    """

    cluster: int
    ctas: int
    split_k: int = 1
    m64_tiles: int = 4

    @property
    def block_n(self) -> int:
        """The number of columns per CTA tile."""
        return self.m64_tiles * PARAMETER_TILE_N

    def units(self, problem: Int8Problem) -> tuple[int, int]:
        """Return the numbers of units along m and n; a unit is ``cluster`` CTA tiles that are adjacent along m."""
        return ceil_div(problem.m, TILE_M * self.cluster), ceil_div(problem.n, self.block_n)


def refusal(problem: Int8Problem, device: Device) -> str | None:
    reason = device.refusal(HOPPER)
    if reason is not None:
        return reason
    if problem.m < MIN_ROWS:
        return f"takes {MIN_ROWS} rows or more, not {problem.m}"
    return block_refusal(problem)


def block_refusal(problem: Int8Problem) -> str | None:
    """Return the reason why the kernel does not support the block size or the alignment, or None if it does."""
    if problem.block_size not in (32, 64) and problem.block_size % BLOCK_K and problem.blocks > 1:
        return f"needs blocks of 32, 64, or a multiple of {BLOCK_K} columns, not {problem.block_size}"
    return layout_refusal(problem)


def configs(problem: Int8Problem, device: Device) -> list[GemmInt8Sm90Config]:
    """Return the configurations, those with the largest tiles and clusters first, which win if times are equal.

    K is split if all tiles are computed at the same time.
    """
    found = []
    for m64_tiles, cluster in itertools.product(M64_TILES, (2, 1)):
        units = math.prod(GemmInt8Sm90Config(cluster, 0, 1, m64_tiles).units(problem))
        ctas = min(device.sm_count // cluster, units) * cluster
        found.append(GemmInt8Sm90Config(cluster, ctas, 1, m64_tiles))
        if cluster == 1 and units <= resident_clusters(device, 2) and problem.k >= 2 * BLOCK_K:
            found.append(GemmInt8Sm90Config(1, 2 * units, 2, m64_tiles))
    return found


def estimate_us(config: GemmInt8Sm90Config, problem: Int8Problem, device: Device) -> float:
    """Return the run time in microseconds: fixed times, and the p-norm of times that overlap.

    The latter are the times to read the weight, to compute all tiles of the cluster with the most tiles, and to compute
    all tiles within the power limit.
    """
    rates, clusters = device.rates, config.ctas // (config.cluster * config.split_k)
    waves = ceil_div(math.prod(config.units(problem)), clusters)
    parameters = (not _has_row_scales(problem)) + _has_weight_offset(problem) + problem.x_offset
    sums = COSTS.fp8_sums if problem.fp8 else COSTS.int8_sums
    scaling_cycles = COSTS.scaling * _blocks_in_stage(problem) * (sums + parameters)
    mma_cycles = COSTS.mma * TILE_M * 256 * BLOCK_K / (2 * rates.tensor)
    stage_cycles = (mma_cycles + scaling_cycles) * config.block_n / 256 + COSTS.stage
    stages = ceil_div(ceil_div(problem.k, BLOCK_K), config.split_k)
    sm_products = COSTS.power * 2 * rates.tensor * rates.clock_mhz
    overlapping = (
        device.read_us(problem.n * problem.k) / READ_FRACTION,
        waves * stages * stage_cycles / rates.clock_mhz,
        problem.m * problem.n * problem.k / (sm_products * device.sm_count),
    )
    latencies = 1 + WAVE_LATENCIES * (waves - 1) + SPLIT_LATENCIES * (config.split_k > 1)
    fixed = rates.launch_us + latencies * rates.latency_us + COSTS.share_us * (config.cluster > 1)
    return fixed + p_norm(overlapping, COSTS.norm)


def plan(config: GemmInt8Sm90Config, problem: Int8Problem, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are x_scale (or x_row_scale), x_offset, x_sums, parameters, bias, y, xq and codes.
    """
    weight_offset = _has_weight_offset(problem)
    row_scales = _has_row_scales(problem)
    x_blocks = _blocks_in_stage(problem)
    stage_bytes = (TILE_M + config.block_n) * (BLOCK_K + 4 * x_blocks * (1 + weight_offset + problem.x_offset)) + 16
    itemsize = ITEMSIZE[problem.dtype]
    has_all_rows = problem.fp8 and not weight_offset and config.m64_tiles > 2
    warpgroups = 3 if has_all_rows and config.m64_tiles == 3 else 2
    warpgroup_n = config.block_n // (warpgroups if has_all_rows else 1)
    store_bytes = warpgroups * 32 // itemsize * (warpgroup_n * itemsize + 16)
    stages = min(MAX_STAGES, (device.shared_bytes_per_block - store_bytes) // stage_bytes)
    defines = (
        *(item for item in problem.defines(weight_offset=weight_offset) if item[0] != "BITS"),
        ("X_BLOCKS", x_blocks),
        ("STAGES", stages),
        *constants(config, "cluster split_k m64_tiles"),
        ("HAS_ALL_ROWS", int(has_all_rows)),
        ("WARPGROUPS", warpgroups),
        ("ROW_SCALES", int(row_scales)),
        ("SHARED_BYTES", stages * stage_bytes + store_bytes),
    )
    boxes = {"xq": (problem.m, TILE_M), "codes": (problem.n, config.block_n // config.cluster)}
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
    x_scale = "x_row_scale" if row_scales else "x_scale"
    units = config.units(problem)
    sizes = (problem.m, problem.n, problem.k, problem.block_size, *units, problem.y_row_stride, problem.wide)
    scalars = (*map(np.int32, sizes), *map(np.float32, problem.limits))
    return LaunchPlan(
        Kernel("int8/gemm_int8_sm90.cu", NAME, defines, device.target),
        (config.ctas, 1, 1),
        ((warpgroups + 1) * 128, 1, 1),
        (x_scale, "x_offset", "x_sums", "parameters", "bias", "y", xq, codes, *scalars),
        stages * stage_bytes + store_bytes,
        cluster=(config.cluster * config.split_k, 1, 1),
        dependent=True,
    )


def prepare_weight(weight: BlockQuantizedWeight, config: GemmInt8Sm90Config, problem: Int8Problem) -> dict[str, Array]:
    """Return the weight buffers "codes" and "parameters", in the layouts of ``cuda_src/int8/gemm_int8_sm90.cu``."""
    return {
        "codes": weight.layout(("sm90 bytes", problem.fp8), lambda: _bytes(weight, problem.fp8)),
        "parameters": weight.layout(
            ("sm90 parameters", problem.block_size, problem.x_offset), lambda: _parameters(weight, problem)
        ),
    }


def _has_weight_offset(problem: Int8Problem) -> bool:
    """Return whether the kernel applies offsets of the weight. Integer zero points are added to the codes instead."""
    return problem.weight_offset and not problem.zero_points


def _has_row_scales(problem: Int8Problem) -> bool:
    """Return whether scales of rows multiply the final accumulators, which offsets of x or of the weight preclude."""
    return problem.fp8 or (problem.row_scales and not problem.x_offset and not _has_weight_offset(problem))


def _blocks_in_stage(problem: Int8Problem) -> int:
    """Return the number of quantization blocks of x per pipeline stage (128 columns of x), at least 1."""
    return BLOCK_K // problem.block_size if problem.block_size < BLOCK_K and problem.blocks > 1 else 1


def _bytes(weight: BlockQuantizedWeight, fp8: bool) -> Array:
    """Return signed code + zero point of each weight, [N, K]: as int8, or as e4m3 bits if ``fp8``."""
    n, _, _, k = weight.shape
    xp = namespace(weight.stored)
    codes = xp.ascontiguousarray(weight.codes.reshape(n, k))
    codes = (codes - np.uint8(1 << (weight.bits - 1))).view(np.int8)  # The unsigned difference wraps to signed codes.
    if weight.zero_points is not None:
        codes = codes + weight.zero_points.take(xp.arange(k) // weight.block_size, axis=1)
    return xp.asarray(E4M3_BITS)[codes - np.int8(LEAST_CODE)] if fp8 else codes


def _parameters(weight: BlockQuantizedWeight, problem: Int8Problem) -> Array:
    """Return the parameters, float32 [ceil(N / 64), ceil(K / 128), parameters of 64 rows x 128 columns of W]."""
    n, _, _, k = weight.shape
    block_size = problem.block_size
    xp = namespace(weight.scale)
    tiles, stages = ceil_div(n, PARAMETER_TILE_N), ceil_div(k, BLOCK_K)
    scale, offset, sums = block_parameters(weight, block_size)
    begins = xp.arange(0, k, block_size)[:, None]
    columns = xp.minimum(begins + block_size, k) - begins
    rows = [scale]
    if offset is not None and weight.zero_points is None:
        rows.append(offset)
    if problem.x_offset:
        rows.append(sums * scale + (0 if offset is None else columns * offset))
    # A block's scale is stored for each of its stages; its offset and sum, which are applied once, only for its last
    # stage.
    blocks = BLOCK_K // block_size if block_size < BLOCK_K and len(scale) > 1 else 1
    span = BLOCK_K // blocks
    parameters = xp.zeros((len(rows), stages * blocks, tiles * PARAMETER_TILE_N), np.float32)
    span_begins = xp.arange(stages * blocks) * span
    inside = span_begins < k
    parameters[0, inside, :n] = rows[0][span_begins[inside] // block_size]
    for part, values in zip(parameters[1:], rows[1:], strict=True):
        part[(xp.minimum(begins[:, 0] + block_size, k) - 1) // span, :n] = values
    # Transpose [parameter][stage, block][tile, warp, row half, g] to [tile][stage][block][parameter][warp][g][row
    # half], where g = lane / 4.
    parameters = parameters.reshape(len(rows), stages, blocks, tiles, 4, 2, 8).transpose(3, 1, 2, 0, 4, 6, 5)
    return xp.ascontiguousarray(parameters).reshape(tiles, stages, -1)


GEMM_INT8_SM90 = FunctionFamily(NAME, configs, estimate_us, plan, refusal, needs=HOPPER, prepare_weight=prepare_weight)
