# SPDX-License-Identifier: Apache-2.0
"""The CPU back end of the decoder: NumPy, with activations and KV cache in float32."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq import expert_reference, reference
from cupy_awq.check import HOST
from cupy_awq.checkpoint import Module
from cupy_awq.expert_check import TopK
from cupy_awq.linear import AwqLinear
from cupy_awq.llm.decoder import states
from cupy_awq.llm.decoder.backend import OPTIONS, DecoderOps, Forward, MlpWeights
from cupy_awq.llm.decoder.block_pool import BLOCK, count_blocks
from cupy_awq.llm.decoder.forward import Attend, ColumnOrder, HostOrder, Norm, Operation, Project, Projection
from cupy_awq.llm.decoder.states import KvState, PagedRows, Pages, Run
from cupy_awq.llm.families.description import Decoder, Experts
from cupy_awq.llm.files.model_files import DenseLinear, Int8Module, Linear
from cupy_awq.packing import namespace, to_host

Array = npt.NDArray[Any]

STREAMED_VALUES = 1 << 22
"""The number of elements of a dense weight converted to float32 at a time if ``expand_weights`` is False."""


class NumpyOps(DecoderOps):
    """The implementation of `DecoderOps` on the CPU.

    Args:
        config: the description of the decoder.
        expand_weights: True to keep all weights in float32, which is faster; False to convert the weights block by
            block in each GEMM. By default True if float32 weights take at most half of the machine's memory.
        xp: the array module. With CuPy, which calibration uses, the same operations run in float32 on the current GPU
            with expanded weights.
        batch_invariant: the option of `cupy_awq.llm.load`. If True, GEMMs and attention are computed for each token
            separately.
    """

    options = OPTIONS
    device_index = HOST
    int8_min_k = sys.maxsize
    rotates_parts = True
    prefill_chunk = 512
    has_pages = True

    def __init__(
        self,
        config: Decoder,
        *,
        expand_weights: bool | None = None,
        xp: Any = np,
        batch_invariant: bool = False,
    ) -> None:
        config.require(self.options, "on a CPU")
        self.config, self.xp = config, xp
        self._batch_invariant = batch_invariant
        self._multiply = reference.multiply_rows if batch_invariant else xp.matmul
        weights = sum(linear.k * linear.n for layer in config.layers for linear in layer.linears)
        float32_bytes = 4 * (weights + config.vocab * config.hidden)
        self._expands = float32_bytes <= _memory_bytes() // 2 if expand_weights is None else expand_weights

    def prepare_tensor(self, a: Array) -> Array:
        return self.xp.asarray(a.astype(np.float32)) if a.ndim == 1 else a

    def prepare_order(self, order: npt.NDArray[np.int32]) -> ColumnOrder:
        return ColumnOrder(self.xp.asarray(order), self.xp.argsort(self.xp.asarray(order)).astype(np.int32))

    def prepare_tokens(self, ids: Sequence[int]) -> Array:
        return np.array(ids, np.int64)

    def make_projection(
        self, parts: Sequence[Linear], *, gated: bool = False, column_order: HostOrder = None
    ) -> Projection:
        plain = [part.dequantize() if isinstance(part, Int8Module) else part for part in parts]
        project = self._expanded(plain) if self._expands else self._streamed(plain)
        activate: Projection = _swiglu if gated else lambda y: y
        if column_order is None:
            return lambda x: activate(project(x))
        offsets = np.cumsum([0, *map(_out_features, plain)])[:-1, None]
        columns = (offsets + column_order).reshape(-1)
        return lambda x: activate(project(x)[..., columns])

    def make_experts(
        self,
        spec: Experts,
        router: Linear,
        bias: Array | None,
        experts: Sequence[MlpWeights],
        shared: MlpWeights | None,
        shared_gate: Linear | None,
    ) -> Projection:
        def mlp(parts: MlpWeights) -> Projection:
            gate_up, down = self.make_projection(parts[:2], gated=True), self.make_projection(parts[2:])
            return lambda x: down(gate_up(x))

        logits, mlps = self.make_projection([router]), list(map(mlp, experts))
        own = None if shared is None else mlp(shared)
        gate = None if shared_gate is None else self.make_projection([shared_gate])
        return mix_experts(spec, logits, bias, mlps, own, gate)

    def make_head(self, part: Linear) -> Projection:
        return self.make_projection([part])

    def make_pages(self, tokens: int | None, positions: int) -> Pages:
        layers, total_bytes = self.config.layers, _memory_bytes()
        block_bytes = states.count_bytes(layers, BLOCK, 4)
        blocks = total_bytes // 8 // block_bytes if tokens is None else count_blocks(tokens)
        states.check_size(blocks * block_bytes, total_bytes // 2, blocks * BLOCK)
        return states.allocate_pages(layers, blocks, positions, np.float32, self.xp)

    def make_forward(self, table: Array, operations: Sequence[Operation]) -> Forward:
        return lambda tokens, rows: self.run(operations, self.embed(table, tokens), rows)[1]

    def embed(self, table: Array, tokens: Array) -> Array:
        """Return the rows of the embedding table [V, hidden] for tokens [B, S] in float32."""
        rows: Array = self.xp.asarray(table[tokens].astype(np.float32))
        return rows

    def run(self, operations: Iterable[Operation], h: Array, rows: PagedRows) -> tuple[Array, Array]:
        """Execute operations on the residual stream h, float32 [1, M, hidden], in place; return h and the last x."""
        x = h
        for operation in operations:
            if isinstance(operation, Norm):
                x = _rms_norm(h, operation)
            elif isinstance(operation, Project):
                x = operation.projection(x)
            elif isinstance(operation, Attend):
                x = self._attend(operation, x, rows)
            else:
                np.add(h, operation.projection(x), out=h)
        return h, x

    def _attend(self, attend: Attend, qkv: Array, rows: PagedRows) -> Array:
        """Return x [1, M, q_width] of an `Attend`, for the queries, keys and values of each token."""
        spec, state = attend.spec, rows.layers[attend.layer]
        heads = qkv.reshape(-1, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        q, k, v = np.split(heads, [spec.heads, spec.heads + spec.kv_heads], axis=1)
        if attend.q_norm is not None:
            q = _rms_norm(q, attend.q_norm)
        if attend.k_norm is not None:
            k = _rms_norm(k, attend.k_norm)
        cos, sin = (table[rows.positions][:, None] for table in rows.rotations[spec.rope])
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out: Array = self.xp.empty((1, len(q), spec.q_width), np.float32)
        for run in rows.runs:
            state.append(run, k[run.rows], v[run.rows])
            self._attend_run(run, q[run.rows], state, out[0, run.rows])
        return out if attend.order is None else out[..., attend.order.order]

    def to_numpy(self, a: Array) -> Array:
        return a

    def _attend_run(self, run: Run, q: Array, state: KvState, out: Array) -> None:
        """Write the causal attention of the queries [S, heads, head_dim] of a run, after RoPE, to [S, q_width]."""
        step = 1 if self._batch_invariant else len(q)
        keys, values = state.read(run)
        for first in range(0, len(q), step):
            known = slice(run.start + first + step)
            out[first : first + step] = self._mix_values(q[first : first + step], keys[:, known], values[:, known])

    def _mix_values(self, q: Array, keys: Array, values: Array) -> Array:
        """Return the causal attention [S, q_width] of the last S of T tokens; keys, values: [kv_heads, T, head_dim]."""
        s, heads, head_dim = q.shape
        kv_heads, t, _ = keys.shape
        xp = self.xp
        # Group the query heads that share a key head: [kv_heads, heads / kv_heads * S, head_dim].
        grouped = q.swapaxes(0, 1).reshape(kv_heads, -1, head_dim)
        scores = grouped @ keys.swapaxes(1, 2)
        scores *= np.float32(head_dim**-0.5)
        if s > 1:
            is_future = xp.arange(t) > t - s + xp.arange(s)[:, None]
            scores.reshape(heads, s, -1)[:, is_future] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = scores @ values
        mixed /= scores.sum(axis=-1, keepdims=True)
        attended: Array = mixed.reshape(heads, s, head_dim).swapaxes(0, 1).reshape(s, -1)
        return attended

    def _expanded(self, parts: Sequence[Module | DenseLinear]) -> Projection:
        """Return a projection for all parts that keeps their concatenated weights as one float32 matrix."""
        weights = [_float32_weight(part) for part in parts]
        weight = np.concatenate(weights, axis=1) if len(weights) > 1 else weights[0]  # also concatenates CuPy arrays
        sizes = [_out_features(part) for part in parts]
        xp = self.xp
        biases = [
            xp.zeros(n, np.float32) if p.bias is None else p.bias.astype(np.float32)
            for p, n in zip(parts, sizes, strict=True)
        ]
        bias = np.concatenate(biases) if any(part.bias is not None for part in parts) else None

        def project(x: Array) -> Array:
            y: Array = self._multiply(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)
            if bias is not None:
                y += bias
            return y

        return project

    def _streamed(self, parts: Sequence[Module | DenseLinear]) -> Projection:
        """Return a projection for all parts that converts their weights to float32 block by block at each call."""
        linears: list[Projection] = [
            AwqLinear(part.weight, bias=part.bias, order=part.order, batch_invariant=self._batch_invariant)
            if isinstance(part, Module)
            else _streamed_dense(part, self._multiply)
            for part in parts
        ]

        def project(x: Array) -> Array:
            return np.concatenate([linear(x) for linear in linears], axis=-1)

        return project


def mix_experts(
    spec: Experts,
    logits: Projection,
    bias: Array | None,
    mlps: Sequence[Projection],
    shared: Projection | None,
    shared_gate: Projection | None,
) -> Projection:
    """Return the function from x to a mixture of experts, for functions from rows of x, float32 [M, hidden]."""
    options = spec.router
    choice = TopK(options.top_k, options.renormalize, options.scoring, options.groups or (1, 1), options.scale)
    correction = None if bias is None else to_host(bias).astype(np.float32)

    def mix(x: Array) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        xp = namespace(rows)
        ids, host_weights = expert_reference.choose_experts(to_host(logits(rows)), choice, correction)
        weights = xp.asarray(host_weights)
        terms = np.zeros_like(rows, shape=(*ids.shape, rows.shape[1]))
        for expert in map(int, np.unique(ids)):
            tokens, slots = map(xp.asarray, np.nonzero(ids == expert))
            terms[tokens, slots] = mlps[expert](rows[tokens]) * weights[tokens, slots, None]
        y = np.zeros_like(rows)
        for slot in range(options.top_k):  # the order of the kernels' additions
            y += terms[:, slot]
        if shared is not None:
            own = shared(rows)
            y += own if shared_gate is None else own / (np.float32(1) + np.exp(-shared_gate(rows)))
        return y.reshape(x.shape)

    return mix


def _memory_bytes() -> int:
    """Return the size of the machine's memory in bytes, or 8 GiB if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 << 30


