# SPDX-License-Identifier: Apache-2.0
"""Tests of the decoder's kernels from their launch plans, against float64 formulas, simulated and on a GPU."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from cupy_awq.kernels.decoder import decoder as llm
from cupy_awq.kernels.decoder.decode_attention import MAX_SPLITS, UNSPLIT_KEYS
from cupy_awq.kernels.decoder.sampling import MAX_SAMPLE_CTAS, SLOT_OPTIONS, slot_options
from cupy_awq.llm.decoder.sampling import Offsets, Sampling, choose_token
from tests.backends import BACKENDS, runner
from tests.paged_cache import (
    check_close,
    frozen,
    nan,
    normal,
    run_attention,
    run_decode_attention,
    run_rope,
)
from tests.test_kernels import ARCHS, BOUNDS, DTYPES, facts

SIXTEEN = ("float16", "bfloat16")
CAPACITY, LENGTHS = 140, (0, 37, 65)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [*SIXTEEN, "float32"])
def test_embed_copies_rows_and_never_reads_outside_the_table(backend: str, arch: int, dtype: str) -> None:
    table = normal(np.random.default_rng(0), 7, 300, dtype=DTYPES[dtype])
    tokens, h = np.array([6, 0, -1, 7], np.int32), nan(4, 300, dtype=np.float32)
    plan = llm.plan_embed(facts(arch, backend), 4, 7, 300, dtype)
    runner(backend)(plan, {**frozen(tokens=tokens, table=table), "h": h})
    np.testing.assert_array_equal(h, table[[6, 0, 0, 0]].astype(np.float32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("width", [4, 576, 4100, 8192])
def test_rms_norm_adds_delta_to_the_residual_stream_before_it_normalizes(
    backend: str, arch: int, dtype: str, delta: bool, width: int
) -> None:
    rng = np.random.default_rng(width)
    h, added = normal(rng, 3, width), normal(rng, 3, width, dtype=DTYPES[dtype])
    weight = normal(rng, width)
    before, x = h.copy(), nan(3, width, dtype=DTYPES[dtype])
    plan = llm.plan_rms_norm(facts(arch, backend), 3, width, dtype, 1e-5, delta=delta)
    inverse_rms = nan(3, dtype=np.float32)
    runner(backend)(plan, {"h": h, **frozen(weight=weight, delta=added), "x": x, "inverse_rms": inverse_rms})
    wanted = before + added.astype(np.float32) if delta else before
    np.testing.assert_array_equal(h, wanted)
    scale = 1 / np.sqrt((wanted.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5)
    check_close(x, wanted * scale * weight, BOUNDS[dtype])
    np.testing.assert_allclose(inverse_rms, scale[:, 0], rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_swiglu_of_large_gates_stays_finite(backend: str, arch: int, dtype: str) -> None:
    x = normal(np.random.default_rng(0), 3, 600, dtype=DTYPES[dtype])
    x[0, :4] = [-100, 100, -30, 30]
    y = nan(3, 300, dtype=DTYPES[dtype])
    runner(backend)(llm.plan_swiglu(facts(arch, backend), 3, 300, dtype), {**frozen(x=x), "y": y})
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    check_close(y, gate / (1 + np.exp(-gate)) * up, BOUNDS[dtype])


def rotated(x: np.ndarray, weight: np.ndarray | None, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Return heads [.., head_dim] after RMSNorm (if ``weight`` is given) and RoPE, by the float64 formulas."""
    x = x.astype(np.float64)
    if weight is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize(("head_dim", "norm", "steps"), [(64, False, 1), (128, True, 1), (16, True, 3), (80, False, 3)])
