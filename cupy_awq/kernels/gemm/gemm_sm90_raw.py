# SPDX-License-Identifier: Apache-2.0
"""``gemm_sm90_raw``: GEMM on Hopper's tensor cores that reads the weight in the AWQ layout ("raw"), for M <= 16."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.dtypes import ITEMSIZE
from cupy_awq.kernels.family import FunctionFamily, Reduction, constants
from cupy_awq.kernels.gemm.gemm_mma import BLOCK_K, GEMM_SM80
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem, awq_layout_refusal
from cupy_awq.kernels.gemm.reduction import slice_begins
from cupy_awq.kernels.hopper import HOPPER, p_norm
from cupy_awq.kernels.tiling import ceil_div, split_counts
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan, TensorMap

NAME = "gemm_sm90_raw"
MAX_M = 16
"""The largest M that the family supports."""
STEP_K = 32
"""The number of rows of W per pipeline stage, which one warp computes in one step of the main loop."""
SPLIT_K = (1, 2, 3, 4, 6)
"""The split-K factors to try."""

Shape = tuple[int, int, int, int]
"""The fields (words, warps, stages, ctas_per_sm) of `GemmSm90RawConfig`."""


@dataclass(frozen=True)
class GemmSm90RawCosts:
    """Constants of the cost model for one `Shape` and one value of ``rows``, fitted on an H100.

    The model is fitted to 494 measured times of ten problems with M = 1, 8 and 16 and group size 128. The RMS error is
    3% for configurations that are at most 15% slower than the fastest one. The configuration that the model ranks first
    is 1.6% slower than the fastest one (geometric mean; at most 13%). Half of the times were measured with
    ``may_prefetch_weights``, which saves 0.68 us per launch. The model ignores ``may_prefetch_weights``, so that `gemm`
    and a `Plan` choose the same kernel and return bit-identical results.

    Attributes:
        step_cycles: cycles of one step (32 rows of W) of a warp.
        sm_step_cycles: cycles in which an SM with all its warps resident computes one step of 64 columns.
        launch_us: launch overhead, in microseconds.
    """

    step_cycles: float
    sm_step_cycles: float
    launch_us: float


COSTS: dict[int, dict[Shape, GemmSm90RawCosts]] = {
    1: {
        (1, 16, 2, 1): GemmSm90RawCosts(780.5, 79.1, 1.67),
        (2, 16, 2, 1): GemmSm90RawCosts(1039.5, 59.675, 2.00),
        (4, 8, 2, 1): GemmSm90RawCosts(1386, 31.5, 2.22),
    },
    8: {
        (1, 16, 2, 1): GemmSm90RawCosts(775.25, 84, 1.91),
        (2, 16, 2, 1): GemmSm90RawCosts(1053.5, 61.95, 2.63),
        (4, 8, 2, 1): GemmSm90RawCosts(1382.5, 34.475, 3.12),
    },
    16: {
        (1, 16, 2, 1): GemmSm90RawCosts(887.25, 94.5, 2.44),
        (2, 8, 3, 1): GemmSm90RawCosts(910, 55.3, 2.78),
        (2, 4, 3, 2): GemmSm90RawCosts(903, 50.75, 2.91),
    },
}
"""The constants of the cost model by ``rows``, then by `Shape`; the keys are also the configurations to try."""
REDUCTION_US, REDUCTION_SPLIT_US = 0.17, 0.06
"""The fixed time of the split-K reduction, and the additional time per CTA of the cluster, in microseconds (H100)."""
GROUP_FRACTION = 0.15
"""The fraction of a step's time that is spent on scaling accumulators, at group size 128 on an H100."""
INVARIANT_FACTOR = 1.15
"""The time of a step with ``invariant`` over that of the default, which does not subtract zero points (H100)."""
LARGE_CLUSTER, LARGE_CLUSTER_OCCUPANCY = 4, 0.9
"""The smallest number of CTAs per cluster for which some SMs stay empty, because a cluster must fit in a GPC, and the
fraction of SMs that such clusters occupy."""


