# SPDX-License-Identifier: Apache-2.0
"""The operations of a decoder as the GPU back end executes them: GEMMs that can include a norm or an addition."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cupy_awq.check import Array
from cupy_awq.kernels.gemm.problem import NO_PREFETCH, NextWeight
from cupy_awq.kernels.hopper import HOPPER
from cupy_awq.linear import AwqLinear
from cupy_awq.llm.decoder.cuda_experts import Mixture
from cupy_awq.llm.decoder.forward import Add, Attend, Norm, Operation, Project, Projection
from cupy_awq.runtime.device import Device

MAX_PREFETCH_ROWS, HOPPER_MAX_PREFETCH_ROWS = 32, 8
"""The largest number of sequences in a decode step whose GEMMs prefetch a part of the next weight into L2.

With more, the prefetch gains nothing on an H100.
"""

Prefetched: TypeAlias = tuple[Array | None, NextWeight]
"""The array of a repacked weight, and the part of it that a preceding GEMM may prefetch."""


@dataclass(frozen=True)
class NormAndProject:
    """A `Norm` and the `Project` after it, which one GEMM may compute.

    Attributes:
        norm, projection: the operations.
        order: the activation order in which the projection takes the columns of x, int32 [hidden], or None.
        positions: the inverse of ``order``, if the preceding GEMM can write x in this order; else None.
        prefetched: what a preceding GEMM may prefetch of the projection's weight.
        next: the next `AddAndNorm`, or None.
    """

    norm: Norm
    projection: Projection
    order: Array | None = None
    positions: Array | None = None
    prefetched: Prefetched = (None, NO_PREFETCH)
    next: AddAndNorm | None = None


@dataclass(frozen=True)
class AddAndNorm:
    """An `Add` with the `NormAndProject` after it, the first part of which the same GEMM may compute.

    Attributes:
        projection: the projection of the `Add`.
        prefetched: what a preceding GEMM may prefetch of the projection's weight.
        next: the operation that follows, or None if another one does.
    """

    projection: Projection
    prefetched: Prefetched
    next: NormAndProject | None


@dataclass(frozen=True)
class NormAndMix:
    """A `Norm` and the `Add` of a mixture of experts after it, whose router may compute the norm."""

    norm: Norm
    mixture: Mixture


FusedOperation: TypeAlias = NormAndProject | NormAndMix | Attend | AddAndNorm | Norm | Project


def fuse(operations: Sequence[Operation], positions: Mapping[Projection, Array]) -> list[FusedOperation]:
    """Rewrite operations so that GEMMs can include the RMSNorm before them and the addition after them.

    ``positions`` has, by layer, the inverse of the activation order of x, if x can be written in this order. What a
    GEMM includes in the end also depends on the number of rows; see `CudaOps.norm_and_project` and
    `CudaOps.add_and_norm`.
    """
    fused: list[FusedOperation] = []
    following: NormAndProject | None = None
    addition: AddAndNorm | None = None
    for operation, after in reversed([*itertools.zip_longest(operations, operations[1:])]):
        if isinstance(operation, Norm) and isinstance(after, Project):
            layer = after.projection
            order = layer.order if isinstance(layer, AwqLinear) else None
            parts = order, positions.get(layer), _prefetched(layer), addition
            fused[-1] = following = NormAndProject(operation, layer, *parts)
        elif isinstance(operation, Norm) and isinstance(after, Add) and isinstance(after.projection, Mixture):
            fused[-1] = NormAndMix(operation, after.projection)
        elif isinstance(operation, Add):
            next_ = following if fused and fused[-1] is following else None
            addition = AddAndNorm(operation.projection, _prefetched(operation.projection), next_)
            fused.append(addition)
        else:
            fused.append(operation)
    return fused[::-1]


def next_part(following: NormAndProject | AddAndNorm | None, m: int, device: Device) -> Prefetched:
    """Return what a GEMM with ``m`` rows prefetches of the weight of the next one."""
    most = HOPPER_MAX_PREFETCH_ROWS if device.has(*HOPPER) else MAX_PREFETCH_ROWS
    return (None, NO_PREFETCH) if following is None or m > most else following.prefetched


def _prefetched(projection: Projection) -> Prefetched:
    return projection.plan_prefetch() if isinstance(projection, AwqLinear) else (None, NO_PREFETCH)
