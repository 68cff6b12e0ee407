# SPDX-License-Identifier: Apache-2.0
"""The launches of a decoder's kernels other than its quantized products; ``cuda_src/llm`` says what each computes.

``m`` counts rows: tokens of one sequence, or one token of each of several. Dtypes are names.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cupy_awq.kernels.problem import TYPES, ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Dim3, Kernel, LaunchPlan

MMA_ARCH = 80
THREADS = 256
CHOOSE_BLOCKS = 128
"""At most, of a sequence."""
MAX_SPLITS = 32
MAX_COUNTERS = 1 << 16
"""Of ``decode_attention``: rows of a launch, times heads."""
MAX_HEADS = 8
"""Query heads of a key head that one block of plain attention takes."""
MMA_ROWS = 16
"""Rows for which ``dense_sm80`` reads its weight once."""
TILE = 64
"""Queries and keys of a tile of ``attention_sm80``."""
SPAN = 64
"""Keys for which a split of ``decode_attention`` is worth its while."""
ALONE = 256
"""Keys up to which it has one split on tensor cores: to merge several takes 1.5 us on an H100."""


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
    dependent = device.arch >= 90
    constants = (*defines.items(), ("DEPENDENT", int(dependent)), ("THREADS", threads))
    kernel = Kernel(f"llm/{source or entry}.cu", entry, constants, device.target)
    return LaunchPlan(kernel, grid, (threads, 1, 1), arguments, shared_bytes, dependent=dependent)


def _ints(*values: int) -> tuple[Argument, ...]:
    return tuple(map(np.int32, values))


@functools.lru_cache(maxsize=1024)
def embed(device: Device, m: int, vocab: int, width: int, table: str) -> LaunchPlan:
    sizes = _ints(vocab, width)
    threads = 1024  # which read a row of up to 4,096 values at once
    plan = _plan(device, "embed", {"TABLE": TYPES[table]}, (m, 1, 1), threads, ("tokens", "table", "h", *sizes))
    return replace(plan, dependent=False)


@functools.lru_cache(maxsize=1024)
def rms_norm(device: Device, m: int, width: int, dtype: str, eps: float, *, delta: bool) -> LaunchPlan:
    threads = 256 if width <= 4096 else 1024
    vectors = ceil_div(width, 4 * threads)
    defines: dict[str, int | str] = {"X": TYPES[dtype], "HAS_DELTA": int(delta), "VECTORS": vectors}
    arguments = ("h", "delta", "weight", "x", "inverse", np.int32(width), np.float32(eps))
    return _plan(device, "rms_norm", defines, (m, 1, 1), threads, arguments)


@functools.lru_cache(maxsize=1024)
def swiglu(device: Device, m: int, width: int, dtype: str) -> LaunchPlan:
    grid = (ceil_div(width, THREADS), m, 1)
    return _plan(device, "swiglu", {"X": TYPES[dtype]}, grid, THREADS, ("x", "y", np.int32(width)))


@functools.lru_cache(maxsize=1024)
def rope_cache(
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
    defines: dict[str, int | str] = {"X": TYPES[dtype], "HEAD_DIM": head_dim, "QK_NORM": int(norm)}
    threads = 128
    sizes = _ints(m, steps, heads, kv_heads, capacity)
    buffers = ("qkv", "q_norm", "k_norm", "cos", "sin", "lengths", "q", "k", "v")
    arguments = (*buffers, *sizes, np.int64(sequence_stride), np.float32(eps))
    blocks = ceil_div(m * (heads + 2 * kv_heads), threads // 32)
    return _plan(device, "rope_cache", defines, (blocks, 1, 1), threads, arguments)


@functools.lru_cache(maxsize=1024)
def attention(
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
    """On tensor cores where they can do it; otherwise in plain CUDA."""
    sizes = _ints(steps, heads, kv_heads, capacity)
    scalars = (*sizes, np.int64(sequence_stride), np.float32(head_dim**-0.5))
    defines: dict[str, int | str] = {"X": TYPES[dtype], "HEAD_DIM": head_dim}
    arguments = ("q", "k", "v", "lengths", "out", *scalars)
    if device.arch >= MMA_ARCH and head_dim % 16 == 0 and head_dim <= 128:
        grid = (ceil_div(steps, TILE), heads, m // steps)
        shared_bytes = 2 * 2 * TILE * (head_dim + 8) * 2  # stages, k and v, rows, padded values, bytes
        return _plan(device, "attention_sm80", defines, grid, 128, arguments, shared_bytes=shared_bytes)
    part, threads, sharing = _sharing(heads, kv_heads, head_dim)
    return _plan(device, "attention", {**defines, **sharing}, (heads // part, m, 1), threads, arguments)


@functools.lru_cache(maxsize=1024)
def decode_attention(
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
) -> LaunchPlan:
    """On tensor cores where they can do it; otherwise in plain CUDA. Its grid depends on no length: a captured graph
    serves all."""
    defines: dict[str, int | str] = {"X": TYPES[dtype], "HEAD_DIM": head_dim, "QK_NORM": int(norm)}
    defines |= {"MAX_SPLITS": MAX_SPLITS, "SPAN": SPAN}
    if device.arch >= MMA_ARCH and head_dim % 64 == 0 and head_dim <= 256:
        entry = "decode_attention_sm80"
        part = _part(heads // kv_heads, 16 if head_dim <= 128 else 8)  # whose sums the registers hold
        threads = _threads(part, head_dim)
        resident = 256 // threads
        defines |= {"HEADS": part, "KEYS": 16 * max(1, 128 // head_dim), "ALONE": ALONE, "RESIDENT": resident}
    else:
        entry = "decode_attention"
        part, threads, sharing = _sharing(heads, kv_heads, head_dim)
        if 4 * m * heads // part > device.sm_count:
            threads = 128  # several blocks a multiprocessor, whose loads and sums overlap
        resident = 2 if threads > 128 else 3
        defines |= sharing
    splits = max(1, min(MAX_SPLITS, resident * device.sm_count // (m * heads // part)))
    # One block a multiprocessor: two, for which registers would suffice, go to one while the kernel before still has
    # the others (Llama-3.2-1B's layer, 16 sequences, H100: 47.1 us, so 41.9).
    apart = resident == 1 and head_dim < 128 and splits == 1 and m * heads // part <= device.sm_count
    shared_bytes = device.shared_bytes_per_sm // 2 if apart else 0
    buffers = ("qkv", "q_norm", "k_norm", "cos", "sin", "lengths", "k", "v", "out", "partials", "counters")
    sizes = _ints(heads, kv_heads, capacity)
    scalars = np.int64(sequence_stride), np.float32(head_dim**-0.5), np.float32(eps)
    grid, arguments = (splits, heads // part, m), (*buffers, *sizes, *scalars)
    return _plan(device, entry, defines, grid, threads, arguments, shared_bytes=shared_bytes)


def _part(sharing: int, most: int) -> int:
    """Query heads that a block takes of those that share a key head."""
    return max(i for i in range(1, most + 1) if sharing % i == 0)


def _threads(part: int, head_dim: int) -> int:
    """Of a block, whose warps' sums lie in shared memory."""
    return 256 if part * head_dim <= 1024 else 128


