# SPDX-License-Identifier: Apache-2.0
"""The launch plans of the kernels in ``cuda_src/decoder``: all kernels of a decoder except the quantized GEMMs.

Every ``plan_*`` function is pure and returns the `LaunchPlan` of one kernel. Common arguments are:

- ``m``: number of rows of the activations; each row is one token;
- ``dtype``: dtype of the activations, "float16" or "bfloat16";
- ``eps``: epsilon of RMSNorm;
- ``capacity``: largest number of tokens per sequence in the KV cache;
- ``sequence_stride``: stride of the KV cache between sequences, in elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cupy_awq.kernels.gemm.problem import TYPES, ceil_div, next_power_of_two
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Dim3, Kernel, LaunchPlan

TENSOR_CORE_ARCH = 80
"""The oldest architecture whose tensor cores these kernels use."""
THREADS = 256
"""The default number of threads per CTA."""
MAX_SAMPLE_CTAS = 128
"""The largest number of CTAs per sequence in ``sample_token``."""
MAX_SPLITS = 32
"""The largest number of splits, the CTAs among which ``decode_attention`` divides the keys of a sequence."""
MAX_COUNTERS = 1 << 16
"""The number of counters that ``decode_attention`` can use; m * heads must not exceed it."""
MAX_SIMT_HEADS = 8
"""The largest number of query heads per CTA in attention without tensor cores."""
DENSE_BLOCK_M = 16
"""The number of rows of x per block of ``dense_sm80``."""
DENSE_MAX_M = 128
"""The largest number of rows of x that the CTAs of ``dense_sm80`` compute while the weight is read once."""
PREFILL_TILE = 64
"""The number of queries, and the number of keys, per tile of ``attention_sm80``."""
MIN_SPLIT_KEYS = 64
"""The smallest number of keys per split of ``decode_attention``."""
UNSPLIT_KEYS = 256
"""The largest number of keys for which ``decode_attention_sm80`` uses one split; merging splits takes 1.5 us (H100).

