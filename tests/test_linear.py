# SPDX-License-Identifier: Apache-2.0
"""Tests of `AwqLinear`: products, concatenation, copies; on a GPU also cached launches, streams, threads, graphs."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupy_awq
from cupy_awq import AwqLinear, PackedWeight, gemm_layer
from cupy_awq.activation import Activation
from cupy_awq.ops import prepared_gemm
from cupy_awq.ops.repack import RepackedWeight
from cupy_awq.runtime import arrays, device, placement
from cupy_awq.tools.testing import random_activations, random_weight
from tests.products import ELEMENTS, FLOAT16, ZEROS, check_product, gemm, nan_like, put, tensors
from tests.test_reference import ACTIVATIONS

BFLOAT16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("zeros", ZEROS)
def test_layer_equals_gemm_with_its_bias_and_activation(activation: Any, zeros: str) -> None:
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 64, 32, 16, zeros=zeros)
    x, bias = random_activations(rng, 2, 3, 64), rng.standard_normal(32).astype(np.float32)
    layer = AwqLinear(weight, bias=bias, activation=activation)
    n = 16 if activation == "swiglu" else 32
    assert (layer.shape, layer.group_size, layer.splits) == ((64, 32), 16, (n,))
    assert layer.weight is weight
    assert layer.bias is bias
    residual, out = rng.standard_normal((2, 3, n)).astype(np.float16), np.full((2, 3, n), np.nan, np.float16)
    expected = gemm(x, weight, bias=bias, activation=activation, residual=residual)
    check_product(expected, x, weight, bias, activation, residual)
    assert layer(x, residual=residual, out=out) is out
    np.testing.assert_array_equal(out, expected)
    y = layer.plan(x, residual=residual)(x, np.empty_like(out), residual=residual)
    np.testing.assert_array_equal(y, expected)
    assert layer.kernel_for(6) == "numpy"
    assert repr(layer) == f"AwqLinear({weight}, bias{'' if activation is None else f', activation={activation!r}'})"


def test_layer_reads_uint16_as_the_given_dtype() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    x = random_activations(np.random.default_rng(1), 2, 64, dtype=BFLOAT16)
    y = AwqLinear(weight)(x.view(np.uint16), dtype="bfloat16")
    np.testing.assert_array_equal(y.view(BFLOAT16), AwqLinear(weight)(x))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"bias": np.zeros(16, np.float16)},
            ValueError,
            "bias: expected float16, bfloat16 or float32 [N] = [24], got float16 [16]",
        ),
        ({"bias": [0.0] * 24}, TypeError, "bias: expected a NumPy or CuPy array, got list"),
        ({"activation": "elu"}, ValueError, "activation: expected relu, "),
        (
            {"activation": "swiglu"},
            ValueError,
            "qweight: expected N divisible by 16 for a gated activation, got N = 24",
        ),
    ],
)
def test_invalid_bias_or_activation_is_refused_by_the_constructor(
    options: Any, error: type[Exception], message: str
) -> None:
    weight = random_weight(np.random.default_rng(0), 64, 24, 16)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        AwqLinear(weight, **options)
    with pytest.raises(TypeError, match=r"^weight: expected a PackedWeight, got ndarray$"):
        AwqLinear(weight.qweight, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("zeros", ZEROS)
def test_concatenated_layer_equals_its_parts(zeros: str) -> None:
    rng = np.random.default_rng(0)
    weights = [random_weight(rng, 64, n, 16, zeros=zeros) for n in (32, 8, 16)]
    biases = [rng.standard_normal(32).astype(np.float16), None, rng.standard_normal(16).astype(np.float16)]
    parts = [AwqLinear(w, bias=b) if i else w for i, (w, b) in enumerate(zip(weights, biases, strict=True))]
    layer = AwqLinear.concatenate(parts)
    assert (layer.shape, layer.splits) == ((64, 56), (32, 8, 16))
    assert layer.bias is not None
    assert layer.bias.dtype == np.float16
    x = random_activations(rng, 2, 3, 64)
    y = layer(x)
    views = layer.split(y)
    assert all(np.shares_memory(view, y) for view in views)
    for view, w, b, i in zip(views, weights, biases, range(3), strict=True):
        check_product(view, x, w, b if i else None)
    with pytest.raises(ValueError, match=r"^y: expected \[\.\.\., 56\], got float16 \[2, 3, 32\]$"):
        layer.split(views[0])


def test_concatenate_accepts_a_generator() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 16, 16)
    assert AwqLinear.concatenate(part for part in (weight, weight)).splits == (16, 16)  # type: ignore[arg-type]


def test_gate_and_up_concatenate_into_a_gated_layer() -> None:
    rng = np.random.default_rng(0)
    gate, up = (random_weight(rng, 64, 24, 16) for _ in range(2))
    x = random_activations(rng, 5, 64)
    layer = AwqLinear.concatenate([gate, up], activation="swiglu")
    assert (layer.shape, layer.splits) == ((64, 48), (24,))
    g, u = (gemm(x.astype(np.float32), weight) for weight in (gate, up))
    np.testing.assert_allclose(layer(x), g / (1 + np.exp(-g)) * u, rtol=2e-3, atol=1e-4)
    assert len(layer.split(layer(x))) == 1


def test_biases_of_different_dtypes_concatenate_in_float32() -> None:
    weights = [random_weight(np.random.default_rng(0), 64, 8, 16) for _ in range(3)]
    biases = [np.full(8, 0.1, np.float32), np.full(8, 1, BFLOAT16), None]
    layer = AwqLinear.concatenate([AwqLinear(w, bias=b) for w, b in zip(weights, biases, strict=True)])
    assert layer.bias is not None
    np.testing.assert_array_equal(layer.bias, np.repeat(np.array([0.1, 1, 0], np.float32), 8))
    assert AwqLinear.concatenate(weights).bias is None


def test_concatenate_refuses_parts_that_differ() -> None:
    rng = np.random.default_rng(0)
    first = random_weight(rng, 64, 16, 16)

    def refused(*parts: Any) -> str:
        with pytest.raises(ValueError, match=r"^parts") as error:
            AwqLinear.concatenate(parts)
        return str(error.value)

    assert refused() == "parts: expected at least one layer or weight, got none"
    assert refused(first, random_weight(rng, 32, 16, 16)) == "parts[1]: expected k=64 as in parts[0], got 32"
    expected = "parts[2]: expected group_size=16 as in parts[0], got 32"
    assert refused(first, first, random_weight(rng, 64, 16, 32)) == expected
    other = random_weight(rng, 64, 16, 16, dtype=BFLOAT16)
    assert refused(first, other) == "parts[1]: expected dtype=float16 as in parts[0], got bfloat16"
    other = random_weight(rng, 64, 16, 16, zeros="float")
    assert refused(first, other) == "parts[1]: expected zeros=packed as in parts[0], got float"
    assert (
        refused(AwqLinear(first, activation="relu")) == "parts[0]: expected a layer without an activation, got 'relu'"
    )
    with pytest.raises(TypeError, match=r"^parts\[0\]: expected an AwqLinear or a PackedWeight, got ndarray$"):
        AwqLinear.concatenate([first.qweight])  # type: ignore[list-item]


def test_copied_and_pickled_layers_compute_the_same() -> None:
    rng = np.random.default_rng(0)
    weights = [random_weight(rng, 64, n, 16) for n in (16, 8)]
    layer = AwqLinear.concatenate(
        [AwqLinear(w, bias=np.ones(w.shape[1], np.float16)) for w in weights], activation="relu"
    )
    x = random_activations(rng, 2, 64)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(twin(x), layer(x))
        assert (twin.splits, twin.activation) == ((16, 8), "relu")


@pytest.mark.parametrize("name", ["weight", "bias", "activation", "splits"])
def test_properties_of_a_layer_are_read_only(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(AwqLinear(random_weight(np.random.default_rng(0), 64, 16, 16)), name, None)


@pytest.mark.gpu
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("m", [1, 16, 100])
def test_concatenated_layers_on_the_gpu(zeros: str, m: int) -> None:
    rng, rounded = np.random.default_rng(0), m > 32 or zeros == "float"
    for dtype in (np.float16, BFLOAT16):
        weights = [random_weight(rng, 128, n, 32, zeros=zeros, dtype=dtype) for n in (64, 24, 40)]
        biases = [rng.standard_normal(64).astype(dtype), None, None]
        parts = [AwqLinear(put(w), bias=put(b)) for w, b in zip(weights, biases, strict=True)]
        layer = AwqLinear.concatenate(parts)
        x = random_activations(rng, m, 128, dtype=dtype)
        for view, w, b in zip(layer.split(layer(put(x))), weights, biases, strict=True):
            check_product(view, x, w, b, rounded=rounded)
        gated = AwqLinear.concatenate([weights[0], weights[0]], activation="swiglu")
        on_gpu = AwqLinear.concatenate([put(weights[0])] * 2, activation="swiglu")
        y = on_gpu(put(x), out=nan_like((m, 64), dtype))
        check_product(y, x, gated.weight, None, "swiglu", rounded=rounded)


@pytest.mark.gpu
def test_known_layout_is_launched_without_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 256, 128, 64)
    layer = AwqLinear(put(weight), activation="gelu")
    values = [random_activations(rng, 3, 256) for _ in range(4)]
    outs = [nan_like((3, 128), FLOAT16) for _ in values]
    assert layer(put(values[0]), out=outs[0]) is outs[0]
    layer(put(values[0]))

    def checked(*_: Any, **__: Any) -> None:
        raise AssertionError("a known layout was checked again")

    with monkeypatch.context() as patch:
        patch.setattr(gemm_layer, "run_gemm", checked)
        for x, out in zip(values, outs, strict=True):
            assert layer(put(x), out=out) is out
            check_product(layer(put(x)), x, weight, activation="gelu")
            check_product(out, x, weight, activation="gelu")
        for unknown in (put(values[0])[:2], put(values[0]).astype(np.float32), put(values[0]).reshape(1, 3, 256)):
            with pytest.raises(AssertionError, match="checked again"):
                layer(unknown)
    with pytest.raises(ValueError, match=r"^out: expected float16 \[3, 128\], got float16 \[128, 3\]$"):
        layer(put(values[0]), out=outs[0].T)
    with pytest.raises(TypeError, match=r"^out: expected float16 \[3, 128\], got float32 \[3, 128\]$"):
        layer(put(values[0]), out=outs[0].astype(np.float32))


@pytest.mark.gpu
def test_number_of_kept_layouts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_layer, "MAX_PREPARED", 4)
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 64, 16, 16)
    layer = AwqLinear(put(weight))
    for m in range(1, 20):
        x = random_activations(rng, m, 64)
        check_product(layer(put(x)), x, weight)
        assert len(layer._prepared) <= 4


@pytest.mark.gpu
def test_threads_and_streams_share_a_layer() -> None:
    """Layers give each thread its own right result when threads run them at once on different streams.

    Split-K products share workspaces, which must not be the same for two streams.
    """
    import cupy

    rng = np.random.default_rng(0)
    weight = put(random_weight(rng, 4096, 256, 128))
    layer = AwqLinear(weight, bias=put(np.ones(256, np.float16)))
    values = [random_activations(rng, 1 + i % 3, 4096) for i in range(8)]
    expected = [AwqLinear(weight, bias=layer.bias)(put(x)).get().tobytes() for x in values]
    cupy.cuda.Device().synchronize()
    wrong: list[Any] = []
    start = threading.Barrier(len(values))

    def work(i: int) -> None:
        try:
            stream = cupy.cuda.Stream.ptds if i % 2 else cupy.cuda.Stream(non_blocking=True)
            with stream:
                x = put(values[i])
                stream.synchronize()
                start.wait()
                for _ in range(100):
                    out = cupy.full((len(x), 256), np.nan, np.float16)
                    if layer(x, out=out).get().tobytes() != expected[i]:
                        wrong.append(i)
        except Exception as error:  # a thread hands its error to the main thread, which reports it
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
def test_layer_launches_on_the_current_stream() -> None:
    """A layer launches on the current stream: while that is blocked by other work, the output must not change."""
    import cupy

    weight = put(random_weight(np.random.default_rng(0), 64, 32, 16))
    layer, x = AwqLinear(weight), put(np.ones((2, 64), np.float16))
    expected = layer(x).get()
    out = nan_like((2, 32), FLOAT16)
    stream, go = cupy.cuda.Stream(non_blocking=True), threading.Event()
    cupy.cuda.Device().synchronize()
    with stream:
        layer(x, out=out)  # load the kernel first, which would synchronize
        out.fill(np.nan)
        stream.synchronize()
        stream.launch_host_func(lambda _: go.wait(), None)
        for _ in range(2):
            layer(x, out=out)
    with cupy.cuda.Stream(non_blocking=True):
        before = out.get()
    go.set()
    stream.synchronize()
    assert np.isnan(before).all()
    np.testing.assert_array_equal(out.get(), expected)


@pytest.mark.gpu
def test_layer_uses_the_device_of_its_weight_not_the_current_one() -> None:
    """A layer runs on the GPU of its weight, also if another one is current; with a single GPU both are the same."""
    import cupy

    rng = np.random.default_rng(0)
    weight = random_weight(rng, 256, 64, 64)
    x = random_activations(rng, 3, 256)
    for home in range(placement.gpu_count()):
        with cupy.cuda.Device(home):
            layer = AwqLinear(put(weight))
            plan, on_gpu, out = layer.plan((3, 256)), put(x), nan_like((3, 64), FLOAT16)
        for current in range(placement.gpu_count()):
            with cupy.cuda.Device(current):
                for _ in range(2):
                    y = layer(on_gpu)
                    assert y.device.id == home
                    planned = plan(on_gpu, out)
                    w = cupy_awq.dequantize(*tensors(layer.weight))
                assert cupy.cuda.runtime.getDevice() == current
            check_product(y, x, weight)
            check_product(planned, x, weight)
            np.testing.assert_array_equal(w.get(), cupy_awq.dequantize(*tensors(weight)))


@pytest.mark.gpu
def test_kernel_for_names_the_selected_kernel() -> None:
    weight = put(random_weight(np.random.default_rng(0), 256, 64, 64))
    for activation in (None, "swiglu"):
        layer = AwqLinear(weight, activation=activation, bias=put(np.zeros(64, np.float16)))
        for m in (1, 5, 300):
            assert layer.kernel_for(m) == layer.plan((m, 256)).kernel
    assert AwqLinear(weight).kernel_for(300, "float32") == "gemm_simt"


@pytest.mark.gpu
def test_captured_layer_replays_with_new_values() -> None:
    import cupy

    rng = np.random.default_rng(0)
    weights = [random_weight(rng, 256, 256, 64) for _ in range(2)]
    first, second = (AwqLinear(put(w), activation="relu") for w in weights)
    x, middle, out = (put(np.zeros((4, 256), np.float16)) for _ in range(3))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        second(first(x, out=middle), out=out)
        graph = stream.end_capture()
        for seed in range(2):
            values = random_activations(np.random.default_rng(seed), 4, 256)
            x.set(values)
            graph.launch()
            check_product(middle, values, weights[0], activation="relu")
            check_product(out, middle.get(), weights[1], activation="relu")


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize(("n", "activation"), [(256, None), (384, "swiglu")])
def test_layer_without_its_awq_tensors_computes_the_same(n: int, activation: Any) -> None:
    rng = np.random.default_rng(9)
    weight, bias = random_weight(rng, 256, n, 128), rng.standard_normal(n).astype(np.float32)
    whole = AwqLinear(PackedWeight(*map(put, tensors(weight))), bias=put(bias), activation=activation)
    alone = AwqLinear(whole.weight, bias=put(bias), activation=activation, keep_weight=False)
    for m in (1, 16, 100, 513):
        x = random_activations(rng, m, 256)
        y = alone(put(x))
        check_product(y.get(), x, weight, bias, activation, rounded=m > 32)
        assert (y == whole(put(x))).all()
    assert (alone.shape, alone.group_size, alone.kernel_for(1)) == ((256, n), 128, whole.kernel_for(1))
    assert "MB" in repr(alone) or " B" in repr(alone)
    with pytest.raises(ValueError, match=r"^weight: expected a layer with keep_weight=True, got "):
        _ = alone.weight
    with pytest.raises(ValueError, match=r"^weight: expected a layer with keep_weight=True, got "):
        pickle.dumps(alone)
    with pytest.raises(TypeError, match=r"^x: expected float16 or bfloat16 for a layer with keep_weight=False, got "):
        alone(put(x.astype(np.float32)))


@pytest.mark.parametrize(("arch", "served"), [(75, ["float16"]), (80, ["float16", "bfloat16"])])
def test_x_that_needs_the_freed_tensors_is_named(monkeypatch: pytest.MonkeyPatch, arch: int, served: list[str]) -> None:
    monkeypatch.setattr(prepared_gemm.device, "of", lambda index: device.nominal(arch))
    weight = random_weight(np.random.default_rng(0), 64, 32, 32)
    alone = RepackedWeight(weight, np.zeros(0, np.uint8), 0, False).without_original()
    for element in ELEMENTS:
        if element.name in served:
            prepared_gemm.gemm_problem(alone, Activation(), 1, element)
        else:
            with pytest.raises(TypeError, match=rf"^x: expected {' or '.join(served)} for .*, got {element}$"):
                prepared_gemm.gemm_problem(alone, Activation(), 1, element)


def test_layer_without_a_repacked_copy_keeps_its_weight() -> None:
    weight = random_weight(np.random.default_rng(0), 64, 32, 16)
    assert AwqLinear(weight, keep_weight=False).weight is weight


@pytest.mark.gpu
@pytest.mark.sm90
def test_gated_layer_with_a_split_weight_tile_keeps_its_weight() -> None:
    weight = random_weight(np.random.default_rng(0), 256, 96, 128)
    layer = AwqLinear(PackedWeight(*map(put, tensors(weight))), activation="swiglu", keep_weight=False)
    assert layer.weight.shape == (256, 96)


def test_overlapping_rows_are_not_read_in_place() -> None:
    row = np.zeros(64, np.float16)
    assert not arrays.has_readable_rows(np.broadcast_to(row, (4, 64)))
    assert not arrays.has_readable_rows(np.lib.stride_tricks.sliding_window_view(row, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [3, 40, 600])
def test_broadcast_row_is_multiplied_correctly(m: int) -> None:
    import cupy

    rng = np.random.default_rng(10)
    weight, x = random_weight(rng, 256, 128, 128), random_activations(rng, 1, 256)
    y = AwqLinear(PackedWeight(*map(put, tensors(weight))))(cupy.broadcast_to(put(x), (m, 256)))
    check_product(y.get(), np.broadcast_to(x, (m, 256)), weight, rounded=m > 32)


@pytest.mark.gpu
def test_copied_layer_does_not_share_prepared_launches() -> None:
    rng = np.random.default_rng(0)
    weight = random_weight(rng, 64, 16, 16)
    layer, x = AwqLinear(put(weight)), random_activations(rng, 2, 64)
    layer(put(x))
    twin = copy.deepcopy(layer)
    assert not twin._prepared
    assert isinstance(twin.weight, PackedWeight)
    check_product(twin(put(x)), x, weight)


def test_split_and_kernel_for_name_an_argument_of_another_type() -> None:
    layer = AwqLinear(random_weight(np.random.default_rng(0), 64, 32, 16))
    for y, error, text in (
        (None, TypeError, "y: expected a NumPy or CuPy array, got NoneType"),
        ([1.0], TypeError, "y: expected a NumPy or CuPy array, got list"),
        (np.zeros(()), ValueError, r"y: expected \[\.\.\., 32\], got float64 \[\]"),
    ):
        with pytest.raises(error, match=f"^{text}$"):
            layer.split(y)
    with pytest.raises(TypeError, match=r"^m: expected an integer, got 1\.5$"):
        layer.kernel_for(1.5)  # type: ignore[arg-type]
