# SPDX-License-Identifier: Apache-2.0
"""Tests of activation orders: the gather kernel, layers and plans with an order, and models from act-order files."""

from __future__ import annotations

import copy
import json
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import cupy_awq
from cupy_awq import AwqLinear, PackedWeight, llm
from cupy_awq.check import BFLOAT16, FLOAT16
from cupy_awq.checkpoint import Module
from cupy_awq.kernels.gemm import gather_columns
from cupy_awq.kernels.gemm.gemm_sm90 import GEMM_SM90
from cupy_awq.kernels.gemm.layouts import FragmentLayout
from cupy_awq.kernels.select import planner
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.cuda_backend import CudaOps
from cupy_awq.llm.decoder.forward import Add, Norm, Project
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.ops.repack import RepackedWeight
from cupy_awq.runtime import device
from cupy_awq.tools.testing import random_activations, random_weight
from tests import llm_models, packers, simt
from tests.backends import BACKENDS, runner
from tests.logits import logits_of
from tests.packers import Packed
from tests.products import ELEMENTS, ZEROS, check_product, nan_like, put, tensors
from tests.test_formats_llm import numbers
from tests.test_kernels import ARCHS, DTYPES, facts, strided
from tests.test_llm_device import SimulatedOps, simulated

__all__ = ["simulated"]  # The import makes pytest find the fixture `simulated` in this module.

plan_gather = planner(gather_columns.ColumnGather)
AWQ = ("qweight", "scales", "qzeros")
IDS = [int(i) for i in np.random.default_rng(3).integers(0, llm_models.VOCAB, 9)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("m", [1, 3, 17, 40])
@pytest.mark.parametrize(("k", "extra"), [(8, 0), (600, 8), (20, 0), (1032, 3)])
def test_the_kernel_gathers_columns_of_strided_rows(
    backend: str, arch: int, dtype: str, m: int, k: int, extra: int
) -> None:
    rng = np.random.default_rng(k)
    x, order = strided(rng.standard_normal((m, k)).astype(DTYPES[dtype]), extra), rng.permutation(k).astype(np.int32)
    wanted, y = x[:, order], np.full((m, k), np.nan, x.dtype)
    order.flags.writeable = False
    stride = k + extra
    is_aligned = stride * x.itemsize % (32 if dtype == "float32" else 16) == 0
    plan = plan_gather(facts(arch, backend), m, k, dtype, stride, x_aligned=is_aligned)
    runner(backend)(plan, {"x": x, "order": order, "y": y})
    np.testing.assert_array_equal(y, wanted)


@settings(max_examples=30)
@given(data=st.data())
def test_any_gather_on_the_simulator(data: st.DataObject) -> None:
    arch, dtype = data.draw(st.sampled_from(ARCHS)), data.draw(st.sampled_from(["float16", "float32"]))
    m, k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70)) * data.draw(st.sampled_from([1, 8]))
    here = facts(arch, "latest")
    plan = plan_gather(here, m, k, dtype, k, x_aligned=k % 8 == 0)
    rng = np.random.default_rng(k)
    x, order = rng.standard_normal((m, k)).astype(DTYPES[dtype]), rng.permutation(k).astype(np.int32)
    y = np.full_like(x, np.nan)
    runner("latest")(plan, {"x": x, "order": order, "y": y})
    np.testing.assert_array_equal(y, x[:, order])


def test_a_row_that_does_not_fit_in_shared_memory_is_gathered_from_global_memory() -> None:
    here = facts(90, "latest")
    assert dict(plan_gather(here, 64, 1 << 16, "float16", 1 << 16, x_aligned=True).kernel.defines)["STAGED"]
    plan = plan_gather(here, 1 << 20, 1 << 17, "float16", 1 << 17, x_aligned=True)
    assert (plan.shared_bytes, plan.grid) == (0, (256, gather_columns.MAX_GRID, 1))


def ordered(rng: np.random.Generator, k: int, n: int, group: int = 16, **options: Any) -> tuple[Any, np.ndarray]:
    """Return a random weight [k, n], and a random permutation of k as its activation order."""
    return random_weight(rng, k, n, group, **options), rng.permutation(k).astype(np.int32)


