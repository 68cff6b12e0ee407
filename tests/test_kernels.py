# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the raw layout, through its launch plan, against float64 formulas: simulated and on the GPU."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_awq import device, select
from cupy_awq.kernels.dequantize import Dequantization
from cupy_awq.kernels.gemm_sm90 import layout as repacking
from cupy_awq.kernels.gemm_sm90_large import GemmSm90Large
from cupy_awq.kernels.problem import Config, Problem, Strides
from cupy_awq.launch_plan import LaunchPlan
from cupy_awq.packing import unpack_int4
from cupy_awq.testing import random_activations, random_weight
from cupy_awq.weight import PackedWeight
from tests.backends import BACKENDS, LANDINGS, Buffers, Run, runner
from tests.test_reference import float64_weight

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
BOUNDS = {"float16": 5e-4, "bfloat16": 4e-3, "float32": 2e-6}
ARCHS = (60, 75, 80, 90)


def facts(arch: int, backend: str) -> device.Device:
    """The device of a test: on a GPU its own facts with the architecture path lowered."""
    if backend == "gpu":
        own = device.current()
        return replace(own, arch=min(arch, own.native))
    return device.nominal(arch)


def strided(a: np.ndarray, extra: int) -> np.ndarray:
    """The same matrix with ``extra`` elements, all NaN or ones, between its rows."""
    wide = np.full((a.shape[0], a.shape[1] + extra), 255 if a.dtype.kind in "iu" else np.nan, a.dtype)
    wide[:, : a.shape[1]] = a
    return wide[:, : a.shape[1]]


WHOLE = -1
"""Between rows as many elements as bring the next one to a multiple of 16 bytes."""


def padded(problem: Problem, extra: int) -> Problem:
    """The problem of contiguous arrays with ``extra`` elements between their rows."""
    if extra == WHOLE:
        # 16 bytes are four words, and eight values of what this is for.
        contiguous = problem.row_strides
        units = Strides(8, 4, 8, 8 if problem.zeros == "float" else 4, 8, 8)
        whole = (step + -step % unit for step, unit in zip(contiguous, units, strict=True))
        return replace(problem, strides=Strides(*whole))
    itemsize = DTYPES[problem.dtype].itemsize
    n_out = problem.n // 2 if problem.gated else problem.n
    steps = (problem.n // 8 + extra) * 4, (problem.n + extra) * 2, (n_out + extra) * itemsize
    x_step = (problem.k + extra) * itemsize
    return replace(problem, aligned=not any(step % 16 for step in steps), x_aligned=x_step % 16 == 0)


def expected(problem: Problem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, residual: np.ndarray | None):
    """y in float64, and the size of what was summed."""
    x64 = x.astype(np.float64)
    y = x64 @ w
    if bias is not None:
        y = y + bias.astype(np.float64)

    def activate(v: np.ndarray) -> np.ndarray:
        if problem.activation == "clamp":
            return np.clip(v, *problem.limits)
        if problem.activation == "silu":
            return v / (1 + np.exp(-v))
        if problem.activation == "gelu":
            return 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))
        return v

    if problem.gated:
        gate, up = np.split(y, 2, axis=1)
        y = activate(gate) * up
    else:
        y = activate(y)
    if residual is not None:
        y = y + residual.astype(np.float64)
    return y, np.sqrt((x64**2).sum(1, keepdims=True) * (w**2).sum(0).mean())


def repack(run: Run, problem: Problem, weight: PackedWeight, facts: device.Device) -> np.ndarray:
    """The weight of a problem in Hopper's layout, of bytes that are all ones before."""
    layout = repacking(problem)
    out = np.full(layout.nbytes, 255, np.uint8)
    tensors = {"qweight": weight.qweight, "scales": weight.scales, "qzeros": weight.qzeros}
    run(layout.plan(facts), {**tensors, "out": out})
    return out


