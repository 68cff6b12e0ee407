# SPDX-License-Identifier: Apache-2.0
"""The contents of a checkpoint: validated modules, repacked when they are accessed, and the remaining tensors."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_awq.checkpoint import experts
from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.module import Array, Format, ModuleSpec, Pending
from cupy_awq.checkpoint.tensors import Module, Tensor

RUN_TIME_SCALES = "act.scales"
"""The end of the name of a plain tensor of AutoAWQ, which has the name of quantized modules' scales."""


class Contents(Mapping[str, Module | Tensor]):
    """A checkpoint's quantized modules and other tensors by name, on the CPU.

    All headers and scales are validated. A module is repacked each time that it is accessed and is not kept; tensors
    are read-only views of the mapped files.
    """

    def __init__(self, entries: Mapping[str, Pending | Tensor], found: str, format_name: str) -> None:
        self._entries = entries
        is_quantized = any(isinstance(entry, Pending) for entry in entries.values())
        self.found = found if is_quantized else "No quantized modules."
        """A sentence about the format and what told it."""
        self.format_name = format_name if is_quantized else None
        """The name of the format; None without quantized modules."""

    @property
    def specs(self) -> dict[str, ModuleSpec]:
        """The shapes and forms of the quantized modules, also of those that become dense."""
        pending = {name: entry.spec for name, entry in self._entries.items() if isinstance(entry, Pending)}
        return {name: spec for name, spec in pending.items() if spec.bits < 16}

    def is_module(self, name: str) -> bool:
        """Return whether a name is that of a module that stays quantized."""
        entry = self._entries.get(name)
        return isinstance(entry, Pending) and not entry.is_dense

    def dense_form(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return shape and dtype of a tensor that is no module, without converting it."""
        entry = self._entries[name]
        if isinstance(entry, Pending):
            return (entry.spec.n, entry.spec.k), entry.spec.dtype
        return entry.array.shape, entry.array.dtype

    def __getitem__(self, name: str) -> Module | Tensor:
        entry = self._entries[name]
        return entry.convert() if isinstance(entry, Pending) else entry

    def read(self, name: str) -> Module | Array:
        """Return a module, or the array of any other tensor."""
        item = self[name]
        return item.array if isinstance(item, Tensor) else item

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True)
class Summary:
    """A description of a checkpoint's quantized modules.

    Attributes:
        format: the format's name; None without quantized modules.
        found: a sentence about the format and what told it.
        bits: bits of a code, of most modules.
        group_size: rows of W that share a scale, of most modules.
        symmetric: whether all zero points are 8; None where modules differ.
        act_order: whether a module permutes x.
        exceptions: what differs from most modules, by module name.
        roundings: what the conversion rounds, and the number of modules.
    """

    format: str | None
    found: str
    bits: int | None
    group_size: int | None
    symmetric: bool | None
    act_order: bool
    exceptions: dict[str, str]
    roundings: dict[str, int]


def summarize(contents: Contents) -> Summary:
    """Return the description of a checkpoint that ``info`` prints, from its specs alone."""
    specs = contents.specs
    forms = Counter((spec.bits, spec.group_size, str(spec.dtype)) for spec in specs.values())
    bits, group_size, dtype = forms.most_common(1)[0][0] if forms else (None, None, "")
    exceptions = {}
    for name, spec in specs.items():
        differing = []
        if spec.bits != bits:
            differing.append(f"{spec.bits} bits")
        if spec.group_size != group_size:
            differing.append(f"group size {spec.group_size}")
        if str(spec.dtype) != dtype:
            differing.append(f"{spec.dtype} scales")
        if differing:
            exceptions[name] = ", ".join(differing)
    forms_of_zeros = {spec.zeros == "symmetric" for spec in specs.values()}
    return Summary(
        format=contents.format_name,
        found=contents.found,
        bits=bits,
        group_size=group_size,
        symmetric=forms_of_zeros.pop() if len(forms_of_zeros) == 1 else None,
        act_order=any(spec.has_order for spec in specs.values()),
        exceptions=exceptions,
        roundings=dict(Counter(spec.rounding for spec in specs.values() if spec.rounding)),
    )


def gather(tensors: Mapping[str, Tensor], layout: Format) -> dict[str, Pending | Tensor]:
    """Return the validated modules and the remaining tensors by name, in the order of ``tensors``.

    Warns once of what a format says about its files. Raises CheckpointError for a module whose tensors contradict each
    other or the configuration, for parts of a module without codes, and for names that occur twice.
    """
    entries: dict[str, Pending | Tensor] = {}
    used: set[str] = set()
    notes: list[str] = []
    for name, tensor in tensors.items():
        suffix = name.rpartition(".")[2]
        if suffix != layout.codes or not layout.is_codes(tensor.array):
            continue
        prefix = name.removesuffix(suffix)
        group = {part: tensors[prefix + part] for part in (suffix, *layout.parts) if prefix + part in tensors}
        used.update(prefix + part for part in group)
        for key, parts in experts.split(prefix.removesuffix("."), tensor.file, group, suffix):
            pending = layout.open_module(parts)
            if pending.is_dense:
                key = f"{key}.weight" if key else "weight"
                used.discard(prefix + "bias")
            if key in entries:
                raise CheckpointError(f"{parts.where}: expected a unique name, got {key!r:.200} twice")
            entries[key] = pending
            if pending.warning:
                notes.append(pending.warning)
    for name, tensor in tensors.items():
        if name in used:
            continue
        if name.rpartition(".")[2] in layout.orphans and not name.endswith(RUN_TIME_SCALES):
            raise CheckpointError(f"{tensor.file}: tensor {name!r:.200}: expected {layout.codes} beside it, got none")
        if name in entries:
            raise CheckpointError(f"{tensor.file}: tensor {name!r:.200}: expected a unique name, got that of a module")
        entries[name] = tensor
    if notes:
        more = f" ({len(notes)} modules)" if len(notes) > 1 else ""
        warnings.warn(notes[0] + more, stacklevel=_find_user_level())
    return entries


def _find_user_level() -> int:
    """Return the stack level of the frame that called the package, for a warning in the calling function."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("cupy_awq."):
        level, frame = level + 1, frame.f_back
    return level
