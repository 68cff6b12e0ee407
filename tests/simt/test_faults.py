# SPDX-License-Identifier: Apache-2.0
"""Tests that each check of the simulator catches its error and names the source line, the thread and the address.

The line that a fault must name has the comment HERE.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests import simt
from tests.simt import machine
from tests.simt.kernels import SAMPLES, plan, source_text

HOPPER = (SAMPLES / "hopper.cuh").read_text(encoding="utf-8")


@dataclass
class Case:
    """A kernel with an error: the body of ``fault(float* x, const float* y, int n)``, and the expected Fault."""

    kind: str
    body: str
    says: str = ""
    thread: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None
    address: int | None = None
    launch: dict[str, Any] = field(default_factory=dict)
    landing: str = "latest"


ONE = (0, 0, 0)
X = 1 << 36  # the address of the first buffer: each has 2**36 addresses to itself

CASES = {
    "a store past the end": Case(
        "out of bounds",
        "x[threadIdx.x + n] = 1.0f;  // HERE",
        says="4 bytes at offset 256 of 'x', which has 256 bytes",
        thread=(ONE, (31, 0, 0)),
        address=X + 256,
    ),
    "a load before the start": Case(
        "out of bounds", "x[threadIdx.x] = y[static_cast<int>(threadIdx.x) - 1];  // HERE", thread=(ONE, ONE)
    ),
    "a vector that hangs over the end": Case(
        "out of bounds",
        "reinterpret_cast<float4*>(x)[threadIdx.x] = make_float4(0, 0, 0, 0);  // HERE",
        thread=(ONE, (16, 0, 0)),
    ),
    "a null pointer": Case("null pointer", "x[threadIdx.x] = z[threadIdx.x];  // HERE", thread=(ONE, ONE), address=0),
    "a misaligned vector": Case(
        "misaligned",
        "if (threadIdx.x == 5) *reinterpret_cast<float2*>(x + threadIdx.x) = make_float2(0, 0);  // HERE",
        says="expected a multiple of 8",
        thread=(ONE, (5, 0, 0)),
        address=X + 20,
    ),
    "a store to a read-only buffer": Case("read-only", "const_cast<float*>(y)[threadIdx.x] = 1.0f;  // HERE"),
    "shared memory out of bounds": Case(
        "out of bounds",
        "extern __shared__ float s[]; s[threadIdx.x] = 1.0f;  // HERE",
        says="at offset 96",
        thread=(ONE, (20, 0, 0)),
        launch={"shared_bytes": 80},
    ),
    "uninitialized shared memory": Case(
        "uninitialised",
        "__shared__ float s[64]; s[threadIdx.x] = 1.0f; __syncthreads(); x[threadIdx.x] = s[threadIdx.x * 2];  // HERE",
        thread=(ONE, (16, 0, 0)),
        address=1024 + 128,
    ),
    "a copy without a wait": Case(
        "in flight",
        """__shared__ float s[32];
        cp_async(&s[threadIdx.x], y + threadIdx.x);
        commit();
        wait<1>();
        x[threadIdx.x] = s[threadIdx.x];  // HERE""",
    ),
    "the same when copies are fast": Case(
        "race",
        """__shared__ float s[32];
        cp_async(&s[threadIdx.x], y + threadIdx.x);
        commit();
        wait<1>();
        x[threadIdx.x] = s[threadIdx.x];  // HERE""",
        landing="earliest",
    ),
    "a missing __syncthreads": Case(
        "race",
        """__shared__ float s[64];
        s[threadIdx.x] = 1.0f;
        x[threadIdx.x] = s[threadIdx.x ^ 32];  // HERE""",
        says="read without synchronization after the write by thread (32, 0, 0) of CTA (0, 0, 0) at fault.cu:",
        launch={"block": (64, 1, 1)},
    ),
    "a stage overwritten while others read": Case(
        "race",
        """__shared__ float s[64];
        s[threadIdx.x] = 1.0f;
        __syncthreads();
        const float value = s[63 - threadIdx.x];
        s[threadIdx.x] = value;  // HERE""",
        says="write without synchronization after",
        launch={"block": (64, 1, 1)},
    ),
    "a missing __syncwarp": Case(
        "race",
        """__shared__ float s[32];
        s[threadIdx.x] = 1.0f;
        x[threadIdx.x] = s[threadIdx.x ^ 1];  // HERE""",
        says="read without synchronization after the write by thread (1, 0, 0)",
    ),
    "two values for one word": Case(
        "race", "x[threadIdx.x / 2] = threadIdx.x;  // HERE", says="a different value at the same address"
    ),
    "a barrier that a thread does not reach": Case(
        "deadlock",
        'if (threadIdx.x < 40) __syncthreads(); else asm volatile("bar.sync 1;");',
        launch={"block": (64, 1, 1)},
    ),
    "a named barrier with too few threads": Case(
        "deadlock", 'asm volatile("bar.sync 1, 96;");  // HERE', says="64 threads wait", launch={"block": (64, 1, 1)}
    ),
    "a named barrier with too many threads": Case(
        "barrier", 'asm volatile("bar.sync 1, 32;");  // HERE', launch={"block": (64, 1, 1)}
    ),
    "an endless spin": Case(
        "deadlock", "volatile float* flag = x; while (*flag == 0.0f) {}  // HERE", says="threads spin"
    ),
    "a shuffle by a lane outside its mask": Case(
        "divergence", "x[threadIdx.x] = __shfl_xor_sync(0xffff, y[threadIdx.x], 1);  // HERE", thread=(ONE, (16, 0, 0))
    ),
    "a shuffle that half a warp never reaches": Case(
        "deadlock", "if (threadIdx.x < 16) x[0] = __shfl_xor_sync(~0u, y[threadIdx.x], 1); else while (y[0] == 0.0f) {}"
    ),
    "a trap": Case("trap", "if (threadIdx.x == 3) __trap();  // HERE", thread=(ONE, (3, 0, 0))),
}  # fmt: skip

