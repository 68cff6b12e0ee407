# SPDX-License-Identifier: Apache-2.0
"""Tests of arrays of other libraries with ``__cuda_array_interface__`` or ``__dlpack__``: no copy, CuPy results."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_awq
from cupy_awq import AwqLinear, PackedWeight
from cupy_awq.runtime import arrays
from cupy_awq.tools.testing import random_activations, random_weight
from tests.products import FLOAT16, check_product, nan_like, put, tensors
from tests.test_api_abuse import CALLS, Call


class Interface:
    """A GPU array of another library that supports only ``__cuda_array_interface__``."""

    def __init__(self, a: Any, read_only: bool = False) -> None:
        self._interface = dict(a.__cuda_array_interface__)
        self._interface["data"] = self._interface["data"][0], read_only
        self._owner = a

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._interface


class DLPack:
    """A GPU array of another library that supports only DLPack."""

    def __init__(self, a: Any) -> None:
        self._a = a

    def __dlpack__(self, **options: Any) -> Any:
        return self._a.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._a.__dlpack_device__()


class OnCpu:
    """An array of another library whose ``__dlpack_device__`` says that it is in CPU memory."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_cpu_arrays_of_other_libraries_are_refused() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    for function in (
        lambda: OnCpu() @ weight,
        lambda: AwqLinear(weight)(OnCpu()),
        lambda: cupy_awq.plan(OnCpu(), weight),
    ):
        with pytest.raises(TypeError, match=r"^x: expected a NumPy or CuPy array, got OnCpu$"):
            function()
    with pytest.raises(TypeError, match=r"^words: expected a NumPy or CuPy array, got OnCpu$"):
        cupy_awq.int8_to_fp16(OnCpu())


class CpuDLPack:
    """An array in CPU memory that supports only DLPack: version 1 if ``versioned``, else the unversioned protocol."""

    def __init__(self, a: Any, versioned: bool) -> None:
        self._a, self._versioned = a, versioned

    def __dlpack__(self, **options: Any) -> Any:
        return self._a.__dlpack__(**options) if self._versioned else self._a.__dlpack__()


class FullCpuDLPack(CpuDLPack):
    """A `CpuDLPack` that also has ``__dlpack_device__``, like a CPU tensor of PyTorch."""

    def __dlpack_device__(self) -> Any:
        return self._a.__dlpack_device__()


class Bfloat16DLPack(FullCpuDLPack):
    """An array in bfloat16, which NumPy cannot export: a capsule of its bits, with bfloat16's type code (4)."""

    def __dlpack__(self, **options: Any) -> Any:
        bits = FullCpuDLPack(self._a.view(np.uint16), self._versioned)
        capsule = bits.__dlpack__(**options)
        name = ctypes.pythonapi.PyCapsule_GetName
        name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        start = pointer(capsule, name(capsule)) + (32 if name(capsule) == b"dltensor_versioned" else 0)
        code = ctypes.c_uint8.from_address(start + 20)
        assert code.value == 1
        code.value = 4
        return capsule

    def __dlpack_device__(self) -> Any:
        return 1, 0


PRODUCERS: dict[str, Callable[[Any], Any]] = {
    "unversioned": lambda a: CpuDLPack(a, False),
    "versioned": lambda a: CpuDLPack(a, True),
    "with a device": lambda a: FullCpuDLPack(a, True),
}
"""The functions, by name, that return an array of another library in the memory of a NumPy array."""