@given(seed=st.integers(0, 2**32 - 1), rank=st.integers(1, 4), activation=st.sampled_from([None, "silu", "swiglu"]))
def test_layer_multiplies_the_gathered_columns_of_x_of_any_rank(seed: int, rank: int, activation: Any) -> None:
    rng = np.random.default_rng(seed)
    weight, order = ordered(rng, 48, 32, zeros=str(rng.choice(ZEROS)))
    bias = rng.standard_normal(32).astype(np.float32)
    plain = AwqLinear(weight, bias=bias, activation=activation)
    layer = AwqLinear(weight, bias=bias, activation=activation, order=order)
    np.testing.assert_array_equal(layer.order, order)
    assert plain.order is None
    leading = tuple(int(size) for size in rng.integers(0, 4, rank - 1))
    x = rng.standard_normal((*leading, 96)).astype(np.float16)[..., ::2]
    wanted = plain(x[..., order])
    residual = rng.standard_normal(wanted.shape).astype(np.float16)
    np.testing.assert_array_equal(layer(x), wanted)
    out = np.full(wanted.shape, np.nan, np.float16)
    assert layer(x, residual=residual, out=out) is out
    np.testing.assert_array_equal(out, plain(x[..., order], residual=residual))
    planned = layer.plan(x, residual=residual)(x, np.full_like(out, np.nan), residual=residual)
    np.testing.assert_array_equal(planned, out)


def test_layer_with_an_order_computes_the_dense_product_of_the_file() -> None:
    """Row i of the stored (sorted) weight is row order[i] of W: y = x[:, order] @ stored = x @ W."""
    weight, order = ordered(np.random.default_rng(0), 64, 24)
    w = np.empty((64, 24), np.float32)
    w[order] = cupy_awq.dequantize(weight.qweight, weight.scales, weight.qzeros, dtype=np.float32)
    x = np.eye(64, dtype=np.float32)
    np.testing.assert_allclose(AwqLinear(weight, order=order)(x), w, rtol=1e-6)


def test_copies_repr_and_quantized_x_keep_the_order() -> None:
    rng = np.random.default_rng(0)
    weight, order = ordered(rng, 64, 16)
    layer, x = AwqLinear(weight, order=order), random_activations(rng, 2, 64)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(twin(x), layer(x))
    assert repr(layer) == f"AwqLinear({weight}, order)"
    for x_dtype in ("int8", "fp8"):
        quantized, plain = (AwqLinear(weight, x_dtype=x_dtype, order=o) for o in (order, None))
        np.testing.assert_array_equal(quantized(x), plain(x[:, order]))
        assert repr(quantized) == f"AwqLinear({weight}, order, x_dtype='{x_dtype}')"


