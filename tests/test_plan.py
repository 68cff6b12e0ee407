# SPDX-License-Identifier: Apache-2.0
"""Tests of plans; with a GPU also in captured graphs and on several streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_awq
from cupy_awq.ops import gemm as gemm_op
from cupy_awq.runtime import workspace as workspaces
from cupy_awq.runtime.workspace import WORKSPACE_BYTES
from cupy_awq.tools.testing import random_activations, random_weight
from tests.products import BFLOAT16, FLOAT16, check_product, gemm, nan_like, put
from tests.test_reference import ACTIVATIONS


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_plan_computes_what_gemm_does(activation: Any) -> None:
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 64, 32, 16)
    x, n = random_activations(rng, 2, 3, 64), 16 if activation == "swiglu" else 32
    options = {"bias": rng.standard_normal(32).astype(np.float32), "activation": activation}
    residual, out = rng.standard_normal((2, 3, n)).astype(np.float16), np.full((2, 3, n), np.nan, np.float16)
    for template in (x, x.shape):
        plan = cupy_awq.plan(template, weight, residual=residual.shape, **options)
        assert (plan.kernel, plan.shape, plan.workspace_bytes) == ("numpy", out.shape, 0)
        assert plan(x, out, residual=residual) is out
        np.testing.assert_array_equal(out, gemm(x, weight, residual=residual, **options))


def test_a_plan_reads_uint16_as_it_was_told() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    x = random_activations(np.random.default_rng(1), 2, 64, dtype=BFLOAT16)
    plan = cupy_awq.plan(x.view(np.uint16), weight, dtype="bfloat16")
    y = plan(x.view(np.uint16), np.zeros((2, 32), np.uint16))
    np.testing.assert_array_equal(y.view(BFLOAT16), gemm(x, weight))
    assert cupy_awq.plan((2, 64), weight, dtype="bfloat16")(x, np.zeros((2, 32), BFLOAT16)).dtype == BFLOAT16


def test_calls_that_differ_from_the_plan_are_refused() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    plan = cupy_awq.plan((2, 64), weight)
    x, y = np.zeros((2, 64), np.float16), np.zeros((2, 32), np.float16)
    with pytest.raises(ValueError, match=r"^x: expected float16 \[2, 64\], as planned, got float16 \[3, 64\]$"):
        plan(np.zeros((3, 64), np.float16), y)
    with pytest.raises(ValueError, match=r"^x: expected float16 \[2, 64\], as planned, got float32 \[2, 64\]$"):
        plan(x.astype(np.float32), y)
    with pytest.raises(ValueError, match=r"^out: expected float16 \[2, 32\], as planned, got float16 \[1, 32\]$"):
        plan(x, y[:1])
    with pytest.raises(TypeError, match=r"^out: expected a NumPy or CuPy array, got list$"):
        plan(x, [0.0])
    with pytest.raises(ValueError, match=r"^residual: expected None, as planned, got an array$"):
        plan(x, y, residual=y)
    with pytest.raises(ValueError, match=r"^residual: expected an array, as planned, got None$"):
        cupy_awq.plan((2, 64), weight, residual=y)(x, y)


def test_bad_arguments_of_a_plan_are_named() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    with pytest.raises(TypeError, match=r"^weight: expected a PackedWeight, got ndarray$"):
        cupy_awq.plan((2, 64), weight.qweight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^x: expected \w+ \[\.\.\., K\] with K = 64, got \w+ \[.*63\]$"):
        cupy_awq.plan((2, 63), weight)
    with pytest.raises(TypeError, match=r"^dtype: expected float16, bfloat16 or float32, got 'int8'$"):
        cupy_awq.plan((2, 64), weight, dtype="int8")
    with pytest.raises(TypeError, match=r"^x: expected a NumPy or CuPy array, got list$"):
        cupy_awq.plan([2, 64], weight)
    with pytest.raises(ValueError, match=r"^out: expected \w+ \[2, 32\], got \w+ \[2, 16\]$"):
        cupy_awq.plan((2, 64), weight, out=(2, 16))
    with pytest.raises(ValueError, match=r"^residual: expected \w+ \[2, 32\], got \w+ \[32\]$"):
        cupy_awq.plan((2, 64), weight, residual=(32,))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 64])
@pytest.mark.parametrize("split_k", [1, 4])
def test_a_captured_plan_replays_on_new_values(m: int, split_k: int) -> None:
    import cupy

    rng = np.random.default_rng(0)
    weight = random_weight(rng, 512, 128, 64)
    x, out = put(np.zeros((m, 512), np.float16)), nan_like((m, 128), FLOAT16)
    plan = cupy_awq.plan(x, put(weight), activation="silu", out=out, split_k=split_k)
    assert (plan.workspace_bytes > 0) == (split_k > 1)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan(x, out)
        graph = stream.end_capture()
        for seed in range(3):
            values = random_activations(np.random.default_rng(seed), m, 512)
            x.set(values)
            out.fill(np.nan)
            graph.launch()
            check_product(out, values, weight, activation="silu")


def constant(plan: cupy_awq.Plan) -> int | None:
    """Return the constant MAY_PREFETCH_WEIGHTS of a plan's kernel, or None if the kernel has none.

    1 allows the kernel to read the weight before the preceding kernel finishes.
    """
    return dict(plan._prepared._launcher.plan.kernel.defines).get("MAY_PREFETCH_WEIGHTS")


def test_a_plan_describes_itself() -> None:
    weight = random_weight(np.random.default_rng(0), 32, 16, 16)
    plan = cupy_awq.plan((4, 2, 32), weight)
    assert repr(plan) == "Plan(float16 [4, 2, 32] -> [4, 2, 16], kernel='numpy', workspace_bytes=0)"


@pytest.mark.gpu
@pytest.mark.sm90
def test_only_plans_prefetch_the_weight_before_the_preceding_kernel_finishes() -> None:
    rng = np.random.default_rng(0)
    weight, x = put(random_weight(rng, 4096, 1024, 128)), put(random_activations(rng, 1, 4096))
    plan = cupy_awq.plan(x, weight)
    assert (plan.kernel, constant(plan)) == ("gemm_sm90_raw", 1)
    gemm_op._prepared.clear()
    gemm(x, weight)
    (prepared,) = gemm_op._prepared.values()
    assert dict(prepared._launcher.plan.kernel.defines)["MAY_PREFETCH_WEIGHTS"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 64])
def test_a_plan_waits_for_the_kernels_that_write_its_weight(m: int) -> None:
    """Creating a plan waits for the kernels that write its weight.

    Its launches may read the weight before preceding kernels finish (PDL), so they could read it unwritten.
    """
    import cupy

    rng = np.random.default_rng(0)
    weight = random_weight(rng, 512, 128, 64)
    values = random_activations(rng, m, 512)
    late, x, out = put(weight), put(values), nan_like((m, 128), FLOAT16)
    codes, long = late.qweight.copy(), cupy.ones(2**27, np.float32)
    late.qweight.fill(0)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(8):
            cupy.sin(long, out=long)
        late.qweight[...] = codes
        assert not stream.done
        plan = cupy_awq.plan(x, late)
        assert stream.done
        assert constant(plan) in (None, 1)
        check_product(plan(x, out), values, weight)


@pytest.mark.gpu
def test_a_plan_that_is_made_during_a_capture() -> None:
    import cupy

    rng = np.random.default_rng(0)
    weight = random_weight(rng, 512, 128, 64)
    on_gpu, values = put(weight), random_activations(rng, 1, 512)
    x, out = put(values), nan_like((1, 128), FLOAT16)
    cupy_awq.plan(x, on_gpu)(x, out)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan = cupy_awq.plan(x, on_gpu)
        assert constant(plan) in (None, 0)
        plan(x, out)
        graph = stream.end_capture()
        out.fill(np.nan)
        graph.launch()
        check_product(out, values, weight)


@pytest.mark.gpu
def test_functions_whose_first_call_is_captured() -> None:
    """A function whose first call is captured allocates and zeroes its workspace outside of the graph.

    Otherwise the graph would zero it at each replay, or use memory that others get.
    """
    import cupy

    rng = np.random.default_rng(0)
    weight = random_weight(rng, 512, 128, 64)
    on_gpu = put(weight)
    values = random_activations(rng, 1, 512)
    x, out, eager = put(values), nan_like((1, 128), FLOAT16), nan_like((1, 128), FLOAT16)
    stream = cupy.cuda.Stream(non_blocking=True)  # a new stream, which has no workspace yet
    cupy.cuda.Device().synchronize()
    with stream:
        dirty = cupy.full(workspaces.COUNTER_BYTES + WORKSPACE_BYTES, 255, cupy.uint8)
        del dirty  # the stream's next allocation may get this memory, which is not zero
        stream.begin_capture()
        gemm(x, on_gpu, out=out, split_k=4)
        graph = stream.end_capture()
        gemm(x, on_gpu, out=eager, split_k=4)
        graph.launch()
        check_product(eager, values, weight)
        check_product(out, values, weight)


@pytest.mark.gpu
def test_a_plan_on_several_streams_with_workspaces_of_their_own() -> None:
    import cupy

    rng = np.random.default_rng(0)
    weight = random_weight(rng, 4096, 256, 128)
    plan = cupy_awq.plan((4, 4096), put(weight), split_k=8)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    values = [random_activations(rng, 4, 4096) for _ in streams]
    expected = [gemm(put(x), put(weight), split_k=8).get().tobytes() for x in values]
    arrays = [(put(x), nan_like((4, 256), FLOAT16)) for x in values]
    workspaces = [cupy.zeros(plan.workspace_bytes, cupy.uint8) for _ in streams]
    cupy.cuda.Device().synchronize()
    for _ in range(50):
        for stream, (x, out), workspace in zip(streams, arrays, workspaces, strict=True):
            with stream:
                plan(x, out, workspace=workspace)
    cupy.cuda.Device().synchronize()
    assert [out.get().tobytes() for _, out in arrays] == expected


@pytest.mark.gpu
def test_bad_workspaces_and_layouts_of_a_plan_are_named() -> None:
    import cupy

    weight = put(random_weight(np.random.default_rng(0), 512, 64, 64))
    plan = cupy_awq.plan((2, 512), weight, split_k=4)
    x, out = (put(np.zeros((2, columns), np.float16)) for columns in (512, 64))
    short = cupy.zeros(plan.workspace_bytes - 1, cupy.uint8)
    with pytest.raises(ValueError, match=rf"^workspace: expected at least {plan.workspace_bytes} bytes, got "):
        plan(x, out, workspace=short)
    with pytest.raises(TypeError, match=r"^workspace: expected an array on GPU 0 like the plan, got one on the CPU$"):
        plan(x, out, workspace=np.zeros(1 << 20, np.uint8))
    with pytest.raises(ValueError, match=r"^workspace: expected a contiguous array that starts at a multiple of 16"):
        plan(x, out, workspace=cupy.zeros(1 << 20, cupy.uint8)[1:])
    wide = put(np.zeros((2, 520), np.float16))
    with pytest.raises(ValueError, match=r"^x: expected the planned strides \(1024, 2\), got \(1040, 2\)$"):
        plan(wide[:, :512], out)
    with pytest.raises(ValueError, match=r"^x: expected a start at a multiple of \d+ bytes, as planned"):
        plan(put(np.zeros(1025, np.float16))[1:].reshape(2, 512), out)
    with pytest.raises(ValueError, match=r"^x: expected contiguous rows with one stride, got strides \(2, 4\)$"):
        cupy_awq.plan(cupy.asfortranarray(x), weight)
    assert cupy_awq.plan(wide[:, :512], weight)(wide[:, :512], out) is out
