# SPDX-License-Identifier: Apache-2.0
"""`AwqLinear`: a linear layer over a quantized weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_awq import check
from cupy_awq.check import Array
from cupy_awq.kernels import select
from cupy_awq.kernels.problem import Fusion
from cupy_awq.kernels.repack import RECORD_COLUMNS
from cupy_awq.ops import gemm_launch
from cupy_awq.ops import plan as planning
from cupy_awq.ops.repack import RepackedWeight, repack
from cupy_awq.packing import namespace
from cupy_awq.runtime import arrays, device, placement
from cupy_awq.weight import PackedWeight, check_packed

if TYPE_CHECKING:
    from cupy_awq.block_weight import BlockQuantizedWeight

MAX_LAUNCHES = 256
"""Layouts of x and out whose launches a layer keeps ready; a pipeline meets a few, one for each number of rows."""


class AwqLinear:
    """y = activation(x @ W + bias) for a `PackedWeight`, on the device where the weight lies.

    On a Hopper GPU the layer makes a second copy of the weight, in the order in which its tensor cores take it, and
    can do with that one alone. There products of 33 and more rows may round each weight to x's dtype before they
    multiply, as `dequantize` does.

    ``layer(x, out=None, residual=None, dtype=None)`` takes x [..., K] in float16, bfloat16 or float32 and gives
    activation(x @ W + bias) + residual, [..., N] of x's dtype; all as in `gemm`. A layout of x and out that was met
    before is launched without further checks. Layers may be called from several threads and on several streams at once.

    Args:
        weight: the weight [K, N], on the CPU or on a GPU.
        bias: [N] float16, bfloat16 or float32, on the same device; or None.
        activation: as in `gemm`: None, "relu", "relu6", (low, high), "silu", "gelu" or "swiglu".
        x_dtype: "int8" to multiply integers (W4A8): each group of a row of x is quantized to 127 steps on either
            side at every call, which changes an element of y by at most the sum over groups of max|x| / 254 times the
            sum of |W|; see `cupy_awq.linear_int8`. Such a layer takes the activations None, "relu", "relu6" and
            (low, high), and no residual. "fp8" to multiply floats of 8 bits (e4m3) in the same way: each element of x
            is rounded to 4 bits of significand, which changes an element of y by at most the sum over K of |x| |W| / 17
            and more where x is less than 1/28672 of its row's largest; see `cupy_awq.linear_fp8`, also for the
            GPUs that have it. By default x is multiplied as it is.
        keep_weight: False to let go of ``weight`` where the layer has a copy of its own: it then takes half the memory,
            and only x of float16 or bfloat16. It cannot be copied, pickled or be a part of `concatenate`. A layer with
            ``x_dtype`` keeps its weight.

    Raises:
        TypeError, ValueError: a bias or an activation that does not fit the weight, or at a call an x, out or residual;
            the message names it.

    >>> import numpy as np
    >>> import cupy_awq
    >>> weight = cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16)
    >>> layer = cupy_awq.AwqLinear(weight, bias=np.full(16, 6, np.float32), activation="relu6")
    >>> layer(np.array([[1] * 32, [-1] * 32], np.float16))[:, 0]
    array([6., 5.], dtype=float16)
    """

    __slots__ = (
        "_activation",
        "_bias",
        "_fixed",
        "_launches",
        "_operand",
        "_quantized",
        "_splits",
        "_weight",
        "_x_dtype",
    )

    def __init__(
        self,
        weight: PackedWeight,
        /,
        *,
        bias: Array | None = None,
        activation: Any = None,
        x_dtype: str | None = None,
        keep_weight: bool = True,
    ) -> None:
        check_packed(weight)
        (bias,) = arrays.views(bias=bias)
        facts = weight.spec
        if bias is not None:
            check.bias(bias, facts.n, None, facts.device)
        form = check.activation(activation)
        self._splits: tuple[int, ...] = (check.out_features(facts.n, form),)
        self._weight = weight
        self._bias = bias
        self._activation = activation
        self._launches: dict[Any, gemm_launch.GemmLaunch] = {}
        if x_dtype not in (None, "int8", "fp8"):
            raise ValueError(f"x_dtype: expected None, 'int8' or 'fp8', got {x_dtype!r}")
        self._x_dtype = x_dtype
        self._quantized = None if x_dtype is None else _for_quantized(weight, activation, x_dtype)
        self._operand = repack(weight) if x_dtype is None else weight
        whole_records = not form.gated or facts.n % (2 * RECORD_COLUMNS) == 0
        if not keep_weight and isinstance(self._operand, RepackedWeight) and whole_records:
            self._weight = self._operand = self._operand.alone()
        self._fixed = gemm_launch.weight_pointers(self._operand, bias) if facts.device != check.HOST else ()

    @classmethod
    def concatenate(
        cls,
        parts: Sequence[AwqLinear | PackedWeight],
        /,
        *,
        activation: Any = None,
        x_dtype: str | None = None,
        keep_weight: bool = True,
    ) -> AwqLinear:
        """One layer that does the work of several which share x: the query, key and value of an attention, say.

        Its weight is a copy with the columns of all parts, its bias holds theirs (zeros for a part that has none), and
        `split` takes y apart. [gate, up] with ``activation="swiglu"`` is a gated layer.

        Raises:
            TypeError, ValueError: no parts; parts that differ in K, group size, dtype, form of zeros or device; parts
                with an activation or x_dtype of their own; a layer that has let go of its weight.

        >>> import numpy as np
        >>> import cupy_awq
        >>> q, k = (cupy_awq.quantize(np.eye(32, n, dtype=np.float32), group_size=16) for n in (16, 8))
        >>> layer = AwqLinear.concatenate([q, k])
        >>> layer.shape, layer.splits
        ((32, 24), (16, 8))
        >>> [y.shape for y in layer.split(layer(np.ones((2, 32), np.float16)))]
        [(2, 16), (2, 8)]
        """
        parts = list(parts)
        if not parts:
            raise ValueError("parts: expected at least one layer or weight, got none")
        layers = [part if isinstance(part, AwqLinear) else None for part in parts]
        weights = [part.weight if isinstance(part, AwqLinear) else part for part in parts]
        for weight in weights:
            check_packed(weight)
        first = weights[0].spec
        for i, (layer, weight) in enumerate(zip(layers, weights, strict=True)):
            for name in ("k", "group_size", "dtype", "zeros", "device"):
                expected, found = getattr(first, name), getattr(weight.spec, name)
                if found != expected:
                    raise ValueError(f"parts[{i}]: expected {name}={expected} as in parts[0], got {found}")
            if layer is None:
                continue
            if layer.activation is not None:
                raise ValueError(f"parts[{i}]: expected a layer without an activation, got {layer.activation!r}")
            if layer.x_dtype is not None:
                raise ValueError(f"parts[{i}]: expected a layer without an x_dtype, got {layer.x_dtype!r}")
        with placement.use_device(first.device):
            qweight, scales = (_joined([getattr(w, name) for w in weights]) for name in ("qweight", "scales"))
            qzeros = None if first.zeros == "symmetric" else _joined([w.qzeros for w in weights])
            bias = _joined_bias(weights, [None if layer is None else layer.bias for layer in layers])
            options = {"activation": activation, "x_dtype": x_dtype, "keep_weight": keep_weight}
            whole = cls(PackedWeight(qweight, scales, qzeros), bias=bias, **options)
        if len(whole.splits) == 1 and whole.splits[0] == whole.shape[1]:
            whole._splits = tuple(weight.shape[1] for weight in weights)
        return whole

    @property
    def weight(self) -> PackedWeight:
        """Raises ValueError if the layer has let go of it."""
        if isinstance(self._weight, RepackedWeight):
            raise ValueError(
                "weight: expected a layer with keep_weight=True, got one with keep_weight=False, whose weight is freed"
            )
        return self._weight

    @property
    def bias(self) -> Array | None:
        return self._bias

    @property
    def activation(self) -> Any:
        """As it was given."""
        return self._activation

    @property
    def x_dtype(self) -> str | None:
        """What x is quantized to, "int8" or "fp8", or None."""
        return self._x_dtype

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N) of the weight; a gated layer's y has N/2 columns."""
        return self._weight.shape

    @property
    def group_size(self) -> int:
        """Rows of W that share a scale."""
        return self._weight.group_size

    @property
    def splits(self) -> tuple[int, ...]:
        """Columns of y that belong to each part of a concatenated layer; one number for any other layer."""
        return self._splits

    def split(self, y: Array, /) -> list[Array]:
        """The parts of a result [..., N], as views.

        Raises ValueError if y does not have the columns of a result.
        """
        if y.shape[-1] != sum(self._splits):
            raise ValueError(f"y: expected [..., {sum(self._splits)}], got {check.describe(y)}")
        ends = np.cumsum(self._splits).tolist()
        return [y[..., end - size : end] for size, end in zip(self._splits, ends, strict=True)]

    def __call__(
        self, x: Array, /, *, out: Array | None = None, residual: Array | None = None, dtype: Any = None
    ) -> Array:
        if self._quantized is not None:
            return self._multiply_quantized(self._quantized, x, out, residual, dtype)
        # Layouts hold all that checks and the choice of a kernel depend on: what was met needs neither.
        key: Any
        try:
            key = arrays.layout(x), arrays.layout(out), arrays.layout(residual), dtype
            launch = self._launches.get(key)
        except (AttributeError, ValueError, TypeError):  # arrays of other libraries, or a dtype that is none
            key = launch = None
        if launch is not None:
            y = launch.run(x, residual, out, self._fixed)
            if y is not None:
                return y
        options = {"bias": self._bias, "activation": self._activation, "residual": residual, "out": out, "dtype": dtype}
        y, launch = gemm_launch.run_gemm(x, self._operand, **options)
        if launch is not None and key is not None:
            gemm_launch.cache_launch(self._launches, key, launch, MAX_LAUNCHES)
        return y

    def _multiply_quantized(
        self, weight: BlockQuantizedWeight, x: Array, out: Array | None, residual: Array | None, dtype: Any
    ) -> Array:
        from cupy_awq.ops.quantized_linear import linear_fp8, linear_int8

        for name, value in (("residual", residual), ("dtype", dtype)):
            if value is not None:
                got = type(value).__name__ if name == "residual" else repr(value)
                raise ValueError(f"{name}: expected None for a layer with x_dtype={self._x_dtype!r}, got {got}")
        x, out = arrays.views(x=x, out=out)
        facts = self._weight.spec
        check.x(x, facts.k, device=facts.device)
        shape = *x.shape[:-1], facts.n
        if out is not None:
            check.out(out, shape, x.dtype, facts.device)
        in_place = out is not None and out.flags.c_contiguous
        target = out.reshape(-1, facts.n) if in_place else None
        rows = x.reshape(-1, facts.k)
        linear = linear_int8 if self._x_dtype == "int8" else linear_fp8
        y = linear(rows, weight, bias=self._bias, activation=self._activation, out=target).reshape(shape)
        if out is None:
            return y
        if not in_place:
            out[...] = y
        return out

    def plan(
        self,
        x: Array | tuple[int, ...],
        /,
        *,
        residual: Array | tuple[int, ...] | None = None,
        out: Array | tuple[int, ...] | None = None,
        dtype: Any = None,
    ) -> planning.Plan:
        """A `Plan` of this layer's product, with a workspace of its own; arguments and errors as in `cupy_awq.plan`.

        >>> import numpy as np
        >>> import cupy_awq
        >>> layer = AwqLinear(cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16))
        >>> layer.plan((2, 32)).shape
        (2, 16)
        """
        if self._x_dtype is not None:
            raise ValueError(
                f"x_dtype: expected None for a plan, which is one launch, got {self._x_dtype!r}, which takes two"
            )
        options = {"bias": self._bias, "activation": self._activation, "dtype": dtype}
        return planning.plan(x, self._operand, residual=residual, out=out, **options)

    def fused_plan(self, m: int, fusion: Fusion, /, *, dtype: Any = "float16") -> planning.FusedPlan | None:
        """Return the plan of this layer's GEMM with a decoder's residual add or RMSNorm fused into it.

        None if no kernel can perform that: the layer is on the CPU or on another GPU than Hopper, m is too large, or
        the layer's shape or activation does not allow it.

        Args:
            m: the rows of x.
            fusion: the fused operation.
            dtype: the dtype of x and y, float16 or bfloat16.

        >>> import numpy as np
        >>> import cupy_awq
        >>> from cupy_awq.kernels.problem import Fusion
        >>> layer = AwqLinear(cupy_awq.quantize(np.eye(32, 16, dtype=np.float32), group_size=16))
        >>> layer.fused_plan(1, Fusion("add_to_stream")) is None  # on the CPU
        True
        """
        element, form = check.float_dtype(dtype), check.activation(self._activation)
        return planning.plan_fused(self._operand, self._bias, form, m, element, fusion)

    def kernel_for(self, m: int, dtype: Any = "float16") -> str:
        """The name of the kernel that makes ``m`` rows of contiguous x; "numpy" on the CPU."""
        index = self._weight.spec.device
        if index == check.HOST:
            return "numpy"
        if self._x_dtype is not None:
            return f"gemm_{self._x_dtype}"
        element, form = check.float_dtype(dtype), check.activation(self._activation)
        bias_dtype = None if self._bias is None else self._bias.dtype.name
        problem = gemm_launch.gemm_problem(self._operand, form, m, element, bias_dtype=bias_dtype)
        return select.choose(problem, device.of(index)).name

    def __repr__(self) -> str:
        activation = f", activation={self._activation!r}" if self._activation is not None else ""
        x_dtype = f", x_dtype={self.x_dtype!r}" if self.x_dtype else ""
        return f"AwqLinear({self._weight}{', bias' if self._bias is not None else ''}{activation}{x_dtype})"

    def __reduce__(self) -> Any:
        return _restored, (self.weight, self._bias, self._activation, self.x_dtype, self._splits)