def test_rope_and_cache_append_start_at_the_position_of_each_sequence(
    backend: str, arch: int, dtype: str, head_dim: int, norm: bool, steps: int
) -> None:
    """RoPE and the append to the KV cache use each sequence's own position; a full sequence writes nothing."""
    heads, kv_heads, element = 4, 2, DTYPES[dtype]
    rng = np.random.default_rng(head_dim)
    lengths = np.array([0, 37, CAPACITY - steps, CAPACITY], np.int32)
    m = len(lengths) * steps
    qkv = normal(rng, m, heads + 2 * kv_heads, head_dim, dtype=element)
    k_norm = normal(rng, head_dim)
    cos, sin = normal(rng, CAPACITY, head_dim // 2), normal(rng, CAPACITY, head_dim // 2)
    shape = len(lengths), kv_heads, CAPACITY, head_dim
    arrays = {name: nan(*shape, dtype=element) for name in "kv"}
    read = frozen(qkv=qkv, k_norm=k_norm, cos=cos, sin=sin, lengths=lengths)
    run_rope(backend, arch, norm, steps, {**read, **arrays})
    _, k, v = np.split(qkv, [heads, heads + kv_heads], axis=1)
    written = np.zeros(shape, bool)
    for row in range(m):
        b, at = row // steps, lengths[row // steps] + row % steps
        if at >= CAPACITY:
            continue
        wanted = rotated(k[row], k_norm if norm else None, cos[at], sin[at])
        check_close(arrays["k"][b, :, at], wanted, BOUNDS[dtype])
        np.testing.assert_array_equal(arrays["v"][b, :, at], v[row])
        written[b, :, at] = True
    for name in ("k", "v"):
        assert np.isnan(arrays[name].astype(np.float32)[~written]).all()


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the attention of q [heads, head_dim] to k and v [kv_heads, keys, head_dim], by the float64 formulas."""
    out = np.empty(q.shape)
    for head in range(len(q)):
        keys, values = (a[head // (len(q) // len(k))].astype(np.float64) for a in (k, v))
        scores = keys @ q[head].astype(np.float64) / math.sqrt(q.shape[1])
        p = np.exp(scores - scores.max())
        out[head] = p / p.sum() @ values
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "steps", "norm"),
    [
        (2, 1, 64, 25, False), (1, 1, 128, 17, True), (4, 1, 128, 70, True), (2, 2, 80, 5, False), (7, 1, 256, 3, True),
        (1, 1, 16, 70, True), (9, 3, 24, 5, False),
    ],
)  # fmt: skip
def test_attention_of_a_prompt_is_causal_and_stays_in_its_sequence(
    backend: str, arch: int, dtype: str, heads: int, kv_heads: int, head_dim: int, steps: int, norm: bool
) -> None:
    """Prompt attention sees only earlier keys of its own sequence: all others hold NaN, which would show."""
    rng = np.random.default_rng(heads + head_dim)
    lengths, element = np.array(LENGTHS, np.int32), DTYPES[dtype]
    b = len(lengths)
    m = b * steps
    qkv = normal(rng, m, heads + 2 * kv_heads, head_dim, dtype=element)
    q_norm = normal(rng, head_dim)
    cos, sin = normal(rng, CAPACITY, head_dim // 2), normal(rng, CAPACITY, head_dim // 2)
    k, v = (normal(rng, b, kv_heads, CAPACITY, head_dim, dtype=element) for _ in "kv")
    for i, length in enumerate(LENGTHS):
        k[i, :, length + steps :] = v[i, :, length + steps :] = np.nan
    read = frozen(qkv=qkv, q_norm=q_norm, cos=cos, sin=sin, k=k, v=v, lengths=lengths)
    out = run_attention(backend, arch, norm, steps, read)
    wanted = np.empty(out.shape)
    for row in range(m):
        i, at = row // steps, LENGTHS[row // steps] + row % steps
        q = rotated(qkv[row, :heads], q_norm if norm else None, cos[at], sin[at])
        wanted[row] = attention(q, k[i, :, : at + 1], v[i, :, : at + 1])
    check_close(out, wanted, 2 * BOUNDS[dtype])  # the kernel on tensor cores also rounds the probabilities to 16 bits


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_of_a_bfloat16_prompt_on_sm_75(backend: str) -> None:
    """The tensor cores of sm_75 have no bfloat16, so that prompts take the kernel for CUDA cores."""
    test_attention_of_a_prompt_is_causal_and_stays_in_its_sequence(backend, 75, "bfloat16", 2, 1, 64, 3, True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "norm"),
    [
        *[(4, 2, 64, False), (16, 1, 16, True), (14, 2, 128, False), (3, 3, 24, True)],
        *(pytest.param(*shape, True, marks=pytest.mark.slow) for shape in ((4, 1, 128), (2, 2, 80), (8, 1, 64))),
        *(pytest.param(*shape, False, marks=pytest.mark.slow) for shape in ((9, 3, 64), (7, 1, 256), (80, 10, 8))),
        *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((16, 1, 128, False), (1, 1, 192, True))),
    ],
)
def test_decode_attention_covers_the_cache_and_the_new_token(
    backend: str, arch: int, dtype: str, heads: int, kv_heads: int, head_dim: int, norm: bool
) -> None:
    """Decode attention is right with one split of the keys, several, and CTAs without keys, also for full sequences."""
    rng = np.random.default_rng(heads + head_dim)
    capacity, element = UNSPLIT_KEYS + 44, DTYPES[dtype]
    lengths = np.array([0, 32, UNSPLIT_KEYS - 1, UNSPLIT_KEYS, capacity - 1, capacity], np.int32)
    m = len(lengths)
    qkv = normal(rng, m, heads + 2 * kv_heads, head_dim, dtype=element)
    q_norm, k_norm = normal(rng, head_dim), normal(rng, head_dim)
    angles = rng.uniform(0, 6, (capacity, head_dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    k, v = (normal(rng, m, kv_heads, capacity, head_dim, dtype=element) for _ in "kv")
    for i, length in enumerate(lengths):
        k[i, :, length:] = v[i, :, length:] = np.nan
    positions = rng.permutation(heads * head_dim).astype(np.int32)
    is_ordered = heads % 2 == 0
    read = frozen(qkv=qkv, q_norm=q_norm, k_norm=k_norm, cos=cos, sin=sin, lengths=lengths, positions=positions)
    new_q, new_k, new_v = np.split(qkv, [heads, heads + kv_heads], axis=1)
    old_k, old_v = k, v
    for appended in (False, True):
        k, v, out = old_k.copy(), old_v.copy(), nan(m, heads, head_dim, dtype=element)
        arrays, options = {**read, "k": k, "v": v, "out": out}, {"norm": norm, "orders_out": is_ordered}
        run_decode_attention(backend, arch, arrays, 3, **options, appended=appended)
        if is_ordered:
            out = out.reshape(m, -1)[:, positions].reshape(out.shape)
        for i, length in enumerate(lengths):
            if length == capacity:
                np.testing.assert_array_equal(k[i].view(np.uint16), old_k[i].view(np.uint16))
                assert np.isfinite(out[i].astype(np.float32)).all()
                continue
            q_weight, k_weight = (q_norm, k_norm) if norm else (None, None)
            check_close(k[i, :, length], rotated(new_k[i], k_weight, cos[length], sin[length]), BOUNDS[dtype])
            np.testing.assert_array_equal(v[i, :, length], new_v[i])
            others = np.arange(capacity) != length
            for a, old in ((k, old_k), (v, old_v)):
                np.testing.assert_array_equal(a[i, :, others].view(np.uint16), old[i, :, others].view(np.uint16))
            q = rotated(new_q[i], q_weight, cos[length], sin[length])
            wanted = attention(q, k[i, :, : length + 1], v[i, :, : length + 1])
            # The kernel on tensor cores also rounds queries and probabilities to 16 bits.
            check_close(out[i], wanted, 2 * BOUNDS[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("m", "heads", "kv_heads"),
    [(1, 2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 9, 9), (1, 28, 28), (5, 27, 27)))],
)
def test_decode_attention_merges_many_splits(backend: str, arch: int, m: int, heads: int, kv_heads: int) -> None:
    """Partial results of many splits of the keys are merged: of as few as rows ask for, or of all that there may be."""
    rng = np.random.default_rng(heads)
    head_dim, capacity = 64, 1100
    lengths = np.array([capacity - 1, 2 * UNSPLIT_KEYS, 2 * UNSPLIT_KEYS - 1, 0, 1][:m], np.int32)
    qkv = normal(rng, m, heads + 2 * kv_heads, head_dim, dtype=np.float16)
    k, v = (normal(rng, m, kv_heads, capacity, head_dim, dtype=np.float16) for _ in "kv")
    cos, sin = np.ones((capacity, head_dim // 2), np.float32), np.zeros((capacity, head_dim // 2), np.float32)
    out = nan(m, heads, head_dim, dtype=np.float16)
    read = frozen(qkv=qkv, cos=cos, sin=sin, lengths=lengths)
    arrays = {**read, "q_norm": None, "k_norm": None, "k": k, "v": v, "out": out}
    for splits in (1, 3, MAX_SPLITS):
        run_decode_attention(backend, arch, arrays, splits, norm=False)
        for i, keys in enumerate(lengths + 1):
            wanted = attention(qkv[i, :heads], k[i, :, :keys], v[i, :, :keys])
            check_close(out[i], wanted, 2 * BOUNDS["float16"])


def test_the_grid_of_decode_attention_depends_on_no_length() -> None:
    """The number of CTAs depends on no sequence length, so one CUDA graph serves all lengths."""
    for m, ctas in ((1, 132), (17, 132)):
        for capacity in (64, 4096):
            sizes = m, 32, 8, 128, capacity, 8 * 32 * 128
            plan = llm.plan_decode_attention(facts(90, "latest"), *sizes, "float16", 1e-6, norm=True, splits=4)
            assert plan.grid == (ctas, 1, 1)


VOCAB = 3001  # an odd size, so that rows begin at each of the four alignments modulo 16 bytes


def chosen_by_kernels(
    backend: str,
    arch: int,
    logits: np.ndarray,
    given: list[Sampling],
    lengths: np.ndarray,
    seen: np.ndarray | None = None,
    sm_count: int = 0,
    adjusted: list[Offsets] | None = None,
) -> np.ndarray:
    """Return the tokens that the sampling kernels choose for rows with the given options; they update ``seen`` [m, V].

    With ``adjusted``, they also update the values of the offsets of each row.

    The slots are in another order than the rows, with others in between. Row i has the choice 10 + i.
    """
    here, run, (m, vocab) = facts(arch, backend), runner(backend), logits.shape
    here = dataclasses.replace(here, sm_count=sm_count or here.sm_count)
    slots = 2 * np.arange(m, dtype=np.int32)[::-1] + 1
    options, newest = np.zeros(2 * m + 1, SLOT_OPTIONS), np.full(2 * m + 1, -7, np.int32)
    own = adjusted or [Offsets({}, 0, 0)] * m
    options[slots] = np.concatenate([slot_options(*row) for row in zip(given, range(10, 10 + m), own, strict=True)])
    read: dict[str, np.ndarray | None] = {**frozen(logits=logits, slots=slots, options=options), "seen": None}
    offsets = read["offsets"] = None if adjusted is None else nan(2 * m + 1, vocab, dtype=np.float32)
    for slot, row in zip(slots, adjusted or (), strict=False):
        if row:
            offsets[slot] = 0
            row.apply(offsets[slot])
    if seen is not None:
        read["seen"] = np.full((2 * m + 1, vocab), 7, np.uint8)
        read["seen"][slots] = seen
    limits = None
    if any(sampling.temperature and (sampling.top_k or sampling.top_p < 1 or sampling.min_p) for sampling in given):
        limits = nan(m, dtype=np.float32)
        run(llm.plan_sampling_threshold(here, m, vocab, seen is not None), {**read, "limits": limits})
    counters, host_tokens = np.zeros(m, np.uint32), np.full(m, -7, np.int32)
    plan = llm.plan_sample_token(here, m, vocab, any(sampling.temperature for sampling in given), seen is not None)
    arrays = {**frozen(lengths=lengths), "limits": limits, "tokens": newest, "host_tokens": host_tokens}
    run(plan, {**read, **arrays, "partials": np.zeros((m, MAX_SAMPLE_CTAS), np.uint64), "counters": counters})
    assert not counters.any()
    assert newest[slots].tolist() == host_tokens.tolist()
    assert (newest[::2] == -7).all()
    if seen is not None:
        seen[...] = read["seen"][slots]
        assert (read["seen"][::2] == 7).all()
    for slot, row in zip(slots, adjusted or (), strict=False):
        row.values = {int(i): offsets[slot, i] for i in np.flatnonzero(offsets[slot])} if row else {}
    return host_tokens


def chosen_by_formulas(logits: np.ndarray, given: list[Sampling], lengths: np.ndarray, seen: np.ndarray) -> list[int]:
    return [
        choose_token(logits[i], sampling, seen=seen[i] != 0, sequence=10 + i, position=int(lengths[i]) + 1)
        for i, sampling in enumerate(given)
    ]


MIXED = [
    Sampling(temperature=0.8, seed=2**63 + 5),
    Sampling(),
    Sampling(temperature=1.2, top_k=5, repetition_penalty=1.2, seed=1),
    Sampling(temperature=1.0, top_p=0.6, seed=2),
    Sampling(repetition_penalty=2.0),
    Sampling(temperature=1.0, min_p=0.3, seed=3),
]
"""Options of rows of one step."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "given",
    [
        [Sampling(seed=i) for i in range(4)],
        [Sampling(), Sampling(repetition_penalty=1.5)],
        MIXED,
        [s for s in MIXED if s.repetition_penalty == 1],
        [Sampling(temperature=0.8, seed=i) for i in range(3)],
        [Sampling(temperature=1.0, top_p=1e-13, seed=5), Sampling(temperature=1.0, top_k=2**31, min_p=1e-50, seed=6)],
        [Sampling(temperature=0.9, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.3, seed=4)] * 4,
    ],
)
def test_the_kernels_choose_the_same_tokens_as_the_cpu(backend: str, arch: int, given: list[Sampling]) -> None:
    """The sampling kernels choose the CPU's tokens (noise, penalties, filters), so a seed gives one text everywhere.

    Each row of a step uses the options of its own slot: those of the request, and the index of the completion.
    """
    rng, m = np.random.default_rng(8), len(given)
    logits = (3 * rng.standard_normal((m, VOCAB))).astype(np.float32)
    lengths = np.array([0, 5, 700, 2**20, 31, 1][:m], np.int32)
    marked = (rng.random((m, VOCAB)) < 0.2).astype(np.uint8)
    wanted, seen = chosen_by_formulas(logits, given, lengths, marked), marked.copy()
    penalizes = any(sampling.repetition_penalty != 1 for sampling in given)
    found = chosen_by_kernels(backend, arch, logits, given, lengths, seen if penalizes else None)
    assert found.tolist() == wanted
    for row, token, sampling in zip(marked, wanted, given, strict=True):
        row[token] = 3 if sampling.repetition_penalty != 1 else row[token]
    np.testing.assert_array_equal(seen, marked)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_k=9, repetition_penalty=1.3, seed=4)])
