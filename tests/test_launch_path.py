# SPDX-License-Identifier: Apache-2.0
"""The path from a call to ``cuLaunchKernelEx`` on a stand-in GPU: CuPy arrays in host memory, recorded launches."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupy_awq
from cupy_awq import AwqLinear, BlockQuantizedWeight, PackedWeight, gemm_layer
from cupy_awq.ops import gemm as gemm_op
from cupy_awq.ops import prepared_gemm, rounding
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device, launcher, placement
from cupy_awq.runtime import workspace as workspaces

cupy = pytest.importorskip("cupy")

K, N, GROUP = 256, 64, 64
WORKSPACE = 1 << 40
"""The address that stands for the workspace on the stand-in GPU; no kernel runs, so nothing reads it."""
STREAM = 7


@dataclass
class FakeGpu:
    """A GPU of architecture 80 that records the kernels and the values of their pointer arguments.

    Attributes:
        launches: (entry, addresses by buffer name, stream) of each launch.
    """

    memory: np.ndarray
    used: int = 0
    launches: list[tuple[str, dict[str, int], int]] = field(default_factory=list)

    def allocate(self, nbytes: int) -> Any:
        begin = -(-self.used // 512) * 512
        self.used = begin + nbytes
        assert self.used <= self.memory.nbytes
        memory = cupy.cuda.memory.UnownedMemory(self.memory.ctypes.data + begin, nbytes, self.memory, 0)
        return cupy.cuda.MemoryPointer(memory, 0)

    def empty(self, *shape: int, dtype: Any = np.float16) -> Any:
        return cupy.ndarray(shape, dtype, self.allocate(int(np.prod(shape)) * np.dtype(dtype).itemsize))

    def weight(self) -> PackedWeight:
        codes = self.empty(K, N // 8, dtype=np.int32)
        return PackedWeight(codes, self.empty(K // GROUP, N), self.empty(K // GROUP, N // 8, dtype=np.int32))

    def take(self) -> list[tuple[str, dict[str, int], int]]:
        launches, self.launches = self.launches, []
        return launches


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Replace the GPU, the driver and CuPy's stream by recording stand-ins; no kernel is compiled or run."""
    from cuda.bindings import driver

    fake = FakeGpu(np.zeros(1 << 22, np.uint8))
    functions: dict[Any, int] = {}
    facts = device.nominal(70)

    def load(kernel: Any, shared_bytes: int = 0) -> Any:
        return SimpleNamespace(ptr=functions.setdefault(kernel, len(functions) + 1))

    def launch(config: Any, function: Any, arguments: int, extra: int) -> Any:
        kernel = next(kernel for kernel, number in functions.items() if number == int(function))
        plan = next(plan for plan in plans if plan.kernel == kernel)
        values = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        pointers = {
            name: ctypes.cast(values[i], ctypes.POINTER(ctypes.c_uint64))[0] for i, name in enumerate(plan.pointers)
        }
        fake.launches.append((kernel.entry, pointers, int(config.hStream)))
        return (driver.CUresult.CUDA_SUCCESS,)

    plans: list[Any] = []
    make = launcher.Launcher.__init__

    def record_plan(self: Any, plan: Any) -> None:
        plans.append(plan)
        make(self, plan)

    stream = SimpleNamespace(ptr=STREAM, synchronize=lambda: None, is_capturing=lambda: False)
    launcher.get_launcher.cache_clear()
    gemm_op._prepared.clear()
    for owner, name, value in (
        (launcher.Launcher, "__init__", record_plan),
        (cupy.cuda.runtime, "getDevice", lambda: 0),
        (cupy.cuda, "get_current_stream", lambda: stream),
        (driver, "cuLaunchKernelEx", launch),
        (driver, "cuFuncSetAttribute", lambda *_: (driver.CUresult.CUDA_SUCCESS,)),
        (compiler, "load_function", load),
        (device, "of", lambda index: facts),
        (placement, "use_device", lambda index: contextlib.nullcontext()),
        (workspaces, "workspace_address", lambda index, stream: WORKSPACE),
        (workspaces, "allocate_zeros", lambda nbytes, **_: fake.empty(nbytes, dtype=np.uint8)),
    ):
        monkeypatch.setattr(owner, name, value)
    with cupy.cuda.using_allocator(fake.allocate):
        yield fake
    launcher.get_launcher.cache_clear()
    gemm_op._prepared.clear()


def addresses(**arrays: Any) -> dict[str, int]:
    return {name: 0 if a is None else a.data.ptr for name, a in arrays.items()}


