# SPDX-License-Identifier: Apache-2.0
"""``attention_mma`` and ``attention``: causal attention in prefill, with tensor cores (mma.sync) and without."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.decoder.common import (
    CACHE_BUFFERS,
    COMMON_HEADS,
    MAX_SIMT_HEADS,
    SIMT_FACTOR,
    attention_threads,
    count_cta_heads,
    int32s,
    plan_launch,
    simt_constants,
)
from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES
from cupy_awq.kernels.family import MemoryBoundProblem, SoleConfig, SoleConfigFamily
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Argument, LaunchPlan

PREFILL_TILE = 64
"""The number of queries per tile of ``attention_mma``."""
KEY_BLOCK = 32
"""The number of keys per pipeline stage of ``attention_mma``, those of a block of the cache."""
STAGES, CTAS_PER_SM = 3, 2
"""The number of pipeline stages of ``attention_mma``, and the number of its CTAs per SM."""
GROUP_THREADS = 128
"""The number of threads that compute a tile; without cp.async, a CTA of ``attention_mma`` has two such groups."""


@dataclass(frozen=True)
class Attention(MemoryBoundProblem):
    """Causal attention of rows, tokens of any sequences, to the tokens up to each of them.

    Attributes:
        m: number of rows of qkv and of the result.
        heads, kv_heads: numbers of query heads and of KV heads.
        head_dim: number of columns per head.
        capacity: largest number of tokens per sequence in the KV cache.
        block_stride: stride of the KV cache between blocks, in elements.
        dtype: dtype of qkv, the cache and the result, "float16" or "bfloat16".
        eps: epsilon of the RMSNorm of heads.
        norm: whether RMSNorm is applied to each head of q first.
        tiles: number of tiles of up to `PREFILL_TILE` rows, each of one sequence.
    """

    m: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    block_stride: int
    dtype: str
    eps: float
    norm: bool
    tiles: int

    COMMON = tuple(
        (2, 8 * group, 8, head_dim, 32, 8, dtype, 1e-6, norm, 1)
        for dtype in ("float16", "bfloat16")
        for head_dim, norm, groups in COMMON_HEADS
        for group in groups
    )

    def __str__(self) -> str:
        cache = f"k, v[{self.m}, {self.kv_heads}, {self.capacity}, {self.head_dim}]"
        return f"attention of q[{self.m}, {self.heads}, {self.head_dim}] {self.dtype} to {cache}"

    @property
    def nbytes(self) -> int:
        """The size of q, of the result and of a full sequence for each tile in bytes."""
        rows = self.m * self.heads + self.tiles * self.kv_heads * self.capacity
        return 2 * rows * self.head_dim * ITEMSIZE[self.dtype]

    def defines(self) -> dict[str, int | str]:
        """Return the compile-time constants (name, value) of both kernels."""
        return {"X": TYPES[self.dtype], "HEAD_DIM": self.head_dim, "QK_NORM": int(self.norm)}

    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments of both kernels: qkv, q_norm, cos, sin, k, v, `CACHE_BUFFERS`, out and sizes."""
        sizes = int32s(self.heads, self.kv_heads, self.capacity)
        scalars = (
            *sizes,
            np.int64(self.block_stride),
            *map(np.float32, (self.head_dim**-0.5 * math.log2(math.e), self.eps)),
        )
        return ("qkv", "q_norm", "cos", "sin", "k", "v", *CACHE_BUFFERS, "out", *scalars)


class AttentionMma(SoleConfigFamily[Attention]):
    """The kernel family ``attention_mma``: prefill attention on tensor cores."""

    NAME = "attention_mma"
    needs = Capability.MMA_M16N8K8, Capability.LDMATRIX

    def refusal(self, problem: Attention, device: Device) -> str | None:
        reason = device.refusal(self.needs, problem.dtype)
        if reason is None and (problem.head_dim % 16 or problem.head_dim > 128):
            return f"needs a head dimension that is a multiple of 16 up to 128, not {problem.head_dim}"
        return reason

    def plan(self, config: SoleConfig, problem: Attention, device: Device) -> LaunchPlan:
        """Return the launch plan; the buffers are those of `Attention.arguments`."""
        # Two heads per CTA halve the reads of shared memory, but up to one wave of CTAs, the longest sets the time: on
        # an H100, 512 and 1,024 tokens of 32 heads take 24 and 52 us with one head, 29 and 59 us with two. Without
        # cp.async, and with other head dimensions, registers of two heads would spill.
        is_async = device.has(Capability.CP_ASYNC)
        two_heads = problem.head_dim % 32 == 0 and problem.heads // 2 * problem.tiles > CTAS_PER_SM * device.sm_count
        cta_heads = count_cta_heads(problem.heads // problem.kv_heads, 1 + (is_async and two_heads))
        stages, groups, ctas_per_sm = (STAGES, 1, CTAS_PER_SM) if is_async else (1, CTAS_PER_SM, 1)
        tensors, padded_row_bytes = 2, 2 * (problem.head_dim + 8)  # the two tensors are k and v
        shared_bytes = groups * stages * tensors * KEY_BLOCK * padded_row_bytes
        defines = {**problem.defines(), "HEADS": cta_heads, "STAGES": stages, "CTAS_PER_SM": ctas_per_sm}
        defines |= {"ASYNC": int(is_async)}
        grid = (problem.heads // cta_heads, problem.tiles, 1)
        arguments, threads = problem.arguments(), groups * GROUP_THREADS
        return plan_launch(device, self.NAME, defines, grid, threads, arguments, shared_bytes=shared_bytes)


class AttentionSimt(SoleConfigFamily[Attention]):
    """The kernel family ``attention``: prefill attention on CUDA cores, for any GPU."""

    NAME = "attention"

    def estimate_us(self, config: SoleConfig, problem: Attention, device: Device) -> float:
        return SIMT_FACTOR * super().estimate_us(config, problem, device)

    def plan(self, config: SoleConfig, problem: Attention, device: Device) -> LaunchPlan:
        """Return the launch plan; the buffers are those of `Attention.arguments`."""
        cta_heads = count_cta_heads(problem.heads // problem.kv_heads, MAX_SIMT_HEADS)
        threads = attention_threads(cta_heads, problem.head_dim)
        defines = {**problem.defines(), **simt_constants(cta_heads, problem.head_dim)}
        grid = (problem.heads // cta_heads, problem.m, 1)
        return plan_launch(device, self.NAME, defines, grid, threads, problem.arguments())


ATTENTION_MMA = AttentionMma()
ATTENTION = AttentionSimt()
