# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of a decoder on a GPU: 4-bit experts, stacked, and a dense router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.check import Array
from cupy_awq.checkpoint import Module
from cupy_awq.kernels.decoder import decoder as kernels
from cupy_awq.kernels.experts.layer import plan_routing
from cupy_awq.kernels.experts.routing import MAX_ROUTED_WIDTH, ExpertChoice
from cupy_awq.llm.decoder import upload
from cupy_awq.llm.decoder.backend import MlpWeights
from cupy_awq.llm.decoder.cuda_steps import LaunchingOps
from cupy_awq.llm.decoder.forward import Norm, Projection
from cupy_awq.llm.families.description import Experts, LinearSpec, Mlp
from cupy_awq.llm.files.model_files import DenseLinear, Linear
from cupy_awq.ops.experts import moe, topk
from cupy_awq.ops.moe_layer import MoeLayer
from cupy_awq.ops.packed_experts import PackedExperts
from cupy_awq.runtime import placement

MAX_ROUTED_TOKENS = 4
"""The largest number of tokens whose RMSNorm and router one kernel computes."""


class Mixture:
    """A mixture of experts: the function from x [.., hidden] to its result; see `DecoderOps.make_experts`.

    Raises ValueError unless the experts have 4-bit codes of one form, and the router and gate are dense.
    """

    def __init__(
        self,
        ops: LaunchingOps,
        dtype: np.dtype[Any],
        batch_invariant: bool,
        spec: Experts,
        router: Linear,
        bias: npt.NDArray[Any] | None,
        experts: Sequence[MlpWeights],
        shared: MlpWeights | None,
        shared_gate: Linear | None,
    ) -> None:
        import cupy

        self._ops, self._dtype, self._options = ops, dtype, spec.router
        self._batch_invariant = batch_invariant
        self._logits = _DenseLogits(ops, dtype, spec.router.linear, router)
        self._shared = _make_shared(ops, dtype, batch_invariant, spec, shared, shared_gate)
        self._weights = _stack_mlps([spec.mlp(i) for i in range(len(experts))], experts)
        self._bias = None if bias is None else cupy.asarray(bias.astype(np.float32))
        self._counters = cupy.zeros(MAX_ROUTED_TOKENS, np.uint32)

    def __call__(self, x: Array) -> Array:
        rows, options = x.reshape(-1, x.shape[-1]), self._options
        ids, weights = topk(
            self._logits(rows),
            options.top_k,
            renormalize=options.renormalize,
            scoring=options.scoring,
            bias=self._bias,
            groups=options.groups,
            scale=options.scale,
        )
        return self._mix(rows, ids, weights).reshape(x.shape)

    def mix_stream(self, h: Array, delta: Array | None, norm: Norm) -> Array | None:
        """Add delta [.., hidden] to the residual stream h [.., hidden] in place and return the result for its RMSNorm.

        Returns None, and does nothing, if no kernel computes the norm and the router together.
        """
        import cupy

        options, width = self._options, h.shape[-1]
        m, experts = h.size // width, options.linear.n
        is_large = m > MAX_ROUTED_TOKENS or width > MAX_ROUTED_WIDTH or self._logits.parts > 1
        if self._batch_invariant or is_large:
            return None
        groups, is_sigmoid, has_bias = options.groups or (1, 1), options.scoring == "sigmoid", self._bias is not None
        choice = ExpertChoice(
            m, experts, options.top_k, "float32", is_sigmoid, has_bias, options.renormalize, *groups, options.scale,
            experts,
        )  # fmt: skip
        plan = plan_routing(self._ops.device, choice, width, self._dtype.name, norm.eps, delta is not None)
        x, logits = cupy.empty((m, width), self._dtype), cupy.empty((m, experts), np.float32)
        ids, weights = cupy.empty((m, options.top_k), np.int32), cupy.empty((m, options.top_k), np.float32)
        read = {"delta": delta, "norm_weight": norm.weight, "router": self._logits.weight, "bias": self._bias}
        written = {"h": h, "x": x, "logits": logits, "counters": self._counters, "ids": ids, "weights": weights}
        self._ops.run(plan, **read, **written)
        return self._mix(x, ids, weights).reshape(h.shape)

    def _mix(self, rows: Array, ids: Array, weights: Array) -> Array:
        """Return the weighted sum of each token's experts, plus the result of the shared expert."""
        shared = None if self._shared is None else self._shared(rows)
        return moe(rows, ids, weights, *self._weights, shared=shared, batch_invariant=self._batch_invariant)


class _DenseLogits:
    """A dense linear layer with float32 results: a function from rows of x.

    Attributes:
        weight: array [parts * N, K] of the dtype of x. A float32 weight is the sum of two weights of this dtype.
        parts: the number of weights, 1 or 2.
    """

    def __init__(self, ops: LaunchingOps, dtype: np.dtype[Any], spec: LinearSpec, part: Linear) -> None:
        import cupy

        if not isinstance(part, DenseLinear):
            raise ValueError(f"{spec.name}: expected a dense linear layer on a GPU, got a quantized one")
        high = part.weight.astype(dtype)
        low = (part.weight.astype(np.float32) - high.astype(np.float32)).astype(dtype)
        self.parts = 2 if low.any() else 1
        self.weight = cupy.asarray(np.concatenate([high, low][: self.parts]))
        self._ops, self._dtype = ops, dtype

    def __call__(self, rows: Array) -> Array:
        import cupy

        (m, k), n = rows.shape, len(self.weight)
        y = cupy.empty((m, n), np.float32)
        plan = kernels.plan_dense(self._ops.device, m, n, k, self._dtype.name, "float32", bias=False)
        self._ops.run(plan, x=cupy.ascontiguousarray(rows), w=self.weight, bias=None, y=y)
        return y if self.parts == 1 else y[:, : n // 2] + y[:, n // 2 :]


def _make_shared(
    ops: LaunchingOps,
    dtype: np.dtype[Any],
    batch_invariant: bool,
    spec: Experts,
    weights: MlpWeights | None,
    gate: Linear | None,
) -> Projection | None:
    """Return the function from rows of x to the result of the shared expert, if there is one, times its gate.

    With a gate it is a mixture of one expert, whose weight is the sigmoid of the gate's logit.
    """
    if weights is None or spec.shared is None:
        return None
    if gate is None or spec.shared_gate is None:
        project, leave = ops.make_projection(weights[:2], gated=True), ops.make_projection(weights[2:])
        return lambda x: leave(project(x))
    logits = _DenseLogits(ops, dtype, spec.shared_gate, gate)
    layer = MoeLayer(*_stack_mlps([spec.shared], [weights]), batch_invariant=batch_invariant)
    return lambda x: layer(x, *topk(logits(x), 1, renormalize=False, scoring="sigmoid"))


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
        width = sum(getattr(part.weight, name).shape[1] for part in modules[0])
        out = cupy.empty((len(modules), len(getattr(first.weight, name)), width), getattr(first.weight, name).dtype)
        for row, parts in zip(out, modules, strict=True):
            placement.copy_to(row, np.concatenate([getattr(part.weight, name) for part in parts], axis=1))
        return out

    bias = None
    if any(part.bias is not None for parts in modules for part in parts):
        rows = [[np.zeros(p.weight.shape[1]) if p.bias is None else p.bias for p in parts] for parts in modules]
        bias = cupy.asarray(np.stack([np.concatenate(row) for row in rows]).astype(np.float32))
    return PackedExperts(stack("qweight"), stack("scales"), stack("qzeros"), bias=bias)
