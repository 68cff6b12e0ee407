# SPDX-License-Identifier: Apache-2.0
"""``gemm_int8_simt``: the fallback for integer GEMM of any block size, on CUDA cores of any architecture."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_awq.kernels.epilogue import clamp_refusal
from cupy_awq.kernels.family import FunctionFamily, SoleConfig
from cupy_awq.kernels.int8.problem import STEP_K, Int8Problem, prepare_weight
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "gemm_int8_simt"


FMA_FRACTION = 0.26
"""The multiply-adds per cycle over the rate of float32 multiply-adds: an eighth of that of dp4a; not measured."""


@dataclass(frozen=True)
class GemmInt8SimtConfig(SoleConfig):
    """A configuration of ``gemm_int8_simt``, with square CTA tiles.

    Attributes:
        tile: number of rows, and number of columns, per CTA tile.
        threads: number of threads per CTA.
    """

    tile: int = 64
    threads: int = 256


def refusal(problem: Int8Problem, device: Device) -> str | None:
    if problem.fp8:
        return "multiplies int8, not e4m3"
    return clamp_refusal(problem.activation)


def configs(problem: Int8Problem, device: Device) -> list[GemmInt8SimtConfig]:
    """Return the family's single configuration, with a tile of 64 x 64."""
    return [GemmInt8SimtConfig()]


def estimate_us(config: GemmInt8SimtConfig, problem: Int8Problem, device: Device) -> float:
    """Return the run time in microseconds: launch overhead, and the multiply-adds of the SM with the most CTAs."""
    rows, columns, _ = _grid(config, problem)
    rates, products = device.rates, ceil_div(rows * columns, device.sm_count) * config.tile**2 * problem.k
    return rates.launch_us + 2 * rates.latency_us + products / (FMA_FRACTION * rates.fma * rates.clock_mhz)


def plan(config: GemmInt8SimtConfig, problem: Int8Problem, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are those of `Int8Problem.arguments`."""
    whole_steps = problem.block_size % STEP_K == 0 or problem.blocks == 1
    aligned = problem.aligned and whole_steps and problem.k % 8 == 0
    defines = (*problem.defines(weight_offset=problem.weight_offset), ("ALIGNED", int(aligned)))
    kernel = Kernel("int8/gemm_int8_simt.cu", NAME, defines, device.target)
    return LaunchPlan(kernel, _grid(config, problem), (config.threads, 1, 1), problem.arguments())


def _grid(config: GemmInt8SimtConfig, problem: Int8Problem) -> tuple[int, int, int]:
    return ceil_div(problem.m, config.tile), ceil_div(problem.n, config.tile), 1


GEMM_INT8_SIMT = FunctionFamily(NAME, configs, estimate_us, plan, refusal, prepare_weight=prepare_weight)
