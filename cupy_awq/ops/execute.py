# SPDX-License-Identifier: Apache-2.0
"""The last steps of operations on block-quantized weights: weight buffers, launch, and copy of the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupy_awq import check
from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.family import KernelProblem
from cupy_awq.kernels.select import Choice
from cupy_awq.runtime import placement
from cupy_awq.runtime.arrays import address
from cupy_awq.runtime.launch import get_launcher
from cupy_awq.runtime.launch_plan import LaunchPlan
from cupy_awq.runtime.workspace import COUNTER_BYTES, workspace_address


def empty(shape: tuple[int, ...], dtype: Any, device: int) -> Array:
    """Return an uninitialized array on the GPU with ordinal ``device``, or a NumPy array for `check.HOST`."""
    if device == check.HOST:
        return np.empty(shape, dtype)
    import cupy

    with placement.use_device(device):
        return cupy.empty(shape, dtype)


def weight_buffers(choice: Choice, weight: BlockQuantizedWeight, problem: KernelProblem) -> dict[str, Array | None]:
    """Return the weight buffers of the chosen kernel; layouts are created on first use and cached in the weight."""
    return dict(choice.family.prepare_weight(weight, problem))


def launch(plan: LaunchPlan, buffers: Mapping[str, Any], device: int) -> None:
    """Launch a plan on the current stream; its counters and partial sums are in the stream's workspace."""
    import cupy

    stream = cupy.cuda.get_current_stream().ptr
    ready = get_launcher(plan, device)
    offsets = {"counters": 0, "partials": COUNTER_BYTES}
    begin = workspace_address(device, stream) if plan.grid[2] > 1 and "partials" in ready.buffers else 0
    pointers = (
        (begin and begin + offsets[name]) if name in offsets else address(buffers[name]) for name in ready.buffers
    )
    ready(tuple(pointers), stream)


def deliver(y: Array, out: Array | None) -> Array:
    """Return ``out``, after copying ``y`` to it unless both are the same object; return ``y`` if ``out`` is None."""
    if out is None:
        return y
    if out is not y:
        out[...] = y
    return out
