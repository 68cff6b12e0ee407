# SPDX-License-Identifier: Apache-2.0
"""`conv2d_int8`: int8 convolution with int8 output and one zero point per tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq import block_check, block_reference, check, check_scalar, overlap
from cupy_awq.activation import Activation
from cupy_awq.array_types import Clamp
from cupy_awq.block_reference import SMALLEST_WEIGHT_SCALE
from cupy_awq.check import HOST, Array
from cupy_awq.kernels.conv2d.conv2d_int8 import Int8Convolution
from cupy_awq.kernels.epilogue import EPILOGUE_ACTIVATIONS
from cupy_awq.ops.chosen_kernel import choose_kernel
from cupy_awq.ops.conv2d import kernel_sizes, x_strides
from cupy_awq.runtime import placement
from cupy_awq.runtime.arrays import deliver, views

LIMITS = np.finfo(np.float32)
"""The properties of float32, such as its largest and its smallest normal number."""
MULTIPLIER = "x_scale * weight_scale / out_scale"
"""The formula of the multiplier M, for error messages."""


def conv2d_int8(
    x: Array,
    codes: Array,
    weight_scale: Array,
    /,
    *,
    x_scale: float,
    out_scale: float,
    x_zero: int = 0,
    out_zero: int = 0,
    bias: Array | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    activation: Clamp = None,
    layout: str = "NCHW",
    out: Array | None = None,
) -> Array:
    """Compute a convolution of int8 x with int8 codes and requantize the result to int8 in the same kernel.

        M = x_scale * weight_scale / out_scale
        fused = trunc(bias / (x_scale * weight_scale)) - x_zero * sum(codes) + trunc(out_zero / M)
        y = clamp(rint_even((sum of x * codes + fused) * M), low, high), where the sum is int32, the rest float32

    Args:
        x: int8 in ``layout``; the real value of an element is (x - x_zero) * x_scale.
        codes: [Co, Kh, Kw, Ci/groups] int8; the real value of a weight is code * weight_scale.
        weight_scale: [Co] float32; magnitudes below 1e-6 are replaced by 1e-6.
        x_scale, out_scale: positive scales of x and y, such that M is a normal float32.
        x_zero, out_zero: zero points of x and y, from -128 to 127. x is padded with x_zero, whose real value is 0.
        bias: [Co] float32, in real values; ``fused`` and all sums must fit in int32.
        stride, padding, dilation, groups, layout: as in `conv2d`.
        activation: None, "relu", "relu6", or (low, high) to clamp, in real values.
        out: int8 array with the shape of y to fill and return.

    On a GPU, each call copies codes, weight_scale and bias to the host, and so synchronizes.

    Returns:
        y, int8 in ``layout``; the real value of an element is (y - out_zero) * out_scale.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value; the message names the argument.

    Source of the formula: MNN's ConvInt8, with the bias term of MNN's CPU backend. ``out_zero`` is also added to the
    bounds of the activation.

    >>> x, codes = np.full((1, 2, 1, 1), 10, np.int8), np.full((1, 1, 1, 2), 3, np.int8)
    >>> conv2d_int8(x, codes, np.ones(1, np.float32), x_scale=0.5, out_scale=2.0)
    array([[[[15]]]], dtype=int8)
    """
    x, codes, weight_scale, bias, out = views(x=x, codes=codes, weight_scale=weight_scale, bias=bias, out=out)
    where = check.device_id(x, "x")
    for name, a, dtype in (
        ("x", x, check.INT8),
        ("codes", codes, check.INT8),
        ("weight_scale", weight_scale, check.FLOAT32),
        ("bias", bias, check.FLOAT32),
    ):
        if a is None and name == "bias":
            continue
        check.validate_device(a, name, where, "x")
        if a.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, got {a.dtype}")
    if len(codes.shape) != 4 or 0 in codes.shape:
        raise ValueError(f"codes: expected a non-empty [Co, Kh, Kw, Ci/groups], got shape {codes.shape}")
    shape = block_check.validate_convolution(x.shape, codes.shape, stride, padding, dilation, groups, layout)
    for name, a in (("weight_scale", weight_scale), ("bias", bias)):
        if a is not None and a.shape != (shape.outputs,):
            raise ValueError(f"{name}: expected [Co] = [{shape.outputs}], got shape {a.shape}")
    scales = (
        check_scalar.validate_positive_scale(x_scale, "x_scale"),
        check_scalar.validate_positive_scale(out_scale, "out_scale"),
    )
    zeros = (
        check_scalar.validate_integer(x_zero, "x_zero", -128, 127),
        check_scalar.validate_integer(out_zero, "out_zero", -128, 127),
    )
    limits = _limits(block_check.validate_supported_activation(activation, EPILOGUE_ACTIVATIONS), scales[1], zeros[1])
    if out is not None:
        check.validate_out(out, shape.y_shape, check.INT8, where)
        overlap.validate_disjoint(out, codes=codes, weight_scale=weight_scale, bias=bias)
    host = [a if a is None or where == HOST else a.get() for a in (codes, weight_scale, bias)]
    fused, multiplier = _channel_parameters(host[0], host[1], host[2], *scales, *zeros)
    if where == HOST:
        target = np.empty(shape.y_shape, np.int8) if out is None else out
        return block_reference.conv2d_int8(x, codes, shape, fused, multiplier, zeros[0], limits, target)
    import cupy

    with placement.use_device(where):
        y = cupy.empty(shape.y_shape, np.int8) if out is None or not out.flags.c_contiguous else out
        if y.size:
            problem = Int8Convolution(kernel_sizes(shape), x_strides(x, shape.nhwc), shape.nhwc, zeros[0], limits)
            buffers = {"x": x, "codes": cupy.ascontiguousarray(codes), "y": y}
            buffers |= {"fused": cupy.asarray(fused), "multiplier": cupy.asarray(multiplier)}
            choose_kernel(problem, where).launch(buffers)
        return deliver(y, out)


def _channel_parameters(
    codes: Array, weight_scale: Array, bias: Array | None, x_scale: Any, out_scale: Any, x_zero: int, out_zero: int
) -> tuple[Array, Array]:
    """Return ``fused``, int32 [Co], and M, float32 [Co], which `conv2d_int8` defines.

    Raises:
        ValueError: a scale or a bias is not finite, M is not a normal float32, or a sum may exceed int32.
    """
    for name, a in (("weight_scale", weight_scale), ("bias", bias)):
        if a is not None and not np.isfinite(a).all():
            raise ValueError(f"{name}: expected finite values, got NaN or infinity")
    scale = np.where(np.abs(weight_scale) < SMALLEST_WEIGHT_SCALE, SMALLEST_WEIGHT_SCALE, weight_scale)
    with np.errstate(all="ignore"):
        products = x_scale * scale
        multiplier = products / out_scale
        for name, formula, found in (
            ("x_scale", "x_scale * weight_scale", products),
            ("out_scale", MULTIPLIER, multiplier),
        ):
            sizes = np.abs(found)
            bad = ~((sizes >= LIMITS.tiny) & (sizes <= LIMITS.max))
            if bad.any():
                raise ValueError(
                    f"{name}: expected {formula} from {LIMITS.tiny:.4g} to {LIMITS.max:.4g}, got {sizes[bad][0]:.4g}"
                )
        biases = np.zeros(len(scale)) if bias is None else np.trunc(bias / products).astype(np.float64)
    zeros = np.trunc(out_zero / multiplier).astype(np.float64) - x_zero * codes.sum((1, 2, 3), dtype=np.float64)
    reach = 128 * np.abs(codes.astype(np.float64)).sum((1, 2, 3))
    for name, formula, found in (
        ("out_zero", f"out_zero / ({MULTIPLIER})", zeros),
        ("bias", "bias / (x_scale * weight_scale)", zeros + biases),
    ):
        largest = float((np.abs(found) + reach).max())
        if largest > check_scalar.INT32_MAX:
            raise ValueError(f"{name}: expected {formula} and all sums within int32, got sums up to {largest:.4g}")
    return (zeros + biases).astype(np.int32), multiplier


def _limits(activation: Activation, out_scale: Any, out_zero: int) -> tuple[int, int]:
    """Return the lower and upper bound that an activation gives y, as int8 codes."""
    if activation.kind is None:
        return -128, 127
    if activation.kind != "clamp":
        raise ValueError(f"activation: expected a clamp or None, got {activation.kind!r}")
    with np.errstate(over="ignore"):
        low, high = (float(np.clip(np.rint(limit / out_scale) + out_zero, -128, 127)) for limit in activation.limits)
    return int(low), int(high)
