# SPDX-License-Identifier: Apache-2.0
"""The operations on arrays of a GPU: plan and launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq import check, device, placement
from cupy_awq.check import Array
from cupy_awq.int8 import forms
from cupy_awq.int8.arguments import Quantized
from cupy_awq.int8.weight import PackedConvWeight
from cupy_awq.kernels import int8
from cupy_awq.launch_plan import LaunchPlan
from cupy_awq.ops.gpu import COUNTER_BYTES, address, launcher, row_step, views, workspace

__all__ = ["conv2d", "conv2d_int8", "gemm", "quantize", "views"]


def quantize(x: Array, block: int, symmetric: bool, rounding: str) -> tuple[Array, Array, Array | None, Array]:
    """As `cupy_awq.int8.quantize_activations`."""
    import cupy

    index = check.device_id(x, "x")
    with placement.on(index):
        m, k = x.shape
        shape = m, -(-k // block)
        codes, scale, sums = (cupy.empty(s, t) for s, t in (((m, k), np.int8), (shape, np.float32), (shape, np.int32)))
        offset = None if symmetric else cupy.empty(shape, np.float32)
        if m:
            size = x.dtype.itemsize
            if row_step(x) is None:
                x = cupy.ascontiguousarray(x)
            wide = k % 8 == 0 and block % 8 == 0 and (x.data.ptr | x.strides[0]) % (8 * size) == 0
            problem = int8.RowQuantization(
                m, k, block, x.dtype.name, symmetric, rounding == "half_even", wide, x.strides[0] // size
            )
            buffers = {"x": x, "codes": codes, "scale": scale, "offset": offset, "sums": sums}
            _launch(problem.plan(device.current()), buffers, index)
        return codes, scale, offset, sums


def gemm(
    xq: Array,
    x_scale: Array,
    x_offset: Array | None,
    x_sums: Array,
    weight: PackedConvWeight,
    facts: Quantized,
    bias: Array | None,
    form: check.Activation,
    out: Array | None,
) -> Array:
    """As `cupy_awq.int8.gemm_int8`."""
    import cupy

    with placement.on(weight.device):
        y = cupy.empty((facts.m, facts.n), facts.dtype) if out is None or row_step(out) is None else out
        if facts.m:
            xq, x_scale, x_offset, x_sums = (
                a if a is None else cupy.ascontiguousarray(a) for a in (xq, x_scale, x_offset, x_sums)
            )
            size = y.dtype.itemsize
            problem = int8.IntegerProduct(
                *facts[:4],
                weight.bits,
                x_offset is not None,
                weight.offset is not None,
                facts.dtype.name,
                None if bias is None else bias.dtype.name,
                form.kind,
                form.limits,
                aligned=xq.data.ptr % 16 == 0,
                even=(y.data.ptr | y.strides[0]) % (2 * size) == 0,
                stride=y.strides[0] // size,
            )
            buffers = {
                "xq": xq,
                "x_scale": x_scale,
                "x_offset": x_offset,
                "x_sums": x_sums,
                "codes": forms.product_codes(weight),
                "parameters": forms.product_parameters(weight, facts.block),
                "bias": bias,
                "y": y,
            }
            here = device.current()
            _launch(int8.choose(problem, here).plan(problem, here), buffers, weight.device)
        if out is not None and y is not out:
            out[...] = y
    return y if out is None else out


def _launch(plan: LaunchPlan, buffers: dict[str, Any], index: int) -> None:
    """Launch on the current stream; counters and partial sums are those of the stream."""
    import cupy

    stream = cupy.cuda.get_current_stream().ptr
    ready = launcher(plan, index)
    memory = {"counters": 0, "partials": COUNTER_BYTES}
    begin = workspace(index, stream) if plan.grid[2] > 1 else 0
    pointers = (
        (begin and begin + memory[name]) if name in memory else address(buffers[name]) for name in ready.buffers
    )
    ready(tuple(pointers), stream)


def _refuse(*arguments: Any) -> Any:
    raise TypeError("x must be a NumPy array: there are no kernels for GPUs yet")


conv2d = conv2d_int8 = _refuse
