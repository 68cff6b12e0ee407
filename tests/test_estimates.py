# SPDX-License-Identifier: Apache-2.0
"""Tests of the cost models of all kernels on all GPUs of the table: no estimate falls when M grows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from cupy_awq.check import HOST
from cupy_awq.kernels import select
from cupy_awq.kernels.conv2d.problem import nhwc_problem
from cupy_awq.kernels.experts.problem import ExpertProduct
from cupy_awq.kernels.gemm.problem import FRAGMENTS, Problem
from cupy_awq.kernels.int8.problem import Int8Problem
from cupy_awq.runtime import device
from cupy_awq.runtime.device import Device
from cupy_awq.tools.operations import Settings, typical_problem
from tests.backends import fewer
from tests.peers import random_problems

EDGES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 120, 128, 144, 192, 256, 320, 512, 1024, 2048, 4096)
"""Numbers of rows, M, on whose two sides a model may choose different tiles."""
MOST_FALL = 0.02
"""The largest fall of an estimate from M to M + 1."""
FEASIBLE = 1.5
"""The estimate, relative to that of the choice, up to which kernels and configurations are compared."""

Make = Callable[[int, int, int, Device], Any]
"""A function that returns the problem of M, N, K and a GPU."""


def _layer(m: int, n: int, k: int, gpu: Device) -> Problem:
    return Problem(m, n, k, 128, layouts=select.weight_layouts(k, n, 128, "float16", "packed", gpu))


def _w4a8(**options: Any) -> Make:
    def make(m: int, n: int, k: int, gpu: Device) -> Int8Problem:
        return Int8Problem(m, n, k, 128, 4, False, True, "float16", zero_points=True, **options)

    return make


def _experts(rows: str, experts: int, top_k: int, block: int = 8) -> Make:
    def make(m: int, n: int, k: int, gpu: Device) -> ExpertProduct:
        more: Any = {"row_weights": True} if rows == "tokens" else {"activation": "silu", "gated": True}
        divisor = 1 if rows == "tokens" else top_k
        sizes = m * top_k, experts, min(n, 4096), min(k, 4096), 128
        return ExpertProduct(rows, *sizes, block=block, top_k=top_k, x_divisor=divisor, layout=FRAGMENTS, **more)

    return make


PRODUCTS: dict[str, Make] = {
    "layer": _layer,
    "raw": lambda m, n, k, gpu: Problem(m, n, k, 128),
    "int8_linear": lambda m, n, k, gpu: typical_problem("int8_linear", (k, n), m, Settings(HOST), gpu),
    "w4a8 blocks": _w4a8(),
    "w4a8 rows": _w4a8(row_scales=True),
    "w4a8 fp8": _w4a8(row_scales=True, fp8=True),
    "w8a8": lambda m, n, k, gpu: Int8Problem(m, n, k, 128, 8, False, True, "float16", zero_points=True),
    "conv2d 1x1": lambda m, n, k, gpu: nhwc_problem(m, 14, min(k, 1024), min(n, 1024), 1),
    "conv2d 3x3": lambda m, n, k, gpu: nhwc_problem(m, 14, min(k, 512), min(n, 512), 3),
    "experts, pairs": _experts("pairs", 8, 2),
    "experts, tokens": _experts("tokens", 128, 8),
    "experts, 8 sorted": _experts("sorted", 8, 2, 144),
    "experts, 128 sorted": _experts("sorted", 128, 8, 48),
}
"""The products that operations and layers compute, for which a kernel is chosen."""


def _estimates(problem: Any, gpu: Device) -> dict[Any, float]:
    """Return the estimates in microseconds of the choice (key ""), of kernel families, and of their configurations.

    Those beyond FEASIBLE times that of the choice are left out. Without a kernel, the choice takes no time.
    """
    found: dict[Any, float] = {}
    for some in select.candidates(problem, gpu).values():
        if not isinstance(some, str) and some:
            found[some[0].family.NAME] = some[0].us
            found.update(((name.NAME, config), us) for name, config, us in some)
    least = found[""] = min(found.values(), default=0.0)
    return {key: us for key, us in found.items() if us <= FEASIBLE * least}


def _falls(make: Make, k: int, n: int, gpu: Device, ms: Iterable[int]) -> Iterator[str]:
    """Yield each fall of an estimate between adjacent M of ``ms``, in ascending order, as text."""
    present = {m: _estimates(make(m, n, k, gpu), gpu) for m in ms}
    for low, high in itertools.pairwise(present):
        if high == low + 1:
            before, after = present[low], present[high]
            for key in before.keys() & after.keys():
                if after[key] < (1 - MOST_FALL) * before[key]:
                    yield f"{k}x{n}, {key or 'choice'}: {before[key]:.2f} us for M={low}, then {after[key]:.2f}"


@pytest.mark.parametrize("case", fewer(itertools.product(device.KNOWN, PRODUCTS), 9), ids=" ".join)
def test_no_estimate_falls_when_m_grows(case: tuple[str, str]) -> None:
    name, product = case
    gpu, rng = device.KNOWN[name], random.Random(f"{name} {product}")
    ms = sorted({m + more for m in EDGES for more in (0, 1)})
    for k, n in ((4096, 4096), random_problems.shape(rng)):
        assert not list(_falls(PRODUCTS[product], k, n, gpu, ms))


@pytest.mark.slow
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", ["t4", "a100-80gb", "l4", "l40s", "rtx-4090", "gb10", "h20", "h100", "h200"])
def test_no_estimate_falls_from_one_to_300_rows(name: str, product: str) -> None:
    shape = random_problems.shape(random.Random(f"all {name} {product}"))
    assert not list(_falls(PRODUCTS[product], *shape, device.KNOWN[name], range(1, 301)))
