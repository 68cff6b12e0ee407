# SPDX-License-Identifier: Apache-2.0
"""``gemm_simt``: the fallback for any problem, in float32 on CUDA cores; also the reference for the other kernels."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_awq.kernels.family import FunctionFamily, Reduction, Workspace
from cupy_awq.kernels.gemm.problem import AWQ, Problem, awq_layout_refusal, plan_awq_layout
from cupy_awq.kernels.gemm.reduction import slice_begins
from cupy_awq.kernels.tiling import ceil_div, split_counts
from cupy_awq.kernels.waves import reduction_us
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan

NAME = "gemm_simt"
BLOCK_M, BLOCK_N, BLOCK_K, THREADS = 64, 64, 16, 256
"""The extents of a CTA tile along m, n and k, and the number of threads per CTA."""


FMA_FRACTION = 0.27
"""The fraction of the peak rate of multiply-adds that the kernel reaches; fitted to times on an H200."""


@dataclass(frozen=True)
class GemmSimtConfig:
    """A configuration of ``gemm_simt``.

    Attributes:
        split_k: number of CTAs per tile; each computes a slice of K.
        slices: number of slices of K that a CTA computes one after the other; 1 with split-K.
    """

    split_k: int
    slices: int = 1


def refusal(problem: Problem, device: Device) -> str | None:
    return awq_layout_refusal(problem)


def configs(problem: Problem, device: Device) -> list[GemmSimtConfig]:
    found = [GemmSimtConfig(split_k) for split_k in split_counts(ceil_div(problem.k, BLOCK_K))]
    if problem.batch_invariant:
        found += [GemmSimtConfig(1, config.split_k) for config in found if config.split_k > 1]
    return found


def reduction(config: GemmSimtConfig, problem: Problem) -> Reduction:
    """Return the order in which a configuration adds up an element of y."""
    return Reduction("fma", slices=slice_begins(ceil_div(problem.k, BLOCK_K), config.split_k * config.slices))


def estimate_us(config: GemmSimtConfig, problem: Problem, device: Device) -> float:
    """Return the run time in microseconds: launch overhead, k tiles of the SM with the most CTAs, split-K reduction."""
    rates, ctas = device.rates, _tiles(problem) * config.split_k
    k_tiles = ceil_div(ceil_div(problem.k, BLOCK_K), config.split_k)
    cycles = BLOCK_M * BLOCK_N * BLOCK_K / (FMA_FRACTION * rates.fma)
    sm_us = ceil_div(ctas, device.sm_count) * k_tiles * cycles / rates.clock_mhz
    reduction = reduction_us(config.split_k, 4.0 * ctas * BLOCK_M * BLOCK_N, device)
    return rates.launch_us + rates.latency_us + sm_us + reduction


def plan(config: GemmSimtConfig, problem: Problem, device: Device) -> LaunchPlan:
    grid = (ceil_div(problem.m, BLOCK_M), ceil_div(problem.n, BLOCK_N), config.split_k)
    defines = (("SLICES", config.slices),)
    return plan_awq_layout("gemm/gemm_simt.cu", NAME, defines, problem, device, grid, THREADS)


def workspace(config: GemmSimtConfig, problem: Problem) -> Workspace:
    return Workspace.for_split_k(config.split_k, _tiles(problem), BLOCK_M * BLOCK_N)


def _tiles(problem: Problem) -> int:
    return ceil_div(problem.m, BLOCK_M) * ceil_div(problem.n, BLOCK_N)


GEMM_SIMT = FunctionFamily(
    NAME, configs, estimate_us, plan, refusal, layout=AWQ, workspace=workspace, reduction=reduction
)