Twice as many if the two splits only balance the SMs.
"""
COMMON_HEADS = ((64, False, (1, 3, 4, 8)), (128, False, (1, 3, 4, 8)), (128, True, (2, 4, 8)))
"""Common values of head_dim, of whether heads are normalized (Qwen3), and of the query heads per KV head."""


@functools.lru_cache(maxsize=1024)
def plan_embed(device: Device, m: int, vocab: int, width: int, table_dtype: str) -> LaunchPlan:
    """Return the plan of ``embed``: h [m, width] = table[tokens], with a table [vocab, width]."""
    threads = 1024  # With one load of 4 values per thread, a CTA covers a row of up to 4096 values.
    arguments = ("tokens", "table", "h", *_int32s(vocab, width))
    plan = _plan(device, "embed", {"TABLE": TYPES[table_dtype]}, (m, 1, 1), threads, arguments)
    return replace(plan, dependent=False)


@functools.lru_cache(maxsize=1024)
def plan_rms_norm(device: Device, m: int, width: int, dtype: str, eps: float, *, delta: bool) -> LaunchPlan:
    """Return the plan of ``rms_norm`` of h [m, width]; with ``delta``, delta [m, width] is added to h first."""
    threads = 256 if width <= 4096 else 1024
    vectors = ceil_div(width, 4 * threads)
    defines: dict[str, int | str] = {"X": TYPES[dtype], "HAS_DELTA": int(delta), "VECTORS": vectors}
    arguments = ("h", "delta", "weight", "x", "inverse_rms", np.int32(width), np.float32(eps))
    return _plan(device, "rms_norm", defines, (m, 1, 1), threads, arguments)


@functools.lru_cache(maxsize=1024)
def plan_swiglu(device: Device, m: int, width: int, dtype: str) -> LaunchPlan:
    """Return the plan of ``swiglu``: y [m, width] = silu(gate) * up of x = (gate, up) [m, 2 * width]."""
    grid = (ceil_div(width, THREADS), m, 1)
    return _plan(device, "swiglu", {"X": TYPES[dtype]}, grid, THREADS, ("x", "y", np.int32(width)))


@functools.lru_cache(maxsize=1024)
def plan_rope_cache(
    device: Device,
    m: int,
    steps: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    sequence_stride: int,
    dtype: str,
    eps: float,
    *,
    norm: bool,
) -> LaunchPlan:
    """Return the plan of ``rope_cache``: apply RoPE to q and k, and append k and v to the KV cache.

    The m rows are ``steps`` new tokens of each of m / steps sequences. With ``norm``, RMSNorm is applied to each head
    of q and k first.
    """
    defines: dict[str, int | str] = {"X": TYPES[dtype], "HEAD_DIM": head_dim, "QK_NORM": int(norm)}
    threads = 128
    sizes = _int32s(m, steps, heads, kv_heads, capacity)
    buffers = ("qkv", "q_norm", "k_norm", "cos", "sin", "lengths", "q", "k", "v")
    arguments = (*buffers, *sizes, np.int64(sequence_stride), np.float32(eps))
    ctas = ceil_div(m * (heads + 2 * kv_heads), threads // 32)
    return _plan(device, "rope_cache", defines, (ctas, 1, 1), threads, arguments)


@functools.lru_cache(maxsize=1024)
def plan_attention(
    device: Device,
    m: int,
    steps: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    sequence_stride: int,
    dtype: str,
) -> LaunchPlan:
    """Return the plan of causal attention in prefill: ``steps`` new tokens of each of m / steps sequences.

    The kernel is ``attention_sm80`` (tensor cores) if the architecture and head_dim permit, else ``attention``.
    """
    sizes = _int32s(steps, heads, kv_heads, capacity)
    scalars = (*sizes, np.int64(sequence_stride), np.float32(head_dim**-0.5))
    defines: dict[str, int | str] = {"X": TYPES[dtype], "HEAD_DIM": head_dim}
    arguments = ("q", "k", "v", "lengths", "out", *scalars)
    if device.arch >= TENSOR_CORE_ARCH and head_dim % 16 == 0 and head_dim <= 128:
        grid = (ceil_div(steps, PREFILL_TILE), heads, m // steps)
        stages, tensors, padded_row_bytes = 2, 2, 2 * (head_dim + 8)  # the two tensors are k and v
        shared_bytes = stages * tensors * PREFILL_TILE * padded_row_bytes
        return _plan(device, "attention_sm80", defines, grid, 128, arguments, shared_bytes=shared_bytes)
    cta_heads, threads, constants = _simt_heads(heads, kv_heads, head_dim)
    return _plan(device, "attention", {**defines, **constants}, (heads // cta_heads, m, 1), threads, arguments)


@functools.lru_cache(maxsize=1024)
def plan_decode_attention(
    device: Device,
    m: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    sequence_stride: int,
    dtype: str,
    eps: float,
    *,
    norm: bool,
    orders_out: bool = False,
) -> LaunchPlan:
    """Return the plan of attention in a decode step, for one new token of each of m sequences.

    The kernel applies RoPE, appends k and v to the KV cache, and computes attention. The kernel is
    ``decode_attention_sm80`` (tensor cores) if the architecture and head_dim permit, else ``decode_attention``. The
    grid does not depend on the lengths of the sequences, so a captured CUDA graph can be replayed for any length. If
    ``orders_out``, the columns of the output are permuted: column i is stored at column ``positions[i]`` (a buffer of
    the kernel).
    """
    defines: dict[str, int | str] = {"X": TYPES[dtype], "HEAD_DIM": head_dim, "QK_NORM": int(norm)}
    defines |= {"ORDER_OUT": int(orders_out)}
    if device.arch >= TENSOR_CORE_ARCH and head_dim % 64 == 0 and head_dim <= 256:
        entry = "decode_attention_sm80"
        # The registers hold the accumulators of at most 16 heads of up to 128 dims, or of 8 heads of 256 dims.
        cta_heads = _cta_heads(heads // kv_heads, 16 if head_dim <= 128 else 8)
        threads = _attention_threads(cta_heads, head_dim)
        ctas_per_sm = 256 // threads
        defines |= {"HEADS": cta_heads, "WARP_KEYS": 16 * max(1, 128 // head_dim), "CTAS_PER_SM": ctas_per_sm}
    else:
        entry = "decode_attention"
        cta_heads, threads, constants = _simt_heads(heads, kv_heads, head_dim)
        if 4 * m * heads // cta_heads > device.sm_count:
            threads = 128  # Use smaller CTAs, so that an SM holds several CTAs, which overlap loads with arithmetic.
        ctas_per_sm = 2 if threads > 128 else 3
        defines |= constants
        if threads == 128 and cta_heads > 2 and dtype == "bfloat16":
            defines |= {"UNROLL": 2}  # With 4, ptxas spills registers.
    unsplit_ctas, unsplit_keys = m * heads // cta_heads, UNSPLIT_KEYS
    splits = max(1, min(MAX_SPLITS, ctas_per_sm * device.sm_count // unsplit_ctas))
    small = entry == "decode_attention_sm80" and ctas_per_sm == 1 and head_dim < 128  # an SM has room for two CTAs
    if small and device.sm_count < unsplit_ctas <= device.sm_count * 3 // 2:
        # Some SMs would have two CTAs and the others one. On an H100, a layer of Llama-3.2-1B with 17, 21 and 24
        # sequences of 2,048 tokens takes 52.1, 57.4 and 62.1 us with two splits, and 58.9, 64.3 and 66.2 with one.
        splits, unsplit_keys = 2, 2 * UNSPLIT_KEYS
    defines |= {"MAX_SPLITS": next_power_of_two(splits), "MIN_SPLIT_KEYS": MIN_SPLIT_KEYS}
    if entry == "decode_attention_sm80":
        defines |= {"UNSPLIT_KEYS": unsplit_keys}
        # On an H100, this prefetch speeds up a layer of Qwen3-8B (head_dim 128) by 1 to 5% with 12 and 24 sequences of
        # 1,024 tokens, and slows down a layer of Llama-3.2-1B (head_dim 64) by 4% with 24.
        defines |= {"KEYS_AHEAD": int(splits == 1 and head_dim >= 128)}
    # Request half of the shared memory to limit residency to one CTA per SM. With two CTAs per SM, CTAs are distributed
    # unevenly while the preceding kernel occupies some SMs: a layer of Llama-3.2-1B with 16 sequences takes 47.1
    # instead of 41.9 us on an H100.
    spread = small and splits == 1 and unsplit_ctas <= device.sm_count
    shared_bytes = device.shared_bytes_per_sm // 2 if spread else 0
    buffers = ["qkv", "q_norm", "k_norm", "cos", "sin", "lengths", "k", "v", "out", "partials", "counters"]
    if orders_out:
        buffers.append("positions")
    grid = splits, heads // cta_heads, m
    scalars = [*_int32s(heads, kv_heads, capacity), np.int64(sequence_stride)]
    scalars += [np.float32(head_dim**-0.5), np.float32(eps)]
    arguments = *buffers, *scalars
    return _plan(device, entry, defines, grid, threads, arguments, shared_bytes=shared_bytes)


def attention_workspace(plan: LaunchPlan, head_dim: int) -> tuple[int, int]:
    """Return the numbers of float32 partial sums and of uint32 counters that a plan of decode attention needs."""
    splits, head_ctas, m = plan.grid
    if splits == 1:
        return 0, 0
    defines = dict(plan.kernel.defines)
    return m * head_ctas * int(defines["MAX_SPLITS"]) * int(defines["HEADS"]) * (head_dim + 2), m * head_ctas


@functools.lru_cache(maxsize=1024)
def plan_dense(
    device: Device, m: int, n: int, k: int, dtype: str, out_dtype: str, *, bias: bool, block: int | None = None
) -> LaunchPlan:
    """Return the plan of a GEMM with a weight in 16 or 8 bits: y [m, n] = x [m, k] @ w [n, k]^T + bias.

    With ``block``, the number of values along k per scale (a multiple of 16), the weight is given by the buffers
    ``codes``, uint8 [n, k], and ``code_scales`` [n, k / block] of ``dtype``; else by ``w`` [n, k] of ``dtype``.
    """
    defines: dict[str, int | str] = {"X": TYPES[dtype], "Y": TYPES[out_dtype], "HAS_BIAS": int(bias)}
    buffers: tuple[str, ...]
    if block is None:
        name, buffers, step_values = "dense", ("x", "w", "bias", "y"), 1
    else:
        name, buffers, step_values = "dense_int8", ("x", "codes", "code_scales", "bias", "y"), 2
        defines |= {"BLOCK": block}
    if device.arch >= TENSOR_CORE_ARCH and k % 32 == 0:
        threads = 512
        # A step loads 2 * `threads` bytes of each row of w. The number of steps limits the loads in flight per CTA to
        # 64 KiB; more loads in flight slow down LM heads by 1 to 4% on an H100.
        step_k = step_values * threads
        steps = ceil_div(k, step_k * ceil_div(k, 4 * step_k))
        # With 8-bit codes, ptxas spills registers if TILES is 4 and STEPS is 2 and, for sm_10x, if their product is 8.
        # On an H100, heads with K = 2048 take 0.80 to 0.86 of the time with 3 tiles.
        has_codes = block is not None
        tiles = min(3 if has_codes and steps == 2 else 4, (4 if has_codes and 100 <= device.arch < 120 else 8) // steps)
        # More blocks per CTA save reads of the weight from L2, but need more registers and, with more than two tiles,
        # more shared memory than a CTA has.
        m_blocks = ceil_div(m, DENSE_BLOCK_M)
        blocks = 1 if block is not None else m_blocks if m_blocks <= 3 else 2
        tiles = tiles if blocks == 1 else min(tiles, 2)
        groups = m_blocks if blocks == 1 else ceil_div(m, DENSE_MAX_M)
        sharing = ceil_div(m_blocks, blocks * groups)
        grid = (sharing, min(ceil_div(n, 8 * tiles), device.sm_count // sharing), groups)
        defines |= {"TILES": tiles, "STEPS": steps, "BLOCKS": blocks}
        plan = _plan(device, f"{name}_sm80", defines, grid, threads, (*buffers, *_int32s(m, n, k)))
        return replace(plan, prefers_l1=True)
    grid = (ceil_div(n, THREADS // 32), m, 1)
    return _plan(device, name, defines, grid, THREADS, (*buffers, *_int32s(n, k)))


@functools.lru_cache(maxsize=1024)
def plan_sample_token(
    device: Device,
    m: int,
    vocab: int,
    *,
    first_sequence: int = 0,
    seed: int = 0,
    temperature: float = 0.0,
    penalty: float = 1.0,
    advance: bool = False,
) -> LaunchPlan:
    """Return the plan of ``sample_token``, which samples the next token of m sequences of a batch.

    The sequences are first_sequence to first_sequence + m - 1 of the batch; all buffers start at sequence
    first_sequence. With ``advance``, the kernel also increments the lengths of the sequences and writes the tokens to
    host memory. The buffer ``limits`` is a null pointer if every token may be sampled.
    """
    arguments = (
        *("logits", "seen", "limits", "tokens", "lengths", "partials", "counters", "host_tokens"),
        *(*_int32s(vocab, first_sequence), np.uint64(seed), np.float32(temperature), np.float32(penalty)),
    )
    defines = _sampling_constants(temperature, penalty) | {"ADVANCE": int(advance)}
    resident_ctas = 1024 // THREADS * device.sm_count
    ctas = max(1, min(MAX_SAMPLE_CTAS, resident_ctas // m))
    return _plan(device, "sample_token", defines, (ctas, m, 1), THREADS, arguments, source="sample")


@functools.lru_cache(maxsize=1024)
def plan_sampling_threshold(
    device: Device,
    m: int,
    vocab: int,
    *,
    temperature: float,
    penalty: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> LaunchPlan:
    """Return the plan of ``sampling_threshold``, which computes the smallest logit per sequence that may be sampled.

    The kernel applies the penalty and the temperature to the logits first; top-k, top-p and min-p then determine the
    smallest one.
    """
    log_min_p = math.log(min_p) if min_p > 0 else -math.inf
    arguments = (
        *("logits", "seen", "limits", *_int32s(vocab, min(top_k, vocab))),
        *(np.float32(temperature), np.float32(penalty), np.float32(top_p), np.float32(log_min_p)),
    )
    defines = _sampling_constants(temperature, penalty) | {"ADVANCE": 0}
    return _plan(device, "sampling_threshold", defines, (1, m, 1), 1024, arguments, source="sample")


def kernels(device: Device) -> Iterator[Kernel]:
    """Yield the kernels of common models, with the combinations of COMMON_HEADS and 8 KV heads.

    Attention of decode steps is listed for 1 and 64 sequences; other numbers of splits are compiled on first use.
    """
    for dtype in ("float16", "bfloat16"):
        yield plan_embed(device, 1, 8, 8, dtype).kernel
        yield plan_swiglu(device, 1, 8, dtype).kernel
        for width, delta in ((2048, False), (2048, True), (4096, True)):
            yield plan_rms_norm(device, 1, width, dtype, 1e-6, delta=delta).kernel
        for head_dim, norm, groups in COMMON_HEADS:
            yield plan_rope_cache(device, 1, 1, 4, 4, head_dim, 8, 8, dtype, 1e-6, norm=norm).kernel
            for group in groups:
                sizes = 8 * group, 8, head_dim, 8, 8, dtype
                yield plan_attention(device, 2, 2, *sizes).kernel
                for m in (1, 64):
                    yield plan_decode_attention(device, m, *sizes, 1e-6, norm=norm).kernel
        for k, out_dtype in ((64, dtype), *((k, "float32") for k in (64, 896, 1536, 4096, 72))):
            for m in (1, 17, 33):
                yield plan_dense(device, m, 8, k, dtype, out_dtype, bias=False).kernel
        for block, k, out_dtype in ((32, 4096, dtype), (32, 2048, "float32"), (16, 4096, "float32"), (16, 144, dtype)):
            yield plan_dense(device, 1, 8, k, dtype, out_dtype, bias=False, block=block).kernel
    for temperature, penalty in ((0.0, 1.0), (0.0, 1.1), (0.8, 1.0), (0.8, 1.1)):
        for advance in (False, True):
            yield plan_sample_token(device, 1, 8, temperature=temperature, penalty=penalty, advance=advance).kernel
        if temperature:
            yield plan_sampling_threshold(device, 1, 8, temperature=temperature, penalty=penalty).kernel


def _plan(
    device: Device,
    entry: str,
    defines: dict[str, int | str],
    grid: Dim3,
    threads: int,
    arguments: tuple[Argument, ...],
    *,
    source: str | None = None,
    shared_bytes: int = 0,
) -> LaunchPlan:
    """Return the plan of kernel ``entry``, with programmatic dependent launch (PDL) on sm_90 and newer."""
    dependent = device.arch >= 90
    constants = (*defines.items(), ("DEPENDENT", int(dependent)), ("THREADS", threads))
    kernel = Kernel(f"decoder/{source or entry}.cu", entry, constants, device.target)
    return LaunchPlan(kernel, grid, (threads, 1, 1), arguments, shared_bytes, dependent=dependent)


def _int32s(*values: int) -> tuple[Argument, ...]:
    return tuple(map(np.int32, values))


def _cta_heads(heads_per_kv_head: int, most: int) -> int:
    """Return the number of query heads per CTA: the largest divisor of ``heads_per_kv_head`` up to ``most``."""
    return max(i for i in range(1, most + 1) if heads_per_kv_head % i == 0)


def _attention_threads(cta_heads: int, head_dim: int) -> int:
    """Return the number of threads per attention CTA for which shared memory can hold the accumulators of all warps."""
    return 256 if cta_heads * head_dim <= 1024 else 128


def _simt_heads(heads: int, kv_heads: int, head_dim: int) -> tuple[int, int, dict[str, int | str]]:
    """Return (query heads per CTA, threads per CTA, compile-time constants) of attention without tensor cores."""
    cta_heads = _cta_heads(heads // kv_heads, MAX_SIMT_HEADS)
    lanes = 1 << (ceil_div(head_dim, 8) - 1).bit_length()
    constants: dict[str, int | str] = {"HEADS": cta_heads, "LANES": lanes, "UNROLL": 2 if cta_heads > 4 else 4}
    return cta_heads, _attention_threads(cta_heads, head_dim), constants


def _sampling_constants(temperature: float, penalty: float) -> dict[str, int | str]:
    return {"SAMPLES": int(temperature > 0), "PENALTY": int(penalty != 1)}
