# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a decoder as a list of operations, which a back end executes, or first rewrites to fuse some.

Two values pass through the operations: h, the residual stream [B, S, hidden], and x, the activations [B, S, width].
In shapes, B is the number of sequences in the batch and S the number of new tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cupy_awq.check import Array
from cupy_awq.llm.families.description import Attention, Experts, LayerSpec, LinearSpec, Mlp, NormSpec

Projection = Callable[[Array], Array]
"""A linear layer, or several concatenated ones that share x: a function from x [B, S, K] to y [B, S, N]."""

HostOrder = npt.NDArray[np.int32] | None
"""A permutation of columns in host memory, int32 [K], such as an activation order; None for no permutation."""


class ColumnOrder(NamedTuple):
    """A permutation of columns on a device: column i of the result is column order[i] of the operand."""

    order: Array
    """The permutation, int32 [K]."""
    positions: Array
    """The inverse of the permutation, int32 [K]: column i of the operand is column positions[i] of the result."""


@dataclass(frozen=True)
class Norm:
    """x = h / sqrt(mean(h^2) + eps) * weight.

    Attributes:
        weight: float32 [hidden], or [head_dim] for the RMSNorm of a head.
        eps: the epsilon.
    """

    weight: Array
    eps: float


@dataclass(frozen=True)
class Project:
    """The operation x = projection(x), for linear layers that share x, or for a whole mixture of experts."""

    projection: Projection


@dataclass(frozen=True)
class Attend:
    """Append the keys and values of the new tokens to a layer's state; x = their causal attention.

    Attributes:
        spec: the description of the attention. x holds the queries, keys and values of each token.
        layer: the index of the layer's state.
        q_norm, k_norm: the RMSNorms of each head of q and k before RoPE, or None.
        order: the permutation of the columns of the result, or None.
    """

    spec: Attention
    layer: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    order: ColumnOrder | None = None


@dataclass(frozen=True)
class Add:
    """The operation h = h + projection(x), which adds the result of a block to the residual stream h."""

    projection: Projection


Operation = Norm | Project | Attend | Add


class LayerWeights(Protocol):
    """The interface through which `list_operations` gets the weights of a decoder layer, prepared by a back end."""

    def norm(self, spec: NormSpec) -> Norm:
        """Return the RMSNorm that ``spec`` describes, with its weight on the device."""
        ...

    def project(self, *linears: LinearSpec, gated: bool = False, column_order: HostOrder = None) -> Projection:
        """Return the projection of linear layers that share x; see `DecoderOps.make_projection` for the options."""
        ...

    def experts(self, spec: Experts) -> Projection:
        """Return the function from x [B, S, hidden] to the result of a mixture of experts [B, S, hidden]."""
        ...

    def order(self, linear: LinearSpec) -> HostOrder:
        """Return the activation order in which a linear layer takes the columns of x, or None."""
        ...

    def column_order(self, linear: LinearSpec) -> ColumnOrder | None:
        """Return the activation order of a linear layer on the device, or None."""
        ...


def list_operations(layer: LayerSpec, index: int, weights: LayerWeights) -> Iterator[Operation]:
    """Yield the operations of a layer, whose state is that with the given index."""
    yield weights.norm(layer.mixer_norm)
    yield from _attention(layer.mixer, index, weights)
    yield weights.norm(layer.feed_forward_norm)
    if isinstance(layer.feed_forward, Experts):
        yield Add(weights.experts(layer.feed_forward))
    else:
        yield from _mlp(layer.feed_forward, weights)


def _attention(spec: Attention, index: int, weights: LayerWeights) -> Iterator[Operation]:
    yield Project(weights.project(spec.q, spec.k, spec.v))
    q_norm, k_norm = (None if norm is None else weights.norm(norm) for norm in (spec.q_norm, spec.k_norm))
    yield Attend(spec, index, q_norm, k_norm, weights.column_order(spec.o))
    yield Add(weights.project(spec.o))


def _mlp(spec: Mlp, weights: LayerWeights) -> Iterator[Operation]:
    yield Project(weights.project(spec.gate, spec.up, gated=True, column_order=weights.order(spec.down)))
    yield Add(weights.project(spec.down))
