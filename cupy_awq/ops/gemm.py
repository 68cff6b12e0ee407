# SPDX-License-Identifier: Apache-2.0
"""``gemm`` and ``gemv``: x @ W for a weight in AWQ's own layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_awq import check
from cupy_awq.check import Array
from cupy_awq.kernels import select
from cupy_awq.kernels.problem import Problem
from cupy_awq.kernels.repack import RepackedLayout
from cupy_awq.ops.plan import Prepared, fixed_addresses, multiply, remember
from cupy_awq.runtime import arrays, device
from cupy_awq.weight import PackedWeight

MAX_PREPARED = 4096
"""Layouts of arguments whose launches are kept ready."""

_prepared: dict[Any, Prepared] = {}


def gemm(
    x: Array,
    qweight: Array,
    scales: Array,
    qzeros: Array | None,
    /,
    *,
    bias: Array | None = None,
    activation: Any = None,
    residual: Array | None = None,
    out: Array | None = None,
    dtype: Any = None,
    kernel: str | None = None,
    split_k: int | None = None,
) -> Array:
    """y = activation(x @ W + bias) + residual, where W[k, n] = (q[k, n] - z[g, n]) * s[g, n] with g = k // group_size.

    Codes and zero points are exact, sums and the epilogue are float32, and y is rounded once; the same bits at every
    run. float16 and bfloat16 x may go through tensor cores, which multiply them exactly; float32 x never does: its
    products are float32, on CUDA cores. An Inf or NaN in x reaches all of its own row of y and no other; what is Inf by
    the formula may come as NaN, since some kernels sum x * q and x * z, or q * s and o, apart.

    Args:
        x: [..., K] float16, bfloat16 or float32, any strides; or bfloat16 as uint16 bits, with ``dtype="bfloat16"``.
            Rows that are not contiguous, or do not start at multiples of 16 bytes, are copied first.
        qweight: [K, N/8] int32, codes in AWQ order (see `PackedWeight`).
        scales: [K/G, N] float16 or bfloat16.
        qzeros: [K/G, N/8] int32 zero points; None where all are 8; or [K/G, N] offsets o of the scales' dtype, for
            W = q*s + o.
        bias: [N] float16, bfloat16 or float32.
        activation: None; "relu"; "relu6"; (low, high), limits to clamp to; "silu"; "gelu" (its tanh form); or "swiglu",
            silu(gate) * up where the first half of W's columns makes the gate and the second half up, so that y has N/2
            columns. `cupy_awq.reference.matmul` has the formulas.
        residual: like y, any strides; it may be ``out``.
        out: array like y to fill and return.
        dtype: the element type of x, where its bits alone do not tell.
        kernel: the name of a kernel to use whatever the selection says (see `explain`).
        split_k: the number of blocks, a power of two, that share each sum over K; by default the selection's.

    All arrays are NumPy's, or all lie on one GPU: CuPy's, or any with ``__cuda_array_interface__`` or ``__dlpack__``,
    which are not copied. Work on a GPU is queued on CuPy's current stream of that GPU. Calls on one stream share memory
    for partial sums: replay a graph that was captured from them on that stream, or where nothing else runs on it; or
    capture a `plan`, which has its own.

    Returns:
        [..., N] of x's dtype, on the GPU as a CuPy array.

    Raises:
        TypeError, ValueError: an array, a shape or a dtype that does not fit, or a kernel that is unknown or cannot
            take the problem; the message names it. Nothing is launched or allocated then.

    >>> import numpy as np
    >>> import cupy_awq
    >>> weight = cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16)
    >>> x = np.array([[3] * 32, [-3] * 32], np.float16)
    >>> cupy_awq.gemm(x, weight.qweight, weight.scales, weight.qzeros)[:, 0]
    array([ 3., -3.], dtype=float16)
    >>> cupy_awq.gemm(x, weight.qweight, weight.scales, weight.qzeros, activation=(-1, 2))[:, 0]
    array([ 2., -1.], dtype=float16)
    """
    # The layouts hold all that checks and the choice of a kernel depend on: what was met needs neither.
    operands = x, qweight, scales, qzeros, bias, residual, out
    key: Any
    try:
        key = *map(arrays.layout_key, operands), activation, dtype, kernel, split_k
        prepared = _prepared.get(key)
    except (AttributeError, ValueError, TypeError):  # arrays of other libraries, or options that are none
        key = prepared = None
    if prepared is not None:
        fixed = fixed_addresses(qweight, scales, qzeros, None, bias)
        y = prepared.run(x, residual, out, fixed)
        if y is not None:
            return y
    weight = PackedWeight(*arrays.views(qweight=qweight, scales=scales, qzeros=qzeros))
    y, prepared = multiply(
        x,
        weight,
        bias=bias,
        activation=activation,
        residual=residual,
        out=out,
        dtype=dtype,
        kernel=kernel,
        split_k=split_k,
    )
    if prepared is not None and key is not None:
        remember(_prepared, key, prepared, MAX_PREPARED)
    return y


def gemv(
    x: Array,
    qweight: Array,
    scales: Array,
    qzeros: Array | None,
    /,
    *,
    bias: Array | None = None,
    activation: Any = None,
    residual: Array | None = None,
    out: Array | None = None,
    dtype: Any = None,
    kernel: str | None = None,
) -> Array:
    """y = activation(x @ W + bias) + residual for one vector x [K]; everything else as in `gemm`.

    Returns:
        [N] of x's dtype.

    >>> import numpy as np
    >>> import cupy_awq
    >>> weight = cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16)
    >>> cupy_awq.gemv(np.ones(32, np.float16), weight.qweight, weight.scales, weight.qzeros)[:2]
    array([1., 1.], dtype=float16)
    """
    (x,) = arrays.views(x=x)
    if check.device_id(x, "x") is not None and x.ndim != 1:
        raise ValueError(f"x must be one vector [K], got shape {x.shape}")
    return gemm(
        x,
        qweight,
        scales,
        qzeros,
        bias=bias,
        activation=activation,
        residual=residual,
        out=out,
        dtype=dtype,
        kernel=kernel,
    )


def explain(
    m: int, n: int, k: int, group_size: int, dtype: Any = "float16", /, *, arch: int | None = None, layer: bool = False
) -> str:
    """A line for each kernel: its best configuration for x [m, k] @ W [k, n] and the expected time, or why it is not
    legal; ``->`` marks the choice.

    Args:
        m, n, k: rows of x, out features, in features.
        group_size: rows of W that share a scale; -1 is K.
        dtype: of x: float16, bfloat16 or float32.
        arch: a compute capability such as 80, whose typical GPU is meant; by default the current GPU, or 90 with none.
        layer: True for the kernels of an `AwqLinear`, which on Hopper repacks its weight where K and the group size
            allow; by default those of `gemm`, on AWQ's own arrays.

    Raises:
        TypeError, ValueError: a size, a dtype or an arch that does not exist.

    >>> print(explain(1, 4096, 4096, 128, arch=80).splitlines()[0])
    x[1, 4096] float16 @ W[4096, 4096] group size 128 on A100 SXM 80GB (sm_80)
    >>> lines = explain(16, 4096, 4096, 128, arch=90, layer=True).splitlines()
    >>> [line.split()[1] for line in lines if line.startswith("->")]
    ['gemm_sm90']
    """
    for name, size in (("m", m), ("n", n), ("k", k)):
        if not isinstance(size, int | np.integer) or isinstance(size, bool):
            raise TypeError(f"{name} must be an integer, got {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be positive, got {size}")
    if n % 8:
        raise ValueError(f"n must be a multiple of 8, got {n}")
    size, element = check.group_size(k, group_size), check.float_dtype(dtype)
    facts = device.nominal(arch) if arch is not None else device.current_or_nominal()
    repacked = layer and facts.arch == 90 and RepackedLayout(k, n, size).refuse() is None
    return select.explain(Problem(m, n, k, size, element.name, repacked=repacked), facts)
