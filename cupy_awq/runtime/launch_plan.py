# SPDX-License-Identifier: Apache-2.0
"""A kernel launch as pure data: the library launches it on a GPU, the test suite executes it without one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class TensorMap:
    """A tiled view of a buffer for the tensor copy engine; the driver encodes it at launch.

    ``dims`` (elements) and ``box`` count from the innermost axis; ``strides`` (bytes) are those of all axes but the
    innermost, whose elements are adjacent. ``swizzle`` is 0, 32, 64 or 128 bytes. ``steps`` leads along each axis from
    one element of a box to the next, by default 1; a box has as many elements as ``box`` says. ``promotion``: how many
    bytes L2 asks memory for at a time.
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


@dataclass(frozen=True)
class Kernel:
    """What is compiled: ``entry`` of ``source`` (a file below ``cuda_src``) with its constants, for one architecture.

    ``arch`` is a target of the compiler without its prefix: ``"60"``, ``"75"``, ``"80"``, ``"90a"``.
    """

    source: str
    entry: str
    defines: tuple[tuple[str, int | str], ...]
    arch: str


@dataclass(frozen=True)
class LaunchPlan:
    """One launch. In ``arguments`` a string names a buffer, whose pointer is passed; other values go as they are.

    Pointers come first, then tensor maps, then scalars; ValueError if they do not.

    ``cached``: the kernel reads much through the L1 cache, of which a kernel before it may have left little.
    """

    kernel: Kernel
    grid: Dim3
    block: Dim3
    arguments: tuple[Argument, ...]
    shared_bytes: int = 0
    cluster: Dim3 = (1, 1, 1)
    dependent: bool = False
    cached: bool = False

    def __post_init__(self) -> None:
        if self.arguments != (*self.pointers, *self.maps, *self.scalars):
            raise ValueError(f"{self.kernel.entry}: expected pointers, then tensor maps, then scalars")

    @property
    def pointers(self) -> tuple[str, ...]:
        return tuple(argument for argument in self.arguments if isinstance(argument, str))

    @property
    def maps(self) -> tuple[TensorMap, ...]:
        return tuple(argument for argument in self.arguments if isinstance(argument, TensorMap))

    @property
    def scalars(self) -> tuple[np.generic, ...]:
        return tuple(argument for argument in self.arguments if isinstance(argument, np.generic))

    @property
    def buffers(self) -> list[str]:
        """The names of all buffers, those of tensor maps last."""
        return [*self.pointers, *(tensor_map.buffer for tensor_map in self.maps)]
