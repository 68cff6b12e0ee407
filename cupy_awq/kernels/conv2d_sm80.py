# SPDX-License-Identifier: Apache-2.0
"""``conv2d_sm80``: convolutions as an implicit GEMM by mma.sync, on sm_80 and newer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels import conv2d_sm90
from cupy_awq.kernels.conv2d_problem import UNIT, Convolution, refuse_tensor_cores, rounded_parameters
from cupy_awq.kernels.family import Workspace
from cupy_awq.kernels.problem import ceil_div, split_counts
from cupy_awq.packing import namespace, pack_int4, pack_int8
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "conv2d_sm80"
STAGE_UNITS = 8
"""The units of 8 channels along K in one pipeline stage."""
STAGE_ROW_BYTES = STAGE_UNITS * UNIT * 2
TILES = ((64, 2, 4), (64, 2, 2), (32, 2, 2))
"""(pixels of a warp, warps along pixels, warps along outputs), the largest tile first."""
STAGES = 3


@dataclass(frozen=True)
class Fit:
    """Constants of the cost model, which was made to rank configurations and is not fitted to measurements."""

    unit_us: float = 0.07
    """The microseconds of a unit of cost: the products of 32 pixels, 32 outputs and 64 channels."""
    stage: float = 6.0
    """The cost of a pipeline stage without its products."""
    cta: float = 20.0
    """The cost of the start and the end of a CTA."""
    split: float = 30.0
    """The fixed cost of the reduction over split-K."""
    each_split: float = 2.0
    """The cost of each split in the reduction."""


FIT = Fit()


@dataclass(frozen=True)
class Conv2dSm80Config:
    """A tile of ``warps_m * warp_m`` pixels and ``32 * warps_n`` outputs per CTA.

    Attributes:
        warp_m: pixels of a warp; a warp has 32 outputs.
        warps_m, warps_n: warps along pixels and outputs.
        stages: pipeline stages of pixels, of 64 channels each.
        split_k: CTAs that share an accumulator.
    """

    warp_m: int
    warps_m: int
    warps_n: int
    stages: int
    split_k: int

    @property
    def block_m(self) -> int:
        """The pixels of the CTA's tile."""
        return self.warp_m * self.warps_m

    @property
    def block_n(self) -> int:
        """The outputs of the CTA's tile."""
        return 32 * self.warps_n

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a CTA: the stages of pixels and two buffers of weights."""
        return STAGE_ROW_BYTES * (self.stages * self.block_m + 2 * self.block_n)


def refuse(problem: Convolution, device: Device) -> str | None:
    """Return why the family cannot solve the problem, or why another family replaces it; None if it can."""
    reason = refuse_tensor_cores(problem, device)
    if reason is None and conv2d_sm90.refuse(problem, device) is None:
        return f"is replaced by {conv2d_sm90.NAME}"
    return reason


def configs(problem: Convolution, device: Device) -> list[Conv2dSm80Config]:
    """Return every tile that fits in shared memory, with every split of K."""
    found = [
        Conv2dSm80Config(warp_m, warps_m, warps_n, STAGES, split_k)
        for warp_m, warps_m, warps_n in TILES
        for split_k in split_counts(_stages_of_k(problem))
    ]
    return [config for config in found if config.shared_bytes <= device.shared_bytes_per_block]


def estimate_us(config: Conv2dSm80Config, problem: Convolution, device: Device) -> float:
    """Return the expected time: the stages of a CTA, whose products fill 32 x 32 tiles, for each wave of CTAs."""
    rows, columns = _tiles(config, problem)
    waves = ceil_div(rows * columns * config.split_k, device.sm_count)
    products = config.block_m * config.block_n / 1024
    cost = waves * ((FIT.stage + products) * ceil_div(_stages_of_k(problem), config.split_k) + FIT.cta)
    if config.split_k > 1:
        cost += FIT.split + FIT.each_split * config.split_k
    return cost * FIT.unit_us


def plan(config: Conv2dSm80Config, problem: Convolution, device: Device) -> LaunchPlan:
    """Return the launch."""
    defines = (
        *problem.defines(),
        ("BITS", problem.bits),
        ("WARP_M", config.warp_m),
        ("WARPS_M", config.warps_m),
        ("WARPS_N", config.warps_n),
        ("STAGES", config.stages),
        ("EVEN", int(problem.y_aligned and problem.sizes.outputs % 2 == 0)),
    )
    kernel = Kernel("conv2d/conv2d_sm80.cu", NAME, defines, device.target)
    block_units = ceil_div(min(problem.block_size, problem.sizes.channels), UNIT)
    pointers = ("x", "codes", "scales", "offsets", "bias", "y", "partials", "counters")
    threads = 32 * config.warps_m * config.warps_n
    grid = (*_tiles(config, problem), config.split_k)
    arguments = (*pointers, *problem.scalars(3, block_units))
    return LaunchPlan(kernel, grid, (threads, 1, 1), arguments, config.shared_bytes)


def workspace(config: Conv2dSm80Config, problem: Convolution) -> Workspace:
    """Return the partial sums of split-K, float32 for each element of a tile, and a counter for each tile."""
    if config.split_k == 1:
        return Workspace()
    rows, columns = _tiles(config, problem)
    return Workspace(rows * columns * config.split_k * config.block_m * config.block_n * 4, rows * columns)


def prepare_weight(weight: BlockQuantizedWeight, problem: Convolution) -> dict[str, Array | None]:
    """Return the buffers "codes", int32 words of 8 channels each (two for 8 bits), and "scales" and "offsets"."""
    scales, offsets = rounded_parameters(weight, np.dtype(problem.dtype))
    return {"codes": weight.layout("sm80 words", lambda: _words(weight)), "scales": scales, "offsets": offsets}


def _words(weight: BlockQuantizedWeight) -> Array:
    """Return int32 [Co, Kh * Kw, words]."""
    co, kh, kw, ci = weight.shape
    padded = namespace(weight.stored).zeros((co, kh * kw, ceil_div(ci, UNIT) * UNIT), np.uint8)
    padded[..., :ci] = weight.codes.reshape(co, kh * kw, ci)
    return pack_int4(padded) if weight.bits == 4 else pack_int8((padded ^ np.uint8(128)).view(np.int8))


def _tiles(config: Conv2dSm80Config, problem: Convolution) -> tuple[int, int]:
    """Return the number of tiles along the pixels, and along the outputs of all groups."""
    sizes = problem.sizes
    return ceil_div(sizes.pixels, config.block_m), ceil_div(sizes.outputs, config.block_n) * sizes.groups


def _stages_of_k(problem: Convolution) -> int:
    """Return the number of stages that all of K takes."""
    sizes = problem.sizes
    return ceil_div(sizes.kernel_h * sizes.kernel_w * ceil_div(sizes.channels, UNIT), STAGE_UNITS)
