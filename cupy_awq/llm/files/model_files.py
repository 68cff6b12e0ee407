# SPDX-License-Identifier: Apache-2.0
"""`ModelFiles`, which every reader returns: the configuration of a model, and its tensors by Hugging Face name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cupy_awq import reference
from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.checkpoint import CheckpointError, Module
from cupy_awq.llm.families.description import Decoder, LinearSpec, NormSpec

if TYPE_CHECKING:
    from cupy_awq.llm.text.tokenizer import Tokenizer

Array = npt.NDArray[Any]

Progress = Callable[[int, int], None]
"""A callback (number of finished steps, total number of steps)."""


@dataclass(frozen=True)
class DenseLinear:
    """A linear layer that is not quantized, y = x @ weight.T + bias.

    Attributes:
        weight: the weight [N, K] in any float dtype.
        bias: the bias [N] in any float dtype, or None without a bias.
    """

    weight: Array
    bias: Array | None


@dataclass(frozen=True)
class Int8Module:
    """A linear layer whose weight has 8-bit codes, y = x @ weight.T + bias.

    Attributes:
        weight: the weight [N, 1, 1, K] with 8-bit codes, float16 scales and no offsets.
        bias: the bias [N] in any float dtype, or None without a bias.
    """

    weight: BlockQuantizedWeight
    bias: Array | None

    def dequantize(self) -> DenseLinear:
        """Return the layer with its weight dequantized to float16, each value rounded once."""
        n, _, _, k = self.weight.shape
        codes = self.weight.stored.reshape(n, -1, self.weight.block_size).astype(np.float32) - 128
        dense = (codes * self.weight.scale[:, :, None].astype(np.float32)).astype(np.float16)
        return DenseLinear(dense.reshape(n, k), self.bias)


Linear = Module | DenseLinear | Int8Module
"""A linear layer of a model with 4-bit codes, a dense weight or 8-bit codes."""


@dataclass(frozen=True)
class ModelFiles:
    """The opened files of a model, with validated headers. Tensors are read when they are needed.

    Attributes:
        path: the path of the file or folder, for error messages.
        config: the description of the model.
        tensors: by Hugging Face name, a function that reads a quantized layer (``model.layers.0.mlp.up_proj``) or a
            plain tensor (``model.norm.weight``).
        load_tokenizer: a function that returns the tokenizer. It raises CheckpointError if the files have none.
        stop_ids: the ids of the tokens that end a text.
        int8_weights: by Hugging Face name, a function that reads the weight of a linear layer with 8-bit codes.
            ``tensors`` also contains these layers, as dense 16-bit weights.
    """

    path: Path
    config: Decoder
    tensors: Mapping[str, Callable[[], Module | Array]]
    load_tokenizer: Callable[[], Tokenizer]
    stop_ids: tuple[int, ...] = ()
    int8_weights: Mapping[str, Callable[[], BlockQuantizedWeight]] = field(default_factory=dict)

    def read_tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        """Read the tensor ``name`` with the expected ``shape``; a quantized embedding table is dequantized.

        Raises CheckpointError if the tensor is missing, does not have this shape or a float dtype, or is a vector with
        NaN or infinity, and for a quantized layer with a bias or an activation order.
        """
        module = name.removesuffix(".weight")
        if name not in self.tensors and module in self.tensors:  # MLX quantizes even the embedding table
            value: Module | Array = _dequantized(self._read(module))
        else:
            value = self._read(name)
        if isinstance(value, Module):
            raise CheckpointError(f"{self.path}: {name}: expected a plain tensor, got a quantized layer")
        if shape == (1, *value.shape):  # GGUF stores a matrix of one row as a vector
            value = value[None]
        if value.shape != shape:
            raise CheckpointError(f"{self.path}: {name}: expected shape {shape}, got {value.shape}")
        if value.dtype.kind not in "fV":  # NumPy's kinds of floats; bfloat16 has kind V
            raise CheckpointError(f"{self.path}: {name}: expected a float dtype, got {value.dtype}")
        if value.ndim == 1:
            self.check_finite(value, name)
        return value

    def read_norm(self, norm: NormSpec, layer: str = "") -> Array:
        """Read the weight of an RMSNorm of the layer whose names have the prefix ``layer``, "" outside of the layers.

        Raises the same errors as `read_tensor`.
        """
        return self.read_tensor(f"{_full_name(norm, layer)}.weight", (norm.size,))

    def read_linear(self, linear: LinearSpec, layer: str = "") -> Module | DenseLinear:
        """Read a linear layer, quantized or dense; ``layer`` is the argument of `read_norm`.

        Raises the same errors as `read_tensor`, and CheckpointError for an unexpected bias.
        """
        name, k, n = _full_name(linear, layer), linear.k, linear.n
        if name not in self.tensors:
            file_bias = f"{name}.bias"
            bias = self.read_tensor(file_bias, (n,)) if file_bias in self.tensors else None
            self._check_bias(bias, name, linear.bias)
            return DenseLinear(self.read_tensor(f"{name}.weight", (n, k)), bias)
        stored = self._read(name)
        if not isinstance(stored, Module) or stored.weight.shape != (k, n):
            found = stored.weight.shape if isinstance(stored, Module) else stored.shape
            raise CheckpointError(f"{self.path}: {name}: expected a weight [K, N] = {[k, n]}, got {list(found)}")
        for part in (stored.weight.scales, stored.weight.qzeros, stored.bias):
            if part is not None and part.dtype != np.int32:
                self.check_finite(part, name)
        self._check_bias(stored.bias, name, linear.bias)
        return stored

    def read_int8_module(self, linear: LinearSpec, layer: str = "") -> Int8Module | None:
        """Read a linear layer with 8-bit codes; return None if the files do not have it in `int8_weights`.

        ``layer`` is the argument of `read_norm`. Raises the same errors as `read_linear`.
        """
        name, k, n = _full_name(linear, layer), linear.k, linear.n
        if name not in self.int8_weights:
            return None
        weight = self.int8_weights[name]()
        if weight.shape != (n, 1, 1, k):
            found = weight.shape[0], weight.shape[3]
            raise CheckpointError(f"{self.path}: {name}.weight: expected shape {(n, k)}, got {found}")
        file_bias = f"{name}.bias"
        bias = self.read_tensor(file_bias, (n,)) if file_bias in self.tensors else None
        self._check_bias(bias, name, linear.bias)
        return Int8Module(weight, bias)

    def _read(self, name: str) -> Module | Array:
        read = self.tensors.get(name)
        if read is None:
            raise CheckpointError(f"{self.path}: {name}: expected a tensor of this name, got none")
        return read()

    def _check_bias(self, bias: Array | None, name: str, expected: bool | None) -> None:
        """Raise CheckpointError if an expected bias is missing, or an unexpected one is not 0 (GPTQ stores zeros)."""
        if expected and bias is None:
            raise CheckpointError(f"{self.path}: {name}: expected a bias as in the configuration, got none")
        if expected is False and bias is not None and bias.any():
            raise CheckpointError(f"{self.path}: {name}: expected no bias as in the configuration, got one")

    def check_finite(self, values: Array, name: str) -> None:
        """Raise CheckpointError if one of the values of a tensor is NaN or infinity."""
        # The maximum of the absolute values is NaN or infinity if any value is.
        with np.errstate(invalid="ignore"):
            largest = float(abs(values).max()) if values.size else 0.0
        if not np.isfinite(largest):
            raise CheckpointError(f"{self.path}: {name}: expected finite values, got NaN or infinity")


def _full_name(part: LinearSpec | NormSpec, layer: str) -> str:
    return f"{layer}.{part.name}" if layer else part.name


def _dequantized(layer: Module | Array) -> Module | Array:
    """Dequantize a 4-bit layer that has neither a bias nor an activation order to a dense weight [N, K].

    Any other layer is returned unchanged.
    """
    if not isinstance(layer, Module) or layer.bias is not None or layer.order is not None:
        return layer
    k, n = layer.weight.shape
    table = np.empty((n, k), layer.weight.dtype)
    reference.dequantize(layer.weight.qweight, layer.weight.scales, layer.weight.qzeros, out=table.T)
    return table
