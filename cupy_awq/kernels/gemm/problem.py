# SPDX-License-Identifier: Apache-2.0
"""The GEMM problem y = epilogue(x @ W) with a 4- or 8-bit weight, and functions shared by kernel families."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from cupy_awq.kernels.dtypes import TYPES, ZEROS
from cupy_awq.kernels.epilogue import epilogue_defines
from cupy_awq.kernels.family import KernelProblem, TuningKey
from cupy_awq.kernels.tiling import next_tuned_m
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

AWQ, FRAGMENTS = "awq", "fragments"
"""The names of the layouts of a 4-bit weight (`cupy_awq.kernels.gemm.layouts`)."""
INT8_ROWS, INT8_FRAGMENTS = "int8 rows", "int8 fragments"
"""The names of the layouts of an 8-bit weight: codes [n, k] with scales [n, groups], and the fragment layout."""
SAMPLED_M = (1, 8, 16, 64, 512, 2048)
"""The values of M at which run times determine the reduction of a batch-invariant weight.

Each stands for other M with similar CTA tiles.
"""


class Strides(NamedTuple):
    """The row strides of the arrays in elements; an element of qweight or of packed zero points is a 32-bit word."""

    x: int
    qweight: int
    scales: int
    qzeros: int
    residual: int
    y: int


@dataclass(frozen=True)
class NextWeight:
    """The part of a repacked weight that an earlier kernel of a decode step prefetches into L2.

    Attributes:
        nbytes: number of bytes of each half of the columns; the halves of a gated weight are the gate and up
            projections.
        half_offset: distance in bytes from the first half to the second.
    """

    nbytes: int
    half_offset: int

    def scalars(self, ctas: int) -> tuple[np.int32, np.int32]:
        """Return the kernel arguments ``share_bytes`` and ``half_offset`` of a launch with ``ctas`` CTAs.

        >>> NextWeight(1 << 20, half_offset=1 << 22).scalars(132)
        (np.int32(7936), np.int32(4194304))
        """
        return np.int32(self.nbytes // ctas // 16 * 16), np.int32(self.half_offset)


NO_PREFETCH = NextWeight(0, 0)
"""The `NextWeight` of a kernel that prefetches nothing."""


@dataclass(frozen=True)
class Fusion:
    """A residual add or RMSNorm of a decoder layer that is fused into a GEMM.

    ``cuda_src/hopper/residual_stream.cuh`` has the formulas and the buffers.

    Attributes:
        role: "add_to_stream": the GEMM adds its result to the residual stream and writes the next GEMM's x: the stream
            times the RMSNorm weight, divided by each row's root mean square (RMS) at the preceding RMSNorm.
            "rms_norm_x": x was written by a GEMM with "add_to_stream", and this GEMM multiplies its accumulators by
            the ratio of that RMS to the current RMS of each row.
        eps: epsilon of the RMSNorm; used only by "rms_norm_x".
        orders_y: whether "add_to_stream" writes the columns of the next GEMM's x in that GEMM's activation order.
        next_weight: the part of the next GEMM's weight to prefetch; kernels for Hopper do so with "add_to_stream" only.
    """

    role: Literal["add_to_stream", "rms_norm_x"]
    eps: float = 0.0
    orders_y: bool = False
    next_weight: NextWeight = NO_PREFETCH

    @property
    def buffers(self) -> tuple[str, ...]:
        """The additional buffers of a launch; ``cuda_src/hopper/residual_stream.cuh`` describes them."""
        stream = "h", "norm_weight", "square_sums", "previous_inverse_rms", "inverse_rms"
        if self.role == "rms_norm_x":
            return stream
        return (*stream, "positions", "next_weight") if self.orders_y else (*stream, "next_weight")


@dataclass(frozen=True)
class Problem(KernelProblem):
    """A validated matrix product y [m, n] = epilogue(x [m, k] @ W [k, n]).

    The fields determine a kernel's code and launch, except the addresses of the arrays. Dtypes are NumPy names.

    Attributes:
        m: number of rows of x and y.
        n: number of columns of W; also of y, unless the problem is gated (n / 2).
        k: number of columns of x and rows of W.
        group_size: number of rows of W that share scales and zero points.
        dtype: dtype of x and y.
        scales_dtype: dtype of the scales.
        zeros: "packed" (4-bit zero points), "symmetric" (all 8) or "float" (offsets, W = q * s + o).
        bias_dtype: dtype of the bias, or None without a bias.
        residual: whether the epilogue adds a residual.
        activation: kind of the `Activation`, or None without an activation.
        limits: lower and upper bound of the activation "clamp".
        gated: whether y = activation(gate) * up, where gate and up are the first and second half of W's columns.
        aligned: whether all rows of the weight arrays, the residual and y start at multiples of 16 bytes.
        x_aligned: whether all rows of x start at multiples of 16 bytes.
        layouts: names of the layouts in which the weight is available: of a 4-bit or of an 8-bit weight.
        scale_exponent: exponent such that every scale times 2**scale_exponent is at most 64.
        wide_scales: whether some scale times 2**scale_exponent would lose bits in float16.
        fusion: residual add or RMSNorm that is fused into the GEMM, or None.
        may_prefetch_weights: whether the weight may be read before the preceding kernel finishes (PDL), because no
            kernel that is still running writes it.
        strides: row strides in elements; None if all arrays are contiguous.
        gathers_x: whether the kernel gathers the columns of x in an activation order.
        batch_invariant: whether the bits of a row of y must not depend on m (`cupy_awq.kernels.gemm.reduction`).
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
    layouts: tuple[str, ...] = (AWQ,)
    scale_exponent: int = 0
    wide_scales: bool = False
    fusion: Fusion | None = None
    may_prefetch_weights: bool = False
    strides: Strides | None = None
    gathers_x: bool = False
    batch_invariant: bool = False

    def __str__(self) -> str:
        bits = " int8" if self.bits == 8 else ""
        return f"x[{self.m}, {self.k}] {self.dtype} @ W[{self.k}, {self.n}]{bits} group size {self.group_size}"

    @property
    def bits(self) -> int:
        """The number of bits per code of W, 4 or 8."""
        return 8 if self.layouts[0] in (INT8_ROWS, INT8_FRAGMENTS) else 4

    def reduction_samples(self) -> tuple[Problem, ...]:
        """Return batch-invariant problems with the same weight and dtype of x, for M of SAMPLED_M."""
        weight = Problem(
            m=1,
            n=self.n,
            k=self.k,
            group_size=self.group_size,
            dtype=self.dtype,
            scales_dtype=self.scales_dtype,
            zeros=self.zeros,
            gated=self.gated,
            layouts=self.layouts,
            wide_scales=self.wide_scales,
            batch_invariant=True,
        )
        return tuple(replace(weight, m=m) for m in SAMPLED_M)

    @property
    def tuning_key(self) -> TuningKey:
        """The tuning key: the shapes to look up in turn, M, and M rounded up by `next_tuned_m`.

        The shape is "KxN", for an 8-bit weight "KxN int8"; for a GEMM with a `Fusion`, "KxN stream" is looked up before
        "KxN". With ``gathers_x`` it is "KxN gather", which is not in the shipped tables: the fastest configuration for
        "KxN" is not the fastest then.
        """
        shape = f"{self.k}x{self.n} int8" if self.bits == 8 else f"{self.k}x{self.n}"
        shapes = (f"{shape} gather",) if self.gathers_x else (f"{shape} stream", shape) if self.fusion else (shape,)
        return TuningKey(shapes, self.m, next_tuned_m(self.m))

    @property
    def row_strides(self) -> Strides:
        """The row strides in elements: ``strides``, or the strides of contiguous arrays if ``strides`` is None."""
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
    def orders_y(self) -> bool:
        """Whether the epilogue writes y in the activation order of the next GEMM."""
        return self.fusion is not None and self.fusion.orders_y

    @property
    def rms_norms_x(self) -> bool:
        """Whether the epilogue applies the RMSNorm's division by the root mean square of each row."""
        return self.fusion is not None and self.fusion.role == "rms_norm_x"

    @property
    def wide(self) -> bool:
        """Whether 16-byte loads of the weight are aligned and never span both gate and up columns."""
        return self.aligned and not (self.gated and self.n % 64)

    @property
    def weight_bytes(self) -> int:
        """The total size of codes, scales and zero points in bytes: the least that a kernel reads of the weight."""
        groups = self.k // self.group_size
        zeros = {"packed": self.n // 2, "symmetric": 0, "float": 2 * self.n}[self.zeros]
        return self.k * self.n * self.bits // 8 + groups * (2 * self.n + zeros)

    @classmethod
    def common_problems(cls) -> Iterator[Problem]:
        """Yield GEMMs with 8-bit weights; `cupy_awq.tools.compile_all` has those with 4-bit weights."""
        for dtype in ("float16", "bfloat16", "float32"):
            yield cls(1, 4104, 4104, 4104, dtype, dtype, "symmetric", layouts=(INT8_ROWS,))
        for dtype in ("float16", "bfloat16"):
            for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024):
                yield cls(m, 4096, 4096, 128, dtype, dtype, "symmetric", layouts=(INT8_FRAGMENTS,))

    def defines(self) -> tuple[tuple[str, int | str], ...]:
        """Return the compile-time constants (name, value) of the problem that all GEMM kernels have."""
        return (
            ("X", TYPES[self.dtype]),
            ("SCALE", TYPES[self.scales_dtype]),
            ("ZEROS", ZEROS[self.zeros]),
            *epilogue_defines(self.activation, self.bias_dtype, gated=self.gated, residual=self.residual),
        )

    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments of kernels that read the AWQ layout; an absent buffer is passed as a null pointer."""
        buffers = ("x", "qweight", "scales", "qzeros", "bias", "residual", "y", "partials", "counters")
        sizes = (self.m, self.n, self.k, self.group_size, *self.row_strides)
        return (*buffers, *(np.int32(size) for size in sizes), *(np.float32(limit) for limit in self.limits))


def awq_layout_refusal(problem: Problem) -> str | None:
    """Return the reason why kernels that read the AWQ layout cannot solve the problem, or None."""
    if problem.fusion:
        return "cannot fuse the residual add or RMSNorm of a decoder"
    if problem.gathers_x:
        return "cannot gather the columns of x"
    if problem.bits != 4:
        return "takes a 4-bit weight"
    if AWQ not in problem.layouts:
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
    """Return the launch plan of a kernel that reads the AWQ layout and takes `Problem.arguments`.

    ``source`` is the path of the .cu file in ``cuda_src``, ``entry`` the kernel's name, ``defines`` its compile-time
    constants besides those of the problem, ``threads`` the number of threads per CTA, and ``shared_bytes`` its dynamic
    shared memory in bytes.
    """
    kernel = Kernel(source, entry, (*problem.defines(), *defines), device.target)
    return LaunchPlan(kernel, grid, (threads, 1, 1), problem.arguments(), shared_bytes)
