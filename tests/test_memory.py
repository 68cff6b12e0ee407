# SPDX-License-Identifier: Apache-2.0
"""Tests of failing allocations, one after the other: each raises MemoryError, and the objects can still be used."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupy_awq
from cupy_awq import AwqLinear, PackedWeight, llm
from cupy_awq.check import HOST
from cupy_awq.kernels import select
from cupy_awq.kernels.gemm.problem import Problem
from cupy_awq.ops import gemm as launching
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import launcher, placement
from cupy_awq.runtime import workspace as workspaces
from cupy_awq.runtime.device import nominal
from cupy_awq.tools import command_line
from cupy_awq.tools.demo import SMOLLM2_MLP
from cupy_awq.tools.testing import random_activations, random_weight
from tests import llm_models
from tests.llm_models import QWEN3
from tests.products import put, tensors
from tests.tools import soak

Failing = Callable[[int], AbstractContextManager[Any]]
"""The type of a function that returns a context in which allocation number n raises MemoryError."""

ROWS = (1, 3, 40, 300)


@contextmanager
def failing_numpy(n: int) -> Iterator[None]:
    """Let the n-th call of NumPy's allocating functions fail in the context."""
    count = itertools.count()

    def limited(real: Callable[..., Any]) -> Callable[..., Any]:
        def allocate(*arguments: Any, **options: Any) -> Any:
            if next(count) == n:
                raise MemoryError("injected")
            return real(*arguments, **options)

        return allocate

    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "zeros", "ones", "full", "concatenate", "where", "repeat"):
            patch.setattr(np, name, limited(getattr(np, name)))
        yield


