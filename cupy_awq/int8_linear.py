# SPDX-License-Identifier: Apache-2.0
"""`Int8Linear`: a linear layer with an 8-bit weight and 16-bit activations."""

from __future__ import annotations

from typing import Any

from cupy_awq import block_check, check, check_scalar
from cupy_awq.array_types import AnyActivation
from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.gemm_layer import GemmLayer
from cupy_awq.ops.int8_weight import Int8Weight, pack_int8, synchronize
from cupy_awq.runtime import arrays


class Int8Linear(GemmLayer):
    """A linear layer y = activation(x @ W + bias) with 8-bit codes, on the device of the weight.

        W[k, n] = (codes[n, k] - 128) * scale[n, b] + offset[n, b],  b = k // block_size

    ``layer(x, out=None, residual=None)`` returns activation(x @ W + bias) + residual, as `AwqLinear` does: for x
    [..., K] of ``dtype``, y is [..., N], or [..., N/2] with "swiglu". x is not quantized; `linear_int8` multiplies the
    same weight by an x that is. Launches are cached, and `plan` returns a plan for CUDA graphs. Threads and streams may
    share a layer.

    Scales and offsets are rounded to ``dtype``. From sm_75 on, for bfloat16 from sm_80 on, tensor cores multiply x by
    each weight rounded once to ``dtype``, if K is a multiple of 64, N a multiple of 8 ("swiglu": of 64), and the block
    size 16, 32, 64, K or a multiple of 128. The layer then has a copy of the weight in the fragment layout, and the
    weight itself may be freed. Other weights are multiplied in float32 on CUDA cores.

    Args:
        weight: the weight [N, 1, 1, K] of 8 bits, on the CPU or on a GPU. One block per row is a scale per channel.
        bias: float16, bfloat16 or float32 [N] on the device of the weight, or None.
        activation: None, "relu", "relu6", (low, high), "silu", "gelu" or "swiglu", as in `gemm`.
        dtype: the dtype of x and y: float16, bfloat16 or float32.
        batch_invariant: True to make the bits of each row of y independent of the other rows of x and of their number.

    Raises:
        TypeError, ValueError: an argument does not fit the weight; in a call: x, out or residual.
        MemoryError: the GPU memory is exhausted, at construction or in a call; the layer can still be used.

    >>> import numpy as np
    >>> import cupy_awq
    >>> q = np.arange(-4, 4, dtype=np.int8).reshape(4, 2)  # [K, N]
    >>> codes = (q.T.astype(np.int16) + 128).astype(np.uint8)[:, None, None]
    >>> scale = np.array([[0.5], [0.25]], np.float16)
    >>> layer = cupy_awq.Int8Linear(cupy_awq.BlockQuantizedWeight(codes, scale, None, bits=8), activation="relu")
    >>> layer(np.array([[1, 1, 1, 1], [-1, 0, 0, 0]], np.float16))
    array([[0.  , 0.  ],
           [2.  , 0.75]], dtype=float16)
    """

    __slots__ = ()

    _operand: Int8Weight

    def __init__(
        self,
        weight: BlockQuantizedWeight,
        /,
        *,
        bias: Array | None = None,
        activation: AnyActivation = None,
        dtype: Any = "float16",
        batch_invariant: bool = False,
    ) -> None:
        weight = block_check.validate_block_weight(weight)
        n, *window, _ = weight.shape
        if weight.bits != 8 or window != [1, 1]:
            raise ValueError(f"weight: expected 8 bits and [N, 1, 1, K], got {weight.bits} bits and {weight.shape}")
        (bias,) = arrays.views(bias=bias)
        if bias is not None:
            check.validate_bias(bias, n, None, weight.device)
        form = check.validate_activation(activation)
        check.out_features(n, form, "weight")
        self._bias = bias
        self._activation = activation
        self._batch_invariant = check_scalar.validate_flag(batch_invariant, "batch_invariant")
        self._order = None
        self._operand = pack_int8(weight, check.validate_float_dtype(dtype), form.gated)
        self._prepare()

    @property
    def dtype(self) -> Any:
        """The dtype of x and y."""
        return self._operand.dtype

    @property
    def nbytes(self) -> int:
        """The size of the weight in bytes."""
        return self._operand.nbytes

    def kernel_for(self, m: int, dtype: Any = None) -> str:
        """Return the name of the kernel that runs for a contiguous x of ``m`` rows; "numpy" on the CPU.

        ``dtype`` is None or the layer's.
        """
        return super().kernel_for(m, self.dtype if dtype is None else dtype)

    def __repr__(self) -> str:
        k, n = self.shape
        form = f"K={k}, N={n}, group_size={self.group_size}, {self.dtype}, {self.nbytes / 1e6:.2f} MB"
        activation = f", activation={self._activation!r}" if self._activation is not None else ""
        invariant = ", batch_invariant=True" if self._batch_invariant else ""
        return f"Int8Linear({form}{', bias' if self._bias is not None else ''}{activation}{invariant})"

    def __reduce__(self) -> Any:
        """Return the function and the arguments that recreate a copied or unpickled layer, without cached launches."""
        weight = self._operand
        arrays_ = (weight.qweight, weight.scales, weight.qzeros) if weight.has_original else ()
        fields = {"repacked": weight.repacked, "scale_exponent": weight.scale_exponent}
        return _restored, (weight.spec, arrays_, fields, self._bias, self._activation, self._batch_invariant)


def _restored(
    spec: check.WeightSpec, parts: tuple[Any, ...], fields: Any, bias: Array | None, activation: Any, invariant: bool
) -> Int8Linear:
    """Recreate a copied or unpickled layer."""
    layer = object.__new__(Int8Linear)
    layer._operand = Int8Weight(spec, *parts, **fields)
    layer._bias, layer._activation, layer._batch_invariant, layer._order = bias, activation, invariant, None
    layer._prepare()
    synchronize(spec.device)
    return layer