HOPPER_CASES = {
    "an mbarrier that was not initialised": Case(
        "invalid", "__shared__ uint64_t b; mbarrier_arrive(&b);", says="no initialized mbarrier is here"
    ),
    "an mbarrier initialised without a barrier after it": Case(
        "race",
        "__shared__ uint64_t b; if (threadIdx.x == 0) mbarrier_init(&b, 64); mbarrier_arrive(&b);",
        launch={"block": (64, 1, 1)},
    ),
    "more arrivals than the mbarrier counts": Case(
        "barrier",
        """__shared__ uint64_t b;
        if (threadIdx.x == 0) mbarrier_init(&b, 2);
        __syncthreads();
        mbarrier_arrive(&b);""",
        says="32 arrivals, but phase 0 misses 2 of 2 arrivals",
    ),
    "a phase that never completes": Case(
        "deadlock",
        """__shared__ uint64_t b;
        if (threadIdx.x == 0) mbarrier_init(&b, 2);
        __syncthreads();
        mbarrier_wait(&b, 0);""",
        says="phase 0 misses 2 of 2 arrivals",
    ),
    "a wait for the wrong parity": Case(
        "in flight",
        """__shared__ alignas(16) float s[32];
        __shared__ uint64_t b;
        if (threadIdx.x == 0) {
          mbarrier_init(&b, 1);
          mbarrier_arrive_expect_tx(&b, 128);
          bulk_load(s, y, 128, &b);
        }
        __syncthreads();
        mbarrier_wait(&b, 1);
        x[threadIdx.x] = s[threadIdx.x];  // HERE""",
    ),
    "a stage given back before all lanes have read it": Case(
        "race",
        """__shared__ alignas(16) float s[32];
        __shared__ uint64_t full, empty;
        if (threadIdx.x == 0) { mbarrier_init(&full, 1); mbarrier_init(&empty, 1); }
        __syncthreads();
        if (threadIdx.x >= 32) {
          if (threadIdx.x == 32) {
            for (int i = 0; i < 2; ++i) {
              if (i == 1) mbarrier_wait(&empty, 0);
              mbarrier_arrive_expect_tx(&full, 128);
              bulk_load(s, y, 128, &full);
            }
            mbarrier_wait(&full, 1);
          }
          return;
        }
        mbarrier_wait(&full, 0);
        x[threadIdx.x] = s[threadIdx.x];
        if (threadIdx.x == 0) mbarrier_arrive(&empty);""",
        says="asynchronous write without synchronization after",
        launch={"block": (64, 1, 1)},
    ),
    "a missing fence.proxy.async": Case(
        "race",
        """__shared__ alignas(16) float s[32];
        s[threadIdx.x] = 1.0f;
        __syncthreads();
        if (threadIdx.x == 0) { bulk_store(x, s, 128); bulk_commit(); bulk_wait_read(); }""",
        says="no fence.proxy.async is between them",
    ),
    "a source overwritten under a bulk store": Case(
        "race",
        """__shared__ alignas(16) float s[32];
        s[threadIdx.x] = 1.0f;
        fence_proxy_async();
        __syncthreads();
        if (threadIdx.x == 0) { bulk_store(x, s, 128); bulk_commit(); }
        __syncthreads();
        s[threadIdx.x] = 2.0f;  // HERE""",
        says="write without synchronization after the read by thread (0, 0, 0) of CTA (0, 0, 0)",
    ),
    "an exit with a bulk store under way": Case(
        "in flight",
        """__shared__ alignas(16) float s[32];
        s[threadIdx.x] = 1.0f;
        fence_proxy_async();
        __syncthreads();
        if (threadIdx.x == 0) { bulk_store(x, s, 128); bulk_commit(); }""",
        says="exits before its bulk copy has read shared memory",
    ),
    "an exit with a bulk load under way": Case(
        "in flight",
        """__shared__ alignas(16) float s[32];
        __shared__ uint64_t b;
        if (threadIdx.x == 0) {
          mbarrier_init(&b, 1);
          mbarrier_arrive_expect_tx(&b, 128);
          bulk_load(s, y, 128, &b);
        }""",
        says="exits before the copy has landed",
    ),
    "a bulk copy of an odd size": Case(
        "misaligned",
        """__shared__ alignas(16) float s[32];
        __shared__ uint64_t b;
        if (threadIdx.x == 0) { mbarrier_init(&b, 1); bulk_load(s, y, 120, &b); }""",
        says="120 bytes: expected a multiple of 16",
    ),
    "a CTA of the cluster that has exited": Case(
        "race",
        """__shared__ int s;
        if (cluster_rank()) return;
        asm volatile("st.shared::cluster.u32 [%0], 1;" ::"r"(map_to_rank(shared_address(&s), 1)));""",
        says="others of its cluster may still use its shared memory",
        launch={"grid": (2, 1, 1), "cluster": (2, 1, 1)},
    ),
    "a product without wgmma.fence": Case(
        "invalid",
        """__shared__ alignas(1024) uint16_t s[1024];
        for (int i = threadIdx.x; i < 1024; i += 128) s[i] = 0;
        fence_proxy_async();
        __syncthreads();
        float c[4] = {};
        const uint64_t d = descriptor(s, 128, 256, 0);
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "l"(d), "l"(d));  // HERE""",
        says="no wgmma.fence",
        launch={"block": (128, 1, 1)},
    ),
    "a stage given back before wgmma.wait_group": Case(
        "race",
        """__shared__ alignas(1024) uint16_t s[1024];
        for (int i = threadIdx.x; i < 1024; i += 128) s[i] = 0;
        fence_proxy_async();
        __syncthreads();
        float c[4] = {};
        const uint64_t d = descriptor(s, 128, 256, 0);
        wgmma_fence();
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "l"(d), "l"(d));
        wgmma_commit();
        __syncthreads();
        s[threadIdx.x] = 1;  // HERE
        wgmma_wait<0>();
        x[threadIdx.x % 32] = c[0];""",
        says="write without synchronization after",
        launch={"block": (128, 1, 1)},
    ),
}  # fmt: skip

