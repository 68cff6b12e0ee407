# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of experts: random weights and routings, float64 formulas, and launches on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq.kernels.experts.layer import ExpertForm, Steps
from cupy_awq.kernels.experts.routing import SORT_TOKENS, TokenSort
from cupy_awq.kernels.family import SoleConfig
from cupy_awq.kernels.gemm.layouts import FragmentLayout
from cupy_awq.kernels.gemm.problem import FRAGMENTS
from cupy_awq.ops.packed_experts import PackedExperts
from cupy_awq.ops.repack import find_scaling
from cupy_awq.runtime import device
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.tools.testing import random_weight
from tests.backends import Run
from tests.test_reference import float64_epilogue, float64_weight

Array = Any


def random_experts(
    rng: np.random.Generator, experts: int, k: int, n: int, group_size: int, **options: Any
) -> PackedExperts:
    """Return random weights of all experts, with a bias of the dtype ``bias``; other options go to `random_weight`."""
    bias = options.pop("bias", None)
    weights = [random_weight(rng, k, n, group_size, **options) for _ in range(experts)]
    parts = [np.stack([getattr(w, name) for w in weights]) for name in ("qweight", "scales")]
    zeros = None if weights[0].qzeros is None else np.stack([w.qzeros for w in weights])
    added = None if bias is None else rng.standard_normal((experts, n)).astype(bias)
    return PackedExperts(*parts, zeros, bias=added)


def on_gpu(weights: PackedExperts, dtype: str) -> PackedExperts:
    """Return experts on the GPU, with the AWQ tensors if bfloat16 x needs them, as on sm_75."""
    import cupy

    needs_awq = dtype == "bfloat16" and not device.current().has(Capability.BFLOAT16)
    return PackedExperts(*map(cupy.asarray, (weights.qweight, weights.scales, weights.qzeros)), keep_weight=needs_awq)