def test_every_operation_passes_its_arrays_on_the_current_stream(gpu: FakeGpu) -> None:
    weight, x, y = gpu.weight(), gpu.empty(3, K), gpu.empty(3, N)
    bias, w = gpu.empty(N), gpu.empty(K, N)
    tensors = addresses(**weight.tensors)
    assert cupy_awq.dequantize(*weight.tensors.values(), out=w) is w
    assert gpu.take() == [("dequantize", tensors | addresses(out=w), STREAM)]
    words, values = gpu.empty(5, 8, dtype=np.int32), gpu.empty(5, 64)
    cupy_awq.dequantize_s4_to_fp16x2(words, out=values)
    assert gpu.take() == [("s4_to_fp16x2", addresses(words=words, out=values), STREAM)]
    layer = AwqLinear(weight, bias=bias)
    plan = cupy_awq.plan(x, weight, bias=bias)
    for call in (
        lambda: cupy_awq.gemm(x, weight, bias=bias, out=y),
        lambda: cupy_awq.gemm(x, *weight.tensors.values(), bias=bias, out=y),
        lambda: layer(x, out=y),
        lambda: plan(x, y),
    ):
        for _ in range(2):  # the second call uses the cached launch
            assert call() is y
            ((entry, found, stream),) = gpu.take()
            assert (entry[:3], stream) == ("gem", STREAM)
            expected = tensors | addresses(x=x, y=y, bias=bias, residual=None)
            assert {name: found[name] for name in expected} == expected
    codes = cupy_awq.quantize_activations(x, block_size=GROUP, symmetric=True)
    ((entry, found, _),) = gpu.take()
    assert entry == "quantize_rows"
    made = addresses(x=x, codes=codes[0], scale=codes[1], offset=None, sums=codes[3])
    assert found == {name: made[name] for name in found}


