# SPDX-License-Identifier: Apache-2.0
"""``gemm``, ``gemv`` and ``explain``: x @ W for a weight in the AWQ layout."""

from __future__ import annotations

from typing import Any

from cupy_awq import check, check_scalar
from cupy_awq.check import Array
from cupy_awq.kernels import select
from cupy_awq.kernels.problem import Problem
from cupy_awq.kernels.repack import RepackedLayout
from cupy_awq.ops.gemm_launch import GemmLaunch, cache_launch, constant_pointers, run_gemm
from cupy_awq.runtime import arrays, device
from cupy_awq.weight import PackedWeight

MAX_LAUNCHES = 4096
"""The number of launches that are kept, one for each combination of array layouts and options."""

_launches: dict[Any, GemmLaunch] = {}


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
    """Return y = activation(x @ W + bias) + residual for a weight in the AWQ layout.

    W[k, n] = (q[k, n] - z[g, n]) * s[g, n] with g = k // group_size. q - z is exact, accumulation and epilogue are
    float32, and y is rounded once. The result is bit-identical from run to run. Tensor cores multiply float16 and
    bfloat16 x exactly; float32 x is multiplied on CUDA cores. An Inf or NaN in x affects its own row of y, all of it,
    and no other; an element that is Inf by the formula may be NaN, since some kernels accumulate x * q and x * z, or
    q * s and o, separately.

    Args:
        x: [..., K] float16, bfloat16 or float32 with any strides; or uint16 that holds the bits of bfloat16, with
            ``dtype="bfloat16"``. Rows that are not contiguous, or not aligned to 16 bytes, are copied first.
        qweight: [K, N/8] int32, codes in AWQ order (see `PackedWeight`).
        scales: [K/G, N] float16 or bfloat16.
        qzeros: [K/G, N/8] int32 zero points; None if all are 8; or [K/G, N] offsets o of the scales' dtype, for
            W = q * s + o.
        bias: [N] float16, bfloat16 or float32.
        activation: None; "relu"; "relu6"; (low, high) to clamp; "silu"; "gelu" (tanh form); or "swiglu", which is
            silu(gate) * up for the gate x @ W[:, : N/2] and up x @ W[:, N/2 :], so that y has N/2 columns.
            `cupy_awq.reference.matmul` has the formulas.
        residual: an array like y with any strides; it may be ``out``.
        out: an array like y to fill and return.
        dtype: the element type of x if x is uint16.
        kernel: the name of the kernel to use, instead of the one that `explain` marks.
        split_k: the number of CTAs that share an accumulator over K, a power of two; by default that of the choice.

    All arrays are in host memory (NumPy, or any with ``__dlpack__``), or all on one GPU (CuPy, or any with
    ``__cuda_array_interface__`` or ``__dlpack__``); none is copied. Kernels are launched on CuPy's current stream of
    that GPU. Calls on one stream share a split-K workspace: replay a graph that captured them on the same stream, or at
    a time when nothing else runs on it; or capture a `plan`, which has a workspace of its own.

    Returns:
        [..., N] of x's dtype: a NumPy array, or a CuPy array on the GPU.

    Raises:
        TypeError, ValueError: an array, a shape or a dtype that does not fit, or a kernel that is unknown or cannot
            solve the problem. Nothing has been launched or allocated then.

    >>> import numpy as np
    >>> import cupy_awq
    >>> weight = cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16)
    >>> x = np.array([[3] * 32, [-3] * 32], np.float16)
    >>> cupy_awq.gemm(x, weight.qweight, weight.scales, weight.qzeros)[:, 0]
    array([ 3., -3.], dtype=float16)
    >>> cupy_awq.gemm(x, weight.qweight, weight.scales, weight.qzeros, activation=(-1, 2))[:, 0]
    array([ 2., -1.], dtype=float16)
    """
    # Checks and the choice of a kernel depend on the layouts alone, so layouts that were met before need neither.
    operands = x, qweight, scales, qzeros, bias, residual, out
    key: Any
    try:
        key = *map(arrays.layout_key, operands), activation, dtype, kernel, split_k
        launch = _launches.get(key)
    except (AttributeError, ValueError, TypeError):  # arrays of other libraries, or options that are not hashable
        key = launch = None
    if launch is not None:
        y = launch.run(x, residual, out, constant_pointers(qweight, scales, qzeros, None, bias))
        if y is not None:
            return y
    weight = PackedWeight(*arrays.views(qweight=qweight, scales=scales, qzeros=qzeros))
    y, launch = run_gemm(
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
    if launch is not None and key is not None:
        cache_launch(_launches, key, launch, MAX_LAUNCHES)
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
    """Return y = activation(x @ W + bias) + residual for one vector x [K]; all else is as in `gemm`.

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
        raise ValueError(f"x: expected one vector [K], got shape {x.shape}")
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
    m: int,
    k: int,
    n: int,
    group_size: int = 128,
    dtype: Any = "float16",
    *,
    arch: int | None = None,
    layer: bool = False,
) -> str:
    """Return a table of the kernels for x [M, K] @ W [K, N]: the best configuration and time of each, or its refusal.

    ``->`` marks the choice. A time is "measured" if `python -m cupy_awq tune` has recorded it on this GPU, else it is
    "modelled" by the kernel's cost model. The last line says what decided: a cost model or a table of tuned
    configurations, and which.

    Args:
        m, k, n: the sizes, in the order of x [M, K] @ W [K, N].
        group_size: rows of W that share a scale; -1 for K.
        dtype: float16, bfloat16 or float32, of x.
        arch: a compute capability such as 80, for a typical GPU of it; by default the current GPU, or an H100 if there
            is none.
        layer: True for the kernels of `AwqLinear`, which repacks its weight on Hopper; by default those of `gemm`,
            which reads the AWQ layout.

    Raises:
        TypeError: a size is not an integer, or the dtype is not one of these.
        ValueError: a size that the format cannot have, or an unknown arch.

    >>> print(explain(m=1, k=4096, n=12288, arch=80).splitlines()[0])
    x[1, 4096] float16 @ W[4096, 12288] group size 128 on A100 SXM 80GB (sm_80)
    >>> lines = explain(16, 4096, 12288, arch=90, layer=True).splitlines()
    >>> [line.split()[1] for line in lines if line.startswith("->")]
    ['gemm_sm90']
    """
    m, k, n = (check_scalar.integer(size, name, 1) for name, size in (("m", m), ("k", k), ("n", n)))
    layer = check_scalar.flag(layer, "layer")
    if n % 8:
        raise ValueError(f"n: expected a multiple of 8, got {n}")
    size, element = check_scalar.group_size(k, group_size), check.float_dtype(dtype)
    gpu = device.nominal(check_scalar.integer(arch, "arch", 0)) if arch is not None else device.current_or_nominal()
    repacked = layer and gpu.arch == 90 and RepackedLayout(k, n, size).refuse() is None
    return select.explain(Problem(m, n, k, size, element.name, repacked=repacked), gpu)
