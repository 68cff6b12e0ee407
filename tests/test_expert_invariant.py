# SPDX-License-Identifier: Apache-2.0
"""The batch-invariant mode of experts: a row of y has the same bits whatever the other tokens and their number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupy_awq
from cupy_awq import MoeLayer, PackedExperts
from cupy_awq.kernels import select
from cupy_awq.kernels.experts.problem import ExpertProduct
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS
from tests.backends import BACKENDS, Run, runner
from tests.experts import error_of, float64_rows, on_gpu, random_experts, repack_experts, sort_rows
from tests.test_batch_invariant import bits, cancelling
from tests.test_kernels import BOUNDS, DTYPES, facts

Array = Any
EXPERTS, TOKENS, TOP_K = 3, 24, 2


def cancelling_experts(
    rng: np.random.Generator, k: int, n: int, group_size: int, dtype: Any, zeros: str
) -> tuple[Array, PackedExperts]:
    """Return x [TOKENS, k] and weights of EXPERTS whose products nearly cancel, so that y shows the order of additions.

    All experts have the same weights but for the order of their columns.
    """
    x, weight = cancelling(rng, TOKENS, k, n, group_size, dtype, zeros=zeros)

    def stack(a: Array) -> Array:
        return None if a is None else np.stack([np.roll(a, expert, axis=1) for expert in range(EXPERTS)])

    return x, PackedExperts(stack(weight.qweight), stack(weight.scales), stack(weight.qzeros))


class Product:
    """Random weights, x and routing; `rows` computes rows of y by any configuration for any subset of the tokens."""

    def __init__(self, run: Run, here: Any, problem: ExpertProduct, rng: np.random.Generator) -> None:
        self.x, self.weight = cancelling_experts(
            rng, problem.k, problem.n, problem.group_size, DTYPES[problem.dtype], problem.zeros
        )
        self.ids = rng.integers(0, EXPERTS, (TOKENS, TOP_K)).astype(np.int32)
        fragments, form = repack_experts(run, self.weight, here) if problem.layout == FRAGMENTS else (None, None)
        self.problem = replace(problem, scale_exponent=0 if form is None else form.scale_exponent)
        self._buffers = {**self.weight.buffers, "weight": fragments, "row_weights": None, "shared": None}
        self._run, self._here = run, here

    def of(self, tokens: list[int], rows: Any, block: int) -> ExpertProduct:
        """Return the problem for some tokens, with rows sorted in blocks or in the order of the pairs."""
        return replace(self.problem, rows=rows, pairs=len(tokens) * TOP_K, block=block)

    def rows(self, tokens: list[int], problem: ExpertProduct, candidate: select.Candidate) -> Array:
        """Return y [tokens, TOP_K, columns]."""
        ids, x = self.ids[tokens].copy(), self.x[tokens].copy()
        routing: dict[str, Array] = {"experts": ids.reshape(-1), "sorted_pairs": None, "sorted_count": None}
        if problem.rows == "sorted":
            routing = sort_rows(self._run, ids, EXPERTS, problem.block, self._here)
        y = np.full((len(tokens) * TOP_K, problem.n_out), np.nan, x.dtype)
        plan = candidate.family.plan(candidate.config, problem, self._here)
        self._run(plan, {**self._buffers, **routing, "x": x, "y": y})
        return y.reshape(len(tokens), TOP_K, -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("arch", "layout", "dtype", "group_size", "zeros", "gated"),
    [
        (60, AWQ, "float32", 64, "packed", True),
        (75, AWQ, "float16", 64, "packed", False),
        (75, FRAGMENTS, "float16", 64, "packed", True),
        pytest.param(75, FRAGMENTS, "float16", 128, "float", False, marks=pytest.mark.slow),
        (80, FRAGMENTS, "bfloat16", 128, "packed", True),
        pytest.param(80, FRAGMENTS, "float16", 32, "float", False, marks=pytest.mark.slow),
        (90, FRAGMENTS, "float16", 64, "symmetric", False),
        pytest.param(90, FRAGMENTS, "float16", 128, "packed", True, marks=pytest.mark.slow),
    ],
)
def test_every_configuration_gives_a_row_the_same_bits(
    backend: str, arch: int, layout: str, dtype: str, group_size: int, zeros: str, gated: bool
) -> None:
    """A row has equal bits by each legal kernel and configuration, in units of any height, alone and with others."""
    rng, here = np.random.default_rng(arch), replace(facts(arch, backend), sm_count=3)
    activation = {"activation": "silu", "gated": True} if gated else {}
    form = ExpertProduct("sorted", TOKENS * TOP_K, EXPERTS, 128, 512, group_size, dtype, zeros=zeros, top_k=TOP_K,
        x_divisor=TOP_K, layout=layout, batch_invariant=True, **activation)  # fmt: skip
    product = Product(runner(backend), here, form, rng)
    everyone, found = list(range(TOKENS)), []
    for tokens, rows, block in (
        (everyone, "sorted", 64), (everyone[7:], "sorted", 48), ([3, 9, 11], "sorted", 16), ([9], "sorted", 8),
        ([9], "pairs", 8),
    ):  # fmt: skip
        problem = product.of(tokens, rows, block)
        some = [c for each in select.candidates(problem, here).values() if not isinstance(each, str) for c in each]
        assert bool(some) == (rows == "sorted")
        for candidate in [*some[:1], *some[1 + arch % 4 :: 4 if backend == "gpu" else 9]]:
            y = np.full((TOKENS, TOP_K, problem.n_out), np.nan, product.x.dtype)
            y[tokens] = product.rows(tokens, problem, candidate)
            found.append((tokens, y, candidate))
    expected = float64_rows(
        np.repeat(product.x, TOP_K, 0), product.ids.reshape(-1), product.weight, "swiglu" if gated else None
    )
    assert error_of(found[0][1].reshape(expected.shape), expected) < 64 * BOUNDS[dtype]
    for tokens, y, candidate in found[1:]:
        np.testing.assert_array_equal(bits(y[tokens]), bits(found[0][1][tokens]), str(candidate))


@pytest.mark.parametrize("device_", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("group_size", "zeros"), [(128, "packed"), (64, "float"), (32, "packed")])
def test_a_token_has_the_same_bits_in_any_batch(device_: str, dtype: str, group_size: int, zeros: str) -> None:
    """`moe`, a plan of `MoeLayer` and `gemm_grouped` give the rows of some tokens the bits that they have among all."""
    rng, m = np.random.default_rng(0), 300
    weights = [random_experts(rng, 16, *shape, group_size, zeros=zeros) for shape in ((512, 768), (384, 512))]
    ids, scale = rng.integers(0, 16, (m, 4)).astype(np.int32), rng.uniform(0, 1, (m, 4)).astype(np.float32)
    x = rng.standard_normal((m, 512)).astype(DTYPES[dtype])
    put: Any = np.asarray
    if device_ == "gpu":
        import cupy

        put = cupy.asarray
        weights = [on_gpu(w, dtype) for w in weights]
    layer = MoeLayer(*weights, batch_invariant=True)
    whole = bits(cupy_awq.moe(put(x), put(ids), put(scale), *weights, batch_invariant=True))
    grouped_ids = np.sort(ids[:, 0])
    grouped = bits(grouped_of(put, x, grouped_ids, weights[0]))
    for tokens in ([5], [7, 5], list(range(9)), list(range(250, 300)), list(range(150))):
        some = put(x[tokens]), put(ids[tokens]), put(scale[tokens])
        np.testing.assert_array_equal(bits(layer(*some)), whole[tokens])
        np.testing.assert_array_equal(bits(layer.plan(*some)()), whole[tokens])
        rows = sorted(tokens)
        np.testing.assert_array_equal(bits(grouped_of(put, x[rows], grouped_ids[rows], weights[0])), grouped[rows])


def grouped_of(put: Any, x: Array, ids: Array, weight: PackedExperts) -> Array:
    """Return the batch-invariant grouped product of rows that are sorted by expert."""
    offsets = np.searchsorted(ids, np.arange(17)).astype(np.int32)
    return cupy_awq.gemm_grouped(put(x), weight, put(offsets), activation="swiglu", batch_invariant=True)


def test_invalid_flag() -> None:
    weight = random_experts(np.random.default_rng(0), 2, 64, 64, 32)
    down = random_experts(np.random.default_rng(0), 2, 32, 64, 32)
    with pytest.raises(TypeError, match="batch_invariant: expected True or False"):
        MoeLayer(weight, down, batch_invariant=1)
    with pytest.raises(TypeError, match="batch_invariant: expected True or False"):
        cupy_awq.gemm_grouped(
            np.zeros((1, 64), np.float16), weight, np.array([0, 1, 1], np.int32), batch_invariant="yes"
        )
