# SPDX-License-Identifier: Apache-2.0
"""`load`: the quantized modules of a checkpoint as `AwqLinear` layers on a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from cupy_awq import checkpoint
from cupy_awq.check import HOST, Array
from cupy_awq.checkpoint import Contents, Tensor
from cupy_awq.checkpoint.files import release_pages
from cupy_awq.linear import AwqLinear
from cupy_awq.runtime import placement
from cupy_awq.weight import PackedWeight

REPACK_BYTES = 1 << 22
"""The size in bytes from which a module is repacked on the GPU; for smaller ones, launches take longer than the CPU."""


RELEASED_BYTES = 1 << 26
"""The number of bytes after whose copies to a GPU the pages of the files are released."""

_Item = TypeVar("_Item")


class Checkpoint(Mapping[str, AwqLinear]):
    """The layers and tensors of a checkpoint by name, each copied to a device at its first access; returned by `load`.

    A quantized module is an `AwqLinear`, a plain tensor an array. For type checkers every value is an `AwqLinear`, so
    typed code takes arrays from `tensors`. Later accesses return the same object. Deleting the mapping frees all
    objects that are not referenced elsewhere.

    >>> from cupy_awq import load
    >>> from cupy_awq.tools.demo import SMOLLM2_MLP
    >>> load(SMOLLM2_MLP, device="cpu")["model.layers.0.mlp.up_proj"].shape
    (576, 1536)
    """

    def __init__(self, contents: Contents, device: int) -> None:
        self._contents = contents
        self._device = device
        self._placed: dict[str, Any] = {}
        self._copied_bytes = 0  # since the pages of the files were released

    @property
    def layers(self) -> Mapping[str, AwqLinear]:
        """The quantized modules alone, by name."""
        return _Selection([name for name in self if self._contents.is_module(name)], self.__getitem__)

    @property
    def tensors(self) -> Mapping[str, Array]:
        """The plain tensors alone, as arrays by name."""
        return _Selection([name for name in self if not self._contents.is_module(name)], self.__getitem__)

    def __getitem__(self, name: str) -> AwqLinear:
        if name not in self._placed:
            # If two threads create the same object, both return the one that was stored first.
            self._placed.setdefault(name, self._place(name))
        item: AwqLinear = self._placed[name]  # an array for a plain tensor, though not for type checkers
        return item

    def _place(self, name: str) -> AwqLinear | Array:
        def place(array: Array) -> Array:
            return None if array is None else placement.to_device(array, self._device)

        with placement.use_device(self._device):
            item = self._contents.convert(name, place, min_bytes=REPACK_BYTES)
            weight: Any = item.array if isinstance(item, Tensor) else item.weight
            if isinstance(item, Tensor):
                placed = place(weight)
            else:
                packed = PackedWeight(place(weight.qweight), place(weight.scales), place(weight.qzeros))
                placed = AwqLinear(packed, bias=place(item.bias), order=place(item.order))
        self._copied_bytes += 0 if self._device == HOST else weight.nbytes
        if self._copied_bytes > RELEASED_BYTES:
            release_pages()
            self._copied_bytes = 0
        return placed

    def __contains__(self, name: object) -> bool:
        return name in self._contents

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents)

    def __len__(self) -> int:
        return len(self._contents)

    def __repr__(self) -> str:
        modules, place = len(self.layers), placement.device_name(self._device)
        return f"Checkpoint({modules} quantized modules, {len(self) - modules} other tensors, {place})"


class _Selection(Mapping[str, _Item]):
    """A mapping of some of the names of another one, whose values ``get`` returns."""

    def __init__(self, names: Iterable[str], get: Callable[[str], _Item]) -> None:
        self._names = dict.fromkeys(names)
        self._get = get

    def __getitem__(self, name: str) -> _Item:
        if name not in self._names:
            raise KeyError(name)
        return self._get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def load(path: str | os.PathLike[str], /, *, device: object = None, group_size: int | None = None) -> Checkpoint:
    """Open a 4-bit checkpoint as a mapping from names to `AwqLinear` layers (quantized modules) and arrays (tensors).

    ``load(path)[name]`` is a layer for type checkers; `Checkpoint.layers` and `Checkpoint.tensors` hold one kind each.

    The supported formats are AutoAWQ ("gemm", "gemv", "gemv_fast"), llm-awq, GPTQ and auto-round, compressed-tensors
    "pack-quantized", MLX, HQQ and GGUF. All headers and scales are validated by this call, except for the scales of
    GGUF tensors, which are validated at first access. A module is read from the memory-mapped file at the first access
    of its name, repacked unless its format is AutoAWQ's "gemm", and copied to the device once. On the CPU, layers from
    "gemm" files use the memory-mapped file without a copy.

    A module with an activation order (``g_idx`` of GPTQ or compressed-tensors) has its rows sorted by group, and its
    layer has an `AwqLinear.order`. A module without ``qzeros`` is symmetric (every zero point is 8). A module that is
    not quantized appears as plain tensors in their original dtype.

    Args:
        path: a folder with ``config.json`` (or an older file with the quantization settings) and ``model.safetensors``
            (or shards and an index); or one safetensors file, ``.gguf`` file, or ``.pt`` file of llm-awq.
        device: "cpu", a device ordinal, or a cupy.cuda.Device; None for CuPy's current device (the CPU if there is no
            GPU).
        group_size: the number of rows of W per group, for files that do not record it ("gemv" formats without a
            configuration); otherwise None.

    Raises:
        CheckpointError: the format is not supported, or the files are damaged or contradict each other. The message
            names the file and the tensor. It is a subclass of ValueError, raised before device memory is allocated.
            The first access of a GGUF tensor also raises it, if scales are not finite.
        OSError: a file cannot be opened.
        TypeError: ``path`` or ``device`` has an unsupported type.
        ValueError: ``device`` does not exist.

    >>> from cupy_awq.tools.demo import SMOLLM2_MLP
    >>> layers = load(SMOLLM2_MLP, device="cpu")
    >>> sorted(layers)[0], len(layers)
    ('model.layers.0.mlp.down_proj', 3)
    >>> layers["model.layers.0.mlp.down_proj"].shape
    (1536, 576)
    """
    index = placement.resolve(device)
    return Checkpoint(checkpoint.read(path, group_size=group_size), index)
