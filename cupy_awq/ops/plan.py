# SPDX-License-Identifier: Apache-2.0
"""``plan``: a GEMM that is validated once and launched many times."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from cupy_awq import check, check_scalar, overlap, reference
from cupy_awq.activation import Activation
from cupy_awq.array_types import AnyActivation, ArrayT, CudaArray
from cupy_awq.check import HOST, Array
from cupy_awq.kernels import select
from cupy_awq.kernels.gemm.layouts import WEIGHT_TILE_N, FragmentLayout
from cupy_awq.kernels.gemm.problem import NO_PREFETCH, Fusion, NextWeight, Problem
from cupy_awq.kernels.hopper import HOPPER
from cupy_awq.ops.gather_columns import ActivationOrder
from cupy_awq.ops.prepared_gemm import MAX_DISJOINT, PreparedGemm, check_choice, gemm_problem, weight_pointers
from cupy_awq.ops.repack import RepackedWeight
from cupy_awq.runtime import arrays, device, placement
from cupy_awq.runtime import workspace as workspaces
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan
from cupy_awq.weight import PackedWeight, check_packed

GATHERED_ALIGNMENT = 32
PREFETCHED_GATE_UP = 0.12
"""The part of the gate and up projections, as a fraction, that an earlier GEMM of a decode step prefetches on Hopper.

On an H100, larger parts delay loads that are needed earlier.
"""
PREFETCH_US, PREFETCH_GATED_US, PREFETCHED_L2 = 1.25, 2.0, 0.125
"""The size of what a GEMM prefetches of a plain, and of a gated, weight on other GPUs.

It is its read time in microseconds, at most this part of the L2 cache.
While a kernel ends and the next one starts, device memory has nothing else to read.
"""
"""The alignment in bytes of the copy of x in activation order, which is in a plan's workspace."""