REFUSED = {
    *("AwqLinear.split", "BlockQuantizedWeight", "PackedWeight", "from_mnn", "pack_int4", "pack_int8", "quantize"),
    *("unpack_int4", "unpack_int8"),
}
"""The functions and classes that take only NumPy and CuPy arrays; their error tells how to view other arrays."""


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _arguments(call: Call) -> list[Any]:
    return [*call.arguments.values(), *call.options.values()]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_functions_that_take_only_numpy_and_cupy_name_the_view(name: str) -> None:
    call = CALLS[name]
    arguments = [CpuDLPack(value, True) if _is_array(value) else value for value in call.arguments.values()]
    with pytest.raises(
        TypeError, match=r"^\w+: expected a NumPy or CuPy array, got CpuDLPack; numpy\.from_dlpack views"
    ):
        call.function(*arguments, **call.options)


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("kind", [CpuDLPack, FullCpuDLPack])
def test_operations_accept_cpu_arrays_that_support_dlpack(kind: Any, versioned: bool) -> None:
    def foreign(a: Any) -> Any:
        return None if a is None else kind(a, versioned)

    rng = np.random.default_rng(0)
    weight = random_weight(rng, 64, 32, 16)
    raw = [foreign(a) for a in tensors(weight)]
    x, bias, residual = random_activations(rng, 3, 64), np.ones(32, np.float16), np.ones((3, 32), np.float16)
    out = np.full((3, 32), np.nan, np.float16)
    options = {"bias": foreign(bias), "residual": foreign(residual)}
    cupy_awq.gemm(foreign(x), *raw, out=foreign(out), **options)
    check_product(out, x, weight, bias, None, residual)
    check_product(cupy_awq.gemv(foreign(x[0]), *raw), x[:1], weight)
    check_product(AwqLinear(weight, bias=foreign(bias))(foreign(x)), x, weight, bias)
    check_product(cupy_awq.plan(foreign(x), weight)(foreign(x), foreign(out)), x, weight)
    assert cupy_awq.dequantize(*raw).tobytes() == cupy_awq.dequantize(*tensors(weight)).tobytes()
    blocks = cupy_awq.from_packed(weight)
    quantized = [foreign(a) for a in cupy_awq.quantize_activations(foreign(x), block_size=16)]
    expected = cupy_awq.gemm_int8(*cupy_awq.quantize_activations(x, block_size=16), blocks, block_size=16)
    assert cupy_awq.gemm_int8(*quantized, blocks, block_size=16).tobytes() == expected.tobytes()


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_bfloat16_arrays_of_the_cpu_give_the_bits_of_numpy(versioned: bool, rows: int) -> None:
    rng = np.random.default_rng(rows)
    weight = random_weight(rng, 64, 32, 16)
    weight = PackedWeight(weight.qweight, weight.scales.astype(ml_dtypes.bfloat16), weight.qzeros)
    x, bias = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((rows, 64), 32))
    expected, out = cupy_awq.gemm(x, *tensors(weight), bias=bias), np.zeros((rows, 32), ml_dtypes.bfloat16)
    foreign = [Bfloat16DLPack(a, versioned) for a in (x, weight.scales, bias, out)]
    for _ in range(2):  # a second export must work: the first one leaves the arrays unchanged
        found = cupy_awq.gemm(foreign[0], weight.qweight, foreign[1], weight.qzeros, bias=foreign[2], out=foreign[3])
        assert found.dtype == ml_dtypes.bfloat16
        assert found.tobytes() == out.tobytes() == expected.tobytes()
    strided = Bfloat16DLPack(np.asarray(np.concatenate([x, x], axis=1))[:, 64:], versioned)
    assert cupy_awq.gemm(strided, *tensors(weight), bias=bias).tobytes() == expected.tobytes()


VIEWED = [name for name, call in CALLS.items() if not REFUSED & {name} and any(map(_is_array, _arguments(call)))]


@pytest.mark.parametrize("name", VIEWED)
@pytest.mark.parametrize("kind", PRODUCERS)
def test_every_function_gives_the_bits_of_numpy_for_cpu_arrays_of_other_libraries(name: str, kind: str) -> None:
    """Results are those of NumPy arrays, bit by bit, if one array argument, or all of them, are another library's."""
    call = CALLS[name]
    arrays = [key for key, value in {**call.arguments, **call.options}.items() if _is_array(value)]

    def run(foreign: set[str], kind: str = "") -> tuple[Any, Any]:
        def make(key: str, value: Any) -> Any:
            copied = value.copy() if _is_array(value) else value
            return PRODUCERS[kind](copied) if key in foreign else copied

        out = make("out", call.options.get("out", call.arguments.get("out")))
        options = {key: out if key == "out" else make(key, value) for key, value in call.options.items()}
        arguments = [out if key == "out" else make(key, value) for key, value in call.arguments.items()]
        return call.function(*arguments, **options), out

    expected, _ = run(set())
    for foreign in [{key} for key in arrays] + [set(arrays)]:
        found, out = run(foreign, kind)
        if isinstance(expected, (np.ndarray, tuple)):
            results = zip(*((y if isinstance(y, tuple) else (y,)) for y in (expected, found)), strict=True)
            assert all(type(b) is type(a) and (a is None or a.tobytes() == b.tobytes()) for a, b in results)
        if "out" in foreign and isinstance(expected, np.ndarray):
            assert np.from_dlpack(out).tobytes() == expected.tobytes()


