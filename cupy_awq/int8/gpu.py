# SPDX-License-Identifier: Apache-2.0
"""The operations on arrays of a GPU: plan and launch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from cupy_awq import check
from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.int8 import forms
from cupy_awq.int8.arguments import Geometry, Quantized
from cupy_awq.kernels import conv2d as conv2d_kernels
from cupy_awq.kernels import conv2d_sm90, conv2d_sm90_large, int8
from cupy_awq.runtime import device, placement
from cupy_awq.runtime.arrays import address, row_stride, views
from cupy_awq.runtime.launch import get_launcher
from cupy_awq.runtime.launch_plan import LaunchPlan
from cupy_awq.runtime.workspace import COUNTER_BYTES, workspace_address

ConvolutionConfig = (
    conv2d_sm90_large.LargeConfig | conv2d_sm90.Config | conv2d_kernels.MmaConfig | conv2d_kernels.SimtConfig
)

__all__ = ["chosen_convolution", "conv2d", "conv2d_int8", "empty", "gemm", "quantize", "views"]


def empty(shape: tuple[int, ...], dtype: Any, index: int) -> Array:
    """A new array on GPU ``index``, or of NumPy."""
    if index == check.HOST:
        return np.empty(shape, dtype)
    import cupy

    with placement.use_device(index):
        return cupy.empty(shape, dtype)


def quantize(x: Array, block: int, symmetric: bool, rounding: str) -> tuple[Array, Array, Array | None, Array]:
    """As `cupy_awq.int8.quantize_activations`."""
    import cupy

    index = check.device_id(x, "x")
    with placement.use_device(index):
        m, k = x.shape
        shape = m, -(-k // block)
        codes, scale, sums = (cupy.empty(s, t) for s, t in (((m, k), np.int8), (shape, np.float32), (shape, np.int32)))
        offset = None if symmetric else cupy.empty(shape, np.float32)
        if m:
            size = x.dtype.itemsize
            if row_stride(x) is None:
                x = cupy.ascontiguousarray(x)
            wide = k % 8 == 0 and block % 8 == 0 and (x.data.ptr | x.strides[0]) % (8 * size) == 0
            problem = int8.RowQuantization(
                m, k, block, x.dtype.name, symmetric, rounding == "half_even", wide, row_stride(x) or 0
            )
            buffers = {"x": x, "codes": codes, "scale": scale, "offset": offset, "sums": sums}
            _launch(problem.plan(device.current()), buffers, index)
        return codes, scale, offset, sums


def gemm(
    xq: Array,
    x_scale: Array,
    x_offset: Array | None,
    x_sums: Array,
    weight: BlockQuantizedWeight,
    facts: Quantized,
    bias: Array | None,
    form: check.Activation,
    out: Array | None,
    fp8: bool = False,
) -> Array:
    """As `cupy_awq.int8.gemm_int8`; or xq is e4m3, with x_scale [M], no x_offset, and float32 x_sums."""
    import cupy

    with placement.use_device(weight.device):
        y = cupy.empty((facts.m, facts.n), facts.dtype) if out is None or row_stride(out) is None else out
        if facts.m:
            xq, x_scale, x_offset, x_sums = (
                a if a is None else cupy.ascontiguousarray(a) for a in (xq, x_scale, x_offset, x_sums)
            )
            size = y.dtype.itemsize
            problem = int8.IntegerProduct(
                *facts[:4],
                weight.bits,
                x_offset is not None,
                weight.offset is not None or fp8,
                facts.dtype.name,
                None if bias is None else bias.dtype.name,
                form.kind,
                form.limits,
                aligned=xq.data.ptr % 16 == 0,
                even=(y.data.ptr | y.strides[0]) % (2 * size) == 0,
                wide=(y.data.ptr | y.strides[0]) % 16 == 0,
                stride=row_stride(y) or 0,
                fp8=fp8,
            )
            buffers = {"xq": xq, "x_scale": x_scale, "x_offset": x_offset, "x_sums": x_sums, "bias": bias, "y": y}
            row_scales = False
            with _lasting(weight):
                config, plan = _chosen_product(problem, device.current())
                if isinstance(config, int8.HopperConfig):
                    if weight.offset is None or forms.whole_zeros(weight) is not None:
                        row_scales = facts.row_scales and x_offset is None
                        simpler = replace(problem, weight_offset=False, row_scales=row_scales)
                        plan = _planned(config, simpler, device.current())
                    buffers["codes"] = forms.byte_codes(weight, fp8)
                    buffers["parameters"] = forms.tile_parameters(weight, facts.block, problem.x_offset)
                else:
                    buffers["codes"] = forms.product_codes(weight, fp8)
                    buffers["parameters"] = forms.product_parameters(weight, facts.block, fp8)
            if facts.row_scales and not row_scales:
                parts = forms.in_blocks(xq, x_scale, x_offset, facts.block)
                buffers |= zip(("x_scale", "x_offset", "x_sums"), parts, strict=True)
            _launch(plan, buffers, weight.device)
        return _into(out, y)


def check_fp8(weight: BlockQuantizedWeight) -> None:
    """A ValueError that says why its GPU cannot multiply e4m3 by a weight, if it cannot."""
    if weight.device != check.HOST:
        reason = int8.refuse_fp8(weight.block_size, weight.shape[3], device.of(weight.device))
        if reason:
            raise ValueError(f"activations in float8: {reason}")


def linear_fp8(
    x: Array,
    weight: BlockQuantizedWeight,
    facts: Quantized,
    bias: Array | None,
    form: check.Activation,
    out: Array | None,
) -> Array:
    """As `cupy_awq.int8.linear_fp8`."""
    import cupy

    check_fp8(weight)
    with placement.use_device(weight.device):
        m, k = facts.m, facts.k
        unit = int8.fp8_unit(facts.block, k)
        sums = cupy.empty((m, -(-k // unit)), np.float32)
        codes, scale = cupy.empty((m, k), np.uint8), cupy.empty(m, np.float32)
        if m:
            step = row_stride(x)
            if step is None or (x.data.ptr | step * x.dtype.itemsize) % 16:
                x, step = cupy.array(x, order="C"), k
            problem = int8.Fp8Quantization(m, k, unit, x.dtype.name, step)
            buffers = {"x": x, "codes": codes, "scale": scale, "sums": sums}
            _launch(problem.plan(device.current()), buffers, weight.device)
        return gemm(codes, scale, None, sums, weight, facts._replace(block=unit), bias, form, out, fp8=True)


@functools.lru_cache(maxsize=4096)
def _chosen_product(problem: int8.IntegerProduct, here: device.Device) -> tuple[int8.Config, LaunchPlan]:
    """The configuration for a problem and its launch."""
    config = int8.choose(problem, here)
    return config, config.plan(problem, here)


@functools.lru_cache(maxsize=4096)
def _planned(config: int8.Config, problem: int8.IntegerProduct, here: device.Device) -> LaunchPlan:
    return config.plan(problem, here)


def conv2d(
    x: Array,
    weight: BlockQuantizedWeight,
    sizes: Geometry,
    bias: Array | None,
    form: check.Activation,
    out: Array | None,
) -> Array:
    """As `cupy_awq.int8.conv2d`."""
    with placement.use_device(weight.device):
        y = _result(sizes, x.dtype, out)
        if y.size:
            here = device.current()
            plain = _convolution(x, weight, sizes, bias, form, y)
            problem = plain.simplest()
            if conv2d_kernels.refuse(problem, here):
                # What tensor cores cannot read as it is, they may read in another order.
                channels = -(-sizes.channels // conv2d_kernels.UNIT) * conv2d_kernels.UNIT
                strides = sizes.height * sizes.width * channels, sizes.width * channels, channels, 1
                copied = replace(plain, strides=strides, aligned=True).simplest()
                if not conv2d_kernels.refuse(copied, here):
                    x, problem = _pixels(x, sizes, channels), copied
            config, plan = chosen_convolution(problem, here)
            buffers = {"x": x, "bias": bias, "y": y}
            with _lasting(weight):
                if isinstance(config, conv2d_sm90_large.LargeConfig):
                    buffers["weight"] = forms.dense(weight, x.dtype)
                elif isinstance(config, conv2d_sm90.Config):
                    buffers["codes"] = forms.hopper_codes(weight)
                    buffers["parameters"] = forms.hopper_parameters(weight, x.dtype)
                elif isinstance(config, conv2d_kernels.MmaConfig):
                    buffers["codes"] = forms.unit_words(weight)
                    buffers["scales"], buffers["offsets"] = forms.rounded(weight, x.dtype)
                else:
                    buffers["codes"], buffers["parameters"] = forms.simt_codes(weight), forms.simt_parameters(weight)
            _launch(plan, buffers, weight.device)
        return _into(out, y)


@functools.lru_cache(maxsize=4096)
def chosen_convolution(
    problem: conv2d_kernels.Convolution, here: device.Device
) -> tuple[ConvolutionConfig, LaunchPlan]:
    """The configuration for a problem and its launch."""
    families = [family for family in (conv2d_sm90, conv2d_sm90_large) if family.refuse(problem, here) is None]
    found = [config for family in families for config in family.configs(problem, here)]
    config: ConvolutionConfig
    if found:
        config = min(found, key=lambda config: config.estimate_us(problem, here))
    else:
        config = conv2d_kernels.choose(problem, here)
    return config, config.plan(problem, here)


def conv2d_int8(
    x: Array,
    codes: Array,
    sizes: Geometry,
    fused: Array,
    multiplier: Array,
    x_zero: int,
    limits: tuple[int, int],
    out: Array | None,
) -> Array:
    """As `cupy_awq.int8.conv2d_int8`; ``fused`` and ``multiplier`` come from the host."""
    import cupy

    index = check.device_id(x, "x")
    with placement.use_device(index):
        y = _result(sizes, x.dtype, out)
        if y.size:
            plan = conv2d_kernels.int8_plan(
                _sizes(sizes), _strides(x, sizes.nhwc), sizes.nhwc, x_zero, limits, device.current()
            )
            codes, fused, multiplier = cupy.ascontiguousarray(codes), cupy.asarray(fused), cupy.asarray(multiplier)
            buffers = {"x": x, "codes": codes, "fused": fused, "multiplier": multiplier, "y": y}
            _launch(plan, buffers, index)
        return _into(out, y)


def _convolution(
    x: Array, weight: BlockQuantizedWeight, sizes: Geometry, bias: Array | None, form: check.Activation, y: Array
) -> conv2d_kernels.Convolution:
    return conv2d_kernels.Convolution(
        _sizes(sizes),
        weight.block_size,
        weight.bits,
        weight.offset is not None,
        x.dtype.name,
        _strides(x, sizes.nhwc),
        sizes.nhwc,
        None if bias is None else bias.dtype.name,
        form.kind,
        form.limits,
        aligned=x.data.ptr % 16 == 0,
        y_aligned=y.data.ptr % 16 == 0,
    )


def _sizes(sizes: Geometry) -> conv2d_kernels.Sizes:
    (top, _), (left, _) = sizes.padding
    return conv2d_kernels.Sizes(
        sizes.batch,
        sizes.height,
        sizes.width,
        sizes.channels // sizes.groups,
        sizes.outputs // sizes.groups,
        sizes.groups,
        *sizes.kernel,
        *sizes.out,
        *sizes.stride,
        top,
        left,
        *sizes.dilation,
    )


def _strides(x: Array, nhwc: bool) -> tuple[int, int, int, int]:
    """Of batch, row, pixel and channel, in values."""
    batch, *others = (int(stride) // x.dtype.itemsize for stride in x.strides)
    if len(x) == 1:
        batch = others[0] * x.shape[1]  # an axis of one may have any
    return (batch, *others) if nhwc else (batch, *others[1:], others[0])


def _pixels(x: Array, sizes: Geometry, channels: int) -> Array:
    """x as contiguous NHWC, with channels of 0 up to ``channels``."""
    import cupy

    pixels = x if sizes.nhwc else x.transpose(0, 2, 3, 1)
    if sizes.channels == channels:
        return cupy.array(pixels, order="C")
    padded = cupy.zeros((*pixels.shape[:3], channels), x.dtype)
    padded[..., : sizes.channels] = pixels
    return padded


def _result(sizes: Geometry, dtype: Any, out: Array | None) -> Array:
    """Contiguous memory for y: ``out`` if it is."""
    import cupy

    return cupy.empty(sizes.shape, dtype) if out is None or not out.flags.c_contiguous else out


def _into(out: Array | None, y: Array) -> Array:
    if out is None:
        return y
    if out is not y:
        out[...] = y
    return out


@contextmanager
def _lasting(weight: BlockQuantizedWeight) -> Iterator[None]:
    """Around the making of forms: other streams may use them next, so a new one is complete on leaving."""
    import cupy

    known = set(weight.prepared)
    try:
        yield
        if len(weight.prepared) > len(known):
            cupy.cuda.get_current_stream().synchronize()
    except BaseException:
        # In a capture, which cannot wait, a form has not been made.
        for name in set(weight.prepared) - known:
            del weight.prepared[name]
        raise


def _launch(plan: LaunchPlan, buffers: dict[str, Any], index: int) -> None:
    """Launch on the current stream; counters and partial sums are those of the stream."""
    import cupy

    stream = cupy.cuda.get_current_stream().ptr
    ready = get_launcher(plan, index)
    memory = {"counters": 0, "partials": COUNTER_BYTES}
    begin = workspace_address(index, stream) if plan.grid[2] > 1 and "partials" in ready.buffers else 0
    pointers = (
        (begin and begin + memory[name]) if name in memory else address(buffers[name]) for name in ready.buffers
    )
    ready(tuple(pointers), stream)
