# SPDX-License-Identifier: Apache-2.0
"""What every reader of model files gives: a configuration, and tensors by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cupy_awq.checkpoint import CheckpointError, Module
from cupy_awq.llm.config import Config

if TYPE_CHECKING:
    from cupy_awq.llm.tokenizer import Tokenizer

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Linear:
    """An unquantized linear module: weight [N, K], any float type, and a bias [N] or None."""

    weight: Array
    bias: Array | None


@dataclass(frozen=True)
class Source:
    """A model's files, checked but not yet read.

    Attributes:
        path: the file or folder.
        config: of the model.
        tensors: by Hugging Face name, functions that read a quantized module or a plain tensor.
        tokenizer: a function that makes it; it raises CheckpointError if the files have none.
        stop: ids of the tokens that end a text.
    """

    path: Path
    config: Config
    tensors: Mapping[str, Callable[[], Module | Array]]
    tokenizer: Callable[[], Tokenizer]
    stop: tuple[int, ...] = ()

    def tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        """A plain tensor of this shape. Raises CheckpointError for another one, a missing one, and NaN or infinity."""
        value = self._read(name)
        if isinstance(value, Module):
            raise CheckpointError(f"{self.path}: {name}: expected a plain tensor, got a quantized module")
        if value.shape != shape:
            raise CheckpointError(f"{self.path}: {name}: expected shape {shape}, got {value.shape}")
        if value.dtype.kind not in "fV":  # V: bfloat16
            raise CheckpointError(f"{self.path}: {name}: expected floats, got {value.dtype}")
        if value.ndim == 1:
            self._check_finite(value, name)
        return value

    def linear(self, name: str, k: int, n: int) -> Module | Linear:
        """The module ``name`` for x [.., k] and y [.., n], quantized or not. Raises CheckpointError as `tensor`."""
        if name not in self.tensors:
            bias = f"{name}.bias"
            return Linear(
                self.tensor(f"{name}.weight", (n, k)), self.tensor(bias, (n,)) if bias in self.tensors else None
            )
        module = self._read(name)
        if not isinstance(module, Module) or module.weight.shape != (k, n):
            found = module.weight.shape if isinstance(module, Module) else module.shape
            raise CheckpointError(f"{self.path}: {name}: expected a weight (K, N) = {(k, n)}, got {found}")
        if module.order is not None:
            raise CheckpointError(f"{self.path}: {name}: expected no activation order, got one")
        for part in (module.weight.scales, module.weight.qzeros, module.bias):
            if part is not None and part.dtype != np.int32:
                self._check_finite(part, name)
        return module

    def _read(self, name: str) -> Module | Array:
        read = self.tensors.get(name)
        if read is None:
            raise CheckpointError(f"{self.path}: {name} is missing")
        return read()

    def _check_finite(self, values: Array, name: str) -> None:
        # One value tells of any NaN or infinity, and makes no array of flags.
        with np.errstate(invalid="ignore"):
            largest = float(abs(values).max()) if values.size else 0.0
        if not np.isfinite(largest):
            raise CheckpointError(f"{self.path}: {name}: expected finite values, got NaN or infinity")
