# SPDX-License-Identifier: Apache-2.0
"""The validation of a weight's activation order, and the permutation of the columns of x [..., K] to that order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq import check
from cupy_awq.check import HOST, Array
from cupy_awq.kernels.gemm.gather_columns import ColumnGather
from cupy_awq.kernels.gemm.gemm_sm90 import GATHER_MAX_K
from cupy_awq.ops.chosen_kernel import choose_kernel
from cupy_awq.packing import namespace
from cupy_awq.runtime import arrays, placement, workspace
from cupy_awq.runtime.launcher import Launcher


@dataclass(frozen=True)
class ActivationOrder:
    """A validated activation order of a layer: x[..., columns] is multiplied by the weight.

    Attributes:
        columns: int32 [K], a permutation of 0 to K - 1, contiguous.
        short: ``columns`` as uint16, for GEMM kernels that gather the columns of x; None on the CPU and for large K.
    """

    columns: Array
    short: Array | None

    @classmethod
    def of(cls, order: Array, k: int, index: int) -> ActivationOrder:
        """Validate and copy ``order``; see `check_order`.

        Kernels may read ``short`` before the preceding kernel finishes (PDL), so the stream must be synchronized before
        the first launch. Where kernels read it, the constructor of `AwqLinear` calls `repack` afterwards, which does.
        """
        columns = check_order(order, k, index)
        with placement.use_device(index):
            short = columns.astype(np.uint16) if index != HOST and k <= GATHER_MAX_K else None
        return cls(columns, short)


def check_order(order: Array, k: int, index: int) -> Array:
    """Return a contiguous copy of ``order``, a permutation of 0 to k - 1 on device ``index``.

    Kernels use the order as an index without bounds checks, so the validated array must not be shared with callers, who
    could modify it. On a GPU, the copy of the order to the host synchronizes.

    Raises:
        TypeError: the order is not an int32 array on device ``index``.
        ValueError: the shape is not [K], or the values are not a permutation.

    >>> check_order(np.array([1, 0, 2], np.int32), 3, HOST)
    array([1, 0, 2], dtype=int32)
    """
    check.validate_device(order, "order", index, "the weight")
    if order.dtype != check.INT32 or order.shape != (k,):
        error = TypeError if order.dtype != check.INT32 else ValueError
        raise error(f"order: expected int32 [K] = [{k}], got {check.describe(order)}")
    with placement.use_device(index):
        copy = namespace(order).array(order, order="C")
    values = copy if index == HOST else copy.get()
    counts = np.bincount(values[(values >= 0) & (values < k)], minlength=k)
    if (counts != 1).any():
        first = int(np.flatnonzero(counts != 1)[0])
        raise ValueError(f"order: expected a permutation of 0 to {k - 1}, got the index {first} {counts[first]} times")
    return copy


def gather_columns(x: Array, order: Array) -> Array:
    """Return x [..., K] with its columns in the order of ``order``, a result of `check_order` on the device of x.

    On a GPU the result is a scratch array, which the next call of this function on the stream overwrites: it needs no
    allocation, so a captured CUDA graph never refers to memory that is freed.

    >>> gather_columns(np.array([[5.0, 6.0, 7.0]]), np.array([1, 0, 2], np.int32))
    array([[6., 5., 7.]])
    """
    index = check.device_id(x, "x")
    if index == HOST:
        gathered: Array = x[..., order]
        return gathered
    import cupy

    with placement.use_device(index):
        source = x if arrays.row_stride(x) is not None else cupy.ascontiguousarray(x)
        if x.size == 0:
            return x
        stream = cupy.cuda.get_current_stream().ptr
        y = cupy.ndarray(x.shape, x.dtype, workspace.scratch_array(index, stream, x.nbytes).data)
        prepare_gather(source, index)((arrays.address(source), arrays.address(order), arrays.address(y)), stream)
    return y


def prepare_gather(x: Array, index: int) -> Launcher:
    """Return a launcher of the kernel ``gather_columns`` for arrays with the layout of x: rows are equally spaced.

    A call of the launcher takes the addresses of x, of the order and of y (contiguous, aligned to 32 bytes), and a
    stream of the current GPU, whose ordinal is ``index``.
    """
    m, k = arrays.count_rows(x), x.shape[-1]
    dtype = "float32" if x.dtype.itemsize == 4 else "float16"
    stride = arrays.row_stride(x) or 0
    problem = ColumnGather(m, k, dtype, stride, x_aligned=arrays.is_aligned(x))
    return choose_kernel(problem, index).launcher
