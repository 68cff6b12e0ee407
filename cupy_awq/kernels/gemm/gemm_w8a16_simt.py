# SPDX-License-Identifier: Apache-2.0
"""``gemm_w8a16_simt``: the fallback for 8-bit weights, in float32 on CUDA cores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.dtypes import ITEMSIZE
from cupy_awq.kernels.family import FunctionFamily, Reduction, SoleConfig
from cupy_awq.kernels.gemm.problem import INT8_ROWS, Problem
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

NAME = "gemm_w8a16_simt"
THREADS = 256
"""The number of threads per CTA."""
MAX_ROWS = 4
"""The largest number of rows of y per warp."""
FMA_FRACTION = 0.1
"""The fraction of the peak rate of multiply-adds that the cost model assumes; not measured."""


@dataclass(frozen=True)
class GemmW8A16SimtConfig(SoleConfig):
    """A configuration of ``gemm_w8a16_simt``.

    Attributes:
        rows: number of rows of y per warp.
    """

    rows: int = MAX_ROWS


def refusal(problem: Problem, device: Device) -> str | None:
    return None if INT8_ROWS in problem.layouts else "takes an 8-bit weight in rows"


def configs(problem: Problem, device: Device) -> list[GemmW8A16SimtConfig]:
    return [GemmW8A16SimtConfig(min(problem.m, MAX_ROWS))]


def reduction(config: GemmW8A16SimtConfig, problem: Problem) -> Reduction:
    """Return the order in which the configuration adds up an element of y."""
    return Reduction("fma in 32 lanes", slices=(0,))


def estimate_us(config: GemmW8A16SimtConfig, problem: Problem, device: Device) -> float:
    """Return the run time in microseconds: launch overhead, and the longer of memory and multiply-add time."""
    rates, row_blocks = device.rates, ceil_div(problem.m, config.rows)
    products = row_blocks * config.rows * problem.n * problem.k
    multiply_us = products / (FMA_FRACTION * rates.fma * rates.clock_mhz * device.sm_count)
    return rates.launch_us + rates.latency_us + max(device.read_us(problem.weight_bytes), multiply_us)


def plan(config: GemmW8A16SimtConfig, problem: Problem, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are x, qweight, scales, qzeros, bias, residual and y."""
    width = 16 // ITEMSIZE[problem.dtype]
    is_aligned = problem.x_aligned and problem.k % width == 0 and problem.group_size % width == 0
    defines = (
        *(item for item in problem.defines() if item[0] != "SCALE"),
        ("THREADS", THREADS),
        ("ROWS", config.rows),
        ("ALIGNED", int(is_aligned)),
    )
    n_out = problem.n // 2 if problem.gated else problem.n
    grid = (ceil_div(n_out, THREADS // 32) * ceil_div(problem.m, config.rows), 1, 1)
    strides = problem.row_strides
    sizes = (problem.m, problem.n, problem.k, problem.group_size, strides.x, strides.residual, strides.y)
    buffers = ("x", "qweight", "scales", "qzeros", "bias", "residual", "y")
    arguments: tuple[Argument, ...] = (*buffers, *map(np.int32, sizes), *map(np.float32, problem.limits))
    return LaunchPlan(Kernel(f"gemm/{NAME}.cu", NAME, defines, device.target), grid, (THREADS, 1, 1), arguments)


GEMM_W8A16_SIMT = FunctionFamily(NAME, configs, estimate_us, plan, refusal, reduction=reduction)
