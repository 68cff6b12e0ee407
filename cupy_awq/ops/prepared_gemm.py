# SPDX-License-Identifier: Apache-2.0
"""`PreparedGemm`: a validated GEMM whose kernel is loaded, which `gemm`, `AwqLinear` and `plan` launch many times."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import numpy as np

from cupy_awq import check, check_scalar, overlap, reference
from cupy_awq.activation import Activation
from cupy_awq.check import HOST, Array
from cupy_awq.kernels.gemm import gather_columns
from cupy_awq.kernels.gemm.problem import Problem, Strides
from cupy_awq.kernels.registry import FAMILIES_OF
from cupy_awq.ops.chosen_kernel import choose_kernel
from cupy_awq.ops.gather_columns import ActivationOrder, prepare_gather
from cupy_awq.ops.repack import RepackedWeight
from cupy_awq.runtime import arrays, device, placement
from cupy_awq.runtime import workspace as workspaces
from cupy_awq.runtime.device import Capability
from cupy_awq.runtime.launcher import Launcher
from cupy_awq.weight import PackedWeight

BUFFERS = ("x", "residual", "y", "partials", "counters", "qweight", "scales", "qzeros", "weight", "bias", "order")
"""The buffers of a GEMM: the arrays of a call, the workspace, then the arrays that are the same for all calls."""

MAX_DISJOINT = 1024
"""The largest number of addresses of ``out`` that a prepared GEMM remembers as disjoint from its weight."""


class PreparedGemm:
    """A validated GEMM whose kernel is loaded; a call takes only buffer addresses and a stream.

    It can be launched for all arrays with the same layouts (`arrays.layout_key`) as the constructor's arguments.

    Args:
        x, residual, out: example arrays of a call; y is contiguous if ``out`` is None.
        weight, bias: arrays that are the same for all calls.
        product: result of `check.validate_product` for these arrays.
        kernel, split_k: as in `gemm`.
        constants: the addresses of the weight, the bias and the order, if all calls pass this tuple; else None.
        may_prefetch_weights: whether a kernel may read the weight before the preceding kernel finishes (PDL).
        batch_invariant: as in `gemm`.
        order: activation order of x, or None.

    Attributes:
        kernel: name of the kernel.
        shape: shape of y.
        workspace_bytes: size of the split-K workspace in bytes; 0 if none is needed.
        gathered_bytes: size in bytes of x in its activation order, which a launch before the GEMM writes; 0 if there is
            no such launch.
    """

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
        constants: tuple[int, ...] | None,
        may_prefetch_weights: bool,
        batch_invariant: bool,
        order: ActivationOrder | None,
    ) -> None:
        qweight, scales, qzeros = weight.qweight, weight.scales, weight.qzeros
        offsets = qzeros if weight.spec.zeros == "float" else None
        m, n = arrays.count_rows(x), product.shape[-1]
        strides = Strides(
            x=arrays.row_stride(x) or 0,
            qweight=arrays.leading_dimension(qweight),
            scales=arrays.leading_dimension(scales),
            qzeros=arrays.leading_dimension(qzeros),
            residual=0 if residual is None else arrays.row_stride(residual) or 0,
            y=n if out is None else arrays.row_stride(out) or 0,
        )
        problem = gemm_problem(
            weight,
            product.activation,
            m,
            product.element,
            bias_dtype=product.bias.name if product.bias else None,
            residual=residual is not None,
            aligned=arrays.is_aligned(qweight, scales, offsets, residual, out),
            x_aligned=arrays.is_aligned(x),
            may_prefetch_weights=may_prefetch_weights,
            strides=strides,
            gathers_x=order is not None,
            batch_invariant=batch_invariant,
        )
        self._index = weight.spec.device
        gpu = device.of(self._index)
        self._gather: Launcher | None = None
        self._columns = self.gathered_bytes = 0
        if order is not None and not gather_columns.is_fused(problem, gpu):
            self._gather, self._columns = prepare_gather(x, self._index), arrays.address(order.columns)
            self.gathered_bytes = x.size * x.dtype.itemsize
            gathered = strides._replace(x=problem.k)
            problem = replace(problem, gathers_x=False, x_aligned=True, strides=gathered)
        chosen = choose_kernel(problem, self._index, kernel, split_k)
        self._launcher, self.workspace_bytes = chosen.launcher, chosen.workspace_bytes
        self.kernel, self.shape = chosen.choice.name, product.shape
        self._order = operator.itemgetter(*map(BUFFERS.index, self._launcher.buffers))
        widths = (strides.x, problem.k), (strides.residual, n if residual is not None else 0), (strides.y, n)
        self._extents = tuple(((m - 1) * stride + width) * x.dtype.itemsize for stride, width in widths)
        self._in_place = strides.residual == strides.y
        import cupy

        self._cupy = cupy  # An import in `run` would take 2% of its time.
        self._constants = constants
        spans = [(0, 0) if a is None else overlap.byte_span(a) for a in (qweight, scales, qzeros, bias)]
        # in the order of BUFFERS; no user array can overlap the repacked weight, hence (0, 0)
        self._constant_spans = *spans[:3], (0, 0), spans[3]
        self._disjoint: set[Any] = set()

    def __call__(
        self, x: int, residual: int, y: int, constants: tuple[int, ...], workspace: int, gathered: int, stream: int
    ) -> None:
        """Launch the kernel on the stream with handle ``stream``.

        The other arguments are buffer addresses, and 0 is a null pointer; ``constants`` is a result of
        `weight_pointers`. ``gathered`` is the address of ``gathered_bytes`` bytes of scratch memory, a multiple of
        32.
        """
        if self._gather is not None:
            self._gather((x, self._columns, gathered), stream)
            x = gathered
        pointers = (x, residual, y, workspace + workspaces.COUNTER_BYTES, workspace, *constants)
        self._launcher(self._order(pointers), stream)

    def run(self, x: Array, residual: Array | None, out: Array | None, constants: tuple[int, ...]) -> Array | None:
        """Launch the kernel on the current stream with the stream's workspace, and return y.

        Returns None, without a launch, if another GPU is current or ``out`` overlaps another array. ``out`` may be the
        residual itself, because each element of the residual is read by the thread that writes the same element of y.
        """
        index, cupy = self._index, self._cupy
        if cupy.cuda.runtime.getDevice() != index:
            return None
        x_begin, residual_begin = x.data.ptr, 0 if residual is None else residual.data.ptr
        if out is None:
            try:
                y = cupy.empty(self.shape, x.dtype)
            except MemoryError as error:
                raise placement.memory_error(index, error) from error
            y_begin = y.data.ptr
        else:
            y = out
            y_begin = y.data.ptr
            x_bytes, residual_bytes, y_bytes = self._extents
            y_end = y_begin + y_bytes
            if x_begin < y_end and y_begin < x_begin + x_bytes:
                return None
            overlaps_residual = residual_begin < y_end and y_begin < residual_begin + residual_bytes
            if overlaps_residual and not (residual_begin == y_begin and self._in_place):
                return None
            # The addresses of one layer are one tuple, so the address of y suffices as the key.
            key = y_begin if constants is self._constants else (y_begin, constants)
            if key not in self._disjoint and not self._is_disjoint(key, y_begin, y_end, constants):
                return None
        stream = cupy.cuda.get_current_stream().ptr
        workspace = workspaces.workspace_address(index, stream) if self.workspace_bytes else 0
        gathered_bytes = self.gathered_bytes
        gathered = workspaces.scratch_array(index, stream, gathered_bytes).data.ptr if gathered_bytes else 0
        self(x_begin, residual_begin, y_begin, constants, workspace, gathered, stream)
        return y

    def _is_disjoint(self, key: Any, y_begin: int, y_end: int, constants: tuple[int, ...]) -> bool:
        """Return whether ``out`` overlaps neither the weight nor the bias, and if so, remember ``key``."""
        for address, (begin, end) in zip(constants, self._constant_spans, strict=False):
            if address + begin < y_end and y_begin < address + end:
                return False
        if len(self._disjoint) >= MAX_DISJOINT:
            self._disjoint.clear()
        self._disjoint.add(key)
        return True


def weight_pointers(weight: PackedWeight, bias: Array | None, order: ActivationOrder | None = None) -> tuple[int, ...]:
    """Return the addresses of the arrays of a weight, a bias and an activation order, in the order of BUFFERS."""
    repacked = weight.repacked if isinstance(weight, RepackedWeight) else None
    short = None if order is None else order.short
    return tuple(map(arrays.address, (weight.qweight, weight.scales, weight.qzeros, repacked, bias, short)))


def gemm_problem(
    weight: PackedWeight, activation: Activation, m: int, element: np.dtype[Any], **fields: Any
) -> Problem:
    """Return the `Problem` for m rows of x and a weight; ``fields`` are the fields that this function does not set.

    Raises TypeError if kernels for x of this dtype need the tensors in the AWQ layout, which are freed.
    """
    spec = weight.spec
    if isinstance(weight, RepackedWeight):
        if not weight.has_original:
            has_bfloat16 = device.of(spec.device).has(Capability.BFLOAT16)
            served = ("float16", "bfloat16") if has_bfloat16 else ("float16",)
            if element.name not in served:
                raise TypeError(f"x: expected {' or '.join(served)} for a layer with keep_weight=False, got {element}")
        fields |= {
            "layouts": weight.layouts,
            "scale_exponent": weight.scale_exponent,
            "wide_scales": weight.wide_scales,
        }
    return Problem(
        m=m,
        n=spec.n,
        k=spec.k,
        group_size=spec.group_size,
        dtype=element.name,
        scales_dtype=spec.dtype.name,
        zeros=spec.zeros,
        activation=activation.kind,
        limits=activation.limits,
        gated=activation.gated,
        **fields,
    )


def run_gemm(
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
    batch_invariant: bool = False,
    order: ActivationOrder | None = None,
    constants: tuple[int, ...] | None = None,
) -> tuple[Array, PreparedGemm | None]:
    """Compute y = activation(x @ W + bias) + residual; return y and the prepared GEMM, which can be launched again.

    The arguments are validated. With ``order``, x[..., order] is multiplied. ``constants`` is the result of
    `weight_pointers`, if all calls with the prepared GEMM pass the same tuple. The prepared GEMM is None on the CPU, if
    M = 0, or if an array had to be copied.
    """
    x, bias, residual, out = arrays.views(x=x, bias=bias, residual=residual, out=out)
    product = check.validate_product(
        x, weight.spec, bias=bias, activation=activation, residual=residual, out=out, dtype=dtype
    )
    if out is not None:
        overlap.validate_disjoint(out, **weight.tensors, bias=bias)
    check_choice(kernel, split_k, batch_invariant)
    index = weight.spec.device
    if index == HOST:
        x = x if order is None else x[..., order.columns]
        return reference.matmul_validated(x, weight, product, bias, residual, out, batch_invariant), None
    import cupy

    with placement.use_device(index):
        if x.size == 0:
            return cupy.empty(product.shape, x.dtype) if out is None else out, None
        # A gather before the GEMM reads rows of any alignment, unlike the GEMM itself.
        is_readable = arrays.has_readable_rows(x) if order is None else arrays.row_stride(x) is not None
        source = x if is_readable else cupy.array(x, order="C")
        added = residual if residual is None or arrays.row_stride(residual) is not None else residual.copy(order="C")
        target = out if out is not None and arrays.row_stride(out) is not None else None
        how = kernel, split_k, constants, False, batch_invariant, order
        pointers = weight_pointers(weight, bias, order) if constants is None else constants
        prepared = PreparedGemm(source, weight, product, bias, added, target, *how)
        y = prepared.run(source, added, target, pointers)
        if y is None:  # `out` overlaps an array, so compute y apart and copy it
            into_new = PreparedGemm(source, weight, product, bias, added, None, *how)
            y = into_new.run(source, added, None, pointers)
        is_direct = source is x and added is residual and target is out
        return arrays.deliver(y, out), prepared if is_direct else None


def keep(cache: dict[Any, PreparedGemm], key: Any, prepared: PreparedGemm, limit: int) -> None:
    """Add a prepared GEMM to a cache under ``key``, its array layouts; clear a cache of ``limit`` entries first."""
    if len(cache) >= limit:
        cache.clear()
    cache[key] = prepared


def check_choice(kernel: str | None, split_k: int | None, batch_invariant: bool) -> None:
    """Raise TypeError or ValueError if an option that determines the choice of a kernel is not valid.

    The check is also made for arrays on the CPU, for which no kernel is chosen.
    """
    if check_scalar.validate_flag(batch_invariant, "batch_invariant"):
        for name, value in (("kernel", kernel), ("split_k", split_k)):
            if value is not None:
                raise ValueError(f"{name}: expected None with batch_invariant=True, got {value!r}")
    if kernel is not None and not (isinstance(kernel, str) and kernel in FAMILIES_OF[Problem]):
        raise ValueError(f"kernel: expected one of {', '.join(FAMILIES_OF[Problem])}, got {kernel!r}")
    if split_k is not None and (count := check_scalar.validate_integer(split_k, "split_k", 1)) & (count - 1):
        raise ValueError(f"split_k: expected a power of two, got {split_k!r}")