class Plan:
    """A GEMM y = activation(x @ W + bias) + residual for arrays of one layout, created by `plan`.

    ``plan(x, out, residual=None, workspace=None)`` fills ``out`` and returns it. On a GPU, a call is one launch on the
    current stream (two for some layers with an activation order), without allocation, copy or synchronization, so calls
    can be captured into a CUDA graph. x, out and the residual must have the planned shape, strides, dtype, device and
    alignment; otherwise the call raises TypeError or ValueError. ``out`` must not overlap the weight or the bias, which
    raises ValueError, nor x, which is not checked; it may be the residual. A plan may read the weight before the
    preceding kernel finishes (PDL), so do not modify the weight.

    Attributes:
        kernel: name of the kernel; "numpy" on the CPU, "none" on a GPU if M = 0.
        shape: shape of y.
        workspace_bytes: size in bytes of the workspace, for partial sums of split-K and x in activation order.
            The plan owns a workspace. If calls may run concurrently on several streams, each stream needs a
            ``workspace`` of its own: a contiguous array of at least ``workspace_bytes`` bytes that is zero before its
            first use. Plans whose calls run in order can share it. As any CuPy array, the plan's own workspace belongs
            to the stream that was current when the plan was created: keep the plan until its calls on other streams
            have finished.
    """

    def __init__(
        self,
        x: Array,
        weight: PackedWeight,
        options: dict[str, Any],
        residual: Array | None,
        out: Array | None,
        kernel: str | None,
        split_k: int | None,
        batch_invariant: bool,
        order: ActivationOrder | None,
    ) -> None:
        product = check.validate_product(x, weight.spec, residual=residual, out=out, **options)
        check_choice(kernel, split_k, batch_invariant)
        self._batch_invariant = batch_invariant
        self._weight, self._options, self._order = weight, options, order
        self.kernel, self.shape, self.workspace_bytes = "numpy", product.shape, 0
        self._prepared: PreparedGemm | None = None
        self._disjoint: set[int] = set()  # the addresses of earlier arrays `out`, which overlap no constant array
        self._gathered_begin = 0  # the copy of x lies behind the counters, which must stay 0
        self._memory: Array | None = None
        if out is None:
            out = _empty(product.shape, "out", x.dtype, weight.spec.device)
        if weight.spec.device != HOST:
            import cupy

            self._cupy = cupy  # An import in each call would take 2% of its time.
            self.kernel = "none"  # stays "none" if M = 0, where nothing is launched
            if x.size:
                for name, a in (("x", x), ("out", out), ("residual", residual)):
                    if a is not None and arrays.row_stride(a) is None:
                        raise ValueError(f"{name}: expected contiguous rows with one stride, got strides {a.strides}")
                may_prefetch = _synchronize()
                how = kernel, split_k, None, may_prefetch, batch_invariant, order
                prepared = PreparedGemm(x, weight, product, options["bias"], residual, out, *how)
                self._prepared, self.kernel, self.workspace_bytes = prepared, prepared.kernel, prepared.workspace_bytes
                if prepared.gathered_bytes:
                    self._gathered_begin = max(prepared.workspace_bytes, workspaces.COUNTER_BYTES)
                    self.workspace_bytes = self._gathered_begin + prepared.gathered_bytes + GATHERED_ALIGNMENT
            self._constants = weight_pointers(weight, options["bias"], order)
            if self.workspace_bytes:
                self._memory = workspaces.allocate_zeros(self.workspace_bytes, on_current_stream=may_prefetch)
        self._layouts = self._layout(x), self._layout(out), self._layout(residual)

    @overload
    def __call__(
        self,
        x: Array,
        out: ArrayT,
        /,
        *,
        residual: Array | None = ...,
        workspace: Array | None = ...,
    ) -> ArrayT: ...
    @overload
    def __call__(
        self, x: Array, out: CudaArray, /, *, residual: Array | None = ..., workspace: Array | None = ...
    ) -> Array: ...
    def __call__(
        self, x: Array, out: Array, /, *, residual: Array | None = None, workspace: Array | None = None
    ) -> Array:
        try:
            fits = (self._layout(x), self._layout(out), self._layout(residual)) == self._layouts
        except (AttributeError, ValueError):  # An argument is an array of another library, or not an array.
            fits = False
        if not fits:
            x, out, residual, workspace = arrays.views(x=x, out=out, residual=residual, workspace=workspace)
            for name, a, planned in zip(("x", "out", "residual"), (x, out, residual), self._layouts, strict=True):
                self._check(name, a, planned)
        if self.kernel == "numpy":
            weight, bias = self._weight, self._options["bias"]
            product = check.validate_product(x, weight.spec, residual=residual, out=out, **self._options)
            overlap.validate_disjoint(out, **weight.tensors, bias=bias)
            x = x if self._order is None else x[..., self._order.columns]
            return reference.matmul_validated(x, weight, product, bias, residual, out, self._batch_invariant)
        if self._prepared is None:
            return out
        index, cupy = self._weight.spec.device, self._cupy
        if cupy.cuda.runtime.getDevice() != index:
            with placement.use_device(index):
                return self(x, out, residual=residual, workspace=workspace)
        memory = self._memory
        if workspace is not None and memory is not None:
            memory = _workspace(workspace, self.workspace_bytes, index)
        stream = cupy.cuda.get_current_stream().ptr
        address = arrays.address
        begin = address(memory) + self._gathered_begin
        gathered = begin + -begin % GATHERED_ALIGNMENT
        y = address(out)
        if y not in self._disjoint:
            self._check_disjoint(out)
        self._prepared(address(x), address(residual), y, self._constants, address(memory), gathered, stream)
        return out

    def _check_disjoint(self, out: Array) -> None:
        """Raise ValueError if ``out`` overlaps the weight or the bias; else remember its address."""
        overlap.validate_disjoint(out, **self._weight.tensors, bias=self._options["bias"])
        if len(self._disjoint) >= MAX_DISJOINT:
            self._disjoint.clear()
        self._disjoint.add(arrays.address(out))

    def __repr__(self) -> str:
        (x_shape, _, dtype, index, _), _, residual = self._layouts
        place = "" if index == HOST else f", GPU {index}"
        added = "" if residual is None else ", residual"
        return (
            f"Plan({dtype} {list(x_shape)} -> {list(self.shape)}{added}, kernel={self.kernel!r}, "
            f"workspace_bytes={self.workspace_bytes}{place})"
        )

    def _layout(self, a: Array | None) -> Any:
        if a is not None and self.kernel == "numpy":
            return a.shape, None, a.dtype, HOST, 0  # on the CPU any strides and alignment will do
        return arrays.layout_key(a)

    def _check(self, name: str, a: Array | None, planned: Any) -> None:
        """Raise TypeError or ValueError unless an array has the planned layout; a better alignment is accepted."""
        if a is None or planned is None:
            if a is not planned:
                expected, found = ("None", "an array") if planned is None else ("an array", "None")
                raise ValueError(f"{name}: expected {expected}, as planned, got {found}")
            return
        check.validate_device(a, name, planned[3], "the plan")
        found = self._layout(a)
        width = arrays.vector_bytes(a)
        shape, strides, dtype, _, address = planned
        if (found[0], found[2]) != (shape, dtype):
            raise ValueError(f"{name}: expected {dtype} {list(shape)}, as planned, got {check.describe(a)}")
        if found[1] != strides:
            raise ValueError(f"{name}: expected the planned strides {strides}, got {found[1]}")
        if found[4] % width and not address % width:
            raise ValueError(f"{name}: expected a start at a multiple of {width} bytes, as planned, got another one")


