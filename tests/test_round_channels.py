# SPDX-License-Identifier: Apache-2.0
"""The kernel that rounds a block of input channels, against NumPy's rounding bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_awq.kernels import round_channels as kernel
from cupy_awq.quantization.error_compensation import round_channels
from cupy_awq.quantization.grid import Grid
from tests.backends import BACKENDS, runner
from tests.test_kernels import ARCHS, facts


def check_block(backend: str, arch: int, channels: int, n: int, seed: int, *, has_old: bool) -> None:
    """Round random channels by the kernel and by NumPy, and require equal bits of all codes and changes."""
    rng = np.random.default_rng(seed)
    target = rng.uniform(-3, 18, (channels, n)).astype(np.float32)
    target[rng.random(target.shape) < 0.1] += np.float32(0.5)
    target[rng.random(target.shape) < 0.1] = 2.5
    if has_old:  # changes are finite, also those of infinite targets
        target[rng.random(target.shape) < 0.1] = rng.choice([np.inf, -np.inf])
    old = rng.integers(0, 16, target.shape).astype(np.float32) if has_old else None
    factors = (rng.standard_normal((channels, channels)) * channels**-0.5).astype(np.float32)
    bottom = rng.integers(0, 3, n).astype(np.float32)
    top = rng.integers(12, 16, n).astype(np.float32)
    buffers = {"target": target, "old": old, "factors": factors, "bottom": bottom, "top": top}
    results = {name: np.full_like(target, np.nan) for name in ("codes", "changes")}
    for a in filter(lambda a: a is not None, buffers.values()):
        a.flags.writeable = False
    runner(backend)(kernel.plan(facts(arch, backend), channels, n), buffers | results)
    again = target.copy()
    expected = round_channels(again, again if old is None else old, factors.T, Grid(bottom, bottom, bottom, top))
    for found, wanted in zip(results.values(), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize(("channels", "n"), [(64, 200), (32, 64), (12, 1), (1, 65)])
def test_the_kernel_rounds_like_numpy(backend: str, arch: int, channels: int, n: int, has_old: bool) -> None:
    check_block(backend, arch, channels, n, channels, has_old=has_old)


@settings(max_examples=20)
@given(st.sampled_from(ARCHS), st.integers(1, 64), st.integers(1, 150), st.integers(0, 2**32 - 1), st.booleans())
def test_any_block_on_the_simulator(arch: int, channels: int, n: int, seed: int, has_old: bool) -> None:
    check_block("latest", arch, channels, n, seed, has_old=has_old)
