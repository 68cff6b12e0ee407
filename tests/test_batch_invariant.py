# SPDX-License-Identifier: Apache-2.0
"""Tests of the batch-invariant mode: a row of y has the same bits alone, in any batch and in any chunks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupy_awq
from cupy_awq import AwqLinear, PackedWeight
from cupy_awq.activation import FUNCTIONS
from cupy_awq.kernels import select
from cupy_awq.kernels.family import Reduction
from cupy_awq.kernels.gemm.gemm_mma import GemmMma
from cupy_awq.kernels.gemm.gemm_sm90 import GemmSm90Config
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem
from cupy_awq.kernels.gemm.reduction import wgmma_reduction
from cupy_awq.kernels.registry import FAMILIES
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime import device
from cupy_awq.tools.command_line import main
from cupy_awq.tools.testing import random_activations, random_weight
from tests import backends
from tests.backends import BACKENDS, Run, few_examples, runner
from tests.products import ZEROS, check_product, gemm, nan_like, put
from tests.test_kernels import DTYPES, WHOLE, facts, padded, repack, strided

GPU = pytest.mark.gpu
SHAPES = [(4096, 4096), (12288, 4096), (8192, 28672), (576, 1536), (128, 64)]


def bits(y: Any) -> np.ndarray:
    """Return the bit patterns of an array of 16- or 32-bit floats as integers in host memory."""
    host = y if isinstance(y, np.ndarray) else y.get()
    return host.view({2: np.uint16, 4: np.uint32}[host.dtype.itemsize])


def cancelling(
    rng: np.random.Generator,
    m: int,
    k: int,
    n: int,
    group_size: int,
    dtype: Any,
    scales_dtype: Any = np.float16,
    **options: Any,
) -> tuple[np.ndarray, PackedWeight]:
    """Return random x [m, k] and W [k, n] whose products nearly cancel if groups come in pairs.

    Rounding errors of the float32 sums are then as large as the last bits of y, so y shows the order of additions.
    """
    weight = random_weight(rng, k, n, group_size, dtype=scales_dtype, **options)
    half = k // group_size // 2
    parts = [weight.qweight, weight.scales, weight.qzeros]
    for part, rows in zip(parts, (half * group_size, half, half), strict=True):
        if part is not None:
            part[rows : 2 * rows] = part[:rows]
    x = random_activations(rng, m, k, dtype=np.float32)
    rows = half * group_size
    x[:, rows : 2 * rows] = x[:, :rows] * (-1 - rng.standard_normal((m, rows)) / 128)
    return x.astype(dtype), PackedWeight(*parts)


class Product:
    """A random weight, x and epilogue of a problem; `rows` computes the rows of y for any batch of rows of x."""

    def __init__(self, problem: Problem, run: Run, here: device.Device, seed: int) -> None:
        rng = np.random.default_rng(seed)
        dtype = DTYPES[problem.dtype]
        n_out = problem.n // 2 if problem.gated else problem.n
        sizes = problem.k, problem.n, problem.group_size
        scales_dtype = DTYPES[problem.scales_dtype]
        self.x, self.weight = cancelling(rng, problem.m, *sizes, dtype, scales_dtype, zeros=problem.zeros)
        small = rng.standard_normal((problem.m + 2, problem.n)) / 64
        self.residual = small[2:, :n_out].astype(dtype) if problem.residual else None
        bias = small[0].astype(np.float32) if problem.bias_dtype else None
        repacked = repack(run, problem, self.weight, here) if FRAGMENTS in problem.layouts else None
        parts = {name: getattr(self.weight, name) for name in ("qweight", "scales", "qzeros")}
        self._constant = {name: None if a is None else _whole(a) for name, a in parts.items()}
        self._constant |= {"bias": bias, "weight": repacked}
        self._problem, self._run, self._here, self._n_out = problem, run, here, n_out

    def rows(self, rows: list[int], choice: select.Choice | None = None) -> np.ndarray:
        """Return the bits of y for a batch of the given rows of x, by default with the kernel that `choose` returns."""
        x = self.x[rows]
        problem = padded(replace(self._problem, m=len(rows)), WHOLE)
        chosen = choice or select.choose(problem, self._here)
        y = _whole(np.full((len(rows), self._n_out), np.nan, x.dtype))
        partial_bytes, counters = chosen.family.workspace(chosen.config, problem)
        scratch = {
            "partials": np.full(partial_bytes // 4, np.nan, np.float32),
            "counters": np.zeros(counters, np.uint32),
        }
        residual = None if self.residual is None else _whole(self.residual[rows])
        self._run(chosen.plan, {**self._constant, **scratch, "x": _whole(x), "residual": residual, "y": y})
        return bits(np.ascontiguousarray(y))


def _whole(a: np.ndarray) -> np.ndarray:
    """Return a copy of a matrix whose rows each start at a multiple of 16 bytes."""
    return strided(a, -a.shape[1] % (16 // a.itemsize))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", [60, 75, 80, 90])
@given(data=st.data())
@few_examples
def test_a_row_has_the_same_bits_alone_and_in_any_batch(backend: str, arch: int, data: st.DataObject) -> None:
    """For random problems and any kernel, y of a row has equal bits alone and in a random batch, on the same weight."""
    is_repacked = arch == 90 and data.draw(st.booleans())
    group_size = data.draw(st.sampled_from([32, 64, 128] if is_repacked else [8, 16, 24, 32, 48, 128]))
    gated = data.draw(st.booleans())
    step = 64 if is_repacked and gated else 16 if gated else 8
    problem = Problem(
        m=40,
        n=data.draw(st.integers(1, 200 // step)) * step,
        k=group_size * data.draw(st.integers(1, max(1, 640 // group_size))) // 64 * 64 or 64
        if is_repacked
        else group_size * data.draw(st.integers(1, max(1, 400 // group_size))),
        group_size=group_size,
        dtype=data.draw(st.sampled_from(list(DTYPES)[: 2 if is_repacked else 3])),
        scales_dtype=data.draw(st.sampled_from(["float16", "bfloat16"])),
        zeros=data.draw(st.sampled_from(["packed", "symmetric"] if is_repacked else ZEROS)),
        bias_dtype=data.draw(st.sampled_from([None, "float32"])),
        residual=data.draw(st.booleans()),
        activation=data.draw(st.sampled_from([None, *FUNCTIONS])),
        gated=gated,
        layouts=(AWQ, FRAGMENTS)[: 1 + is_repacked],
        wide_scales=data.draw(st.booleans()),
        batch_invariant=True,
    )
    here = facts(arch, backend)
    product = Product(problem, runner(backend), here, data.draw(st.integers(0, 99)))
    row = data.draw(st.integers(0, 39))
    alone = product.rows([row])
    for _ in range(2):
        others = data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=39))
        at = data.draw(st.integers(0, len(others)))
        found = product.rows([*others[:at], row, *others[at:]])
        np.testing.assert_array_equal(found[at], alone[0])


def results(
    product: Product, problem: Problem, here: device.Device, most: int
) -> tuple[dict[Reduction, set[bytes]], set[str]]:
    """Return a problem's distinct results for four orders of additions, and the names of its kernels.

    At most ``most`` configurations of each kernel and reduction run.
    """
    found: dict[Reduction, dict[str, list[select.Choice]]] = {}
    for family in select.families(problem).values():
        configs = family.configs(problem, here) if family.refusal(problem, here) is None else []
        for config in configs:
            reduction = family.reduction(config, problem)
            if reduction is not None:
                choice = select.Choice(problem, family, config, family.plan(config, problem, here))
                found.setdefault(reduction, {}).setdefault(choice.plan.kernel.entry, []).append(choice)
    # Try reductions that most kernels implement first: there, most kernels must agree.
    order = sorted(found, key=lambda reduction: -len(found[reduction]))
    some = [*order[:2], *order[2 :: ceil_div(len(order), 2)]]
    rows, different = list(range(problem.m)), {}
    for reduction in some:
        choices = [c for of_one in found[reduction].values() for c in of_one[:: ceil_div(len(of_one), most)]]
        different[reduction] = {product.rows(rows, choice).tobytes() for choice in choices}
    return different, {name for reduction in some for name in found[reduction]}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("arch", "dtype", "repacked", "m", "kernels"),
    [
        pytest.param(60, "float32", False, 34, {"gemm_simt"}, marks=pytest.mark.slow),
        (75, "float16", False, 34, {"gemm_simt", "gemm_sm75"}),
        pytest.param(80, "bfloat16", False, 34, {"gemm_simt", "gemm_sm80"}, marks=pytest.mark.slow),
        (90, "bfloat16", False, 9, {"gemm_sm80", "gemm_sm90_raw"}),
        pytest.param(90, "float16", True, 9, {"gemm_sm90", "gemm_sm90_mma_invariant"}, marks=pytest.mark.slow),
        (90, "float16", True, 34, {"gemm_sm90", "gemm_sm90_large"}),
    ],
)
def test_all_kernels_with_the_same_reduction_agree(
    backend: str, arch: int, dtype: str, repacked: bool, m: int, kernels: set[str]
) -> None:
    """Kernels with one order of additions along K give equal bits, whatever their tile, split-K or CTAs."""
    here = facts(arch, backend)
    problem = Problem(m, 64, 416, 32, dtype, layouts=(AWQ, FRAGMENTS)[: 1 + repacked], batch_invariant=True)
    if repacked:
        problem = replace(problem, n=128, k=512, group_size=128, gated=True, activation="silu", residual=True)
        problem = replace(problem, layouts=(FRAGMENTS,))
    elif arch == 90:
        problem = replace(problem, k=1024)
    product = Product(problem, runner(backend), here, 0)
    found, names = results(product, problem, here, 12 if backend == "gpu" else 3 if backends.is_complete else 2)
    assert len(found) >= 3
    assert names >= kernels
    assert all(len(some) == 1 for some in found.values())
    assert len(set().union(*found.values())) > 1  # different orders give different bits here, so the test can fail


@pytest.mark.parametrize("shapes", [SHAPES[3:], pytest.param(SHAPES[:3], marks=pytest.mark.slow)], ids=str)
def test_the_reduction_of_a_weight_exists_and_is_the_same_for_every_m(shapes: list[tuple[int, int]]) -> None:
    """A weight gets one order of additions for every M, for all architectures, group sizes and dtypes.

    M is taken on both sides of each tile size. Otherwise a row's bits would depend on the size of its batch.
    """
    for arch, (k, n), group_size, dtype in itertools.product(
        (60, 75, 89, 90), shapes, (32, 128), ("float16", "bfloat16", "float32")
    ):
        here = device.nominal(arch)
        for repacked in {False, arch == 90 and dtype != "float32"}:
            problem = Problem(
                1, n, k, group_size, dtype, layouts=(AWQ, FRAGMENTS)[: 1 + repacked], batch_invariant=True
            )
            expected = select.choose_reduction(problem, here)
            for m in (1, 9, 17, 33, 65, 300, 600, 100_000):
                chosen = select.choose(replace(problem, m=m, residual=m > 16, bias_dtype="float32"), here)
                assert chosen.family.reduction(chosen.config, chosen.problem) == expected


@pytest.mark.parametrize(("arch", "zeros"), [(70, "packed"), (70, "float")])
def test_a_weight_without_a_kernel_is_refused_with_reasons(arch: int, zeros: str) -> None:
    problem = Problem(1, 4096, 4096, 128, zeros=zeros, layouts=(FRAGMENTS,), batch_invariant=True)
    with pytest.raises(ValueError, match=r"no kernel fits: .*gemm_sm90"):
        select.choose(problem, device.nominal(arch))


def test_a_field_that_is_unknown_here_excludes_a_configuration() -> None:
    """A new field of a configuration may change the order of additions, so only its default is accepted."""

    @dataclass(frozen=True)
    class NewConfig(GemmSm90Config):
        work_split: str = "by tile"

    old = GemmSm90Config("gemm_sm90", 16, 2, 1, 2, 4, 2)
    assert wgmma_reduction(old, 8, 1, 2, 2) == wgmma_reduction(NewConfig(**vars(old)), 8, 1, 2, 2) is not None
    assert wgmma_reduction(NewConfig(**vars(old), work_split="even"), 8, 1, 2, 2) is None
    default = replace(old, name="gemm_sm90_mma", x_rows=1, x_stages=2)
    assert FAMILIES["gemm_sm90"].reduction(default, Problem(1, 64, 1024, 128, layouts=(AWQ, FRAGMENTS))) is None


@pytest.mark.slow
@pytest.mark.parametrize("backend", [BACKENDS[0]])
@pytest.mark.parametrize(
    ("repacked", "dtype", "step"), [(False, "bfloat16", 3), (True, "float16", 1), (True, "bfloat16", 3)]
)
def test_every_number_of_rows_up_to_64_and_130(backend: str, repacked: bool, dtype: str, step: int) -> None:
    """The chosen sm_90 kernels give equal bits for a row in batches of 1 to 64 rows (bfloat16: every third)."""
    here = facts(90, backend)
    problem = Problem(130, 128, 1536, 128, dtype, layouts=(FRAGMENTS,) if repacked else (AWQ,), batch_invariant=True)
    product = Product(problem, runner(backend), here, 0)
    whole, kernels = product.rows(list(range(130))), set()
    for m in range(1, 65, step):
        rows = list(range(m, 2 * m))
        kernels.add(select.choose(padded(replace(problem, m=m), WHOLE), here).plan.kernel.entry)
        np.testing.assert_array_equal(product.rows(rows), whole[rows], err_msg=f"{m} rows")
    assert len(kernels) >= 2


def check_rows(multiply: Callable[[Any], Any], x: Any, sizes: Iterable[int], rng: np.random.Generator) -> Any:
    """Check that rows of x, in batches of ``sizes`` rows, have the same bits as in the whole product; return it."""
    whole = multiply(x)
    wanted = bits(whole)
    for m in sizes:
        rows = np.sort(rng.choice(len(x), m, replace=False)) if m % 2 else slice(len(x) - m, len(x))
        np.testing.assert_array_equal(bits(multiply(x[rows])), wanted[rows], err_msg=f"{m} rows")
    return whole


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("activation", [None, "silu", "swiglu"])
def test_rows_on_the_cpu_have_the_same_bits_in_any_batch(dtype: str, activation: Any) -> None:
    rng = np.random.default_rng(0)
    zeros = "float" if dtype == "float32" else "packed"
    x, weight = cancelling(rng, 40, 384, 1040, 96, DTYPES[dtype], zeros=zeros)
    options = {"activation": activation, "bias": rng.standard_normal(1040).astype(np.float32) / 64}
    layer = AwqLinear(weight, **options, batch_invariant=True)
    y = check_rows(layer, x, [*range(1, 10), 39], rng)
    check_product(y, x, weight, options["bias"], activation)
    found = gemm(x[7], weight, **options, batch_invariant=True)
    np.testing.assert_array_equal(bits(found), bits(y[7]))
    planned = layer.plan((3, 384), dtype=dtype)(np.ascontiguousarray(x[5:8]), np.empty((3, y.shape[1]), x.dtype))
    np.testing.assert_array_equal(bits(planned), bits(y[5:8]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    ("k", "n", "group_size", "activation"),
    [
        (1024, 1024, 128, None),
        (4096, 512, 128, "silu"),
        (1088, 640, 64, "swiglu"),
        (4096, 4096, 128, "swiglu"),
        (2048, 8200, 32, "gelu"),
    ],
)
def test_rows_on_the_gpu_have_the_same_bits_in_any_batch(
    dtype: str, k: int, n: int, group_size: int, activation: Any
) -> None:
    """`AwqLinear`, `gemm` and plans give equal bits for a row in batches of 1 to 600 rows."""
    rng = np.random.default_rng(n)
    x, weight = cancelling(rng, 600, k, n, group_size, DTYPES[dtype])
    bias = put(rng.standard_normal(n).astype(np.float32) / 64)
    sizes = [*range(1, 21), 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257, *rng.integers(66, 600, 6).tolist()]
    on_gpu, there = put(weight), put(x)
    layer = AwqLinear(on_gpu, bias=bias, activation=activation, batch_invariant=True)
    y = check_rows(layer, there, sizes, rng)
    check_product(y, x, weight, bias.get(), activation, rounded=True)
    for m in (1, 24):
        planned = layer.plan((m, k), dtype=dtype)(there[-m:].copy(), nan_like((m, y.shape[1]), x.dtype))
        np.testing.assert_array_equal(bits(planned), bits(y[-m:]))
    options = {"bias": bias, "activation": activation, "batch_invariant": True}
    y = check_rows(lambda some: gemm(some, on_gpu, **options), there, sizes[::3], rng)
    check_product(y, x, weight, bias.get(), activation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("k", "n", "gated", "m"), [(1024, 512, True, 1), (1024, 512, True, 40), (1536, 256, False, 300)]
)
def test_all_kernels_of_a_layer_with_the_same_reduction_agree(dtype: str, k: int, n: int, gated: bool, m: int) -> None:
    """Layers with SwiGLU or a residual give equal bits by all kernels with one order of additions."""
    here = device.current()
    problem = Problem(m, n, k, 128, dtype, dtype, "packed", "float32", True, "silu" if gated else "gelu")
    problem = replace(problem, gated=gated, layouts=(AWQ, FRAGMENTS)[: 1 + (here.arch == 90)], batch_invariant=True)
    found, _ = results(Product(problem, runner("gpu"), here, m), problem, here, 8)
    assert all(len(some) == 1 for some in found.values())
    # The order of additions matters, but the few values of a single row may all round to the same bits.
    assert m == 1 or len(set().union(*found.values())) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_invariant": True, "kernel": "gemv"}, "kernel: expected None with batch_invariant=True, got 'gemv'"),
        ({"batch_invariant": True, "split_k": 2}, "split_k: expected None with batch_invariant=True, got 2"),
    ],
)
def test_options_that_would_choose_another_kernel_are_refused(options: dict[str, Any], message: str) -> None:
    weight = random_weight(np.random.default_rng(0), 64, 16, 32)
    with pytest.raises(ValueError, match=message):
        gemm(np.ones((2, 64), np.float16), weight, **options)
    with pytest.raises(ValueError, match=message):
        cupy_awq.plan((2, 64), weight, **options)
    with pytest.raises(ValueError, match="batch_invariant: expected False for a layer with x_dtype='int8', got True"):
        AwqLinear(weight, x_dtype="int8", batch_invariant=True)
    with pytest.raises(TypeError, match="batch_invariant"):
        gemm(np.ones((2, 64), np.float16), weight, batch_invariant=1)


def test_a_layer_reports_copies_and_explains_its_mode(capsys: pytest.CaptureFixture[str]) -> None:
    weight = random_weight(np.random.default_rng(0), 64, 16, 32)
    layer = copy.deepcopy(AwqLinear(weight, batch_invariant=True))
    assert layer.batch_invariant
    assert repr(layer).endswith(", batch_invariant=True)")
    assert AwqLinear.concatenate([layer, layer], batch_invariant=True).batch_invariant
    assert not AwqLinear.concatenate([layer, layer]).batch_invariant
    few, many = (cupy_awq.explain(m, 4096, 4096, arch=90, layer=True, batch_invariant=True) for m in (1, 512))
    assert few.splitlines()[-1] == many.splitlines()[-1]
    assert few.splitlines()[-1].startswith("batch-invariant for every M: wgmma with ")
    assert "batch-invariant" not in cupy_awq.explain(1, 4096, 4096, arch=90, layer=True)
    assert main(["explain", "4096x4096", "--m", "1", "--arch", "90", "--layer", "--batch-invariant"]) == 0
    assert capsys.readouterr().out == few + "\n"


def test_a_choice_of_split_k_by_m_is_caught() -> None:
    """If a configuration's split of K may depend on M, rows change their bits with the batch, and the check fails.

    The planted bug: configurations are accepted if they agree with the order of additions in all but the slices of K.
    """

    reduction = GemmMma.reduction

    def by_m(family: GemmMma, config: Any, problem: Any) -> Reduction:
        return reduction(family, config, problem)._replace(slices=())

    problem = Problem(40, 256, 1024, 64, "float16", batch_invariant=True)
    here = replace(device.nominal(80), sm_count=2)  # No other test uses such a device, so its choices are not cached.
    with mock.patch.object(GemmMma, "reduction", by_m):
        product = Product(problem, runner("latest"), here, 0)
        alone, batch = product.rows([3]), product.rows(list(range(40)))
    assert (alone[0] != batch[3]).any()
