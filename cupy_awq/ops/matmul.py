# SPDX-License-Identifier: Apache-2.0
"""``gemm`` and ``gemv``: x @ W for a weight in AWQ's own layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupy_awq import check, device, reference, select
from cupy_awq.check import Array
from cupy_awq.kernels.problem import Problem, Strides
from cupy_awq.ops import gpu


def gemm(
    x: Array,
    qweight: Array,
    scales: Array,
    qzeros: Array | None,
    /,
    *,
    bias: Array | None = None,
    out: Array | None = None,
    dtype: Any = None,
    kernel: str | None = None,
    split_k: int | None = None,
) -> Array:
    """y = x @ W + bias, where W[k, n] = (q[k, n] - z[g, n]) * s[g, n] with g = k // group_size.

    Codes minus zero points are exact, sums are float32, and y is rounded once; the same bits at every run. float32 x is
    multiplied in float32.

    Args:
        x: [..., K] float16, bfloat16 or float32, any strides; or bfloat16 as uint16 bits, with ``dtype="bfloat16"``.
            Rows that are not contiguous, or do not start at multiples of 16 bytes, are copied first.
        qweight: [K, N/8] int32, codes in AWQ order (see `PackedWeight`).
        scales: [K/G, N] float16 or bfloat16.
        qzeros: [K/G, N/8] int32 zero points; None where all are 8; or [K/G, N] offsets o of the scales' dtype, for
            W = q*s + o.
        bias: [N] float16, bfloat16 or float32.
        out: [..., N] array of x's dtype to fill and return.
        dtype: the element type of x, where its bits alone do not tell.
        kernel: the name of a kernel to use whatever the selection says (see `explain`).
        split_k: the number of blocks, a power of two, that share each sum over K; by default the selection's.

    All arrays are NumPy's, or all lie on one GPU (CuPy's, or any with ``__cuda_array_interface__`` or ``__dlpack__``).

    Returns:
        [..., N] of x's dtype, on the GPU as a CuPy array.

    Raises:
        TypeError, ValueError: an array, a shape or a dtype that does not fit, or a kernel that is unknown or cannot
            take the problem; the message names it. Nothing is launched or allocated then.

    >>> import numpy as np
    >>> import cupy_awq
    >>> weight = cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16)
    >>> cupy_awq.gemm(np.ones((2, 32), np.float16), weight.qweight, weight.scales, weight.qzeros)[:, 0]
    array([1., 1.], dtype=float16)
    """
    x, qweight, scales, qzeros, bias, out = map(gpu.as_cupy, (x, qweight, scales, qzeros, bias, out))
    facts = check.weight(qweight, scales, qzeros)
    element = check.activations(x, facts.k, dtype, facts.device)
    if bias is not None:
        check.bias(bias, facts.n, element, facts.device)
    shape = (*x.shape[:-1], facts.n)
    if out is not None:
        check.out(out, shape, x.dtype, facts.device)
    _check_choice(kernel, split_k)
    if facts.device == check.HOST:
        return reference.matmul(x, qweight, scales, qzeros, bias=bias, out=out, dtype=dtype)
    with gpu.on_device(facts.device):
        return _launch(x, qweight, scales, qzeros, facts, element, bias, out, shape, kernel, split_k)


def gemv(
    x: Array,
    qweight: Array,
    scales: Array,
    qzeros: Array | None,
    /,
    *,
    bias: Array | None = None,
    out: Array | None = None,
    dtype: Any = None,
    kernel: str | None = None,
) -> Array:
    """y = x @ W + bias for one vector x [K]; everything else as in `gemm`.

    Returns:
        [N] of x's dtype.

    >>> import numpy as np
    >>> import cupy_awq
    >>> weight = cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16)
    >>> cupy_awq.gemv(np.ones(32, np.float16), weight.qweight, weight.scales, weight.qzeros)[:2]
    array([1., 1.], dtype=float16)
    """
    ndim = getattr(x, "ndim", None)
    if ndim is not None and ndim != 1:
        raise ValueError(f"x must be one vector [K], got shape {x.shape}")
    return gemm(x, qweight, scales, qzeros, bias=bias, out=out, dtype=dtype, kernel=kernel)


def explain(m: int, n: int, k: int, group_size: int, dtype: Any = "float16", /, *, arch: int | None = None) -> str:
    """A line for each kernel: its best configuration for x [m, k] @ W [k, n] and the expected time, or why it is not
    legal; ``->`` marks the choice.

    Args:
        m, n, k: rows of x, out features, in features.
        group_size: rows of W that share a scale; -1 is K.
        dtype: of x: float16, bfloat16 or float32.
        arch: a compute capability such as 80, whose typical GPU is meant; by default the current GPU, or 90 with none.

    Raises:
        TypeError, ValueError: a size, a dtype or an arch that does not exist.

    >>> print(explain(1, 4096, 4096, 128, arch=80).splitlines()[0])
    x[1, 4096] float16 @ W[4096, 4096] group size 128 on A100 SXM 80GB (sm_80)
    """
    for name, size in (("m", m), ("n", n), ("k", k)):
        if not isinstance(size, int | np.integer) or isinstance(size, bool):
            raise TypeError(f"{name} must be an integer, got {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be positive, got {size}")
    if n % 8:
        raise ValueError(f"n must be a multiple of 8, got {n}")
    problem = Problem(m, n, k, check.group_size(k, group_size), check.float_dtype(dtype).name)
    facts = device.nominal(arch) if arch is not None else device.current_or_nominal()
    return select.explain(problem, facts)


def _check_choice(kernel: str | None, split_k: int | None) -> None:
    if kernel is not None and kernel not in select.FAMILIES:
        raise ValueError(f"kernel must be one of {', '.join(select.FAMILIES)}, got {kernel!r}")
    if split_k is not None and (not isinstance(split_k, int) or split_k < 1 or split_k & (split_k - 1)):
        raise ValueError(f"split_k must be a power of two, got {split_k!r}")


def _launch(
    x: Array,
    qweight: Array,
    scales: Array,
    qzeros: Array | None,
    facts: check.Weight,
    element: np.dtype[Any],
    bias: Array | None,
    out: Array | None,
    shape: tuple[int, ...],
    kernel: str | None,
    split_k: int | None,
) -> Array:
    import cupy

    m = math.prod(shape[:-1])
    if out is None:
        out = cupy.empty(shape, x.dtype)
    if m == 0:
        return out
    x_rows = _aligned_rows(x.reshape(m, facts.k))
    y = out.reshape(m, facts.n) if out.flags.c_contiguous else _rows_of(out, m)
    offsets = qzeros if facts.zeros == "float" else None
    problem = Problem(
        m=m,
        n=facts.n,
        k=facts.k,
        group_size=facts.group_size,
        dtype=element.name,
        scales_dtype=facts.dtype.name,
        zeros=facts.zeros,
        bias_dtype=None if bias is None else check.bias(bias, facts.n, element).name,
        aligned=gpu.aligned(qweight, scales, offsets, y),
        x_aligned=gpu.aligned(x_rows),
        strides=Strides(*(gpu.row_stride(a) for a in (x_rows, qweight, scales, qzeros, None, y))),
    )
    choice = select.choose(problem, device.current(), kernel, split_k)
    launcher = gpu.launcher(choice.plan, facts.device)
    stream = cupy.cuda.get_current_stream().ptr
    scratch = gpu.workspace(facts.device, stream) if choice.config.splits > 1 else (0, 0)
    pointers = tuple(gpu.address(a) for a in (x_rows, qweight, scales, qzeros, bias, None, y))
    launcher((*pointers, *scratch), stream)
    if y.data.ptr != out.data.ptr:
        out[...] = y.reshape(shape)
    return out


def _aligned_rows(x: Array) -> Array:
    """x [M, K] with contiguous rows, at multiples of 16 bytes where its K allows."""
    import cupy

    itemsize = x.dtype.itemsize
    if x.strides[1] == itemsize and (gpu.aligned(x) or x.shape[1] * itemsize % gpu.ALIGNMENT):
        return x
    return cupy.array(x, order="C")


def _rows_of(out: Array, m: int) -> Array:
    """out [..., N] as a matrix if its rows are contiguous and evenly spaced, else a buffer of that shape."""
    import cupy

    rows = out.reshape(m, out.shape[-1])  # a copy where strides do not allow a view
    if rows.data.ptr == out.data.ptr and rows.strides[1] == out.dtype.itemsize:
        return rows
    return cupy.empty((m, out.shape[-1]), out.dtype)
