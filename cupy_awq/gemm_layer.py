# SPDX-License-Identifier: Apache-2.0
"""`GemmLayer`: what `AwqLinear` and `Int8Linear` have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from cupy_awq import check, check_scalar
from cupy_awq.array_types import ArrayT, CudaArray, LayerOptions
from cupy_awq.check import Array
from cupy_awq.kernels import select
from cupy_awq.ops import plan as planning
from cupy_awq.ops.gather_columns import ActivationOrder
from cupy_awq.ops.prepared_gemm import PreparedGemm, gemm_problem, keep, run_gemm, weight_pointers
from cupy_awq.runtime import arrays, device
from cupy_awq.weight import PackedWeight

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_PREPARED = 256
"""The largest number of GEMMs that a layer caches, one for each set of shapes, strides and dtypes of arguments."""


class GemmLayer:
    """A layer y = activation(x @ W + bias) + residual whose calls cache their launches.

    A subclass sets the attributes: ``_operand``, the weight in the layout that kernels read; ``_bias``, ``_activation``
    and ``_batch_invariant`` as in `AwqLinear`; ``_order``, the activation order or None; and by `_prepare` the others.
    """

    __slots__ = ("_activation", "_batch_invariant", "_bias", "_operand", "_order", "_pointers", "_prepared")

    _operand: PackedWeight
    _bias: Array | None
    _activation: Any
    _batch_invariant: bool
    _order: ActivationOrder | None
    _pointers: tuple[int, ...]
    _prepared: dict[Any, PreparedGemm]

    def _prepare(self) -> None:
        """Create the cache of launches, and the addresses of weight, bias and order that every launch passes."""
        on_cpu = self._operand.spec.device == check.HOST
        self._pointers = () if on_cpu else weight_pointers(self._operand, self._bias, self._order)
        self._prepared = {}

    @property
    def bias(self) -> Array | None:
        """The bias [N], or None without a bias."""
        return self._bias

    @property
    def activation(self) -> Any:
        """The activation as it was passed: a name, (low, high) or None."""
        return self._activation

    @property
    def batch_invariant(self) -> bool:
        """True if the bits of each row of y are independent of the other rows of x and of their number."""
        return self._batch_invariant

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (K, N) of the weight; y of a gated layer has N/2 columns."""
        return self._operand.shape

    @property
    def group_size(self) -> int:
        """The number of rows of W per group; each column of a group has one scale."""
        return self._operand.group_size

    @overload
    def __call__(self, x: ArrayT, /, **options: Unpack[LayerOptions]) -> ArrayT: ...
    @overload
    def __call__(self, x: CudaArray, /, **options: Unpack[LayerOptions]) -> Array: ...
    def __call__(
        self, x: Array, /, *, out: Array | None = None, residual: Array | None = None, dtype: Any = None
    ) -> Array:
        # Validation and kernel selection depend only on shapes, strides and dtypes, so a cached launch needs neither.
        key: Any
        try:
            key = arrays.layout_key(x), arrays.layout_key(out), arrays.layout_key(residual), dtype
            prepared = self._prepared.get(key)
        except (AttributeError, ValueError, TypeError):  # arguments are not CuPy arrays, or dtype is not hashable
            key = prepared = None
        if prepared is not None:
            y = prepared.run(x, residual, out, self._pointers)
            if y is not None:
                return y
        options = {"bias": self._bias, "activation": self._activation, "residual": residual, "out": out, "dtype": dtype}
        options |= {"batch_invariant": self._batch_invariant, "order": self._order, "constants": self._pointers}
        y, prepared = run_gemm(x, self._operand, **options)
        if prepared is not None and key is not None:
            keep(self._prepared, key, prepared, MAX_PREPARED)
        return y

    def plan(
        self,
        x: Array | tuple[int, ...],
        /,
        *,
        residual: Array | tuple[int, ...] | None = None,
        out: Array | tuple[int, ...] | None = None,
        dtype: Any = None,
    ) -> planning.Plan:
        """Return a `Plan` of this layer for arguments of fixed shapes, strides and dtypes, with a workspace of its own.

        The arguments have the same meaning as in `cupy_awq.plan`.

        Raises:
            TypeError, ValueError: an argument does not fit the weight, or the layer has an ``x_dtype``.

        >>> import numpy as np
        >>> import cupy_awq
        >>> layer = cupy_awq.AwqLinear(cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16))
        >>> layer.plan((2, 32)).shape
        (2, 16)
        """
        options = {"bias": self._bias, "activation": self._activation, "dtype": dtype}
        options["batch_invariant"] = self._batch_invariant
        return planning.make_plan(x, self._operand, self._order, residual, out, **options)

    def kernel_for(self, m: int, dtype: Any = "float16") -> str:
        """Return the name of the kernel that runs for a contiguous x of ``m`` rows; "numpy" on the CPU.

        With ``x_dtype`` "int8" and "fp8", this is gemm_int8 and gemm_fp8; with "auto", the kernel for an x that is not
        quantized.

        Args:
            m: the number of rows of x, at least 1.
            dtype: the dtype of x.

        >>> import numpy as np
        >>> import cupy_awq
        >>> cupy_awq.AwqLinear(cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16)).kernel_for(8)
        'numpy'
        """
        m = check_scalar.validate_integer(m, "m", 1)
        element, form = check.validate_float_dtype(dtype), check.validate_activation(self._activation)
        index = self._operand.spec.device
        if index == check.HOST:
            return "numpy"
        bias_dtype = None if self._bias is None else self._bias.dtype.name
        fields = {"bias_dtype": bias_dtype, "batch_invariant": self._batch_invariant}
        problem = gemm_problem(self._operand, form, m, element, **fields)
        return select.choose(problem, device.of(index)).name
