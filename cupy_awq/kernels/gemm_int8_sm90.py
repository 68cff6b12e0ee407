# SPDX-License-Identifier: Apache-2.0
"""``gemm_int8_sm90``: a wgmma GEMM for large M, with int8 or e4m3 activations and a weight of one byte per code."""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cupy_awq.block_weight import MAX_ZERO_POINT, BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.family import Workspace
from cupy_awq.kernels.hopper import resident_clusters
from cupy_awq.kernels.int8_problem import BLOCK_K, Int8Problem, block_parameters, layout_refusal
from cupy_awq.kernels.problem import ITEMSIZE, ceil_div
from cupy_awq.packing import namespace
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan, TensorMap

NAME = "gemm_int8_sm90"
MIN_ROWS = 64
"""The smallest M for which tiles of 128 rows can be worthwhile."""
TILE_M, TILE_N = 128, 256
"""The numbers of rows and of columns per CTA tile."""
THREADS = 384
"""The number of threads per CTA."""
MAX_STAGES = 6
"""The largest number of pipeline stages."""
PARAMETER_TILE_N = 64
"""The number of columns of y whose scales and offsets are adjacent in memory; equal to wgmma's M."""
LEAST_CODE = -8 - MAX_ZERO_POINT
"""The smallest value of a signed 4-bit code plus a zero point."""
E4M3_BITS = np.arange(LEAST_CODE, -LEAST_CODE).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
"""The e4m3 bits of the integers LEAST_CODE to -LEAST_CODE - 1, all of which e4m3 represents exactly."""


@dataclass(frozen=True)
class GemmInt8Sm90Costs:
    """Constants of the cost model, fitted to measured times on an H100; RMS error 6%."""

    launch_us: float = 0.7
    """The launch overhead, in microseconds."""
    stage_us: float = 0.53
    """The tensor-core time per CTA tile and pipeline stage (128 along k), in microseconds."""
    scaling_us: float = 0.27
    """The time to apply one parameter of one quantization block to the accumulators of a tile, in microseconds."""
    fixed_parameters: tuple[float, float] = (1.5, 0.9)
    """The time to accumulate the products of int8 and of e4m3, as a multiple of ``scaling_us``."""
    split_us: float = 6.0
    """The time of the split-K reduction, in microseconds."""


COSTS = GemmInt8Sm90Costs()


@dataclass(frozen=True)
class GemmInt8Sm90Config:
    """A configuration of ``gemm_int8_sm90``, with persistent CTAs that compute tiles of 128 x 256.

    Attributes:
        cluster: number of CTAs, 1 or 2, that compute adjacent tiles along m and share copies of the weight by
            multicast.
        ctas: number of CTAs of the launch.
        split_k: number of CTAs per tile, 1 or 2; each computes the tile over its slice of K. If it is 2, ``cluster`` is
            1, and each pair of CTAs computes one tile.
    """

    cluster: int
    ctas: int
    split_k: int = 1


def refusal(problem: Int8Problem, device: Device) -> str | None:
    """Return the reason why the family cannot solve the problem, or None if it can."""
    if device.arch != 90:
        return f"needs sm_90, not sm_{device.arch}"
    if problem.m < MIN_ROWS:
        return f"takes {MIN_ROWS} rows or more, not {problem.m}"
    return block_refusal(problem)


def block_refusal(problem: Int8Problem) -> str | None:
    """Return the reason why the kernel does not support the block size or the alignment, or None if it does."""
    if problem.block_size not in (32, 64) and problem.block_size % BLOCK_K and problem.blocks > 1:
        return f"needs blocks of 32, 64, or a multiple of {BLOCK_K} columns, not {problem.block_size}"
    return layout_refusal(problem)


