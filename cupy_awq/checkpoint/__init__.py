# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints: a folder or a file becomes a mapping from module names to layers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from cupy_awq.check import Array
from cupy_awq.checkpoint import autoawq, config, safetensors
from cupy_awq.checkpoint.autoawq import Module, Tensor
from cupy_awq.checkpoint.files import CheckpointError, read_object
from cupy_awq.linear import AwqLinear
from cupy_awq.runtime import placement
from cupy_awq.weight import PackedWeight

__all__ = ["Checkpoint", "CheckpointError", "Module", "Tensor", "load", "read"]

INDEX = "model.safetensors.index.json"


class Checkpoint(Mapping[str, AwqLinear | Array]):
    """A checkpoint on a device: what ``load`` returns.

    A key is the name of a quantized module (an ``AwqLinear``) or of any other tensor (an array). Each is brought to the
    device when it is first asked for, and kept: asking again gives the same object. Dropping the mapping frees them.
    """

    def __init__(self, contents: Mapping[str, Module | Tensor], device: int) -> None:
        self._contents = contents
        self._device = device
        self._placed: dict[str, AwqLinear | Array] = {}

    def __getitem__(self, name: str) -> AwqLinear | Array:
        if name not in self._placed:
            # Of two threads that place one tensor, both get what the first one stored.
            return self._placed.setdefault(name, self._place(self._contents[name]))
        return self._placed[name]

    def _place(self, item: Module | Tensor) -> AwqLinear | Array:
        def put(array: Array | None) -> Array | None:
            return None if array is None else placement.put(array, self._device)

        if isinstance(item, Tensor):
            return put(item.array)
        weight = item.weight
        with placement.on(self._device):
            placed = PackedWeight(put(weight.qweight), put(weight.scales), put(weight.qzeros))
            return AwqLinear(placed, bias=put(item.bias))

    def __contains__(self, name: object) -> bool:
        return name in self._contents

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents)

    def __len__(self) -> int:
        return len(self._contents)

    def __repr__(self) -> str:
        modules = sum(isinstance(item, Module) for item in self._contents.values())
        place = placement.name(self._device)
        return f"Checkpoint({modules} quantized modules, {len(self) - modules} other tensors, {place})"


def load(path: str | os.PathLike[str], /, *, device: object = None) -> Checkpoint:
    """Open a checkpoint of AutoAWQ's "gemm" version: a mapping, module name -> AwqLinear, other tensor's name -> array.

    All headers are read and checked here; a tensor is read from the mapped file when its key is first accessed, and
    goes to the device in one copy. On the CPU nothing is copied: layers compute on the mapped file.

    Args:
        path: a folder with ``config.json`` (or AutoAWQ's older ``quant_config.json``) and ``model.safetensors``, or
            shards and their index; or one safetensors file alone, whose group size then comes from its shapes.
        device: None for CuPy's current GPU, or the CPU where there is none; "cpu"; a GPU's number; a cupy.cuda.Device.

    A module without ``qzeros`` is symmetric (every zero point is 8). Modules that the quantizer left alone are there as
    their plain tensors, in their own dtype.

    Raises:
        CheckpointError: (a ValueError) the format is not supported, or the files are damaged or contradict each other;
            it names the file and the tensor, and comes before anything is allocated on the device.
        OSError: a file cannot be opened.
        TypeError, ValueError: ``path`` or ``device`` is not one.

    >>> from cupy_awq.tools.demo import SMOLLM2_MLP
    >>> layers = load(SMOLLM2_MLP, device="cpu")
    >>> sorted(layers)[0], len(layers)
    ('model.layers.0.mlp.down_proj', 3)
    >>> layers["model.layers.0.mlp.down_proj"].shape
    (1536, 576)
    """
    index = placement.resolve(device)
    return Checkpoint(read(path), index)


def read(path: str | os.PathLike[str], /) -> dict[str, Module | Tensor]:
    """What ``load`` would place, still on the CPU as views of the mapped files; raises as ``load`` does."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected a str or an os.PathLike, got {type(path).__name__}")
    found = Path(path)
    if not found.is_dir():
        return autoawq.gather(_tensors([found]), None)
    quantization = config.read(found)
    if (found / INDEX).is_file():
        return autoawq.gather(_indexed(found / INDEX), quantization)
    files = [found / "model.safetensors"]
    if not files[0].is_file():
        files = sorted(found.glob("*.safetensors"))
    if len(files) != 1:
        raise CheckpointError(f"{found}: expected model.safetensors, {INDEX} or one safetensors file, got {len(files)}")
    return autoawq.gather(_tensors(files), quantization)


def _tensors(files: list[Path]) -> dict[str, Tensor]:
    return {name: Tensor(array, file) for file in files for name, array in safetensors.read(file).items()}


def _indexed(index: Path) -> dict[str, Tensor]:
    """The tensors that an index names, each from its shard."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: expected an object weight_map, got {weight_map!r:.80}")
    shards: dict[str, dict[str, Tensor]] = {}
    tensors = {}
    for name, shard in weight_map.items():
        # A shard lies beside its index: a path could lead anywhere.
        if not isinstance(shard, str) or shard in ("", ".", "..") or "/" in shard or "\\" in shard or "\0" in shard:
            raise CheckpointError(
                f"{index}: tensor {name!r:.200}: expected the name of a file in the folder, got {shard!r:.80}"
            )
        if shard not in shards:
            file = index.parent / shard
            if not file.is_file():
                raise CheckpointError(f"{index}: tensor {name!r:.200}: its shard {shard} is missing")
            shards[shard] = _tensors([file])
        if name not in shards[shard]:
            raise CheckpointError(
                f"{index.parent / shard}: tensor {name!r:.200}: named by {INDEX}, but not in this shard"
            )
        tensors[name] = shards[shard][name]
    return tensors
