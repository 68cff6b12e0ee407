# SPDX-License-Identifier: Apache-2.0
"""The quantizer's loops as GPU kernels, with the same results as the NumPy versions in `cupy_awq.quantization`."""

from __future__ import annotations

import numpy as np

from cupy_awq import check
from cupy_awq.check import Array
from cupy_awq.kernels.quantization.refine_group import GroupRefinement
from cupy_awq.kernels.quantization.round_channels import ChannelRounding
from cupy_awq.kernels.select import planner
from cupy_awq.runtime import arrays, device
from cupy_awq.runtime.launch import get_launcher
from cupy_awq.runtime.launch_plan import LaunchPlan

_plan_rounding = planner(ChannelRounding)
_plan_refinement = planner(GroupRefinement)


def round_channels(target: Array, old: Array, weights: Array, bottom: Array, top: Array) -> tuple[Array, Array]:
    """Round the targets of a block of B channels one after the other; return (codes, changes), both float32 [B, N].

    The arguments are those of `cupy_awq.quantization.error_compensation.round_channels`, CuPy arrays with B at most
    `cupy_awq.kernels.quantization.round_channels.MAX_CHANNELS`. ``target`` is not modified.
    """
    import cupy

    contiguous = [cupy.ascontiguousarray(a, np.float32) for a in (target, weights.T, bottom, top)]
    before = None if old is target else cupy.ascontiguousarray(old, np.float32)
    codes, changes = (cupy.empty(target.shape, np.float32) for _ in range(2))
    plan = _plan_rounding(device.of(check.device_id(target, "target")), *target.shape)
    _launch(plan, contiguous[0], before, *contiguous[1:], codes, changes)
    return codes, changes


def refine_group(
    codes: Array,
    curved: Array,
    gradient: Array,
    total: Array,
    scale: Array,
    zero: Array,
    limits: tuple[float, float],
    *,
    symmetric: bool,
) -> Array:
    """Update the scales and zero points of one group; return the change of the dequantized weights, float32 [G, N].

    The arguments are those of `cupy_awq.quantization.refinement.refine_group`, CuPy arrays, and the limits (smallest
    scale, largest value) of the dtype of ``scale``. The strides of ``scale`` and ``zero`` must be equal in elements.
    """
    import cupy

    inputs = [cupy.ascontiguousarray(a, np.float32) for a in (codes, curved, gradient)]
    step = cupy.empty(codes.shape, np.float32)
    stride = scale.strides[0] // scale.itemsize
    group_size, n = codes.shape
    here = device.of(check.device_id(codes, "codes"))
    plan = _plan_refinement(here, group_size, n, stride, str(scale.dtype), limits, symmetric=symmetric)
    _launch(plan, *inputs, total, scale, zero, step)
    return step


def _launch(plan: LaunchPlan, *buffers: Array | None) -> None:
    """Launch a plan on the current GPU and stream with its buffers in order."""
    import cupy

    launcher = get_launcher(plan, cupy.cuda.runtime.getDevice())
    launcher(tuple(map(arrays.address, buffers)), cupy.cuda.get_current_stream().ptr)
