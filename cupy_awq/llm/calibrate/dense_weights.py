# SPDX-License-Identifier: Apache-2.0
"""The dense weights of a decoder layer during quantization, and the operations of the layer with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_awq.check import Array
from cupy_awq.checkpoint import Module
from cupy_awq.llm.decoder.forward import LayerWeights, Norm, Operation, Projection, list_operations
from cupy_awq.llm.decoder.numpy_backend import NumpyOps, mix_experts
from cupy_awq.llm.families.description import Experts, LayerSpec, LinearSpec, Mlp, NormSpec
from cupy_awq.llm.files.model_files import DenseLinear, ModelFiles
from cupy_awq.quantization import MomentSum


@dataclass(frozen=True)
class DenseWeights:
    """The dense weights of a decoder layer.

    Attributes:
        linears: (weight float32 [N, K], bias or None) by name of the linear layer.
        norms: the RMSNorm weights by name, in their stored dtype.
        router: the dense tensors of the router and of the gate of a shared expert by name, which do not change.
    """

    linears: Mapping[str, tuple[Array, Array | None]]
    norms: Mapping[str, Array]
    router: Mapping[str, Array]


def read_weights(files: ModelFiles, layer: LayerSpec, xp: Any) -> DenseWeights:
    """Return the dense weights of a layer. Raises ValueError if a linear layer is already quantized."""
    linears = {}
    for linear in layer.linears:
        part = files.read_linear(linear, layer.name)
        if isinstance(part, Module):
            raise ValueError(f"{files.path}: {layer.name}.{linear.name}: expected a dense layer, got a quantized one")
        bias = None if part.bias is None else xp.asarray(part.bias)
        linears[linear.name] = xp.asarray(part.weight).astype(np.float32), bias
    norms = {norm.weight: xp.asarray(files.read_norm(norm, layer.name)) for norm in layer.norms}
    router = {}
    if isinstance(block := layer.feed_forward, Experts):
        gates = (linear for linear in (block.router.linear, block.shared_gate) if linear is not None)
        shapes: dict[str, tuple[int, ...]] = {f"{gate.name}.weight": (gate.n, gate.k) for gate in gates}
        shapes |= {block.router.bias: (block.router.linear.n,)} if block.router.bias else {}
        tensors = {name: files.read_tensor(f"{layer.name}.{name}", shape) for name, shape in shapes.items()}
        router = {name: xp.asarray(a.astype(np.float32)) for name, a in tensors.items()}
    return DenseWeights(linears, norms, router)


class _RecordingWeights(LayerWeights):
    """The dense weights of a layer, whose projections add their inputs to ``sums``, by name of their `Site`."""

    def __init__(self, ops: NumpyOps, weights: DenseWeights, sums: Mapping[str, MomentSum]) -> None:
        (layer,) = ops.config.layers
        self._ops, self._weights = ops, weights
        self._sums = {site.linears: sums[site.name] for site in layer.sites if site.name in sums}

    def norm(self, spec: NormSpec) -> Norm:
        return Norm(self._ops.prepare_tensor(self._weights.norms[spec.weight]), spec.eps)

    def project(self, *linears: LinearSpec, **options: Any) -> Projection:
        parts = [DenseLinear(*self._weights.linears[linear.name]) for linear in linears]
        projection = self._ops.make_projection(parts, **options)
        return _record(projection, self._sums[linears].add) if linears in self._sums else projection

    def experts(self, spec: Experts) -> Projection:
        def mlp(mlp: Mlp) -> Projection:
            gate_up, down = self.project(mlp.gate, mlp.up, gated=True), self.project(mlp.down)
            return lambda x: down(gate_up(x))

        def gate(linear: LinearSpec) -> Projection:
            return self._ops.make_projection([DenseLinear(self._weights.router[f"{linear.name}.weight"], None)])

        mlps = list(map(mlp, spec.mlps))
        shared = None if spec.shared is None else mlps.pop()
        bias = None if spec.router.bias is None else self._weights.router[spec.router.bias]
        shared_gate = None if spec.shared_gate is None else gate(spec.shared_gate)
        return mix_experts(spec, gate(spec.router.linear), bias, mlps, shared, shared_gate)

    def order(self, linear: LinearSpec) -> None:
        return None

    def column_order(self, linear: LinearSpec) -> None:
        return None


def build_operations(ops: NumpyOps, weights: DenseWeights, sums: Mapping[str, MomentSum]) -> list[Operation]:
    """Return the operations of the layer, which add each input of linear layers to ``sums``, by name of its `Site`."""
    (layer,) = ops.config.layers
    return list(list_operations(layer, 0, _RecordingWeights(ops, weights, sums)))


def _record(projection: Projection, add: Callable[[Array], None]) -> Projection:
    """Return a projection that calls ``add`` with its input before it computes the output."""

    def project(x: Array) -> Array:
        add(x)
        return projection(x)

    return project
