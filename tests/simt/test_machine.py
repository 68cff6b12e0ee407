# SPDX-License-Identifier: Apache-2.0
"""Tests of scheduling, memory and launches, for kernels of several CTAs, with loops, and on views of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_awq.runtime.launch_plan import LaunchPlan
from tests import simt
from tests.simt.kernels import plan, source_text


def execute(
    body: str, signature: str, arguments: tuple[Any, ...], buffers: dict[str, Any], **launch: Any
) -> LaunchPlan:
    """Compile a kernel with the given C++ body and parameters, simulate it, and return its launch plan."""
    landing = launch.pop("landing", "latest")
    text = f'extern "C" __global__ void k({signature}) {{\n{body}\n}}\n'
    made = plan("k.cu", arguments, **launch)
    with source_text("k.cu", text):
        simt.run(made, buffers, landing=landing)
    return made


def ints(body: str, count: int, **launch: Any) -> np.ndarray:
    """Return what a kernel with the parameter ``int* y`` leaves in y, which holds ``count`` zeros before."""
    y = np.zeros(count, np.int32)
    execute(body, "int* y", ("y",), {"y": y}, **launch)
    return y


def test_blocks_and_threads_have_their_indices() -> None:
    body = """
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    y[block * blockDim.x * blockDim.y * blockDim.z + t] = block * 1000 + t;"""
    y = ints(body, 24 * 30, grid=(2, 3, 4), block=(5, 3, 2))
    np.testing.assert_array_equal(y.reshape(24, 30), np.arange(24)[:, None] * 1000 + np.arange(30))


def test_threads_leave_loops_at_different_times() -> None:
    body = "int s = 0; for (int i = 0; i < threadIdx.x * 7 % 13; ++i) s += i * i; y[threadIdx.x] = s;"
    np.testing.assert_array_equal(
        ints(body, 64, block=(64, 1, 1)), [sum(i * i for i in range(t * 7 % 13)) for t in range(64)]
    )


def test_a_switch_takes_each_thread_its_own_way() -> None:
    cases = " ".join(f"case {k}: v = {k * k + 3} * y[0] + {k}; break;" for k in range(8))
    body = f"int v = -1; switch (threadIdx.x % 9) {{ {cases} }} y[threadIdx.x] = v;"
    np.testing.assert_array_equal(ints(body, 32), [-1 if t % 9 == 8 else t % 9 for t in range(32)])


def test_a_spin_lock_between_blocks_ends() -> None:
    """The lock's holder runs later code than the spinning threads; it must be scheduled nevertheless."""
    body = """
    if (threadIdx.x == 0) {
      while (atomicCAS(&y[0], 0, 1) != 0) {}
      const int value = *reinterpret_cast<volatile int*>(&y[1]);
      *reinterpret_cast<volatile int*>(&y[1]) = value + 1;
      __threadfence();
      atomicExch(&y[0], 0);
    }"""
    np.testing.assert_array_equal(ints(body, 2, grid=(20, 1, 1)), [0, 20])


def test_a_block_waits_for_the_one_before_it() -> None:
    body = """
    if (threadIdx.x == 0) {
      volatile int* turn = y;
      while (*turn != blockIdx.x) {}
      __threadfence();
      y[1 + blockIdx.x] = y[blockIdx.x] + 2;
      __threadfence();
      *turn = blockIdx.x + 1;
    }"""
    # CTA i takes its turn after CTA i - 1 and adds 2 to what that one wrote; y[0] counts the turns.
    y = ints(body, 9, grid=(8, 1, 1))
    assert y[0] == 8
    np.testing.assert_array_equal(y[1:], 2 + 2 * np.arange(8))


SUM_OF_BLOCKS = """
    __shared__ bool last;
    y[1 + blockIdx.x * 64 + threadIdx.x] = threadIdx.x;
    {fence} {barrier}
    if (threadIdx.x == 0) last = atomicAdd(&y[0], 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    {acquire}
    int sum = 0;
    for (int block = 0; block < gridDim.x; ++block) sum += y[1 + block * 64 + (threadIdx.x ^ 33)];
    y[330 + threadIdx.x] = sum;"""
GOOD = {"fence": "__threadfence();", "barrier": "__syncthreads();", "acquire": "__threadfence();"}


