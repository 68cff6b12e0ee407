# SPDX-License-Identifier: Apache-2.0
"""The quantization of one linear layer by a `Recipe`: search of clipped ranges, rounding and refinement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_awq import check
from cupy_awq.check import Array
from cupy_awq.packing import namespace
from cupy_awq.quantization.clipping import search_clipping
from cupy_awq.quantization.error_compensation import compensate_errors
from cupy_awq.quantization.grid import QuantizedRows, fit_rows, round_rows, select_grid
from cupy_awq.quantization.moments import Moments, row_errors
from cupy_awq.quantization.refinement import refine


@dataclass(frozen=True)
class Recipe:
    """The settings of a quantization to 4 bits.

    Attributes:
        group_size: the number of input channels per group, a divisor of K.
        symmetric: whether every zero point is 8.
        scale_dtype: the stored dtype of scales, float16 or bfloat16.
        clips: whether to search a clipped range for each group (`clipping`).
        compensates: whether to round with GPTQ's error compensation (`error_compensation`).
        passes: the number of passes of coordinate descent after rounding (`refinement`).
        shrinkage: the fraction of H that is replaced by its diagonal in all searches.
        damping: the value added to the diagonal of H in all searches, as a fraction of mean(diag H).
    """

    group_size: int
    symmetric: bool = False
    scale_dtype: np.dtype[Any] = check.FLOAT16
    clips: bool = True
    compensates: bool = True
    passes: int = 2
    shrinkage: float = 0.5
    damping: float = 0.5


def quantize_rows(w: Array, moments: Moments | None, recipe: Recipe) -> QuantizedRows:
    """Quantize a weight ``w``, float32 [N, K], as ``recipe`` states, or round it to nearest if ``moments`` is None.

    The output error of a row is its element of diag(D H D^T). A row for which the recipe gives a larger output error
    than rounding to nearest is rounded to nearest instead.

    >>> w = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    >>> quantize_rows(w, None, Recipe(group_size=16)).codes.shape
    (2, 32)
    """
    group_size, scale_dtype, symmetric = recipe.group_size, recipe.scale_dtype, recipe.symmetric
    nearest = round_rows(w, fit_rows(w, group_size, scale_dtype, symmetric=symmetric))
    if moments is None or not (recipe.clips or recipe.compensates or recipe.passes):
        return nearest
    regular = moments.regularize(recipe.shrinkage, recipe.damping)
    grid = nearest.grid
    if recipe.clips:
        grid = search_clipping(w, regular, group_size=group_size, scale_dtype=scale_dtype, symmetric=symmetric)
    rows = compensate_errors(w, regular.second, grid) if recipe.compensates else round_rows(w, grid)
    if recipe.passes:
        rows = refine(w, regular.second, rows, passes=recipe.passes, symmetric=symmetric)
    return choose_rows(w, moments.second, rows, nearest)


def choose_rows(w: Array, second: Array, rows: QuantizedRows, other: QuantizedRows) -> QuantizedRows:
    """Combine two quantizations: take each row from the one that has the smaller output error in this row."""
    error, other_error = (row_errors(quantized.dequantize() - w, second) for quantized in (rows, other))
    is_better = (error <= other_error)[:, None]
    codes = namespace(w).where(is_better, rows.codes, other.codes)
    return QuantizedRows(codes, select_grid(is_better, rows.grid, other.grid))
