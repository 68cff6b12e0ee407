# SPDX-License-Identifier: Apache-2.0
"""The operations on experts that `bench` and `tune` time, and the problems that `explain` explains."""

from __future__ import annotations

import functools

import numpy as np

from cupy_awq import check_scalar
from cupy_awq.activation import Activation
from cupy_awq.check import Array
from cupy_awq.expert_check import EXPERT_ACTIVATIONS
from cupy_awq.kernels.experts.layer import (
    ExpertForm,
    ExpertLayer,
    choose_block,
    plan_layer,
    reads_fragments,
    sorted_product,
)
from cupy_awq.kernels.experts.problem import expected_touched
from cupy_awq.kernels.family import KernelProblem
from cupy_awq.kernels.gemm.problem import FRAGMENTS
from cupy_awq.ops.experts import gemm_grouped
from cupy_awq.ops.moe_layer import MoeLayer
from cupy_awq.ops.packed_experts import PackedExperts
from cupy_awq.packing import namespace
from cupy_awq.runtime import placement
from cupy_awq.runtime.device import Device
from cupy_awq.tools import operations, testing
from cupy_awq.tools.operations import DTYPES, Call, Operation, Settings, Shape, cold_copies


class GemmGrouped:
    """The grouped product of M rows, sorted by expert, with the weights [K, N] of E experts; uniform routing."""

    is_fp16 = True

    def __init__(self, shape: Shape, settings: Settings) -> None:
        self._shape, self._settings = shape, settings
        self._weights = random_copies(shape, settings, 1)
        self.label = f"{shape[0]}x{shape[1]}"
        self.weight = f"{settings.experts} experts, group size {self._weights[0].spec.weight.group_size}"

    @staticmethod
    def check(shape: Shape, settings: Settings) -> None:
        operations.Gemm.check(shape, settings)

    def calls(self, m: int) -> list[Call]:
        rng, device = np.random.default_rng(m), self._settings.device
        ids = np.sort(rng.integers(0, self._settings.experts, m))
        offsets = np.searchsorted(ids, np.arange(self._settings.experts + 1)).astype(np.int32)
        x, where = (placement.to_device(a, device) for a in (random_rows(m, self._shape[0], self._settings), offsets))
        y = namespace(x).empty((m, self._shape[1]), x.dtype)
        return [functools.partial(gemm_grouped, x, weight, where, out=y) for weight in self._weights]

    def nbytes(self, m: int) -> int:
        return touched_bytes(m, self._settings, self._shape) + 2 * m * sum(self._shape)

    def flops(self, m: int) -> int:
        return 2 * m * self._shape[0] * self._shape[1]

    def other_us(self, m: int) -> dict[str, float | None]:
        return {}


class Moe:
    """The layer of experts from ids to weighted sum, for M tokens; K is the hidden size, N the width of an expert."""

    is_fp16 = True

    def __init__(self, shape: Shape, settings: Settings) -> None:
        (hidden, width), self._settings = shape, settings
        self._shapes = (hidden, 2 * width), (width, hidden)
        gate_up, down = (random_copies(shape, settings, settings.top_k) for shape in self._shapes)
        self._layers = [MoeLayer(*pair) for pair in zip(gate_up, down, strict=False)]
        self.label = f"{hidden}x{width}"
        self.weight = f"{settings.top_k} of {settings.experts} experts, group size {gate_up[0].spec.weight.group_size}"

    @staticmethod
    def check(shape: Shape, settings: Settings) -> None:
        hidden, width = shape
        if not 1 <= settings.top_k <= settings.experts:
            raise ValueError(f"--top-k: expected at most {settings.experts}, the experts, got {settings.top_k}")
        for sizes in ((hidden, 2 * width), (width, hidden)):
            GemmGrouped.check(sizes, settings)

    def calls(self, m: int) -> list[Call]:
        rng, settings = np.random.default_rng(m), self._settings
        ids = np.argsort(rng.random((m, settings.experts)), axis=1)[:, : settings.top_k].astype(np.int32)
        scale = np.full((m, settings.top_k), 1 / settings.top_k, np.float32)
        operands = random_rows(m, self._shapes[0][0], settings), ids, scale
        x, ids, scale = (placement.to_device(a, settings.device) for a in operands)
        return [layer.plan(x, ids, scale) for layer in self._layers]

    def nbytes(self, m: int) -> int:
        rows = m * self._settings.top_k
        return sum(touched_bytes(rows, self._settings, shape) for shape in self._shapes) + 4 * m * self._shapes[0][0]

    def flops(self, m: int) -> int:
        return 2 * m * self._settings.top_k * sum(k * n for k, n in self._shapes)

    def other_us(self, m: int) -> dict[str, float | None]:
        return {}


def random_rows(m: int, k: int, settings: Settings) -> Array:
    """Return random x [m, k] in the dtype of the settings, on the CPU."""
    return testing.random_activations(np.random.default_rng(m), m, k, dtype=DTYPES[settings.dtype])


def random_copies(shape: Shape, settings: Settings, touched: int) -> list[PackedExperts]:
    """Return copies of the weights: so many that calls, which read ``touched`` experts each, find them cold in L2."""
    scales = np.dtype(np.float16) if settings.dtype == "float32" else DTYPES[settings.dtype]
    first = testing.random_weight(np.random.default_rng(0), *shape, settings.group_size, dtype=scales)
    parts = (np.asarray(a) for a in (first.qweight, first.scales, first.qzeros))
    arrays = [placement.to_device(np.repeat(a[None], settings.experts, axis=0), settings.device) for a in parts]
    keep = settings.dtype == "float32"
    copies = cold_copies(touched * first.nbytes, settings.device)
    return [PackedExperts(*arrays, keep_weight=keep) for _ in range(copies)]


def touched_bytes(rows: int, settings: Settings, shape: Shape) -> int:
    """Return the expected size in bytes of the weights of the experts that ``rows`` rows touch."""
    k, n = shape
    groups = k // check_scalar.validate_group_size(k, settings.group_size)
    return round(expected_touched(rows, settings.experts) * (k * n / 2 + groups * n * 5 / 2))


def typical_problems(op: str, shape: Shape, m: int, settings: Settings, gpu: Device) -> list[KernelProblem]:
    """Return the problem of an operation other than "gemm", or those of the launches of a "moe", for `explain`."""
    if op not in OPERATIONS:
        return [operations.typical_problem(op, shape, m, settings, gpu)]
    OPERATIONS[op].check(shape, settings)

    def form(k: int, n: int) -> ExpertForm:
        group_size = check_scalar.validate_group_size(k, settings.group_size)
        found = ExpertForm(settings.experts, k, n, group_size, "float16", "packed")
        return found._replace(layout=FRAGMENTS) if reads_fragments(found, settings.dtype, gpu) else found

    if op == "gemm_grouped":
        product = functools.partial(sorted_product, form(*shape), settings.dtype, m)
        block = choose_block(product(8, 1, Activation(), False).problem, gpu)
        return [product(block, 1, Activation(), False).problem]
    hidden, width = shape
    forms = form(hidden, 2 * width), form(width, hidden)
    activation = EXPERT_ACTIVATIONS["swiglu"]
    layer = ExpertLayer(m, settings.top_k, *forms, settings.dtype, activation, False, hidden, hidden, 0)
    return [step.problem for step in plan_layer(layer, gpu).steps]


OPERATIONS: dict[str, type[Operation]] = {"gemm_grouped": GemmGrouped, "moe": Moe}
ALL_OPERATIONS: dict[str, type[Operation]] = {**operations.OPERATIONS, **OPERATIONS}
"""All operations by the name that the option ``--op`` takes."""
