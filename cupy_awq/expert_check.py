# SPDX-License-Identifier: Apache-2.0
"""Validation of the arguments of mixture-of-experts operations; the messages have the form of `cupy_awq.check`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupy_awq import check, check_scalar
from cupy_awq.activation import Activation
from cupy_awq.check import FLOAT32, FLOATS, HOST, INT32, StridedArray

EXPERT_ACTIVATIONS = {
    "swiglu": Activation("silu", gated=True),
    "geglu": Activation("gelu", gated=True),
    "clamped_swiglu": Activation("clampedsilu", gated=True),
}
"""The activations between the two projections of an expert, by name."""
SCORINGS = ("softmax", "sigmoid")
"""The functions that turn router logits into scores, by name."""


class ExpertsSpec(NamedTuple):
    """The properties of the validated weights of E experts: their number, and those of each expert's weight."""

    experts: int
    """The number of experts E."""
    weight: check.WeightSpec
    """The properties of each expert's weight W[e] [K, N]."""


def validate_experts(
    qweight: StridedArray, scales: StridedArray, qzeros: StridedArray | None, bias: StridedArray | None
) -> ExpertsSpec:
    """Validate the stacked arrays of E experts, as in `cupy_awq.PackedExperts`, and return their properties.

    Raises:
        TypeError: an argument is not an array, lies on another device than ``qweight``, or has an unsupported dtype.
        ValueError: shapes contradict each other, or an array is not contiguous.

    >>> spec = validate_experts(np.zeros((4, 64, 2), np.int32), np.ones((4, 2, 16), np.float16), None, None)
    >>> spec.experts, spec.weight.k, spec.weight.n, spec.weight.group_size
    (4, 64, 16, 32)
    """
    device = check.device_id(qweight, "qweight")
    arrays = {"qweight": qweight, "scales": scales, "qzeros": qzeros, "bias": bias}
    for name, a in arrays.items():
        if a is None:
            continue
        check.validate_device(a, name, device, "qweight")
        axes = 2 if name == "bias" else 3
        if a.ndim != axes or a.shape[:1] != qweight.shape[:1] or 0 in a.shape:
            raise ValueError(
                f"{name}: expected {axes} axes [E, ...] with E = {qweight.shape[0] if qweight.ndim else 'any'}, "
                f"got {check.describe(a)}"
            )
        if not a.flags.c_contiguous:
            raise ValueError(f"{name}: expected a contiguous array, got strides {a.strides}")
    spec = check.validate_weight(qweight[0], scales[0], None if qzeros is None else qzeros[0])
    if bias is not None:
        check.validate_bias(bias[0], spec.n, None, device)
    return ExpertsSpec(qweight.shape[0], spec)


def validate_rows(x: StridedArray, spec: ExpertsSpec) -> np.dtype[Any]:
    """Validate x [M, K] for a weight and return its dtype.

    Raises:
        TypeError, ValueError: as `check.validate_x`; or x has not two axes.
    """
    found = check.validate_x(x, spec.weight.k, None, spec.weight.device)
    if x.ndim != 2:
        raise ValueError(f"x: expected [M, K] with K = {spec.weight.k}, got {check.describe(x)}")
    return found


def validate_routing(topk_ids: StridedArray, topk_weights: StridedArray, m: int, spec: ExpertsSpec) -> int:
    """Validate the experts of each token and their weights, and return ``top_k``.

    Raises:
        TypeError: an argument is not an array on the weights' device, or has not the dtype int32 or float32.
        ValueError: a shape is not [M, top_k], or on the CPU, an id is not in [0, E).

    >>> spec = validate_experts(np.zeros((4, 64, 2), np.int32), np.ones((4, 2, 16), np.float16), None, None)
    >>> validate_routing(np.array([[0, 3]], np.int32), np.ones((1, 2), np.float32), 1, spec)
    2
    """
    top_k = topk_ids.shape[-1] if getattr(topk_ids, "ndim", 0) == 2 else 0
    for name, a, dtype in (("topk_ids", topk_ids, INT32), ("topk_weights", topk_weights, FLOAT32)):
        check.validate_device(a, name, spec.weight.device, "the weights")
        if a.dtype != dtype or a.ndim != 2 or a.shape != (m, top_k) or not top_k:
            error = TypeError if a.dtype != dtype else ValueError
            raise error(f"{name}: expected {dtype} [M, top_k] with M = {m} and top_k > 0, got {check.describe(a)}")
    if spec.weight.device == HOST:
        validate_host_ids(topk_ids, spec.experts)
    return top_k