@contextmanager
def failing_cupy(n: int) -> Iterator[None]:
    """Let the n-th request for device memory fail as on a full GPU: for an array, a kernel, a stream, an event, ..."""
    import cupy
    from cuda.bindings import driver

    count = itertools.count()
    out_of_memory = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY

    def limited(real: Callable[..., Any], error: Callable[..., BaseException]) -> Callable[..., Any]:
        def request(*arguments: Any, **options: Any) -> Any:
            if next(count) == n:
                raise error(*arguments)
            return real(*arguments, **options)

        return request

    def status_limited(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (out_of_memory,) if next(count) == n else real(*arguments)

    def array_error(size: int) -> BaseException:
        return cupy.cuda.memory.OutOfMemoryError(size, 0, 0)

    def runtime_error(*_: Any) -> BaseException:
        return cupy.cuda.runtime.CUDARuntimeError(out_of_memory.value)

    class Pool:
        """A memory pool of CuPy whose allocations may fail; a language model has one for its decode steps."""

        def __init__(self) -> None:
            self.malloc = limited(cupy_pool().malloc, array_error)

    class RawModule:
        """A module of CuPy whose loading may fail; CuPy loads it when a function is requested."""

        def __init__(self, *, path: str) -> None:
            get_function = cupy_module(path=path).get_function
            self.get_function = limited(get_function, lambda *_: cupy.cuda.driver.CUDADriverError(out_of_memory.value))

    cupy_pool, cupy_module = cupy.cuda.MemoryPool, cupy.RawModule
    pool = cupy.get_default_memory_pool()
    compiler._functions.clear()
    launcher.get_launcher.cache_clear()
    launching._prepared.clear()
    with pytest.MonkeyPatch.context() as patch, cupy.cuda.using_allocator(limited(pool.malloc, array_error)):
        patch.setattr(cupy.cuda, "MemoryPool", Pool)
        patch.setattr(cupy, "RawModule", RawModule)
        for name in ("Stream", "Event", "alloc_pinned_memory"):
            patch.setattr(cupy.cuda, name, limited(getattr(cupy.cuda, name), runtime_error))
        for name in ("cuFuncSetAttribute", "cuLaunchKernelEx"):
            patch.setattr(driver, name, status_limited(getattr(driver, name)))
        yield


STEPS = [pytest.param(7, id="every seventh"), pytest.param(1, marks=pytest.mark.slow, id="each")]
"""The values of ``step``: in run i, the request for memory with the index i * step fails."""


def fail_each_allocation(
    failing: Failing, make: Callable[[], Callable[[], list[bytes]]], step: int = 1, message: str = ""
) -> int:
    """Fail each ``step``-th allocation of ``make`` and of the call that it returns, one per run; return their number.

    The error must match ``message``. After a failed call the same object is called again, with enough memory, and must
    return the same bits.
    """
    expected = make()()
    for n in itertools.count(0, step):
        call = None
        try:
            with failing(n):
                call = make()
                call()
        except MemoryError as error:
            text = str(error)
        else:
            return n
        assert re.search(message, text)
        assert (call or make())() == expected, f"after allocation {n} had failed"
    raise AssertionError


def make_operations(copy: Callable[[Any], Any]) -> Callable[[], list[bytes]]:
    """Return a call of every operation, on arrays that ``copy`` places on the device."""
    rng = np.random.default_rng(0)
    weight = PackedWeight(*map(copy, tensors(random_weight(rng, 128, 64, 32))))
    layer = AwqLinear(weight, bias=copy(np.ones(64, np.float16)), activation="silu")
    whole = AwqLinear.concatenate([layer.weight, weight])
    quantized = [AwqLinear(weight, x_dtype="int8")]
    if isinstance(weight.qweight, np.ndarray) or _has_fp8():
        quantized.append(AwqLinear(weight, x_dtype="fp8"))
    plan = cupy_awq.plan((3, 128), weight)
    rows = [copy(random_activations(rng, m, 128)) for m in ROWS]
    codes = rng.integers(0, 16, (16, 3, 3, 8), np.uint8)
    filters = cupy_awq.BlockQuantizedWeight(copy(codes), copy(np.ones((16, 1), np.float16)), None)
    codes_int8, ones = copy(codes.view(np.int8)), copy(np.ones(16, np.float32))
    images = copy(rng.standard_normal((2, 8, 6, 6)).astype(np.float16))
    out = copy(np.zeros((3, 64), np.float16))
    int8_codes = copy(rng.integers(0, 256, (64, 1, 1, 128), np.uint8))
    int8_weight = cupy_awq.BlockQuantizedWeight(int8_codes, copy(np.ones((64, 1), np.float16)), None, bits=8)
    int8_layer = cupy_awq.Int8Linear(int8_weight)

    def call() -> list[bytes]:
        results = [operation(x) for x in rows for operation in (layer, whole, int8_layer, *quantized)]
        residual = copy(np.ones((len(rows[2]), 64), np.float16))
        results += [cupy_awq.gemm(rows[2], weight.qweight, weight.scales, weight.qzeros, residual=residual)]
        results += [cupy_awq.dequantize(weight.qweight, weight.scales, weight.qzeros), plan(rows[1], out)]
        results += [cupy_awq.conv2d(images, filters, padding=1)]
        results += [cupy_awq.conv2d_int8(images.astype(np.int8), codes_int8, ones, x_scale=1, out_scale=9)]
        return [y.tobytes() for y in results]

    return call


def _has_fp8() -> bool:
    from cupy_awq.runtime import device

    return device.current().arch >= 89


def test_operations_on_the_cpu_work_after_any_allocation_that_fails() -> None:
    assert fail_each_allocation(failing_numpy, lambda: make_operations(lambda a: a)) > 50


def test_a_checkpoint_on_the_cpu_loads_after_any_allocation_that_fails() -> None:
    x = np.ones((2, 576), np.float16)

    def make() -> Callable[[], list[bytes]]:
        layers = cupy_awq.load(SMOLLM2_MLP, device="cpu")
        return lambda: [layers["model.layers.0.mlp.up_proj"](x).tobytes()]

    assert fail_each_allocation(failing_numpy, make) > 2


def test_a_language_model_on_the_cpu_generates_after_any_allocation_that_fails(tmp_path: Path) -> None:
    _fail_generation(tmp_path, failing_numpy, "cpu", 10)


def test_threads_that_share_layers_get_the_bits_of_one_thread() -> None:
    """The soak tool finds no wrong result and no growth of memory in one second; by hand it runs for minutes."""
    run = soak.Soak(HOST, failures=0)
    run.run(threads=2, seconds=1)
    assert run.faults == []
    assert list(run.counts) == ["right"]


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
def test_operations_on_the_gpu_work_after_any_request_for_memory_that_fails(step: int) -> None:
    assert fail_each_allocation(failing_cupy, lambda: make_operations(put), step, "memory") > 100


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
def test_a_language_model_on_the_gpu_generates_after_any_request_for_memory_that_fails(
    tmp_path: Path, step: int
) -> None:
    _fail_generation(tmp_path, failing_cupy, 0, 100, step, "^GPU 0: expected enough free memory, got: ")


def _fail_generation(
    tmp_path: Path, failing: Failing, device: Any, least: int, step: int = 1, message: str = ""
) -> None:
    folder = llm_models.folder(tmp_path, QWEN3)

    def make() -> Callable[[], list[bytes]]:
        model = llm.load(folder, device=device)
        return lambda: [model.generate("abc", max_tokens=3)[0].text.encode()]

    assert fail_each_allocation(failing, make, step, message) > least


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
        RuntimeError("cudaErrorMemoryAllocation: out of memory"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
        MemoryError("Out of memory allocating 1,024 bytes (allocated so far: 0 bytes)."),
    ],
)
def test_exhausted_gpu_memory_is_one_error_of_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each error that CuPy 14 and its libraries raise without memory ends a command with one line on stderr."""

    def fail(*_: object, **__: object) -> None:
        raise error

    cuda = SimpleNamespace(Device=contextlib.nullcontext)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    message = f"^GPU 3: expected enough free memory, got: {re.escape(str(error))}$"
    with pytest.raises(MemoryError, match=message) as raised, placement.use_device(3), placement.use_device(3):
        fail()
    assert raised.value.__cause__ is error
    monkeypatch.setattr(placement, "resolve", fail)
    assert command_line.main(["demo"]) == 2
    assert capsys.readouterr().err == f"cupy_awq: error: {error}\n"


def test_other_errors_of_the_driver_keep_their_type_and_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=contextlib.nullcontext)))
    with pytest.raises(RuntimeError, match=r"^CUDA_ERROR_ILLEGAL_ADDRESS"), placement.use_device(0):
        fail()
    monkeypatch.setattr(placement, "resolve", fail)
    with pytest.raises(RuntimeError, match=r"^CUDA_ERROR_ILLEGAL_ADDRESS"):
        command_line.main(["demo"])


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace CuPy by a fake with an sm_80 GPU; return its record of the cubin paths and code that are loaded.

    If ``error`` of the record is set, loading from a file raises it.
    """
    seen = SimpleNamespace(paths=[], code=[], names=[], error=None)

    class RawModule:
        def __init__(self, *, path: str) -> None:
            seen.paths.append(path)

        def get_function(self, name: str) -> Any:
            seen.names.append(name)
            if seen.error is not None:
                raise seen.error
            return SimpleNamespace(kernel=SimpleNamespace(ptr=1))

    class Module:
        def load(self, code: bytes) -> None:
            seen.code.append(code)

        def get_function(self, name: str) -> Any:
            return SimpleNamespace(ptr=2)

    class Device(contextlib.nullcontext[None]):
        compute_capability = "80"

    cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0), Device=Device, Module=Module)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, RawModule=RawModule))
    monkeypatch.setattr(compiler, "_functions", {})
    return seen


