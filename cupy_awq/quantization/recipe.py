# SPDX-License-Identifier: Apache-2.0
"""The quantization of one linear layer: the range, the rounding and the refinement that a `Recipe` names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_awq import check
from cupy_awq.check import Array
from cupy_awq.quantization.clipping import search_clipping
from cupy_awq.quantization.error_compensation import compensate_errors
from cupy_awq.quantization.grid import QuantizedRows, fit_rows, round_rows
from cupy_awq.quantization.moments import Moments, output_error
from cupy_awq.quantization.refinement import refine


@dataclass(frozen=True)
class Recipe:
    """The settings of a quantization to 4 bits.

    Attributes:
        group_size: the number of input channels that share a scale, a divisor of K.
        symmetric: whether every zero point is 8.
        scale_dtype: the stored dtype of scales, float16 or bfloat16.
        clips: whether the range of each group is searched (`clipping`).
        compensates: whether codes are rounded with GPTQ's error compensation (`error_compensation`).
        passes: the number of passes of `refinement`.
        damping: the part of mean(diag H) that is added to the diagonal of H for the last two.
    """

    group_size: int
    symmetric: bool = False
    scale_dtype: np.dtype[Any] = check.FLOAT16
    clips: bool = True
    compensates: bool = True
    passes: int = 1
    damping: float = 0.5


def quantize_rows(w: Array, moments: Moments | None, recipe: Recipe) -> QuantizedRows:
    """Return a weight float32 [N, K] quantized by a recipe; without moments, rounded to nearest.

    The error trace(D H D^T) never exceeds that of round-to-nearest, which is the result if no search beats it.

    >>> w = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    >>> quantize_rows(w, None, Recipe(group_size=16)).codes.shape
    (2, 32)
    """
    group_size, scale_dtype, symmetric = recipe.group_size, recipe.scale_dtype, recipe.symmetric
    nearest = round_rows(w, fit_rows(w, group_size, scale_dtype, symmetric=symmetric))
    if moments is None or not (recipe.clips or recipe.compensates or recipe.passes):
        return nearest
    grid = nearest.grid
    if recipe.clips:
        grid = search_clipping(w, moments, group_size=group_size, scale_dtype=scale_dtype, symmetric=symmetric)
    second = moments.damp(recipe.damping)
    rows = compensate_errors(w, second, grid) if recipe.compensates else round_rows(w, grid)
    if recipe.passes:
        rows = refine(w, second, rows, passes=recipe.passes, symmetric=symmetric)
    return choose_rows(w, moments.second, rows, nearest)


def choose_rows(w: Array, second: Array, rows: QuantizedRows, other: QuantizedRows) -> QuantizedRows:
    """Return ``rows``, or ``other`` if its trace(D H D^T) is smaller."""
    error, other_error = (output_error(quantized.dequantize() - w, second) for quantized in (rows, other))
    return rows if error <= other_error else other
