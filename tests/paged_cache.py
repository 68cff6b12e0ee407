# SPDX-License-Identifier: Apache-2.0
"""Arrays for tests of the decoder's kernels, and launches on a KV cache whose blocks are shuffled."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cupy_awq.kernels.decoder import decoder as llm
from cupy_awq.kernels.decoder.attention import PREFILL_TILE
from cupy_awq.kernels.decoder.begin_step import work_items
from cupy_awq.kernels.decoder.decode_attention import attention_workspace
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.llm.decoder.block_pool import BLOCK
from tests.backends import runner
from tests.test_kernels import facts


def nan(*shape: int, dtype: Any) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def frozen(**arrays: np.ndarray) -> dict[str, np.ndarray]:
    """Make arrays read-only, as a kernel must not write them, and return them."""
    for a in arrays.values():
        a.flags.writeable = False
    return arrays


def check_close(found: np.ndarray, wanted: np.ndarray, bound: float) -> None:
    found = found.astype(np.float64)
    assert np.isfinite(found).all(), f"{np.count_nonzero(~np.isfinite(found))} elements were not written"
    assert np.linalg.norm(found - wanted) <= bound * np.linalg.norm(wanted)
    assert np.abs(found - wanted).max() <= 10 * bound * np.abs(wanted).max()


def pages(rng: np.random.Generator, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a block table and keys and values [blocks, kv_heads, BLOCK, head_dim] with the contents of a cache.

    The blocks are shuffled, and others of NaN lie in between. Row 0 of the table is that of padding rows; sequence i of
    the cache has row i + 1.
    """
    sequences, kv_heads, capacity, head_dim = k.shape
    width = ceil_div(capacity, BLOCK)
    ids = 1 + rng.permutation(2 * sequences * width)[: sequences * width].reshape(sequences, width)
    table = np.concatenate([np.zeros((1, width)), ids]).astype(np.int32)
    found = []
    for a in (k, v):
        padded = nan(sequences, kv_heads, width * BLOCK, head_dim, dtype=a.dtype)
        padded[:, :, :capacity] = a
        blocks = nan(1 + 2 * sequences * width, kv_heads, BLOCK, head_dim, dtype=a.dtype)
        blocks[0] = 0
        blocks[ids] = padded.reshape(sequences, kv_heads, width, BLOCK, head_dim).transpose(0, 2, 1, 3, 4)
        found.append(blocks)
    return table, found[0], found[1]


def from_pages(table: np.ndarray, blocks: np.ndarray, capacity: int) -> np.ndarray:
    """Return the contiguous cache [sequences, kv_heads, capacity, head_dim] of `pages`."""
    whole = blocks[table[1:]].transpose(0, 2, 1, 3, 4)
    return whole.reshape(*whole.shape[:2], -1, whole.shape[-1])[:, :, :capacity]


def take_pages(table: np.ndarray, found: tuple[np.ndarray, np.ndarray], arrays: dict[str, Any]) -> None:
    """Copy the contents of `pages` back to ``arrays``, and check that no other block was written, nor the padding's."""
    others = np.setdiff1d(np.arange(1, 1 + 2 * (len(table) - 1) * table.shape[1]), table)
    for name, blocks in zip("kv", found, strict=True):
        arrays[name][...] = from_pages(table, blocks, arrays[name].shape[2])
        assert np.isnan(blocks[others].astype(np.float32)).all()
        assert not blocks[0].any(), "a padding row is not appended"