SIGNATURE = 'extern "C" __global__ void fault(float* x, const float* y, const float* z, int n) {\n'
COPIES = """
__device__ void cp_async(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from) : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
"""


def provoke(case: Case, prelude: str, arch: str) -> None:
    """Run a case's kernel and check that it raises the expected Fault at the expected line, thread and address."""
    text = prelude.replace("#pragma once", "") + SIGNATURE + case.body + "\n}\n"
    launch = plan("fault.cu", ("x", "y", "z", np.int32(33)), arch=arch, **case.launch)
    y = np.zeros(64, np.float32)
    y.flags.writeable = False
    with source_text("fault.cu", text), pytest.raises(simt.Fault) as caught:
        simt.run(launch, {"x": np.zeros(64, np.float32), "y": y, "z": None}, landing=case.landing)
    fault = caught.value
    assert (fault.kind, case.says in str(fault)) == (case.kind, True), str(fault)
    here = [number for number, line in enumerate(text.splitlines(), 1) if "// HERE" in line]
    if here:
        assert fault.source is not None
        lines = [fault.source.line] + ([fault.source.caller.line] if fault.source.caller else [])
        assert here[0] in lines, str(fault)
        assert f"fault.cu:{here[0]}" in str(fault)
    if case.thread:
        assert fault.thread == case.thread
        assert f"thread {case.thread[1]} of CTA {case.thread[0]}" in str(fault)
    if case.address is not None:
        assert fault.address == case.address
        assert f"address {case.address:#x}" in str(fault)


@pytest.mark.parametrize("name", CASES)
def test_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "STALLED", 1000)
    provoke(CASES[name], COPIES, "80")


@pytest.mark.parametrize("name", HOPPER_CASES)
def test_hopper_fault(name: str) -> None:
    provoke(HOPPER_CASES[name], HOPPER, "90a")
