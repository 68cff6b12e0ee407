# SPDX-License-Identifier: Apache-2.0
"""``topk``, ``gemm_grouped`` and ``moe``: the operations of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cupy_awq import check, check_scalar, expert_check, expert_reference, overlap
from cupy_awq.activation import Activation
from cupy_awq.check import FLOAT32, HOST, INT32, Array
from cupy_awq.kernels.experts.layer import ExpertLayer, Steps, choose_block, plan_layer, sort_step, sorted_product
from cupy_awq.kernels.experts.routing import ExpertChoice
from cupy_awq.ops.chosen_kernel import choose_kernel
from cupy_awq.ops.packed_experts import PackedExperts, check_experts
from cupy_awq.packing import round_once
from cupy_awq.runtime import arrays, device, placement
from cupy_awq.runtime import workspace as workspaces
from cupy_awq.runtime.launcher import get_launcher


def topk(
    router_logits: Array,
    k: int,
    /,
    *,
    renormalize: bool = True,
    scoring: str = "softmax",
    bias: Array | None = None,
    groups: tuple[int, int] | None = None,
    scale: float = 1.0,
) -> tuple[Array, Array]:
    """Return the experts of each token and their weights, as routers of mixtures of experts choose them.

        score = softmax(logits) or sigmoid(logits), in float32
        ids = the k experts with the largest score + bias, the largest first; the lowest index among equals
        weights = score[ids] / (sum(score[ids]) + 1e-20) * scale

    A logit that is NaN counts as -infinity; with softmax, one of +infinity makes the weights of its token NaN, and a
    score + bias that is NaN counts as the lowest in the choice. The sum of the softmax has the addend 1e-20, too, so
    that scores of 0 do not give NaN. "top-k, then softmax over the k logits" is the same as the default.

    Args:
        router_logits: [M, E] float16, bfloat16 or float32 with contiguous rows.
        k: number of experts per token.
        renormalize: False to leave out the division by the sum.
        scoring: "softmax", or "sigmoid" as in DeepSeek-V3 and GLM-4.5.
        bias: float32 [E], which affects the choice only, or None.
        groups: (number of groups of E / number adjacent experts, number of groups to keep): experts are chosen from the
            groups with the largest sums of their two largest score + bias; or None.
        scale: positive factor of the weights.

    Returns:
        ids, int32 [M, k], and weights, float32 [M, k].

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or value.

    >>> import numpy as np
    >>> ids, weights = topk(np.log(np.array([[1, 4, 2, 1]], np.float32)), 2)
    >>> ids, weights.round(3)
    (array([[1, 2]], dtype=int32), array([[0.667, 0.333]], dtype=float32))
    """
    router_logits, bias = arrays.views(router_logits=router_logits, bias=bias)
    options = expert_check.validate_topk(router_logits, k, renormalize, scoring, bias, groups, scale)
    index = check.device_id(router_logits, "router_logits")
    if index == HOST:
        return expert_reference.choose_experts(router_logits, options, bias)
    import cupy

    m, experts = router_logits.shape
    with placement.use_device(index):
        ids, weights = cupy.empty((m, options.k), INT32), cupy.empty((m, options.k), FLOAT32)
        if m:
            logits = router_logits if router_logits.strides[1] == router_logits.dtype.itemsize else router_logits.copy()
            problem = ExpertChoice(
                m,
                experts,
                options.k,
                arrays.dtype_name(logits.dtype),
                options.scoring == "sigmoid",
                bias is not None,
                options.renormalize,
                *options.groups,
                options.scale,
                arrays.leading_dimension(logits),
            )
            choose_kernel(problem, index).launch({"logits": logits, "bias": bias, "ids": ids, "weights": weights})
    return ids, weights


def moe(
    x: Array,
    topk_ids: Array,
    topk_weights: Array,
    gate_up: PackedExperts,
    down: PackedExperts,
    /,
    *,
    activation: str = "swiglu",
    shared: Array | None = None,
    out: Array | None = None,
    batch_invariant: bool = False,
) -> Array:
    """Return the weighted sum of each token's experts, plus the result of a shared expert.

        y[m] = sum over slots s of topk_weights[m, s] * (h @ W_down[e] + b_down[e]) + shared[m],  e = topk_ids[m, s]
        h = activation(gate) * up,  (gate, up) = x[m] @ W_gate_up[e] + b_gate_up[e]

    h is rounded to the dtype of x, sums are float32 and in the order of the slots, and y is rounded once; on a GPU, the
    terms of the sum may be rounded before. Results are bit-identical from run to run. On a GPU, nothing synchronizes
    and no launch depends on the routing, so calls can be captured in a CUDA graph whose ids change between replays; as
    for `gemm`, calls on one stream share memory.

    Args:
        x: [M, K] float16, bfloat16 or float32.
        topk_ids: int32 [M, top_k], contiguous; an id may repeat. On a GPU, an id that is not in [0, E) adds nothing.
        topk_weights: float32 [M, top_k], contiguous.
        gate_up: the weights of both projections, E experts [K, 2 * width], gate first.
        down: the weights of E experts [width, N].
        activation: "swiglu" (silu); "geglu" (GELU in the tanh form), as in Gemma 4; or "clamped_swiglu", as in gpt-oss:
            h = g * sigmoid(1.702 g) * (u + 1) with g = min(gate, 7) and u = min(max(up, -7), 7).
        shared: array [M, N] of x's dtype to add, such as the result of a shared expert, or None.
        out: array [M, N] of x's dtype to fill and return; it may be ``shared``.
        batch_invariant: True to give each row of y the same bits whatever the other tokens and their number.

    Returns:
        y, [M, N] of x's dtype.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; on the CPU, an id is out of range.
        MemoryError: the memory of the GPU is exhausted.

    >>> import numpy as np
    >>> gate_up = PackedExperts(np.zeros((4, 64, 4), np.int32), np.full((4, 1, 32), 0.125, np.float16), None)
    >>> down = PackedExperts(np.full((4, 16, 8), -1, np.int32), np.full((4, 1, 64), 0.125, np.float16), None)
    >>> ids, weights = np.array([[1, 3]], np.int32), np.array([[0.5, 0.5]], np.float32)
    >>> moe(np.full((1, 64), -0.0625, np.float16), ids, weights, gate_up, down)[0, :2]
    array([220., 220.], dtype=float16)
    """
    x, topk_ids, topk_weights, shared, out = arrays.views(
        x=x, topk_ids=topk_ids, topk_weights=topk_weights, shared=shared, out=out
    )
    form, shape = validate_moe(x, topk_ids, topk_weights, gate_up, down, activation, shared, out)
    invariant = check_scalar.validate_flag(batch_invariant, "batch_invariant")
    index, element = gate_up.spec.weight.device, x.dtype
    if index == HOST:
        y = expert_reference.mix_experts(x, topk_ids, topk_weights, gate_up, down, form, shared, invariant)
        return arrays.deliver(y, out)
    with placement.use_device(index):
        y = _aligned_result(out, shape, element, index)
        if len(x):
            x, shared = readable(x), None if shared is None else readable(shared)
            routing = contiguous(topk_ids), contiguous(topk_weights)
            _launch(*plan_moe(x, *routing, gate_up, down, form, shared, y, invariant), index)
        return arrays.deliver(y, out)


def validate_moe(
    x: Array,
    topk_ids: Array,
    topk_weights: Array,
    gate_up: PackedExperts,
    down: PackedExperts,
    activation: str,
    shared: Array | None,
    out: Array | None,
) -> tuple[Activation, tuple[int, int]]:
    """Validate the arguments of `moe` and return the activation and the shape of y. Raises the errors of `moe`."""
    form = validate_layer(gate_up, down, activation)
    element = expert_check.validate_rows(x, gate_up.spec)
    expert_check.validate_routing(topk_ids, topk_weights, len(x), gate_up.spec)
    index, shape = gate_up.spec.weight.device, (len(x), down.spec.weight.n)
    for name, a in (("shared", shared), ("out", out)):
        if a is not None:
            check.validate_like_result(a, name, shape, element, index)
    if out is not None:
        check.validate_out(out, shape, element, index)
        overlap.validate_disjoint(out, x=x, topk_ids=topk_ids, topk_weights=topk_weights)
    return form, shape


def validate_layer(gate_up: PackedExperts, down: PackedExperts, activation: str) -> Activation:
    """Validate the weights and the activation of `moe` and return the activation. Raises the errors of `moe`."""
    check_experts(gate_up, "gate_up")
    check_experts(down, "down")
    expert_check.validate_layer(gate_up.spec, down.spec)
    return expert_check.validate_expert_activation(activation, required=True)


def plan_moe(
    x: Array,
    ids: Array,
    weights: Array,
    gate_up: PackedExperts,
    down: PackedExperts,
    form: Activation,
    shared: Array | None,
    y: Array,
    batch_invariant: bool,
) -> tuple[Steps, dict[str, Array | None]]:
    """Return the launches of `moe` for valid arrays on a GPU that kernels can read, and the buffers by name."""
    layer = ExpertLayer(
        len(x),
        ids.shape[1],
        gate_up.form_for(x.dtype),
        down.form_for(x.dtype),
        arrays.dtype_name(x.dtype),
        form,
        shared is not None,
        arrays.leading_dimension(x),
        arrays.leading_dimension(y),
        arrays.leading_dimension(shared),
        batch_invariant,
    )
    buffers = {"x": x, "ids": ids, "weights": weights, "shared": shared, "y": y}
    buffers |= {f"gate_up.{name}": a for name, a in gate_up.buffers.items()}
    buffers |= {f"down.{name}": a for name, a in down.buffers.items()}
    return plan_layer(layer, device.of(gate_up.spec.weight.device)), buffers


def gemm_grouped(
    x: Array,
    weight: PackedExperts,
    offsets: Array | tuple[Array, Array, Array],
    /,
    *,
    block_size: int | None = None,
    top_k: int = 1,
    activation: str | None = None,
    row_scale: Array | None = None,
    out: Array | None = None,
    batch_invariant: bool = False,
) -> Array:
    """Return the product of each row of x with the weight of its expert.

        y[p] = activation(x[p // top_k] @ W[e] + bias[e]) * row_scale[p]

    Args:
        x: [M, K] float16, bfloat16 or float32.
        weight: the weights of E experts [K, N].
        offsets: int32 [E + 1], for rows of x that are sorted by expert: rows offsets[e] to offsets[e + 1] - 1 are those
            of expert e, offsets[0] = 0 and offsets[E] = M. Or vLLM's arrays, int32 each: sorted_token_ids, expert_ids
            and num_tokens_post_padded: block b of ``block_size`` entries of sorted_token_ids holds rows p of y whose
            expert is expert_ids[b], or -1 for none; entries that are not below M * top_k are padding, at the end of a
            block.
        block_size: the number of rows per block of vLLM's arrays, a multiple of 8.
        top_k: number of rows of y per row of x; 1 with offsets.
        activation: None; or one of those of `moe`, for W of gate and up projections, so that y has N / 2 columns.
        row_scale: float32 [M * top_k], contiguous, or None.
        out: array with the shape and dtype of y to fill and return.
        batch_invariant: True to give each row of y the same bits whatever the other rows of x and their number.

    On a GPU, offsets are not checked: rows that they do not cover are not written, nothing is accessed out of bounds,
    and the call can be captured in a CUDA graph.

    Returns:
        y, [M * top_k, N] or [M * top_k, N / 2] of x's dtype.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; on the CPU, offsets do not ascend
            from 0 to M, or an entry of vLLM's arrays is out of range.
        MemoryError: the memory of the GPU is exhausted.

    >>> import numpy as np
    >>> scales = np.array([1, 2, 3], np.float16)[:, None, None] * np.ones((3, 1, 16), np.float16)
    >>> weight = PackedExperts(np.full((3, 32, 2), -1, np.int32), scales, None)
    >>> gemm_grouped(np.ones((3, 32), np.float16), weight, np.array([0, 1, 1, 3], np.int32))[:, 0]
    array([224., 672., 672.], dtype=float16)
    """
    check_experts(weight, "weight")
    x, row_scale, out = arrays.views(x=x, row_scale=row_scale, out=out)
    element, spec = expert_check.validate_rows(x, weight.spec), weight.spec
    form = expert_check.validate_expert_activation(activation, required=False)
    top_k = check_scalar.validate_integer(top_k, "top_k", 1)
    invariant = check_scalar.validate_flag(batch_invariant, "batch_invariant")
    index, pairs = spec.weight.device, len(x) * top_k
    shape = pairs, check.out_features(spec.weight.n, form)
    is_blocked = isinstance(offsets, tuple)
    routing = (
        arrays.views(**dict(zip(expert_check.BLOCK_ARRAYS, offsets, strict=False)))
        if is_blocked
        else arrays.views(offsets=offsets)
    )
    expert_check.validate_groups(routing, is_blocked, block_size, top_k, len(x), spec)
    if row_scale is not None:
        check.validate_like_result(row_scale, "row_scale", (pairs,), FLOAT32, index)
    if out is not None:
        check.validate_out(out, shape, element, index)
        overlap.validate_disjoint(out, x=x, row_scale=row_scale)
    if index == HOST:
        y = np.zeros(shape, element) if out is None else out
        rows, ids = expert_reference.list_rows(routing, is_blocked, block_size or 0, pairs)
        product = expert_reference.multiply_rows_by_experts(x[rows // top_k], ids, weight, form, invariant)
        y[rows] = round_once(product if row_scale is None else product * row_scale[rows, None], element)
        return y
    with placement.use_device(index):
        y = _aligned_result(out, shape, element, index)
        if pairs:
            sizes = block_size, len(routing[0]), index
            steps = _grouped_steps(weight, element, pairs, top_k, form, row_scale is not None, *sizes, invariant)
            buffers = {f"weight.{name}": a for name, a in weight.buffers.items()}
            buffers |= {"x": contiguous(x), "row_scale": row_scale, "y": y}
            if is_blocked:
                buffers |= dict(zip(("sorted_pairs", "experts", "sorted_count"), routing, strict=True))
            else:
                buffers |= {"offsets": contiguous(routing[0])}
            _launch(steps, buffers, index)
        return arrays.deliver(y, out)


def _grouped_steps(
    weight: PackedExperts,
    element: np.dtype[Any],
    pairs: int,
    top_k: int,
    form: Activation,
    has_scale: bool,
    block_size: int | None,
    capacity: int,
    index: int,
    invariant: bool,
) -> Steps:
    """Return the launches of `gemm_grouped`: a sort, unless the rows are in blocks already, and the product."""
    gpu, weights = device.of(index), weight.form_for(element)
    arguments = weights, element.name, pairs
    if block_size is not None:
        return Steps((sorted_product(*arguments, block_size, top_k, form, has_scale, capacity, invariant),), {})
    block = choose_block(sorted_product(*arguments, 8, top_k, form, has_scale, 0, invariant).problem, gpu)
    sort, scratch = sort_step(pairs, weights.experts, block, True, "offsets")
    return Steps((sort, sorted_product(*arguments, block, top_k, form, has_scale, 0, invariant)), scratch)


def _launch(steps: Steps, buffers: Mapping[str, Array | None], index: int) -> None:
    """Launch the steps of an operation on the current stream of the current GPU, whose ordinal is ``index``."""
    import cupy

    stream = cupy.cuda.get_current_stream().ptr
    scratch = workspaces.scratch_array(index, stream, max(steps.offsets[""], 1)).data.ptr
    workspace = workspaces.workspace_address(index, stream) if steps.workspace(device.of(index)).counters else 0
    for launcher, addresses in bind_steps(steps, buffers, scratch, workspace, index):
        launcher(addresses, stream)


def bind_steps(
    steps: Steps, buffers: Mapping[str, Array | None], scratch: int, workspace: int, index: int
) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield the launcher of each step and the addresses of its buffers.

    ``scratch`` and ``workspace`` are the addresses of the scratch memory, and of counters and partial sums.
    """
    addresses = {name: arrays.address(a) for name, a in buffers.items()} | {"": 0}
    addresses |= {"counters": workspace, "partials": workspace + workspaces.COUNTER_BYTES}
    addresses |= {name: scratch + offset for name, offset in steps.offsets.items() if name}
    for plan, names in steps.plans(device.of(index)):
        launcher = get_launcher(plan, index)
        yield launcher, tuple(addresses[names[name]] for name in launcher.buffers)


def _aligned_result(out: Array | None, shape: tuple[int, int], dtype: np.dtype[Any], index: int) -> Array:
    """Return ``out`` if kernels can write it with vectors of eight values, else a new array."""
    if out is not None and out.flags.c_contiguous and arrays.is_aligned(out):
        return out
    return arrays.empty(shape, dtype, index)


def readable(a: Array) -> Array:
    """Return a matrix whose rows start at multiples of 16 bytes: the argument, or a contiguous copy."""
    return a if arrays.has_readable_rows(a) and arrays.is_aligned(a) else a.copy()


def contiguous(a: Array) -> Array:
    """Return a contiguous array that starts at a multiple of 16 bytes: the argument, or a copy."""
    return a if a.flags.c_contiguous and arrays.address(a) % 16 == 0 else a.copy()
