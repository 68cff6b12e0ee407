# SPDX-License-Identifier: Apache-2.0
"""The launches of a mixture of experts: from the experts of each token to the weighted sum of their results."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from cupy_awq.activation import Activation
from cupy_awq.kernels import select
from cupy_awq.kernels.dtypes import ITEMSIZE
from cupy_awq.kernels.experts.problem import ExpertProduct, count_blocks
from cupy_awq.kernels.experts.routing import ExpertSum, TokenRouting, TokenSort
from cupy_awq.kernels.family import KernelProblem, Workspace
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan

SORT_US, SUM_US = 1.2, 0.6
"""The time of a sort and of a sum over slots beyond that of a launch that reads and writes their bytes, in
microseconds."""
BLOCKS = (8, 16, 32, 48, 64, 80, 96, 112, 128, 144)
"""The numbers of rows per block of sorted rows to try; a block has rows of one expert."""
ALIGNMENT = 256
"""The alignment of the parts of the scratch memory, in bytes."""

plan_routing = select.planner(TokenRouting)


class ExpertForm(NamedTuple):
    """The properties of the weights of one projection of all experts; the fields are those of `ExpertProduct`."""

    experts: int
    k: int
    n: int
    group_size: int
    scales_dtype: str
    zeros: str
    bias_dtype: str | None = None
    layout: str = AWQ
    scale_exponent: int = 0
    wide_scales: bool = False

    def product(self, dtype: str, pairs: int, top_k: int, activation: Activation) -> ExpertProduct:
        """Return the grouped product of these weights for ``pairs`` (token, slot) pairs in the order of the tokens."""
        return ExpertProduct(
            "pairs",
            pairs,
            self.experts,
            self.n,
            self.k,
            self.group_size,
            dtype,
            self.scales_dtype,
            self.zeros,
            top_k=top_k,
            bias_dtype=self.bias_dtype,
            activation=activation.kind,
            gated=activation.gated,
            layout=self.layout,
            scale_exponent=self.scale_exponent,
            wide_scales=self.wide_scales,
        )


@functools.lru_cache(maxsize=1024)
def reads_fragments(form: ExpertForm, dtype: str, device: Device) -> bool:
    """Return whether kernels of the GPU read the weights in the fragment layout, for x of a dtype, gated or not."""
    activations = (Activation(),) if form.n % 16 else (Activation(), Activation("silu", gated=True))
    form = form._replace(layout=FRAGMENTS)
    products = [replace(form.product(dtype, 8, 1, activation), rows="sorted") for activation in activations]
    families = select.families(products[0]).values()
    return all(any(family.refusal(product, device) is None for family in families) for product in products)


@dataclass(frozen=True)
class ExpertLayer:
    """A validated mixture of experts, from the ids and weights of the router to y.

    Attributes:
        m: number of tokens.
        top_k: number of experts per token.
        gate_up, down: the weights.
        dtype: dtype of x and y.
        activation: the gated activation between the projections.
        has_shared: whether the result of a shared expert is added.
        ldx, ldy, ld_shared: row strides in elements.
        batch_invariant: whether the bits of a row of y must not depend on the other tokens.
    """

    m: int
    top_k: int
    gate_up: ExpertForm
    down: ExpertForm
    dtype: str
    activation: Activation
    has_shared: bool
    ldx: int
    ldy: int
    ld_shared: int
    batch_invariant: bool = False


class Step(NamedTuple):
    """One launch of an operation on experts, with the operation's buffers that it reads and writes."""

    problem: KernelProblem
    """The problem, for which `select.choose` chooses the kernel."""
    buffers: Mapping[str, str]
    """The name of the operation's buffer for each buffer name of the launch."""


