# SPDX-License-Identifier: Apache-2.0
"""The kernels of a mixture of experts against float64 formulas, on the simulator and on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupy_awq
from cupy_awq import MoeLayer, PackedExperts
from cupy_awq.expert_check import EXPERT_ACTIVATIONS
from cupy_awq.kernels.experts.expert_gemm import EXPERT_GEMM
from cupy_awq.kernels.experts.expert_gemm_sm90 import EXPERT_GEMM_SM90
from cupy_awq.kernels.experts.expert_gemm_tiles import EXPERT_GEMM_TILES
from cupy_awq.kernels.experts.layer import BLOCKS, ExpertLayer, list_steps, modelled_us, plan_layer
from cupy_awq.kernels.experts.problem import ExpertProduct
from cupy_awq.kernels.experts.routing import CHOOSE_EXPERTS, ROUTE_TOKENS, ExpertChoice, TokenRouting
from cupy_awq.kernels.family import AnyFamily, SoleConfig
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device
from cupy_awq.runtime.device import Device
from tests.backends import BACKENDS, GPU, LANDINGS, Run, fewer, runner, sample
from tests.experts import (
    error_of,
    float64_layer,
    float64_rows,
    float64_topk,
    form_of,
    on_gpu,
    random_experts,
    repack_experts,
    run_steps,
    sort_rows,
)
from tests.test_kernels import BOUNDS, DTYPES, facts

Array = Any
MMA_FAMILIES: tuple[AnyFamily, ...] = (EXPERT_GEMM, EXPERT_GEMM_TILES, EXPERT_GEMM_SM90)


def mma_candidates(problem: ExpertProduct, here: Device) -> list[tuple[AnyFamily, Any]]:
    """Return (family, configuration) of the tensor-core kernels, which read repacked weights, for a problem."""
    families = (family for family in MMA_FAMILIES if family.refusal(problem, here) is None)
    return [(family, config) for family in families for config in family.configs(problem, here)]


def check_product(
    run: Run,
    problem: ExpertProduct,
    choice: tuple[AnyFamily, Any],
    here: Device,
    rng: np.random.Generator,
    bias: str | None = None,
    size: float = 1.0,
) -> None:
    """Launch one configuration on random data and compare y with float64; NaN stands wherever it must write."""
    weight = random_experts(
        rng, problem.experts, problem.k, problem.n, problem.group_size, zeros=problem.zeros,
        dtype=DTYPES[problem.scales_dtype], bias=None if bias is None else DTYPES[bias],
    )  # fmt: skip
    tokens = problem.pairs // problem.top_k
    ids = rng.integers(-1 if problem.rows != "sorted" else 0, problem.experts, (tokens, problem.top_k)).astype(np.int32)
    rows = problem.pairs if problem.x_divisor == 1 else tokens
    x = (size * rng.standard_normal((rows, problem.k))).astype(DTYPES[problem.dtype])
    scale = rng.uniform(0.5, 1.5, problem.pairs).astype(np.float32)
    fragments, form = repack_experts(run, weight, here)
    problem = replace(problem, scale_exponent=form.scale_exponent, bias_dtype=bias)
    activation = {None: None, "silu": "swiglu", "gelu": "geglu", "clampedsilu": "clamped_swiglu"}[problem.activation]
    expected = float64_rows(np.repeat(x, problem.x_divisor, 0), ids.reshape(-1), weight, activation)
    if problem.row_weights:
        expected = expected * scale[:, None]
    shared = None
    if problem.rows == "tokens":
        expected = expected.reshape(tokens, problem.top_k, -1).sum(axis=1)
        if problem.shared:
            shared = rng.standard_normal(expected.shape).astype(x.dtype)
            expected = expected + shared.astype(np.float64)
    routing: dict[str, Array] = {"experts": ids.reshape(-1), "sorted_pairs": None, "sorted_count": None}
    if problem.rows == "sorted":
        routing = sort_rows(run, ids, problem.experts, problem.block, here)
    family, config = choice
    needed = family.workspace(config, problem)
    partials, counters = np.full(needed.partial_bytes // 4, np.nan, np.float32), np.zeros(needed.counters, np.uint32)
    y = np.full(expected.shape, np.nan, x.dtype)
    operands = {"weight": fragments, "bias": weight.bias, "row_weights": scale, "shared": shared, "x": x, "y": y}
    run(family.plan(config, problem, here), {**operands, **routing, "partials": partials, "counters": counters})
    assert error_of(y, expected) < BOUNDS[problem.dtype]
    assert not counters.any()


@pytest.mark.parametrize("backend", LANDINGS)
@given(data=st.data())
@settings(max_examples=3)
def test_any_product(backend: str, data: st.DataObject) -> None:
    """Products are right for every group size, form of zero points, dtype and epilogue.

    Some experts have no rows, and K may end within a weight tile (128 k).
    """
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows = data.draw(st.sampled_from(["sorted", "pairs", "tokens"]))
    gated = rows != "tokens" and data.draw(st.booleans())
    group_size = data.draw(st.sampled_from([16, 32, 64, 128]))
    arch = data.draw(st.sampled_from([75, 80, 90] if rows == "sorted" else [80, 90]))
    zeros = data.draw(st.sampled_from(["packed", "symmetric", *(["float"] if rows == "sorted" else [])]))
    step = 8 if not gated else 32 if arch > 75 and zeros != "float" else 64
    top_k = data.draw(st.sampled_from([1, 2, 3]))
    problem = ExpertProduct(
        rows,
        top_k * data.draw(st.sampled_from([1, 2, 5, 17])),
        data.draw(st.sampled_from([1, 2, 5])),
        n=data.draw(st.integers(1, 192 // step)) * step,
        k=max(group_size, data.draw(st.sampled_from([64, 320, 704])) // group_size * group_size),
        group_size=group_size,
        dtype=data.draw(st.sampled_from(["float16", "bfloat16"])) if arch > 75 else "float16",
        scales_dtype=data.draw(st.sampled_from(["float16", "bfloat16"])),
        zeros=zeros,
        block=data.draw(st.sampled_from([8, 16, 32, 48, 64])),
        top_k=top_k,
        x_divisor=data.draw(st.sampled_from([1, top_k])) if rows != "tokens" else 1,
        activation=data.draw(st.sampled_from(["silu", "gelu", "clampedsilu"])) if gated else None,
        gated=gated,
        row_weights=data.draw(st.booleans()),
        shared=rows == "tokens" and data.draw(st.booleans()),
        layout="fragments",
    )
    here = replace(facts(arch, backend), sm_count=data.draw(st.sampled_from([1, 3])))
    choice = data.draw(st.sampled_from(mma_candidates(problem, here)))
    check_product(runner(backend), problem, choice, here, rng, data.draw(st.sampled_from([None, "float32"])))


@pytest.mark.parametrize("backend", [LANDINGS[0], GPU])
@pytest.mark.parametrize(
    "block", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 32, 48, 64, 80, 96, 128))]
)
@pytest.mark.parametrize(("arch", "zeros"), [(80, "packed"), (80, "float"), (75, "packed")])
def test_every_tile(backend: str, block: int, arch: int, zeros: str) -> None:
    """Each layout of warps is right once: with units that have one to all of their rows, and CTAs with several units.

    A unit is a block of rows of one expert times the columns of a tile.
    """
    problem = ExpertProduct(
        "sorted", 3 * block + 5, 3, 192, 704, 64, zeros=zeros, block=block, activation="silu", gated=True,
        layout="fragments",
    )  # fmt: skip
    here = replace(facts(arch, backend), sm_count=2)
    for family, config in mma_candidates(problem, here):
        if config.block_m == block:
            check_product(runner(backend), problem, (family, config), here, np.random.default_rng(block))


@pytest.mark.parametrize("backend", [LANDINGS[0], GPU])
@pytest.mark.parametrize("family", MMA_FAMILIES, ids=lambda family: family.NAME)
def test_clamped_swiglu_of_large_values(backend: str, family: AnyFamily) -> None:
    """Results are right where the clamp decides: most values of gate and up are beyond its limits."""
    here = replace(facts(90 if family is EXPERT_GEMM_SM90 else 80, backend), sm_count=2)
    problem = ExpertProduct(
        "sorted", 20, 3, 64, 128, 64, block=16, activation="clampedsilu", gated=True, layout="fragments"
    )
    choice = family, family.configs(problem, here)[0]
    check_product(runner(backend), problem, choice, here, np.random.default_rng(0), "float32", size=30)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("from_offsets", [False, True])
@pytest.mark.parametrize(
    ("arch", "pairs", "experts", "block"),
    [(60, 1, 1, 8), (75, 700, 40, 16), (80, 5, 300, 64), (90, 90, 3, 1), (90, 2100, 40, 16), (80, 4200, 40, 16)],
)
def test_sort(backend: str, from_offsets: bool, arch: int, pairs: int, experts: int, block: int) -> None:
    rng, here = np.random.default_rng(pairs), facts(arch, backend)
    ids = rng.integers(-1, experts + 1, pairs).astype(np.int32)
    given_ids = ids
    if from_offsets:
        ids = np.sort(rng.integers(0, experts, pairs)).astype(np.int32)
        given_ids = np.searchsorted(ids, np.arange(experts + 1)).astype(np.int32)
    found = sort_rows(runner(backend), given_ids, experts, block, here, pairs if from_offsets else 0)
    count, rows = int(found["sorted_count"][0]), found["sorted_pairs"]
    assert count % block == 0
    seen = rows[:count].reshape(-1, block)
    for expert in range(experts):
        own = seen[found["experts"][: count // block] == expert]
        np.testing.assert_array_equal(own[own < pairs], np.flatnonzero(ids == expert))
        assert len(own) == -(-np.count_nonzero(ids == expert) // block)
    assert (rows[count:] == -7).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sort_of_invalid_offsets_stays_in_bounds(backend: str) -> None:
    offsets = np.array([0, 9, -5, 9, 0, 2**30, 3, 9], np.int32)
    found = sort_rows(runner(backend), offsets, 7, 8, facts(80, backend), 9)
    assert 0 <= found["sorted_count"][0] <= len(found["sorted_pairs"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("arch", "options"),
    [
        (60, {}),
        (75, {"scoring": "sigmoid", "bias": True, "scale": 2.5}),
        (80, {"scoring": "sigmoid", "bias": True, "groups": (8, 3)}),
        (90, {"renormalize": False, "groups": (4, 1)}),
    ],
)
def test_router(backend: str, arch: int, options: dict[str, Any]) -> None:
    """Experts and weights are those of float64; without a bias or groups, many logits are equal."""
    rng, here = np.random.default_rng(0), facts(arch, backend)
    options = {"renormalize": True, "scoring": "softmax", "groups": None, "scale": 1.0, **options}
    bias = rng.standard_normal(48).astype(np.float32) if options.pop("bias", False) else None
    logits = rng.standard_normal((5, 48)).astype(np.float32)
    if bias is None and options["groups"] is None:
        logits = logits.round()
    problem = ExpertChoice(
        5, 48, 6, "float32", options["scoring"] == "sigmoid", bias is not None, options["renormalize"],
        *(options["groups"] or (1, 1)), options["scale"], 48,
    )  # fmt: skip
    ids, weights = np.full((5, 6), -7, np.int32), np.full((5, 6), np.nan, np.float32)
    plan = CHOOSE_EXPERTS.plan(SoleConfig(), problem, here)
    runner(backend)(plan, {"logits": logits, "bias": bias, "ids": ids, "weights": weights})
    expected_ids, expected = float64_topk(logits, 6, bias=bias, **options)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("arch", "dtype", "experts", "width", "delta", "options"),
    [
        (60, "float16", 44, 72, True, {}),
        (75, "float16", 44, 72, True, {}),
        (80, "bfloat16", 44, 2056, False, {"scoring": "sigmoid", "bias": True, "groups": (4, 2)}),
        (90, "float16", 44, 2304, True, {"renormalize": False}),
        (90, "bfloat16", 300, 136, False, {}),
    ],
)
def test_norm_and_router_in_one_launch(
    backend: str, arch: int, dtype: str, experts: int, width: int, delta: bool, options: dict[str, Any]
) -> None:
    """h, x, ids and weights are those of float64, also in a second launch, which finds its counters reset."""
    rng, here, element = np.random.default_rng(width), facts(arch, backend), DTYPES[dtype]
    options = {"renormalize": True, "scoring": "softmax", "groups": None, "scale": 1.0, **options}
    has_bias = options.pop("bias", False)
    arrays: dict[str, Any] = {
        "delta": rng.standard_normal((3, width)).astype(element) if delta else None,
        "norm_weight": rng.standard_normal(width).astype(np.float32),
        "router": (rng.standard_normal((experts, width)) * width**-0.5).astype(element),
        "bias": rng.standard_normal(experts).astype(np.float32) if has_bias else None,
        "counters": np.zeros(3, np.uint32),
    }
    choice = ExpertChoice(
        3, experts, 6, "float32", options["scoring"] == "sigmoid", has_bias, options["renormalize"],
        *(options["groups"] or (1, 1)), options["scale"], experts,
    )  # fmt: skip
    plan = ROUTE_TOKENS.plan(SoleConfig(), TokenRouting(choice, width, dtype, 1e-5, delta), here)
    for _ in range(2):
        h = rng.standard_normal((3, width)).astype(np.float32)
        wanted = h + (arrays["delta"].astype(np.float32) if delta else 0)
        x, logits = np.full((3, width), np.nan, element), np.full((3, experts), np.nan, np.float32)
        ids, weights = np.full((3, 6), -7, np.int32), np.full((3, 6), np.nan, np.float32)
        written = {"h": h, "x": x, "logits": logits, "ids": ids, "weights": weights}
        runner(backend)(plan, {**arrays, **written})
        np.testing.assert_array_equal(h, wanted)
        scale = 1 / np.sqrt((wanted.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(x.astype(float), wanted * scale * arrays["norm_weight"], rtol=1e-2, atol=1e-6)
        expected_logits = x.astype(np.float64) @ arrays["router"].astype(np.float64).T
        expected_ids, expected = float64_topk(expected_logits, 6, bias=arrays["bias"], **options)
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(weights, expected, rtol=1e-4)
        assert not arrays["counters"].any()


def make_layer(
    weights: Sequence[PackedExperts], forms: Any, m: int, top_k: int, dtype: str, has_shared: bool
) -> ExpertLayer:
    k, n = weights[0].shape[1], weights[1].shape[2]
    return ExpertLayer(m, top_k, *forms, dtype, EXPERT_ACTIVATIONS["swiglu"], has_shared, k, n, n if has_shared else 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("arch", "dtype", "layout", "zeros"),
    [
        (60, "bfloat16", AWQ, "packed"),
        (75, "float16", FRAGMENTS, "packed"),
        (80, "bfloat16", AWQ, "float"),
        (80, "float16", FRAGMENTS, "packed"),
        (90, "float16", AWQ, "symmetric"),
        (90, "bfloat16", FRAGMENTS, "packed"),
    ],
)
def test_layer(backend: str, arch: int, dtype: str, layout: str, zeros: str) -> None:
    """Each way to compute a layer (some, if simulated) gives the sum over the experts, also with ids of none."""
    rng, here, run = np.random.default_rng(arch), replace(facts(arch, backend), sm_count=3), runner(backend)
    weights = [random_experts(rng, 6, *shape, 32, zeros=zeros) for shape in ((128, 128), (64, 72))]
    x, shared = (rng.standard_normal((5, n)).astype(DTYPES[dtype]) for n in (128, 72))
    ids, scale = rng.integers(-1, 7, (5, 3)).astype(np.int32), rng.uniform(0, 1, (5, 3)).astype(np.float32)
    packed = [
        repack_experts(run, weight, here) if layout == FRAGMENTS else (None, form_of(weight)) for weight in weights
    ]
    expected = float64_layer(x, ids, scale, *weights, "swiglu", shared)
    layer = make_layer(weights, [form for _, form in packed], 5, 3, dtype, True)
    ways = [steps for steps in list_steps(layer) if modelled_us(steps, here) < float("inf")]
    assert len(ways) == (2 + len(BLOCKS) if layout == FRAGMENTS and arch >= 80 else len(BLOCKS))
    for steps in [ways[0], *sample(ways[1:], backend, 3, 0)]:
        y = np.full((5, 72), np.nan, x.dtype)
        buffers = {"x": x, "ids": ids.reshape(-1), "weights": scale.reshape(-1), "shared": shared, "y": y}
        for prefix, weight, (fragments, _) in zip(("gate_up", "down"), weights, packed, strict=True):
            buffers |= {f"{prefix}.{name}": a for name, a in {**weight.buffers, "weight": fragments}.items()}
        run_steps(run, steps, buffers, here)
        assert error_of(y, expected) < 2 * BOUNDS[dtype]


@pytest.mark.parametrize("arch", fewer([60, 75, 80, 86, 90, 100, 120]))
@pytest.mark.parametrize("group_size", [16, 32, 64, 128])
def test_every_layer_has_a_plan(arch: int, group_size: int) -> None:
    here = device.nominal(arch)
    layout = "fragments" if arch >= 75 else "awq"
    for hidden, width, experts, top_k in ((2048, 768, 128, 8), (4096, 14336, 8, 2), (512, 512, 512, 10)):
        rng = np.random.default_rng(0)
        forms = [
            form_of(random_experts(rng, 1, 64, 16, 16))._replace(
                experts=experts, k=k, n=n, group_size=group_size, layout=layout
            )
            for k, n in ((hidden, 2 * width), (width, hidden))
        ]
        for m in (1, 3, 16, 100, 2000, 100_000):
            layer = ExpertLayer(m, top_k, *forms, "float16", EXPERT_ACTIVATIONS["swiglu"], False, hidden, hidden, 0)
            for plan, _ in plan_layer(layer, here).plans(here):
                assert plan.shared_bytes <= here.shared_bytes_per_block
                assert max(plan.grid[1:]) < 1 << 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dtype", "zeros"),
    [
        (75, "float16", "packed"),
        (75, "float16", "float"),
        *((80, dtype, zeros) for dtype in ("float16", "bfloat16") for zeros in ("packed", "float")),
        (90, "float16", "packed"),
        (90, "bfloat16", "packed"),
    ],
)
@pytest.mark.parametrize("group_size", [16, 128])
def test_registers_do_not_spill(arch: int, dtype: str, zeros: str, group_size: int) -> None:
    here = device.nominal(arch)
    for rows in ("pairs", "tokens", "sorted"):
        gated = {"gated": True, "activation": "silu"} if rows != "tokens" else {"row_weights": True}
        problem = ExpertProduct(
            rows, 64, 128, 1536, 2048, group_size, dtype, zeros=zeros, block=128, top_k=8, layout="fragments", **gated
        )
        for family, config in mma_candidates(problem, here):
            resources = compiler.build(family.plan(config, problem, here).kernel).resources
            assert resources is not None
            assert resources.local_bytes == 0, config


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 9, 70, 300])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("planned", [False, True])
def test_moe_on_the_gpu(m: int, dtype: str, planned: bool) -> None:
    """A captured CUDA graph gives the right layer also after the routing in its inputs has changed, with equal bits."""
    import cupy

    rng = np.random.default_rng(m)
    weights = random_experts(rng, 16, 512, 384, 128), random_experts(rng, 16, 192, 512, 64)
    loaded = [on_gpu(w, dtype) for w in weights]
    x = rng.standard_normal((m, 512)).astype(DTYPES[dtype])
    routings = [
        (rng.integers(0, 16, (m, 4)).astype(np.int32), rng.uniform(0, 1, (m, 4)).astype(np.float32)) for _ in range(3)
    ]
    device_x, ids, scale = cupy.asarray(x), cupy.asarray(routings[0][0]), cupy.asarray(routings[0][1])
    out = cupy.full((m, 512), np.nan, device_x.dtype)
    plan = MoeLayer(*loaded).plan(device_x, ids, scale, out=out)

    def run() -> None:
        plan() if planned else cupy_awq.moe(device_x, ids, scale, *loaded, out=out)

    run()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        run()
        stream.synchronize()
        stream.begin_capture()
        run()
        graph = stream.end_capture()
        for host_ids, host_scale in routings:
            found = []
            for _ in range(2):
                ids.set(host_ids)
                scale.set(host_scale)
                out.fill(np.nan)
                graph.launch(stream)
                stream.synchronize()
                found.append(cupy.asnumpy(out))
            np.testing.assert_array_equal(found[0].view(np.uint16), found[1].view(np.uint16))
            expected = float64_layer(x, host_ids, host_scale, *weights, "swiglu", None)
            assert error_of(found[0], expected) < 2 * BOUNDS[dtype]


@pytest.mark.gpu
def test_grouped_product_and_router_on_the_gpu() -> None:
    import cupy

    rng = np.random.default_rng(0)
    weight, x = random_experts(rng, 6, 256, 128, 64), rng.standard_normal((50, 256)).astype(np.float16)
    on_gpu = PackedExperts(*map(cupy.asarray, (weight.qweight, weight.scales, weight.qzeros)), keep_weight=True)
    ids = np.sort(rng.integers(0, 6, 50)).astype(np.int32)
    offsets = np.searchsorted(ids, np.arange(7)).astype(np.int32)
    for element in (np.float16, np.float32):
        y = cupy_awq.gemm_grouped(cupy.asarray(x.astype(element)), on_gpu, cupy.asarray(offsets))
        assert error_of(cupy.asnumpy(y), float64_rows(x, ids, weight, None)) < 5e-4
    logits = rng.standard_normal((50, 6)).astype(np.float32)
    for found, expected in zip(cupy_awq.topk(cupy.asarray(logits), 2), cupy_awq.topk(logits, 2), strict=True):
        np.testing.assert_allclose(cupy.asnumpy(found), expected, rtol=1e-5)