def _rms_norm(x: Array, norm: Norm) -> Array:
    scale = np.float32(1) / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(norm.eps))
    normed: Array = x * scale * norm.weight
    return normed


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Apply RoPE to x [..., head_dim], rotating the pairs (i, i + r) of the first 2 r elements; cos, sin [..., r]."""
    half = cos.shape[-1]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _swiglu(y: Array) -> Array:
    gate, up = np.split(y, 2, axis=-1)
    with np.errstate(over="ignore"):  # if exp(-gate) overflows to inf, the result is 0, the correct limit
        result: Array = gate / (np.float32(1) + np.exp(-gate)) * up
    return result


def _out_features(part: Module | DenseLinear) -> int:
    return part.weight.shape[1] if isinstance(part, Module) else part.weight.shape[0]


def _float32_weight(part: Module | DenseLinear) -> Array:
    """Return the weight of a layer as float32 [K, N]."""
    if isinstance(part, DenseLinear):
        return part.weight.T.astype(np.float32)
    weight = part.weight
    rows = reference.dequantize(weight.qweight, weight.scales, weight.qzeros, dtype=np.float32)
    if part.order is None:
        return rows
    w = np.empty_like(rows)
    w[part.order] = rows
    return w


def _streamed_dense(part: DenseLinear, multiply: Callable[[Array, Array], Array]) -> Projection:
    """Return a function that multiplies x by the weight of a dense layer and adds the bias.

    The function converts about `STREAMED_VALUES` elements of the weight to float32 at a time, to save memory.
    """
    weight = part.weight
    rows = max(1, STREAMED_VALUES // weight.shape[1])

    def project(x: Array) -> Array:
        flat = x.reshape(-1, x.shape[-1])
        blocks = [multiply(flat, weight[i : i + rows].astype(np.float32).T) for i in range(0, len(weight), rows)]
        y = np.concatenate(blocks, axis=-1).reshape(*x.shape[:-1], -1)
        return y if part.bias is None else y + part.bias.astype(np.float32)

    return project
