# SPDX-License-Identifier: Apache-2.0
"""``gemm_int8_sm75`` and ``gemm_int8_sm80``: GEMM with mma.sync of int8 or, on sm_89 and newer, e4m3 activations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupy_awq.kernels.family import Family, Workspace, constants
from cupy_awq.kernels.int8 import problem as int8_problem
from cupy_awq.kernels.int8.gemm_int8_sm90 import GEMM_INT8_SM90
from cupy_awq.kernels.int8.problem import BLOCK_K, ROWS_TO_BLOCKS_LAUNCHES, Int8Problem, layout_refusal
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.kernels.warp_tiles import WarpTileConfig
from cupy_awq.kernels.waves import CtaWork, reduction_us, waves_us
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

SHORT_BLOCK = 256
"""The largest block size for which int32 dot products fit in a float32 mantissa, which makes conversion cheap."""
SPLITS = (1, 2, 4, 8)
"""The split-K factors to try."""
CTAS_PER_SM = 2
"""The largest number of CTAs per SM that split-K may create; more CTAs would run in several waves."""
TILES_SM75 = ((32, 2, 4), (32, 1, 4), (16, 1, 4))
"""The CTA tiles (see TILES_SM80) for sm_75 and for e4m3, where 64 rows per warp would spill registers."""
TILES_SM80 = ((64, 2, 4), (64, 1, 4), (32, 1, 4), (16, 1, 4))
"""The CTA tiles for sm_80 and newer: (rows per warp, warps along m, warps along n)."""


@dataclass(frozen=True)
class GemmInt8MmaCosts:
    """Constants of the cost model; of instructions, those per thread.

    Attributes:
        convert: instructions to dequantize one weight, which each warp along m repeats.
        scale: instructions to scale one accumulator at the end of a quantization block.
        issue: cycles of a scheduler per instruction.
        chain: time of a stage of a CTA that is alone on its SM, relative to its cycles.
        exposed: latencies of device memory per stage, over the stages whose copies are in flight; with two stages,
            copies through registers follow each other.
        read_fraction: fraction of the bandwidth that is reached, of that of a plain read.
        start: time to start and finish a CTA, in latencies of device memory.
    """

    convert: float = 0.6
    scale: float = 6.5
    issue: float = 2.2
    chain: float = 1.0
    exposed: float = 0.25
    read_fraction: float = 0.8
    start: float = 2.0


COSTS = GemmInt8MmaCosts()


class GemmInt8Mma(Family[Int8Problem, WarpTileConfig]):
    """An 8-bit GEMM family with mma.sync; ``needs`` are the capabilities for int8.

    `GEMM_INT8_SM75` and `GEMM_INT8_SM80` differ in their mma and copy instructions.
    """

    def __init__(self, name: str, needs: tuple[Capability, ...], stages: tuple[int, ...]) -> None:
        self.NAME = name
        self.needs = needs
        self._stages = stages

    def refusal(self, problem: Int8Problem, device: Device) -> str | None:
        reason = device.refusal([Capability.MMA_FP8] if problem.fp8 else self.needs)
        if reason is not None:
            return reason
        if self is GEMM_INT8_SM75 and device.has(*GEMM_INT8_SM80.needs):
            return f"is replaced by {GEMM_INT8_SM80.NAME} on sm_{device.arch}"
        if problem.fp8 and GEMM_INT8_SM90.refusal(problem, device) is None:
            return f"is replaced by {GEMM_INT8_SM90.NAME} for e4m3"
        return layout_refusal(problem)

    def configs(self, problem: Int8Problem, device: Device) -> list[WarpTileConfig]:
        """Return every legal configuration."""
        found = []
        for warp_m, warps_m, warps_n in self._tiles(problem):
            for split_k in SPLITS:
                options = [WarpTileConfig(warp_m, warps_m, warps_n, stages, split_k) for stages in self._stages]
                fitting = [c for c in options if _shared_bytes(c, problem) <= device.shared_bytes_per_block]
                rows, columns = _grid(options[0], problem)
                fills = rows * columns * split_k <= CTAS_PER_SM * device.sm_count
                if split_k == 1 or (fills and split_k <= ceil_div(problem.k, BLOCK_K)):
                    found += fitting[:1]
        return found

    def estimate_us(self, config: WarpTileConfig, problem: Int8Problem, device: Device) -> float:
        """Return the run time in microseconds: launch overhead, all waves of CTAs and the split-K reduction."""
        rates, elements = device.rates, config.block_m * config.block_n
        rows, columns = _grid(config, problem)
        ctas, blocks = rows * columns * config.split_k, _blocks_in_stage(problem)
        converted = COSTS.convert * BLOCK_K * config.block_n * config.warps_m * (problem.bits == 4)
        issued = (converted + COSTS.scale * elements * blocks) / 32 / rates.issue
        mma_rate = rates.mma_fp8 if problem.fp8 else rates.mma_int8
        cycles = elements * BLOCK_K / mma_rate + COSTS.issue * issued
        copied = 9.0 if self is GEMM_INT8_SM75 else 1 / (config.stages - 1)
        weight_bytes = config.block_n * (BLOCK_K * problem.bits / 8 + 4 * problem.parameters * blocks)
        work = CtaWork(
            ceil_div(ceil_div(problem.k, BLOCK_K), config.split_k),
            COSTS.exposed * copied * rates.latency_us + COSTS.chain * cycles / rates.clock_mhz,
            cycles,
            weight_bytes + config.block_m * BLOCK_K,
            weight_bytes / rows / COSTS.read_fraction,
            COSTS.start * rates.latency_us,
        )
        fitting = device.shared_bytes_per_sm // (_shared_bytes(config, problem) + 1024)
        us = rates.launch_us + waves_us(ctas, max(1, min(CTAS_PER_SM, fitting)), work, device, ctas // rows)
        us += reduction_us(config.split_k, 4.0 * ctas * elements, device)
        return us + ROWS_TO_BLOCKS_LAUNCHES * rates.launch_us * problem.row_scales

    def plan(self, config: WarpTileConfig, problem: Int8Problem, device: Device) -> LaunchPlan:
        """Return the launch plan; the buffers are those of `Int8Problem.arguments`."""
        defines = (
            *problem.defines(weight_offset=problem.weight_offset or problem.fp8),
            *constants(config, "warp_m warps_m warps_n stages"),
            ("X_BLOCKS", _blocks_in_stage(problem)),
            ("SHORT_BLOCKS", int(problem.block_size <= SHORT_BLOCK and not problem.fp8)),
            ("EVEN", int(problem.even)),
        )
        kernel = Kernel(f"int8/{self.NAME}.cu", self.NAME, defines, device.target)
        grid = (*_grid(config, problem), config.split_k)
        threads = 32 * config.warps_m * config.warps_n
        return LaunchPlan(kernel, grid, (threads, 1, 1), problem.arguments(), _shared_bytes(config, problem))

    def workspace(self, config: WarpTileConfig, problem: Int8Problem) -> Workspace:
        return config.workspace(math.prod(_grid(config, problem)))

    prepare_weight = staticmethod(int8_problem.prepare_weight)

    def _tiles(self, problem: Int8Problem) -> tuple[tuple[int, int, int], ...]:
        return TILES_SM75 if problem.fp8 or self is GEMM_INT8_SM75 else TILES_SM80


GEMM_INT8_SM75 = GemmInt8Mma("gemm_int8_sm75", (Capability.MMA_INT8_M8N8K16,), stages=(2,))
GEMM_INT8_SM80 = GemmInt8Mma("gemm_int8_sm80", (Capability.MMA_INT8_M16N8K32, Capability.CP_ASYNC), stages=(4, 3, 2))


def _grid(config: WarpTileConfig, problem: Int8Problem) -> tuple[int, int]:
    return ceil_div(problem.m, config.block_m), ceil_div(problem.n, config.block_n)


def _blocks_in_stage(problem: Int8Problem) -> int:
    """Return the largest number of quantization blocks of x that overlap a pipeline stage (128 columns of x)."""
    if BLOCK_K % problem.block_size == 0:
        return BLOCK_K // problem.block_size
    return 1 if problem.block_size % BLOCK_K == 0 else 2


def _shared_bytes(config: WarpTileConfig, problem: Int8Problem) -> int:
    codes_bytes = BLOCK_K * config.block_m + BLOCK_K * problem.bits // 8 * config.block_n
    parameter_bytes = 12 * _blocks_in_stage(problem) * (config.block_m + config.block_n)
    return config.stages * (codes_bytes + parameter_bytes)
