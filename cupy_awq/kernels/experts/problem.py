# SPDX-License-Identifier: Apache-2.0
"""The grouped product of a mixture of experts with 4-bit weights, and what its kernels share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from cupy_awq.activation import enumerator
from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES
from cupy_awq.kernels.family import KernelProblem, TuningKey
from cupy_awq.kernels.gemm.layouts import FragmentLayout
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem
from cupy_awq.kernels.tiling import ceil_div, next_tuned_m

Rows = Literal["sorted", "pairs", "tokens"]
SAMPLED_SIZES = ((1, 8), (8, 8), (64, 8), (512, 16), (4096, 384))
"""The numbers of pairs, and of rows per block, at which run times determine the reduction of a batch-invariant weight.
"""
MAX_TOKEN_SLOTS = 32
"""The largest number of experts per token whose weighted sum one CTA computes."""


def count_blocks(pairs: int, experts: int, block: int) -> int:
    """Return the largest number of blocks of ``block`` rows, for any routing of ``pairs`` rows to experts.

    >>> count_blocks(8, 128, 16), count_blocks(1000, 8, 64)
    (8, 23)
    """
    return min(pairs, (pairs + experts * (block - 1)) // block)


def expected_touched(pairs: int, experts: int, top_k: int = 1) -> float:
    """Return the expected number of experts with at least one of ``pairs`` rows, for uniform routing.

    The ``top_k`` experts of a token are distinct.

    >>> round(expected_touched(8, 128), 1), expected_touched(8, 128, 8), round(expected_touched(1024, 8), 1)
    (7.8, 8.0, 8.0)
    """
    return float(experts * (1 - (1 - min(top_k / experts, 1.0)) ** (pairs / top_k)))


def expected_blocks(pairs: int, experts: int, block: int, top_k: int = 1) -> float:
    """Return the expected number of blocks for uniform routing; the rows of an expert are about normally distributed.

    >>> round(expected_blocks(8, 128, 16), 1), round(expected_blocks(8192, 128, 64), 1)
    (7.8, 188.8)
    """
    mean = pairs / experts
    deviation = max(math.sqrt(mean * (1 - min(top_k / experts, 1.0))), 1e-9)
    # An expert has more than i full blocks if it has more than i * block rows.
    first, last = max(1, int((mean - 6 * deviation) / block)), int((mean + 6 * deviation) / block)
    more = (math.erfc((i * block + 0.5 - mean) / deviation / math.sqrt(2)) / 2 for i in range(first, last + 1))
    return expected_touched(pairs, experts, top_k) + experts * (first - 1 + sum(more))


@dataclass(frozen=True)
class ExpertProduct(KernelProblem):
    """A validated grouped product: y[p] = activation(x[p / x_divisor] @ W[e(p)] + bias[e(p)]) * row_weights[p].

    Attributes:
        rows: where the rows come from: "sorted" by expert in blocks; "pairs": one (token, slot) pair after the other;
            "tokens": the same, and the weighted sum over the slots of a token is one row of y.
        pairs: number of (token, slot) pairs, or of rows of x.
        experts: number of experts.
        n: number of columns of each W; of y half as many if the problem is gated.
        k: number of columns of x.
        group_size: number of rows of W that share scales and zero points.
        dtype: dtype of x and y.
        scales_dtype: dtype of the scales.
        zeros: kind of the zero points, as in `cupy_awq.kernels.gemm.problem.Problem`.
        block: with "sorted", the number of rows per block of the routing arrays.
        capacity: with "sorted", the length of the routing array of rows; 0 for that of `TokenSort`.
        top_k: number of slots per token.
        x_divisor: number of pairs that share a row of x.
        bias_dtype: dtype of the bias, or None without a bias.
        activation: kind of the `Activation`, or None.
        gated: whether y = activation(gate) * up.
        row_weights: whether rows are multiplied by the router's weights.
        reads_ahead: whether routing and weights may be read before the preceding kernel finishes (PDL).
        layout: name of the layout of the weights.
        scale_exponent, wide_scales: as in `cupy_awq.kernels.gemm.problem.Problem`, for
            all experts together.
        shared: with "tokens", whether the result of a shared expert is added to y.
        ldx, ldy, ld_shared: row strides of x, y and the shared expert's result in elements; 0 for contiguous arrays.
        batch_invariant: whether the bits of a row of y must not depend on the other rows.
    """

    rows: Rows
    pairs: int
    experts: int
    n: int
    k: int
    group_size: int
    dtype: str = "float16"
    scales_dtype: str = "float16"
    zeros: str = "packed"
    block: int = 8
    capacity: int = 0
    top_k: int = 1
    x_divisor: int = 1
    bias_dtype: str | None = None
    activation: str | None = None
    gated: bool = False
    row_weights: bool = False
    reads_ahead: bool = False
    layout: str = AWQ
    scale_exponent: int = 0
    wide_scales: bool = False
    shared: bool = False
    ldx: int = 0
    ldy: int = 0
    ld_shared: int = 0
    batch_invariant: bool = False

    def __str__(self) -> str:
        return (
            f"x[{self.pairs}, {self.k}] {self.dtype}, {self.rows}, @ {self.experts} experts W[{self.k}, {self.n}] "
            f"group size {self.group_size}"
        )

    @classmethod
    def common_problems(cls) -> Iterator[ExpertProduct]:
        """Yield small products whose kernels serve every model with groups of 128, for `compile`."""
        for dtype in ("float16", "bfloat16"):
            gate_up = cls(
                "pairs", 8, 8, 512, 256, 128, dtype, top_k=8, x_divisor=8, activation="silu", gated=True,
                layout=FRAGMENTS,
            )  # fmt: skip
            down = cls(
                "tokens", 8, 8, 256, 256, 128, dtype, top_k=8, row_weights=True, reads_ahead=True, layout=FRAGMENTS
            )
            yield from (gate_up, down)
            for layout in (FRAGMENTS, AWQ):
                yield replace(gate_up, rows="sorted", block=16, layout=layout)
                yield replace(down, rows="sorted", block=16, layout=layout)

    @property
    def tuning_key(self) -> TuningKey:
        """The tuning key: form of the rows, experts, K and N, and the number of pairs rounded up by `next_tuned_m`."""
        name = f"experts {self.rows} {self.experts} {self.k}x{self.n}{' gated' if self.gated else ''}"
        return TuningKey((name,), self.pairs, next_tuned_m(self.pairs))

    def reduction_samples(self) -> tuple[ExpertProduct, ...]:
        """Return batch-invariant products with the same weights and dtype of x, for SAMPLED_SIZES."""
        form = (self.experts, self.n, self.k, self.group_size, self.dtype, self.scales_dtype, self.zeros)
        return tuple(
            ExpertProduct(
                "sorted",
                pairs,
                *form,
                block=block,
                activation="silu" if self.gated else None,
                gated=self.gated,
                layout=self.layout,
                wide_scales=self.wide_scales,
                batch_invariant=True,
            )
            for pairs, block in SAMPLED_SIZES
        )

    @property
    def routed_rows(self) -> int:
        """The length of the routing array of rows."""
        return self.capacity or count_blocks(self.pairs, self.experts, self.block) * self.block

    @property
    def n_out(self) -> int:
        """The number of columns of y."""
        return self.n // 2 if self.gated else self.n

    @property
    def fragments(self) -> FragmentLayout:
        """The fragment layout of one expert's weight."""
        return FragmentLayout(self.k, self.n, self.group_size, self.scales_dtype, self.zeros)

    @property
    def x_rows(self) -> int:
        """The number of rows of x."""
        return ceil_div(self.pairs, self.x_divisor)

    def of_expert(self, m: int) -> Problem:
        """Return the product of ``m`` rows with one expert."""
        return Problem(
            m,
            self.n,
            self.k,
            self.group_size,
            self.dtype,
            self.scales_dtype,
            self.zeros,
            self.bias_dtype,
            activation=self.activation,
            gated=self.gated,
            layouts=(self.layout,),
            scale_exponent=self.scale_exponent,
            wide_scales=self.wide_scales,
            batch_invariant=self.batch_invariant,
        )

    @property
    def touched_bytes(self) -> float:
        """The expected size in bytes of the weights of the experts that have rows."""
        return expected_touched(self.pairs, self.experts, self.top_k) * self.fragments.nbytes

    @property
    def activation_bytes(self) -> int:
        """The size of x and y in bytes."""
        return (self.x_rows * self.k + self.pairs * self.n_out) * ITEMSIZE[self.dtype]

    def defines(self) -> tuple[tuple[str, int | str], ...]:
        """Return the compile-time constants (name, value) that the kernels of all layouts have."""
        return (
            ("X", TYPES[self.dtype]),
            ("ACTIVATION", enumerator(self.activation)),
            ("GATED", int(self.gated)),
            ("HAS_BIAS", int(self.bias_dtype is not None)),
            ("BIAS", TYPES[self.bias_dtype or "float16"]),
            ("HAS_ROW_WEIGHTS", int(self.row_weights)),
        )
