# SPDX-License-Identifier: Apache-2.0
"""``conv2d_mma``: convolution as an implicit GEMM with mma.sync, on sm_75 and newer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.conv2d.conv2d_sm90 import CONV2D_SM90
from cupy_awq.kernels.conv2d.problem import (
    TENSOR_CORES,
    VECTOR_CHANNELS,
    Convolution,
    rounded_parameters,
    tensor_core_refusal,
)
from cupy_awq.kernels.family import FunctionFamily, Workspace, constants
from cupy_awq.kernels.tiling import ceil_div, split_counts
from cupy_awq.kernels.warp_tiles import WarpTileConfig
from cupy_awq.kernels.waves import CtaWork, reduction_us, waves_us
from cupy_awq.packing import namespace, pack_int4, pack_int8
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "conv2d_mma"
STAGE_VECTORS = 8
"""The number of 8-channel (16-byte) vectors along K per pipeline stage."""
STAGE_ROW_BYTES = STAGE_VECTORS * VECTOR_CHANNELS * 2
"""The size in bytes of one pixel or output channel in a pipeline stage."""
TILES = ((64, 2, 4), (64, 2, 2), (32, 2, 2))
"""The CTA tiles, largest first: (pixels per warp, warps along pixels, warps along output channels)."""
STATIC_BYTES = 128
"""The static shared memory per CTA in bytes."""
STAGES = {True: 3, False: 2}
"""The number of pipeline stages, the buffers of x in shared memory, by whether cp.async fills them."""


@dataclass(frozen=True)
class Conv2dMmaCosts:
    """Constants of the cost model; not fitted to measurements.

    Attributes:
        mma: time of an mma, relative to that at the peak rate.
        convert: instructions of a thread to dequantize one weight and to store it in shared memory.
        gather: instructions of a thread to copy 16 bytes of x.
        issue: cycles of a scheduler per instruction.
        start: time to start and finish a CTA, in latencies of device memory.
    """

    mma: float = 1.0
    convert: float = 5.0
    gather: float = 24.0
    issue: float = 3.0
    start: float = 0.2


COSTS = Conv2dMmaCosts()


@dataclass(frozen=True)
class Conv2dMmaConfig(WarpTileConfig):
    """A configuration of ``conv2d_mma``; see `WarpTileConfig`. A pipeline stage holds 64 input channels of x."""

    @property
    def shared_bytes(self) -> int:
        """The shared memory per CTA in bytes: all stages of x and two buffers of dequantized weights."""
        return STAGE_ROW_BYTES * (self.stages * self.block_m + 2 * self.block_n)


def refusal(problem: Convolution, device: Device) -> str | None:
    reason = tensor_core_refusal(problem, device)
    if reason is None and CONV2D_SM90.refusal(problem, device) is None:
        return f"is replaced by {CONV2D_SM90.NAME}"
    return reason


def configs(problem: Convolution, device: Device) -> list[Conv2dMmaConfig]:
    """Return a configuration for each split-K factor and each CTA tile that fits in shared memory."""
    stages = STAGES[device.has(Capability.CP_ASYNC)]
    found = [
        Conv2dMmaConfig(*tile, stages, split_k) for tile in TILES for split_k in split_counts(_stages_of_k(problem))
    ]
    return [config for config in found if config.shared_bytes + STATIC_BYTES <= device.shared_bytes_per_block]


def estimate_us(config: Conv2dMmaConfig, problem: Convolution, device: Device) -> float:
    """Return the run time in microseconds: launch overhead, all waves of CTAs and the split-K reduction."""
    rates, elements = device.rates, config.block_m * config.block_n
    rows, columns = _tiles(config, problem)
    ctas, stage_k = rows * columns * config.split_k, STAGE_VECTORS * VECTOR_CHANNELS
    instructions = (COSTS.convert * config.block_n * stage_k + COSTS.gather * config.block_m * STAGE_VECTORS) / 32
    cycles = COSTS.mma * elements * stage_k / rates.mma_fp32 + COSTS.issue * instructions / rates.issue
    weight_bytes = config.block_n * stage_k * problem.bits / 8
    work = CtaWork(
        ceil_div(_stages_of_k(problem), config.split_k),
        rates.latency_us / (config.stages - 1) + cycles / rates.clock_mhz,
        cycles,
        weight_bytes + config.block_m * stage_k * 2,
        weight_bytes / rows,
        COSTS.start * rates.latency_us,
    )
    fitting = device.shared_bytes_per_sm // (config.shared_bytes + 1024)
    waves = waves_us(ctas, max(1, min(2, fitting)), work, device, ctas // rows)
    return rates.launch_us + waves + reduction_us(config.split_k, 4.0 * ctas * elements, device)


def plan(config: Conv2dMmaConfig, problem: Convolution, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are x, codes, scales, offsets, bias, y, partials and counters."""
    defines = (
        *problem.defines(),
        ("BITS", problem.bits),
        *constants(config, "warp_m warps_m warps_n stages"),
        ("ASYNC", int(device.has(Capability.CP_ASYNC))),
        ("EVEN", int(problem.y_aligned and problem.sizes.outputs % 2 == 0)),
    )
    kernel = Kernel("conv2d/conv2d_mma.cu", NAME, defines, device.target)
    block_vectors = ceil_div(min(problem.block_size, problem.sizes.channels), VECTOR_CHANNELS)
    pointers = ("x", "codes", "scales", "offsets", "bias", "y", "partials", "counters")
    threads = 32 * config.warps_m * config.warps_n
    grid = (*_tiles(config, problem), config.split_k)
    arguments = (*pointers, *problem.scalars(3, block_vectors))
    return LaunchPlan(kernel, grid, (threads, 1, 1), arguments, config.shared_bytes)


