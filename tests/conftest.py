# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU are deselected, not skipped, where there is none: a skip reads like a result."""

from __future__ import annotations

import os

# Read when NumPy loads: on small products, BLAS threads cost more than they give.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import functools

import hypothesis
import pytest

from cupy_awq.runtime.device import forced_arch
from cupy_awq.tools.table import render
from tests import simt

hypothesis.settings.register_profile("cupy_awq", deadline=None)  # a first call compiles a kernel
hypothesis.settings.load_profile("cupy_awq")


@functools.cache
def gpu() -> tuple[str, str]:
    """Name and compute capability ("90") of the current GPU; ("none", "") without CuPy, a driver or a device."""
    try:
        import cupy

        device = cupy.cuda.Device()
        return cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode(), device.compute_capability
    except Exception:  # CuPy missing, or any of the errors that it raises without a driver
        return "none", ""


collect_ignore = ["peers"]
"""Scripts for a machine that has the peers."""


def pytest_report_header() -> str:
    name, capability = gpu()
    return f"GPU: {name} (sm_{capability})" if capability else "GPU: none, so tests marked gpu are deselected"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _, capability = gpu()
    hopper = capability == "90" and forced_arch() in (None, 90)

    def runs_here(item: pytest.Item) -> bool:
        if item.get_closest_marker("sm90"):
            return hopper
        return bool(capability) or not item.get_closest_marker("gpu")

    deselected = [item for item in items if not runs_here(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if runs_here(item)]


ARCHS = (60, 75, 80, 90)
"""The architecture paths: plain CUDA, sm_75, sm_80, sm_90a."""


def kernels_to_simulate() -> set[tuple[str, str]]:
    """(kernel, target) of all that the package may launch on these paths."""
    from cupy_awq.tools import compile_all

    return {(kernel.entry, kernel.arch) for arch in ARCHS for kernel in compile_all.kernels(arch)}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run of the whole suite fails if a kernel was never simulated."""
    whole = session.config.args == session.config.getini("testpaths") and not session.config.getoption("keyword")
    if whole and kernels_to_simulate() - set(simt.launch_counts()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = simt.launch_counts()
    if not counts:
        return
    wanted = kernels_to_simulate()
    targets = sorted({target for _, target in wanted}, key=lambda target: int(target.rstrip("a")))
    rows = []
    for entry in sorted({entry for entry, _ in wanted}):
        cells = [str(counts.get((entry, t), 0)) if (entry, t) in wanted else "-" for t in targets]
        rows.append([entry, *cells])
    missing = sum((entry, target) not in counts for entry, target in wanted)
    terminalreporter.section("kernels simulated")
    terminalreporter.write_line(render(("launches", *(f"sm_{target}" for target in targets)), rows))
    terminalreporter.write_line(f"{missing} missing")