def test_kernels_are_collected_without_being_loaded_or_launched(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = gpu.weight(), gpu.empty(3, K)
    layer, load = AwqLinear(weight), compiler.load_function
    with launcher.collect_kernels() as kernels, monkeypatch.context() as patch:
        patch.setattr(compiler, "load_function", lambda *_: pytest.fail("a kernel was loaded"))
        layer(x)
        layer(x)
    assert gpu.take() == []
    loaded: list[Any] = []

    def record(kernel: Any, *size: int) -> Any:
        loaded.append(kernel)
        return load(kernel, *size)

    monkeypatch.setattr(compiler, "load_function", record)
    progress: list[tuple[int, int]] = []
    compiler.load_functions(kernels, lambda *counts: progress.append(counts))
    assert progress == [(1, 1)]
    layer(x)
    ((entry, _, _),) = gpu.take()
    assert [kernel.entry for kernel in kernels] == [entry]
    assert loaded == list(kernels) * 2


def test_products_of_integers_pass_their_arrays(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = gpu.empty(N, 1, 1, K, dtype=np.uint8)
    # On the stand-in, no kernel could make this layout.
    monkeypatch.setattr(BlockQuantizedWeight, "layout", lambda self, key, make: stored)
    weight = BlockQuantizedWeight(stored, gpu.empty(N, 1), None, bits=8)
    codes, scale = gpu.empty(3, K, dtype=np.int8), gpu.empty(3, 1, dtype=np.float32)
    sums, y = gpu.empty(3, 1, dtype=np.int32), gpu.empty(3, N, dtype=np.float32)
    assert cupy_awq.gemm_int8(codes, scale, None, sums, weight, out=y) is y
    ((_, found, stream),) = gpu.take()
    made = addresses(xq=codes, x_scale=scale, x_sums=sums, bias=None, y=y)
    assert (stream, {name: found[name] for name in made}) == (STREAM, made)


def test_the_quantizer_passes_its_arrays(gpu: FakeGpu) -> None:
    def matrix(*shape: int) -> Any:
        return gpu.empty(*shape, dtype=np.float32)

    target, old, factors, bottom, top = matrix(8, N), matrix(8, N), matrix(8, 8), matrix(8, N), matrix(8, N)
    for before in (target, old):
        codes, changes = rounding.round_channels(target, before, factors.T, bottom, top)
        ((entry, found, _),) = gpu.take()
        made = addresses(target=target, old=None if before is target else old, factors=factors)
        made |= addresses(bottom=bottom, top=top, codes=codes, changes=changes)
        assert (entry, found) == ("round_channels", made)
    codes, curved, gradient, total = matrix(GROUP, N), matrix(GROUP, N), matrix(GROUP, N), matrix(GROUP, GROUP)
    scale, zero = gpu.empty(N), gpu.empty(N)
    limits = 2.0**-24, 65504.0
    step = rounding.refine_group(codes, curved, gradient, total, scale, zero, limits, symmetric=False)
    made = addresses(codes=codes, curved=curved, gradient=gradient, total=total, scale=scale, zero=zero, step=step)
    assert gpu.take() == [("refine_group", made, STREAM)]


def test_partial_sums_are_in_the_workspace_of_the_stream(gpu: FakeGpu) -> None:
    weight, x = gpu.weight(), gpu.empty(1, K)
    for split_k in (1, 4):
        cupy_awq.gemm(x, weight, kernel="gemv", split_k=split_k)
        ((_, found, _),) = gpu.take()
        if split_k > 1:
            assert found["counters"] == WORKSPACE
            assert found["partials"] == WORKSPACE + workspaces.COUNTER_BYTES
    plan = cupy_awq.plan(x, weight, kernel="gemv", split_k=4)
    plan(x, gpu.empty(1, N))
    ((_, found, _),) = gpu.take()
    assert found["partials"] - found["counters"] == workspaces.COUNTER_BYTES
    assert found["counters"] != WORKSPACE


@pytest.mark.parametrize("kind", ["layer", "gemm"])
def test_a_known_layout_is_launched_without_validation(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    weight, x, outs = gpu.weight(), gpu.empty(3, K), [gpu.empty(3, N) for _ in range(2)]
    other = PackedWeight(*gpu.weight().tensors.values())
    layer = AwqLinear(weight)
    call: Callable[..., Any] = layer if kind == "layer" else lambda x, **more: cupy_awq.gemm(x, weight, **more)
    call(x, out=outs[0])
    call(x)

    def checked(*_: Any, **__: Any) -> None:
        raise AssertionError("a known layout was checked again")

    for module in (gemm_layer, gemm_op):
        monkeypatch.setattr(module, "run_gemm", checked)
    gpu.take()
    for out in (*outs, *outs, None):
        call(x, out=out)
    assert [found["y"] for _, found, _ in gpu.take()][:4] == [out.data.ptr for out in (*outs, *outs)]
    if kind == "gemm":
        cupy_awq.gemm(x, other, out=outs[0])
        assert gpu.take()[0][1]["qweight"] == other.qweight.data.ptr
    with pytest.raises(AssertionError, match="checked again"):
        call(x[:2], out=outs[0][:2])


@pytest.mark.parametrize("kind", ["layer", "gemm", "plan"])
def test_a_result_that_overlaps_the_weight_is_never_launched(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """An ``out`` that overlaps the weight is refused, also by a cached launch.

    The cache must not skip the check because the same layout, or the same `out` with another weight, was valid before.
    """
    weight, bias, x, out = gpu.weight(), gpu.empty(N), gpu.empty(3, K), gpu.empty(3, N)
    call: Callable[..., Any]
    if kind == "layer":
        call = AwqLinear(weight, bias=bias)
    elif kind == "gemm":

        def call(x: Any, out: Any) -> Any:
            return cupy_awq.gemm(x, weight, bias=bias, out=out)
    else:
        plan = cupy_awq.plan(x, weight, bias=bias)

        def call(x: Any, out: Any) -> Any:
            return plan(x, out)

    call(x, out=out)
    for name, a in (*weight.tensors.items(), ("bias", bias)):
        inside = cupy.ndarray((3, N), np.float16, a.data)
        for _ in range(2):
            gpu.take()
            with pytest.raises(ValueError, match=f"^out: expected memory that does not overlap {name}, got"):
                call(x, out=inside)
            assert gpu.launches == []
    monkeypatch.setattr(prepared_gemm, "MAX_DISJOINT", 2)
    for _ in range(5):
        call(x, out=gpu.empty(3, N))
    if kind == "gemm":
        codes = cupy.ndarray(weight.qweight.shape, np.int32, out.data)
        second = PackedWeight(codes, weight.scales, weight.qzeros)
        with pytest.raises(ValueError, match=r"^out: expected memory that does not overlap qweight"):
            cupy_awq.gemm(x, second, bias=bias, out=out)


def test_a_plan_describes_itself(gpu: FakeGpu) -> None:
    weight, x = gpu.weight(), gpu.empty(1, K)
    text = repr(cupy_awq.plan(x, weight, residual=(1, N), kernel="gemv", split_k=4))
    assert text.startswith("Plan(float16 [1, 256] -> [1, 64], residual, kernel='gemv', workspace_bytes=")
    assert text.endswith(", GPU 0)")