def test_cpu_arrays_that_numpy_cannot_view_or_write_are_refused() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    x, out = np.zeros((2, 64), np.float16), np.zeros((2, 32), np.float16)
    out.flags.writeable = False
    with pytest.raises(TypeError, match=r"^x: expected an array that NumPy can view, got CpuDLPack: "):
        cupy_awq.gemm(CpuDLPack(np.zeros((2, 64), ml_dtypes.bfloat16), True), *tensors(weight))
    with pytest.raises(ValueError, match=r"^out: expected a writable array, got a read-only one$"):
        cupy_awq.gemm(x, *tensors(weight), out=out)
    for versioned in (False, True):
        with pytest.raises(TypeError, match=r"^out: expected an array that NumPy can view, got CpuDLPack: "):
            cupy_awq.gemm(x, *tensors(weight), out=CpuDLPack(out, versioned))
    with pytest.raises(TypeError, match=r"got CpuDLPack; numpy\.from_dlpack views it without a copy$"):
        PackedWeight(CpuDLPack(weight.qweight, True), weight.scales, None)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("kind", [np.ma.masked_array, np.asmatrix])
def test_masked_arrays_and_matrices_are_refused(kind: Any) -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    x, codes = np.ones((2, 64), np.float16), np.ones((2, 64), np.int8)
    scale, sums = np.ones((2, 1), np.float32), np.ones((2, 1), np.int32)
    message = r"^{}: expected a plain NumPy array, got (MaskedArray|matrix)$"
    for name, call in {
        "x": lambda: cupy_awq.gemm(kind(x), *tensors(weight)),
        "residual": lambda: AwqLinear(weight)(x, residual=kind(np.ones((2, 32), np.float16))),
        "out": lambda: AwqLinear(weight)(x, out=kind(np.ones((2, 32), np.float16))),
        "qweight": lambda: PackedWeight(kind(weight.qweight), weight.scales, weight.qzeros),
        "scales": lambda: PackedWeight(weight.qweight, kind(weight.scales), weight.qzeros),
        "xq": lambda: cupy_awq.gemm_int8(kind(codes), scale, None, sums, cupy_awq.from_packed(weight)),
        "words": lambda: cupy_awq.unpack_int4(kind(weight.qweight)),
        "w": lambda: cupy_awq.quantize(kind(x)),
    }.items():
        with pytest.raises(TypeError, match=message.format(name)):
            call()


