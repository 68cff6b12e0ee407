# SPDX-License-Identifier: Apache-2.0
"""`load`: a checkpoint's quantized modules as `AwqLinear` layers on a device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from cupy_awq import checkpoint
from cupy_awq.check import Array
from cupy_awq.checkpoint import Module, Tensor
from cupy_awq.linear import AwqLinear
from cupy_awq.runtime import placement
from cupy_awq.weight import PackedWeight


class Checkpoint(Mapping[str, AwqLinear | Array]):
    """A checkpoint whose layers and tensors move to a device when they are first accessed; `load` returns it.

    A key is the name of a quantized module (value: an `AwqLinear`) or of any other tensor (value: an array). A value is
    kept once it is placed: the same key gives the same object. Dropping the mapping frees them all.

    >>> from cupy_awq import load
    >>> from cupy_awq.tools.demo import SMOLLM2_MLP
    >>> load(SMOLLM2_MLP, device="cpu")["model.layers.0.mlp.up_proj"].shape
    (576, 1536)
    """

    def __init__(self, contents: Mapping[str, Module | Tensor], device: int) -> None:
        self._contents = contents
        self._device = device
        self._placed: dict[str, AwqLinear | Array] = {}

    def __getitem__(self, name: str) -> AwqLinear | Array:
        if name not in self._placed:
            # Two threads may place one tensor; setdefault gives both the object that was stored first.
            return self._placed.setdefault(name, self._place(self._contents[name]))
        return self._placed[name]

    def _place(self, item: Module | Tensor) -> AwqLinear | Array:
        def place(array: Array) -> Array:
            return None if array is None else placement.to_device(array, self._device)

        if isinstance(item, Tensor):
            return place(item.array)
        weight = item.weight
        with placement.use_device(self._device):
            placed = PackedWeight(place(weight.qweight), place(weight.scales), place(weight.qzeros))
            return AwqLinear(placed, bias=place(item.bias))

    def __contains__(self, name: object) -> bool:
        return name in self._contents

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents)

    def __len__(self) -> int:
        return len(self._contents)

    def __repr__(self) -> str:
        modules = sum(isinstance(item, Module) for item in self._contents.values())
        place = placement.device_name(self._device)
        return f"Checkpoint({modules} quantized modules, {len(self) - modules} other tensors, {place})"


def load(path: str | os.PathLike[str], /, *, device: object = None) -> Checkpoint:
    """Open an AutoAWQ checkpoint: a mapping from module names to `AwqLinear`, from other tensors' names to arrays.

    All headers are read and validated here. A tensor is read from the memory-mapped file when its key is first
    accessed, and copied to the device once. On the CPU nothing is copied: layers compute on the mapped file.

    Args:
        path: a folder with ``config.json`` (or AutoAWQ's older ``quant_config.json``) and ``model.safetensors``, or
            shards and their index; or a single safetensors file, whose group size follows from its shapes.
        device: None for CuPy's current GPU, or the CPU where there is none; "cpu"; a GPU's number; a cupy.cuda.Device.

    A module without ``qzeros`` is symmetric (every zero point is 8). A module that was not quantized appears as its
    plain tensors, in their own dtype.

    Raises:
        CheckpointError: (a ValueError) the format is not supported, or the files are damaged or contradict each other.
            The message names the file and the tensor. Nothing has been allocated on the device yet.
        OSError: a file cannot be opened.
        TypeError: ``path`` or ``device`` has another type.
        ValueError: ``device`` does not exist.

    >>> from cupy_awq.tools.demo import SMOLLM2_MLP
    >>> layers = load(SMOLLM2_MLP, device="cpu")
    >>> sorted(layers)[0], len(layers)
    ('model.layers.0.mlp.down_proj', 3)
    >>> layers["model.layers.0.mlp.down_proj"].shape
    (1536, 576)
    """
    index = placement.resolve(device)
    return Checkpoint(checkpoint.read(path), index)
