# SPDX-License-Identifier: Apache-2.0
"""`AwqLinear`: a linear layer with a quantized weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from cupy_awq import check, check_scalar, overlap
from cupy_awq.array_types import AnyActivation, ArrayT, CudaArray, LayerOptions
from cupy_awq.check import Array
from cupy_awq.gemm_layer import GemmLayer
from cupy_awq.kernels.gemm.layouts import WEIGHT_TILE_N
from cupy_awq.kernels.gemm.problem import Fusion, NextWeight
from cupy_awq.ops import concatenation
from cupy_awq.ops import plan as planning
from cupy_awq.ops.gather_columns import ActivationOrder, gather_columns
from cupy_awq.ops.repack import RepackedWeight, repack
from cupy_awq.runtime import arrays, placement
from cupy_awq.weight import PackedWeight, check_packed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_awq.block_weight import BlockQuantizedWeight


class AwqLinear(GemmLayer):
    """A linear layer y = activation(x @ W + bias) with a `PackedWeight`, on the device of the weight.

    ``layer(x, out=None, residual=None, dtype=None)`` returns activation(x @ W + bias) + residual. For x [..., K] in
    float16, bfloat16 or float32, y is [..., N] in the dtype of x; with "swiglu" it has N/2 columns. The arguments have
    the same meaning as in `gemm`. Launches are cached: a call with the shapes, strides and dtypes of an earlier call
    skips validation and kernel selection. Threads and streams may share a layer.

    From sm_75 on the layer also stores the weight in the fragment layout, which the fastest kernels read, if K is a
    multiple of 64, and the group size is 16, 32, 64, K or a multiple of 128. There, a GEMM of 33 or more rows, and one
    of any number of rows with offsets instead of zero points, may round each dequantized weight to the dtype of x, as
    `dequantize` does.

    Args:
        weight: the weight [K, N], on the CPU or on a GPU.
        bias: float16, bfloat16 or float32 [N] on the device of the weight, or None.
        activation: None, "relu", "relu6", (low, high), "silu", "gelu" or "swiglu", as in `gemm`.
        x_dtype: None to multiply x as it is, or the dtype to which each call quantizes x, to use 8-bit tensor cores.
            With "int8" (W4A8), each group of a row of x has one scale, and an element of y changes by at most the sum
            over the groups of max|x| / 254 * sum|W|; see `linear_int8`. With "fp8" (e4m3), each row of x has one scale,
            and an element of y changes by at most the sum over K of |x| |W| / 17, and by more where |x| is below
            1/28672 of its row's maximum; see `linear_fp8`, also for the GPUs that support it. Such a layer supports
            the activations None, "relu", "relu6" and (low, high), and no residual. With "auto", a call quantizes x to
            int8 if the cost models expect this to be faster than multiplying x as it is, and if ``residual`` and
            ``dtype`` are None. Except on sm_90, kernels multiply 16-bit and 8-bit x by one repacked weight, if groups
            have a multiple of 128 rows, or all; else the layer stores the layouts of both ways. With one weight, the
            first call with x in float32 converts it, which is impossible during stream capture.
        keep_weight: False to free the AWQ tensors after repacking, which halves the memory of the layer. The layer then
            accepts x only in float16 and, from sm_80 on, bfloat16, and cannot be copied, pickled or concatenated. A
            layer that needs another layout than the repacked one always keeps its AWQ tensors.
        batch_invariant: True to make the bits of each row of y independent of the other rows of x and of their number,
            also in a `plan`. The order of additions along K is then the same for every M; it depends only on K, N, the
            group size, the dtypes and the GPU. From sm_75 on, a GEMM of any M may then round each dequantized weight
            to the dtype of x. Not supported with an ``x_dtype``.
        order: the permutation of x for a weight whose rows are sorted by group (activation order, GPTQ's ``desc_act``),
            int32 [K] on the device of the weight: y = activation(x[..., order] @ W + bias). None for no permutation.
            On a GPU, some GEMMs of up to 4 rows gather the columns of x; for others, one additional launch does.

    Raises:
        TypeError, ValueError: an argument does not fit the weight; in a call: x, out, residual or dtype.
        MemoryError: the GPU memory is exhausted, at construction or in a call; the layer can still be used.

    >>> import numpy as np
    >>> import cupy_awq
    >>> weight = cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16)
    >>> layer = cupy_awq.AwqLinear(weight, bias=np.full(16, 6, np.float32), activation="relu6")
    >>> layer(np.array([[1] * 32, [-1] * 32], np.float16))[:, 0]
    array([6., 5.], dtype=float16)
    """

    __slots__ = ("_float32_weight", "_prefers_int8", "_quantized", "_splits", "_weight", "_x_dtype")

    def __init__(
        self,
        weight: PackedWeight,
        /,
        *,
        bias: Array | None = None,
        activation: AnyActivation = None,
        x_dtype: str | None = None,
        keep_weight: bool = True,
        batch_invariant: bool = False,
        order: Array | None = None,
    ) -> None:
        check_packed(weight)
        bias, order = arrays.views(bias=bias, order=order)
        spec = weight.spec
        if bias is not None:
            check.validate_bias(bias, spec.n, None, spec.device)
        form = check.validate_activation(activation)
        self._splits: tuple[int, ...] = (check.out_features(spec.n, form),)
        self._weight = weight
        self._bias = bias
        self._order = None if order is None else ActivationOrder.of(order, spec.k, spec.device)
        self._activation: Any = activation
        if x_dtype is not None and not (isinstance(x_dtype, str) and x_dtype in ("int8", "fp8", "auto")):
            raise ValueError(f"x_dtype: expected None, 'int8', 'fp8' or 'auto', got {x_dtype!r}")
        self._x_dtype = x_dtype
        self._batch_invariant = check_scalar.validate_flag(batch_invariant, "batch_invariant")
        if x_dtype is not None and batch_invariant:
            raise ValueError(f"batch_invariant: expected False for a layer with x_dtype={x_dtype!r}, got True")
        self._quantized: BlockQuantizedWeight | RepackedWeight | None = None
        self._float32_weight: BlockQuantizedWeight | None = None
        is_shared = False
        if x_dtype is not None:
            from cupy_awq.ops.repacked_linear import multiplies_repacked

            is_shared = multiplies_repacked(spec, self._quantized_dtype)
        self._operand = repack(weight) if is_shared or x_dtype in (None, "auto") else weight
        # Kernels for the fragment layout need gate and up to be whole numbers of weight tiles; else the AWQ tensors
        # are needed.
        has_whole_tiles = not form.gated or spec.n % (2 * WEIGHT_TILE_N) == 0
        frees_weight = not check_scalar.validate_flag(keep_weight, "keep_weight")
        may_free = (x_dtype is None or is_shared) and has_whole_tiles
        if frees_weight and may_free and isinstance(self._operand, RepackedWeight):
            self._weight = self._operand = self._operand.without_original()
        if x_dtype is not None:
            self._quantize(is_shared)
        self._prepare()

    def _quantize(self, is_shared: bool) -> None:
        """Prepare the weight for x that is quantized; with ``is_shared``, this is the repacked weight."""
        from cupy_awq.ops import quantized_linear

        if is_shared and isinstance(self._operand, RepackedWeight):
            quantized_linear.check_activation(self._activation)
            self._quantized = self._operand
        else:
            self._quantized = quantized_linear.convert_weight(self._weight, self._activation, self._quantized_dtype)
        if self._x_dtype == "auto":
            arguments = self._operand, self._quantized, self._bias, self._activation
            self._prefers_int8 = quantized_linear.int8_preference(*arguments)

    @classmethod
    def concatenate(
        cls,
        parts: Sequence[AwqLinear | PackedWeight],
        /,
        *,
        activation: AnyActivation = None,
        x_dtype: str | None = None,
        keep_weight: bool = True,
        batch_invariant: bool = False,
    ) -> AwqLinear:
        """Concatenate layers that share x, such as the query, key and value projections of attention, into one layer.

        The weights and biases are copied and concatenated along N; a missing bias counts as zeros. `split` splits y
        into the results of the parts. The parts [gate, up] with ``activation="swiglu"`` become a gated layer.

        Args:
            parts: weights, or layers without activation and x_dtype. All must have the same K, group size, dtype, form
                of zero points, device and `order`, which the new layer also has.
            activation, x_dtype, keep_weight, batch_invariant: the settings of the new layer, as in `AwqLinear`.

        Raises:
            TypeError: a part is neither a layer nor a weight.
            ValueError: there are no parts, the parts differ, or the weight of a layer is freed (``keep_weight=False``).

        >>> import numpy as np
        >>> import cupy_awq
        >>> q, k = (cupy_awq.quantize(np.eye(32, n, dtype=np.float32), group_size=16) for n in (16, 8))
        >>> layer = AwqLinear.concatenate([q, k])
        >>> layer.shape, layer.splits
        ((32, 24), (16, 8))
        >>> [y.shape for y in layer.split(layer(np.ones((2, 32), np.float16)))]
        [(2, 16), (2, 8)]
        """
        try:
            parts = list(parts)
        except TypeError:
            raise TypeError(
                f"parts: expected a sequence of layers or weights, got {check_scalar.shorten(parts)}"
            ) from None
        if not parts:
            raise ValueError("parts: expected at least one layer or weight, got none")
        layers = [part if isinstance(part, AwqLinear) else None for part in parts]
        weights = [part.weight if isinstance(part, AwqLinear) else part for part in parts]
        for i, weight in enumerate(weights):
            if not isinstance(weight, PackedWeight):
                raise TypeError(f"parts[{i}]: expected an AwqLinear or a PackedWeight, got {type(weight).__name__}")
        first = concatenation.common_spec(weights)
        for i, layer in enumerate(layers):
            if layer is None:
                continue
            if layer.activation is not None:
                raise ValueError(f"parts[{i}]: expected a layer without an activation, got {layer.activation!r}")
            if layer.x_dtype is not None:
                raise ValueError(f"parts[{i}]: expected a layer without an x_dtype, got {layer.x_dtype!r}")
        order = concatenation.common_order([None if layer is None else layer.order for layer in layers])
        with placement.use_device(first.device):
            qweight, scales = (
                concatenation.joined([getattr(w, name) for w in weights]) for name in ("qweight", "scales")
            )
            qzeros = None if first.zeros == "symmetric" else concatenation.joined([w.qzeros for w in weights])
            bias = concatenation.joined_bias(weights, [None if layer is None else layer.bias for layer in layers])
            options: dict[str, Any] = {"activation": activation, "x_dtype": x_dtype, "keep_weight": keep_weight}
            options |= {"order": order, "batch_invariant": batch_invariant}
            whole = cls(PackedWeight(qweight, scales, qzeros), bias=bias, **options)
        if whole.splits[0] == whole.shape[1]:
            whole._splits = tuple(weight.shape[1] for weight in weights)
        return whole

    @property
    def weight(self) -> PackedWeight:
        """The weight [K, N]. Raises ValueError if the weight is freed (``keep_weight=False``)."""
        if isinstance(self._weight, RepackedWeight):
            raise ValueError(
                "weight: expected a layer with keep_weight=True, got one with keep_weight=False, whose weight is freed"
            )
        return self._weight

    @property
    def x_dtype(self) -> str | None:
        """The dtype to which calls quantize x, "int8" or "fp8"; "auto"; or None if x is not quantized."""
        return self._x_dtype

    @property
    def _quantized_dtype(self) -> str:
        """The dtype to which calls that quantize x do so, "int8" or "fp8"."""
        return "fp8" if self._x_dtype == "fp8" else "int8"

    @property
    def order(self) -> Array | None:
        """The permutation of x, y = x[..., order] @ W, int32 [K]; None without one. Do not modify the array."""
        return None if self._order is None else self._order.columns

    @property
    def splits(self) -> tuple[int, ...]:
        """The number of columns of y for each part of a concatenated layer; a layer of one part has one entry."""
        return self._splits

    def split(self, y: Array, /) -> list[Array]:
        """Split y [..., sum(splits)] into views, one for each part of a concatenated layer.

        Raises:
            TypeError: y is not an array.
            ValueError: the number of columns of y is not the sum of `splits`.

        >>> import numpy as np
        >>> import cupy_awq
        >>> weights = [cupy_awq.quantize(np.eye(32, n, dtype=np.float32), group_size=16) for n in (16, 8)]
        >>> [y.shape for y in AwqLinear.concatenate(weights).split(np.zeros((2, 24)))]
        [(2, 16), (2, 8)]
        """
        check.device_id(y, "y")
        if not y.shape or y.shape[-1] != sum(self._splits):
            raise ValueError(f"y: expected [..., {sum(self._splits)}], got {check.describe(y)}")
        ends = np.cumsum(self._splits).tolist()
        return [y[..., end - size : end] for size, end in zip(self._splits, ends, strict=True)]

    @overload
    def __call__(self, x: ArrayT, /, **options: Unpack[LayerOptions]) -> ArrayT: ...
    @overload
    def __call__(self, x: CudaArray, /, **options: Unpack[LayerOptions]) -> Array: ...
    def __call__(
        self, x: Array, /, *, out: Array | None = None, residual: Array | None = None, dtype: Any = None
    ) -> Array:
        is_plain = residual is None and dtype is None
        if self._x_dtype is not None and (self._x_dtype != "auto" or (is_plain and self._prefers_int8(x))):
            return self._multiply_quantized(x, out, residual, dtype)
        return super().__call__(x, out=out, residual=residual, dtype=dtype)

    def _multiply_quantized(self, x: Array, out: Array | None, residual: Array | None, dtype: Any) -> Array:
        """Quantize x to ``x_dtype``, multiply it by the weight, and return y (``out``, unless ``out`` is None)."""
        from cupy_awq.ops.quantized_linear import convert_weight, linear_fp8, linear_int8
        from cupy_awq.ops.repacked_linear import linear_repacked

        for name, value in (("residual", residual), ("dtype", dtype)):
            if value is not None:
                got = type(value).__name__ if name == "residual" else repr(value)
                raise ValueError(f"{name}: expected None for a layer with x_dtype={self._x_dtype!r}, got {got}")
        x, out = arrays.views(x=x, out=out)
        spec = self._weight.spec
        check.validate_x(x, spec.k, device=spec.device)
        if self._order is not None:
            x = gather_columns(x, self._order.columns)
        shape = *x.shape[:-1], spec.n
        if out is not None:
            check.validate_out(out, shape, x.dtype, spec.device)
            overlap.validate_disjoint(out, **self._weight.tensors, bias=self._bias)
        in_place = out is not None and out.flags.c_contiguous
        target = out.reshape(-1, spec.n) if in_place else None
        rows = x.reshape(-1, spec.k)
        x_dtype = self._quantized_dtype
        weight: Any = self._quantized
        options: dict[str, Any] = {"bias": self._bias, "activation": self._activation, "out": target}
        if isinstance(weight, RepackedWeight) and x.dtype == np.float32:  # not multiplied by the repacked weight
            if self._float32_weight is None:
                self._float32_weight = convert_weight(self.weight, self._activation, x_dtype)
            weight = self._float32_weight
        if isinstance(weight, RepackedWeight):
            y = linear_repacked(rows, weight, x_dtype, **options)
        else:
            y = (linear_fp8 if x_dtype == "fp8" else linear_int8)(rows, weight, **options)
        y = y.reshape(shape)
        return out if in_place else arrays.deliver(y, out)

    def plan(
        self,
        x: Array | tuple[int, ...],
        /,
        *,
        residual: Array | tuple[int, ...] | None = None,
        out: Array | tuple[int, ...] | None = None,
        dtype: Any = None,
    ) -> planning.Plan:
        if self._x_dtype is not None:
            raise ValueError(
                f"x_dtype: expected None for a plan, which is one launch, got {self._x_dtype!r}, which takes two"
            )
        return super().plan(x, residual=residual, out=out, dtype=dtype)

    def plan_fused(self, m: int, fusion: Fusion, /, *, dtype: Any = "float16") -> planning.FusedPlan | None:
        """Return a plan of this layer's GEMM that is fused with the residual add or the RMSNorm of a decoder layer.

        Returns None if no kernel supports the fusion: the GPU has no tensor cores, m is too large, or the shape or
        the activation of the layer is not supported. Also returns None for a batch-invariant layer, because a fused
        GEMM rounds intermediate results differently. The columns of the plan's x are in the layer's `order`.

        Args:
            m: the number of rows of x.
            fusion: the operation to fuse into the GEMM.
            dtype: the dtype of x and y, float16 or bfloat16.

        >>> import numpy as np
        >>> import cupy_awq
        >>> from cupy_awq.kernels.gemm.problem import Fusion
        >>> layer = AwqLinear(cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16))
        >>> layer.plan_fused(1, Fusion("add_to_stream")) is None  # on the CPU
        True
        """
        m = check_scalar.validate_integer(m, "m", 1)
        element, form = check.validate_float_dtype(dtype), check.validate_activation(self._activation)
        if self._batch_invariant:
            return None
        return planning.plan_fused(self._operand, self._bias, form, m, element, fusion)

    def plan_prefetch(self) -> tuple[Array | None, NextWeight]:
        """Return this layer's repacked weight, and the part that an earlier kernel of a decode step prefetches.

        The result is (None, `NO_PREFETCH`) if kernels on the layer's device do not prefetch such a weight.

        >>> import numpy as np
        >>> import cupy_awq
        >>> layer = AwqLinear(cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16))
        >>> layer.plan_prefetch()
        (None, NextWeight(nbytes=0, half_offset=0))
        """
        return planning.plan_prefetch(self._operand, gated=check.validate_activation(self._activation).gated)

    def kernel_for(self, m: int, dtype: Any = "float16") -> str:
        is_quantized = self._x_dtype in ("int8", "fp8") and self._weight.spec.device != check.HOST
        name = super().kernel_for(m, dtype)
        return f"gemm_{self._x_dtype}" if is_quantized else name

    def __repr__(self) -> str:
        activation = f", activation={self._activation!r}" if self._activation is not None else ""
        x_dtype = f", x_dtype={self.x_dtype!r}" if self.x_dtype else ""
        invariant = ", batch_invariant=True" if self._batch_invariant else ""
        parts = f"{', bias' if self._bias is not None else ''}{', order' if self._order is not None else ''}"
        return f"AwqLinear({self._weight}{parts}{activation}{x_dtype}{invariant})"

    def __reduce__(self) -> Any:
        settings = {"activation": self._activation, "x_dtype": self.x_dtype, "batch_invariant": self._batch_invariant}
        return _restored, (self.weight, self._bias, settings | {"order": self.order}, self._splits)


def _restored(weight: PackedWeight, bias: Array | None, settings: dict[str, Any], splits: tuple[int, ...]) -> AwqLinear:
    """Recreate a copied or unpickled layer, without cached launches, which belong to one process and device."""
    layer = AwqLinear(weight, bias=bias, **settings)
    layer._splits = splits
    return layer