def test_the_layer_keeps_a_copy_of_the_order() -> None:
    rng = np.random.default_rng(0)
    weight, order = ordered(rng, 64, 16)
    layer, x = AwqLinear(weight, order=order), random_activations(rng, 2, 64)
    before = layer(x)
    order[:] = 99  # an invalid order: the layer must have kept a copy of the valid one
    np.testing.assert_array_equal(layer(x), before)
    with pytest.raises(AttributeError):
        layer.order = order  # type: ignore[misc]


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        ([0, 1], TypeError, "order: expected a NumPy or CuPy array, got list"),
        (np.arange(16, dtype=np.int64), TypeError, "order: expected int32 [K] = [16], got int64 [16]"),
        (np.arange(15, dtype=np.int32), ValueError, "order: expected int32 [K] = [16], got int32 [15]"),
        (np.zeros((16, 1), np.int32), ValueError, "order: expected int32 [K] = [16], got int32 [16, 1]"),
        (np.arange(1, 17, dtype=np.int32), ValueError, "order: expected a permutation of 0 to 15, got the index 0 0 t"),
        (np.arange(-1, 15, dtype=np.int32), ValueError, "order: expected a permutation of 0 to 15, got"),
        (np.full(16, 3, np.int32), ValueError, "order: expected a permutation of 0 to 15, got the index 0 0 times"),
        (
            np.array([5, *range(15)], np.int32),
            ValueError,
            "order: expected a permutation of 0 to 15, got the",
        ),
    ],
)
def test_an_order_that_is_no_permutation_is_refused(order: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        AwqLinear(random_weight(np.random.default_rng(0), 16, 8, 8), order=order)


def test_x_is_checked_before_it_is_gathered() -> None:
    layer = AwqLinear(random_weight(np.random.default_rng(0), 16, 8, 8), order=np.arange(16, dtype=np.int32)[::-1])
    with pytest.raises(ValueError, match=r"^x: expected float16 \[\.\.\., K\] with K = 16, got float16 \[2, 32\]$"):
        layer(np.zeros((2, 32), np.float16))
    with pytest.raises(TypeError, match=r"^x: expected a NumPy or CuPy array, got list$"):
        layer([0.0] * 16)
    bits = np.ones((2, 16), BFLOAT16).view(np.uint16)
    np.testing.assert_array_equal(layer(bits, dtype="bfloat16").view(BFLOAT16), layer(bits.view(BFLOAT16)))


def test_concatenated_layers_share_one_order() -> None:
    rng = np.random.default_rng(0)
    order = rng.permutation(64).astype(np.int32)
    parts = [AwqLinear(random_weight(rng, 64, n, 16), order=order) for n in (16, 8)]
    whole, x = AwqLinear.concatenate(parts), random_activations(rng, 3, 64)
    np.testing.assert_array_equal(whole.order, order)
    for view, part in zip(whole.split(whole(x)), parts, strict=True):
        np.testing.assert_array_equal(view, part(x))
    other = AwqLinear(parts[1].weight, order=order[::-1])
    for wrong in (other, parts[1].weight):
        with pytest.raises(ValueError, match=r"^parts\[1\]: expected the activation order of parts\[0\], got another$"):
            AwqLinear.concatenate([parts[0], wrong])
    with pytest.raises(ValueError, match=r"^parts\[1\]: expected the activation order of parts\[0\], got another$"):
        AwqLinear.concatenate([parts[0].weight, parts[1]])


def act_order_files(path: Path, config: dict[str, Any], *, shared: bool = True, group: int = 16) -> Path:
    """Write a GPTQ model in which every layer has an activation order, and its dense twin in the folder "dense".

    ``shared`` says whether q, k and v, and gate and up, have the same order, as GPTQ gives them.
    """
    rng = np.random.default_rng(7)
    plain, dense = (llm_models.tensors(config, group=group) for _ in range(2))
    orders: dict[str, np.ndarray] = {}
    for name in llm_models.linears(config):
        w = numbers(plain, name, group)
        site = f"{name.rpartition('.')[0]}.{len(w.codes)}" if shared and "o_proj" not in name else name
        g_idx = orders.setdefault(site, rng.permutation(w.g_idx))
        w = Packed(w.codes, w.zeros, w.scales, group, g_idx)
        for named in (plain, dense):
            for part in AWQ:
                del named[f"{name}.{part}"]
        plain |= {f"{name}.{part}": array for part, array in packers.gptq(w, 2).items()}
        dense[f"{name}.weight"] = np.ascontiguousarray(w.dense().T)
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": True}
    quantization["checkpoint_format"] = "gptq_v2"
    for folder, named, more in ((path, plain, {"quantization_config": quantization}), (path / "dense", dense, {})):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(named, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **more}))
    return path


