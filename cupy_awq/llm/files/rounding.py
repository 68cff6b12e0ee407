# SPDX-License-Identifier: Apache-2.0
"""Rounding of 4-bit modules to what a format can hold, with the error that this adds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cupy_awq import reference
from cupy_awq.check import FLOAT16
from cupy_awq.checkpoint import Contents, Module, ModuleSpec
from cupy_awq.checkpoint.gguf.q4 import GROUP
from cupy_awq.checkpoint.tensors import Array, is_finite
from cupy_awq.checkpoint.threads import run_ranges
from cupy_awq.packing import unpack_int4
from cupy_awq.quantization.grid import QuantizedRows, fit_grid, round_rows, select_grid
from cupy_awq.weight import PackedWeight


class Limits(NamedTuple):
    """The limits of a format.

    Attributes:
        offsets: whether zero points are stored as float offsets; otherwise they are integers.
        is_float16: whether scales and offsets are float16; otherwise they have any dtype.
        order: whether a module may have an activation order.
        group_size: the number of which every group size is a multiple.
    """

    offsets: bool
    is_float16: bool
    order: bool
    group_size: int


LIMITS = {
    "autoawq": Limits(offsets=False, is_float16=False, order=False, group_size=1),
    "compressed-tensors": Limits(offsets=False, is_float16=False, order=True, group_size=1),
    "gptq": Limits(offsets=False, is_float16=False, order=True, group_size=1),
    "gguf": Limits(offsets=True, is_float16=True, order=False, group_size=GROUP),
    "ak48": Limits(offsets=False, is_float16=True, order=False, group_size=1),
}
"""The limits of each format that `convert` writes."""

RANGES = (1.0, 0.95, 1.05, 0.9, 1.1)
"""The factors that `refit` tries on the range of a group: a narrower range clips weights, but has finer steps."""

BLOCK = 1 << 22
"""The number of weights that each thread dequantizes at a time, which bounds the memory for dense values."""


class Rounder:
    """The rounding of modules for one format.

    Args:
        format_name: a key of `LIMITS`.

    Attributes:
        errors: the relative RMS error of W by module, norm(rounded W - W) / norm(W), of the modules rounded so far for
            which it is not 0.
    """

    def __init__(self, format_name: str) -> None:
        self.errors: dict[str, float] = {}
        self._limits = LIMITS[format_name]

    def apply(self, contents: Contents) -> Contents:
        """Return contents whose modules are rounded when they are accessed."""

        return contents.with_changed_modules(self._plan, self.round)

    def _group_size(self, k: int, group_size: int) -> int:
        """Return the group size of a rounded module; unchanged if the format can hold no group size for K."""
        multiple = self._limits.group_size
        return multiple if group_size % multiple and k % multiple == 0 else group_size

    def _must_refit(self, spec: ModuleSpec) -> bool:
        """Return whether codes change too: offsets become zero points, or rows move to other groups."""
        return (
            (spec.zeros == "float" and not self._limits.offsets)
            or (spec.has_order and not self._limits.order)
            or self._group_size(spec.k, spec.group_size) != spec.group_size
        )

    def _plan(self, spec: ModuleSpec) -> ModuleSpec:
        """Return the properties of the rounded module."""
        zeros = "packed" if self._must_refit(spec) else spec.zeros
        return dataclasses.replace(
            spec,
            group_size=self._group_size(spec.k, spec.group_size),
            zeros="float" if zeros == "packed" and self._limits.offsets else zeros,
            dtype=FLOAT16 if self._limits.is_float16 else spec.dtype,
            has_order=spec.has_order and self._limits.order,
        )

    def round(self, name: str, module: Module) -> Module:
        """Return a module that the format can hold, and add its error to ``errors``.

        Codes stay as they are where only scales and offsets must be rounded. Otherwise every group gets the best scale
        and zero point (`refit`), and rows are in the order of the columns of x.

        Raises ValueError, which names the module, for scales beyond the range of float16.
        """
        weight, order = module.weight, module.order
        k, n = weight.shape
        spec = ModuleSpec(k, n, weight.group_size, weight.spec.zeros, weight.dtype, has_order=order is not None)
        wanted = self._plan(spec)
        try:
            if self._must_refit(spec):
                weight = refit(module, wanted.group_size, wanted.dtype)
                order = order if wanted.has_order else None
            if self._limits.is_float16:
                weight = _to_float16(weight, offsets=wanted.zeros == "float")
        except ValueError as error:
            raise ValueError(f"module {name!r:.200}: {error}") from None
        rounded = Module(weight, module.bias, order)
        if added := measure_error(module, rounded):
            self.errors[name] = added
        return rounded


def refit(module: Module, group_size: int, dtype: np.dtype[Any]) -> PackedWeight:
    """Quantize the weight of a module again, with integer zero points and without an activation order.

    Raises ValueError for a scale beyond the range of ``dtype``.
    """
    k, n = module.weight.shape
    qweight, qzeros = (np.empty((rows, n // 8), np.int32) for rows in (k, k // group_size))
    scales: Array = np.empty((k // group_size, n), dtype)

    def fit(start: int, stop: int) -> None:
        for words, columns in _split(k, start, stop):
            rows = np.ascontiguousarray(_dequantize(module, words, columns).T)
            part = find_best_rows(rows, group_size, dtype).pack()
            qweight[:, words], scales[:, columns] = part.qweight, part.scales
            qzeros[:, words] = np.asarray(part.qzeros)

    run_ranges(fit, n // 8, module.weight.nbytes)
    return PackedWeight(qweight, scales, qzeros)


def find_best_rows(w: Array, group_size: int, dtype: np.dtype[Any]) -> QuantizedRows:
    """Round a weight, float32 [N, K], with the scale and zero point per group that have the smallest squared error.

    Each factor of `RANGES` gives a candidate: the grid of `cupy_awq.quantize` for the range of the group times the
    factor.
    """
    grouped = w.reshape(len(w), -1, group_size)
    low, high = grouped.min(axis=-1), grouped.max(axis=-1)
    candidates = (round_rows(w, fit_grid(low * f, high * f, dtype, symmetric=False)) for f in RANGES)
    best = next(candidates)
    smallest = _square_errors(best, grouped)
    for rows in candidates:
        error = _square_errors(rows, grouped)
        is_better = error < smallest
        codes = np.where(np.repeat(is_better, group_size, axis=-1), rows.codes, best.codes)
        best = QuantizedRows(codes, select_grid(is_better, rows.grid, best.grid))
        smallest = np.minimum(error, smallest)
    return best


def _square_errors(rows: QuantizedRows, grouped: Array) -> Array:
    """Return the sum of squared errors of each group, [N, K/G], for the dense weight [N, K/G, G]."""
    difference = rows.dequantize().reshape(grouped.shape) - grouped
    result: Array = np.einsum("ngk,ngk->ng", difference, difference)
    return result


def _to_float16(weight: PackedWeight, *, offsets: bool) -> PackedWeight:
    """Round scales to float16, and zero points to float16 offsets if ``offsets``; codes stay as they are."""
    zeros: Any = weight.qzeros
    if offsets and weight.spec.zeros == "packed":
        zeros = -weight.scales.astype(np.float32) * unpack_int4(zeros)
    with np.errstate(over="ignore"):
        scales: Array = weight.scales.astype(FLOAT16)
        if offsets:
            zeros = zeros.astype(FLOAT16)
    if not (is_finite(scales) and (not offsets or is_finite(zeros))):
        raise ValueError("expected scales and offsets within the range of float16, got larger ones")
    return PackedWeight(weight.qweight, scales, zeros)


def measure_error(module: Module, rounded: Module) -> float:
    """Return the relative RMS error norm(rounded W - W) / norm(W), for rows in the order of the columns of x."""
    k, n = module.weight.shape
    error = total = 0.0
    for words, columns in _split(k, 0, n // 8):
        w = _dequantize(module, words, columns).astype(np.float64)
        error += float(np.square(_dequantize(rounded, words, columns) - w).sum())
        total += float(np.square(w).sum())
    return math.sqrt(error / total) if total else 0.0


def _split(k: int, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of at most `BLOCK` weights: of the words ``start`` to ``stop`` of a row, and of their columns."""
    step = max(1, BLOCK // (8 * k))
    for first in range(start, stop, step):
        last = min(first + step, stop)
        yield slice(first, last), slice(8 * first, 8 * last)


def _dequantize(module: Module, words: slice, columns: slice) -> Array:
    """Return columns of W, float32 [K, columns], with rows in the order of the columns of x before it is permuted."""
    weight = module.weight
    zeros = weight.qzeros
    if zeros is not None:
        zeros = zeros[:, columns if weight.spec.zeros == "float" else words]
    w = reference.dequantize(weight.qweight[:, words], weight.scales[:, columns], zeros, dtype=np.float32)
    if module.order is None:
        return w
    unordered = np.empty_like(w)
    unordered[module.order] = w
    return unordered
