# SPDX-License-Identifier: Apache-2.0
"""The NumPy implementation of mixture-of-experts operations: the reference for the kernels, and the CPU path.

The weights are any objects with the attributes of `cupy_awq.PackedExperts`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq import reference
from cupy_awq.activation import Activation
from cupy_awq.check import FLOAT32
from cupy_awq.expert_check import TopK
from cupy_awq.packing import round_once

Array = npt.NDArray[Any]

LEAST_SUM = np.float32(1e-20)
"""The number that is added to a sum of scores before the division by it, so that scores of 0 do not give NaN."""


LOWEST = np.finfo(np.float32).min
"""The value of a score that is NaN in the choice; the scores of dropped groups are lower."""


@np.errstate(over="ignore", invalid="ignore")
def choose_experts(router_logits: Array, options: TopK, bias: Array | None) -> tuple[Array, Array]:
    """Compute `topk` for validated arguments."""
    logits = router_logits.astype(np.float32)
    logits[np.isnan(logits)] = -np.inf
    if options.scoring == "softmax":
        finite = np.maximum(logits.max(axis=1, keepdims=True), LOWEST)
        scores = np.exp(logits - finite)
        scores /= scores.sum(axis=1, keepdims=True) + LEAST_SUM
    else:
        scores = np.float32(1) / (np.float32(1) + np.exp(-logits))
    chosen_by = np.fmax(scores if bias is None else scores + bias, LOWEST)
    m, experts = scores.shape
    count, kept = options.groups
    if count > 1:
        members = chosen_by.reshape(m, count, experts // count)
        best = np.fmax(np.sort(members, axis=2)[:, :, -2:].sum(axis=2), LOWEST)
        dropped = np.argsort(-best, axis=1, kind="stable")[:, kept:]
        members = members.copy()
        np.put_along_axis(members, dropped[:, :, None], -np.inf, axis=1)
        chosen_by = members.reshape(m, experts)
    ids = np.argsort(-chosen_by, axis=1, kind="stable")[:, : options.k]
    weights = np.take_along_axis(scores, ids, axis=1)
    if options.renormalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + LEAST_SUM)
    return ids.astype(np.int32), weights * np.float32(options.scale)


def multiply_rows_by_experts(
    x: Array, ids: Array, weight: Any, form: Activation, batch_invariant: bool = False
) -> Array:
    """Return row i of ``form(x[i] @ W[ids[i]] + bias[ids[i]])`` in float32, for x [M, K] and ids int32 [M]."""
    columns = weight.spec.weight.n // (2 if form.gated else 1)
    y = np.zeros((len(x), columns), np.float32)
    for expert in np.unique(ids):
        rows = np.flatnonzero(ids == expert)
        zeros = None if weight.qzeros is None else weight.qzeros[expert]
        bias = None if weight.bias is None else weight.bias[expert]
        parts = x[rows].astype(np.float32), weight.qweight[expert], weight.scales[expert], zeros
        y[rows] = form(reference.matmul(*parts, bias=bias, batch_invariant=batch_invariant))
    return y


def list_rows(routing: list[Array], is_blocked: bool, block_size: int, pairs: int) -> tuple[Array, Array]:
    """Return the rows of x that `gemm_grouped` multiplies, and the expert of each; ``routing`` is in either form.

    >>> list_rows([np.array([0, 1, 1, 3], np.int32)], False, 0, 3)
    (array([0, 1, 2]), array([0, 2, 2]))
    """
    if not is_blocked:
        return np.arange(pairs), np.repeat(np.arange(len(routing[0]) - 1), np.diff(routing[0]))
    sorted_ids, experts, count = routing
    rows = sorted_ids[: count[0]].astype(np.int64)
    ids = np.repeat(experts, block_size)[: len(rows)]
    exists = (rows < pairs) & (ids >= 0)
    return rows[exists], ids[exists]


def mix_experts(
    x: Array,
    topk_ids: Array,
    topk_weights: Array,
    gate_up: Any,
    down: Any,
    form: Activation,
    shared: Array | None,
    batch_invariant: bool = False,
) -> Array:
    """Compute `moe` for validated arguments.

    The result of the activation is rounded to the dtype of x, which the second product takes; sums are float32.
    """
    m, top_k = topk_ids.shape
    ids, tokens = topk_ids.reshape(-1), np.repeat(np.arange(m), top_k)
    h = round_once(multiply_rows_by_experts(x[tokens], ids, gate_up, form, batch_invariant), x.dtype)
    pairs = multiply_rows_by_experts(h, ids, down, Activation(), batch_invariant)
    pairs = pairs.reshape(m, top_k, down.spec.weight.n)
    y = np.zeros((m, down.spec.weight.n), FLOAT32)
    for slot in range(top_k):  # adds slot by slot, in the order of the kernels
        y += pairs[:, slot] * topk_weights[:, slot, None]
    result: Array = round_once(y if shared is None else y + shared.astype(np.float32), x.dtype)
    return result
