# SPDX-License-Identifier: Apache-2.0
"""The back ends of kernel tests: the simulator, and the GPU under the marker ``gpu``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest

from cupy_awq.runtime.launch_plan import LaunchPlan
from tests import simt

Buffers = Mapping[str, "np.ndarray | None"]
Run = Callable[[LaunchPlan, Buffers], None]

GPU = pytest.param("gpu", marks=pytest.mark.gpu)
HOPPER = pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.sm90])
BACKENDS = ("latest", GPU)
"""The names of the back ends: the simulator, with asynchronous copies that land as late as PTX allows, and the GPU."""
LANDINGS = ("latest", "earliest", GPU)
"""The names of all back ends: the simulator with copies that land as late and as early as PTX allows, and the GPU."""

is_complete = True
"""Whether the run includes slow tests, which `conftest` sets before it collects; other runs simulate half as much."""


def few_examples(test: Any) -> Any:
    """Decorate a test that draws problems for simulated kernels: each example compiles another kernel for a second."""
    return hypothesis.settings(max_examples=4 if is_complete else 2)(test)


def sample(configs: Sequence[Any], backend: str, step: int, first: int) -> Sequence[Any]:
    """Return all configurations for the GPU, and every ``step``-th for the simulator, which takes a second for each.

    The cases of a test pass different ``first``, so that together they simulate most configurations. A run without slow
    tests simulates half of the sample.
    """
    step *= 1 if is_complete else 2
    return configs if backend == "gpu" else configs[first % step :: step]


def fewer(cases: Iterable[Any], step: int = 2) -> list[Any]:
    """Return the cases of a test as its parameters; all but every ``step``-th, from the first on, are marked slow."""
    return [pytest.param(case, marks=[pytest.mark.slow] if i % step else []) for i, case in enumerate(cases)]


def runner(backend: str) -> Run:
    """Return a function that runs a launch plan on NumPy arrays in place, on the given back end."""
    if backend == "gpu":
        return on_gpu
    return lambda plan, buffers: simt.run(plan, buffers, landing=backend)


def on_gpu(plan: LaunchPlan, buffers: Buffers) -> None:
    """Run a launch plan on the current GPU, on copies that have the strides and the alignment of the arrays."""
    import cupy

    from cupy_awq.runtime.launcher import launch

    copies = {name: None if a is None else _copy(a) for name, a in buffers.items()}
    launch(plan, copies, cupy.cuda.runtime.getDevice())
    cupy.cuda.get_current_stream().synchronize()
    for name, a in buffers.items():
        if a is not None and a.flags.writeable:
            a[...] = cupy.asnumpy(copies[name])


def _copy(a: np.ndarray):
    import cupy

    base = a if a.base is None else a.base
    if not isinstance(base, np.ndarray) or not base.flags.c_contiguous:
        return cupy.asarray(a)
    offset = a.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    memory = cupy.asarray(base.reshape(-1).view(np.uint8))
    return cupy.ndarray(a.shape, a.dtype, memory.data + offset, a.strides)
