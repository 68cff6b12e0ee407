# SPDX-License-Identifier: Apache-2.0
"""Kernels from outside ``cuda_src``: samples, source texts, and patched copies of the sources."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from cupy_awq.runtime import sources
from cupy_awq.runtime.launch_plan import Argument, Dim3, Kernel, LaunchPlan

SAMPLES = Path(__file__).parent / "samples"


@contextlib.contextmanager
def sources_in(folder: Path) -> Iterator[None]:
    """Make launches in the context compile the sources of ``folder`` instead of ``cuda_src``."""
    with mock.patch.object(sources, "folder", return_value=folder):
        yield


@contextlib.contextmanager
def source_text(name: str, text: str) -> Iterator[None]:
    """Use ``text`` as the source file ``name`` in the context."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, name).write_text(text, encoding="utf-8")
        with sources_in(Path(folder)):
            yield


@contextlib.contextmanager
def patched(file: str, old: str, new: str) -> Iterator[None]:
    """Use a copy of ``cuda_src`` in which ``new`` replaces ``old``, which must occur exactly once."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "cuda_src")
        shutil.copytree(sources.folder(), copy)
        text = (copy / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise ValueError(f"{file}: expected one {old!r}, found {text.count(old)}")
        (copy / file).write_text(text.replace(old, new), encoding="utf-8")
        with sources_in(copy):
            yield


def plan(
    source: str,
    arguments: tuple[Argument, ...],
    *,
    grid: Dim3 = (1, 1, 1),
    block: Dim3 = (32, 1, 1),
    arch: str = "80",
    shared_bytes: int = 0,
    cluster: Dim3 = (1, 1, 1),
    **defines: int | str,
) -> LaunchPlan:
    """Return a launch plan for the kernel ``NAME`` of ``NAME.cu`` with the -D constants ``defines``."""
    kernel = Kernel(source, source.removesuffix(".cu"), tuple(defines.items()), arch)
    return LaunchPlan(kernel, grid, block, arguments, shared_bytes, cluster)
