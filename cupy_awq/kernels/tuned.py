# SPDX-License-Identifier: Apache-2.0
"""Choices that were measured: which configuration was the fastest for a shape on a GPU, by ``python -m cupy_awq tune``.

The package ships the choices of some GPUs, a file a GPU in ``data/tuned``; those that a user measures lie in a folder
``tuned`` of the user's cache and come first. A file maps ``"KxN"`` to an object that maps rows to a configuration.
A GEMM with a `Fusion` looks under ``"KxN stream"`` first, which was measured in the chain of a decoder step.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path

from cupy_awq.kernels.problem import Config, Problem
from cupy_awq.runtime import disk_cache as cache
from cupy_awq.runtime.device import Device

SHIPPED = Path(__file__).parents[1] / "data" / "tuned"
UNNAMED = ("stages",)
"""What follows from the other fields and from the size of a group's scales."""

Choices = dict[str, dict[str, str]]


def label(config: Config) -> str:
    """The name of a configuration in a file: it holds for every group size and dtype."""
    values = (f"{name}={value}" for name, value in vars(config).items() if name not in UNNAMED)
    return f"{type(config).__name__}({', '.join(values)})"


def rows(m: int) -> int:
    """The number of rows whose measurement serves m rows, unless `select` knows better: the next power of two.

    >>> rows(1), rows(48), rows(64)
    (1, 64, 64)
    """
    return 1 << (m - 1).bit_length()


def file_name(device: Device) -> str:
    return re.sub(r"\W+", "-", device.name).strip("-").lower() + ".json"


def user_folder() -> Path:
    return cache.folder() / "tuned"


def preferred(problem: Problem, device: Device) -> str | None:
    """The label of the configuration that was measured to be the fastest, if there is one; it may not be legal."""
    if device.arch != device.native:
        return None  # a lower path is forced
    shape, m = f"{problem.k}x{problem.n}", str(rows(problem.m))
    shapes = (f"{shape} stream", shape) if problem.fusion else (shape,)
    found = (choices[shape][m] for choices in _choices(device) for shape in shapes if m in choices.get(shape, {}))
    return next(found, None)


@functools.cache
def _choices(device: Device) -> tuple[Choices, Choices]:
    """The user's and the shipped ones."""
    name = file_name(device)
    return read(user_folder() / name), read(SHIPPED / name)


def merged(first: Mapping[str, Mapping[str, str]], second: Mapping[str, Mapping[str, str]]) -> Choices:
    """All choices of both; the second's where both have one."""
    return {shape: {**first.get(shape, {}), **second.get(shape, {})} for shape in [*first, *second]}


def read(path: Path) -> Choices:
    """The choices of a file; none if there is no file. Raises ValueError for a file of anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        good = all(isinstance(name, str) for choices in found.values() for name in choices.values())
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, OSError):
        good = False
    if not good:
        raise ValueError(f"{path} must hold measured choices; remove it, or measure anew by python -m cupy_awq tune")
    return dict(found)


def write(device: Device, choices: Choices) -> Path:
    """Add to the user's choices for a GPU; the file that holds them now. They serve from the next process on."""
    path = user_folder() / file_name(device)
    cache.write(path, (json.dumps(merged(read(path), choices), indent=1) + "\n").encode())
    return path