def configs(problem: Int8Problem, device: Device) -> list[GemmInt8Sm90Config]:
    """Return the configurations: each cluster size, the largest first, which wins if times are equal; then split-K.

    K is split if all tiles are computed at the same time.
    """
    found = [
        GemmInt8Sm90Config(
            cluster, min(device.sm_count // cluster, math.prod(cluster_tiles(cluster, problem))) * cluster
        )
        for cluster in (2, 1)
    ]
    tiles = math.prod(cluster_tiles(1, problem))
    if tiles <= resident_clusters(device, 2) and problem.k >= 2 * BLOCK_K:
        found.append(GemmInt8Sm90Config(1, 2 * tiles, 2))
    return found


def cluster_tiles(cluster: int, problem: Int8Problem) -> tuple[int, int]:
    """Return the numbers of cluster tiles (``cluster`` * 128 rows, 256 columns) along m and n."""
    return ceil_div(problem.m, TILE_M * cluster), ceil_div(problem.n, TILE_N)


def estimate_us(config: GemmInt8Sm90Config, problem: Int8Problem, device: Device) -> float:
    """Return the run time in microseconds: launch overhead, reduction, and the root of two squared times.

    These are the times to read the weight and to compute all tiles of the cluster with the most tiles.
    """
    clusters = config.ctas // (config.cluster * config.split_k)
    waves = ceil_div(math.prod(cluster_tiles(config.cluster, problem)), clusters)
    parameters = (not _has_row_scales(problem)) + _has_weight_offset(problem) + problem.x_offset
    scaling_us = COSTS.scaling_us * _blocks_in_stage(problem) * (COSTS.fixed_parameters[problem.fp8] + parameters)
    k_tiles = ceil_div(ceil_div(problem.k, BLOCK_K), config.split_k)
    read_us = problem.n * problem.k / (device.read_gbs * 1e3)
    split_us = COSTS.split_us if config.split_k > 1 else 0.0
    return COSTS.launch_us + split_us + math.hypot(read_us, waves * k_tiles * (COSTS.stage_us + scaling_us))


def plan(config: GemmInt8Sm90Config, problem: Int8Problem, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are x_scale (or x_row_scale), x_offset, x_sums, parameters, bias, y, xq and codes.
    """
    weight_offset = _has_weight_offset(problem)
    row_scales = _has_row_scales(problem)
    x_blocks = _blocks_in_stage(problem)
    stage_bytes = (TILE_M + TILE_N) * (BLOCK_K + 4 * x_blocks * (1 + weight_offset + problem.x_offset)) + 16
    itemsize = ITEMSIZE[problem.dtype]
    store_bytes = 2 * 32 // itemsize * (TILE_N * itemsize + 16)
    stages = min(MAX_STAGES, (device.shared_bytes_per_block - store_bytes) // stage_bytes)
    defines = (
        *(item for item in problem.defines(weight_offset=weight_offset) if item[0] != "BITS"),
        ("X_BLOCKS", x_blocks),
        ("STAGES", stages),
        ("CLUSTER", config.cluster),
        ("SPLIT_K", config.split_k),
        ("ROW_SCALES", int(row_scales)),
        ("SHARED_BYTES", stages * stage_bytes + store_bytes),
    )
    boxes = {"xq": (problem.m, TILE_M), "codes": (problem.n, TILE_N // config.cluster)}
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
    tiles = cluster_tiles(config.cluster, problem)
    sizes = (problem.m, problem.n, problem.k, problem.block_size, *tiles, problem.y_row_stride, problem.wide)
    scalars = (*map(np.int32, sizes), *map(np.float32, problem.limits))
    return LaunchPlan(
        Kernel("int8/gemm_int8_sm90.cu", NAME, defines, device.target),
        (config.ctas, 1, 1),
        (THREADS, 1, 1),
        (x_scale, "x_offset", "x_sums", "parameters", "bias", "y", xq, codes, *scalars),
        stages * stage_bytes + store_bytes,
        cluster=(config.cluster * config.split_k, 1, 1),
        dependent=True,
    )


def workspace(config: GemmInt8Sm90Config, problem: Int8Problem) -> Workspace:
    """Return an empty workspace, since CTAs that split K exchange partial sums through shared memory."""
    return Workspace()


def prepare_weight(weight: BlockQuantizedWeight, problem: Int8Problem) -> dict[str, Array]:
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
    # half].
    parameters = parameters.reshape(len(rows), stages, blocks, tiles, 4, 2, 8).transpose(3, 1, 2, 0, 4, 6, 5)
    return xp.ascontiguousarray(parameters).reshape(tiles, stages, -1)
