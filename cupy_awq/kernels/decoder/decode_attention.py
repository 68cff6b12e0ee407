# SPDX-License-Identifier: Apache-2.0
"""``decode_attention_sm80`` and ``decode_attention``: attention in a decode step, with tensor cores and without.

The kernels apply RoPE, append k and v to the KV cache, and compute attention. Their grid does not depend on the lengths
of the sequences, so a captured CUDA graph can be replayed for any length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cupy_awq.kernels.decoder.common import (
    COMMON_HEADS,
    MAX_SIMT_HEADS,
    SIMT_FACTOR,
    attention_threads,
    cache_buffers,
    count_cta_heads,
    int32s,
    plan_launch,
    simt_constants,
)
from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES
from cupy_awq.kernels.family import Family, KernelProblem, SoleConfig
from cupy_awq.kernels.tiling import ceil_div, next_power_of_two
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Argument, LaunchPlan

MAX_SPLITS = 32
"""The largest number of splits, the CTAs among which the keys of a sequence are divided."""
MAX_COUNTERS = 1 << 16
"""The number of counters that the kernels can use; m * heads must not exceed it."""
MIN_SPLIT_KEYS = 64
"""The smallest number of keys per split."""
RANGE_KEYS = 2048
"""The largest number of keys per split of a paged cache, for rows that then have at most `MAX_SPLITS`."""
UNSPLIT_KEYS = 256
"""The largest number of keys for which ``decode_attention_sm80`` uses one split; merging splits takes 1.5 us (H100).

Twice as many if the two splits only balance the SMs.
"""


@dataclass(frozen=True)
class DecodeAttention(KernelProblem):
    """The attention of one new token of each of m sequences.

    Attributes:
        m: number of sequences.
        heads, kv_heads, head_dim, capacity, sequence_stride, dtype: as in `Attention`, for qkv instead of q.
        eps: epsilon of the RMSNorm of heads.
        norm: whether RMSNorm is applied to each head of q and k first.
        orders_out: whether the columns of the result are permuted: column i is stored at column ``positions[i]``.
        splits: 0 if the KV cache is contiguous. Else the number of splits of a row, as from `choose_splits`; the cache
            then consists of blocks, and sequence_stride is the stride between them.
        appended: whether ``rope_cache`` has appended the keys and values of the new tokens to a paged cache before, so
            that several of them may be of one sequence.
    """

    m: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    sequence_stride: int
    dtype: str
    eps: float
    norm: bool
    orders_out: bool = False
    splits: int = 0
    appended: bool = False

    COMMON = tuple(
        (m, 8 * group, 8, head_dim, 32, 8, dtype, 1e-6, norm, False, splits, appended)
        for dtype in ("float16", "bfloat16")
        for head_dim, norm, groups in COMMON_HEADS
        for group in groups
        for m, splits, appended in ((1, 0, False), (64, 0, False), (1, 16, False), (64, 1, False), (4, 4, True))
    )

    def __str__(self) -> str:
        cache = f"k, v[{self.m}, {self.kv_heads}, {self.capacity}, {self.head_dim}]"
        return f"attention of q[{self.m}, {self.heads}, {self.head_dim}] {self.dtype} to {cache} in a decode step"

    def defines(self) -> dict[str, int | str]:
        """Return the compile-time constants (name, value) of both kernels."""
        constants: dict[str, int | str] = {"X": TYPES[self.dtype], "HEAD_DIM": self.head_dim}
        options = {"QK_NORM": int(self.norm), "ORDER_OUT": int(self.orders_out), "PAGED": int(self.splits > 0)}
        return {**constants, **options, "APPENDED": int(self.appended), **range_constants(self.splits or 1)}

    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments of both kernels: qkv, q_norm, k_norm, cos, sin, the cache, out, the workspace and sizes.

        The cache is that of `cache_buffers`, k and v; the workspace is partials and counters; with ``orders_out`` the
        buffer positions follows.
        """
        cache = (*cache_buffers(self.splits > 0), "k", "v")
        buffers = ("qkv", "q_norm", "k_norm", "cos", "sin", *cache, "out", "partials", "counters")
        order = ("positions",) if self.orders_out else ()
        sizes = (*int32s(self.heads, self.kv_heads, self.capacity), np.int64(self.sequence_stride))
        return (*buffers, *order, *sizes, np.float32(self.head_dim**-0.5), np.float32(self.eps))


