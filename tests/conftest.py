# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU are deselected, not skipped, where there is none: a skip reads like a result."""

from __future__ import annotations

import os

# Read when NumPy loads: on small products, BLAS threads cost more than they give.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import functools

import hypothesis
import pytest

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


def pytest_report_header() -> str:
    name, capability = gpu()
    return f"GPU: {name} (sm_{capability})" if capability else "GPU: none, so tests marked gpu are deselected"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _, capability = gpu()

    def runs_here(item: pytest.Item) -> bool:
        if item.get_closest_marker("sm90"):
            return capability == "90"
        return bool(capability) or not item.get_closest_marker("gpu")

    deselected = [item for item in items if not runs_here(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if runs_here(item)]