def logits(path: Path, ops: Any, **options: Any) -> np.ndarray:
    files = llm.read(path)
    model = build_model(files, ops(files.config, **options))
    return logits_of(model, IDS, 6, *[1] * (len(IDS) - 6))  # a prompt of six tokens, then decode steps


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_an_act_order_model_gives_the_logits_of_its_dense_weights(tmp_path: Path, expand: bool, shared: bool) -> None:
    path = act_order_files(tmp_path, llm_models.QWEN2, shared=shared)
    found, wanted = (logits(p, NumpyOps, expand_weights=expand) for p in (path, path / "dense"))
    assert np.abs(found - wanted).max() <= 5e-3 * np.abs(wanted).max()


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("shared", [False, True])
def test_an_act_order_model_on_the_gpu_back_end(tmp_path: Path, shared: bool) -> None:
    path = act_order_files(tmp_path, llm_models.QWEN2, shared=shared)
    found = logits(path, SimulatedOps, device_index=0, dtype=FLOAT16)
    wanted = logits(path / "dense", NumpyOps)
    assert np.abs(found - wanted).max() <= 0.02 * np.abs(wanted).max()


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("m", [3, *(pytest.param(m, marks=pytest.mark.slow) for m in (1, 17))])
def test_fused_norms_write_x_in_the_order_of_the_next_layer(monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    """The GEMM before a norm stores x in the order of the GEMM after it, without a gather or a separate norm."""
    rng = np.random.default_rng(m)

    def repacked(weight: PackedWeight) -> PackedWeight:
        layout = FragmentLayout(*weight.shape, weight.group_size)
        out = np.empty(layout.nbytes, np.uint8)
        simt.run(layout.pack(device.nominal(90)), {**dict(zip(AWQ, tensors(weight), strict=True)), "out": out})
        return RepackedWeight(weight, out, 0, False)

    monkeypatch.setattr("cupy_awq.linear.repack", repacked)
    # Products run in NumPy, which needs the AWQ tensors.
    monkeypatch.setattr(RepackedWeight, "without_original", lambda weight: weight)
    order = rng.permutation(192).astype(np.int32)
    gate_up = [Module(random_weight(rng, 192, 128, 64), None, order) for _ in range(2)]
    down = [Module(random_weight(rng, 128, 192, 64), None)]
    config = llm_models.decoder(hidden_size=192)
    ops, plain = SimulatedOps(config, 0, FLOAT16), NumpyOps(config)
    entries, run = [], ops.run

    def recorded(plan: Any, **arrays: Any) -> None:
        entries.append(plan.kernel.entry)
        run(plan, **arrays)

    monkeypatch.setattr(ops, "run", recorded)
    first, second = (Norm(rng.standard_normal(192).astype(np.float32), 1e-5) for _ in range(2))
    table, tokens = rng.standard_normal((m, 192)).astype(np.float16), np.arange(m, dtype=np.int32)[None]

    def forward(ops: Any, count: int) -> np.ndarray:
        enter, leave = ops.make_projection(gate_up, gated=True), ops.make_projection(down)
        operations = [first, Project(enter), Add(leave), second, Project(enter), Add(leave), first]
        operations.append(Project(lambda x: x))  # its weight has no activation order
        return ops.make_forward(table, operations[:count])(tokens, None).astype(np.float32)

    for count in (5, 8):
        entries.clear()
        found, wanted = forward(ops, count), forward(plain, count)
        assert np.abs(found - wanted).max() <= 4e-3 * np.abs(wanted).max()
    gemm = "gemm_sm90_mma" if m <= 8 else "gemm_sm90"
    assert entries == ["embed", "rms_norm", gemm, gemm, gemm, "rms_norm"]


def test_load_gives_layers_with_an_order(tmp_path: Path) -> None:
    path = act_order_files(tmp_path, llm_models.LLAMA)
    layers, dense = (cupy_awq.load(p, device="cpu") for p in (path, path / "dense"))
    name = "model.layers.0.mlp.down_proj"
    layer = layers[name]
    assert isinstance(layer, AwqLinear)
    assert layer.order is not None
    x = np.eye(layer.shape[0], dtype=np.float32)
    np.testing.assert_allclose(layer(x), dense[f"{name}.weight"].T.astype(np.float32), rtol=2e-3, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 3, 8, 9, 16, 17, 40, 513])
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize(("k", "group"), [(256, 128), (72, 8)])
def test_layers_and_plans_with_an_order_on_the_gpu(m: int, element: np.dtype[Any], k: int, group: int) -> None:
    rng = np.random.default_rng(m)
    scales = BFLOAT16 if element == BFLOAT16 else FLOAT16
    weight, order = ordered(rng, k, 64, group, dtype=scales)
    x, residual = random_activations(rng, m, k, dtype=element), rng.standard_normal((m, 64)).astype(element)
    layer = AwqLinear(put(weight), order=put(order))
    wide = put(np.repeat(x, 2, axis=1))
    for a in (put(x), wide[:, ::2], put(np.concatenate([x, x], axis=1))[:, :k]):
        for _ in range(2):
            y = layer(a, residual=put(residual), out=nan_like((m, 64), element))
            check_product(y, x[:, order], weight, residual=residual, rounded=m > 32)
    plan = layer.plan((m, k), dtype=element)
    planned = plan(put(x), nan_like((m, 64), element))
    assert planned.get().tobytes() == layer(put(x)).get().tobytes()
    alone = AwqLinear(layer.weight, order=layer.order, keep_weight=False)
    if element != np.float32:
        check_product(alone(put(x)), x[:, order], weight, rounded=m > 32)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("element", [FLOAT16, BFLOAT16], ids=str)
