# SPDX-License-Identifier: Apache-2.0
"""Construction of a `Model`: choice of a back end, reading of all tensors, and their preparation by the back end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.check import BFLOAT16, FLOAT16, HOST, Array
from cupy_awq.checkpoint import CheckpointError, Module
from cupy_awq.checkpoint.files import release_pages
from cupy_awq.llm.decoder import upload
from cupy_awq.llm.decoder.backend import DecoderOps
from cupy_awq.llm.decoder.forward import ColumnOrder, LayerWeights, Norm, Operation, Projection, list_operations
from cupy_awq.llm.decoder.model import Model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.families.description import Attention, Experts, LayerSpec, LinearSpec, NormSpec
from cupy_awq.llm.files.model_files import DenseLinear, Linear, ModelFiles, Progress
from cupy_awq.runtime import device
from cupy_awq.runtime.device import Capability, Device


def build_model(files: ModelFiles, ops: DecoderOps, progress: Progress | None = None) -> Model:
    """Read all tensors of a model and return the `Model` on the device of ``ops``.

    Raises:
        CheckpointError: a tensor is missing or does not have the shape that the configuration requires.
        ValueError: the back end does not support a tensor.
    """
    decoder = files.config
    table = files.read_tensor(f"{decoder.embedding}.weight", (decoder.vocab, decoder.hidden))
    embedding = ops.prepare_tensor(table)
    operations: list[Operation] = []
    weight_bytes = 0
    for i, layer in enumerate(decoder.layers):
        if progress is not None:
            progress(i, len(decoder.layers) + 1)
        weights = _FileWeights(files, ops, layer)
        operations += list_operations(layer, i, weights)
        weight_bytes += weights.nbytes
        release_pages()
    _check_last(files)
    operations.append(Norm(ops.prepare_tensor(files.read_norm(decoder.norm)), decoder.norm.eps))
    head = _read_head(files, ops, table)
    model = Model(ops, ops.make_forward(embedding, operations), ops.make_head(head), weight_bytes + head.weight.nbytes)
    release_pages()
    if progress is not None:
        progress(len(decoder.layers) + 1, len(decoder.layers) + 1)
    return model


def make_ops(files: ModelFiles, index: int, *, batch_invariant: bool = False) -> DecoderOps:
    """Return the back end for a model on the GPU with ordinal ``index``, or on the CPU for `check.HOST`.

    Raises ValueError if the GPU cannot run the model.
    """
    if index == HOST:
        return NumpyOps(files.config, batch_invariant=batch_invariant)
    from cupy_awq.llm.decoder.cuda_backend import CudaOps  # imported here: the CPU path must work without CuPy

    dtype = activation_dtype(files, device.of(index))
    return CudaOps(files.config, index, dtype, batch_invariant=batch_invariant)


def activation_dtype(files: ModelFiles, gpu: Device) -> np.dtype[Any]:
    """Return the dtype of a model's activations on a GPU: bfloat16 if its first 4-bit layer has bfloat16 scales.

    A model without 4-bit layers has the dtype of its first layer. 8-bit weights need float16 activations, and so do the
    tensor cores of sm_75, which are the only ones without bfloat16.
    """
    lacks_bfloat16 = gpu.has(Capability.MMA_M16N8K8) and not gpu.has(Capability.BFLOAT16)
    if files.int8_weights or lacks_bfloat16:
        return FLOAT16
    linears = [(linear, layer.name) for layer in files.config.layers for linear in layer.linears]
    quantized = (pair for pair in linears if f"{pair[1]}.{pair[0].name}" in files.tensors)
    part = files.read_linear(*next(quantized, linears[0]))
    return BFLOAT16 if part.weight.dtype == BFLOAT16 else FLOAT16


class _FileWeights(LayerWeights):
    """The weights of a layer, read from files and prepared by a back end.

    Attributes:
        nbytes: the size in bytes of the projections made so far.
    """

    def __init__(self, files: ModelFiles, ops: DecoderOps, layer: LayerSpec) -> None:
        self._files, self._ops, self._layer = files, ops, layer
        self._heads = {} if ops.rotates_parts else _list_reordered(layer.mixer)
        self._without_order: dict[LinearSpec, Linear] = {}
        self.nbytes = 0

    def norm(self, spec: NormSpec) -> Norm:
        weight = self._files.read_norm(spec, self._layer.name)
        return Norm(self._ops.prepare_tensor(weight[self._heads.get(spec.name, slice(None))]), spec.eps)

    def project(self, *linears: LinearSpec, **options: Any) -> Projection:
        without_order = self._without_order
        parts = [without_order.pop(x) if x in without_order else self._read(x) for x in linears]
        self.nbytes += sum(part.weight.nbytes for part in parts)
        return self._ops.make_projection(parts, **options)

    def experts(self, spec: Experts) -> Projection:
        name, bias = self._layer.name, spec.router.bias
        router = self._read_router(spec.router.linear)
        correction = None
        if bias is not None:
            correction = self._files.read_tensor(f"{name}.{bias}", (spec.router.linear.n,))
        self._check_last_expert(spec)
        experts = [(self._read(mlp.gate), self._read(mlp.up), self._read(mlp.down)) for mlp in spec.mlps]
        shared = None if spec.shared is None else experts.pop()
        shared_gate = None if spec.shared_gate is None else self._read_router(spec.shared_gate)
        parts = [router, *(part for mlp in (*experts, shared or ()) for part in mlp)]
        self.nbytes += sum(part.weight.nbytes for part in parts)
        try:
            return self._ops.make_experts(spec, router, correction, experts, shared, shared_gate)
        except ValueError as error:
            raise ValueError(f"{self._files.path}: {name}: {error}") from None

    def _check_last_expert(self, spec: Experts) -> None:
        """Raise CheckpointError if the files contain more experts of the layer than its router chooses from."""
        count = spec.router.linear.n
        after = spec.mlp(count)
        for linear in (after.gate, after.up, after.down):
            name = f"{self._layer.name}.{linear.name}"
            if name in self._files.tensors or f"{name}.weight" in self._files.tensors:
                raise CheckpointError(f"{self._files.path}: {name}: expected {count} experts, got more")

    def _read_router(self, linear: LinearSpec) -> Module | DenseLinear:
        part = self._files.read_linear(linear, self._layer.name)
        if isinstance(part, DenseLinear):  # scales of other layers are checked where they are read
            self._files.check_finite(part.weight, f"{self._layer.name}.{linear.name}.weight")
        return part

    def order(self, linear: LinearSpec) -> npt.NDArray[np.int32] | None:
        part = self._read(linear)
        order = part.order if isinstance(part, Module) else None
        self._without_order[linear] = part._replace(order=None) if isinstance(part, Module) else part
        return order

    def column_order(self, linear: LinearSpec) -> ColumnOrder | None:
        order = self.order(linear)
        return None if order is None else self._ops.prepare_order(order)

    def _read(self, linear: LinearSpec) -> Linear:
        part = _read(self._files, self._ops, linear, self._layer.name)
        order = self._heads.get(linear.name)
        if isinstance(part, Module):
            return upload.take_module_columns(part, order)
        return upload.take_columns(part, order)


def _list_reordered(spec: Attention) -> dict[str, npt.NDArray[np.int64]]:
    """Return the order of the columns of q, k and their RMSNorms, by name, if RoPE rotates a part of each head.

    In this order RoPE rotates the pairs (i, i + head_dim / 2), some of them by an angle of 0.
    """
    if spec.rope.dim == spec.head_dim:
        return {}
    order = spec.rope.order_heads(spec.head_dim)
    widths = [(spec.q.name, spec.heads), (spec.k.name, spec.kv_heads)]
    widths += [(norm.name, 1) for norm in (spec.q_norm, spec.k_norm) if norm is not None]
    return {name: (np.arange(n)[:, None] * spec.head_dim + order).reshape(-1) for name, n in widths}


def _read(files: ModelFiles, ops: DecoderOps, linear: LinearSpec, layer: str = "") -> Linear:
    """Read a linear layer, with 8-bit codes if the files have them and the back end does not dequantize them."""
    int8 = None if linear.k < ops.int8_min_k else files.read_int8_module(linear, layer)
    return int8 or files.read_linear(linear, layer)


def _read_head(files: ModelFiles, ops: DecoderOps, table: Array) -> Linear:
    """Return the output head. Raises CheckpointError if the files contain one that differs from a tied ``table``."""
    head = files.config.head
    if not files.config.tied:
        return _read(files, ops, head)
    stored = files.tensors.get(f"{head.name}.weight", files.tensors.get(head.name))
    if stored is not None:
        weight = stored()
        is_same = not isinstance(weight, Module) and (weight.dtype, weight.shape) == (table.dtype, table.shape)
        if not is_same or not all(map(np.array_equal, weight, table)):  # row by row, to save memory
            raise CheckpointError(
                f"{files.path}: {head.name}: expected the embedding table, as tie_word_embeddings says, got another"
            )
    tied = replace(head, name=files.config.embedding)
    int8 = None if head.k < ops.int8_min_k else files.read_int8_module(tied)
    return int8 or DenseLinear(table, None)


def _check_last(files: ModelFiles) -> None:
    """Raise CheckpointError if the files contain more layers than the decoder has."""
    layers, extra = files.config.layers, files.config.extra_layers
    after = f"{layers[0].name.rpartition('.')[0]}.{len(layers) + extra}"
    if f"{after}.{layers[0].mixer_norm.name}.weight" in files.tensors:
        raise CheckpointError(f"{files.path}: expected {len(layers)} layers, got more")