def test_a_cached_binary_is_loaded_from_its_file_once(loading: SimpleNamespace) -> None:
    kernel = select.choose(Problem(1, 256, 256, 128), nominal(80)).plan.kernel
    first, second = compiler.load_function(kernel), compiler.load_function(kernel)
    assert first is second
    assert (loading.paths, loading.names, loading.code) == ([str(compiler.build(kernel).path)], [kernel.entry], [])


@pytest.mark.parametrize("reason", ["not written", "removed", "name"])
def test_a_binary_without_a_usable_file_is_loaded_from_memory(
    loading: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    kernel = select.choose(Problem(1, 256, 256, 128), nominal(80)).plan.kernel
    binary = compiler.build(kernel)
    if reason == "not written":
        monkeypatch.setattr(compiler, "build", lambda *_: replace(binary, path=None))
    elif reason == "removed":
        loading.error = RuntimeError("CUDA_ERROR_FILE_NOT_FOUND: file not found")
    else:
        loading.error = UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed")
    assert compiler.load_function(kernel).ptr == 2
    assert loading.code == [binary.code]
    assert len(loading.paths) == (reason != "not written")


def test_a_binary_that_the_driver_refuses_is_an_error(loading: SimpleNamespace) -> None:
    kernel = select.choose(Problem(1, 256, 256, 128), nominal(80)).plan.kernel
    loading.error = RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available")
    with pytest.raises(RuntimeError, match=r"^CUDA_ERROR_NO_BINARY_FOR_GPU"):
        compiler.load_function(kernel)
    assert loading.code == []


def test_a_kernel_that_does_not_fit_on_the_gpu_is_loaded_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose loading failed for lack of GPU memory is loaded by the next call.

    Stand-ins for CuPy and the driver have no room for the first module, function attribute and workspace.
    """
    from cuda.bindings import driver

    failures, limits = ["module", "attribute", "workspace"], []

    class CUDADriverError(RuntimeError):
        """A stand-in for the error of CuPy's driver binding, whose constructor needs a driver."""

    class RawModule:
        def __init__(self, *, path: str) -> None:
            assert Path(path).read_bytes()[:4] == b"\x7fELF"

        def get_function(self, name: str) -> Any:
            if "module" in failures:
                failures.remove("module")
                raise CUDADriverError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")
            return SimpleNamespace(kernel=SimpleNamespace(ptr=1, module=self, name=name))

    class Device(contextlib.nullcontext[None]):
        compute_capability = "80"

    def set_attribute(function: Any, attribute: Any, value: int) -> tuple[Any]:
        if "attribute" in failures:
            failures.remove("attribute")
            return (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        limits.append(value)
        return (driver.CUresult.CUDA_SUCCESS,)

    def allocate(nbytes: int) -> Any:
        if "workspace" in failures:
            failures.remove("workspace")
            raise CUDADriverError("cudaErrorMemoryAllocation: out of memory")
        return SimpleNamespace(data=SimpleNamespace(ptr=4096))

    runtime = SimpleNamespace(getDevice=lambda: 0)
    cuda = SimpleNamespace(runtime=runtime, Device=Device)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, RawModule=RawModule))
    monkeypatch.setattr(driver, "cuFuncSetAttribute", set_attribute)
    monkeypatch.setattr(compiler, "_functions", {})
    monkeypatch.setattr(workspaces, "_workspaces", {})
    monkeypatch.setattr(workspaces, "allocate_zeros", allocate)
    kernel = select.choose(Problem(1, 256, 256, 128), nominal(80)).plan.kernel
    message = "^GPU 0: expected enough free memory, got: "
    with pytest.raises(MemoryError, match=message + "CUDA_ERROR_OUT_OF_MEMORY: out of memory"):
        compiler.load_function(kernel, 50_000)
    with pytest.raises(MemoryError, match=message + "CUDA_ERROR_OUT_OF_MEMORY of cuFuncSetAttribute"):
        compiler.load_function(kernel, 50_000)
    function = compiler.load_function(kernel, 50_000)
    assert compiler.load_function(kernel, 40_000) is compiler.load_function(kernel, 60_000) is function
    assert limits == [50_000, 60_000]
    with pytest.raises(MemoryError, match=message + "cudaErrorMemoryAllocation"):
        workspaces.workspace_address(0, 7)
    assert workspaces.workspace_address(0, 7) == workspaces.workspace_address(0, 7) == 4096
    assert failures == []
