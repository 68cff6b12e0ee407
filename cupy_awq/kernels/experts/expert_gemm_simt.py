# SPDX-License-Identifier: Apache-2.0
"""``expert_gemm_simt``: the grouped product in float32 on CUDA cores, on weights in the AWQ layout."""

from __future__ import annotations

import numpy as np

from cupy_awq.kernels.dtypes import TYPES, ZEROS
from cupy_awq.kernels.experts.problem import ExpertProduct, count_blocks
from cupy_awq.kernels.family import FunctionFamily, Reduction, SoleConfig
from cupy_awq.kernels.gemm.problem import AWQ
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

NAME = "expert_gemm_simt"
THREADS = 128
"""The number of threads per CTA."""
CTAS_PER_SM = 8
"""The largest number of CTAs per SM."""
PRODUCT_US = 1.0e-4
"""The modelled time of eight products of a thread on one SM, in microseconds; an assumption."""


def refusal(problem: ExpertProduct, device: Device) -> str | None:
    if problem.rows != "sorted":
        return "needs sorted rows"
    return None if problem.layout == AWQ else "needs weights in the AWQ layout"


def configs(problem: ExpertProduct, device: Device) -> list[SoleConfig]:
    return [SoleConfig()]


def estimate_us(config: SoleConfig, problem: ExpertProduct, device: Device) -> float:
    """Return the run time in microseconds: that of the products, and at least that of the reads."""
    products_us = problem.pairs * problem.n / 8 * problem.k * PRODUCT_US / device.sm_count
    return device.rates.launch_us + max(products_us, device.read_us(problem.touched_bytes + problem.activation_bytes))


def reduction(config: SoleConfig, problem: ExpertProduct) -> Reduction:
    """Return the order of the additions along K, the only one."""
    return Reduction("float32 sums of a group, multiplied by its scale", (0,))


def plan(config: SoleConfig, problem: ExpertProduct, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are qweight, scales, qzeros, bias, row_weights, y, sorted_pairs, experts, sorted_count and x.
    """
    dependent = device.has(Capability.DEPENDENT_LAUNCH)
    defines = (
        *problem.defines(),
        ("SCALE", TYPES[problem.scales_dtype]),
        ("ZEROS", ZEROS[problem.zeros]),
        ("DEPENDENT", int(dependent)),
        ("THREADS", THREADS),
    )
    blocks = count_blocks(problem.pairs, problem.experts, problem.block)
    ctas = min(ceil_div(blocks * problem.block * problem.n_out // 8, THREADS), CTAS_PER_SM * device.sm_count)
    buffers = "qweight", "scales", "qzeros", "bias", "row_weights", "y", "sorted_pairs", "experts", "sorted_count", "x"
    sizes = (
        problem.pairs,
        problem.routed_rows,
        problem.experts,
        problem.n,
        problem.k,
        problem.group_size,
        problem.x_divisor,
        problem.block,
        problem.ldx or problem.k,
        problem.ldy or problem.n_out,
    )
    kernel = Kernel("experts/expert_gemm_simt.cu", NAME, defines, device.target)
    arguments: tuple[Argument, ...] = (*buffers, *map(np.int32, sizes))
    return LaunchPlan(kernel, (ctas, 1, 1), (THREADS, 1, 1), arguments, dependent=dependent)


EXPERT_GEMM_SIMT = FunctionFamily(NAME, configs, estimate_us, plan, refusal, layout=AWQ, reduction=reduction)
