# SPDX-License-Identifier: Apache-2.0
"""Tests of the kernels on the AWQ layout against float64 formulas, on the simulator and on the GPU."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq.activation import FUNCTIONS
from cupy_awq.check import HOST, WeightSpec
from cupy_awq.kernels import select
from cupy_awq.kernels.dequantize.dequantize import Dequantization
from cupy_awq.kernels.family import AnyFamily, Config
from cupy_awq.kernels.gemm.layouts import FragmentLayout
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, INT8_ROWS, Problem, Strides
from cupy_awq.kernels.registry import FAMILIES
from cupy_awq.ops.int8_weight import Int8Weight
from cupy_awq.runtime import device
from cupy_awq.runtime.launch_plan import LaunchPlan
from cupy_awq.tools.testing import random_activations, random_weight
from cupy_awq.weight import PackedWeight
from tests.backends import BACKENDS, HOPPER, LANDINGS, Buffers, Run, few_examples, runner, sample
from tests.test_reference import FORMULAS, float64_weight

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
BOUNDS = {"float16": 5e-4, "bfloat16": 4e-3, "float32": 2e-6}
ARCHS = (60, 75, 80, 90)


def facts(arch: int, backend: str) -> device.Device:
    """Return the GPU of a test: nominal properties of ``arch`` or, on the back end "gpu", the real one.

    The real GPU takes the kernels of the older architecture ``arch``.
    """
    if backend == "gpu":
        own = device.current()
        return replace(own, arch=min(arch, own.native))
    return device.nominal(arch)


def strided(a: np.ndarray, extra: int) -> np.ndarray:
    """Return a copy of a matrix with ``extra`` elements of NaN or 255 between its rows, so that reads there show."""
    wide = np.full((a.shape[0], a.shape[1] + extra), 255 if a.dtype.kind in "iu" else np.nan, a.dtype)
    wide[:, : a.shape[1]] = a
    return wide[:, : a.shape[1]]


WHOLE = -1
"""A value of ``extra`` in `padded`: as many elements as make every row start at a multiple of 16 bytes."""


def padded(problem: Problem, extra: int) -> Problem:
    """Return the problem with ``extra`` elements between rows, which change its strides, or the alignment of rows."""
    if extra == WHOLE:
        # Round rows up to 16 bytes: four words, or eight 16-bit values.
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
    """Return y in float64, and for each element the norm of its products, the scale of its error."""
    x64 = x.astype(np.float64)
    y = x64 @ w
    if bias is not None:
        y = y + bias.astype(np.float64)

    def activate(v: np.ndarray) -> np.ndarray:
        if problem.activation == "clamp":
            return np.clip(v, *problem.limits)
        return v if problem.activation is None else FORMULAS[problem.activation](v)

    if problem.gated:
        gate, up = np.split(y, 2, axis=1)
        y = activate(gate) * up
    else:
        y = activate(y)
    if residual is not None:
        y = y + residual.astype(np.float64)
    return y, np.sqrt((x64**2).sum(1, keepdims=True) * (w**2).sum(0).mean())


def repack(run: Run, problem: Problem, weight: PackedWeight, facts: device.Device) -> np.ndarray:
    """Return the weight in the fragment layout; the repacking kernel must overwrite every byte (255 before)."""
    layout = FragmentLayout.of(problem)
    out = np.full(layout.nbytes, 255, np.uint8)
    tensors = {"qweight": weight.qweight, "scales": weight.scales, "qzeros": weight.qzeros}
    run(layout.pack(facts), {**tensors, "out": out})
    return out


def residual_stream(problem: Problem, rng: np.random.Generator) -> dict[str, np.ndarray | None]:
    """Return random buffers for a GEMM that is fused with the residual add or RMSNorm of a decoder layer.

    There is NaN wherever the kernel must write.
    """
    stream: dict[str, np.ndarray | None] = dict.fromkeys(problem.fusion.buffers if problem.fusion else ())
    if problem.fusion:
        part = problem.fusion.next_weight
        stream["next_weight"] = np.empty(part.half_offset + part.nbytes, np.uint8)
    stream["previous_inverse_rms"] = rng.uniform(16, 640, problem.m).astype(np.float32)
    if problem.adds_to_stream:
        stream["h"] = rng.standard_normal((problem.m, problem.n)).astype(np.float32)
        stream["norm_weight"] = (1 + rng.standard_normal(problem.n) / 4).astype(np.float32)
        stream["square_sums"] = np.full((problem.m, -(-problem.n // 32)), np.nan, np.float32)
        if problem.orders_y:
            stream["positions"] = rng.permutation(problem.n).astype(np.int32)
    elif problem.rms_norms_x:
        stream["square_sums"] = rng.uniform(1, 50, (problem.m, -(-problem.k // 32))).astype(np.float32)
        stream["inverse_rms"] = np.full(problem.m, np.nan, np.float32)
    return stream


def random_int8_weight(rng: np.random.Generator, problem: Problem) -> tuple[Int8Weight, np.ndarray]:
    """Return a random 8-bit weight in the problem's layout, and its values, float64 [K, N]."""
    k, n, dtype = problem.k, problem.n, DTYPES[problem.dtype]
    groups = -(-k // problem.group_size)
    codes = rng.integers(0, 256, (n, k), dtype=np.uint8)
    scales = (rng.uniform(0.5, 1.5, (n, groups)) / (64 * np.sqrt(k))).astype(dtype)
    offsets = None if problem.zeros == "symmetric" else (rng.normal(0, 40, scales.shape) * scales).astype(dtype)
    spec = WeightSpec(k, n, problem.group_size, problem.zeros, dtype, HOST, bits=8)
    weight = Int8Weight(spec, codes, scales, offsets)
    group = np.arange(k) // problem.group_size
    w = (codes.astype(np.float64) - 128) * scales.astype(np.float64)[:, group]
    w += 0 if offsets is None else offsets.astype(np.float64)[:, group]
    return weight if INT8_ROWS in problem.layouts else weight.in_fragments(), w.T


def check_matmul(
    run: Run, problem: Problem, family: AnyFamily, config: Config, facts: device.Device, seed: int, pad: int = 0
) -> None:
    """Launch one configuration on random data, with NaN wherever it must write, and check y."""
    rng = np.random.default_rng(seed)
    dtype, scales_dtype = DTYPES[problem.dtype], DTYPES[problem.scales_dtype]
    weight: PackedWeight
    if problem.bits == 8:
        weight, w = random_int8_weight(rng, problem)
        problem = replace(problem, scale_exponent=weight.scale_exponent)
    else:
        weight = random_weight(rng, problem.k, problem.n, problem.group_size, dtype=scales_dtype, zeros=problem.zeros)
        w = float64_weight(weight.qweight, weight.scales, weight.qzeros)
    x = random_activations(rng, problem.m, problem.k, dtype=dtype)
    stream = residual_stream(problem, rng)
    order = rng.permutation(problem.k) if problem.gathers_x else np.arange(problem.k)
    n_out = problem.n // 2 if problem.gated else problem.n
    bias = None
    if problem.bias_dtype:
        bias = rng.standard_normal(problem.n).astype(DTYPES[problem.bias_dtype])
    residual = rng.standard_normal((problem.m, n_out)).astype(dtype) if problem.residual else None
    repacked = weight.repacked if isinstance(weight, Int8Weight) else None
    if FRAGMENTS in problem.layouts:
        repacked = repack(run, problem, weight, facts)
    partial_bytes, counters = family.workspace(config, problem)

    def spaced(a: np.ndarray) -> np.ndarray:
        return strided(a, -a.shape[1] % (16 // a.itemsize) if pad == WHOLE else pad)

    arrays = {
        "x": spaced(x),
        **{name: None if a is None or problem.bits == 8 else spaced(a) for name, a in weight.tensors.items()},
        "residual": None if residual is None else spaced(residual),
        "y": spaced(np.full((problem.m, n_out), np.nan, dtype)),
    }
    for name, a in arrays.items():
        if a is not None:
            a.flags.writeable = name == "y"
    strides = Strides(*(0 if a is None else a.strides[0] // a.itemsize for a in arrays.values()))
    offsets = arrays["qzeros"] if problem.zeros == "float" else None
    raw = (arrays["qweight"], arrays["scales"], offsets) if AWQ in problem.layouts else ()
    wide = (*raw, arrays["residual"], arrays["y"])
    aligned = all(a is None or a.strides[0] % 16 == 0 for a in wide)
    problem = replace(problem, strides=strides, aligned=aligned, x_aligned=arrays["x"].strides[0] % 16 == 0)
    scratch = {"partials": np.full(partial_bytes // 4, np.nan, np.float32), "counters": np.zeros(counters, np.uint32)}
    given = {name: None if a is None else a.astype(np.float64) for name, a in stream.items()}
    if problem.bits == 8:
        arrays |= weight.tensors
    operands = {**arrays, **stream, "bias": bias, "weight": repacked, "order": order.astype(np.uint16), **scratch}
    run(family.plan(config, problem, facts), operands)
    y = arrays["y"].astype(np.float64)
    x = x.astype(np.float64)[:, order]
    if problem.rms_norms_x:
        inverse_rms = 1 / np.sqrt(given["square_sums"].sum(1) / problem.k + problem.fusion.eps)
        np.testing.assert_allclose(stream["inverse_rms"], inverse_rms, rtol=1e-5)
        x *= (inverse_rms / given["previous_inverse_rms"] * 64)[:, None]
    reference, size = expected(problem, x, w, bias, residual)
    if problem.adds_to_stream:
        if stream.get("positions") is not None:
            y = y[:, stream["positions"]]
        # The kernel stores the new residual stream h, which is compared with the reference below, and y, which is h
        # times factors.
        h, factor = stream["h"].astype(np.float64), given["norm_weight"] * given["previous_inverse_rms"][:, None] / 64
        np.testing.assert_allclose(y, h * factor, rtol=2 * BOUNDS[problem.dtype], atol=1e-7)
        squares = np.pad(h**2, ((0, 0), (0, -problem.n % 32))).reshape(problem.m, -1, 32).sum(2)
        np.testing.assert_allclose(stream["square_sums"], squares, rtol=1e-5)
        y, reference = h, given["h"] + reference
    assert np.isfinite(y).all(), f"{np.count_nonzero(~np.isfinite(y))} elements were not written"
    assert np.linalg.norm(y - reference) <= BOUNDS[problem.dtype] * np.linalg.norm(size + np.abs(reference))
    # The norm over all elements could hide a single wrong column or row, so bound each element too.
    assert (np.abs(y - reference) <= 20 * BOUNDS[problem.dtype] * (size + np.abs(reference))).all()
    assert not scratch["counters"].any(), "the counters must be left as they were found"


def candidates(problem: Problem, facts: device.Device) -> list[list[select.Candidate]]:
    """Return the legal configurations of each kernel family that supports the problem, a list per family."""
    return [some for some in select.candidates(problem, facts).values() if not isinstance(some, str)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("m", [1, 3, 16, 70])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_legal_configuration(backend: str, arch: int, m: int, dtype: str) -> None:
    """Every configuration of every family is right where the last tiles along M, N and K are partly empty."""
    scales_dtype = "bfloat16" if dtype == "bfloat16" else "float16"
    problem = Problem(m, 224, 192, 64, dtype, scales_dtype)
    here = facts(arch, backend)
    found = [candidate for each in candidates(problem, here) for candidate in each]
    few = [candidate for candidate in found if candidate[1].split_k in (1, 3, 4)]
    for family, config, _ in sample(few, backend, 1, m):
        check_matmul(runner(backend), problem, family, config, here, seed=m)


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("arch", ARCHS)
@given(data=st.data())
@few_examples
def test_any_problem_on_any_kernel(backend: str, arch: int, data: st.DataObject) -> None:
    """Random shapes, group sizes, zeros, epilogues, strides and alignments are right on every legal family."""
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
        activation=data.draw(st.sampled_from([None, "clamp", *FUNCTIONS])),
        limits=(-0.5, 0.75),
        gated=gated,
    )
    here = facts(arch, backend)
    for some in candidates(padded(problem, pad), here):
        family, config, _ = data.draw(st.sampled_from(some[:8]))
        check_matmul(runner(backend), problem, family, config, here, seed=data.draw(st.integers(0, 99)), pad=pad)


@pytest.mark.parametrize("backend", [*LANDINGS[:2], HOPPER])
@given(data=st.data())
@few_examples
def test_few_rows_of_any_problem(backend: str, data: st.DataObject) -> None:
    """`gemm_sm90_raw` is right where slices of K have many, few or no steps, and groups end inside a step.

    Clusters have all sizes, and tiles may be partly empty.
    """
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
        activation=data.draw(st.sampled_from([None, "clamp", *FUNCTIONS])),
        limits=(-0.5, 0.75),
        gated=gated,
        may_prefetch_weights=data.draw(st.booleans()),
    )
    pad = data.draw(st.sampled_from([WHOLE] if problem.n % 32 else [0, 8, WHOLE]))
    here = facts(90, backend)
    family = FAMILIES["gemm_sm90_raw"]
    assert family.refusal(padded(problem, pad), here) is None
    config = data.draw(st.sampled_from(family.configs(padded(problem, pad), here)))

    def run(plan: LaunchPlan, buffers: Buffers) -> None:
        """Launch without the shared memory that is only added to limit the CTAs per SM, so that bounds are checked."""
        assert plan.shared_bytes >= config.shared_bytes
        runner(backend)(replace(plan, shared_bytes=config.shared_bytes), buffers)

    check_matmul(run, problem, family, config, here, seed=data.draw(st.integers(0, 99)), pad=pad)


def rounded_once(w: np.ndarray, dtype: str) -> np.ndarray:
    """Return a float64 weight rounded once to ``dtype``, which NumPy does not do for bfloat16, as float64."""
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":
            # ml_dtypes rounds to float32 first. If that rounding is to odd, both together equal one rounding.
            short = w.astype(np.float32)
            toward_zero = np.where(np.abs(short) > np.abs(w), np.nextafter(short, np.float32(0)), short)
            bits = toward_zero.view(np.uint32) | (toward_zero != w)
            w = bits.astype(np.uint32).view(np.float32)
        return w.astype(DTYPES[dtype]).astype(np.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", list(DTYPES))
@given(data=st.data())
@few_examples
def test_dequantize_gives_the_formulas_bits(backend: str, arch: int, dtype: str, data: st.DataObject) -> None:
    """`dequantize` gives the float64 formula rounded once, bit by bit but for the sign of zero.

    Scales range from subnormal to overflowing.
    """
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
    runner(backend)(select.choose(problem, facts(arch, backend)).plan, arrays)
    wanted = rounded_once(float64_weight(weight.qweight, scales, qzeros), dtype)
    np.testing.assert_array_equal(arrays["out"].astype(np.float64), wanted)
