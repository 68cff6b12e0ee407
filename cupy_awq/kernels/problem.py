# SPDX-License-Identifier: Apache-2.0
"""A matrix product to be made by a kernel, and what all kernel families share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan

TYPES = {"float16": "half_t", "bfloat16": "bfloat16_t", "float32": "float"}
ZEROS = {"packed": "kPacked", "symmetric": "kSymmetric", "float": "kOffset"}
ACTIVATIONS = {None: "kNone", "clamp": "kClamp", "silu": "kSilu", "gelu": "kGelu"}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}

MAX_SPLITS = 64

PTX_ARCH = 75
"""Below it kernels keep to plain CUDA."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Strides(NamedTuple):
    """Row strides, in elements (words for qweight and packed zeros)."""

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
    """y [m, n] = epilogue(x [m, k] @ W [k, n]); all that a kernel's code and launch depend on.

    ``n`` counts the weight's columns: a gated problem has ``n / 2`` in y. ``aligned``: the weight's arrays, the
    residual and y start at, and step by, multiples of 16 bytes; ``x_aligned``: so does x. ``raw``: the weight is
    there in AWQ's own layout; ``repacked``: in that of `Repacking`; ``scale_exponent``: scales times two to its
    power are at most 64, and float16 holds all of them without loss unless ``wide_scales``. ``fusion``: the part of
    a decoder's residual add or RMSNorm that the GEMM performs, or None. ``constant``: no launch that may still be at
    work writes the weight's arrays. Dtypes are names.
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
        return self.fusion is not None and self.fusion.role == "add_to_stream"

    @property
    def rms_norms_x(self) -> bool:
        return self.fusion is not None and self.fusion.role == "rms_norm_x"

    @property
    def wide(self) -> bool:
        """Whether a kernel may move 16 bytes of the weight at a time: they never mix gate and up columns."""
        return self.aligned and not (self.gated and self.n % 64)

    @property
    def weight_bytes(self) -> int:
        """Bytes of codes, scales and zero points: what must be read at least."""
        groups = self.k // self.group_size
        zeros = {"packed": self.n // 2, "symmetric": 0, "float": 2 * self.n}[self.zeros]
        return self.k * self.n // 2 + groups * (2 * self.n + zeros)

    def defines(self) -> tuple[tuple[str, int | str], ...]:
        """The compile-time constants that every kernel takes from the problem."""
        return (
            ("X", TYPES[self.dtype]),
            ("SCALE", TYPES[self.scales_dtype]),
            ("ZEROS", ZEROS[self.zeros]),
            ("ACTIVATION", ACTIVATIONS[self.activation]),
            ("GATED", int(self.gated)),
            ("HAS_BIAS", int(self.bias_dtype is not None)),
            ("BIAS", TYPES[self.bias_dtype or "float16"]),
            ("HAS_RESIDUAL", int(self.residual)),
        )

    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of every kernel on the raw layout; a buffer that the problem lacks is a null pointer."""
        buffers = ("x", "qweight", "scales", "qzeros", "bias", "residual", "y", "partials", "counters")
        sizes = (self.m, self.n, self.k, self.group_size, *self.row_strides)
        return (*buffers, *(np.int32(size) for size in sizes), *(np.float32(limit) for limit in self.limits))


class Config(Protocol):
    """One way to launch one family; each implementation is a frozen dataclass."""

    @property
    def splits(self) -> int:
        """Blocks that share each sum over K."""
        ...

    def plan(self, problem: Problem, device: Device) -> LaunchPlan: ...

    def estimate_us(self, problem: Problem, device: Device) -> float:
        """The expected time: a model to rank by, not a promise."""
        ...

    def workspace(self, problem: Problem) -> tuple[int, int]:
        """Bytes of partial sums and number of counters that the launch needs."""
        ...


class Family(Protocol):
    """What a module of this package offers."""

    @property
    def NAME(self) -> str: ...

    def refuse(self, problem: Problem, device: Device) -> str | None:
        """Why the family cannot take the problem on this device, or None."""
        ...

    def configs(self, problem: Problem, device: Device) -> Sequence[Config]:
        """The legal configurations of a problem that is not refused, with one split and with several."""
        ...


def plan(
    source: str,
    entry: str,
    defines: tuple[tuple[str, int | str], ...],
    problem: Problem,
    device: Device,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int = 0,
) -> LaunchPlan:
    """The launch of a kernel on the raw layout."""
    kernel = Kernel(source, entry, (*problem.defines(), *defines), device.target)
    return LaunchPlan(kernel, grid, (threads, 1, 1), problem.arguments(), shared_bytes)


def split_counts(limit: int) -> list[int]:
    """Powers of two up to ``limit`` and MAX_SPLITS."""
    return [1 << i for i in range(MAX_SPLITS.bit_length()) if 1 << i <= max(1, min(limit, MAX_SPLITS))]