@dataclass(frozen=True)
class GemmSm90RawConfig:
    """A configuration of ``gemm_sm90_raw.cu``.

    Attributes:
        rows: number of rows per CTA tile: 1, 8 or 16.
        words: number of adjacent 32-bit words (8 columns each) per lane; a CTA tile has 64 * words columns.
        warps: number of warps per CTA; each computes the CTA tile over its slice of K.
        stages: number of pipeline stages per warp, each of 32 rows of W.
        ctas_per_sm: largest number of resident CTAs per SM, enforced by the size of the dynamic shared memory. Without
            a limit, CTAs are distributed unevenly while the preceding kernel occupies some SMs: up to 40% slower.
        split_k: number of CTAs per cluster; each computes the CTA tile over its slice of K.
        invariant: whether the arithmetic is that of ``gemm_sm80`` with a slice of K for each warp of the cluster.
    """

    rows: int
    words: int
    warps: int
    stages: int
    ctas_per_sm: int
    split_k: int
    invariant: bool = False

    @property
    def block_n(self) -> int:
        """The number of columns per CTA tile."""
        return 64 * self.words

    @property
    def shared_bytes(self) -> int:
        """The shared memory that the kernel uses per CTA, in bytes; SharedStorage in CUDA static_asserts this value."""
        accumulators = self.rows * (self.block_n + 4) * 4
        stage = self.words * 1024 + max(128, 64 * self.rows)
        warp = max(self.stages * stage, ceil_div(accumulators, 128) * 128)
        partials = (self.split_k - 1) * (self.warps if self.invariant else 1)
        return self.warps * (warp + self.stages * 8) + partials * accumulators + 8

    def ctas(self, problem: Problem) -> int:
        """Return the number of CTAs of the launch: ``split_k`` per tile of 64 * words columns."""
        return ceil_div(problem.n, self.block_n) * self.split_k

    def capacity(self, device: Device) -> int:
        """Return the largest number of CTAs that the GPU can hold at the same time."""
        occupancy = LARGE_CLUSTER_OCCUPANCY if self.split_k >= LARGE_CLUSTER else 1.0
        return int(device.sm_count * self.ctas_per_sm * occupancy)


def refusal(problem: Problem, device: Device) -> str | None:
    reason = awq_layout_refusal(problem) or device.refusal(HOPPER)
    if reason is not None:
        return reason
    if FRAGMENTS in problem.layouts:
        return "is used only if the weight has no repacked copy"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"takes x of float16 or bfloat16, not {problem.dtype}"
    if problem.m > MAX_M:
        return f"needs M <= {MAX_M}, not {problem.m}"
    if problem.group_size % STEP_K:
        return f"needs a group size that is a multiple of {STEP_K}, not {problem.group_size}"
    if not problem.x_aligned:
        return "needs rows of x that start at multiples of 16 bytes"
    words = problem.row_strides.qweight
    if not problem.wide or words % 4 or words < problem.n // 8:
        return "needs rows of the weight and of y that start at multiples of 16 bytes and do not overlap"
    return None


def configs(problem: Problem, device: Device) -> list[GemmSm90RawConfig]:
    rows = next(rows for rows in COSTS if problem.m <= rows)
    splits, invariant = SPLIT_K, problem.batch_invariant
    found = [GemmSm90RawConfig(rows, *shape, split_k, invariant) for shape in COSTS[rows] for split_k in splits]
    return [config for config in found if _is_legal(config, problem, device)]