def residual_stream(problem: Problem, rng: np.random.Generator) -> dict[str, np.ndarray | None]:
    """A product's part of a decoder's residual stream, with NaN wherever it must write."""
    before = rng.uniform(16, 640, problem.m).astype(np.float32)
    stream: dict[str, np.ndarray | None] = dict.fromkeys(("h", "norm", "squares", "inverse"))
    if problem.stream == "adds":
        stream["h"] = rng.standard_normal((problem.m, problem.n)).astype(np.float32)
        stream["norm"] = (1 + rng.standard_normal(problem.n) / 4).astype(np.float32)
        stream["squares"] = np.full((problem.m, -(-problem.n // 32)), np.nan, np.float32)
    elif problem.stream == "norms":
        stream["squares"] = rng.uniform(1, 50, (problem.m, -(-problem.k // 32))).astype(np.float32)
        stream["inverse"] = np.full(problem.m, np.nan, np.float32)
    return {**stream, "before": before}


def check_matmul(run: Run, problem: Problem, config: Config, facts: device.Device, seed: int, pad: int = 0) -> None:
    """One launch of a configuration over random data, with NaN wherever it must write."""
    rng = np.random.default_rng(seed)
    dtype, scales_dtype = DTYPES[problem.dtype], DTYPES[problem.scales_dtype]
    weight = random_weight(rng, problem.k, problem.n, problem.group_size, dtype=scales_dtype, zeros=problem.zeros)
    x = random_activations(rng, problem.m, problem.k, dtype=dtype)
    stream = residual_stream(problem, rng)
    n_out = problem.n // 2 if problem.gated else problem.n
    bias = None
    if problem.bias_dtype:
        bias = rng.standard_normal(problem.n).astype(DTYPES[problem.bias_dtype])
    residual = rng.standard_normal((problem.m, n_out)).astype(dtype) if problem.residual else None
    repacked = repack(run, problem, weight, facts) if problem.repacked else None
    partials, counters = config.workspace(problem)

    def spaced(a: np.ndarray) -> np.ndarray:
        return strided(a, -a.shape[1] % (16 // a.itemsize) if pad == WHOLE else pad)

    arrays = {
        "x": spaced(x),
        "qweight": spaced(weight.qweight),
        "scales": spaced(weight.scales),
        "qzeros": None if weight.qzeros is None else spaced(weight.qzeros),
        "residual": None if residual is None else spaced(residual),
        "y": spaced(np.full((problem.m, n_out), np.nan, dtype)),
    }
    for name, a in arrays.items():
        if a is not None:
            a.flags.writeable = name == "y"
    strides = Strides(*(0 if a is None else a.strides[0] // a.itemsize for a in arrays.values()))
    offsets = arrays["qzeros"] if problem.zeros == "float" else None
    raw = (arrays["qweight"], arrays["scales"], offsets) if problem.raw else ()
    wide = (*raw, arrays["residual"], arrays["y"])
    aligned = all(a is None or a.strides[0] % 16 == 0 for a in wide)
    problem = replace(problem, strides=strides, aligned=aligned, x_aligned=arrays["x"].strides[0] % 16 == 0)
    scratch = {"partials": np.full(partials // 4, np.nan, np.float32), "counters": np.zeros(counters, np.uint32)}
    given = {name: None if a is None else a.astype(np.float64) for name, a in stream.items()}
    run(config.plan(problem, facts), {**arrays, **stream, "bias": bias, "weight": repacked, **scratch})
    y = arrays["y"].astype(np.float64)
    w, x = float64_weight(weight.qweight, weight.scales, weight.qzeros), x.astype(np.float64)
    if problem.stream == "norms":
        inverse = 1 / np.sqrt(given["squares"].sum(1) / problem.k + problem.eps)
        np.testing.assert_allclose(stream["inverse"], inverse, rtol=1e-5)
        x *= (inverse / given["before"] * 64)[:, None]
    reference, size = expected(problem, x, w, bias, residual)
    if problem.stream == "adds":
        # Its bits follow from those of h, which stands for all of y.
        h, factor = stream["h"].astype(np.float64), given["norm"] * given["before"][:, None] / 64
        np.testing.assert_allclose(y, h * factor, rtol=2 * BOUNDS[problem.dtype], atol=1e-7)
        squares = np.pad(h**2, ((0, 0), (0, -problem.n % 32))).reshape(problem.m, -1, 32).sum(2)
        np.testing.assert_allclose(stream["squares"], squares, rtol=1e-5)
        y, reference = h, given["h"] + reference
    assert np.isfinite(y).all(), f"{np.count_nonzero(~np.isfinite(y))} elements were not written"
    assert np.linalg.norm(y - reference) <= BOUNDS[problem.dtype] * np.linalg.norm(size + np.abs(reference))
    # One wrong column or row would vanish in a norm over many.
    assert (np.abs(y - reference) <= 20 * BOUNDS[problem.dtype] * (size + np.abs(reference))).all()
    assert not scratch["counters"].any(), "the counters must be left as they were found"


def families(problem: Problem, facts: device.Device) -> dict[str, list[Config]]:
    found = select.candidates(problem, facts)
    return {name: configs for name, configs in found.items() if not isinstance(configs, str)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("m", [1, 3, 16, 70])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_legal_configuration(backend: str, arch: int, m: int, dtype: str) -> None:
    """All tiles and splits of all families, on a shape whose last tiles are partly empty in M, N and K."""
    scales_dtype = "bfloat16" if dtype == "bfloat16" else "float16"
    problem = Problem(m, 224, 192, 64, dtype, scales_dtype)
    here = facts(arch, backend)
    for configs in families(problem, here).values():
        for config in configs:
            if config.splits in (1, 3, 4):
                check_matmul(runner(backend), problem, config, here, seed=m)


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("arch", ARCHS)
@given(data=st.data())
@settings(max_examples=6)
def test_any_problem_on_any_kernel(backend: str, arch: int, data: st.DataObject) -> None:
    """Shapes, group sizes, zeros, epilogues, strides and misalignment, drawn; every family that takes the problem."""
    group_size = data.draw(st.sampled_from([1, 3, 8, 16, 24, 32, 48, 64, 128]))
    gated = data.draw(st.booleans())
    pad = data.draw(st.sampled_from([0, 1, 8]))
    problem = Problem(
        m=data.draw(st.sampled_from([1, 2, 5, 17])),
        n=data.draw(st.integers(1, 18)) * (16 if gated else 8),
        k=group_size * data.draw(st.integers(1, max(1, 160 // group_size))),
        group_size=group_size,
        dtype=data.draw(st.sampled_from(list(DTYPES))),
        scales_dtype=data.draw(st.sampled_from(["float16", "bfloat16"])),
        zeros=data.draw(st.sampled_from(["packed", "symmetric", "float"])),
        bias_dtype=data.draw(st.sampled_from([None, *DTYPES])),
        residual=data.draw(st.booleans()),
        activation=data.draw(st.sampled_from([None, "clamp", "silu", "gelu"])),
        limits=(-0.5, 0.75),
        gated=gated,
    )
    here = facts(arch, backend)
    for configs in families(padded(problem, pad), here).values():
        config = data.draw(st.sampled_from(configs[:8]))
        check_matmul(runner(backend), problem, config, here, seed=data.draw(st.integers(0, 99)), pad=pad)


@pytest.mark.parametrize("backend", [*LANDINGS[:2], pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.sm90])])
@given(data=st.data())
@settings(max_examples=8)
def test_few_rows_of_any_problem(backend: str, data: st.DataObject) -> None:
    """Parts of K with many, few and no steps, groups that end inside them, all clusters, partly empty tiles."""
    group_size = data.draw(st.sampled_from([32, 64, 96, 128, 256]))
    gated = data.draw(st.booleans())
    problem = Problem(
        m=data.draw(st.sampled_from([1, 2, 7, 8, 9, 16])),
        n=data.draw(st.integers(1, 5)) * 64 if gated else data.draw(st.integers(1, 36)) * 8,
        k=group_size * data.draw(st.integers(1, 4096 // group_size)),
        group_size=group_size,
        dtype=data.draw(st.sampled_from(["float16", "bfloat16"])),
        scales_dtype=data.draw(st.sampled_from(["float16", "bfloat16"])),
        zeros=data.draw(st.sampled_from(["packed", "symmetric", "float"])),
        bias_dtype=data.draw(st.sampled_from([None, "float16", "float32"])),
        residual=data.draw(st.booleans()),
        activation=data.draw(st.sampled_from([None, "clamp", "silu", "gelu"])),
        limits=(-0.5, 0.75),
        gated=gated,
        constant=data.draw(st.booleans()),
    )
    pad = data.draw(st.sampled_from([WHOLE] if problem.n % 32 else [0, 8, WHOLE]))
    here = facts(90, backend)
    family = select.FAMILIES["gemm_sm90_raw"]
    assert family.refuse(padded(problem, pad), here) is None
    config = data.draw(st.sampled_from(family.configs(padded(problem, pad), here)))

    def run(plan: LaunchPlan, buffers: Buffers) -> None:
        """Without the shared memory that a launch asks for only to keep other blocks away."""
        assert plan.shared_bytes >= config.shared_bytes
        runner(backend)(replace(plan, shared_bytes=config.shared_bytes), buffers)

    check_matmul(run, problem, config, here, seed=data.draw(st.integers(0, 99)), pad=pad)


def rounded_once(w: np.ndarray, dtype: str) -> np.ndarray:
    """A float64 weight rounded to ``dtype``, in float64 again."""
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":
            # ml_dtypes rounds through float32: rounding to odd there first leaves one rounding in all.
            short = w.astype(np.float32)
            toward_zero = np.where(np.abs(short) > np.abs(w), np.nextafter(short, np.float32(0)), short)
            bits = toward_zero.view(np.uint32) | (toward_zero != w)
            w = bits.astype(np.uint32).view(np.float32)
        return w.astype(DTYPES[dtype]).astype(np.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", list(DTYPES))
@given(data=st.data())
@settings(max_examples=5)
def test_dequantize_gives_the_formulas_bits(backend: str, arch: int, dtype: str, data: st.DataObject) -> None:
    """Bit for bit (but for the sign of zero), with scales down to subnormal and up to overflowing ones."""
    group_size = data.draw(st.sampled_from([1, 5, 8, 16, 64]))
    k, n = group_size * data.draw(st.integers(1, 5)), 8 * data.draw(st.sampled_from([1, 3, 20, 130]))
    scales_dtype = data.draw(st.sampled_from(["float16", "bfloat16"]))
    zeros = data.draw(st.sampled_from(["packed", "symmetric", "float"]))
    pad = data.draw(st.sampled_from([0, 1, 8]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    weight = random_weight(rng, k, n, group_size, dtype=DTYPES[scales_dtype], zeros=zeros)
    spread = np.float64(2) ** rng.integers(-22, 12, weight.scales.shape)
    scales = (weight.scales.astype(np.float64) * spread).astype(weight.scales.dtype)
    qzeros = weight.qzeros
    arrays = {
        "qweight": strided(weight.qweight, pad),
        "scales": strided(scales, pad),
        "qzeros": None if qzeros is None else strided(qzeros, pad),
        "out": strided(np.full((k, n), np.nan, DTYPES[dtype]), pad),
    }
    strides = tuple(0 if a is None else a.strides[0] // a.itemsize for a in arrays.values())
    aligned = (n + pad) % 8 == 0
    problem = Dequantization(k, n, group_size, scales_dtype, zeros, dtype, aligned, strides)  # type: ignore[arg-type]
    runner(backend)(problem.plan(facts(arch, backend)), arrays)
    wanted = rounded_once(float64_weight(weight.qweight, scales, qzeros), dtype)
    np.testing.assert_array_equal(arrays["out"].astype(np.float64), wanted)


@pytest.mark.parametrize("backend", [*LANDINGS[:2], pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.sm90])])
@given(data=st.data())
@settings(max_examples=12)
def test_any_repacked_problem(backend: str, data: st.DataObject) -> None:
    """The Hopper family: rows on both sides of each tile, partly empty tiles, group sizes, zeros, epilogues."""
    group_size = data.draw(st.sampled_from([32, 64, 128, 192]))
    gated = data.draw(st.booleans())
    problem = Problem(
        m=data.draw(st.sampled_from([1, 2, 7, 8, 9, 16, 17, 33, 65, 130])),
        n=data.draw(st.integers(1, 5)) * 64 if gated else data.draw(st.integers(1, 40)) * 8,
        k=group_size * data.draw(st.integers(1, 1 if group_size == 192 else 512 // group_size)) // 64 * 64 or 64,
        group_size=group_size,
        dtype=data.draw(st.sampled_from(["float16", "bfloat16"])),
        scales_dtype=data.draw(st.sampled_from(["float16", "bfloat16"])),
        zeros=data.draw(st.sampled_from(["packed", "symmetric"])),
        bias_dtype=data.draw(st.sampled_from([None, "float16", "float32"])),
        residual=data.draw(st.booleans()),
        activation=data.draw(st.sampled_from([None, "clamp", "silu", "gelu"])),
        limits=(-0.5, 0.75),
        gated=gated,
        repacked=True,
        scale_exponent=data.draw(st.sampled_from([0, 3, 8])),
        wide_scales=data.draw(st.booleans()),
    )
    here = facts(90, backend)
    configs = select.FAMILIES["gemm_sm90"].configs(problem, here)
    ranked = sorted(configs, key=lambda config: (config.scaled, config.microseconds(problem, here)))
    config = data.draw(st.sampled_from(ranked[:20] + [config for config in ranked if config.scaled][:20]))
    pad = data.draw(st.sampled_from([0, 8]))
    check_matmul(runner(backend), problem, config, here, seed=data.draw(st.integers(0, 99)), pad=pad)


@pytest.mark.parametrize("backend", [LANDINGS[0], pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.sm90])])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(("k", "dtype"), [(320, "float16"), (1088, "bfloat16")])
def test_few_rows_of_one_group_a_record(backend: str, m: int, k: int, dtype: str) -> None:
    """Sums of x by parts of K, of every depth and number of splits."""
    problem = Problem(m, 72, k, k, dtype, repacked=True)
    here = facts(90, backend)
    configs = {(c.depth, c.splits): c for c in select.FAMILIES["gemm_sm90"].configs(problem, here) if c.records == 2}
    assert {depth for depth, _ in configs} >= {1, 2}
    assert {splits for _, splits in configs} == {1, 2}
    for config in configs.values():
        check_matmul(runner(backend), problem, config, here, seed=k)


@pytest.mark.parametrize("backend", [LANDINGS[0], pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.sm90])])
@pytest.mark.parametrize(("m", "group_size"), [(4, 128), (6, 64), (16, 32)])
def test_few_rows_by_every_width_of_a_team(backend: str, m: int, group_size: int) -> None:
    """A team of any number of warps copies whole rows of x, in turns."""
    problem = Problem(m, 264, 1152, group_size, repacked=True)
    here = facts(90, backend)
    family = select.FAMILIES["gemm_sm90"]
    configs = {(c.records, c.depth): c for c in family.configs(problem, here) if c.name == "gemm_sm90_mma"}
    assert {records for records, _ in configs} == {1, 2, 3, 4, 6, 7, 8}
    for config in configs.values():
        check_matmul(runner(backend), problem, config, here, seed=m)


@pytest.mark.parametrize("backend", [LANDINGS[0], pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.sm90])])
@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize("splits", [1, 2])
def test_blocks_that_only_keep_a_place(backend: str, m: int, splits: int) -> None:
    problem = Problem(m, 632, 256, 128, repacked=True)
    here = replace(facts(90, backend), sm_count=11 * splits)
    configs = select.FAMILIES["gemm_sm90"].configs(problem, here)
    config = next(c for c in configs if (c.records, c.splits) == (2, splits))
    assert config.grid(problem)[0] == 10 * splits
    assert config.plan(problem, here).grid == (11 * splits, 1, 1)
    assert config.plan(replace(problem, m=200), here).grid[0] == 10 * splits  # more rows than a tile has
    check_matmul(runner(backend), problem, config, here, seed=m)


@pytest.mark.parametrize("backend", [*LANDINGS[:2], pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.sm90])])
@pytest.mark.parametrize(
    ("m", "dtype", "k", "group_size", "scaled", "depths"),
    [
        (12, "float16", 2112, 64, False, {1, 2, 4}),
        (12, "bfloat16", 2112, 64, False, {1, 2, 4}),
        (40, "float16", 2112, 64, False, {1, 2}),
        (40, "float16", 2176, 128, True, {1, 2}),
        (40, "bfloat16", 2176, 128, True, {1, 2}),
        (40, "float16", 2112, 64, True, {1}),
    ],
)
def test_stages_of_several_steps(
    backend: str, m: int, dtype: str, k: int, group_size: int, scaled: bool, depths: set[int]
) -> None:
    """Every depth and number of teams, round the fewest stages several times; K ends within a stage (and a record)."""
    # Many rows by short groups are scaled wherever float16 holds the scales.
    problem = Problem(m, 128, k, group_size, dtype, dtype, repacked=True, wide_scales=not scaled)
    here = facts(90, backend)
    configs = {
        (c.depth, c.teams): replace(c, stages=c.teams * (2 if scaled or c.teams == 1 else 1))
        for c in select.FAMILIES["gemm_sm90"].configs(problem, here)
        if c.name == "gemm_sm90" and c.records == (4 if c.depth == 4 else 2) and (c.splits, c.scaled) == (1, scaled)
    }
    assert {depth for depth, _ in configs} == depths
    for config in configs.values():
        check_matmul(runner(backend), problem, config, here, seed=m)


@pytest.mark.parametrize("backend", [LANDINGS[0], pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.sm90])])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_stays_in_its_row_of_x(backend: str, value: float) -> None:
    """Two rows share instructions that sum x."""
    problem, run, here = Problem(2, 64, 256, 128, repacked=True), runner(backend), facts(90, backend)
    rng = np.random.default_rng(0)
    weight, x = random_weight(rng, 256, 64, 128), random_activations(rng, 2, 256)
    repacked = repack(run, problem, weight, here)
    plan = select.choose(problem, here, "gemm_sm90").plan
    assert plan.kernel.entry == "gemm_sm90_mma"
    found = []
    for row in (None, 0, 1):
        damaged, y = x.copy(), np.zeros((2, 64), np.float16)
        if row is not None:
            damaged[row, 77] = value
        run(plan, {"weight": repacked, "bias": None, "residual": None, "y": y, "x": damaged})
        found.append(y)
    for row in (0, 1):
        assert not np.isfinite(found[row + 1][row]).any()
        np.testing.assert_array_equal(found[row + 1][1 - row], found[0][1 - row])


@pytest.mark.parametrize("backend", [*LANDINGS[:2], pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.sm90])])
@given(data=st.data())
@settings(max_examples=12)
def test_any_product_that_keeps_a_residual_stream(backend: str, data: st.DataObject) -> None:
    stream = data.draw(st.sampled_from(["adds", "norms"]))
    gated = stream == "norms" and data.draw(st.booleans())
    k = data.draw(st.sampled_from([64, 128, 192, 512, 1088]))
    problem = Problem(
        m=data.draw(st.sampled_from([1, 2, 3, 7, 16, 20, 32])),
        n=data.draw(st.integers(1, 5)) * 64 if gated else data.draw(st.integers(1, 40)) * 8,
        k=k,
        group_size=data.draw(st.sampled_from([64, k])),
        dtype=data.draw(st.sampled_from(["float16", "bfloat16"])),
        zeros=data.draw(st.sampled_from(["packed", "symmetric"])),
        bias_dtype=data.draw(st.sampled_from([None, "float32"])),
        activation="silu" if gated else None,
        gated=gated,
        raw=False,
        repacked=True,
        stream=stream,
        eps=data.draw(st.sampled_from([1e-6, 0.5])),
    )
    here = facts(90, backend)
    found = families(problem, here)
    assert list(found) == ["gemm_sm90"]
    config = data.draw(st.sampled_from(found["gemm_sm90"]))
    check_matmul(runner(backend), problem, config, here, seed=data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("backend", [*LANDINGS[:2], pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.sm90])])
@given(data=st.data())
@settings(max_examples=8)
def test_many_rows_of_any_repacked_problem(backend: str, data: st.DataObject) -> None:
    """Persistent blocks, few of them: several tiles a block, tiles that clusters share along K, partly empty tiles."""
    group_size = data.draw(st.sampled_from([32, 64, 128, 192]))
    gated = data.draw(st.booleans())
    problem = Problem(
        m=data.draw(st.sampled_from([40, 128, 140, 300])),
        n=data.draw(st.integers(1, 11)) * 64 if gated else data.draw(st.integers(1, 88)) * 8,
        k=group_size * data.draw(st.integers(1, 1 if group_size == 192 else 768 // group_size)) // 64 * 64 or 64,
        group_size=group_size,
        dtype=data.draw(st.sampled_from(["float16", "bfloat16"])),
        scales_dtype=data.draw(st.sampled_from(["float16", "bfloat16"])),
        zeros=data.draw(st.sampled_from(["packed", "symmetric"])),
        bias_dtype=data.draw(st.sampled_from([None, "float16", "float32"])),
        residual=data.draw(st.booleans()),
        activation=data.draw(st.sampled_from([None, "clamp", "silu", "gelu"])),
        limits=(-0.5, 0.75),
        gated=gated,
        repacked=True,
        scale_exponent=data.draw(st.sampled_from([0, 3, 8])),
    )
    here = replace(facts(90, backend), sm_count=data.draw(st.sampled_from([2, 4, 7])))
    family = GemmSm90Large()
    assert family.refuse(problem, here) is None
    config = data.draw(st.sampled_from(sorted(family.configs(problem, here), key=lambda config: -config.splits)))
    pad = data.draw(st.sampled_from([0, 8]))
    check_matmul(runner(backend), problem, config, here, seed=data.draw(st.integers(0, 99)), pad=pad)


@pytest.mark.parametrize("backend", [LANDINGS[0], pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.sm90])])
@pytest.mark.parametrize("scales_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["gemm_sm90", "gemm_sm90_large"])
def test_scaled_weights_are_rounded_once(backend: str, family: str, dtype: str, scales_dtype: str) -> None:
    """Bit for bit (but for the sign of zero), as ones at the places of x show."""
    problem = Problem(192, 136, 192, 64, dtype, scales_dtype, repacked=True, scale_exponent=3)
    here, run, rng = facts(90, backend), runner(backend), np.random.default_rng(0)
    weight = random_weight(rng, problem.k, problem.n, problem.group_size, dtype=DTYPES[scales_dtype])
    spread = np.float64(2) ** rng.integers(-8, 3, weight.scales.shape)
    scales = (weight.scales.astype(np.float64) * spread).astype(weight.scales.dtype)
    weight = PackedWeight(weight.qweight, scales, weight.qzeros)
    x = np.eye(problem.k).astype(DTYPES[dtype])
    w = rounded_once(float64_weight(weight.qweight, weight.scales, weight.qzeros), dtype)
    repacked = repack(run, problem, weight, here)
    configs = {
        (config.block_m, config.tiles): config
        for config in select.FAMILIES[family].configs(problem, here)
        if config.splits == 1 and getattr(config, "scaled", True)
    }
    assert configs
    for config in configs.values():
        y = np.full((problem.m, problem.n), np.nan, DTYPES[dtype])
        none = dict.fromkeys(("bias", "residual", "partials", "counters"))
        run(config.plan(problem, here), {**none, "x": x, "y": y, "weight": repacked})
        np.testing.assert_array_equal(y.astype(np.float64), w)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("zeros", ["packed", "symmetric"])
@pytest.mark.parametrize(("k", "n", "group_size"), [(128, 128, 128), (320, 72, 64), (192, 264, 32), (192, 8, 192)])
def test_repacking_keeps_every_code_scale_and_zero(backend: str, zeros: str, k: int, n: int, group_size: int) -> None:
    weight = random_weight(np.random.default_rng(k), k, n, group_size, zeros=zeros)
    layout = repacking(Problem(1, n, k, group_size, zeros=zeros))
    out = np.full(layout.nbytes, 255, np.uint8)
    arrays = {"qweight": weight.qweight, "scales": weight.scales, "qzeros": weight.qzeros, "out": out}
    runner(backend)(layout.plan(facts(90, backend)), arrays)
    codes, scales, points = layout.unpack(out)
    np.testing.assert_array_equal(codes, unpack_int4(weight.qweight))
    np.testing.assert_array_equal(scales, weight.scales.view(np.uint16))
    if points is not None:
        np.testing.assert_array_equal(points, unpack_int4(weight.qzeros))
