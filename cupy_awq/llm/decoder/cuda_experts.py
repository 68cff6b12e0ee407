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
from cupy_awq.llm.decoder.forward import Projection
from cupy_awq.llm.families.description import Experts
from cupy_awq.llm.files.model_files import Linear
from cupy_awq.ops.experts import moe, topk
from cupy_awq.ops.packed_experts import PackedExperts


def make_experts(
    spec: Experts,
    logits: Projection,
    bias: npt.NDArray[Any] | None,
    experts: Sequence[tuple[Linear, Linear, Linear]],
    shared: Projection | None,
    shared_gate: Projection | None,
) -> Projection:
    """Return the function from x to the result of a mixture of experts; see `DecoderOps.make_experts`.

    ``logits`` is the linear layer of the router, with float32 results. Raises ValueError if the experts do not have
    4-bit codes of one form, or if a gate multiplies the result of the shared expert.
    """
    import cupy

    if shared_gate is not None:
        raise ValueError("shared_expert_gate: expected a model without one on a GPU, got one")
    options = spec.router
    gate_up = stack_experts([expert[:2] for expert in experts])
    down = stack_experts([expert[2:] for expert in experts])
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


def stack_experts(experts: Sequence[Sequence[Linear]]) -> PackedExperts:
    """Return the weights of all experts on the GPU; the linear layers of an expert share x and are concatenated.

    Raises ValueError unless all layers have 4-bit codes of one form and no activation order.
    """
    import cupy

    parts = [part for expert in experts for part in expert if isinstance(part, Module)]
    forms = {upload.form(part) for part in parts}
    if len(parts) != sum(map(len, experts)) or len(forms) > 1 or parts[0].order is not None:
        raise ValueError(
            "experts: expected 4-bit codes of one group size, dtype and form of zeros, and no activation order, on a "
            f"GPU, got {len(parts)} such layers of {len(forms)} forms"
        )

    def stack(name: str) -> Any:
        if getattr(parts[0].weight, name) is None:
            return None
        rows = [np.concatenate([getattr(part.weight, name) for part in expert], axis=-1) for expert in experts]
        return cupy.asarray(np.stack(rows))

    bias = None
    if any(part.bias is not None for part in parts):
        rows = [[np.zeros(p.weight.shape[1]) if p.bias is None else p.bias for p in expert] for expert in experts]
        bias = cupy.asarray(np.stack([np.concatenate(row) for row in rows]).astype(np.float32))
    return PackedExperts(stack("qweight"), stack("scales"), stack("qzeros"), bias=bias)
