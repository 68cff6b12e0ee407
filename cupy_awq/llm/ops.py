# SPDX-License-Identifier: Apache-2.0
"""The interface of the decoder's back ends, `DecoderOps`, which `Model` calls.

In shapes, B is the number of sequences in the batch, S the number of new tokens per sequence, V the vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cupy_awq.check import Array
from cupy_awq.checkpoint import Module
from cupy_awq.llm.kv_cache import KvCache
from cupy_awq.llm.model_files import DenseLinear
from cupy_awq.llm.sampling import Sampling

Projection = Callable[[Array], Array]
"""A linear layer, or several concatenated ones that share x: a function from x [B, S, K] to y [B, S, N]."""

StepLogits = Callable[[Array], Array]
"""The forward pass of a decode step: a function from integer tokens [B] to float32 logits [B, V]."""


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream of the decoder, h + delta, float32 [B, S, hidden].

    The fields are private to the back end that made the stream. A back end may defer the sum h + delta or the RMSNorm
    of h to the next operation, to fuse them.

    Attributes:
        h: float32 [B, S, hidden]. Operations may overwrite the array, so only the newest stream is valid.
        delta: [B, S, hidden] of the activations' dtype: the output of the last projection if it is not yet added to h,
            else None.
        inverse_rms: float32 [B * S], 1 / RMS of each row of h at the last RMSNorm; None before the first.
        unnormalized_x: [B, S, hidden] of the activations' dtype: h times the next RMSNorm's weight, to be divided by
            the RMS of each row by a GEMM with ``Fusion("rms_norm_x")``; None if a separate kernel computes that norm.
        square_sums: float32 [B * S, ceil(hidden / 32)]: the sums of h^2 over 32 columns each, from which that GEMM
            computes the RMS; None without ``unnormalized_x``.
        x_order: int32 [hidden], the activation order in which ``unnormalized_x`` has its columns, or None.
    """

    h: Array
    delta: Array | None = None
    inverse_rms: Array | None = None
    unnormalized_x: Array | None = None
    square_sums: Array | None = None
    x_order: Array | None = None


class DecodeLoop(Protocol):
    """The autoregressive loop: each step generates the next token of every sequence of a KV cache."""

    def start(self, sequence: int, logits: Array) -> int:
        """Choose and return the first token of ``sequence`` from the logits [V] of the last token of its prompt."""
        ...

    def step(self) -> list[int]:
        """Run the newest token of every sequence through the model and return the next token of each.

        Raises ValueError if the logits hold NaN.
        """
        ...

    def close(self) -> None:
        """Wait for all work that uses the KV cache."""
        ...


class DecoderOps(Protocol):
    """The operations of a back end, for one model configuration on one device."""

    device_index: int
    """The device ordinal, or `check.HOST`."""
    prefill_chunk: int
    """The largest number of prompt tokens per forward pass."""

    def prepare_tensor(self, a: npt.NDArray[Any]) -> Array:
        """Copy the weight of a norm [size] or an embedding table [V, hidden] to the device, in the back end's dtype."""
        ...

    def prepare_tokens(self, ids: Sequence[int]) -> Array:
        """Copy token ids to the device as integers [len(ids)]."""
        ...

    def make_projection(
        self,
        parts: Sequence[Module | DenseLinear],
        *,
        gated: bool = False,
        column_order: npt.NDArray[np.int32] | None = None,
    ) -> Projection:
        """Return the projection from x to the concatenated outputs of the parts.

        With ``gated``, the parts are (gate, up) and the output is silu(gate) * up. With ``column_order``, the columns
        of each part are in that order, for a following layer with this activation order.
        """
        ...

    def make_head(self, part: Module | DenseLinear) -> Projection:
        """Return the projection from hidden states [.., hidden] to float32 logits [.., V]."""
        ...

    def make_cache(self, sequences: int, capacity: int) -> KvCache:
        """Allocate a KV cache of ``sequences`` x ``capacity`` tokens. Raises ValueError without enough memory."""
        ...

    def make_decode_loop(self, step_logits: StepLogits, cache: KvCache, sampling: Sampling) -> DecodeLoop:
        """Return a decode loop over ``cache``: call `start` once per sequence, then `step` repeatedly, then `close`."""
        ...

    def embed(self, table: Array, tokens: Array) -> ResidualStream:
        """Return the residual stream that starts as the rows of the embedding table [V, hidden] for tokens [B, S]."""
        ...

    def norm_and_project(
        self, stream: ResidualStream, norm_weight: Array, projection: Projection
    ) -> tuple[ResidualStream, Array]:
        """Return the stream, and y = projection(RMSNorm(stream) * norm_weight), [B, S, N]."""
        ...

    def project_and_add(
        self,
        stream: ResidualStream,
        x: Array,
        projection: Projection,
        next_norm_weight: Array | None,
        next_projection: Projection | None,
    ) -> ResidualStream:
        """Return the stream plus projection(x).

        ``next_norm_weight`` and ``next_projection`` are the arguments of the following `norm_and_project`, so that both
        can be fused; None if the following operation is not `norm_and_project`.
        """
        ...

    def rms_norm(self, stream: ResidualStream, norm_weight: Array) -> Array:
        """Return RMSNorm(stream) * norm_weight [B, S, hidden]."""
        ...

    def attend(self, qkv: Array, q_norm: Array | None, k_norm: Array | None, cache: KvCache, layer: int) -> Array:
        """Append the new tokens to one layer of the cache and return their causal attention [B, S, q_width].

        Args:
            qkv: [B, S, (heads + 2 * kv_heads) * head_dim]. Each head of q and k is normalized (if there are weights)
                and rotated by RoPE; k and v are written to the cache after the past tokens of their sequence.
            q_norm, k_norm: float32 [head_dim], RMSNorm weights of the heads, or None.
        """
        ...

    def to_numpy(self, a: Array) -> npt.NDArray[np.float32]:
        """Copy float32 logits to the host."""
        ...
