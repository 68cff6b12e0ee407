# SPDX-License-Identifier: Apache-2.0
"""The MLX format, mode "affine": W = q * s + b in groups of 32, 64 or 128 rows of W.

    weight [N, K * bits / 32] uint32: the codes of a row one after the other, the first code in the lowest bits
    scales, biases [N, K/G] float16 or bfloat16: s and b; scales may be negative

4-bit modules are converted exactly; their biases become float offsets. Modules with other bits or N % 8 != 0 become
dense tensors [N, K], whose values are rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cupy_awq.checkpoint import nibbles
from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.module import Module, ModuleSpec, Pending
from cupy_awq.checkpoint.module_tensors import SCALES, ModuleTensors
from cupy_awq.checkpoint.tensors import Array, Tensor
from cupy_awq.packing import round_once
from cupy_awq.weight import PackedWeight

UINT32 = (np.dtype(np.uint32),)

WIDTHS = (2, 3, 4, 5, 6, 8)
"""The supported numbers of bits per code. A code of 3, 5 or 6 bits may lie in two words."""

CHUNK = 1 << 18
"""The number of codes that are converted to dense values at a time, which bounds the memory for copies."""


@dataclass(frozen=True)
class Settings:
    """The settings of one MLX module, or the defaults of a checkpoint.

    Attributes:
        bits: the number of bits per code.
        group_size: the number of rows of W per group.
    """

    bits: int
    group_size: int


@dataclass(frozen=True)
class Mlx:
    """The MLX format with the settings of one checkpoint.

    Attributes:
        default: the settings of modules without an override; None means 4 bits and a group size inferred from each
            module's shapes.
        overrides: the settings that differ from the default, by module name.
    """

    default: Settings | None
    overrides: Mapping[str, Settings] = field(default_factory=dict)

    name = "mlx"
    codes_suffix = "weight"
    other_suffixes = ("scales", "biases", "bias")
    dependent_suffixes = ("scales", "biases")

    def is_quantized(self, array: Array) -> bool:
        return bool(array.dtype == np.uint32)

    def open_module(self, tensors: ModuleTensors) -> Pending:
        weight = tensors.matrix("weight", UINT32, "[N, K bits/32]")
        n, words = weight.shape
        scales = tensors.matrix("scales", SCALES, "[N, K/G]")
        settings = self.overrides.get(tensors.name, self.default)
        if settings is None:
            settings = Settings(4, 8 * words // scales.shape[1])
        bits, group_size = settings.bits, settings.group_size
        if bits not in WIDTHS:
            raise tensors.error(f"bits: expected {', '.join(str(width) for width in WIDTHS)}, got {bits}-bit codes")
        if 32 * words % bits:
            raise tensors.error(f"weight: expected rows of whole {bits}-bit codes, got {words} words")
        k = 32 * words // bits
        if 32 % bits and k % 32:
            raise tensors.error(f"weight: expected a multiple of 32 {bits}-bit codes per row, got {k}")
        if group_size < 1 or k % group_size:
            raise tensors.error(f"group_size: expected a divisor of K={k}, got {group_size}")
        shape = (n, k // group_size)
        if scales.shape != shape:
            got = f"{bits} and {group_size} with {list(scales.shape)}"
            raise tensors.error(f"scales: expected {list(shape)} for bits and group_size of the settings, got {got}")
        tensors.finite("scales", scales)
        biases = tensors.finite("biases", tensors.array("biases", (scales.dtype,), "[N, K/G]", shape))
        if bits != 4 or n % 8:
            rounding = f"{bits}-bit codes to dense {scales.dtype}"
            spec = ModuleSpec(k, n, group_size, "float", scales.dtype, bits=bits, rounding=rounding)
            return Pending(spec, partial(_convert_dense, tensors, weight, scales, biases, k, bits), is_dense=True)
        bias = tensors.bias(n)
        spec = ModuleSpec(k, n, group_size, "float", scales.dtype, bias_dtype=tensors.bias_dtype())
        return Pending(spec, _convert, arrays=(weight, scales, biases, bias))


def _convert(weight: Array, scales: Array, biases: Array, bias: Array | None) -> Module:
    words = nibbles.convert_column_words(weight)
    return Module(PackedWeight(words, nibbles.transpose_matrix(scales), nibbles.transpose_matrix(biases)), bias)


def _convert_dense(tensors: ModuleTensors, weight: Array, scales: Array, biases: Array, k: int, bits: int) -> Tensor:
    n, groups = scales.shape
    dense = np.empty((n, groups, k // groups), scales.dtype)
    for rows in (slice(start, start + max(1, CHUNK // k)) for start in range(0, n, max(1, CHUNK // k))):
        codes = _unpack(weight[rows], bits)
        # Code * scale is exact in float64. So is the sum if scales and biases are float16. With bfloat16, it can lose a
        # bias below 2**-53 of the product, which matters only for a product halfway between two bfloat16 values.
        values = codes.reshape(-1, groups, k // groups).astype(np.float64)
        values *= scales[rows, :, None].astype(np.float64)
        values += biases[rows, :, None].astype(np.float64)
        with np.errstate(over="ignore"):  # no warning: values beyond the dtype's range become infinite
            dense[rows] = round_once(values, scales.dtype)
    return Tensor(dense.reshape(n, k), tensors.file)


def _unpack(words: Array, bits: int) -> Array:
    """Return the codes [N, K] of rows of words, uint32 [N, K * bits / 32].

    >>> _unpack(np.array([[0b10101001110010000, 0, 0]], np.uint32), 3)[0, :6].tolist()
    [0, 2, 6, 1, 5, 2]
    """
    if 32 % bits == 0:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        return ((words[:, :, None] >> shifts) & np.uint32(2**bits - 1)).reshape(len(words), -1)
    cycles = words.reshape(len(words), -1, bits).astype(np.uint64)  # each ``bits`` words hold 32 codes
    starts = np.arange(32) * bits
    first = starts // 32
    pairs = cycles[..., first] | cycles[..., np.minimum(first + 1, bits - 1)] << np.uint64(32)
    codes = (pairs >> (starts % 32).astype(np.uint64)) & np.uint64(2**bits - 1)
    return codes.reshape(len(words), -1)


def read_config(table: Mapping[str, Any], where: str) -> Mlx:
    """Return the format with the settings of ``table``, the value of ``quantization`` in a configuration.

    Raises CheckpointError, whose message starts with ``where``, for a mode other than "affine", and for bits or group
    sizes that are not positive integers.
    """
    overrides = {}
    for name, value in table.items():
        if isinstance(value, dict):
            overrides[name] = _read_settings({**table, **value}, f"{where}: {name!r:.200}")
    return Mlx(_read_settings(table, where), overrides)


def _read_settings(table: Mapping[str, Any], where: str) -> Settings:
    mode = table.get("mode", "affine")
    if mode != "affine":
        raise CheckpointError(f"{where}: mode: expected 'affine', which has scales and offsets, got {mode!r:.80}")
    for name in ("bits", "group_size"):
        if type(table.get(name)) is not int or table[name] < 1:
            raise CheckpointError(f"{where}: {name}: expected a positive integer, got {table.get(name)!r:.80}")
    return Settings(table["bits"], table["group_size"])