def validate_host_ids(topk_ids: Any, experts: int) -> None:
    """Raise ValueError unless all ids of experts, a NumPy array, are in [0, E)."""
    _check_range("topk_ids", topk_ids, 0, experts - 1)


def validate_layer(gate_up: ExpertsSpec, down: ExpertsSpec) -> int:
    """Check that the two projections of experts fit each other, and return the width between them.

    Raises:
        TypeError: they lie on different devices.
        ValueError: numbers of experts or widths differ.
    """
    if down.weight.device != gate_up.weight.device:
        raise TypeError("down: expected weights on the device of gate_up, got weights on another one")
    width = check.out_features(gate_up.weight.n, EXPERT_ACTIVATIONS["swiglu"])
    if (down.experts, down.weight.k) != (gate_up.experts, width):
        raise ValueError(
            f"down: expected {gate_up.experts} experts with K = {width}, half of N of gate_up, "
            f"got {down.experts} with K = {down.weight.k}"
        )
    return width


def validate_expert_activation(activation: Any, required: bool) -> Activation:
    """Return the gated `Activation` of a name in EXPERT_ACTIVATIONS; None gives the identity unless ``required``.

    Raises:
        TypeError, ValueError: ``activation`` is not a string, or no such name.
    """
    if activation is None and not required:
        return Activation()
    if not isinstance(activation, str) or activation not in EXPERT_ACTIVATIONS:
        error = ValueError if isinstance(activation, str) else TypeError
        got = check_scalar.shorten(activation)
        raise error(f"activation: expected one of {', '.join(EXPERT_ACTIVATIONS)}, got {got}")
    return EXPERT_ACTIVATIONS[activation]


BLOCK_ARRAYS = "sorted_token_ids", "expert_ids", "num_tokens_post_padded"
"""The names of vLLM's arrays for rows that are sorted by expert in blocks."""