def float64_rows(x: Array, ids: Array, weight: PackedExperts, activation: str | None) -> Array:
    """Return row p of activation(x[p] @ W[ids[p]] + bias) in float64; 0 where ids[p] is not the number of an expert."""
    n = weight.shape[2]
    y = np.zeros((len(x), n // 2 if activation else n))
    for expert in range(weight.shape[0]):
        rows = np.flatnonzero(ids == expert)
        zeros = None if weight.qzeros is None else weight.qzeros[expert]
        v = x[rows].astype(np.float64) @ float64_weight(weight.qweight[expert], weight.scales[expert], zeros)
        if weight.bias is not None:
            v = v + weight.bias[expert].astype(np.float64)
        y[rows] = gated(v, activation) if activation else v
    return y


def gated(v: Array, activation: str) -> Array:
    """Return activation(gate) * up for rows v = [gate, up]: SiLU for "swiglu", else GELU."""
    if activation == "swiglu":
        return float64_epilogue(v, "swiglu", 0.0)
    gate, up = np.split(v, 2, axis=1)
    if activation == "clamped_swiglu":
        gate = np.minimum(gate, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7, 7) + 1)
    return float64_epilogue(gate, "gelu", 0.0) * up


def error_of(y: Array, expected: Array) -> float:
    """Return the norm of the error relative to the norm of the expected values; NaN counts as infinite."""
    y = np.asarray(y, np.float64)
    if not np.isfinite(y).all():
        return float("inf")
    return float(np.linalg.norm(y - expected) / max(np.linalg.norm(expected), 1e-30))


def form_of(weight: PackedExperts) -> ExpertForm:
    """Return the sizes and dtypes of experts' weights, in the AWQ layout, by which their kernels are chosen."""
    return weight.form


def repack_experts(run: Run, weight: PackedExperts, here: Device) -> tuple[Array, ExpertForm]:
    """Repack each expert's weight by the kernel; return the bytes of all of them and their properties."""
    form = weight.form
    layout = FragmentLayout(form.k, form.n, form.group_size, form.scales_dtype, form.zeros)
    out = np.empty((form.experts, layout.nbytes), np.uint8)
    for expert in range(form.experts):
        part = np.full(layout.nbytes, 255, np.uint8)
        zeros = None if weight.qzeros is None else weight.qzeros[expert].copy()
        tensors = {"qweight": weight.qweight[expert].copy(), "scales": weight.scales[expert].copy(), "qzeros": zeros}
        run(layout.pack(here), {**tensors, "out": part})
        out[expert] = part
    exponent, is_wide = find_scaling(weight.scales, weight.qzeros, form.zeros)
    return out, form._replace(layout=FRAGMENTS, scale_exponent=exponent, wide_scales=is_wide)


def run_steps(run: Run, steps: Steps, buffers: dict[str, Any], here: Device) -> None:
    """Launch the kernels of an operation one after the other.

    Memory that passes results between them starts as bytes of 255, NaN in 16-bit floats, so that reads of unwritten
    elements show.
    """
    scratch = {name: np.full(nbytes, 255, np.uint8) for name, nbytes in steps.scratch.items()}
    needed = steps.workspace(here)
    partials, counters = np.full(needed.partial_bytes, 255, np.uint8), np.zeros(needed.counters, np.uint32)
    memory = {**buffers, **scratch, "partials": partials, "counters": counters, "": None}
    for plan, names in steps.plans(here):
        run(plan, {name: memory[names[name]] for name in plan.buffers})


def sort_rows(run: Run, ids: Array, experts: int, block: int, here: Device, from_offsets: int = 0) -> dict[str, Array]:
    """Return what the kernel ``sort_tokens`` writes: rows sorted by expert, in blocks of ``block`` rows of one expert.

    If ``from_offsets`` is not 0, it is the number of rows, and ``ids`` holds the experts' first rows instead of ids.
    """
    problem = TokenSort(from_offsets or ids.size, experts, block, bool(from_offsets))
    found = {
        "ids": ids.reshape(-1),
        "sorted_pairs": np.full(problem.blocks * block, -7, np.int32),
        "experts": np.full(problem.blocks, -7, np.int32),
        "sorted_count": np.full(1, -7, np.int32),
    }
    run(SORT_TOKENS.plan(SoleConfig(), problem, here), found)
    del found["ids"]
    return found


def float64_layer(
    x: Array,
    ids: Array,
    weights: Array,
    gate_up: PackedExperts,
    down: PackedExperts,
    activation: str,
    shared: Array | None,
) -> Array:
    """Return a whole layer of experts in float64: the weighted sum of each token's experts. Invalid ids add nothing."""
    m, top_k = ids.shape
    h = float64_rows(np.repeat(x, top_k, 0), ids.reshape(-1), gate_up, activation)
    pairs = float64_rows(h, ids.reshape(-1), down, None).reshape(m, top_k, down.shape[2])
    y = (pairs * weights[:, :, None].astype(np.float64)).sum(axis=1)
    return y if shared is None else y + shared.astype(np.float64)


def float64_topk(
    logits: Array, k: int, renormalize: bool, scoring: str, bias: Array | None, groups: Any, scale: float
) -> tuple[Array, Array]:
    """Return the ids and weights of the k experts that a router chooses, computed token by token in float64."""
    all_ids, all_weights = [], []
    for row in logits.astype(np.float64):
        exponentials = np.exp(row - row.max())
        score = exponentials / exponentials.sum() if scoring == "softmax" else 1 / (1 + np.exp(-row))
        choice = score + (0 if bias is None else bias.astype(np.float64))
        if groups is not None:
            parts = np.split(choice, groups[0])
            ranks = sorted(range(groups[0]), key=lambda g: (-np.sort(parts[g])[-2:].sum(), g))
            kept = {g * len(parts[0]) + i for g in ranks[: groups[1]] for i in range(len(parts[0]))}
            choice = np.array([c if e in kept else -np.inf for e, c in enumerate(choice)])
        ids = sorted(range(len(row)), key=lambda e: (-choice[e], e))[:k]
        all_ids.append(ids)
        all_weights.append(score[ids] / (score[ids].sum() if renormalize else 1) * scale)
    return np.array(all_ids, np.int32).reshape(-1, k), np.array(all_weights).reshape(-1, k)


def vllm_arrays(ids: Array, experts: int, block: int) -> tuple[Array, Array, Array]:
    """Return (sorted_token_ids, expert_ids, num_tokens_post_padded) as vLLM's moe_align_block_size computes them."""
    flat = ids.reshape(-1)
    rows: list[int] = []
    blocks: list[int] = []
    for expert in range(experts):
        own = np.flatnonzero(flat == expert).tolist()
        own += [flat.size] * (-len(own) % block)
        rows += own
        blocks += [expert] * (len(own) // block)
    capacity = flat.size + experts * (block - 1)
    sorted_ids = np.full(capacity, flat.size, np.int32)
    sorted_ids[: len(rows)] = rows
    expert_ids = np.full(-(-capacity // block), -1, np.int32)
    expert_ids[: len(blocks)] = blocks
    return sorted_ids, expert_ids, np.array([len(rows)], np.int32)