def _sharing(heads: int, kv_heads: int, head_dim: int) -> tuple[int, int, dict[str, int | str]]:
    """Query heads and threads of a block of plain attention, and the constants that follow."""
    part = _part(heads // kv_heads, MAX_HEADS)
    lanes = 1 << (ceil_div(head_dim, 8) - 1).bit_length()
    return part, _threads(part, head_dim), {"HEADS": part, "LANES": lanes, "UNROLL": 2 if part > 4 else 4}


def attention_workspace(plan: LaunchPlan, head_dim: int) -> tuple[int, int]:
    """float32 values of partial sums, and counters, of a plan of `decode_attention`."""
    splits, parts, m = plan.grid
    heads = dict(plan.kernel.defines)["HEADS"]
    if splits == 1:
        return 0, 0
    return m * parts * MAX_SPLITS * int(heads) * (head_dim + 2), m * parts


@functools.lru_cache(maxsize=1024)
def dense(device: Device, m: int, n: int, k: int, dtype: str, out: str, *, bias: bool) -> LaunchPlan:
    defines: dict[str, int | str] = {"X": TYPES[dtype], "Y": TYPES[out], "HAS_BIAS": int(bias)}
    buffers = ("x", "w", "bias", "y")
    if device.arch >= MMA_ARCH and k % 32 == 0:
        threads = 512
        # A step takes `threads` values of each row. At most 64 KiB of w are under way in a block: with 96 or 128 KiB a
        # head took 1 to 4% longer on an H100.
        steps = ceil_div(k, threads * ceil_div(k, 4 * threads))
        tiles = min(4, 8 // steps)
        grid = (min(ceil_div(n, 8 * tiles), device.sm_count), ceil_div(m, MMA_ROWS), 1)
        defines |= {"TILES": tiles, "STEPS": steps}
        plan = _plan(device, "dense_sm80", defines, grid, threads, (*buffers, *_ints(m, n, k)))
        return replace(plan, prefers_l1=True)
    grid = (ceil_div(n, THREADS // 32), m, 1)
    return _plan(device, "dense", defines, grid, THREADS, (*buffers, *_ints(n, k)))


@functools.lru_cache(maxsize=1024)
def choose(
    device: Device,
    m: int,
    vocab: int,
    *,
    row: int = 0,
    seed: int = 0,
    temperature: float = 0.0,
    penalty: float = 1.0,
    advance: bool = False,
) -> LaunchPlan:
    """The arrays begin at sequence ``row`` of the batch. ``limits`` may be a null pointer: all tokens may be chosen."""
    arguments = (
        *("logits", "seen", "limits", "tokens", "lengths", "partials", "counters", "arrived"),
        *(*_ints(vocab, row), np.uint64(seed), np.float32(temperature), np.float32(penalty)),
    )
    defines = _sampling(temperature, penalty) | {"ADVANCE": int(advance)}
    blocks = max(1, min(CHOOSE_BLOCKS, 1024 // THREADS * device.sm_count // m))  # as many as run at once
    return _plan(device, "choose", defines, (blocks, m, 1), THREADS, arguments, source="sample")


@functools.lru_cache(maxsize=1024)
def choose_limit(
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
    log_min_p = np.log(np.float32(min_p)) if min_p > 0 else np.float32(-np.inf)
    arguments = (
        *("logits", "seen", "limits", np.int32(vocab), np.int32(top_k)),
        *(np.float32(temperature), np.float32(penalty), np.float32(top_p), np.float32(log_min_p)),
    )
    defines = _sampling(temperature, penalty) | {"ADVANCE": 0}
    return _plan(device, "choose_limit", defines, (1, m, 1), 1024, arguments, source="sample")


def _sampling(temperature: float, penalty: float) -> dict[str, int | str]:
    return {"SAMPLES": int(temperature > 0), "PENALTY": int(penalty != 1)}


def kernels(device: Device) -> Iterator[Kernel]:
    """Those of common models: heads of 64 and 128, with 1, 3, 4 and 8 query heads for a key head."""
    for dtype in ("float16", "bfloat16"):
        yield embed(device, 1, 8, 8, dtype).kernel
        yield swiglu(device, 1, 8, dtype).kernel
        for width, delta in ((2048, False), (2048, True), (4096, True)):
            yield rms_norm(device, 1, width, dtype, 1e-6, delta=delta).kernel
        for head_dim in (64, 128):
            for norm in (False, True):
                yield rope_cache(device, 1, 1, 4, 4, head_dim, 8, 8, dtype, 1e-6, norm=norm).kernel
                for group in (1, 3, 4, 8):
                    yield decode_attention(device, 1, group, 1, head_dim, 8, 8, dtype, 1e-6, norm=norm).kernel
            for group in (1, 3, 4, 8):
                yield attention(device, 2, 2, group, 1, head_dim, 8, 8, dtype).kernel
        for k, out in ((64, dtype), *((k, "float32") for k in (64, 896, 1536, 4096, 72))):
            yield dense(device, 1, 8, k, dtype, out, bias=False).kernel
    for temperature, penalty in ((0.0, 1.0), (0.0, 1.1), (0.8, 1.0), (0.8, 1.1)):
        for advance in (False, True):
            yield choose(device, 1, 8, temperature=temperature, penalty=penalty, advance=advance).kernel
        if temperature:
            yield choose_limit(device, 1, 8, temperature=temperature, penalty=penalty).kernel
