# SPDX-License-Identifier: Apache-2.0
"""``gemm``, ``gemv`` and ``explain``: x @ W for a weight in the AWQ layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from cupy_awq import check, check_scalar
from cupy_awq.array_types import AnyActivation, ArrayT, CudaArray, GemmOptions, GemvOptions
from cupy_awq.check import Array
from cupy_awq.kernels import select
from cupy_awq.kernels.gemm import gather_columns
from cupy_awq.kernels.gemm.problem import AWQ, Problem
from cupy_awq.ops.prepared_gemm import PreparedGemm, keep, run_gemm
from cupy_awq.runtime import arrays
from cupy_awq.runtime import device as devices
from cupy_awq.weight import PackedWeight

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_PREPARED = 4096
"""The largest number of cached GEMMs; there is one per combination of array layouts and options."""

_prepared: dict[Any, PreparedGemm] = {}
"""The prepared GEMMs of `gemm`, by array layouts and options."""


@overload
def gemm(x: ArrayT, weight: PackedWeight, /, **kw: Unpack[GemmOptions]) -> ArrayT: ...
@overload
def gemm(x: ArrayT, qweight: Array, scales: Array, qzeros: Array | None, /, **kw: Unpack[GemmOptions]) -> ArrayT: ...
@overload
def gemm(x: CudaArray, weight: PackedWeight, /, **kw: Unpack[GemmOptions]) -> Array: ...
@overload
def gemm(x: CudaArray, qweight: Array, scales: Array, qzeros: Array | None, /, **kw: Unpack[GemmOptions]) -> Array: ...
def gemm(
    x: Array,
    /,
    *weight: Any,
    bias: Array | None = None,
    activation: AnyActivation = None,
    residual: Array | None = None,
    out: Array | None = None,
    dtype: Any = None,
    kernel: str | None = None,
    split_k: int | None = None,
    batch_invariant: bool = False,
) -> Array:
    """Return y = activation(x @ W + bias) + residual for a weight in the AWQ layout.

    The call is ``gemm(x, qweight, scales, qzeros)`` or ``gemm(x, weight)`` with a `PackedWeight`, which holds these
    arrays.

    W[k, n] = (q[k, n] - z[g, n]) * s[g, n] with g = k // group_size. q - z is exact, accumulation and epilogue are in
    float32, and y is rounded once. The result is bit-identical from run to run. float16 and bfloat16 x are multiplied
    on tensor cores, whose products are exact; float32 x is multiplied on CUDA cores. An infinity or NaN in a row of x
    affects the whole row of y and no other row. An element of y that should be infinite may be NaN, because some
    kernels accumulate x * q and x * z, or x * q * s and x * o, separately.

    Args:
        x: [..., K] float16, bfloat16 or float32 with any strides; or uint16 with the bits of bfloat16, if
            ``dtype="bfloat16"``. If rows are not contiguous, or not aligned to 16 bytes, x is copied first.
        qweight: [K, N/8] int32, codes in AWQ order (see `PackedWeight`).
        scales: [K/G, N] float16 or bfloat16.
        qzeros: [K/G, N/8] int32 zero points; None if all zero points are 8; or [K/G, N] offsets o with the dtype of the
            scales, for W = q * s + o.
        bias: [N] float16, bfloat16 or float32.
        activation: None; "relu"; "relu6"; (low, high) to clamp; "silu"; "gelu" (tanh form); or "swiglu":
            silu(gate) * up with gate = x @ W[:, : N/2] and up = x @ W[:, N/2 :], so that y has N/2 columns.
            `cupy_awq.reference.matmul` has the formulas.
        residual: array with the shape and dtype of y and any strides; it may be ``out``.
        out: array with the shape and dtype of y to fill and return; it must not overlap the weight or the bias.
        dtype: dtype of the elements of x if x is uint16.
        kernel: name of the kernel to use; by default the kernel that `explain` marks.
        split_k: split-K factor, a power of two; by default the factor of the chosen configuration.
        batch_invariant: True to give each row of y the same bits whatever the other rows of x and their number: the
            order of additions along K is the same for every M, and depends only on the weight, the dtype of x and the
            GPU. ``kernel`` and ``split_k`` must be None.

    Either all arrays are in host memory (NumPy), or all are on one GPU: CuPy arrays, or any arrays with
    ``__cuda_array_interface__`` or ``__dlpack__``, which are not copied. Kernels are launched on CuPy's current stream
    of that GPU. All calls on a stream share one split-K workspace, so a CUDA graph with captured calls must be replayed
    on the same stream, or while that stream is idle. A `plan` has its own workspace and does not have this restriction.

    Returns:
        [..., N] of x's dtype: a NumPy array, or a CuPy array on the GPU.

    Raises:
        TypeError, ValueError: an array has a wrong dtype, shape or device, or the kernel is unknown or cannot solve the
            problem. The error is raised before anything is launched or allocated.
        MemoryError: the memory of the GPU is exhausted.

    >>> import numpy as np
    >>> import cupy_awq
    >>> weight = cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16)
    >>> x = np.array([[3] * 32, [-3] * 32], np.float16)
    >>> cupy_awq.gemm(x, weight.qweight, weight.scales, weight.qzeros)[:, 0]
    array([ 3., -3.], dtype=float16)
    >>> cupy_awq.gemm(x, weight, activation=(-1, 2))[:, 0]
    array([ 2., -1.], dtype=float16)
    """
    # Validation and kernel choice depend only on the array layouts, so a cached launch for these layouts skips both.
    qweight, scales, qzeros = weight if len(weight) == 3 else _tensors(weight)
    operands = x, qweight, scales, qzeros, bias, residual, out
    key: Any
    try:
        key = *map(arrays.layout_key, operands), activation, dtype, kernel, split_k, batch_invariant
        prepared = _prepared.get(key)
    except (AttributeError, ValueError, TypeError):  # An operand is not a CuPy array, or an option is not hashable.
        key = prepared = None
    if prepared is not None:
        zeros, added = (0 if a is None else a.data.ptr for a in (qzeros, bias))
        y = prepared.run(x, residual, out, (qweight.data.ptr, scales.data.ptr, zeros, 0, added, 0))
        if y is not None:
            return y
    if isinstance(qweight, PackedWeight):
        raise TypeError("qweight: expected an array before scales and qzeros, got a PackedWeight, which includes them")
    y, prepared = run_gemm(
        x,
        weight[0] if len(weight) == 1 else PackedWeight(*arrays.views(qweight=qweight, scales=scales, qzeros=qzeros)),
        bias=bias,
        activation=activation,
        residual=residual,
        out=out,
        dtype=dtype,
        kernel=kernel,
        split_k=split_k,
        batch_invariant=batch_invariant,
    )
    if prepared is not None and key is not None:
        keep(_prepared, key, prepared, MAX_PREPARED)
    return y


def _tensors(weight: tuple[Any, ...]) -> tuple[Array, Array, Array | None]:
    """Return qweight, scales and qzeros of ``weight``, which must be one `PackedWeight`; else raise TypeError."""
    if len(weight) == 1 and isinstance(weight[0], PackedWeight):
        return weight[0].qweight, weight[0].scales, weight[0].qzeros
    got = ", ".join(type(a).__name__ for a in weight) or "nothing"
    raise TypeError(f"weight: expected a PackedWeight, or the arrays qweight, scales and qzeros, got {got}")


@overload
def gemv(x: ArrayT, weight: PackedWeight, /, **kw: Unpack[GemvOptions]) -> ArrayT: ...
@overload
def gemv(x: ArrayT, qweight: Array, scales: Array, qzeros: Array | None, /, **kw: Unpack[GemvOptions]) -> ArrayT: ...
@overload
def gemv(x: CudaArray, weight: PackedWeight, /, **kw: Unpack[GemvOptions]) -> Array: ...
@overload
def gemv(x: CudaArray, qweight: Array, scales: Array, qzeros: Array | None, /, **kw: Unpack[GemvOptions]) -> Array: ...
def gemv(
    x: Array,
    /,
    *weight: Any,
    bias: Array | None = None,
    activation: AnyActivation = None,
    residual: Array | None = None,
    out: Array | None = None,
    dtype: Any = None,
    kernel: str | None = None,
) -> Array:
    """Return y = activation(x @ W + bias) + residual for one vector x [K].

    The arguments are those of `gemm`, which also has ``split_k`` and ``batch_invariant``.

    Returns:
        [N] of x's dtype.

    >>> import numpy as np
    >>> import cupy_awq
    >>> weight = cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16)
    >>> cupy_awq.gemv(np.ones(32, np.float16), weight)[:2]
    array([1., 1.], dtype=float16)
    """
    (x,) = arrays.views(x=x)
    check.device_id(x, "x")  # raises TypeError if x is not an array
    if x.ndim != 1:
        raise ValueError(f"x: expected one vector [K], got shape {x.shape}")
    y: Array = gemm(
        x,
        *weight,
        bias=bias,
        activation=activation,
        residual=residual,
        out=out,
        dtype=dtype,
        kernel=kernel,
    )
    return y


def explain(
    m: int,
    k: int,
    n: int,
    group_size: int = 128,
    dtype: Any = "float16",
    *,
    arch: int | str | None = None,
    device: str | None = None,
    layer: bool = False,
    order: bool = False,
    batch_invariant: bool = False,
) -> str:
    """Return a table of the kernels for x [M, K] @ W [K, N], with each kernel's best configuration and time.

    For a kernel that cannot solve the problem, the table gives the reason. ``->`` marks the kernel that is chosen. The
    time of the chosen kernel is "measured" if `python -m cupy_awq tune` recorded it for this GPU model; all other times
    are "modelled" by cost models. The line "chosen" says whether the cost models or a table of tuned configurations
    determined the choice.

    Args:
        m, k, n: sizes, in the order of x [M, K] @ W [K, N].
        group_size: number of rows of W that share scales and zero points; -1 for K.
        dtype: dtype of x: float16, bfloat16 or float32.
        arch: target architecture such as 80, "90a" or "sm_87", for which a typical GPU is assumed; by default the
            current GPU, or an H100 if there is no GPU.
        device: GPU whose rates are used instead, such as "rtx-4090"; an unknown name raises an error with all names.
        layer: True for the kernels that `AwqLinear` can use, which repacks its weight on Hopper; False for the kernels
            that `gemm` can use, which read the AWQ layout.
        order: True for an `AwqLinear` with an activation order (requires ``layer``); then the last line of the table
            says whether the GEMM gathers the columns of x or a launch before the GEMM.
        batch_invariant: True for the kernels of the batch-invariant mode; then the last line of the table gives the
            order of additions along K, which is the same for every M.

    Raises:
        TypeError: a size is not an integer, or the dtype is not supported.
        ValueError: a size is not supported, the architecture or the GPU is unknown, both are given, or ``order`` is set
            without ``layer``.

    >>> print(explain(m=1, k=4096, n=12288, arch=80).splitlines()[0])
    x[1, 4096] float16 @ W[4096, 12288] group size 128 on A100 SXM 80GB (sm_80)
    >>> lines = explain(16, 4096, 12288, arch=90, layer=True).splitlines()
    >>> [line.split()[1] for line in lines if line.startswith("->")]
    ['gemm_sm90']
    """
    problem, gpu = make_typical_problem(
        m, k, n, group_size, dtype, arch=arch, device=device, layer=layer, order=order, batch_invariant=batch_invariant
    )
    text = select.explain(problem, gpu)
    return f"{text}\n{gather_columns.explain(replace(problem, gathers_x=True), gpu)}" if order else text


def make_typical_problem(
    m: int,
    k: int,
    n: int,
    group_size: int,
    dtype: Any,
    *,
    arch: int | str | None,
    device: str | None,
    layer: bool,
    order: bool,
    batch_invariant: bool,
) -> tuple[Problem, devices.Device]:
    """Validate the arguments of `explain`; return the problem, for contiguous arrays, and the GPU."""
    m, k, n = (check_scalar.validate_integer(size, name, 1) for name, size in (("m", m), ("k", k), ("n", n)))
    layer = check_scalar.validate_flag(layer, "layer")
    order = check_scalar.validate_flag(order, "order")
    batch_invariant = check_scalar.validate_flag(batch_invariant, "batch_invariant")
    if order and not layer:
        raise ValueError("order: expected False without layer=True, got True")
    if n % 8:
        raise ValueError(f"n: expected a multiple of 8, got {n}")
    size, element = check_scalar.validate_group_size(k, group_size), check.validate_float_dtype(dtype)
    gpu = devices.find(arch, device)
    layouts = select.weight_layouts(k, n, size, "float16", "packed", gpu) if layer else (AWQ,)
    problem = Problem(m, n, k, size, element.name, layouts=layouts, batch_invariant=batch_invariant)
    gathering = replace(problem, gathers_x=True)
    return gathering if order and gather_columns.is_fused(gathering, gpu) else problem, gpu