def test_the_last_block_adds_up_what_others_left() -> None:
    y = ints(SUM_OF_BLOCKS.format(**GOOD), 394, grid=(5, 1, 1), block=(64, 1, 1))
    np.testing.assert_array_equal(y[330:], 5 * (np.arange(64) ^ 33))


@pytest.mark.parametrize("missing", GOOD)
def test_a_sum_over_blocks_needs_each_of_its_fences(missing: str) -> None:
    with pytest.raises(simt.Fault, match="read without synchronization"):
        ints(SUM_OF_BLOCKS.format(**GOOD | {missing: ""}), 394, grid=(5, 1, 1), block=(64, 1, 1))


def test_two_threads_that_store_to_one_place_race() -> None:
    with pytest.raises(simt.Fault, match="write without synchronization"):
        ints("y[threadIdx.x % 32] = 1; __syncwarp(); if (threadIdx.x < 32) y[threadIdx.x] = 2;", 32, grid=(2, 1, 1))


def test_more_blocks_than_are_resident() -> None:
    y = ints("atomicAdd(&y[blockIdx.x % 7], 1);", 7, grid=(100, 1, 1), block=(256, 1, 1))
    np.testing.assert_array_equal(y, 256 * np.bincount(np.arange(100) % 7))


def test_local_arrays_and_generic_pointers() -> None:
    body = """
    __shared__ int s[32];
    int mine[8];
    for (int i = 0; i < 8; ++i) mine[i] = i * threadIdx.x;
    s[threadIdx.x] = 5;
    __syncwarp();
    int* where = &y[threadIdx.x];
    if (threadIdx.x % 3 == 0) where = &mine[threadIdx.x % 8];
    if (threadIdx.x % 3 == 1) where = &s[threadIdx.x];
    *where += 100;
    y[threadIdx.x] = *where;"""
    want = [{0: t % 8 * t + 100, 1: 105, 2: 100}[t % 3] for t in range(32)]
    np.testing.assert_array_equal(ints(body, 32), want)


def test_constant_and_global_variables() -> None:
    text = """__constant__ int table[4] = {5, 6, 7, 8};
    __device__ int total = 100;
    extern "C" __global__ void k(int* y) { y[threadIdx.x] = table[threadIdx.x % 4] + atomicAdd(&total, 1); }"""
    y = np.zeros(32, np.int32)
    with source_text("k.cu", text):
        simt.run(plan("k.cu", ("y",)), {"y": y})
    np.testing.assert_array_equal(y, np.arange(32) % 4 + 5 + np.arange(100, 132))


@pytest.mark.parametrize("operation", ["Add", "Min", "Max", "And", "Or", "Xor", "Exch"])
def test_atomics_of_threads_that_meet(operation: str) -> None:
    start = np.array([12, 7, 3], np.int32)
    y, old = start.copy(), np.zeros(32, np.int32)
    body = f"old[threadIdx.x] = atomic{operation}(&y[threadIdx.x % 3], static_cast<int>(threadIdx.x * 5 + 1));"
    execute(body, "int* y, int* old", ("y", "old"), {"y": y, "old": old})
    steps: dict[str, Callable[[int, int], int]] = {
        "Add": lambda a, b: a + b, "Min": min, "Max": max, "And": lambda a, b: a & b, "Or": lambda a, b: a | b,
        "Xor": lambda a, b: a ^ b, "Exch": lambda a, b: b,
    }  # fmt: skip
    values, seen = [int(v) for v in start], []
    for t in range(32):
        seen.append(values[t % 3])
        values[t % 3] = steps[operation](values[t % 3], t * 5 + 1)
    np.testing.assert_array_equal(old, seen)
    np.testing.assert_array_equal(y, values)


def test_barrier_votes_and_named_barriers() -> None:
    body = """
    const int count = __syncthreads_count(threadIdx.x % 5 == 0);
    const int all = __syncthreads_and(threadIdx.x < 96), any = __syncthreads_or(threadIdx.x == 77);
    __shared__ int s[2];
    const int half = threadIdx.x / 48;  // not a whole number of warps each: two of the three meet
    if (threadIdx.x == 0) s[0] = 40;
    if (threadIdx.x < 64) asm volatile("bar.sync 3, 64;" ::: "memory");
    y[threadIdx.x] = count * 1000 + all * 200 + any * 100 + (threadIdx.x < 64 ? s[0] : half);"""
    y = ints(body, 96, block=(96, 1, 1))
    np.testing.assert_array_equal(y, 20300 + np.where(np.arange(96) < 64, 40, 1))


