# SPDX-License-Identifier: Apache-2.0
"""The interface of the decoder's back ends: `DecoderOps`, which `build_model` and `Model` call.

In shapes, M is the number of new tokens of all sequences of a batch, and V the vocabulary size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cupy_awq.check import Array
from cupy_awq.llm.decoder.forward import ColumnOrder, HostOrder, Operation, Projection
from cupy_awq.llm.decoder.sampling import Offsets, Sampling
from cupy_awq.llm.decoder.states import Pages
from cupy_awq.llm.families.description import Experts
from cupy_awq.llm.files.model_files import Linear

OPTIONS = frozenset(
    "Decoder Decoder.tied Decoder.extra_layers LayerSpec LinearSpec LinearSpec.bias NormSpec Attention Attention.q_norm"
    " Attention.k_norm Mlp Experts Experts.shared Experts.shared_gate Router Router.renormalize Router.scoring"
    " Router.bias Router.groups Router.scale".split()
)
"""The blocks and optional fields of a `Decoder`, as `Decoder.options` names them, that both back ends support."""

Forward = Callable[[Array, Any], Array]
"""The forward pass: a function from new tokens [1, M] and a batch to x [1, M, hidden], after the last operation.

The batch says which sequences have the tokens, and where the past ones are: a `PagedRows` or, on a GPU, a `CudaRows`.
The function appends to their states.
"""

MlpWeights = tuple[Linear, Linear, Linear]
"""The gate, up and down projection of an MLP."""


class Tokens(Protocol):
    """The tokens that a launched step chooses."""

    def wait(self) -> list[int]:
        """Wait for the tokens and return them; -1 is that of a row whose logits contain NaN."""
        ...


class ChoiceOptions(NamedTuple):
    """The needs of the choice of a step's tokens. By default, all rows are greedy.

    Attributes:
        samples: whether any row samples.
        filters: whether any row has a top_k, top_p or min_p.
        penalizes: whether any row has a repetition penalty or offsets.
    """

    samples: bool = False
    filters: bool = False
    penalizes: bool = False


class Steps(Protocol):
    """Steps of any sequences over a paged cache, launched ahead of the host. Each sequence has a slot of its own.

    Slots are numbered from 1; slot 0 is that of padding rows.
    """

    blocks: int
    """The number of blocks that sequences can own."""
    stream: contextlib.AbstractContextManager[Any]
    """The context in which all methods must be called, and in which their results must be used."""

    def assign(self, slot: int, sampling: Sampling, choice: int, known: Sequence[int], offsets: Offsets) -> None:
        """Give a slot to a sequence: its parameters, the index of the completion, its tokens so far and their offsets.

        The device keeps its own offsets from then on.
        """
        ...

    def place(self, slot: int, blocks: Sequence[int]) -> None:
        """Tell the blocks that the sequence of a slot has so far."""
        ...

    def prompt(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> Array:
        """Launch prompt tokens: (slot, position of the first, token ids) by sequence; return hidden states [M, H]."""
        ...

    def last_logits(self, hidden: Array, rows: Sequence[int]) -> Array:
        """Launch the head; return the logits [len(rows), V] of some rows of hidden states [M, H]."""
        ...

    def choose(self, logits: Array, rows: Sequence[tuple[int, int]], options: ChoiceOptions) -> Tokens:
        """Launch the choice of the token after each row (slot, position) from its logits [rows, V]."""
        ...

    def decode(
        self, rows: Sequence[tuple[int, ...]], options: ChoiceOptions, *, has_drafts: bool = False
    ) -> tuple[Array, Tokens]:
        """Launch a decode step; return the logits, at least [rows, V], until the next launch, and the next tokens.

        A row is (slot, position, block before that of the position, block of the position, token id); -1 as the token
        is the one that the last launched step has chosen for the slot. With ``has_drafts``, several rows may have a
        slot, at consecutive positions; no row then has a repetition penalty or offsets.
        """
        ...

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for the work that has been launched before this call."""
        ...

    def wait(self) -> None:
        """Wait for all launched work."""
        ...


class DecoderOps(Protocol):
    """The operations of a back end, for one decoder on one device."""

    options: frozenset[str]
    """The `Decoder.options` that the back end executes; its constructor refuses a decoder with any other."""
    device_index: int
    """The device ordinal, or `check.HOST`."""
    int8_min_k: int
    """The smallest K for which the back end multiplies by 8-bit codes; it dequantizes other layers."""
    rotates_parts: bool
    """Whether RoPE can rotate the first elements of a head alone; if not, `build_model` reorders the heads."""
    prefill_chunk: int
    """The largest number of prompt tokens per forward pass."""
    has_pages: bool = False
    """Whether `make_pages` is implemented; else `make_steps` is."""

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
        self, parts: Sequence[Linear], *, gated: bool = False, column_order: HostOrder = None
    ) -> Projection:
        """Return the projection from x to the concatenated outputs of all ``parts``.

        If ``gated``, the parts are the gate and the up projection, and the output is silu(gate) * up. The columns of
        each part are permuted by ``column_order``, the activation order of the next layer, unless that is None.
        """
        ...

    def make_experts(
        self,
        spec: Experts,
        router: Linear,
        bias: npt.NDArray[Any] | None,
        experts: Sequence[MlpWeights],
        shared: MlpWeights | None,
        shared_gate: Linear | None,
    ) -> Projection:
        """Return the function from x [.., hidden] to the result of a mixture of experts [.., hidden].

        Args:
            spec: the description.
            router: the linear layer of the router.
            bias: the router's correction bias [E], or None.
            experts: the weights of each expert.
            shared: the weights of the shared expert, or None.
            shared_gate: the linear layer whose sigmoid multiplies the result of ``shared``, or None.

        Raises ValueError if the back end does not support the experts.
        """
        ...

    def make_head(self, part: Linear) -> Projection:
        """Return the projection from hidden states [.., hidden] to float32 logits [.., V]."""
        ...

    def make_forward(self, table: Array, operations: Sequence[Operation]) -> Forward:
        """Return the forward pass: h = the rows of the embedding table [V, hidden] for the tokens, then ``operations``.

        The last operation is the final `Norm`, whose x is the result.
        """
        ...

    def make_pages(self, tokens: int | None, positions: int) -> Pages:
        """Allocate pages for ``tokens`` tokens in all, by default those that fit, of sequences of ``positions`` tokens.

        Raises ValueError if memory is insufficient.
        """
        raise ValueError("device: expected one with pages in host memory, got another")

    def make_steps(
        self,
        forward: Forward,
        head: Projection,
        rows: int,
        positions: int,
        tokens: int | None,
        draft_rows: int = 0,
        *,
        prepares: bool = False,
    ) -> Steps:
        """Allocate a paged cache for the steps of up to ``rows`` sequences of ``positions`` tokens.

        The cache holds ``tokens`` tokens, by default those that fit. Decode steps with drafts have up to ``draft_rows``
        rows, 0 for none. With ``prepares``, no later step compiles, loads or captures anything. Raises ValueError if
        memory is insufficient.
        """
        raise ValueError("device: expected one whose steps are launched ahead, got another")

    def to_numpy(self, a: Array) -> npt.NDArray[np.float32]:
        """Return float32 logits as a NumPy array."""
        ...
