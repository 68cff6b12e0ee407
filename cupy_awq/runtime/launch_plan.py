# SPDX-License-Identifier: Apache-2.0
"""Launch plans: descriptions of kernel launches, which `cupy_awq.runtime.launcher` executes and the tests simulate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Dim3 = tuple[int, int, int]
"""An extent (x, y, z) of a grid, a thread block or a cluster."""


@dataclass(frozen=True)
class TensorMap:
    """A tiled TMA tensor map of a buffer, which is encoded as a CUtensorMap at launch.

    The innermost (contiguous) axis comes first in all fields.

    Attributes:
        buffer: name of the buffer.
        dtype: element type, a key of `cupy_awq.runtime.launcher.MAP_TYPES`.
        dims: size of each axis, in elements.
        strides: stride of each axis except the innermost one, in bytes.
        box: number of elements along each axis that one copy loads.
        swizzle: width of the shared-memory swizzle in bytes: 0 (none), 32, 64 or 128.
        steps: element stride of the box along each axis; () means 1 for all axes.
        promotion: L2 promotion size in bytes: 64, 128 or 256.
    """

    buffer: str
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    steps: tuple[int, ...] = ()
    promotion: int = 256


Argument = str | np.generic | TensorMap
"""A kernel argument: the name of a buffer whose address is passed, a scalar, or a tensor map."""


@dataclass(frozen=True)
class Kernel:
    """A kernel with its compile-time constants and target architecture.

    Attributes:
        source: path of the source file, relative to ``cuda_src``.
        entry: name of the ``extern "C"`` function.
        defines: macros (name, value) that are set with ``-D``.
        arch: target architecture without the prefix "sm_", such as ``"75"`` or ``"90a"``.
    """

    source: str
    entry: str
    defines: tuple[tuple[str, int | str], ...]
    arch: str


@dataclass(frozen=True)
class LaunchPlan:
    """A launch of one kernel: the kernel, its launch configuration and its arguments.

    Attributes:
        kernel: the kernel.
        grid: grid size in CTAs.
        block: CTA size in threads.
        arguments: kernel arguments: buffer names first, then tensor maps, then scalars.
        shared_bytes: dynamic shared memory per CTA, in bytes.
        cluster: cluster size in CTAs.
        dependent: whether the kernel may start before the preceding kernel finishes (programmatic dependent launch).
        prefers_l1: whether to request a small shared-memory carveout, so that the L1 cache is large.

    Raises:
        ValueError: the arguments are not in this order.
    """

    kernel: Kernel
    grid: Dim3
    block: Dim3
    arguments: tuple[Argument, ...]
    shared_bytes: int = 0
    cluster: Dim3 = (1, 1, 1)
    dependent: bool = False
    prefers_l1: bool = False

    def __post_init__(self) -> None:
        if self.arguments != (*self.pointers, *self.maps, *self.scalars):
            kinds = ", ".join(type(argument).__name__ for argument in self.arguments)
            raise ValueError(f"arguments: expected buffers, then tensor maps, then scalars, got {kinds}")

    @property
    def pointers(self) -> tuple[str, ...]:
        """The names of the buffers that are passed by address."""
        return tuple(argument for argument in self.arguments if isinstance(argument, str))

    @property
    def maps(self) -> tuple[TensorMap, ...]:
        """The tensor maps among the arguments, in order; each is passed as a kernel parameter."""
        return tuple(argument for argument in self.arguments if isinstance(argument, TensorMap))

    @property
    def scalars(self) -> tuple[np.generic, ...]:
        """The scalars among the arguments, in order."""
        return tuple(argument for argument in self.arguments if isinstance(argument, np.generic))

    @property
    def buffers(self) -> list[str]:
        """The names of all buffers; the buffers of tensor maps come last."""
        return [*self.pointers, *(tensor_map.buffer for tensor_map in self.maps)]
