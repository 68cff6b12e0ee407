# SPDX-License-Identifier: Apache-2.0
"""The interface of the decoder's back ends, `DecoderOps`, which `Model` calls.

In shapes, B is the number of sequences in the batch, S the number of new tokens per sequence and V the vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cupy_awq.check import Array
from cupy_awq.llm.decoder.kv_cache import KvCache
from cupy_awq.llm.decoder.sampling import Sampling
from cupy_awq.llm.files.model_files import Linear

Projection = Callable[[Array], Array]
"""A linear layer, or several concatenated ones that share x: a function from x [B, S, K] to y [B, S, N]."""


class ColumnOrder(NamedTuple):
    """A permutation of columns on a device: column i of the result is column order[i] of the operand."""

    order: Array
    """The permutation, int32 [K]."""
    positions: Array
    """The inverse of the permutation, int32 [K]: column i of the operand is column positions[i] of the result."""


StepLogits = Callable[[Array], Array]
"""The forward pass of a decode step: a function from integer tokens [B] to float32 logits [B, V]."""


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream of the decoder, h + delta, float32 [B, S, hidden].

    The fields are private to the back end that created the stream. To fuse operations, a back end may defer the sum
    h + delta or the RMSNorm of h to the next operation.

    Attributes:
        h: float32 [B, S, hidden]. Operations may overwrite the array, so only the newest stream is valid.
        delta: the output of the last projection, [B, S, hidden] in the dtype of activations, if it has not been added
            to h yet; else None.
        inverse_rms: float32 [B * S], 1 / RMS of each row of h at the last RMSNorm; None before the first RMSNorm.
        unnormalized_x: h times the weight of the next RMSNorm, [B, S, hidden] in the dtype of activations. The GEMM
            with ``Fusion("rms_norm_x")`` divides its rows by their RMS. None if a separate kernel computes the RMSNorm.
        square_sums: float32 [B * S, ceil(hidden / 32)], the sums of h^2 over blocks of 32 columns, from which the GEMM
            computes the RMS; None without ``unnormalized_x``.
        x_order: the activation order in which ``unnormalized_x`` has its columns, int32 [hidden], or None.
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
        """Choose and return the first new token of ``sequence``, given the logits [V] of its last prompt token."""
        ...

    def step(self) -> list[int]:
        """Run the newest token of every sequence through the model and return the next token of every sequence.

        Raises ValueError if the logits contain NaN.
        """
        ...

    def close(self) -> None:
        """Wait for all work that uses the KV cache."""
        ...


class DecoderOps(Protocol):
    """The operations of a back end, for one model configuration on one device."""

    device_index: int
    """The device ordinal, or `check.HOST`."""
    int8_min_k: int
    """The smallest K for which the back end multiplies by 8-bit codes; it dequantizes other layers."""
    prefill_chunk: int
    """The largest number of prompt tokens per forward pass."""

    def prepare_tensor(self, a: npt.NDArray[Any]) -> Array:
        """Copy an RMSNorm weight [size] or an embedding table [V, hidden] to the device and convert its dtype."""
        ...

    def prepare_order(self, order: npt.NDArray[np.int32]) -> ColumnOrder:
        """Copy an activation order, a permutation int32 [K], to the device."""
        ...

    def prepare_tokens(self, ids: Sequence[int]) -> Array:
        """Copy token ids to the device as integers [len(ids)]."""
        ...

    def make_projection(
        self,
        parts: Sequence[Linear],
        *,
        gated: bool = False,
        column_order: npt.NDArray[np.int32] | None = None,
    ) -> Projection:
        """Return the projection from x to the concatenated outputs of all ``parts``.

        If ``gated``, the parts are the gate and the up projection, and the output is silu(gate) * up. The columns of
        each part are permuted by ``column_order``, the activation order of the next layer, unless that is None.
        """
        ...

    def make_head(self, part: Linear) -> Projection:
        """Return the projection from hidden states [.., hidden] to float32 logits [.., V]."""
        ...

    def make_cache(self, sequences: int, capacity: int) -> KvCache:
        """Allocate a KV cache of ``sequences`` x ``capacity`` tokens. Raises ValueError if memory is insufficient."""
        ...

    def make_decode_loop(self, step_logits: StepLogits, cache: KvCache, sampling: Sampling) -> DecodeLoop:
        """Return a decode loop over ``cache``. Call `start` once per sequence, `step` for each token, then `close`."""
        ...

    def embed(self, table: Array, tokens: Array) -> ResidualStream:
        """Return a new residual stream: the rows of the embedding table [V, hidden] for tokens [B, S]."""
        ...

    def norm_and_project(
        self, stream: ResidualStream, norm_weight: Array, projection: Projection
    ) -> tuple[ResidualStream, Array]:
        """Return the stream and y = projection(RMSNorm(stream) * norm_weight), [B, S, N]."""
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

        ``next_norm_weight`` and ``next_projection`` are arguments of the next `norm_and_project`, so that the back end
        can fuse both operations; None if another operation is next.
        """
        ...

    def rms_norm(self, stream: ResidualStream, norm_weight: Array) -> Array:
        """Return RMSNorm(stream) * norm_weight [B, S, hidden]."""
        ...

    def attend(
        self,
        qkv: Array,
        q_norm: Array | None,
        k_norm: Array | None,
        cache: KvCache,
        layer: int,
        order: ColumnOrder | None,
    ) -> Array:
        """Append the new tokens to one layer of the cache and return their causal attention [B, S, q_width].

        Args:
            qkv: [B, S, (heads + 2 * kv_heads) * head_dim]. Each head of q and k is normalized, if ``q_norm`` and
                ``k_norm`` are given, and rotated by RoPE; k and v are appended to the cache of their sequence.
            q_norm, k_norm: float32 [head_dim], the RMSNorm weights of every head, or None.
            cache, layer: the cache, and the index of its layer.
            order: the permutation of the columns of the result, or None.
        """
        ...

    def to_numpy(self, a: Array) -> npt.NDArray[np.float32]:
        """Return float32 logits as a NumPy array."""
        ...