def test_bias_and_penalties_choose_the_same_tokens_as_the_cpu(backend: str, arch: int, sampling: Sampling) -> None:
    """Six tokens of each row, whose offsets and marks the kernel keeps; the last row has no offsets."""
    logits = np.random.default_rng(8).standard_normal((4, 301)).astype(np.float32)
    rows = [({3: 2.5, 300: -100.0, 7: 0.0}, 0, 0), ({5: 3.0}, 0.3, 0.7), ({}, -0.9, 1.1), ({}, 0, 0)]
    found, wanted = ([Offsets(*row) for row in rows] for _ in range(2))
    marks, seen = np.zeros(logits.shape, np.uint8), np.zeros(logits.shape, bool)
    seen[:, :20] = marks[:, :20] = 1
    for length in range(6):
        lengths = np.full(4, length, np.int32)
        tokens = chosen_by_kernels(backend, arch, logits, [sampling] * 4, lengths, marks, adjusted=found)
        copies = logits.copy()
        for i, offsets in enumerate(wanted):
            offsets.apply(copies[i])
        assert tokens.tolist() == chosen_by_formulas(copies, [sampling] * 4, lengths, seen)
        for i, token in enumerate(tokens.tolist()):
            wanted[i].add(token)
            seen[i, token] |= sampling.repetition_penalty != 1
    for i, offsets in enumerate(wanted):
        assert found[i].values == {token: value for token, value in offsets.values.items() if value}
        assert set(np.flatnonzero(marks[i] & 2)) >= offsets.generated


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
def test_equal_logits_infinities_and_nan_are_chosen_by_the_rules(backend: str, arch: int) -> None:
    """Of equal logits the first one is chosen, wherever CTAs divide the vocabulary; a row with NaN gives token -1."""
    logits = np.zeros((4, VOCAB), np.float32)
    logits[1, [2999, 300, 1700]] = 2
    logits[2] = -np.inf
    logits[2, 2000] = -3e38
    logits[3, 1234] = np.nan
    found = chosen_by_kernels(backend, arch, logits, [Sampling()] * 4, np.zeros(4, np.int32))
    assert found.tolist() == [0, 300, 2000, -1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=5)])
