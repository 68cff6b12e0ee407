# SPDX-License-Identifier: Apache-2.0
"""``plan``: a product that is checked once and then only launched; and the way of all other products to a launch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_awq import check, reference
from cupy_awq.check import HOST, Array
from cupy_awq.kernels import select
from cupy_awq.kernels.problem import Fusion, Problem, Strides
from cupy_awq.ops.repack import RepackedWeight
from cupy_awq.runtime import arrays, device, placement
from cupy_awq.runtime import workspace as workspaces
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch import Launcher
from cupy_awq.runtime.launch_plan import LaunchPlan
from cupy_awq.weight import PackedWeight, check_packed

BUFFERS = ("x", "residual", "y", "partials", "counters", "qweight", "scales", "qzeros", "weight", "bias")
"""What launches can be given: the arrays of a call, its workspace, and what stays from call to call."""


@functools.lru_cache(maxsize=4096)
def chosen(problem: Problem, index: int, kernel: str | None, split_k: int | None) -> tuple[select.Choice, Launcher]:
    """The choice for a problem on the GPU ``index``, which must be current, and its launcher."""
    choice = select.choose(problem, device.of(index), kernel, split_k)
    return choice, Launcher(choice.plan)


class Prepared:
    """A valid product whose kernel is loaded: what remains are addresses and a stream.

    It serves all arrays with the layouts (`arrays.layout_key`) of those that it is made from, whatever their weight;
    without an ``out``, contiguous results. If it is ``constant``, launches may read the weight before what was queued
    before them has ended.
    """

    __slots__ = ("_extents", "_in_place", "_index", "_launcher", "_order", "kernel", "shape", "workspace_bytes")

    def __init__(
        self,
        x: Array,
        weight: PackedWeight,
        product: check.Product,
        bias: Array | None,
        residual: Array | None,
        out: Array | None,
        kernel: str | None,
        split_k: int | None,
        constant: bool = False,
    ) -> None:
        qweight, scales, qzeros = weight.qweight, weight.scales, weight.qzeros
        offsets = qzeros if weight.spec.zeros == "float" else None
        m, n = arrays.count_rows(x), product.shape[-1]
        steps = Strides(
            x=arrays.row_stride(x) or 0,
            qweight=arrays.leading_dimension(qweight),
            scales=arrays.leading_dimension(scales),
            qzeros=arrays.leading_dimension(qzeros),
            residual=0 if residual is None else arrays.row_stride(residual) or 0,
            y=n if out is None else arrays.row_stride(out) or 0,
        )
        problem = problem_of(
            weight,
            product.activation,
            m,
            product.element,
            bias_dtype=product.bias.name if product.bias else None,
            residual=residual is not None,
            aligned=arrays.is_aligned(qweight, scales, offsets, residual, out),
            x_aligned=arrays.is_aligned(x),
            constant=constant,
            strides=steps,
        )
        choice, self._launcher = chosen(problem, weight.spec.device, kernel, split_k)
        partials, _ = choice.family.workspace(choice.config, problem)
        self.kernel = choice.name
        self.shape = product.shape
        self.workspace_bytes = workspaces.COUNTER_BYTES + partials if partials else 0
        self._index = weight.spec.device
        self._order = operator.itemgetter(*map(BUFFERS.index, self._launcher.buffers))
        ends = (steps.x, problem.k), (steps.residual, n if residual is not None else 0), (steps.y, n)
        self._extents = tuple(((m - 1) * step + row) * x.dtype.itemsize for step, row in ends)
        self._in_place = steps.residual == steps.y

    def __call__(self, x: int, residual: int, y: int, fixed: tuple[int, ...], workspace: int, stream: int) -> None:
        """Launch. Arrays are given by their addresses, 0 for one that is not needed; ``fixed`` are those that stay."""
        self._launcher(self._order((x, residual, y, workspace + workspaces.COUNTER_BYTES, workspace, *fixed)), stream)

    def run(self, x: Array, residual: Array | None, out: Array | None, fixed: tuple[int, ...]) -> Array | None:
        """y, launched on the current stream with its workspace.

        None, and nothing done, if another GPU is current, or if out overlaps what is read. It may be the residual: each
        element is read by the thread that then writes it.
        """
        import cupy

        index = self._index
        if cupy.cuda.runtime.getDevice() != index:
            return None
        x_begin, residual_begin = x.data.ptr, 0 if residual is None else residual.data.ptr
        if out is None:
            y = cupy.empty(self.shape, x.dtype)
            y_begin = y.data.ptr
        else:
            y = out
            y_begin = y.data.ptr
            x_bytes, residual_bytes, y_bytes = self._extents
            y_end = y_begin + y_bytes
            if x_begin < y_end and y_begin < x_begin + x_bytes:
                return None
            met = residual_begin < y_end and y_begin < residual_begin + residual_bytes
            if met and not (residual_begin == y_begin and self._in_place):
                return None
        stream = cupy.cuda.get_current_stream().ptr
        workspace = workspaces.workspace_address(index, stream) if self.workspace_bytes else 0
        self(x_begin, residual_begin, y_begin, fixed, workspace, stream)
        return y


def fixed_addresses(
    qweight: Array, scales: Array, qzeros: Array | None, repacked: Array | None, bias: Array | None
) -> tuple[int, ...]:
    """Of what stays from call to call, in the order of BUFFERS."""
    return tuple(map(arrays.address, (qweight, scales, qzeros, repacked, bias)))


def weight_addresses(weight: PackedWeight, bias: Array | None) -> tuple[int, ...]:
    """`fixed_addresses` of a weight and its bias."""
    repacked = weight.repacked if isinstance(weight, RepackedWeight) else None
    return fixed_addresses(weight.qweight, weight.scales, weight.qzeros, repacked, bias)


def problem_of(
    weight: PackedWeight, activation: check.Activation, m: int, element: np.dtype[Any], **arrays: Any
) -> Problem:
    """The problem of m rows of x with a weight, for contiguous arrays unless ``arrays`` tells more."""
    facts = weight.spec
    return Problem(
        m=m,
        n=facts.n,
        k=facts.k,
        group_size=facts.group_size,
        dtype=element.name,
        scales_dtype=facts.dtype.name,
        zeros=facts.zeros,
        activation=activation.kind,
        limits=activation.limits,
        gated=activation.gated,
        **_repacked(weight),
        **arrays,
    )


@dataclass(frozen=True)
class FusedPlan:
    """A GEMM with a `Fusion`: the launch of its kernel, and the arrays of its layer.

    Attributes:
        launch: the launch. Besides ``arrays`` it takes the buffers x [m, K] and y [m, N] (gated: [m, N/2]), contiguous
            and of the planned dtype, and those of ``cuda_src/hopper/residual_stream.cuh``.
        arrays: the buffers that belong to the layer, by name.
        out_features: the columns of y.
    """

    launch: LaunchPlan
    arrays: Mapping[str, Array | None]
    out_features: int


def plan_fused(
    weight: PackedWeight,
    bias: Array | None,
    activation: check.Activation,
    m: int,
    element: np.dtype[Any],
    fusion: Fusion,
) -> FusedPlan | None:
    """Return the plan of a GEMM with a `Fusion` for contiguous arrays, or None if no kernel can perform it."""
    if not isinstance(weight, RepackedWeight):
        return None
    bias_dtype = None if bias is None else bias.dtype.name
    problem = problem_of(weight, activation, m, element, bias_dtype=bias_dtype, fusion=fusion)
    launch = _fused_launch(problem, device.of(weight.spec.device))
    if launch is None:
        return None
    buffers = {"weight": weight.repacked, "bias": bias, "residual": None}
    return FusedPlan(launch, buffers, check.out_features(problem.n, activation))


@functools.lru_cache(maxsize=1024)
def _fused_launch(problem: Problem, gpu: Device) -> LaunchPlan | None:
    if all(isinstance(found, str) for found in select.candidates(problem, gpu).values()):
        return None
    return select.choose(problem, gpu).plan


def _repacked(weight: PackedWeight) -> dict[str, Any]:
    """The fields of a problem that tell of a repacked weight."""
    if not isinstance(weight, RepackedWeight):
        return {}
    scales = {"scale_exponent": weight.scale_exponent, "wide_scales": weight.wide_scales}
    return {"raw": weight.kept, "repacked": True, **scales}


def multiply(
    x: Array,
    weight: PackedWeight,
    /,
    *,
    bias: Array | None = None,
    activation: Any = None,
    residual: Array | None = None,
    out: Array | None = None,
    dtype: Any = None,
    kernel: str | None = None,
    split_k: int | None = None,
) -> tuple[Array, Prepared | None]:
    """y = activation(x @ W + bias) + residual, and what can make it again from arrays of the same layouts.

    The latter is None on the CPU, for no rows, and where an array had to be copied.
    """
    x, bias, residual, out = arrays.views(x=x, bias=bias, residual=residual, out=out)
    product = check.product(x, weight.spec, bias=bias, activation=activation, residual=residual, out=out, dtype=dtype)
    _check_choice(kernel, split_k)
    index = weight.spec.device
    if index == HOST:
        tensors = weight.qweight, weight.scales, weight.qzeros
        options = {"bias": bias, "activation": activation, "residual": residual, "out": out, "dtype": dtype}
        return reference.matmul(x, *tensors, **options), None
    import cupy

    with placement.use_device(index):
        if x.size == 0:
            return cupy.empty(product.shape, x.dtype) if out is None else out, None
        source = x if arrays.has_readable_rows(x) else cupy.array(x, order="C")
        added = residual if residual is None or arrays.row_stride(residual) is not None else residual.copy(order="C")
        target = out if out is not None and arrays.row_stride(out) is not None else None
        fixed = weight_addresses(weight, bias)
        prepared = Prepared(source, weight, product, bias, added, target, kernel, split_k)
        y = prepared.run(source, added, target, fixed)
        if y is None:
            y = Prepared(source, weight, product, bias, added, None, kernel, split_k).run(source, added, None, fixed)
        direct = source is x and added is residual and target is out
        if out is None:
            out = y
        elif y is not out:
            out[...] = y
        return out, prepared if direct else None


def remember(prepared: dict[Any, Prepared], key: Any, value: Prepared, limit: int) -> None:
    """Keep what is prepared for a key; a store that is full starts anew, as its entries are soon made again."""
    if len(prepared) >= limit:
        prepared.clear()
    prepared[key] = value


def _check_choice(kernel: str | None, split_k: int | None) -> None:
    if kernel is not None and kernel not in select.FAMILIES_OF[Problem]:
        raise ValueError(f"kernel: expected one of {', '.join(select.FAMILIES_OF[Problem])}, got {kernel!r}")
    if split_k is not None and (not isinstance(split_k, int) or split_k < 1 or split_k & (split_k - 1)):
        raise ValueError(f"split_k must be a power of two, got {split_k!r}")


class Plan:
    """y = activation(x @ W + bias) + residual for arrays of one layout; made by `plan`, called as ``plan(x, out)``.

    ``plan(x, out, residual=None, workspace=None)`` fills ``out`` and returns it. On a GPU that is one launch on the
    current stream, with no allocation, copy or synchronisation, so it can be captured into a CUDA graph. x, out and the
    residual must have the shape, strides, dtype, place and alignment that were planned; anything else is a TypeError or
    ValueError. out must not overlap x; it may be the residual. The weight's arrays must not be written while there is a
    plan for them.

    Attributes:
        kernel: the name of the kernel; "numpy" on the CPU.
        shape: of y.
        workspace_bytes: memory for partial sums, which the plan owns. Calls that may run at the same time, on several
            streams, each need a ``workspace`` of their own: a contiguous array of at least this many bytes, zeros
            before its first use. It can serve one plan after the other.
    """

    __slots__ = (
        "_fixed",
        "_layouts",
        "_memory",
        "_options",
        "_prepared",
        "_weight",
        "kernel",
        "shape",
        "workspace_bytes",
    )

    def __init__(
        self,
        x: Array,
        weight: PackedWeight,
        options: dict[str, Any],
        residual: Array | None,
        out: Array | None,
        kernel: str | None,
        split_k: int | None,
    ) -> None:
        product = check.product(x, weight.spec, residual=residual, out=out, **options)
        _check_choice(kernel, split_k)
        self._weight, self._options = weight, options
        self.kernel, self.shape, self.workspace_bytes = "numpy", product.shape, 0
        self._prepared: Prepared | None = None
        self._memory: Array | None = None
        if out is None:
            out = _empty(product.shape, x.dtype, weight.spec.device)
        if weight.spec.device != HOST:
            self.kernel = "none"  # M = 0
            if x.size:
                for name, a in (("x", x), ("out", out), ("residual", residual)):
                    if a is not None and arrays.row_stride(a) is None:
                        raise ValueError(f"{name} must have contiguous rows at even steps, got strides {a.strides}")
                constant = _ended()
                self._prepared = Prepared(x, weight, product, options["bias"], residual, out, kernel, split_k, constant)
                self.kernel, self.workspace_bytes = self._prepared.kernel, self._prepared.workspace_bytes
            self._fixed = weight_addresses(weight, options["bias"])
            if self.workspace_bytes:
                self._memory = workspaces.allocate_zeros(self.workspace_bytes)
        self._layouts = self._layout(x), self._layout(out), self._layout(residual)

    def __call__(
        self, x: Array, out: Array, /, *, residual: Array | None = None, workspace: Array | None = None
    ) -> Array:
        try:
            fits = (self._layout(x), self._layout(out), self._layout(residual)) == self._layouts
        except (AttributeError, ValueError):  # an array of another library, or none
            fits = False
        if not fits:
            x, out, residual, workspace = arrays.views(x=x, out=out, residual=residual, workspace=workspace)
            for name, a, planned in zip(("x", "out", "residual"), (x, out, residual), self._layouts, strict=True):
                self._check(name, a, planned)
        if self.kernel == "numpy":
            weight = self._weight
            tensors = weight.qweight, weight.scales, weight.qzeros
            return reference.matmul(x, *tensors, residual=residual, out=out, **self._options)
        if self._prepared is None:
            return out
        import cupy

        index = self._weight.spec.device
        if cupy.cuda.runtime.getDevice() != index:
            with placement.use_device(index):
                return self(x, out, residual=residual, workspace=workspace)
        memory = self._memory
        if workspace is not None and memory is not None:
            memory = _workspace(workspace, self.workspace_bytes, index)
        stream = cupy.cuda.get_current_stream().ptr
        address = arrays.address
        self._prepared(address(x), address(residual), address(out), self._fixed, address(memory), stream)
        return out

    def _layout(self, a: Array | None) -> Any:
        if a is not None and self.kernel == "numpy":
            return a.shape, None, a.dtype, HOST, 0  # strides and alignment are free
        return arrays.layout_key(a)

    def _check(self, name: str, a: Array | None, planned: Any) -> None:
        """`a` has the planned layout, or one that differs in nothing but a better alignment."""
        if a is None or planned is None:
            if a is not planned:
                raise ValueError(f"{name} must be {'None' if planned is None else 'an array'}, as planned")
            return
        check.on_device(a, name, planned[3], "the plan")
        found = self._layout(a)
        width = arrays.vector_bytes(a)
        if found[:4] != planned[:4] or (found[4] % width and not planned[4] % width):
            form = "(shape, strides, dtype, GPU, address modulo 32)"
            raise ValueError(f"{name} must be as planned, {form} = {planned}, got {found}")


def plan(
    x: Array | tuple[int, ...],
    weight: PackedWeight,
    /,
    *,
    bias: Array | None = None,
    activation: Any = None,
    residual: Array | tuple[int, ...] | None = None,
    out: Array | tuple[int, ...] | None = None,
    dtype: Any = None,
    kernel: str | None = None,
    split_k: int | None = None,
) -> Plan:
    """y = activation(x @ W + bias) + residual, checked and prepared now, to be launched as often as wanted.

    Args:
        x: [..., K], an array like those to come; or a shape, for contiguous arrays of ``dtype``.
        weight: the weight, whose arrays must not be written, moved or freed from now on; on a GPU all calls are for
            that GPU. What makes them on another stream than the current one must have ended.
        bias, activation: as in `gemm`; the bias is part of the plan.
        residual: like y: an array or a shape as for x; None for none.
        out: the same for y; by default contiguous.
        dtype: of x where it is a shape, by default float16; how to read x where it is an array of uint16.
        kernel, split_k: as in `gemm`.

    Returns:
        A `Plan`. Its kernel is compiled and loaded, and the memory for its partial sums is there. Whatever was queued
        on the current stream of the GPU has ended, unless that is captured: on Hopper a launch may read the weight
        while those before it still run.

    Raises:
        TypeError, ValueError: an argument that does not fit; an array whose rows kernels cannot walk, because they are
            not contiguous or their steps differ; a kernel that is unknown or cannot take the problem.

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
    check_packed(weight)
    index = weight.spec.device
    with placement.use_device(index):
        if isinstance(x, tuple):
            x, dtype = _empty(x, check.float_dtype(dtype or "float16"), index), None
        x, bias = arrays.views(x=x, bias=bias)
        element = getattr(x, "dtype", None)
        residual, out = (_empty(a, element, index) if isinstance(a, tuple) else a for a in (residual, out))
        residual, out = arrays.views(residual=residual, out=out)
        options = {"bias": bias, "activation": activation, "dtype": dtype}
        return Plan(x, weight, options, residual, out, kernel, split_k)


def _ended() -> bool:
    """Wait until all has ended that was queued on the current stream; False where that cannot be: in a capture."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    try:
        if stream.is_capturing():
            return False
    except cupy.cuda.runtime.CUDARuntimeError:  # the default stream, while another that it waits for is captured
        return False
    stream.synchronize()
    return True


def _empty(shape: tuple[int, ...], dtype: Any, index: int) -> Array:
    """A new array on the current device, the GPU ``index``, or of NumPy."""
    if index == HOST:
        return np.empty(shape, dtype)
    import cupy

    return cupy.empty(shape, dtype)


def _workspace(memory: Array, nbytes: int, index: int) -> Array:
    """``memory`` if it can be a plan's workspace."""
    check.on_device(memory, "workspace", index, "the plan")
    if not memory.flags.c_contiguous or memory.data.ptr % 16:
        raise ValueError("workspace must be contiguous and start at a multiple of 16 bytes")
    if memory.nbytes < nbytes:
        raise ValueError(f"workspace must have at least {nbytes} bytes, got {memory.nbytes}")
    return memory
