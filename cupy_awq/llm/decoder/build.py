# SPDX-License-Identifier: Apache-2.0
"""Construction of a `Model`: reading of all tensors, and their preparation by a back end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.check import Array
from cupy_awq.checkpoint import CheckpointError, Module
from cupy_awq.llm.decoder.backend import DecoderOps, Projection
from cupy_awq.llm.decoder.model import Layer, Model
from cupy_awq.llm.files.model_files import DenseLinear, Int8Linear, Linear, ModelFiles, Progress


def build_model(files: ModelFiles, ops: DecoderOps, progress: Progress | None = None) -> Model:
    """Read all tensors of a model and return the `Model` on the device of ``ops``.

    Raises:
        CheckpointError: a tensor is missing or does not have the shape that the configuration requires.
        ValueError: the back end does not support a tensor.
    """
    return _Builder(files, ops).build(progress)


class _Builder:
    """The state of `build_model`: the files, the back end, and the size in bytes of the projections read so far."""

    def __init__(self, files: ModelFiles, ops: DecoderOps) -> None:
        self._files, self._ops, self._config = files, ops, files.config
        self._weight_bytes = 0

    def build(self, progress: Progress | None) -> Model:
        config, files, ops = self._config, self._files, self._ops
        table = files.read_tensor("model.embed_tokens.weight", (config.vocab, config.hidden))
        embedding = ops.prepare_tensor(table)
        layers = []
        for i in range(config.layers):
            if progress is not None:
                progress(i, config.layers + 1)
            layers.append(self._layer(f"model.layers.{i}"))
        if f"model.layers.{config.layers}.input_layernorm.weight" in files.tensors:
            raise CheckpointError(f"{files.path}: expected {config.layers} layers, got more")
        norm = self._vector("model.norm", config.hidden)
        if config.tied:
            self._check_tied(table)
            tied = self._read_int8("model.embed_tokens", config.hidden, config.vocab)
            head: Linear = tied or DenseLinear(table, None)
        else:
            head = self._read("lm_head", config.hidden, config.vocab)
        model = Model(ops, embedding, layers, norm, ops.make_head(head), self._weight_bytes + head.weight.nbytes)
        if progress is not None:
            progress(config.layers + 1, config.layers + 1)
        return model

    def _check_tied(self, table: Array) -> None:
        """Raise CheckpointError if the files contain an output head that differs from the embedding table."""
        head = self._files.tensors.get("lm_head.weight", self._files.tensors.get("lm_head"))
        if head is None:
            return
        weight = head()
        if isinstance(weight, Module) or weight.dtype != table.dtype or not np.array_equal(weight, table):
            raise CheckpointError(
                f"{self._files.path}: lm_head: expected the embedding table, as tie_word_embeddings says, got another"
            )

    def _layer(self, name: str) -> Layer:
        config, attention, mlp = self._config, f"{name}.self_attn", f"{name}.mlp"
        d, q_width, kv_width, intermediate = config.hidden, config.q_width, config.kv_width, config.intermediate
        read = self._read
        attention_norm = self._vector(f"{name}.input_layernorm", d)
        qkv = self._projection(
            [read(f"{attention}.q_proj", d, q_width), *(read(f"{attention}.{p}_proj", d, kv_width) for p in "kv")]
        )
        q_norm = self._vector(f"{attention}.q_norm", config.head_dim) if config.qk_norm else None
        k_norm = self._vector(f"{attention}.k_norm", config.head_dim) if config.qk_norm else None
        # Attention and gate/up write their columns in the activation orders of o and down.
        o, o_order = _split_order(read(f"{attention}.o_proj", q_width, d))
        o_projection = self._projection([o])
        mlp_norm = self._vector(f"{name}.post_attention_layernorm", d)
        parts = [read(f"{mlp}.{p}_proj", d, intermediate) for p in ("gate", "up")]
        down, down_order = _split_order(read(f"{mlp}.down_proj", intermediate, d))
        gate_up = self._projection(parts, gated=True, column_order=down_order)
        order = None if o_order is None else self._ops.prepare_order(o_order)
        down_projection = self._projection([down])
        return Layer(attention_norm, qkv, q_norm, k_norm, o_projection, mlp_norm, gate_up, down_projection, order)

    def _vector(self, name: str, size: int) -> Array:
        return self._ops.prepare_tensor(self._files.read_tensor(f"{name}.weight", (size,)))

    def _read_int8(self, name: str, k: int, n: int) -> Int8Linear | None:
        """Read a linear layer with 8-bit codes; return None for other codes, or if the back end dequantizes it."""
        return None if k < self._ops.int8_min_k else self._files.read_int8_linear(name, k, n)

    def _read(self, name: str, k: int, n: int) -> Linear:
        return self._read_int8(name, k, n) or self._files.read_linear(name, k, n)

    def _projection(self, parts: Sequence[Linear], **options: Any) -> Projection:
        """Return one projection for several linear layers that share x; see `make_projection` for the options."""
        self._weight_bytes += sum(part.weight.nbytes for part in parts)
        return self._ops.make_projection(parts, **options)


def _split_order(part: Linear) -> tuple[Linear, npt.NDArray[np.int32] | None]:
    """Return a linear layer without its activation order, and this order, or None if the layer has none."""
    return (part._replace(order=None), part.order) if isinstance(part, Module) else (part, None)
