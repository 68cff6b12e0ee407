# SPDX-License-Identifier: Apache-2.0
"""Tuned configurations: the fastest configuration per shape and GPU, measured by ``python -m cupy_awq tune``.

Each GPU model has one table, a JSON file. The package ships tables for some GPUs in ``data/tuned``; `tune` writes to
the folder ``tuned`` of the user's cache, whose tables take precedence. A table maps a shape (``"4096x12288"`` is
K = 4096, N = 12288; see `TuningKey`) to an object that maps M to an entry: the label of a configuration, its time if
it was timed alone, a digest of the kernel's sources and the version of the driver, as in
``"gemm_sm80(block_m=16, warps=4, split_k=4) 12.3 us, sources 0123456789ab, driver 13.0"``. An entry without a digest,
or with that of other sources than those present, is refused. A table ships only entries that were measured to be more
than 2% faster than the first choice of the cost models.

A GEMM with a `Fusion` is looked up under ``"4096x12288 stream"`` first, for which the fastest configuration inside a
decoder step is recorded, and then under ``"4096x12288"``.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cupy_awq.kernels.family import KernelProblem, TuningKey
from cupy_awq.kernels.tiling import next_power_of_two
from cupy_awq.runtime import disk_cache as cache
from cupy_awq.runtime import rates, sources
from cupy_awq.runtime.device import Device

SHIPPED = Path(__file__).parents[1] / "data" / "tuned"
"""The folder of the shipped tables."""

Table = dict[str, dict[str, str]]
"""The content of a table: a mapping from shape to a mapping from M to the entry."""

ENTRY = re.compile(r"(.+\))(?: (\d+\.\d) us)?, sources ([0-9a-f]{12}), driver (\d+\.\d+)")
"""The regular expression of an entry: label, time in microseconds if it was timed alone, digest and driver."""


class TunedConfig(NamedTuple):
    """A tuned configuration: one entry of a table.

    Attributes:
        label: label of the configuration; see `label`.
        us: measured run time in microseconds, or None if the table does not record it.
        m: number of rows of x, or batch size, at which the configuration was measured.
        origin: description of the table for messages, such as "shipped table a100.json".
        digest: digest of the kernel's sources that were measured (`cupy_awq.runtime.sources.digest`), or None if the
            text is no entry.
    """

    label: str
    us: float | None
    m: int
    origin: str
    digest: str | None = None

    def is_outdated(self, source: str) -> bool:
        """Return whether the configuration was measured with other sources of the kernel, or with unknown ones."""
        return self.digest != sources.digest(source)


def entry(label: str, us: float | None, source: str, driver: str) -> str:
    """Return the text of a table entry, for the source file of the kernel and a version of the driver.

    >>> entry("gemv(rows=1, chunk=8, split_k=4)", 12.345, "gemm/gemv.cu", "13.0")  # doctest: +ELLIPSIS
    'gemv(rows=1, chunk=8, split_k=4) 12.3 us, sources ..., driver 13.0'
    """
    time = "" if us is None else f" {us:.1f} us"
    return f"{label}{time}, sources {sources.digest(source)}, driver {driver}"


def file_name(device: Device) -> str:
    """Return the file name of the tuning table of a GPU model, such as "nvidia-h100-80gb-hbm3.json"."""
    return rates.file_name(device.name)


def user_folder() -> Path:
    """Return the folder of the user's tables."""
    return cache.folder() / "tuned"


def lookup(problem: KernelProblem, device: Device) -> TunedConfig | None:
    """Return the tuned configuration of a problem, which may not be legal for the problem, or None if there is none.

    The user's table takes precedence over the shipped one, and `TuningKey.tuned_m` over the next power of two. If
    CUPY_AWQ_ARCH forces an older architecture, no tuned configuration is used.
    """
    key = problem.tuning_key
    if key is None or not device.is_native:
        return None
    for origin, table in _tables(device).items():
        for shape, m in itertools.product(key.shapes, (key.tuned_m, next_power_of_two(key.m))):
            text = table.get(shape, {}).get(str(m))
            if text is not None:
                match = ENTRY.fullmatch(text)
                name, us, digest, _ = match.groups() if match else (text, None, None, None)
                return TunedConfig(name, None if us is None else float(us), m, origin, digest)
    return None


def explain_missing(key: TuningKey, device: Device) -> str:
    """Return why `lookup` finds no tuned configuration for a problem with the tuning key ``key``."""
    if not device.is_native:
        return f"tuned configurations are not used, because CUPY_AWQ_ARCH selects sm_{device.arch}"
    tables = {origin: table for origin, table in _tables(device).items() if table}
    if not tables:
        return f"there is no table of tuned configurations for {device.name}"
    tuned_ms = sorted({int(m) for table in tables.values() for shape in key.shapes for m in table.get(shape, {})})
    at = f" at M={key.tuned_m}, only at M={', '.join(map(str, tuned_ms))}" if tuned_ms else ""
    return f"no tuned configuration for {key.shapes[-1]}{at} ({', '.join(tables)})"


@functools.cache
def _tables(device: Device) -> dict[str, Table]:
    """Return the tables of a GPU, first the user's, then the shipped one, each under its `TunedConfig.origin`."""
    name = file_name(device)
    user = user_folder() / name
    return {f"your table {user}": read(user), f"shipped table {name}": read(SHIPPED / name)}


def merge(first: Mapping[str, Mapping[str, str]], second: Mapping[str, Mapping[str, str]]) -> Table:
    """Return the union of two tables; the entries of ``second`` take precedence."""
    return {shape: {**first.get(shape, {}), **second.get(shape, {})} for shape in [*first, *second]}


def read(path: Path) -> Table:
    """Return the table in a file, or an empty table if the file does not exist or cannot be read.

    Raises:
        ValueError: the file is not a table.
    """
    content = cache.read(path)
    return {} if content is None else _parse(content, path)


def _parse(content: bytes, path: Path) -> Table:
    try:
        found = json.loads(content)
        entries = [entry for table in found.values() for entry in table.items()]
        is_table = all(m.isdecimal() and isinstance(text, str) for m, text in entries)
    except (ValueError, AttributeError, RecursionError):
        is_table = False
    if not is_table:
        raise ValueError(f"{path}: expected a table of tuned configurations, got other content; remove the file")
    return dict(found)


def write(device: Device, table: Table) -> Path:
    """Add the entries of ``table`` to the user's table of a GPU and return the path of the file.

    The entries are used by processes that start later. Several processes may write at the same time.

    Raises:
        OSError: the existing table cannot be read, or the folder is not writable.
        ValueError: the existing file is not a table.
    """
    path = user_folder() / file_name(device)
    with cache.locked(path.parent):
        present = _parse(path.read_bytes(), path) if path.exists() else {}
        cache.write(path, (json.dumps(merge(present, table), indent=1) + "\n").encode())
    return path