def test_layers_whose_gemm_gathers_x_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, m: int, element: np.dtype[Any]
) -> None:
    """The GEMM itself gathers contiguous and strided rows of x; a separate launch gathers unaligned rows."""
    monkeypatch.setattr(gather_columns, "is_fused", lambda problem, gpu: GEMM_SM90.refusal(problem, gpu) is None)
    rng, k, n = np.random.default_rng(m), 1088, 72
    weight, order = ordered(rng, k, n, 64, dtype=element)
    x, residual = random_activations(rng, m, k, dtype=element), rng.standard_normal((m, n)).astype(element)
    layer = AwqLinear(put(weight), order=put(order))
    unaligned = put(np.concatenate([x[:1, :1].reshape(-1), x.reshape(-1)]))[1:].reshape(m, k)
    for a in (put(x), put(np.concatenate([x, x], axis=1))[:, :k], unaligned):
        plan = layer.plan(a, residual=put(residual))
        assert (plan.workspace_bytes == 0) == (a is not unaligned)
        for run in (layer, layer, plan):
            out = nan_like((m, n), element)
            y = run(a, out=out, residual=put(residual)) if run is layer else plan(a, out, residual=put(residual))
            check_product(y, x[:, order], weight, residual=residual)


@pytest.mark.gpu
def test_a_captured_chain_of_layers_with_orders() -> None:
    """In a CUDA graph, each plan gathers the preceding plan's result, and all plans share one workspace."""
    import cupy

    rng = np.random.default_rng(0)
    layers = [ordered(rng, 256, 256, 64) for _ in range(4)]
    on_gpu = [AwqLinear(put(weight), order=put(order)) for weight, order in layers]
    plans = [layer.plan((4, 256)) for layer in on_gpu]
    arrays = [put(np.zeros((4, 256), np.float16)) for _ in range(5)]
    stream = cupy.cuda.Stream(non_blocking=True)
    workspace = cupy.zeros(max(plan.workspace_bytes for plan in plans), cupy.uint8)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for plan, x, y in zip(plans, arrays, arrays[1:], strict=False):
            plan(x, y, workspace=workspace)
        graph = stream.end_capture()
        for seed in range(3):
            values = random_activations(np.random.default_rng(seed), 4, 256)
            arrays[0].set(values)
            graph.launch()
            for (weight, order), x, y in zip(layers, arrays, arrays[1:], strict=False):
                check_product(y, x.get()[:, order], weight)


@pytest.mark.gpu
def test_a_captured_layer_keeps_the_memory_of_its_gathered_x() -> None:
    import cupy

    rng = np.random.default_rng(0)
    weight, order = ordered(rng, 256, 128, 64)
    layer = AwqLinear(put(weight), order=put(order))
    x, out = put(np.zeros((3, 256), np.float16)), nan_like((3, 128), FLOAT16)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        layer(x, out=out)
        graph = stream.end_capture()
        cupy.get_default_memory_pool().free_all_blocks()
        others = [cupy.full(1 << 16, 77, np.uint8) for _ in range(64)]
        values = random_activations(rng, 3, 256)
        x.set(values)
        graph.launch()
        check_product(out, values[:, order], weight)
        assert all(bool((other == 77).all()) for other in others)


@pytest.mark.gpu
def test_threads_that_share_a_stream_do_not_share_the_gathered_x() -> None:
    import cupy

    rng = np.random.default_rng(0)
    weight, order = ordered(rng, 512, 128, 64)
    layer = AwqLinear(put(weight), order=put(order))
    values = [put(random_activations(rng, 4, 512)) for _ in range(4)]
    expected = [layer(x).get().tobytes() for x in values]
    cupy.cuda.Device().synchronize()

    def work(i: int) -> bool:
        return all(layer(values[i]).get().tobytes() == expected[i] for _ in range(100))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.gpu
def test_orders_on_another_device_or_out_of_range_are_refused_on_the_gpu() -> None:
    weight = put(random_weight(np.random.default_rng(0), 16, 8, 8))
    with pytest.raises(TypeError, match=r"^order: expected an array on GPU 0 like the weight, got one on the CPU$"):
        AwqLinear(weight, order=np.arange(16, dtype=np.int32))
    with pytest.raises(ValueError, match=r"^order: expected a permutation of 0 to 15, got the index 0 0 times$"):
        AwqLinear(weight, order=put(np.arange(1, 17, dtype=np.int32)))


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
def test_an_act_order_model_on_the_gpu(tmp_path: Path, shared: bool) -> None:
    """Logits are those of the dense twin, with norms fused into GEMMs (group size 32 on Hopper) or not (16)."""
    for group, width in ((16, 96), (32, 128)):
        config = {**llm_models.QWEN2, "intermediate_size": width}
        path = act_order_files(tmp_path / str(group), config, shared=shared, group=group)
        found, wanted = logits(path, CudaOps, device_index=0, dtype=FLOAT16), logits(path / "dense", NumpyOps)
        assert np.abs(found - wanted).max() <= 0.02 * np.abs(wanted).max()
