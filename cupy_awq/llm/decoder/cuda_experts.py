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
from cupy_awq.llm.decoder.backend import MlpWeights
from cupy_awq.llm.decoder.forward import Projection
from cupy_awq.llm.families.description import Experts, LinearSpec, Mlp
from cupy_awq.llm.files.model_files import Linear
from cupy_awq.ops.experts import moe, topk
from cupy_awq.ops.packed_experts import PackedExperts


def make_experts(
    spec: Experts,
    logits: Projection,
    bias: npt.NDArray[Any] | None,
    experts: Sequence[MlpWeights],
    shared: Projection | None,
) -> Projection:
    """Return the function from x to the result of a mixture of experts; see `DecoderOps.make_experts`.

    ``logits`` is the linear layer of the router, with float32 results, and ``shared`` the shared expert with its gate.
    Raises ValueError unless the experts have 4-bit codes of one form.
    """
    import cupy

    options = spec.router
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
        y = moe(rows, ids, weights, gate_up, down, shared=None if shared is None else shared(rows))
        return y.reshape(x.shape)

    return mix


def make_gated(spec: Mlp, weights: MlpWeights, logits: Projection) -> Projection:
    """Return the function sigmoid(logits(x)) * mlp(x) of rows of x: a mixture of one expert, whose weight is the gate.

    ``logits`` has float32 results [M, 1]. Raises ValueError unless the MLP has 4-bit codes of one form.
    """
    gate_up, down = _stack_mlps([spec], [weights])

    def mix(x: Array) -> Array:
        return moe(x, *topk(logits(x), 1, renormalize=False, scoring="sigmoid"), gate_up, down)

    return mix


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
