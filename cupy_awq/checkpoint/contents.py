# SPDX-License-Identifier: Apache-2.0
"""The contents of a checkpoint: validated modules, whose codes are repacked on access, and plain tensors."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cupy_awq.checkpoint import experts
from cupy_awq.checkpoint.files import CheckpointError, check_count
from cupy_awq.checkpoint.format import Format
from cupy_awq.checkpoint.module import Module, ModuleSpec, Pending
from cupy_awq.checkpoint.tensors import Array, Tensor

RUN_TIME_SCALES = "act.scales"
"""The ending of the tensor names of AutoAWQ's activation scales.

Activation scales are plain tensors, although their names end in "scales" like the scales of quantized modules.
"""


class Contents(Mapping[str, Module | Tensor]):
    """A read-only mapping from names to the quantized modules and plain tensors of a checkpoint, on the CPU.

    All headers and scales are validated; the scales of GGUF tensors are validated at first access. A module is repacked
    at each access and not cached. Plain tensors are read-only views of the mapped files, unless they are converted from
    quantized ones, also at each access.

    Args:
        entries: the modules and plain tensors by name.
        found: a sentence that states the format and the evidence for it.
        format_name: the name of the format.
    """

    def __init__(self, entries: Mapping[str, Pending | Tensor], found: str, format_name: str) -> None:
        self._entries = entries
        is_quantized = any(isinstance(entry, Pending) for entry in entries.values())
        self.found = found if is_quantized else "No quantized modules."
        """A sentence that states the format and the file and field that identify it."""
        self.format_name = format_name if is_quantized else None
        """The name of the format, or None if no module is quantized."""

    @property
    def specs(self) -> dict[str, ModuleSpec]:
        """The properties of all modules that are quantized in the files, even if they are read as dense tensors."""
        pending = {name: entry.spec for name, entry in self._entries.items() if isinstance(entry, Pending)}
        return {name: spec for name, spec in pending.items() if spec.bits < 16}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Contents:
        """Return these contents with ``tensors`` added; a tensor replaces the entry of the same name."""
        return Contents({**self._entries, **tensors}, self.found, self.format_name or "")

    def with_changed_modules(
        self, change_spec: Callable[[ModuleSpec], ModuleSpec], change: Callable[[str, Module], Module]
    ) -> Contents:
        """Return these contents with each module that stays quantized changed by ``change(name, module)`` on access."""

        def convert(name: str, entry: Pending) -> Module | Tensor:
            item = entry.convert()
            return change(name, item) if isinstance(item, Module) else item

        entries = {
            name: Pending(change_spec(entry.spec), partial(convert, name, entry), entry.warning)
            if isinstance(entry, Pending) and not entry.is_dense
            else entry
            for name, entry in self._entries.items()
        }
        return Contents(entries, self.found, self.format_name or "")

    def is_module(self, name: str) -> bool:
        """Return whether ``name`` is a module that stays quantized, so that ``self[name]`` is a `Module`."""
        entry = self._entries.get(name)
        return isinstance(entry, Pending) and not entry.is_dense

    def dense_form(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape and dtype of the dense tensor ``name`` without converting it."""
        entry = self._entries[name]
        if isinstance(entry, Pending):
            return entry.shape or (entry.spec.n, entry.spec.k), entry.spec.dtype
        return entry.array.shape, entry.array.dtype

    def __getitem__(self, name: str) -> Module | Tensor:
        entry = self._entries[name]
        return entry.convert() if isinstance(entry, Pending) else entry

    def convert(self, name: str, place: Callable[[Array], Array], *, min_bytes: int = 0) -> Module | Tensor:
        """Return the module or the tensor ``name``, with codes repacked on the device to which ``place`` copies.

        Plain tensors, modules of fewer than ``min_bytes`` bytes and modules of a format that only the CPU repacks stay
        on the CPU. Raises KeyError for an unknown name.
        """
        entry = self._entries[name]
        if not isinstance(entry, Pending):
            return entry
        return entry.convert(place if entry.spec.nbytes >= min_bytes else None)

    def read(self, name: str) -> Module | Array:
        """Return the module ``name``, or the array of a plain tensor ``name``. Raises KeyError for an unknown name."""
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
        format: the name of the format, or None if no module is quantized.
        found: a sentence that states the format and the file and field that identify it.
        bits: the number of bits per code in most modules, or None if no module is quantized.
        group_size: the number of rows of W per group in most 4-bit modules, or None without 4-bit modules.
        symmetric: whether all zero points of 4-bit modules are 8; None if these differ or there are none.
        act_order: whether any module permutes x (activation order).
        exceptions: a description of how a module differs from most modules, by module name.
        roundings: the number of modules for each description of a rounding (`ModuleSpec.rounding`); modules whose
            conversion is exact are not counted.
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
    """Return a description of a checkpoint for the command ``info``, without converting any module."""
    specs = contents.specs
    # modules that become dense have no groups: leave them out unless all are dense
    packed = {name: spec for name, spec in specs.items() if contents.is_module(name)}
    widths = Counter(spec.bits for spec in (packed or specs).values())
    bits = widths.most_common(1)[0][0] if widths else None
    forms = Counter((spec.group_size, str(spec.dtype)) for spec in packed.values())
    group_size, dtype = forms.most_common(1)[0][0] if forms else (None, "")
    exceptions = {}
    for name, spec in specs.items():
        differing = []
        if spec.bits != bits:
            differing.append(f"{spec.bits} bits")
        if name in packed and spec.group_size != group_size:
            differing.append(f"group size {spec.group_size}")
        if name in packed and str(spec.dtype) != dtype:
            differing.append(f"{spec.dtype} scales")
        if differing:
            exceptions[name] = ", ".join(differing)
    forms_of_zeros = {spec.zeros == "symmetric" for spec in packed.values()}
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
    """Group ``tensors`` into validated modules of the format ``layout`` and return them with the remaining tensors.

    If modules have warnings, only the first warning is issued, with the number of such modules. Raises CheckpointError
    if the tensors of a module contradict each other or the configuration, if a module has scales or zero points but no
    codes, if a name occurs twice, or if there are too many modules and tensors.

    Returns:
        The modules (`Pending`), followed by the plain tensors, by name.
    """
    entries: dict[str, Pending | Tensor] = {}
    used: set[str] = set()
    notes: list[str] = []
    for name, tensor in tensors.items():
        suffix = name.rpartition(".")[2]
        if suffix != layout.codes_suffix or not layout.is_quantized(tensor.array):
            continue
        prefix = name.removesuffix(suffix)
        suffixes = (suffix, *layout.other_suffixes)
        group = {end: tensors[prefix + end] for end in suffixes if prefix + end in tensors}
        used.update(prefix + end for end in group)
        for key, of_module in experts.split(prefix.removesuffix("."), tensor.file, group, suffix):
            pending = layout.open_module(of_module)
            if pending.is_dense:
                key = f"{key}.weight" if key else "weight"
                used.discard(prefix + "bias")
            if key in entries:
                raise CheckpointError(f"{of_module.where}: expected a unique name, got {key!r:.200} twice")
            entries[key] = pending
            check_count(len(entries), str(tensor.file))
            if pending.warning:
                notes.append(pending.warning)
    for name, tensor in tensors.items():
        if name in used:
            continue
        if name.rpartition(".")[2] in layout.dependent_suffixes and not name.endswith(RUN_TIME_SCALES):
            raise CheckpointError(
                f"{tensor.file}: tensor {name!r:.200}: expected {layout.codes_suffix} beside it, got none"
            )
        if name in entries:
            raise CheckpointError(f"{tensor.file}: tensor {name!r:.200}: expected a unique name, got that of a module")
        entries[name] = tensor
        check_count(len(entries), str(tensor.file))
    warn_first(notes)
    return entries


def warn_first(notes: Sequence[str]) -> None:
    """Issue the first of the warnings ``notes``, one per module, with their number; do nothing if there are none."""
    if notes:
        more = f" ({len(notes)} modules)" if len(notes) > 1 else ""
        warnings.warn(notes[0] + more, stacklevel=_find_user_level())


def _find_user_level() -> int:
    """Return the ``stacklevel`` with which the caller's `warnings.warn` attributes the warning to the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("cupy_awq."):
        level, frame = level + 1, frame.f_back
    return level
