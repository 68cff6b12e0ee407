# SPDX-License-Identifier: Apache-2.0
"""Tests of convolutions on the GPU by the public functions, against those on the CPU."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_awq import BlockQuantizedWeight, conv2d, conv2d_int8
from tests.block_weights import random_weight
from tests.test_kernels import DTYPES

F32 = np.float32


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("shape", [(3, 16, 7, 1), (64, 72, 3, 1), (32, 32, 3, 32), (48, 40, 1, 2), (64, 72, 1, 1)])
@pytest.mark.parametrize("side", [13, 50])
def test_conv2d_on_a_gpu(dtype: str, layout: str, shape: tuple[int, ...], side: int) -> None:
    """The GPU agrees with the CPU, for images that tensor cores read in place, after a copy, or not at all."""
    import cupy

    ci, co, kernel, groups = shape
    rng = np.random.default_rng(ci)
    weight = random_weight(rng, (co, kernel, kernel, ci // groups), 16, dtype=DTYPES[dtype])
    there = BlockQuantizedWeight(*map(cupy.asarray, (weight.codes, weight.scale, weight.offset)), block_size=16)
    x = rng.standard_normal((2, ci, side, side - 2) if layout == "NCHW" else (2, side, side - 2, ci))
    x = x.astype(DTYPES[dtype])
    bias = rng.standard_normal(co).astype(F32)
    options = {"stride": 2, "padding": "same", "groups": groups, "activation": "relu6", "layout": layout}
    wanted = conv2d(x, weight, bias=bias, **options).astype(np.float64)
    out = cupy.asarray(np.full(wanted.shape, np.nan, DTYPES[dtype]))
    assert conv2d(cupy.asarray(x), there, bias=cupy.asarray(bias), out=out, **options) is out
    eps = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    np.testing.assert_allclose(out.get().astype(np.float64), wanted, rtol=2 * eps, atol=2 * eps + 5e-6)


@pytest.mark.gpu
def test_a_layout_that_a_capture_left_unmade_is_made_later() -> None:
    import cupy

    rng = np.random.default_rng(0)
    weight = random_weight(rng, (64, 3, 3, 64), 32, dtype=np.float16)
    there = BlockQuantizedWeight(*map(cupy.asarray, (weight.codes, weight.scale, weight.offset)), block_size=32)
    x = rng.standard_normal((1, 40, 40, 64)).astype(np.float16)
    far, out = cupy.asarray(x), cupy.empty((1, 40, 40, 64), np.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError):
            conv2d(far, there, padding=1, layout="NHWC", out=out)
        with suppress(RuntimeError):
            stream.end_capture()
    assert not there.layouts
    wanted = conv2d(x, weight, padding=1, layout="NHWC").astype(np.float64)
    got = conv2d(far, there, padding=1, layout="NHWC", out=out).get().astype(np.float64)
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_conv2d_int8_on_a_gpu_gives_the_bits_of_the_cpu(layout: str) -> None:
    import cupy

    rng = np.random.default_rng(0)
    x = rng.integers(-128, 128, (2, 8, 8, 8), np.int8)
    codes = rng.integers(-128, 128, (6, 3, 3, 8), np.int8)
    scale, bias = rng.uniform(0.001, 0.01, 6).astype(F32), rng.standard_normal(6).astype(F32)
    options: dict[str, Any] = {"x_scale": 0.02, "out_scale": 0.3, "x_zero": 3, "out_zero": -4, "padding": 1}
    wanted = conv2d_int8(x, codes, scale, bias=bias, layout=layout, **options)
    far = [cupy.asarray(a) for a in (x, codes, scale)]
    y = conv2d_int8(*far, bias=cupy.asarray(bias), layout=layout, **options)
    np.testing.assert_array_equal(y.get(), wanted)