def test_views_returns_numpy_arrays_and_none_unchanged() -> None:
    operands = {"x": np.zeros(3), "bias": None, "out": [1.0], "residual": OnCpu()}
    assert all(a is b for a, b in zip(arrays.views(**operands), operands.values(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("foreign", [Interface, DLPack])
def test_operations_accept_array_protocols_and_return_cupy_arrays(foreign: Callable[[Any], Any]) -> None:
    import cupy

    rng = np.random.default_rng(0)
    weight = random_weight(rng, 64, 32, 16)
    on_gpu = [put(a) for a in tensors(weight)]
    raw = [foreign(a) for a in on_gpu]
    x, bias, residual = random_activations(rng, 3, 64), np.ones(32, np.float16), np.ones((3, 32), np.float16)
    out = nan_like((3, 32), FLOAT16)
    options = {"bias": foreign(put(bias)), "residual": foreign(put(residual))}
    y = cupy_awq.gemm(foreign(put(x)), *raw, out=foreign(out), **options)
    assert isinstance(y, cupy.ndarray)
    assert y.data.ptr == out.data.ptr
    check_product(out, x, weight, bias, None, residual)
    vector = cupy_awq.gemv(foreign(put(x[0])), *raw)
    assert isinstance(vector, cupy.ndarray)
    check_product(vector, x[:1], weight)
    w = nan_like((64, 32), FLOAT16)
    cupy_awq.dequantize(*raw, out=foreign(w))
    assert w.get().tobytes() == cupy_awq.dequantize(*tensors(weight)).tobytes()
    codes = nan_like((64, 32), FLOAT16)
    cupy_awq.dequantize_s4_to_fp16x2(raw[0], out=foreign(codes))
    np.testing.assert_array_equal(codes.get(), cupy_awq.unpack_int4(weight.qweight))

    layer = AwqLinear(PackedWeight(*on_gpu), bias=foreign(put(bias)))
    for _ in range(2):
        out = nan_like((3, 32), FLOAT16)
        y = layer(foreign(put(x)), out=foreign(out), residual=options["residual"])
        assert y.data.ptr == out.data.ptr
        check_product(out, x, weight, bias, None, residual)
    plan = cupy_awq.plan(foreign(put(x)), PackedWeight(*on_gpu), out=foreign(out))
    out = nan_like((3, 32), FLOAT16)
    plan(foreign(put(x)), foreign(out))
    check_product(out, x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("foreign", [Interface, DLPack])
def test_strides_of_foreign_arrays_are_kept(foreign: Callable[[Any], Any]) -> None:
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 64, 32, 16)
    x = random_activations(rng, 3, 128)
    for values, a in ((x[:, 64:], put(x)[:, 64:]), (x[:, ::2], put(x)[:, ::2])):
        check_product(cupy_awq.gemm(foreign(a), *map(put, tensors(weight))), values, weight)


@pytest.mark.gpu
def test_null_pointers_and_read_only_results_are_refused() -> None:
    import cupy

    weight = put(random_weight(np.random.default_rng(0), 64, 32, 16))
    x, out = put(np.zeros((2, 64), np.float16)), put(np.zeros((2, 32), np.float16))
    interface = {"shape": (2, 64), "typestr": "<f2", "data": (0, False), "version": 3}
    message = r"^x: expected an array in memory, got a SimpleNamespace with a null pointer$"
    with pytest.raises(ValueError, match=message):
        cupy_awq.gemm(SimpleNamespace(__cuda_array_interface__=interface), *tensors(weight))
    with pytest.raises(ValueError, match=r"^out: expected a writable array, got a read-only Interface$"):
        cupy_awq.gemm(x, *tensors(weight), out=Interface(out, read_only=True))
    assert cupy_awq.gemm(Interface(x, read_only=True), *tensors(weight)).shape == (2, 32)
    empty = SimpleNamespace(__cuda_array_interface__=interface | {"shape": (0, 64)})
    assert cupy_awq.gemm(empty, *tensors(weight)).shape == (0, 32)
    lying = SimpleNamespace(__cuda_array_interface__={"shape": (2, 64), "data": (x.data.ptr, False), "version": 3})
    with pytest.raises(TypeError, match=r"^x: expected an array that CuPy can view, got SimpleNamespace: "):
        cupy_awq.gemm(lying, *tensors(weight))
    message = r"^qweight: expected a NumPy or CuPy array, got Interface; cupy\.asarray or cupy\.from_dlpack views it"
    with pytest.raises(TypeError, match=message):
        PackedWeight(Interface(weight.qweight), weight.scales, None)
    assert isinstance(out, cupy.ndarray)


@pytest.mark.gpu
def test_numba_arrays() -> None:
    cuda = pytest.importorskip("numba.cuda")
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    x = random_activations(np.random.default_rng(1), 3, 64)
    out = cuda.to_device(np.full((3, 32), np.nan, np.float16))
    y = cupy_awq.gemm(cuda.to_device(x), *map(cuda.to_device, tensors(weight)), out=out)
    assert y.data.ptr == out.__cuda_array_interface__["data"][0]
    check_product(y, x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=lambda dtype: np.dtype(dtype).name)
def test_jax_arrays(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    x = random_activations(np.random.default_rng(1), 3, 64, dtype=dtype)
    y = cupy_awq.gemm(jax.numpy.asarray(x), *map(jax.numpy.asarray, tensors(weight)))
    assert y.dtype == dtype
    check_product(y, x, weight)