def plan(
    x: Array | tuple[int, ...],
    weight: PackedWeight,
    /,
    *,
    bias: Array | None = None,
    activation: AnyActivation = None,
    residual: Array | tuple[int, ...] | None = None,
    out: Array | tuple[int, ...] | None = None,
    dtype: Any = None,
    kernel: str | None = None,
    split_k: int | None = None,
    batch_invariant: bool = False,
) -> Plan:
    """Validate a GEMM y = activation(x @ W + bias) + residual, and return a `Plan` whose calls only launch the kernel.

    Args:
        x: example array [..., K] of a call; or its shape, for contiguous arrays of ``dtype``.
        weight: the weight. The arrays of the weight must not be modified or freed while the plan is in use, and kernels
            on other streams that write these arrays must have finished. On a GPU, all calls run on the weight's GPU.
        bias, activation: as in `gemm`; the bias is the same for all calls.
        residual: example array of a call, or its shape, or None for calls without a residual.
        out: example array of a call, or its shape; by default, ``out`` is contiguous.
        dtype: dtype of x if x is a shape, by default float16; "bfloat16" if x is uint16 with the bits of bfloat16.
        kernel, split_k, batch_invariant: as in `gemm`.

    Returns:
        The plan, whose kernel is loaded and whose workspace is allocated. `plan` synchronizes the current stream,
        except during stream capture, because on Hopper the kernel may read the weight before the preceding kernel
        finishes (PDL).

    Raises:
        TypeError, ValueError: an argument has a wrong type or value, the rows of an array are not contiguous or not
            equally spaced, or the kernel is unknown or cannot solve the problem.

    >>> import numpy as np
    >>> import cupy_awq
    >>> weight = cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16)
    >>> plan = cupy_awq.plan((2, 32), weight, activation="relu")
    >>> plan.shape, plan.workspace_bytes
    ((2, 16), 0)
    >>> y = np.empty((2, 16), np.float16)
    >>> plan(np.ones((2, 32), np.float16), y)[:, 0]
    array([1., 1.], dtype=float16)
    """
    options = {"bias": bias, "activation": activation, "dtype": dtype, "batch_invariant": batch_invariant}
    return make_plan(x, weight, None, residual, out, kernel, split_k, **options)


def make_plan(
    x: Array | tuple[int, ...],
    weight: PackedWeight,
    order: ActivationOrder | None,
    residual: Array | tuple[int, ...] | None,
    out: Array | tuple[int, ...] | None,
    kernel: str | None = None,
    split_k: int | None = None,
    *,
    bias: Array | None,
    activation: Any,
    dtype: Any,
    batch_invariant: bool,
) -> Plan:
    """Create the plan that `plan` returns, for x[..., order]; ``order`` is None for x itself."""
    check_packed(weight)
    index = weight.spec.device
    with placement.use_device(index):
        if isinstance(x, tuple):
            x, dtype = _empty(x, "x", check.validate_float_dtype("float16" if dtype is None else dtype), index), None
        x, bias = arrays.views(x=x, bias=bias)
        element = getattr(x, "dtype", None)
        residual, out = (
            _empty(a, name, element, index) if isinstance(a, tuple) else a
            for name, a in (("residual", residual), ("out", out))
        )
        residual, out = arrays.views(residual=residual, out=out)
        options = {"bias": bias, "activation": activation, "dtype": dtype}
        return Plan(x, weight, options, residual, out, kernel, split_k, batch_invariant, order)