def _is_legal(config: GemmSm90RawConfig, problem: Problem, device: Device) -> bool:
    """Return whether a configuration is legal: with split-K, all CTAs must also run in one wave."""
    if config.split_k > 1 and config.ctas(problem) > config.capacity(device):
        return False
    if config.split_k > max(1, problem.k // STEP_K // config.warps):
        return False
    if config.invariant and config.split_k * config.warps not in split_counts(ceil_div(problem.k, BLOCK_K)):
        return False
    columns = 8 * config.words * (2 if problem.gated else 1)
    available = min(device.shared_bytes_per_block, device.shared_bytes_per_sm // config.ctas_per_sm - 1024)
    return problem.n % columns == 0 and config.shared_bytes <= available


def reduction(config: GemmSm90RawConfig, problem: Problem) -> Reduction | None:
    """Return the order in which an ``invariant`` configuration adds up an element of y: as in ``gemm_sm80``."""
    if not config.invariant:
        return None
    return Reduction(GEMM_SM80.NAME, slice_begins(ceil_div(problem.k, BLOCK_K), config.split_k * config.warps))


def plan(config: GemmSm90RawConfig, problem: Problem, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are scales, qzeros, bias, residual, y, qweight and x."""
    defines = (
        *problem.defines(),
        *constants(config, "rows words warps stages ctas_per_sm split_k invariant shared_bytes"),
        ("MAY_PREFETCH_WEIGHTS", int(problem.may_prefetch_weights)),
    )
    strides = problem.row_strides
    lane_rows = 4 if config.invariant else 8
    words = TensorMap(
        "qweight",
        "uint32",
        dims=(problem.n // 8, problem.k // lane_rows, lane_rows),
        strides=(4 * lane_rows * strides.qweight, 4 * strides.qweight),
        box=(8 * config.words // (2 if problem.gated else 1), STEP_K // lane_rows, lane_rows),
        promotion=128,
    )
    itemsize = ITEMSIZE[problem.dtype]
    x = TensorMap(
        "x",
        problem.dtype,
        dims=(STEP_K, problem.m, problem.k // STEP_K),
        strides=(strides.x * itemsize, STEP_K * itemsize),
        box=(STEP_K, problem.m, 1),
    )
    sizes = (problem.m, problem.n, problem.k, problem.group_size)
    row_strides = (strides.scales, strides.qzeros, strides.residual, strides.y)
    scalars = (*map(np.int32, (*sizes, *row_strides)), *map(np.float32, problem.limits))
    return LaunchPlan(
        Kernel("gemm/gemm_sm90_raw.cu", NAME, defines, device.target),
        (config.ctas(problem), 1, 1),
        (config.warps * 32, 1, 1),
        ("scales", "qzeros", "bias", "residual", "y", words, x, *scalars),
        max(config.shared_bytes, device.shared_bytes_per_sm // (config.ctas_per_sm + 1)),
        cluster=(config.split_k, 1, 1),
        dependent=True,
    )


def estimate_us(config: GemmSm90RawConfig, problem: Problem, device: Device) -> float:
    """Return the run time in microseconds: launch overhead, split-K reduction, and the longest of three times.

    The three are the latency of all steps of a warp, the compute time of an SM and the time to read the weight; a
    smooth maximum combines them. The compute time is the average over all SMs, because the next kernel uses idle SMs.
    """
    costs = COSTS[config.rows][config.words, config.warps, config.stages, config.ctas_per_sm]
    ctas = config.ctas(problem)
    waves = ceil_div(ctas, config.capacity(device))
    steps = ceil_div(problem.k, STEP_K)
    factor = (1 - GROUP_FRACTION + GROUP_FRACTION * 128 / problem.group_size) / device.rates.clock_mhz
    factor *= INVARIANT_FACTOR if config.invariant else 1.0
    chain = waves * ceil_div(steps, config.split_k * config.warps) * costs.step_cycles * factor
    work = ctas * steps / config.split_k * config.words * costs.sm_step_cycles * factor / device.sm_count
    stream = device.read_us(problem.weight_bytes)
    reduction = REDUCTION_SPLIT_US * config.split_k + (REDUCTION_US if config.split_k > 1 else 0.0)
    return float(costs.launch_us + reduction + p_norm((chain, work, stream), 3))


GEMM_SM90_RAW = FunctionFamily(NAME, configs, estimate_us, plan, refusal, needs=HOPPER, layout=AWQ, reduction=reduction)