class Steps(NamedTuple):
    """The launches of an operation, and the memory that passes data between them."""

    steps: tuple[Step, ...]
    scratch: Mapping[str, int]
    """The size in bytes of each scratch buffer, which passes data from one launch to the next."""

    def plans(self, device: Device) -> tuple[tuple[LaunchPlan, Mapping[str, str]], ...]:
        """Return the launch plan of each step, and its buffers."""
        return tuple((select.choose(step.problem, device).plan, step.buffers) for step in self.steps)

    def workspace(self, device: Device) -> Workspace:
        """Return the workspace that all launches need, one after the other."""
        choices = (select.choose(step.problem, device) for step in self.steps)
        needs = [choice.family.workspace(choice.config, choice.problem) for choice in choices]
        return Workspace(*map(max, zip(*needs, strict=True)))

    @property
    def offsets(self) -> dict[str, int]:
        """The offset in bytes of each buffer in the scratch memory; the key "" has the total size."""
        found, at = {}, 0
        for name, nbytes in self.scratch.items():
            found[name] = at
            at += nbytes + -nbytes % ALIGNMENT
        return found | {"": at}


ROUTING = {name: name for name in ("sorted_pairs", "experts", "sorted_count")}
WORKSPACE = {name: name for name in ("partials", "counters")}


def weight_buffers(prefix: str) -> dict[str, str]:
    """Return, for each weight buffer of a launch in any layout, the name of the operation's buffer, with ``prefix``."""
    return {name: f"{prefix}.{name}" for name in ("weight", "qweight", "scales", "qzeros", "bias")}


def sort_step(pairs: int, experts: int, block: int, from_offsets: bool, ids: str) -> tuple[Step, dict[str, int]]:
    """Return the step that sorts rows by expert, and the sizes in bytes of its results."""
    blocks = count_blocks(pairs, experts, block)
    scratch = {"sorted_pairs": 4 * blocks * block, "experts": 4 * blocks, "sorted_count": 4}
    return Step(TokenSort(pairs, experts, block, from_offsets), {"ids": ids, **ROUTING}), scratch


def _token_pairs(layer: ExpertLayer, sums_apart: bool) -> Steps:
    """Return the launches for few tokens, which need no sort: gate and up for each pair of token and expert, and down.

    The weighted sum over the slots of a token is computed by the launch of down or, with ``sums_apart``, by a third.
    """
    gate_up, down = _products(layer)
    gate_up = replace(gate_up, x_divisor=layer.top_k, ldx=layer.ldx)
    down = replace(down, row_weights=True, reads_ahead=True)
    routing = {"experts": "ids", "row_weights": "weights", "sorted_pairs": "", "sorted_count": ""}
    first = Step(gate_up, {**weight_buffers("gate_up"), **routing, "x": "x", "y": "h", "shared": ""})
    itemsize = ITEMSIZE[layer.dtype]
    scratch = {"h": gate_up.pairs * gate_up.n_out * itemsize}
    buffers = {**weight_buffers("down"), **routing, "x": "h"}
    if sums_apart:
        steps = first, Step(down, {**buffers, "y": "pairs", "shared": ""}), _sum_step(layer)
        return Steps(steps, {**scratch, "pairs": down.pairs * down.n * itemsize})
    down = replace(down, rows="tokens", shared=layer.has_shared, ldy=layer.ldy, ld_shared=layer.ld_shared)
    return Steps((first, Step(down, {**buffers, "y": "y", "shared": "shared"})), scratch)


def _sum_step(layer: ExpertLayer) -> Step:
    """Return the sum over the slots of each token."""
    experts, sizes = layer.down.experts, (layer.ld_shared, layer.ldy)
    total = ExpertSum(layer.m, layer.down.n, layer.top_k, experts, layer.dtype, layer.has_shared, True, *sizes)
    return Step(total, {"pairs": "pairs", "ids": "ids", "shared": "shared", "y": "y"})


