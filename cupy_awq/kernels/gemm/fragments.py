# SPDX-License-Identifier: Apache-2.0
"""Host code shared by the GEMM kernels that read the fragment layout: refusal, constants, tensor map of x."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cupy_awq.kernels.dtypes import ITEMSIZE
from cupy_awq.kernels.gemm.layouts import WEIGHT_TILE_N, FragmentLayout
from cupy_awq.kernels.gemm.problem import FRAGMENTS, Problem
from cupy_awq.kernels.hopper import p_norm
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import TensorMap

POWER_LIMITED_FRACTION = 0.927
"""The fraction of the peak throughput at which an H100 or H200 reaches the power limit of 700 W."""
ROUNDED_MIN_M = 33
"""The smallest M for which weights may be rounded after scaling; with fewer rows, y has the bits of exact weights."""
MAX_FUSED_ROWS = 32
"""The largest M of a GEMM with a `Fusion`; at M = 32 fusion saves only 1% of a decoder layer's time on an H100."""


def fragment_refusal(
    problem: Problem,
    device: Device,
    needs: Iterable[Capability],
    layouts: Collection[str] = (FRAGMENTS,),
    *,
    adds_offsets: bool = False,
) -> str | None:
    """Return the reason why kernels that read the fragment layout cannot solve the problem, or None.

    ``needs`` are the capabilities that the kernels need for any dtype of x, ``layouts`` the names of the layouts, of
    which they read one; ``adds_offsets`` says whether they serve weights with offsets.
    """
    reason = device.refusal(needs, problem.dtype)
    if reason is not None:
        return reason
    if not any(name in problem.layouts for name in layouts):
        return "takes a 4-bit weight" if problem.bits == 8 else "needs the repacked weight of an AwqLinear"
    if problem.zeros == "float" and not adds_offsets:
        return "needs zero points as 4-bit codes or none, not float offsets"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"takes x of float16 or bfloat16, not {problem.dtype}"
    if not problem.x_aligned:
        return "needs rows of x that start at multiples of 16 bytes"
    if problem.gated and problem.n % (2 * WEIGHT_TILE_N):
        return f"needs N to be a multiple of {2 * WEIGHT_TILE_N} when gated, not {problem.n}"
    return FragmentLayout.of(problem).refusal()


def fusion_refusal(problem: Problem) -> str | None:
    """Return the reason why kernels that fuse the residual stream cannot do so for the problem, or None."""
    if problem.fusion and problem.batch_invariant:
        return "cannot fuse the residual add or RMSNorm of a decoder if batch-invariant"
    if problem.fusion and problem.m > MAX_FUSED_ROWS:
        return f"fuses the residual stream only for M <= {MAX_FUSED_ROWS}, not {problem.m}"
    if problem.adds_to_stream and (problem.gated or problem.residual or not problem.aligned):
        return "cannot add a gated, unaligned or residual result to the residual stream"
    return None


def x_tensor_map(problem: Problem, block_m: int, boxes: int) -> TensorMap:
    """Return the tensor map of x, viewed as [k / 64][m][64], with TMA boxes of shape [boxes][block_m][64]."""
    m, itemsize = problem.m, ITEMSIZE[problem.dtype]
    return TensorMap(
        "x",
        problem.dtype,
        dims=(64, m, problem.k // 64),
        strides=(problem.row_strides.x * itemsize, 64 * itemsize),
        box=(64, block_m, boxes),
        swizzle=128,
    )


def fragment_defines(problem: Problem) -> tuple[tuple[str, int | str], ...]:
    """Return the compile-time constants (name, value) of a problem for the kernels that read the fragment layout."""
    return (
        *(item for item in problem.defines() if item[0] not in ("SCALE", "ZEROS")),
        *FragmentLayout.of(problem).defines(),
        ("ALIGNED", int(problem.aligned)),
    )


def power_limited_us(work_us: float, problem: Problem, device: Device) -> float:
    """Return the run time in microseconds, under the power limit, of work that takes ``work_us`` at full clock.

    The result is a smooth maximum of ``work_us`` and the time at POWER_LIMITED_FRACTION of the peak: the clock rises
    while some SMs are idle, so the limit is gradual.
    """
    products_per_us = POWER_LIMITED_FRACTION * device.rates.tensor * device.rates.clock_mhz * device.sm_count
    power_us = problem.m * problem.n * problem.k / products_per_us
    return p_norm((work_us, power_us), 3)


def has_split_scales(problem: Problem) -> bool:
    """Return whether each float16 scale is split into two bfloat16 values, at two more instructions per weight pair."""
    return (problem.dtype, problem.scales_dtype) == ("bfloat16", "float16")