def test_a_cta_of_choose_loops_over_a_large_vocabulary(backend: str, sampling: Sampling) -> None:
    logits = (3 * np.random.default_rng(8).standard_normal((9, 9001))).astype(np.float32)
    logits[np.arange(9), np.arange(9) * 1000] = 20
    given, lengths = [sampling] * 9, np.zeros(9, np.int32)
    wanted = chosen_by_formulas(logits, given, lengths, np.zeros(logits.shape, bool))
    assert chosen_by_kernels(backend, 90, logits, given, lengths, sm_count=1).tolist() == wanted


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
def test_limits_keep_all_tokens_that_tie_with_the_last_kept_one(backend: str, arch: int) -> None:
    logits = np.array([[1, 3, 2, 2, 2, 0, -1, -2]], np.float32)
    for options, wanted in (({"top_k": 2}, 2), ({"top_k": 1}, 3), ({"top_k": 8}, -np.inf), ({"top_p": 0.5}, 2)):
        limits, slots = nan(1, dtype=np.float32), np.zeros(1, np.int32)
        read = {"logits": logits, "seen": None, "offsets": None, "slots": slots}
        read["options"] = slot_options(Sampling(temperature=1.0, **options), 0, Offsets({}, 0, 0))
        runner(backend)(llm.plan_sampling_threshold(facts(arch, backend), 1, 8), {**read, "limits": limits})
        assert limits[0] == wanted