def run_rope(backend: str, arch: int, norm: bool, steps: int, arrays: dict[str, np.ndarray]) -> None:
    """Run rope_cache on ``steps`` rows of each sequence and a padding row, in random order; write k and v."""
    _, kv_heads, capacity, head_dim = arrays["k"].shape
    m, heads = len(arrays["qkv"]), arrays["qkv"].shape[1] - 2 * kv_heads
    table, k, v = pages(np.random.default_rng(0), arrays["k"], arrays["v"])
    within = arrays["lengths"][:, None] + np.arange(steps)
    lengths = np.append(np.where(within < capacity, within, table.shape[1] * BLOCK), -1).astype(np.int32)
    slots = np.append(np.repeat(np.arange(1, 1 + m // steps), steps), 0).astype(np.int32)
    order = np.random.default_rng(1).permutation(m + 1)
    qkv = np.concatenate([arrays["qkv"], arrays["qkv"][:1]])[order]
    sizes = kv_heads, head_dim, table.shape[1] * BLOCK, kv_heads * BLOCK * head_dim, k.dtype.name
    plan = llm.plan_rope_cache(facts(arch, backend), m + 1, heads, *sizes, 1e-6, norm)
    read = {name: arrays[name] for name in ("k_norm", "cos", "sin")}
    rows = frozen(lengths=lengths[order], slots=slots[order], table=table, qkv=qkv)
    runner(backend)(plan, {**read, **rows, "work": None, "k": k, "v": v})
    take_pages(table, (k, v), arrays)


def run_attention(backend: str, arch: int, norm: bool, steps: int, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return the attention of ``steps`` rows of each sequence, in one launch with a padding row."""
    k, m = arrays["k"], len(arrays["qkv"])
    heads, head_dim = arrays["qkv"].shape[1] - 2 * k.shape[1], k.shape[3]
    table, *cache = pages(np.random.default_rng(0), k, arrays["v"])
    lengths = np.append(np.repeat(arrays["lengths"], steps) + np.arange(m) % steps, -1).astype(np.int32)
    slots = np.append(1 + np.arange(m) // steps, 0).astype(np.int32)
    firsts = [first for row in range(0, m, steps) for first in range(row, row + steps, PREFILL_TILE)]
    counts = [min(PREFILL_TILE, steps - first % steps) for first in firsts]
    tiles = [
        (first, count, lengths[first], slots[first]) for first, count in zip([*firsts, m], [*counts, 1], strict=True)
    ]
    out, qkv = nan(m + 1, heads, head_dim, dtype=k.dtype), np.concatenate([arrays["qkv"], arrays["qkv"][:1]])
    sizes = k.shape[1], head_dim, table.shape[1] * BLOCK, k.shape[1] * BLOCK * head_dim, k.dtype.name
    here = dataclasses.replace(facts(arch, backend), sm_count=1)  # so that CTAs compute two heads where they can
    plan = llm.plan_attention(here, m + 1, heads, *sizes, 1e-6, norm, len(tiles))
    read = {name: arrays[name] for name in ("q_norm", "cos", "sin")}
    rows = frozen(qkv=qkv, k=cache[0], v=cache[1], lengths=lengths, slots=slots, table=table)
    runner(backend)(plan, {**read, **rows, "work": np.array(tiles[::-1], np.int32), "out": out})
    assert np.isfinite(out[-1].astype(np.float32)).all()
    return out[:-1]


def run_begin_step(backend: str, arch: int, rows: np.ndarray, table: np.ndarray, splits: int) -> dict[str, np.ndarray]:
    """Run begin_step on rows [m, 5], with the newest token 100 + i of sequence i; return what it writes."""
    m = len(rows)
    plan = llm.plan_begin_step(facts(arch, backend), m, table.shape[1], splits)
    found = {name: np.full(m, -7, np.int32) for name in ("tokens", "lengths", "slots")}
    found |= {"work": np.full((work_items(m, splits), 4), -7, np.int32), "table": table}
    newest = 100 + np.arange(len(table), dtype=np.int32)
    runner(backend)(plan, {**frozen(rows=rows, newest=newest), **found})
    return found


def run_decode_attention(
    backend: str,
    arch: int,
    arrays: dict[str, Any],
    splits: int,
    *,
    norm: bool,
    orders_out: bool = False,
    appended: bool = False,
) -> None:
    """Run begin_step and decode attention, with a padding row, for rows in random order; write k, v and out.

    With ``appended``, rope_cache appends to the cache before. Sequences that are full have padding rows.
    """
    m, heads, head_dim = arrays["out"].shape
    _, kv_heads, _, _ = arrays["k"].shape
    table, k, v = pages(np.random.default_rng(0), arrays["k"], arrays["v"])
    capacity = table.shape[1] * BLOCK
    order = np.random.default_rng(2).permutation(m + 1)
    fits = arrays["lengths"] < arrays["k"].shape[2]
    rows = np.full((m + 1, 5), -1, np.int32)
    for i in np.flatnonzero(fits):
        at = arrays["lengths"][i] // BLOCK
        rows[i] = i + 1, arrays["lengths"][i], table[i + 1, max(at - 1, 0)], table[i + 1, at], -1
    written = table.copy()
    for slot, position, *_ in rows[rows[:, 0] >= 0]:
        written[slot, max(position // BLOCK - 1, 0) : position // BLOCK + 1] = 0
    step = run_begin_step(backend, arch, rows[order], written, splits)
    np.testing.assert_array_equal(written, table)
    here = dataclasses.replace(facts(arch, backend), sm_count=2)  # so that a CTA has several items of the work list
    plan = llm.plan_decode_attention(
        here, m + 1, heads, kv_heads, head_dim, capacity, kv_heads * BLOCK * head_dim, k.dtype.name,
        1e-6, norm, splits, orders_out, appended,
    )  # fmt: skip
    partials, counters = attention_workspace(plan, m + 1, heads, head_dim)
    scratch = {"partials": nan(partials, dtype=np.float32), "counters": np.zeros(counters, np.uint32)}
    out, qkv = nan(m + 1, heads, head_dim, dtype=k.dtype), np.concatenate([arrays["qkv"], arrays["qkv"][:1]])[order]
    read = {name: arrays[name] for name in ("q_norm", "k_norm", "cos", "sin")} | frozen(qkv=qkv, **{"table": table})
    cache = {**{name: step[name] for name in ("lengths", "slots", "work")}, "k": k, "v": v}
    if appended:
        sizes = heads, kv_heads, head_dim, capacity, kv_heads * BLOCK * head_dim, k.dtype.name, 1e-6, norm
        rope = llm.plan_rope_cache(here, m + 1, *sizes)
        runner(backend)(rope, {**read, **cache})
    positions = arrays.get("positions")
    runner(backend)(plan, {**read, **cache, **scratch, "out": out, "positions": positions})
    assert not scratch["counters"].any(), "the counters must be zero after the launch"
    assert np.isfinite(out.astype(np.float32)).all()
    take_pages(table, (k, v), arrays)
    arrays["out"][...] = out[np.argsort(order)[:m]]