@dataclass(frozen=True)
class DecodeAttentionConfig(SoleConfig):
    """A configuration of ``decode_attention_sm80`` or ``decode_attention``.

    Attributes:
        cta_heads: number of query heads per CTA.
        threads: number of threads per CTA.
        splits: number of CTAs among which the keys of a sequence are divided; of all CTAs, if the cache is paged.
        unsplit_keys: (sm80) largest number of keys that one of the CTAs attends to alone.
        shared_bytes: dynamic shared memory per CTA in bytes, of which the kernel uses none; it limits residency.
    """

    cta_heads: int
    threads: int
    splits: int
    unsplit_keys: int = UNSPLIT_KEYS
    shared_bytes: int = 0


def range_constants(splits: int) -> dict[str, int | str]:
    """Return the compile-time constants (name, value) of the ranges of keys of a paged cache."""
    keys = {"MIN_SPLIT_KEYS": MIN_SPLIT_KEYS, "UNSPLIT_KEYS": UNSPLIT_KEYS, "RANGE_KEYS": RANGE_KEYS}
    return {"SPLITS": splits, "MAX_SPLITS": MAX_SPLITS, **keys}


def choose_splits(heads: int, kv_heads: int, head_dim: int, m: int, device: Device) -> int:
    """Return the number of splits of a row of a paged cache for m rows of equal length.

    It minimizes the rounds of the CTAs times the time of a round; merging takes about 1% per split.

    >>> from cupy_awq.runtime.device import KNOWN
    >>> [choose_splits(32, 8, 128, m, KNOWN["h100"]) for m in (1, 4, 16, 24, 32)]
    [16, 4, 1, 2, 1]
    """
    cta_heads = count_cta_heads(heads // kv_heads, 16 if head_dim <= 128 else 8)
    ctas = _ctas_per_sm(attention_threads(cta_heads, head_dim)) * device.sm_count
    items = m * heads // cta_heads
    return min(range(1, MAX_SPLITS + 1), key=lambda splits: ceil_div(items * splits, ctas) * (1 / splits + 0.01))


def _choose_splits(ctas: int, ctas_per_sm: int, device: Device) -> int:
    """Return the number of splits that fills the GPU, for a launch that has ``ctas`` CTAs without splits."""
    return max(1, min(MAX_SPLITS, ctas_per_sm * device.sm_count // ctas))


def _estimate_us(problem: DecodeAttention, device: Device) -> float:
    """Return the time in microseconds to read a full KV cache."""
    cached = 2 * problem.m * problem.kv_heads * problem.capacity * problem.head_dim * ITEMSIZE[problem.dtype]
    return device.rates.launch_us + device.read_us(cached)


def _plan(
    name: str, config: DecodeAttentionConfig, problem: DecodeAttention, device: Device, defines: dict[str, int | str]
) -> LaunchPlan:
    grid = config.splits, problem.heads // config.cta_heads, problem.m
    if problem.splits:
        grid = config.splits, 1, 1
    arguments, shared_bytes = problem.arguments(), config.shared_bytes
    plan = plan_launch(device, name, defines, grid, config.threads, arguments, shared_bytes=shared_bytes)
    # The kernel reads the cache before the PDL wait, so it must start after the kernel that has appended to the cache.
    return replace(plan, dependent=plan.dependent and not problem.appended)


class DecodeAttentionSm80(Family[DecodeAttention, DecodeAttentionConfig]):
    """The kernel family ``decode_attention_sm80``: attention of a decode step on tensor cores."""

    NAME = "decode_attention_sm80"
    needs = Capability.MMA_M16N8K16, Capability.CP_ASYNC

    def refusal(self, problem: DecodeAttention, device: Device) -> str | None:
        reason = device.refusal(self.needs)
        if reason is None and (problem.head_dim % 64 or problem.head_dim > 256):
            return f"needs a head dimension that is a multiple of 64 up to 256, not {problem.head_dim}"
        return reason

    def configs(self, problem: DecodeAttention, device: Device) -> list[DecodeAttentionConfig]:
        """Return the family's single configuration, whose number of splits depends on the problem and the GPU."""
        # The registers hold the accumulators of at most 16 heads of up to 128 dims, or of 8 heads of 256 dims.
        cta_heads = count_cta_heads(problem.heads // problem.kv_heads, 16 if problem.head_dim <= 128 else 8)
        threads = attention_threads(cta_heads, problem.head_dim)
        ctas_per_sm = _ctas_per_sm(threads)
        unsplit_ctas, unsplit_keys = problem.m * problem.heads // cta_heads, UNSPLIT_KEYS
        if problem.splits:
            return [DecodeAttentionConfig(cta_heads, threads, _count_ctas(unsplit_ctas, ctas_per_sm, device))]
        splits = _choose_splits(unsplit_ctas, ctas_per_sm, device)
        small = ctas_per_sm == 1 and problem.head_dim < 128  # with a small head_dim an SM has room for two CTAs
        if small and device.sm_count < unsplit_ctas <= device.sm_count * 3 // 2:
            # Some SMs would have two CTAs and the others one. On an H100, a layer of Llama-3.2-1B with 17, 21 and 24
            # sequences of 2,048 tokens takes 52.1, 57.4 and 62.1 us with two splits, and 58.9, 64.3 and 66.2 with one.
            splits, unsplit_keys = 2, 2 * UNSPLIT_KEYS
        # Request half of the shared memory to limit residency to one CTA per SM. With two CTAs per SM, CTAs are
        # distributed unevenly while the preceding kernel occupies some SMs: a layer of Llama-3.2-1B with 16 sequences
        # takes 47.1 instead of 41.9 us on an H100.
        spread = small and splits == 1 and unsplit_ctas <= device.sm_count
        shared_bytes = device.shared_bytes_per_sm // 2 if spread else 0
        return [DecodeAttentionConfig(cta_heads, threads, splits, unsplit_keys, shared_bytes)]

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
            "KEYS_AHEAD": int((problem.splits or config.splits) == 1 and problem.head_dim >= 128),
        }
        if not problem.splits:
            defines |= {"MAX_SPLITS": next_power_of_two(config.splits), "UNSPLIT_KEYS": config.unsplit_keys}
        return _plan(self.NAME, config, problem, device, defines)


class DecodeAttentionSimt(Family[DecodeAttention, DecodeAttentionConfig]):
    """The kernel family ``decode_attention``: attention of a decode step on CUDA cores, for any GPU."""

    NAME = "decode_attention"

    def configs(self, problem: DecodeAttention, device: Device) -> list[DecodeAttentionConfig]:
        """Return the family's single configuration, whose number of splits depends on the problem and the GPU."""
        cta_heads = count_cta_heads(problem.heads // problem.kv_heads, MAX_SIMT_HEADS)
        threads = attention_threads(cta_heads, problem.head_dim)
        if 4 * problem.m * problem.heads // cta_heads > device.sm_count:
            threads = 128  # Use smaller CTAs, so that an SM holds several CTAs, which overlap loads with arithmetic.
        unsplit_ctas = problem.m * problem.heads // cta_heads
        if problem.splits:
            return [DecodeAttentionConfig(cta_heads, threads, _count_ctas(unsplit_ctas, 2, device))]
        splits = _choose_splits(unsplit_ctas, 2 if threads > 128 else 3, device)
        return [DecodeAttentionConfig(cta_heads, threads, splits)]

    def estimate_us(self, config: DecodeAttentionConfig, problem: DecodeAttention, device: Device) -> float:
        """Return SIMT_FACTOR times the time in microseconds to read a full KV cache."""
        return SIMT_FACTOR * _estimate_us(problem, device)

    def plan(self, config: DecodeAttentionConfig, problem: DecodeAttention, device: Device) -> LaunchPlan:
        """Return the launch plan; the buffers are those of `DecodeAttention.arguments`."""
        defines = {**problem.defines(), **simt_constants(config.cta_heads, problem.head_dim)}
        # With larger unroll factors, ptxas spills registers.
        if problem.dtype == "bfloat16" and problem.splits and not device.has(Capability.BFLOAT16):
            defines |= {"UNROLL": max(1, 8 // config.cta_heads)}
        elif problem.dtype == "bfloat16" and config.threads == 128 and config.cta_heads > 2:
            defines |= {"UNROLL": 2}
        if not problem.splits:
            defines |= {"MAX_SPLITS": next_power_of_two(config.splits)}
        return _plan(self.NAME, config, problem, device, defines)


def _count_ctas(unsplit_ctas: int, ctas_per_sm: int, device: Device) -> int:
    """Return the number of CTAs for the items of a paged cache: at most `MAX_SPLITS` per row and block of heads."""
    return min(ctas_per_sm * device.sm_count, MAX_SPLITS * unsplit_ctas)


def _ctas_per_sm(threads: int) -> int:
    """Return the number of CTAs per SM for which ``decode_attention_sm80`` is compiled."""
    return 256 // threads


DECODE_ATTENTION_SM80 = DecodeAttentionSm80()
DECODE_ATTENTION = DecodeAttentionSimt()


def attention_workspace(plan: LaunchPlan, m: int, heads: int, head_dim: int) -> tuple[int, int]:
    """Return the numbers of float32 partial sums and of uint32 counters that a plan of decode attention needs."""
    defines = dict(plan.kernel.defines)
    if plan.grid[0] == 1 and not defines["PAGED"]:
        return 0, 0
    counters = m * heads // int(defines["HEADS"])
    return counters * int(defines["MAX_SPLITS"]) * int(defines["HEADS"]) * (head_dim + 2), counters
