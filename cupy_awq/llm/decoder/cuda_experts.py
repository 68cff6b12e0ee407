# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of a decoder on a GPU: 4-bit experts, stacked, and a dense router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.check import Array
from cupy_awq.checkpoint import Module
from cupy_awq.llm.decoder import upload
from cupy_awq.llm.decoder.backend import DecoderOps, MlpWeights
from cupy_awq.llm.decoder.forward import Projection
from cupy_awq.llm.families.description import Experts, LinearSpec, Mlp
from cupy_awq.llm.files.model_files import DenseLinear, Linear
from cupy_awq.ops.experts import moe, topk
from cupy_awq.ops.packed_experts import PackedExperts


def make_experts(
    ops: DecoderOps,
    dtype: np.dtype[Any],
    spec: Experts,
    router: Linear,
    bias: npt.NDArray[Any] | None,
    experts: Sequence[MlpWeights],
    shared: MlpWeights | None,
    shared_gate: Linear | None,
) -> Projection:
    """Return the function from x, of a dtype, to a mixture of experts; see `DecoderOps.make_experts`.

    Raises ValueError unless the experts have 4-bit codes of one form, and the router and gate are dense.
    """
    import cupy

    options, logits = spec.router, _make_logits(ops, dtype, spec.router.linear, router)
    own = _make_shared(ops, dtype, spec, shared, shared_gate)
    gate_up, down = _stack_mlps([spec.mlp(i) for i in range(len(experts))], experts)
    correction = None if bias is None else cupy.asarray(bias.astype(np.float32))

    def mix(x: Array) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        ids, weights = topk(
            logits(rows),
            options.top_k,
            renormalize=options.renormalize,
            scoring=options.scoring,
            bias=correction,
            groups=options.groups,
            scale=options.scale,
        )
        y = moe(rows, ids, weights, gate_up, down, shared=None if own is None else own(rows))
        return y.reshape(x.shape)

    return mix


def _make_shared(
    ops: DecoderOps, dtype: np.dtype[Any], spec: Experts, weights: MlpWeights | None, gate: Linear | None
) -> Projection | None:
    """Return the function from rows of x to the result of the shared expert, if there is one, times its gate.

    With a gate it is a mixture of one expert, whose weight is the sigmoid of the gate's logit.
    """
    if weights is None or spec.shared is None:
        return None
    if gate is None or spec.shared_gate is None:
        project, leave = ops.make_projection(weights[:2], gated=True), ops.make_projection(weights[2:])
        return lambda x: leave(project(x))
    logits = _make_logits(ops, dtype, spec.shared_gate, gate)
    gate_up, down = _stack_mlps([spec.shared], [weights])
    return lambda x: moe(x, *topk(logits(x), 1, renormalize=False, scoring="sigmoid"), gate_up, down)


def _make_logits(ops: DecoderOps, dtype: np.dtype[Any], spec: LinearSpec, part: Linear) -> Projection:
    """Return a dense linear layer with float32 results. A float32 weight is the sum of two weights of ``dtype``."""
    if not isinstance(part, DenseLinear):
        raise ValueError(f"{spec.name}: expected a dense linear layer on a GPU, got a quantized one")
    high = part.weight.astype(dtype)
    low = (part.weight.astype(np.float32) - high.astype(np.float32)).astype(dtype)
    if not low.any():
        return ops.make_head(part)
    both = ops.make_head(DenseLinear(np.concatenate([high, low]), None))

    def project(x: Array) -> Array:
        y = both(x)
        return y[:, : spec.n] + y[:, spec.n :]

    return project


def _stack_mlps(specs: Sequence[Mlp], mlps: Sequence[MlpWeights]) -> tuple[PackedExperts, PackedExperts]:
    gate_up = [[(spec.gate, mlp[0]), (spec.up, mlp[1])] for spec, mlp in zip(specs, mlps, strict=True)]
    down = [[(spec.down, mlp[2])] for spec, mlp in zip(specs, mlps, strict=True)]
    return stack_experts(gate_up), stack_experts(down)


def stack_experts(experts: Sequence[Sequence[tuple[LinearSpec, Linear]]]) -> PackedExperts:
    """Return the weights of all experts on the GPU; the linear layers of an expert share x and are concatenated.

    Raises ValueError, which names the first such layer, unless all have 4-bit codes of one form and no activation
    order.
    """
    import cupy

    modules: list[list[Module]] = [[] for _ in experts]
    for found, expert in zip(modules, experts, strict=True):
        for spec, part in expert:
            if not isinstance(part, Module) or part.order is not None:
                got = "an activation order" if isinstance(part, Module) else f"a weight of {part.weight.dtype}"
                raise ValueError(f"{spec.name}: expected 4-bit codes without an activation order on a GPU, got {got}")
            found.append(part)
            if upload.form(part) != upload.form(modules[0][0]):
                weights = modules[0][0].weight, part.weight
                raise ValueError(f"{spec.name}: expected {weights[0]!r} as the first expert has, got {weights[1]!r}")
    first = modules[0][0]

    def stack(name: str) -> Any:
        if getattr(first.weight, name) is None:
            return None
        rows = [np.concatenate([getattr(part.weight, name) for part in parts], axis=-1) for parts in modules]
        return cupy.asarray(np.stack(rows))

    bias = None
    if any(part.bias is not None for parts in modules for part in parts):
        rows = [[np.zeros(p.weight.shape[1]) if p.bias is None else p.bias for p in parts] for parts in modules]
        bias = cupy.asarray(np.stack([np.concatenate(row) for row in rows]).astype(np.float32))
    return PackedExperts(stack("qweight"), stack("scales"), stack("qzeros"), bias=bias)