def validate_groups(
    routing: list[Any], is_blocked: bool, block_size: Any, top_k: int, m: int, spec: ExpertsSpec
) -> None:
    """Validate the offsets of `gemm_grouped`, or vLLM's three arrays if ``is_blocked``.

    Raises:
        TypeError, ValueError: an array has another dtype, shape or device; on the CPU, offsets do not ascend from 0 to
            ``m``, or an entry of vLLM's arrays is out of range.
    """
    names = BLOCK_ARRAYS if is_blocked else ("offsets",)
    if len(routing) != len(names):
        raise ValueError(f"offsets: expected one array or ({', '.join(BLOCK_ARRAYS)}), got {len(routing)} arrays")
    for name, a in zip(names, routing, strict=True):
        check.validate_device(a, name, spec.weight.device, "the weight")
        if a.dtype != INT32 or a.ndim != 1 or not a.flags.c_contiguous:
            error = TypeError if a.dtype != INT32 else ValueError
            raise error(f"{name}: expected a contiguous int32 array with one axis, got {check.describe(a)}")
    if is_blocked:
        size = check_scalar.validate_integer(block_size, "block_size", 8)
        ids, experts, count = routing
        if size % 8:
            raise ValueError(f"block_size: expected a multiple of 8, got {size}")
        if count.shape != (1,) or len(experts) * size < len(ids):
            raise ValueError(
                f"expert_ids: expected an expert for each {size} of {len(ids)} sorted_token_ids, and one "
                f"num_tokens_post_padded, got {len(experts)} and {len(count)}"
            )
        if spec.weight.device == HOST:
            used = int(count[0])
            _check_range("num_tokens_post_padded", count, 0, len(ids))
            _check_range("sorted_token_ids", ids[:used], 0, check_scalar.INT32_MAX)
            _check_range("expert_ids", experts[: -(-used // size)], -1, spec.experts - 1)
        return
    if block_size is not None or top_k != 1:
        raise ValueError("offsets: expected vLLM's arrays with block_size or top_k, got offsets")
    (offsets,) = routing
    if offsets.shape != (spec.experts + 1,):
        raise ValueError(f"offsets: expected int32 [E + 1] = [{spec.experts + 1}], got {check.describe(offsets)}")
    if spec.weight.device == HOST and (offsets[0] != 0 or offsets[-1] != m or (np.diff(offsets) < 0).any()):
        raise ValueError(f"offsets: expected values that ascend from 0 to M = {m}, got others")


def _check_range(name: str, values: Any, least: int, most: int) -> None:
    wrong = values[(values < least) | (values > most)]
    if wrong.size:
        raise ValueError(f"{name}: expected values from {least} to {most}, got {wrong.flat[0]}")


class TopK(NamedTuple):
    """The validated options of `topk`."""

    k: int
    """The number of experts per token."""
    renormalize: bool
    """Whether the weights of a token are divided by their sum."""
    scoring: str
    """The function that turns logits into scores, one of SCORINGS."""
    groups: tuple[int, int]
    """The number of groups of experts, and the number of groups among which a token's experts are chosen."""
    scale: float
    """The factor by which the weights of a token's experts are multiplied."""


def validate_topk(
    router_logits: StridedArray, k: Any, renormalize: Any, scoring: Any, bias: Any, groups: Any, scale: Any
) -> TopK:
    """Validate the arguments of `topk` and return its options.

    Raises:
        TypeError, ValueError: an argument has another type, dtype, shape or value than `topk` states.

    >>> validate_topk(np.zeros((2, 8), np.float32), 2, True, "softmax", None, None, 1.0).groups
    (1, 1)
    """
    device = check.device_id(router_logits, "router_logits")
    if router_logits.dtype not in FLOATS or router_logits.ndim != 2 or not router_logits.shape[-1]:
        error = TypeError if router_logits.dtype not in FLOATS else ValueError
        raise error(f"router_logits: expected float16, bfloat16 or float32 [M, E], got {check.describe(router_logits)}")
    experts = router_logits.shape[1]
    if bias is not None:
        check.validate_device(bias, "bias", device, "router_logits")
        if bias.dtype != FLOAT32 or bias.shape != (experts,):
            error = TypeError if bias.dtype != FLOAT32 else ValueError
            raise error(f"bias: expected float32 [E] = [{experts}], got {check.describe(bias)}")
    if scoring not in SCORINGS:
        error = ValueError if isinstance(scoring, str) else TypeError
        raise error(f"scoring: expected {' or '.join(SCORINGS)}, got {check_scalar.shorten(scoring)}")
    count, kept = 1, 1
    if groups is not None:
        if not isinstance(groups, tuple) or len(groups) != 2:
            raise TypeError(f"groups: expected (number, number to keep) or None, got {check_scalar.shorten(groups)}")
        count = check_scalar.validate_integer(groups[0], "groups[0]", 1, experts)
        kept = check_scalar.validate_integer(groups[1], "groups[1]", 1, count)
        if experts % count or (count > 1 and experts // count < 2):
            raise ValueError(f"groups: expected a divisor of E = {experts} with two experts a group, got {count}")
    k = check_scalar.validate_integer(k, "k", 1, experts // count * kept)
    factor = float(check_scalar.validate_positive_scale(scale, "scale"))
    return TopK(k, check_scalar.validate_flag(renormalize, "renormalize"), scoring, (count, kept), factor)