def test_arrive_and_sync_make_a_one_way_barrier() -> None:
    body = """
    __shared__ int s[32];
    if (threadIdx.x < 32) {
      s[threadIdx.x] = threadIdx.x * 3;
      asm volatile("bar.arrive 1, 64;" ::: "memory");
    } else {
      asm volatile("bar.sync 1, 64;" ::: "memory");
      y[threadIdx.x - 32] = s[63 - threadIdx.x];
    }"""
    np.testing.assert_array_equal(ints(body, 32, block=(64, 1, 1)), 3 * np.arange(32)[::-1])


def test_half_warps_shuffle_apart() -> None:
    body = """
    int v = threadIdx.x;
    if (threadIdx.x < 16) v = __shfl_sync(0x0000ffff, v, 3);
    else v = __shfl_sync(0xffff0000, v, 20) + 100;
    y[threadIdx.x] = v;"""
    np.testing.assert_array_equal(ints(body, 32), [3] * 16 + [120] * 16)


def test_exited_threads_do_not_hold_up_the_others() -> None:
    body = "if (threadIdx.x >= 40) return; __syncthreads(); y[threadIdx.x] = 1;"
    assert ints(body, 64, block=(64, 1, 1)).sum() == 40


def test_strided_and_offset_views_keep_their_alignment() -> None:
    owner = np.zeros(101, np.float32)
    view = owner[1:].reshape(10, 10)[:, :7]
    execute("y[threadIdx.x * 10] = threadIdx.x;", "float* y", ("y",), {"y": view}, block=(10, 1, 1))
    np.testing.assert_array_equal(view[:, 0], np.arange(10))
    assert np.count_nonzero(owner) == 9
    with pytest.raises(simt.Fault, match="misaligned"):
        execute("*reinterpret_cast<int2*>(y) = make_int2(1, 2);", "float* y", ("y",), {"y": view})
    with pytest.raises(simt.Fault, match="out of bounds"):
        execute("y[97] = 1.0f;", "float* y", ("y",), {"y": view})


def test_a_buffer_that_starts_at_an_odd_half() -> None:
    owner = np.arange(9).astype(np.float16)
    y = np.zeros(8, np.uint16)
    execute(
        "y[threadIdx.x] = x[threadIdx.x];",
        "const unsigned short* x, unsigned short* y",
        ("x", "y"),
        {"x": owner[1:], "y": y},
        block=(8, 1, 1),
    )
    np.testing.assert_array_equal(y.view(np.float16), owner[1:])


def test_bfloat16_buffers_and_scalar_arguments() -> None:
    x = np.arange(32).astype(ml_dtypes.bfloat16)
    y = np.zeros(32, np.float32)
    body = "y[threadIdx.x] = __uint_as_float(x[threadIdx.x] << 16) * a + b;"
    execute(
        body,
        "const unsigned short* x, float* y, float a, int b, long long unused",
        ("x", "y", np.float32(0.5), np.int32(-3), np.int64(1)),
        {"x": x, "y": y},
    )
    np.testing.assert_array_equal(y, np.arange(32) * 0.5 - 3)


def test_dynamic_shared_memory_has_no_better_alignment_than_declared() -> None:
    body = """extern __shared__ int s[];
    y[0] = static_cast<int>(__cvta_generic_to_shared(s)) % 32;
    y[1] = static_cast<int>(__cvta_generic_to_shared(s)) % 16;"""
    np.testing.assert_array_equal(ints(body, 2, block=(1, 1, 1), shared_bytes=64), [16, 0])


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="k takes 1, got 2"):
        execute("", "int* y", ("y", np.int32(1)), {"y": np.zeros(1, np.int32)})
    with pytest.raises(ValueError, match="has 4 bytes"):
        execute("", "int y", (np.int64(1),), {})
    with pytest.raises(ValueError, match="landing"):
        execute("", "int y", (np.int32(1),), {}, landing="late")


def test_launches_are_counted() -> None:
    before = simt.launch_counts().get(("k", "80"), 0)
    ints("y[0] = 1;", 1, block=(1, 1, 1))
    assert simt.launch_counts()["k", "80"] == before + 1