def workspace(config: Conv2dMmaConfig, problem: Convolution) -> Workspace:
    return config.workspace(math.prod(_tiles(config, problem)))


def prepare_weight(
    weight: BlockQuantizedWeight, config: Conv2dMmaConfig, problem: Convolution
) -> dict[str, Array | None]:
    """Return the weight buffers "codes" (one int32 word per 8 channels, or two for 8 bits), "scales" and "offsets"."""
    scales, offsets = rounded_parameters(weight, np.dtype(problem.dtype))
    return {"codes": weight.layout("sm80 words", lambda: _words(weight)), "scales": scales, "offsets": offsets}


def _words(weight: BlockQuantizedWeight) -> Array:
    """Return the packed codes, int32 [Co, Kh * Kw, words], with channels padded to a multiple of 8."""
    co, kh, kw, ci = weight.shape
    padded = namespace(weight.stored).zeros((co, kh * kw, ceil_div(ci, VECTOR_CHANNELS) * VECTOR_CHANNELS), np.uint8)
    padded[..., :ci] = weight.codes.reshape(co, kh * kw, ci)
    return pack_int4(padded) if weight.bits == 4 else pack_int8((padded ^ np.uint8(128)).view(np.int8))


def _tiles(config: Conv2dMmaConfig, problem: Convolution) -> tuple[int, int]:
    """Return the numbers of CTA tiles along pixels, and along output channels (those of all groups)."""
    sizes = problem.sizes
    return ceil_div(sizes.pixels, config.block_m), ceil_div(sizes.outputs, config.block_n) * sizes.groups


def _stages_of_k(problem: Convolution) -> int:
    """Return the number of main-loop iterations along K; each consumes one pipeline stage."""
    sizes = problem.sizes
    return ceil_div(sizes.kernel_h * sizes.kernel_w * ceil_div(sizes.channels, VECTOR_CHANNELS), STAGE_VECTORS)


CONV2D_MMA = FunctionFamily(
    NAME, configs, estimate_us, plan, refusal, needs=TENSOR_CORES, workspace=workspace, prepare_weight=prepare_weight
)
