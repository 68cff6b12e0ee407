# SPDX-License-Identifier: Apache-2.0
"""Tests of the quantizer's kernels against their NumPy implementations, bit by bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_awq.kernels.quantization.refine_group import GroupRefinement
from cupy_awq.kernels.quantization.round_channels import ChannelRounding
from cupy_awq.kernels.select import planner
from cupy_awq.quantization.error_compensation import round_channels
from cupy_awq.quantization.grid import LIMITS, Grid
from cupy_awq.quantization.refinement import refine_group
from tests import simt
from tests.backends import BACKENDS, runner
from tests.simt.kernels import patched
from tests.test_kernels import ARCHS, facts

SCALE_DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def freeze(*inputs: np.ndarray | None) -> None:
    """Make arrays read-only, so that a kernel that writes to them fails."""
    for a in inputs:
        if a is not None:
            a.flags.writeable = False


def check_block(backend: str, arch: int, channels: int, n: int, seed: int, *, has_old: bool) -> None:
    """Round random channels by the kernel and by NumPy, and require equal codes and changes."""
    rng = np.random.default_rng(seed)
    target = rng.uniform(-3, 18, (channels, n)).astype(np.float32)
    target[rng.random(target.shape) < 0.1] = 2.5
    if has_old:  # with `old`, changes stay finite even where a target is infinite
        target[rng.random(target.shape) < 0.1] = rng.choice([np.inf, -np.inf])
    old = rng.integers(0, 16, target.shape).astype(np.float32) if has_old else None
    factors = (rng.standard_normal((channels, channels)) * channels**-0.5).astype(np.float32)
    bottom = rng.integers(0, 3, n).astype(np.float32)
    top = rng.integers(12, 16, n).astype(np.float32)
    freeze(target, old, factors, bottom, top)
    buffers = {"target": target, "old": old, "factors": factors, "bottom": bottom, "top": top}
    results = {name: np.full_like(target, np.nan) for name in ("codes", "changes")}
    runner(backend)(planner(ChannelRounding)(facts(arch, backend), channels, n), buffers | results)
    again = target.copy()
    expected = round_channels(again, again if old is None else old, factors.T, Grid(bottom, bottom, bottom, top))
    for found, wanted in zip(results.values(), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize(("channels", "n"), [(64, 200), (32, 64), (12, 1), (1, 65)])
def test_channels_are_rounded_like_by_numpy(backend: str, arch: int, channels: int, n: int, has_old: bool) -> None:
    check_block(backend, arch, channels, n, channels, has_old=has_old)


@settings(max_examples=8)
@given(st.sampled_from(ARCHS), st.integers(1, 64), st.integers(1, 150), st.integers(0, 2**32 - 1), st.booleans())
def test_any_block_of_channels_on_the_simulator(arch: int, channels: int, n: int, seed: int, has_old: bool) -> None:
    check_block("latest", arch, channels, n, seed, has_old=has_old)


def check_group(
    backend: str, arch: int, group_size: int, n: int, dtype: np.dtype, seed: int, *, symmetric: bool
) -> int:
    """Refine a random group by the kernel and by NumPy, require equal results, and return the number of new scales."""
    rng = np.random.default_rng(seed)
    groups, at = 3, 1
    codes = rng.integers(0, 16, (group_size, n)).astype(np.float32)
    mix = rng.standard_normal((group_size, group_size)) / group_size + np.eye(group_size)
    block = (mix @ mix.T).astype(np.float32)
    scale = np.exp(rng.normal(-3, 2, (n, groups))).astype(np.float32)
    scale[rng.random(scale.shape) < 0.1] = LIMITS[dtype][0]
    scale = scale.astype(dtype)
    zero = np.full((n, groups), 8.0) if symmetric else rng.integers(0, 16, (n, groups)).astype(np.float64)
    errors = rng.uniform(-0.7, 0.7, codes.shape) * scale[:, at].astype(np.float64)
    errors[:, rng.random(n) < 0.1] = 0
    gradient = (block @ errors).astype(np.float32)
    gradient[:, rng.random(n) < 0.1] *= np.float32(1e30)
    curved, total = block @ codes, np.array(block.sum(dtype=np.float64))
    wanted = scale.copy(), zero.copy()
    freeze(codes, curved, gradient, total)
    step = refine_group(codes, curved, gradient, total, wanted[0][:, at], wanted[1][:, at], symmetric=symmetric)
    found = np.full_like(codes, np.nan)
    plan = planner(GroupRefinement)(
        facts(arch, backend), group_size, n, groups, str(dtype), LIMITS[dtype], symmetric=symmetric
    )
    before = scale.copy()
    buffers = {"codes": codes, "curved": curved, "gradient": gradient, "total": total, "step": found}
    runner(backend)(plan, {**buffers, "scale": scale[:, at:], "zero": zero[:, at:]})
    np.testing.assert_array_equal(scale.view(np.uint16), wanted[0].view(np.uint16))
    np.testing.assert_array_equal(zero, wanted[1])
    np.testing.assert_array_equal(found, step)
    return int((before[:, at] != scale[:, at]).sum())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", SCALE_DTYPES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_groups_are_refined_like_by_numpy(backend: str, arch: int, dtype: np.dtype, symmetric: bool) -> None:
    assert check_group(backend, arch, 32, 200, dtype, 1, symmetric=symmetric) > 50


@settings(max_examples=8)
@given(st.sampled_from(ARCHS), st.integers(1, 40), st.integers(2, 150), st.integers(0, 2**32 - 1), st.booleans())
def test_any_group_on_the_simulator(arch: int, group_size: int, n: int, seed: int, symmetric: bool) -> None:
    check_group("latest", arch, group_size, n, SCALE_DTYPES[seed % 2], seed, symmetric=symmetric)


BUGS = {
    "factors are read before other threads have stored them": ("round_channels", "  __syncthreads();\n", "", "race"),
    "the last CTA rounds columns past n": ("round_channels", "if (column >= n) return;", "", "out of bounds"),
    "factors past the last channel are loaded": (
        "round_channels",
        "k < kChannels ? factors[j * kChannels + k] : 0.0f",
        "factors[j * kChannels + k]",
        "out of bounds",
    ),
    "old codes past the last channel are loaded": ("round_channels", " && j + 1 < kChannels)", ")", "out of bounds"),
    "a product is not rounded before the subtraction": (
        "round_channels",
        "__fsub_rn(targets[4 * v + i + 1], __fmul_rn(factor.values[i], change))",
        "fmaf(-factor.values[i], change, targets[4 * v + i + 1])",
        "values",
    ),
    "the last CTA refines columns past n": ("refine_group", "if (column >= n) return;", "", "out of bounds"),
    "the old zero point is left out": ("refine_group", "(c + z) * q1", "c * q1", "values"),
    "an invalid scale is taken": ("refine_group", "if (!is_valid) continue;", "", "values"),
}
"""Planted bugs: (kernel, source text, its replacement, the check that catches the bug)."""


def check_kernel(kernel: str) -> None:
    """Check one of the quantizer's two kernels on the simulator: rounding of channels, or refinement of groups."""
    if kernel == "round_channels":
        for has_old in (True, False):
            check_block("latest", 80, 30, 90, 0, has_old=has_old)
    else:
        for dtype in SCALE_DTYPES:
            check_group("latest", 80, 32, 200, dtype, 1, symmetric=False)


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str) -> None:
    kernel, old, new, caught = BUGS[name]
    check_kernel(kernel)
    with patched(f"quantization/{kernel}.cu", old, new), pytest.raises((simt.Fault, AssertionError)) as found:
        check_kernel(kernel)
    assert getattr(found.value, "kind", "values") == caught
