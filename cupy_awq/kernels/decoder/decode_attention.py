# SPDX-License-Identifier: Apache-2.0
"""``decode_attention_mma`` and ``decode_attention``: attention in a decode step, with tensor cores and without.

The kernels apply RoPE, append k and v to the KV cache, and compute attention. Their grid does not depend on the lengths
of the sequences, so a captured CUDA graph can be replayed for any length: CTAs take turns at ranges of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from cupy_awq.kernels.family import Family, KernelProblem, SoleConfig
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Argument, LaunchPlan

MAX_SPLITS = 32
"""The largest number of splits of a row: ranges of its keys, which are computed separately and then merged."""
MAX_COUNTERS = 1 << 16
"""The number of counters that the kernels can use; m * heads must not exceed it."""
MIN_SPLIT_KEYS = 96
"""The smallest number of keys per split; with 64, a step of Qwen3-30B takes 1 us more per layer (1,024 keys, H200)."""
RANGE_KEYS = 2048
"""The largest number of keys per split, for rows that then have at most `MAX_SPLITS`."""
UNSPLIT_KEYS = 256
"""The largest number of keys of a row with one split; merging splits takes 1.5 us (H100)."""


@dataclass(frozen=True)
class DecodeAttention(KernelProblem):
    """The attention of m new tokens, one per sequence or, if ``appended``, several.

    Attributes:
        m: number of rows.
        heads, kv_heads, head_dim, capacity, block_stride, dtype: as in `Attention`, for qkv instead of q.
        eps: epsilon of the RMSNorm of heads.
        norm: whether RMSNorm is applied to each head of q and k first.
        splits: number of splits of a row, as from `choose_splits`.
        orders_out: whether the columns of the result are permuted: column i is stored at column ``positions[i]``.
        appended: whether ``rope_cache`` has appended the keys and values of the new tokens before, so that several of
            them may be of one sequence.
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
    splits: int
    orders_out: bool = False
    appended: bool = False

    COMMON = tuple(
        (m, 8 * group, 8, head_dim, 32, 8, dtype, 1e-6, norm, splits, False, appended)
        for dtype in ("float16", "bfloat16")
        for head_dim, norm, groups in COMMON_HEADS
        for group in groups
        for m, splits, appended in ((1, 16, False), (64, 1, False), (4, 4, True))
    )

    def __str__(self) -> str:
        cache = f"k, v[{self.m}, {self.kv_heads}, {self.capacity}, {self.head_dim}]"
        return f"attention of q[{self.m}, {self.heads}, {self.head_dim}] {self.dtype} to {cache} in a decode step"

    def defines(self) -> dict[str, int | str]:
        """Return the compile-time constants (name, value) of both kernels."""
        constants: dict[str, int | str] = {"X": TYPES[self.dtype], "HEAD_DIM": self.head_dim}
        options = {"QK_NORM": int(self.norm), "ORDER_OUT": int(self.orders_out), "APPENDED": int(self.appended)}
        return {**constants, **options, "MAX_SPLITS": MAX_SPLITS}

    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments of both kernels: qkv, q_norm, k_norm, cos, sin, the cache, out, the workspace and sizes.

        The cache is `CACHE_BUFFERS`, k and v; the workspace is partials and counters; with ``orders_out`` the buffer
        positions follows.
        """
        cache = (*CACHE_BUFFERS, "k", "v")
        buffers = ("qkv", "q_norm", "k_norm", "cos", "sin", *cache, "out", "partials", "counters")
        order = ("positions",) if self.orders_out else ()
        sizes = (*int32s(self.capacity), np.int64(self.block_stride))
        return (*buffers, *order, *sizes, np.float32(self.head_dim**-0.5), np.float32(self.eps))


@dataclass(frozen=True)
class DecodeAttentionConfig(SoleConfig):
    """A configuration of ``decode_attention_mma`` or ``decode_attention``.

    Attributes:
        cta_heads: number of query heads per CTA.
        threads: number of threads per CTA.
        ctas: number of CTAs.
    """

    cta_heads: int
    threads: int
    ctas: int


def range_constants(splits: int) -> dict[str, int | str]:
    """Return the compile-time constants (name, value) of the ranges of keys."""
    keys = {"MIN_SPLIT_KEYS": MIN_SPLIT_KEYS, "UNSPLIT_KEYS": UNSPLIT_KEYS, "RANGE_KEYS": RANGE_KEYS}
    return {"SPLITS": splits, "MAX_SPLITS": MAX_SPLITS, **keys}


def choose_splits(heads: int, kv_heads: int, head_dim: int, m: int, device: Device) -> int:
    """Return the number of splits of a row for m rows of equal length.

    It minimizes the rounds of the CTAs times the time of a round; merging takes about 1% per split.

    >>> from cupy_awq.runtime.device import KNOWN
    >>> [choose_splits(32, 8, 128, m, KNOWN["h100"]) for m in (1, 4, 16, 24, 32)]
    [16, 4, 1, 2, 1]
    """
    cta_heads = count_cta_heads(heads // kv_heads, 16 if head_dim <= 128 else 8)
    ctas = _ctas_per_sm(attention_threads(cta_heads, head_dim)) * device.sm_count
    items = m * heads // cta_heads
    return min(range(1, MAX_SPLITS + 1), key=lambda splits: ceil_div(items * splits, ctas) * (1 / splits + 0.01))


def _estimate_us(problem: DecodeAttention, device: Device) -> float:
    """Return the time in microseconds to read a full KV cache."""
    cached = 2 * problem.m * problem.kv_heads * problem.capacity * problem.head_dim * ITEMSIZE[problem.dtype]
    return device.rates.launch_us + device.read_us(cached)


def _plan(
    name: str, config: DecodeAttentionConfig, problem: DecodeAttention, device: Device, defines: dict[str, int | str]
) -> LaunchPlan:
    group = problem.heads // problem.kv_heads
    blocks = {"HEAD_BLOCKS": problem.heads // config.cta_heads, "GROUP_BLOCKS": group // config.cta_heads}
    grid = config.ctas, 1, 1
    plan = plan_launch(device, name, {**defines, **blocks}, grid, config.threads, problem.arguments())
    # The kernel reads the cache before the PDL wait, so it must start after the kernel that has appended to the cache.
    return replace(plan, dependent=plan.dependent and not problem.appended)


class DecodeAttentionMma(Family[DecodeAttention, DecodeAttentionConfig]):
    """The kernel family ``decode_attention_mma``: attention of a decode step on tensor cores."""

    NAME = "decode_attention_mma"
    needs = (Capability.MMA_M16N8K8,)

    def refusal(self, problem: DecodeAttention, device: Device) -> str | None:
        reason = device.refusal(self.needs, problem.dtype)
        if reason is None and (problem.head_dim % 64 or problem.head_dim > 256):
            return f"needs a head dimension that is a multiple of 64 up to 256, not {problem.head_dim}"
        return reason

    def configs(self, problem: DecodeAttention, device: Device) -> list[DecodeAttentionConfig]:
        """Return the family's single configuration."""
        # The registers hold the accumulators of at most 16 heads of up to 128 dims, or of 8 heads of 256 dims.
        cta_heads = count_cta_heads(problem.heads // problem.kv_heads, 16 if problem.head_dim <= 128 else 8)
        threads = attention_threads(cta_heads, problem.head_dim)
        return [
            DecodeAttentionConfig(cta_heads, threads, _count_ctas(problem, cta_heads, _ctas_per_sm(threads), device))
        ]

    def estimate_us(self, config: DecodeAttentionConfig, problem: DecodeAttention, device: Device) -> float:
        """Return the time in microseconds to read a full KV cache."""
        return _estimate_us(problem, device)

    def plan(self, config: DecodeAttentionConfig, problem: DecodeAttention, device: Device) -> LaunchPlan:
        """Return the launch plan; the buffers are those of `DecodeAttention.arguments`."""
        defines = {
            **problem.defines(),
            "HEADS": config.cta_heads,
            "WARP_KEYS": 16 * max(1, 128 // problem.head_dim),
            "CTAS_PER_SM": _ctas_per_sm(config.threads),
            # On an H100, this prefetch speeds up a layer of Qwen3-8B (head_dim 128) by 1 to 5% with 12 and 24 sequences
            # of 1,024 tokens, and slows down a layer of Llama-3.2-1B (head_dim 64) by 4% with 24.
            "KEYS_AHEAD": int(problem.splits == 1 and problem.head_dim >= 128),
        }
        return _plan(self.NAME, config, problem, device, defines)


class DecodeAttentionSimt(Family[DecodeAttention, DecodeAttentionConfig]):
    """The kernel family ``decode_attention``: attention of a decode step on CUDA cores, for any GPU."""

    NAME = "decode_attention"

    def configs(self, problem: DecodeAttention, device: Device) -> list[DecodeAttentionConfig]:
        """Return the family's single configuration."""
        cta_heads = count_cta_heads(problem.heads // problem.kv_heads, MAX_SIMT_HEADS)
        threads = attention_threads(cta_heads, problem.head_dim)
        if 4 * problem.m * problem.heads // cta_heads > device.sm_count:
            threads = 128  # Use smaller CTAs, so that an SM holds several CTAs, which overlap loads with arithmetic.
        return [DecodeAttentionConfig(cta_heads, threads, _count_ctas(problem, cta_heads, 2, device))]

    def estimate_us(self, config: DecodeAttentionConfig, problem: DecodeAttention, device: Device) -> float:
        """Return SIMT_FACTOR times the time in microseconds to read a full KV cache."""
        return SIMT_FACTOR * _estimate_us(problem, device)

    def plan(self, config: DecodeAttentionConfig, problem: DecodeAttention, device: Device) -> LaunchPlan:
        """Return the launch plan; the buffers are those of `DecodeAttention.arguments`."""
        defines = {**problem.defines(), **simt_constants(config.cta_heads, problem.head_dim)}
        # With larger unroll factors, ptxas spills registers.
        if problem.dtype == "bfloat16" and not device.has(Capability.BFLOAT16):
            defines |= {"UNROLL": max(1, 8 // config.cta_heads)}
        elif problem.dtype == "bfloat16" and config.threads == 128 and config.cta_heads > 2:
            defines |= {"UNROLL": 2}
        return _plan(self.NAME, config, problem, device, defines)


def _count_ctas(problem: DecodeAttention, cta_heads: int, ctas_per_sm: int, device: Device) -> int:
    """Return the number of CTAs: those that fit, but at most `MAX_SPLITS` per row and block of heads."""
    return min(ctas_per_sm * device.sm_count, MAX_SPLITS * problem.m * problem.heads // cta_heads)


def _ctas_per_sm(threads: int) -> int:
    """Return the number of CTAs per SM for which ``decode_attention_mma`` is compiled."""
    return 256 // threads


DECODE_ATTENTION_MMA = DecodeAttentionMma()
DECODE_ATTENTION = DecodeAttentionSimt()


def attention_workspace(plan: LaunchPlan, m: int, heads: int, head_dim: int) -> tuple[int, int]:
    """Return the numbers of float32 partial sums and of uint32 counters that a plan of decode attention needs."""
    defines = dict(plan.kernel.defines)
    counters = m * heads // int(defines["HEADS"])
    return counters * int(defines["MAX_SPLITS"]) * int(defines["HEADS"]) * (head_dim + 2), counters
