# SPDX-License-Identifier: Apache-2.0
"""The quantizer's loops as GPU kernels, with the same results as the NumPy versions in `cupy_awq.quantization`."""

from __future__ import annotations

import numpy as np

from cupy_awq import check
from cupy_awq.check import Array
from cupy_awq.kernels.quantization.refine_group import GroupRefinement
from cupy_awq.kernels.quantization.round_channels import ChannelRounding
from cupy_awq.kernels.select import planner
from cupy_awq.runtime import device
from cupy_awq.runtime.launcher import launch

_plan_rounding = planner(ChannelRounding)
_plan_refinement = planner(GroupRefinement)


def round_channels(target: Array, old: Array, weights: Array, bottom: Array, top: Array) -> tuple[Array, Array]:
    """Round the targets of a block of B channels one after the other; return (codes, changes), both float32 [B, N].

    The arguments are those of `cupy_awq.quantization.error_compensation.round_channels`, CuPy arrays with B at most
    `cupy_awq.kernels.quantization.round_channels.MAX_CHANNELS`. ``target`` is not modified.
    """
    import cupy

    inputs = {"target": target, "factors": weights.T, "bottom": bottom, "top": top}
    buffers = {name: cupy.ascontiguousarray(a, np.float32) for name, a in inputs.items()}
    buffers["old"] = None if old is target else cupy.ascontiguousarray(old, np.float32)
    codes, changes = (cupy.empty(target.shape, np.float32) for _ in range(2))
    index = check.device_id(target, "target")
    plan = _plan_rounding(device.of(index), *target.shape)
    launch(plan, buffers | {"codes": codes, "changes": changes}, index)
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

    inputs = {"codes": codes, "curved": curved, "gradient": gradient}
    buffers = {name: cupy.ascontiguousarray(a, np.float32) for name, a in inputs.items()}
    step = cupy.empty(codes.shape, np.float32)
    stride = scale.strides[0] // scale.itemsize
    index = check.device_id(codes, "codes")
    group_size, n = codes.shape
    plan = _plan_refinement(device.of(index), group_size, n, stride, str(scale.dtype), limits, symmetric=symmetric)
    launch(plan, buffers | {"total": total, "scale": scale, "zero": zero, "step": step}, index)
    return step