def _sorted_rows(layer: ExpertLayer, block: int) -> Steps:
    """Return four launches: sort, gate and up, down, and the sum over the slots of each token."""
    gate_up, down = _products(layer)
    gate_up = replace(gate_up, rows="sorted", block=block, x_divisor=layer.top_k, ldx=layer.ldx)
    down = replace(down, rows="sorted", block=block, row_weights=True, reads_ahead=True)
    itemsize, experts = ITEMSIZE[layer.dtype], layer.gate_up.experts
    sort, scratch = sort_step(gate_up.pairs, experts, block, False, "ids")
    scratch |= {"h": gate_up.pairs * gate_up.n_out * itemsize, "pairs": down.pairs * down.n * itemsize}
    routing = {**ROUTING, **WORKSPACE, "row_weights": "weights", "shared": ""}
    steps = (
        sort,
        Step(gate_up, {**weight_buffers("gate_up"), **routing, "x": "x", "y": "h"}),
        Step(down, {**weight_buffers("down"), **routing, "x": "h", "y": "pairs"}),
        _sum_step(layer),
    )
    return Steps(steps, scratch)


def _products(layer: ExpertLayer) -> tuple[ExpertProduct, ExpertProduct]:
    pairs = layer.m * layer.top_k
    gate_up = layer.gate_up.product(layer.dtype, pairs, layer.top_k, layer.activation)
    down = layer.down.product(layer.dtype, pairs, layer.top_k, Activation())
    invariant = layer.batch_invariant
    return replace(gate_up, batch_invariant=invariant), replace(down, batch_invariant=invariant)


def list_steps(layer: ExpertLayer) -> Iterator[Steps]:
    """Yield all ways to compute a layer, of which a GPU may not support some."""
    yield _token_pairs(layer, sums_apart=False)
    yield _token_pairs(layer, sums_apart=True)
    for block in BLOCKS:
        yield _sorted_rows(layer, block)


def modelled_us(steps: Steps, device: Device) -> float:
    """Return the modelled run time in microseconds; infinity if no kernel of the GPU can run a step."""
    overheads = {TokenSort: SORT_US, ExpertSum: SUM_US}
    total = 0.0
    for step in steps.steps:
        total += overheads.get(type(step.problem), 0.0)
        found = [some[0].us for some in select.candidates(step.problem, device).values() if not isinstance(some, str)]
        total += min(found, default=float("inf"))
    return total


@functools.lru_cache(maxsize=1024)
def plan_layer(layer: ExpertLayer, device: Device) -> Steps:
    """Return the launches of a layer with the lowest modelled time.

    Raises:
        ValueError: no kernel of the GPU supports the layer; the message gives the reason of each.
    """
    best = min(list_steps(layer), key=lambda steps: modelled_us(steps, device))
    best.plans(device)  # raises ValueError if no kernel can run one of the launches
    return best


def sorted_product(
    form: ExpertForm,
    dtype: str,
    pairs: int,
    block: int,
    x_divisor: int,
    activation: Activation,
    row_weights: bool,
    capacity: int = 0,
    batch_invariant: bool = False,
) -> Step:
    """Return the grouped product of rows that are sorted in blocks; the arguments are fields of `ExpertProduct`."""
    product = replace(
        form.product(dtype, pairs, 1, activation),
        rows="sorted",
        block=block,
        capacity=capacity,
        x_divisor=x_divisor,
        row_weights=row_weights,
        batch_invariant=batch_invariant,
    )
    buffers = {**weight_buffers("weight"), **ROUTING, **WORKSPACE, "row_weights": "row_scale", "shared": ""}
    return Step(product, {**buffers, "x": "x", "y": "y"})


@functools.lru_cache(maxsize=1024)
def choose_block(product: ExpertProduct, device: Device) -> int:
    """Return the height of the blocks of sorted rows for which the modelled time of a grouped product is the lowest."""

    def time_us(block: int) -> float:
        found = select.candidates(replace(product, block=block), device).values()
        return min((some[0].us for some in found if not isinstance(some, str)), default=float("inf"))

    return min(BLOCKS, key=time_us)
