# SPDX-License-Identifier: Apache-2.0
"""`Int8Problem`, a GEMM of 8-bit activations and a block-quantized weight, and functions shared by kernel families."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.dtypes import TYPES
from cupy_awq.kernels.epilogue import clamp_refusal, epilogue_defines
from cupy_awq.kernels.family import Config, KernelProblem, TuningKey
from cupy_awq.kernels.tiling import ceil_div, next_tuned_m
from cupy_awq.packing import namespace
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Argument

STEP_K = 32
"""The extent of a tensor-core instruction along k."""
BLOCK_K = 128
"""The extent of a pipeline stage along k."""
PADDED_N = 128
"""The granularity of parameter arrays: N is rounded up to a multiple of PADDED_N, so that kernels read whole tiles."""
FP8_CODE_SCALE = 512
"""The ratio of a 4-bit code c to the e4m3 number with the same bits, whose value is c / 512."""


EARLY_START_M = 128
"""The largest M for which the GEMM may start while x is quantized (PDL), which saves 2 to 25% of both on an H100."""
ROWS_TO_BLOCKS_LAUNCHES = 8
"""The time to repeat the scale of each row of x per block, for kernels without row scales, in empty launches."""


@dataclass(frozen=True)
class Int8Problem(KernelProblem):
    """A GEMM y [m, n] = activation(A @ W^T + bias) of quantized rows A [m, k] and a block-quantized weight W [n, k].

    In messages, `str` writes W with the shape of its transpose, [k, n], as for 4-bit weights.

    Attributes:
        m: number of rows of A and y.
        n: number of rows of W and columns of y.
        k: number of columns of A and W.
        block_size: number of columns per quantization block of A, or of W if ``row_scales``.
        bits: bits per code of W, 4 or 8.
        x_offset: whether A has an offset per quantization block.
        weight_offset: whether W has an offset per quantization block.
        dtype: dtype of y.
        bias_dtype: dtype of the bias [n], or None without a bias.
        activation: kind of activation, one of `EPILOGUE_ACTIVATIONS`.
        limits: lower and upper bound of the activation "clamp".
        aligned: whether the codes of A start at a multiple of 16 bytes.
        even: whether all rows of y start at a multiple of two elements.
        wide: whether all rows of y start at a multiple of 16 bytes.
        y_stride: row stride of y in elements, or None if y is contiguous.
        fp8: whether A is e4m3 with one scale per row, as in `Fp8Quantization`; otherwise A is int8.
        row_scales: whether each row of A is one quantization block while W has several blocks per row.
        zero_points: whether the offsets of W are integer multiples of its scales (`BlockQuantizedWeight.zero_points`).
        scale_dtype: a dtype that represents the scales of W exactly (`BlockQuantizedWeight.exact_scale_dtype`).
    """

    m: int
    n: int
    k: int
    block_size: int
    bits: int
    x_offset: bool
    weight_offset: bool
    dtype: str
    bias_dtype: str | None = None
    activation: str | None = None
    limits: tuple[float, float] = (0.0, 0.0)
    aligned: bool = True
    even: bool = True
    wide: bool = True
    y_stride: int | None = None
    fp8: bool = False
    row_scales: bool = False
    zero_points: bool = False
    scale_dtype: str = "float32"

    def __str__(self) -> str:
        x = "e4m3" if self.fp8 else "int8"
        return f"x[{self.m}, {self.k}] {x} @ W[{self.k}, {self.n}] int{self.bits} block size {self.block_size}"

    @property
    def tuning_key(self) -> TuningKey:
        """The tuning key: K, N, bits per code and block size, and M rounded up by `next_tuned_m`."""
        op = "gemm_fp8" if self.fp8 else "gemm_int8"
        shape = f"{op} {self.k}x{self.n} {self.bits} bits in blocks of {self.block_size}"
        return TuningKey((shape,), self.m, next_tuned_m(self.m))

    @property
    def blocks(self) -> int:
        """The number of quantization blocks along k."""
        return ceil_div(self.k, self.block_size)

    @property
    def parameters(self) -> int:
        """The number of parameters (scale, offset, sum of codes * scale) per quantization block and row of W."""
        return 1 + (self.weight_offset or self.fp8) + self.x_offset

    @property
    def y_row_stride(self) -> int:
        """The row stride of y in elements: ``y_stride``, or N if y is contiguous."""
        return self.n if self.y_stride is None else self.y_stride

    def defines(self, *, weight_offset: bool) -> tuple[tuple[str, int | str], ...]:
        """Return the compile-time constants (name, value) that all 8-bit GEMM families have."""
        return (
            ("Y", TYPES[self.dtype]),
            ("BITS", self.bits),
            ("FP8", int(self.fp8)),
            ("X_OFFSET", int(self.x_offset)),
            ("WEIGHT_OFFSET", int(weight_offset)),
            *epilogue_defines(self.activation, self.bias_dtype),
        )

    def arguments(self) -> tuple[Argument, ...]:
        """Return the kernel arguments of the families that use `int8_problem.prepare_weight`."""
        x_scale = "x_row_scale" if self.fp8 else "x_scale"
        buffers = ("xq", x_scale, "x_offset", "x_sums", "codes", "parameters", "bias", "y", "partials", "counters")
        padded_n = ceil_div(self.n, PADDED_N) * PADDED_N
        sizes = (self.m, self.n, self.k, self.block_size, padded_n, self.y_row_stride)
        return (*buffers, *map(np.int32, sizes), *map(np.float32, self.limits))

    @classmethod
    def common_problems(cls) -> Iterator[Int8Problem]:
        """Yield GEMMs of common layers, which the compile command compiles in advance.

        They have small and large M and all supported kinds of operands.
        """
        w4a8 = ("float16", 4, 128, False, True)
        for dtype, bits, block_size, x_offset, weight_offset in (
            w4a8,
            ("float16", 4, 128, False, False),
            ("float16", 4, 128, True, True),
            ("float16", 8, 128, False, True),
            ("float16", 8, 4096, False, False),
            ("float16", 4, 32, False, True),
            ("bfloat16", 4, 128, False, True),
        ):
            kind = dtype, bits, block_size, x_offset, weight_offset
            for m in (1, 4, 8, 16, 64, 1024) if kind == w4a8 else (1, 1024):
                yield Int8Problem(m, 4096, 4096, block_size, bits, x_offset, weight_offset, dtype)
        yield Int8Problem(1024, 4096, 4096, 128, 4, False, False, "float16", row_scales=True)
        for dtype in ("float16", "bfloat16"):
            for m in (1, 1024):
                yield Int8Problem(m, 4096, 4096, 128, 4, False, True, dtype, fp8=True)
        for m in (1, 16, 64, 128, 256):
            blocks = Int8Problem(m, 4096, 4096, 128, 4, False, True, "float16", zero_points=True, scale_dtype="float16")
            yield from (blocks, replace(blocks, row_scales=True), replace(blocks, fp8=True))
        yield Int8Problem(1, 64, 66, 66, 4, True, True, "float16")


def is_dependent(m: int, device: Device) -> bool:
    """Return whether the quantization of M rows is a dependent launch that lets the product start early (PDL)."""
    return device.has(Capability.DEPENDENT_LAUNCH) and m <= EARLY_START_M


def layout_refusal(problem: Int8Problem) -> str | None:
    """Return the reason why kernels with 16-byte loads cannot solve the problem, or None if they can."""
    if problem.k % 16:
        return f"needs a multiple of 16 columns, not {problem.k}"
    if not problem.aligned:
        return "needs xq to start at a multiple of 16 bytes"
    if problem.block_size % STEP_K and problem.blocks > 1:
        return f"needs blocks that are multiples of {STEP_K} columns, not {problem.block_size}"
    return clamp_refusal(problem.activation)


def fp8_block_size(block_size: int, k: int) -> int:
    """Return the number of columns per sum of codes in `quantize_fp8`: a divisor of 128.

    If the weight has several blocks per row, the number also divides the weight's block size.
    """
    return math.gcd(block_size, BLOCK_K) if block_size < k else BLOCK_K


def fp8_refusal(block_size: int, k: int, device: Device) -> str | None:
    """Return the reason why no kernel supports e4m3 activations for this K and block size of the weight, or None."""
    reason = device.refusal([Capability.MMA_FP8])
    if reason is not None:
        return reason
    if k % 16:
        return f"needs a multiple of 16 columns, not {k}"
    if fp8_block_size(block_size, k) < STEP_K:
        return f"needs blocks that are multiples of {STEP_K} columns, not {block_size}"
    return None


def prepare_weight(weight: BlockQuantizedWeight, config: Config, problem: Int8Problem) -> dict[str, Array]:
    """Return the weight buffers "codes" and "parameters" for the families without a weight layout of their own.

    ``cuda_src/int8/gemm_int8.cuh`` has the layouts of both buffers.
    """
    return {
        "codes": weight.layout(("int8 codes", problem.fp8), lambda: _codes(weight, problem.fp8)),
        "parameters": weight.layout(
            ("int8 parameters", problem.block_size, problem.fp8),
            lambda: _parameters(weight, problem.block_size, problem.fp8),
        ),
    }


def _codes(weight: BlockQuantizedWeight, fp8: bool) -> Array:
    """Return the codes, uint8 [N, bytes per row], with K padded to a multiple of 32; a byte holds two 4-bit codes.

    The codes are in two's complement, or unsigned if ``fp8``.
    """
    n, _, _, k = weight.shape
    codes = namespace(weight.stored).zeros((n, ceil_div(k, STEP_K) * STEP_K), np.uint8)
    # An unsigned code with its highest bit flipped is code - 2**(bits - 1) in two's complement.
    codes[:, :k] = weight.codes.reshape(n, k) ^ np.uint8(0 if fp8 else 1 << (weight.bits - 1))
    if weight.bits == 8:
        return codes
    halves = codes.reshape(n, -1, 2, STEP_K // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)).reshape(n, -1)


def _parameters(weight: BlockQuantizedWeight, block_size: int, fp8: bool) -> Array:
    """Return scale, offset, and sum of codes * scale (zero if ``fp8``) as float32 [3, blocks of A, padded N]."""
    n = weight.shape[0]
    scale, offset, sums = block_parameters(weight, block_size)
    parameters = namespace(weight.scale).zeros((3, len(scale), ceil_div(n, PADDED_N) * PADDED_N), np.float32)
    if fp8:
        parameters[0, :, :n] = FP8_CODE_SCALE * scale
        parameters[1, :, :n] = -8 * scale
    else:
        # The kernels use a 4-bit code as the high half of a byte, which is 16 times the code.
        parameters[0, :, :n] = scale / 16 if weight.bits == 4 else scale
        parameters[2, :, :n] = sums * scale
    if offset is not None:
        parameters[1, :, :n] += offset
    return parameters


def block_parameters(weight: BlockQuantizedWeight, block_size: int) -> tuple[Array, Array | None, Array]:
    """Return, for the blocks of A, the weight's scales, offsets and sums of signed codes, each [blocks of A, N].

    Scales and offsets are float32 (offsets may be None), sums are int64.
    """
    n, _, _, k = weight.shape
    xp = namespace(weight.scale)
    begins = range(0, k, block_size)
    weight_blocks = xp.asarray([begin // weight.block_size for begin in begins])
    rows = weight.codes.reshape(n, k)
    zero = 1 << (weight.bits - 1)
    sums = [
        rows[:, begin : begin + block_size].sum(1, dtype=np.int64) - zero * min(block_size, k - begin)
        for begin in begins
    ]
    scale, offset = (
        a if a is None else a.astype(np.float32).take(weight_blocks, axis=1).T for a in (weight.scale, weight.offset)
    )
    return scale, offset, xp.stack(sums)
