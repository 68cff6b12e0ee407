# SPDX-License-Identifier: Apache-2.0
"""Tuned configurations: the fastest one for a shape on a GPU, as ``python -m cupy_awq tune`` measured it.

The package ships a table for some GPUs, one JSON file each, in ``data/tuned``. Those that a user measures lie in the
folder ``tuned`` of the user's cache and come first. A file maps a shape (`TuningKey`; ``"4096x12288"`` is K = 4096,
N = 12288) to an object that maps m to an entry: the label of a configuration, and its time where `tune` has recorded
it, as in ``"gemm_sm80(block_m=16, warps=4, split_k=4) 12.3 us"``.

A GEMM with a `Fusion` is looked up under ``"4096x12288 stream"`` first, which holds the fastest configuration inside a
decoder step, and then under ``"4096x12288"``.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cupy_awq.kernels.family import AnyFamily, Config, KernelProblem
from cupy_awq.runtime import disk_cache as cache
from cupy_awq.runtime.device import Device

SHIPPED = Path(__file__).parents[1] / "data" / "tuned"
"""The folder of the shipped tables."""

DERIVED_FIELDS = ("stages",)
"""The fields that follow from the others and from the size of a group's scales."""

Table = dict[str, dict[str, str]]
"""The content of a file: shape -> m -> entry."""


ENTRY = re.compile(r"(.+\))(?: (\d+\.\d) us)?")
"""The text of an entry: a label, and the time where it is recorded."""


class TunedConfig(NamedTuple):
    """An entry of a table.

    Attributes:
        label: the configuration, as `label` names it.
        us: its time in microseconds, None if the table does not record it.
        m: rows of x, or images, at which it was measured.
        origin: the table, in words.
    """

    label: str
    us: float | None
    m: int
    origin: str


def label(family: AnyFamily, config: Config) -> str:
    """Return the name of a configuration in a table, which holds for every group size and dtype."""
    return f"{family.NAME}({fields(config, DERIVED_FIELDS)})"


def fields(config: Config, without: Sequence[str] = ()) -> str:
    """Return the fields of a configuration as ``name=value``, separated by commas."""
    return ", ".join(f"{name}={value}" for name, value in vars(config).items() if name not in without)


def entry(label: str, us: float) -> str:
    """Return the text of a table's entry.

    >>> entry("gemv(rows=1, chunk=8, split_k=4)", 12.345)
    'gemv(rows=1, chunk=8, split_k=4) 12.3 us'
    """
    return f"{label} {us:.1f} us"


def file_name(device: Device) -> str:
    """Return the name of a GPU's file."""
    return re.sub(r"\W+", "-", device.name).strip("-").lower() + ".json"


def user_folder() -> Path:
    """Return the folder of the user's tables."""
    return cache.folder() / "tuned"


def lookup(problem: KernelProblem, device: Device) -> TunedConfig | None:
    """Return the tuned configuration of a problem, None if there is none; it may not be legal.

    The user's table comes before the shipped one. A forced lower architecture path has none.
    """
    key = problem.tuning_key
    if key is None or device.arch != device.native:
        return None
    m = str(key.tuned_m)
    for origin, table in _tables(device).items():
        for shape in key.shapes:
            if m in table.get(shape, {}):
                match = ENTRY.fullmatch(table[shape][m])
                name, us = match.groups() if match else (table[shape][m], None)
                return TunedConfig(name, None if us is None else float(us), key.tuned_m, origin)
    return None


@functools.cache
def _tables(device: Device) -> dict[str, Table]:
    """Return the user's and the shipped table of a GPU, by their origin."""
    name = file_name(device)
    user = user_folder() / name
    return {f"your table {user}": read(user), f"shipped table {name}": read(SHIPPED / name)}


def merge(first: Mapping[str, Mapping[str, str]], second: Mapping[str, Mapping[str, str]]) -> Table:
    """Return the entries of both tables; those of ``second`` where both have one."""
    return {shape: {**first.get(shape, {}), **second.get(shape, {})} for shape in [*first, *second]}


def read(path: Path) -> Table:
    """Return the table in a file, empty if there is none or it cannot be read.

    Raises:
        ValueError: the file holds anything else.
    """
    content = cache.read(path)
    if content is None:
        return {}
    try:
        found = json.loads(content)
        is_table = all(isinstance(text, str) for entries in found.values() for text in entries.values())
    except (ValueError, AttributeError, RecursionError):
        is_table = False
    if not is_table:
        raise ValueError(
            f"{path}: expected a table of tuned configurations; remove it, or run python -m cupy_awq tune again"
        )
    return dict(found)


def write(device: Device, table: Table) -> Path:
    """Add entries to the user's table of a GPU and return its path; processes use them that start later."""
    path = user_folder() / file_name(device)
    cache.write(path, (json.dumps(merge(read(path), table), indent=1) + "\n").encode())
    return path
