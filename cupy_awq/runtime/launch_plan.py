# SPDX-License-Identifier: Apache-2.0
"""Kernel launches as plain data: `cupy_awq.runtime.launch` runs them on a GPU, the test suite in a simulator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Dim3 = tuple[int, int, int]
"""An extent (x, y, z) of a grid, a thread block or a cluster."""


@dataclass(frozen=True)
class TensorMap:
    """A TMA tensor map of a buffer: a tiled view that the driver encodes at launch.

    Axes count from the innermost one, whose elements are adjacent.

    Attributes:
        buffer: the name of the buffer.
        dtype: a name of `cupy_awq.runtime.launch.MAP_TYPES`.
        dims: the elements along each axis.
        strides: the bytes from one element to the next along each axis but the innermost.
        box: the elements along each axis that one copy moves.
        swizzle: the shared-memory swizzle in bytes: 0 (none), 32, 64 or 128.
        steps: the element strides: the elements of a box are this far apart along each axis; () for 1 everywhere.
        promotion: the bytes that L2 fetches at a time: 64, 128 or 256.
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
    """A kernel to compile.

    Attributes:
        source: the file, relative to ``cuda_src``.
        entry: the name of the ``extern "C"`` function.
        defines: the constants (name, value) that ``-D`` sets.
        arch: the target architecture without its prefix: ``"60"``, ``"75"``, ``"80"``, ``"90a"``.
    """

    source: str
    entry: str
    defines: tuple[tuple[str, int | str], ...]
    arch: str


@dataclass(frozen=True)
class LaunchPlan:
    """A launch of one kernel.

    Attributes:
        kernel: the kernel.
        grid: the extent in CTAs.
        block: the extent of a CTA in threads.
        arguments: the kernel's arguments: names of buffers first, then tensor maps, then scalars.
        shared_bytes: the dynamic shared memory of a CTA.
        cluster: the extent of a cluster in CTAs.
        dependent: whether the launch may start before the preceding kernel ends (programmatic dependent launch).
        prefers_l1: whether the kernel gains from a large L1 cache, which shares its memory with shared memory.

    Raises:
        ValueError: arguments in another order.
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
        """The tensor maps."""
        return tuple(argument for argument in self.arguments if isinstance(argument, TensorMap))

    @property
    def scalars(self) -> tuple[np.generic, ...]:
        """The arguments that are passed by value."""
        return tuple(argument for argument in self.arguments if isinstance(argument, np.generic))

    @property
    def buffers(self) -> list[str]:
        """The names of all buffers; those of tensor maps come last."""
        return [*self.pointers, *(tensor_map.buffer for tensor_map in self.maps)]
