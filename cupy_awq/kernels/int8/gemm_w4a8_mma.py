# SPDX-License-Identifier: Apache-2.0
"""``gemm_w4a8_mma``: GEMM with mma.sync of 8-bit activations and packed 4-bit codes, for tens of rows and more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES, ZEROS
from cupy_awq.kernels.family import Config, FunctionFamily, Workspace, constants
from cupy_awq.kernels.gemm.layouts import WEIGHT_TILE_K, WEIGHT_TILE_N, FragmentLayout
from cupy_awq.kernels.hopper import HOPPER
from cupy_awq.kernels.int8.gemm_w4a8_sm90 import SYMMETRIC_ZERO, packed_refusal, scale_bits
from cupy_awq.kernels.int8.problem import BLOCK_K, Int8Problem
from cupy_awq.kernels.tiling import MmaStreamK, ceil_div, stream_k_divisions, with_stages
from cupy_awq.kernels.waves import CtaWork, waves_us
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

NAME = "gemm_w4a8_mma"
MIN_BLOCK_M = 16
"""The smallest number of rows per CTA tile."""
MAX_BLOCK_M = 128
"""The largest number of rows per CTA tile."""
TRIPLE_BLOCK_M = 40
"""The largest ``block_m`` for which registers hold three CTAs of four warps per SM."""
MAX_STAGES = 4
"""The largest number of pipeline stages."""
MMA_PRODUCTS = 16 * 8 * 32
"""The number of multiply-adds of an mma."""
FRAGMENT_ORDER = tuple(2 * (i // 4) + i % 4 // 2 + i % 2 * 8 for i in range(16))
"""The column of each 16 columns of W whose codes the kernel multiplies by code i of each 16 codes of x."""
SCHEDULERS = 4
"""The number of warp schedulers per SM."""


@dataclass(frozen=True)
class GemmW4A8MmaCosts:
    """Constants of the cost model, fitted to 49 times of 8 problems with M = 48 to 2048 on an H100.

    The first choice is slower than the fastest configuration by 0.3%, and at most by 2.6%, over these problems.

    Attributes:
        mma: time of an mma, relative to that at the peak rate.
        issue: cycles that any other instruction takes from the mma of its scheduler.
        sync: cycles per k tile for which the warps of a CTA wait for each other; other CTAs hide them.
        start: time to fill the pipeline of a tile and to finish the tile, in latencies of device memory.
        store: cycles to store y, per element of a CTA tile.
        stream_k: fixed time of the stream-K reduction, in latencies of device memory.
        exchange: cycles per partial sum that a CTA writes or reads.
    """

    mma: float = 1.53
    issue: float = 0.179
    sync: float = 384.0
    start: float = 1.13
    store: float = 0.0981
    stream_k: float = 2.56
    exchange: float = 0.353


COSTS = GemmW4A8MmaCosts()


@dataclass(frozen=True)
class GemmW4A8MmaConfig(MmaStreamK):
    """A configuration of ``gemm_w4a8_mma.cu``.

    Attributes:
        block_m: number of rows per CTA tile.
        warps_n: number of warps, side by side along n.
        ctas_per_sm: number of resident CTAs per SM for which the kernel is compiled (``__launch_bounds__``).
        is_async: whether cp.async copies, or else the threads, through registers.
        stages: number of pipeline stages.
        ctas: number of CTAs of the launch, which compute one tile after another.
        stream_k_units: number of tiles that are computed with stream-K, counted from the first; each of the others is
            computed by one CTA. See ``StreamKTileScheduler`` in ``cuda_src/common/tile_scheduler.cuh``.
        stream_k_ctas: number of CTAs among which the k tiles of the stream-K tiles are divided.
    """

    block_m: int
    warps_n: int
    ctas_per_sm: int = 1
    is_async: bool = True
    stages: int = 2
    ctas: int = 1
    stream_k_units: int = 0
    stream_k_ctas: int = 0

    @property
    def block_n(self) -> int:
        """The number of columns per CTA tile."""
        return self.warps_n * WEIGHT_TILE_N

    def stage_bytes(self, problem: Int8Problem) -> int:
        """Return the size of a pipeline stage in bytes: x with its scales, and the weight."""
        weight = self.warps_n * weight_tile_bytes(problem)
        scale_bytes = 0 if has_row_scales(problem) else 8 if problem.fp8 else 4
        return ceil_div(self.block_m * (BLOCK_K + scale_bytes) + weight, 128) * 128

    def shared_bytes(self, problem: Int8Problem) -> int:
        """Return the dynamic shared memory per CTA in bytes; SharedStorage in CUDA static_asserts the same value."""
        return max(self.stages * self.stage_bytes(problem), self.pass_rows * (self.block_n + 4) * 4)


def has_row_scales(problem: Int8Problem) -> bool:
    """Return whether x is int8 with one scale per row, which multiplies y instead of the products of a k tile."""
    return not problem.fp8 and (problem.row_scales or problem.blocks == 1)


def weight_tile_bytes(problem: Int8Problem) -> int:
    """Return the size in bytes of a weight tile: codes, scales and, if there are any, zero points."""
    column_bytes = ITEMSIZE[problem.scale_dtype] + int(problem.weight_offset)
    return WEIGHT_TILE_N * (WEIGHT_TILE_K // 2 + column_bytes)


def refusal(problem: Int8Problem, device: Device) -> str | None:
    product = Capability.MMA_FP8 if problem.fp8 else Capability.MMA_INT8_M8N8K16
    reason = device.refusal([product, Capability.LDMATRIX])
    if reason is not None:
        return reason
    if device.has(*HOPPER):
        return "serves GPUs on which gemm_w4a8_sm90 cannot run"
    if problem.dtype == "float32" or problem.n % 8:
        return f"writes a y of 16 bits whose N is a multiple of 8, not {problem.dtype} and {problem.n}"
    return packed_refusal(problem)


def configs(problem: Int8Problem, device: Device) -> list[GemmW4A8MmaConfig]:
    """Return every legal configuration."""
    return list(_configs(problem, device))


def _configs(problem: Int8Problem, device: Device) -> Iterator[GemmW4A8MmaConfig]:
    is_async = device.has(Capability.CP_ASYNC)
    triple = TRIPLE_BLOCK_M - 16 * problem.fp8  # e4m3 takes more registers
    for block_m in _heights(problem.m):
        # A third CTA per SM leaves fewer stages to each.
        for warps_n, most in ((8, 1), (4, 2), *([(4, 3)] if block_m <= triple else [])):
            shape = GemmW4A8MmaConfig(block_m, warps_n, 1, is_async)
            config = with_stages(shape, most, MAX_STAGES if is_async else 2, problem, device)
            if config is not None:
                yield from _divided(config, problem, device)


def _heights(m: int) -> list[int]:
    """Return the values of ``block_m`` to try: the smallest for each number of tiles.

    >>> _heights(40), _heights(200)
    ([16, 24, 40], [32, 40, 56, 72, 104])
    """
    low = MIN_BLOCK_M if m <= MAX_BLOCK_M else 32
    return [h for h in range(low, MAX_BLOCK_M + 1, 8) if h == low or ceil_div(m, h) < ceil_div(m, h - 8)]


def _divided(config: GemmW4A8MmaConfig, problem: Int8Problem, device: Device) -> Iterator[GemmW4A8MmaConfig]:
    """Yield the configuration with one CTA per tile and, where these leave SMs idle, with stream-K."""
    units, resident = config.units(problem), config.ctas_per_sm * device.sm_count
    yield replace(config, ctas=units)
    if units < resident:
        for shared, sharers, ctas in stream_k_divisions(units, ceil_div(problem.k, BLOCK_K), resident):
            yield replace(config, ctas=ctas, stream_k_units=shared, stream_k_ctas=sharers)


def plan(config: GemmW4A8MmaConfig, problem: Int8Problem, device: Device) -> LaunchPlan:
    """Return the launch plan; x has xq, x_row_scale or x_scale (a scale per row or block), and x_sums."""
    defines = (
        *(item for item in problem.defines(weight_offset=False) if item[0] not in ("BITS", "X_OFFSET")),
        ("SCALE", TYPES[problem.scale_dtype]),
        ("ZEROS", ZEROS["packed" if problem.weight_offset else "symmetric"]),
        *constants(config, "block_m warps_n stages pass_rows ctas_per_sm"),
        ("ASYNC", int(config.is_async)),
        ("ALIGNED", int(problem.wide)),
        ("ROW_SCALES", int(has_row_scales(problem))),
        ("STREAM_K", int(config.stream_k_units > 0)),
        ("SHARED_BYTES", config.shared_bytes(problem)),
    )
    is_by_row = problem.row_scales or problem.fp8
    x_scale, block_size = ("x_row_scale", problem.k) if is_by_row else ("x_scale", problem.block_size)
    sizes = (problem.m, problem.n, problem.k, block_size, problem.y_row_stride)
    stream_k = (config.stream_k_units, config.stream_k_ctas)
    scalars = (*map(np.int32, (*sizes, *stream_k)), *map(np.float32, problem.limits))
    x_sums: tuple[Argument, ...] = ("x_sums",) if problem.fp8 else (np.int64(0),)
    return LaunchPlan(
        Kernel(f"int8/{NAME}.cu", NAME, defines, device.target),
        (config.ctas, 1, 1),
        (config.warps_n * 32, 1, 1),
        (x_scale, "weight", "bias", "y", "partials", "counters", "xq", *x_sums, *scalars),
        config.shared_bytes(problem),
    )


def workspace(config: GemmW4A8MmaConfig, problem: Int8Problem) -> Workspace:
    if not config.stream_k_units:
        return Workspace()
    return Workspace(config.stream_k_ctas * config.block_m * config.block_n * 4, config.stream_k_units)


def prepare_weight(weight: BlockQuantizedWeight, config: Config, problem: Int8Problem) -> dict[str, Array]:
    """Return the buffer "weight", in the fragment layout, for an xq whose columns are in their own order."""
    return {"weight": weight.layout(("w4a8 fragments", problem.scale_dtype), lambda: _fragments(weight, problem))}


def _fragments(weight: BlockQuantizedWeight, problem: Int8Problem) -> Array:
    zeros = "packed" if problem.weight_offset else "symmetric"
    group_size = ceil_div(weight.block_size, WEIGHT_TILE_K) * WEIGHT_TILE_K
    layout = FragmentLayout(problem.k, problem.n, group_size, problem.scale_dtype, zeros)
    parameters = [scale_bits(weight.scale, problem.scale_dtype)]
    if weight.zero_points is not None:
        parameters.append((SYMMETRIC_ZERO - weight.zero_points).astype(np.uint8))
    codes = weight.codes.reshape(problem.n, -1, 16)
    codes[..., list(FRAGMENT_ORDER)] = codes.copy()
    return layout.arrange(codes.reshape(problem.n, problem.k), parameters)


def estimate_us(config: GemmW4A8MmaConfig, problem: Int8Problem, device: Device) -> float:
    """Return the run time in microseconds: launch overhead, and all waves of CTAs; stream-K tiles are the last wave."""
    rates, k_tiles, units = device.rates, ceil_div(problem.k, BLOCK_K), config.units(problem)
    shared, sharers = config.stream_k_units, config.stream_k_ctas
    cycles, elements = warp_cycles(config, problem, device), config.block_m * config.block_n
    sm_cycles = cycles * config.warps_n / SCHEDULERS
    # Copies through registers wait for device memory before the k tile is multiplied.
    sync = COSTS.sync + (0.0 if config.is_async else rates.latency_us * rates.clock_mhz)
    weight_bytes = config.warps_n * weight_tile_bytes(problem)
    work = CtaWork(
        k_tiles,
        max((sm_cycles + sync) / rates.clock_mhz, rates.latency_us / (config.stages - 1)),
        sm_cycles + sync / config.ctas_per_sm**2 + COSTS.store * elements / k_tiles,
        weight_bytes + config.block_m * BLOCK_K,
        weight_bytes / ceil_div(problem.m, config.block_m),
        COSTS.start * rates.latency_us,
    )
    total = rates.launch_us
    if units > shared:
        readers = max(1, (units - shared) // ceil_div(problem.m, config.block_m))
        total += waves_us(units - shared, config.ctas_per_sm, work, device, readers)
    if shared:
        parts = (shared + sharers - math.gcd(shared, sharers)) / sharers  # of units, per CTA
        work = work._replace(k_tiles=shared / sharers * k_tiles, end_us=parts * work.end_us)
        total += waves_us(sharers, config.ctas_per_sm, work, device)
        partials = ceil_div(sharers, device.sm_count) * elements * (1 + sharers / shared)
        total += COSTS.stream_k * rates.latency_us + COSTS.exchange * partials / rates.clock_mhz
    return total


def warp_cycles(config: GemmW4A8MmaConfig, problem: Int8Problem, device: Device) -> float:
    """Return the cycles in which a scheduler issues a warp's instructions for one k tile.

    The counts are those of the compiled main loop: per 16 columns and 32 k, the conversion of two words of codes; per
    16 rows, four ldmatrix and the scales of the products; per k tile, copies and loop control.
    """
    rows = config.block_m // 8
    mmas = 2 * 4 * rows
    rate = device.rates.mma_fp8 if problem.fp8 else device.rates.mma_int8
    others = 2 * 4 * 14 + 2 * rows + 2 * rows * 4 * (2 if ITEMSIZE[problem.scale_dtype] == 2 else 3) + 80
    return mmas * COSTS.mma * MMA_PRODUCTS * SCHEDULERS / rate + others * COSTS.issue


GEMM_W4A8_MMA = FunctionFamily(
    NAME, configs, estimate_us, plan, refusal, workspace=workspace, prepare_weight=prepare_weight
)