def _restored(
    weight: PackedWeight, bias: Array | None, activation: Any, x_dtype: str | None, splits: tuple[int, ...]
) -> AwqLinear:
    """A copied or unpickled layer; its launches belong to a device and a process."""
    layer = AwqLinear(weight, bias=bias, activation=activation, x_dtype=x_dtype)
    layer._splits = splits
    return layer


def _for_quantized(weight: PackedWeight, activation: Any, x_dtype: str) -> BlockQuantizedWeight:
    """The weight for `linear_int8` or `linear_fp8`, which must know the activation."""
    from cupy_awq.block_weight import from_packed  # imported late, because few programs need it
    from cupy_awq.ops.quantized_linear import check_layer

    block_weight = from_packed(weight)
    check_layer(block_weight, activation, x_dtype)
    return block_weight


def _joined(arrays: Sequence[Array]) -> Array:
    """Arrays side by side."""
    return namespace(arrays[0]).concatenate(arrays, axis=-1)


def _joined_bias(weights: Sequence[PackedWeight], biases: Sequence[Array | None]) -> Array | None:
    """The bias of all columns: of the type that all biases have, else float32, which holds each of them."""
    types = {bias.dtype for bias in biases if bias is not None}
    if not types:
        return None
    dtype = types.pop() if len(types) == 1 else check.FLOAT32
    columns = [weight.shape[1] for weight in weights]
    whole = namespace(weights[0].qweight).zeros(sum(columns), dtype)
    for bias, size, end in zip(biases, columns, np.cumsum(columns).tolist(), strict=True):
        if bias is not None:
            whole[end - size : end] = bias
    return whole
