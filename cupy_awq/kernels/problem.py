# SPDX-License-Identifier: Apache-2.0
"""The GEMM problem, y = epilogue(x @ W) for a 4-bit weight, and what its kernel families share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from cupy_awq.activation import enumerator
from cupy_awq.kernels.family import TuningKey
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

TYPES = {"float16": "half_t", "bfloat16": "bfloat16_t", "float32": "float"}
"""The C++ types of the dtypes (``cuda_src/common/types.cuh``)."""

ZEROS = {"packed": "kPacked", "symmetric": "kSymmetric", "float": "kOffset"}
"""The C++ names of the kinds of zero points (``cuda_src/gemm/group.cuh``)."""

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
"""The bytes of one element of each dtype."""

MAX_SPLITS = 64
"""The largest split-K factor."""

PTX_ARCH = 75
"""The oldest architecture whose kernels use PTX instructions; kernels below it are plain CUDA C++."""


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_two(m: int) -> int:
    """Return the smallest power of two that is at least ``m``.

    >>> next_power_of_two(1), next_power_of_two(48), next_power_of_two(64)
    (1, 64, 64)
    """
    return 1 << (m - 1).bit_length()


def split_counts(limit: int) -> list[int]:
    """Return the split-K factors to try: the powers of two up to ``limit`` and MAX_SPLITS.

    >>> split_counts(5)
    [1, 2, 4]
    """
    return [1 << i for i in range(MAX_SPLITS.bit_length()) if 1 << i <= max(1, min(limit, MAX_SPLITS))]


class Strides(NamedTuple):
    """The strides between rows, in elements (in 32-bit words for qweight and packed zeros)."""

    x: int
    qweight: int
    scales: int
    qzeros: int
    residual: int
    y: int


@dataclass(frozen=True)
class Fusion:
    """The part of a decoder's residual add and RMSNorm that a GEMM performs, so that neither needs a kernel.

    ``cuda_src/hopper/residual_stream.cuh`` has the formulas and the buffers.

    Attributes:
        role: "add_to_stream": the GEMM adds its result to the residual stream and writes the x of the next GEMM, the
            stream times the RMSNorm weight, still without the division by the root mean square (RMS) of its row.
            "rms_norm_x": x comes from such a GEMM, and this one divides its accumulators by the RMS of each row.
        eps: the epsilon of the RMSNorm; only "rms_norm_x" uses it.
    """

    role: Literal["add_to_stream", "rms_norm_x"]
    eps: float = 0.0


@dataclass(frozen=True)
class Problem:
    """A validated matrix product y [m, n] = epilogue(x [m, k] @ W [k, n]).

    It holds everything on which the code and the launch of a kernel depend. Dtypes are given by name.

    Attributes:
        m, n, k: rows of x, columns and rows of W; y of a gated problem has n / 2 columns.
        group_size: rows of W that share a scale.
        dtype, scales_dtype, bias_dtype: of x and y, of the scales, of the bias (None: no bias).
        zeros: "packed" (4-bit zero points), "symmetric" (all 8) or "float" (offsets, W = q * s + o).
        residual: whether the epilogue adds a residual.
        activation, limits: the kind of an `Activation`; the bounds of "clamp".
        gated: whether y = activation(gate) * up, for the first and the second half of W's columns.
        aligned: whether the arrays of the weight, the residual and y start at multiples of 16 bytes, row by row.
        x_aligned: whether the rows of x do.
        raw: whether the weight is there in the AWQ layout.
        repacked: whether the weight is there in the repacked layout (`RepackedLayout`).
        scale_exponent: scales times two to this power are at most 64.
        wide_scales: whether float16 cannot hold all scales times that power without loss.
        fusion: the part of a decoder's residual add and RMSNorm that the GEMM performs, or None.
        constant: whether no launch that may still run writes the weight.
        strides: None for contiguous arrays.
    """

    m: int
    n: int
    k: int
    group_size: int
    dtype: str = "float16"
    scales_dtype: str = "float16"
    zeros: str = "packed"
    bias_dtype: str | None = None
    residual: bool = False
    activation: str | None = None
    limits: tuple[float, float] = (0.0, 0.0)
    gated: bool = False
    aligned: bool = True
    x_aligned: bool = True
    raw: bool = True
    repacked: bool = False
    scale_exponent: int = 0
    wide_scales: bool = False
    fusion: Fusion | None = None
    constant: bool = False
    strides: Strides | None = None

    def __str__(self) -> str:
        return f"x[{self.m}, {self.k}] {self.dtype} @ W[{self.k}, {self.n}] group size {self.group_size}"

    @property
    def tuning_key(self) -> TuningKey:
        """The shape "KxN", preceded by "KxN stream" for a GEMM with a `Fusion`; M is tuned at powers of two."""
        shape = f"{self.k}x{self.n}"
        shapes = (f"{shape} stream", shape) if self.fusion else (shape,)
        return TuningKey(shapes, self.m, next_power_of_two(self.m))

    @property
    def row_strides(self) -> Strides:
        """The strides, by default those of contiguous arrays."""
        if self.strides is not None:
            return self.strides
        n_out = self.n // 2 if self.gated else self.n
        zeros = self.n if self.zeros == "float" else self.n // 8
        return Strides(self.k, self.n // 8, self.n, zeros, n_out, n_out)

    @property
    def adds_to_stream(self) -> bool:
        """Whether the epilogue adds y to the residual stream."""
        return self.fusion is not None and self.fusion.role == "add_to_stream"

    @property
    def rms_norms_x(self) -> bool:
        """Whether the epilogue divides by the root mean square of each row of x."""
        return self.fusion is not None and self.fusion.role == "rms_norm_x"

    @property
    def wide(self) -> bool:
        """Whether 16 bytes of the weight can be loaded at a time: aligned, and never both gate and up columns."""
        return self.aligned and not (self.gated and self.n % 64)

    @property
    def weight_bytes(self) -> int:
        """The bytes of codes, scales and zero points, each of which is read at least once."""
        groups = self.k // self.group_size
        zeros = {"packed": self.n // 2, "symmetric": 0, "float": 2 * self.n}[self.zeros]
        return self.k * self.n // 2 + groups * (2 * self.n + zeros)

    def defines(self) -> tuple[tuple[str, int | str], ...]:
        """Return the compile-time constants that every GEMM kernel takes from the problem."""
        return (
            ("X", TYPES[self.dtype]),
            ("SCALE", TYPES[self.scales_dtype]),
            ("ZEROS", ZEROS[self.zeros]),
            ("ACTIVATION", enumerator(self.activation)),
            ("GATED", int(self.gated)),
            ("HAS_BIAS", int(self.bias_dtype is not None)),
            ("BIAS", TYPES[self.bias_dtype or "float16"]),
            ("HAS_RESIDUAL", int(self.residual)),
        )

    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments of the kernels on the AWQ layout; absent buffers are passed as null pointers."""
        buffers = ("x", "qweight", "scales", "qzeros", "bias", "residual", "y", "partials", "counters")
        sizes = (self.m, self.n, self.k, self.group_size, *self.row_strides)
        return (*buffers, *(np.int32(size) for size in sizes), *(np.float32(limit) for limit in self.limits))


def refuse_awq_layout(problem: Problem) -> str | None:
    """Return why no kernel that reads the AWQ layout can solve the problem, or None."""
    if problem.fusion:
        return "cannot fuse the residual add or RMSNorm of a decoder"
    if not problem.raw:
        return "needs the weight in the AWQ layout, which AwqLinear(keep_weight=False) has freed"
    return None


def plan_awq_layout(
    source: str,
    entry: str,
    defines: tuple[tuple[str, int | str], ...],
    problem: Problem,
    device: Device,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int = 0,
) -> LaunchPlan:
    """Return the launch of a kernel that reads the AWQ layout."""
    kernel = Kernel(source, entry, (*problem.defines(), *defines), device.target)
    return LaunchPlan(kernel, grid, (threads, 1, 1), problem.arguments(), shared_bytes)