def _synchronize() -> bool:
    """Synchronize the current stream and return True; during stream capture, where this is impossible, return False."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    try:
        if stream.is_capturing():
            return False
    except cupy.cuda.runtime.CUDARuntimeError:  # this is the default stream, and a blocking stream is being captured
        return False
    stream.synchronize()
    return True


def _empty(shape: tuple[Any, ...], name: str, dtype: Any, index: int) -> Array:
    """Return an uninitialized array on device ``index`` for the argument ``name``, whose shape is validated."""
    return arrays.empty(check_scalar.validate_shape(shape, name), dtype, index)


def _workspace(memory: Array, nbytes: int, index: int) -> Array:
    """Return ``memory`` if a plan can use it as its workspace; otherwise raise TypeError or ValueError."""
    check.validate_device(memory, "workspace", index, "the plan")
    if not memory.flags.c_contiguous or memory.data.ptr % 16:
        raise ValueError("workspace: expected a contiguous array that starts at a multiple of 16 bytes, got another")
    if memory.nbytes < nbytes:
        raise ValueError(f"workspace: expected at least {nbytes} bytes, got {memory.nbytes}")
    return memory


@dataclass(frozen=True)
class FusedPlan:
    """A GEMM with a `Fusion`: the launch plan, and the arrays of the linear layer.

    Attributes:
        launch: launch plan. Besides ``arrays``, the buffers are x [m, K] and y [m, N] (gated: [m, N/2]), contiguous and
            of the planned dtype, the buffers that ``cuda_src/hopper/residual_stream.cuh`` describes, and with
            ``partial_bytes``, partials and counters, which are zero before and after the launch.
        arrays: arrays of the linear layer, by buffer name; None is a null pointer.
        out_features: number of columns of y.
        partial_bytes: size of the partial sums in bytes; 0 if the kernel needs none.
    """

    launch: LaunchPlan
    arrays: Mapping[str, Array | None]
    out_features: int
    partial_bytes: int


def plan_fused(
    weight: PackedWeight,
    bias: Array | None,
    activation: Activation,
    m: int,
    element: np.dtype[Any],
    fusion: Fusion,
) -> FusedPlan | None:
    """Return the plan of a GEMM with a `Fusion` for contiguous arrays, or None if no kernel supports the problem."""
    if not isinstance(weight, RepackedWeight):
        return None
    bias_dtype = None if bias is None else bias.dtype.name
    problem = gemm_problem(weight, activation, m, element, bias_dtype=bias_dtype, fusion=fusion)
    gpu = device.of(weight.spec.device)
    if not _is_supported(problem, gpu):
        return None
    choice = select.choose(problem, gpu)
    buffers = {"weight": weight.repacked, "bias": bias, "residual": None}
    partial_bytes = choice.family.workspace(choice.config, problem).partial_bytes
    return FusedPlan(choice.plan, buffers, check.out_features(problem.n, activation), partial_bytes)


@functools.lru_cache(maxsize=1024)
def _is_supported(problem: Problem, gpu: Device) -> bool:
    return any(not isinstance(found, str) for found in select.candidates(problem, gpu).values())


def plan_prefetch(weight: PackedWeight, *, gated: bool) -> tuple[Array | None, NextWeight]:
    """Return the repacked weight, and the part of it that an earlier kernel of a decode step prefetches into L2.

    Without a repacked copy of the weight, or kernels that prefetch this weight, nothing is prefetched.
    """
    if not isinstance(weight, RepackedWeight):
        return None, NO_PREFETCH
    spec, gpu = weight.spec, device.of(weight.spec.device)
    tile_columns = spec.n // 2 // WEIGHT_TILE_N
    layout = FragmentLayout(spec.k, spec.n, spec.group_size, spec.dtype.name, spec.zeros)
    half = tile_columns * layout.k_tiles * layout.weight_tile_bytes
    if not gpu.has(*HOPPER):
        read_us = PREFETCH_GATED_US if gated else PREFETCH_US
        nbytes = min(read_us * gpu.rates.read_gbs * 1e3, PREFETCHED_L2 * gpu.l2_bytes)
        return weight.repacked, NextWeight(min(half, int(nbytes / 2)), half)
    if gated:
        return weight.repacked, NextWeight(int(PREFETCHED_GATE_UP * half), half)
    return None, NO_PREFETCH
