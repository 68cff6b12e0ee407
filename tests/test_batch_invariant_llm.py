# SPDX-License-Identifier: Apache-2.0
"""Tests of batch-invariant language models: a token has the same bits alone, in any batch and in any chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_awq import llm
from cupy_awq.kernels.decoder import decoder as kernels
from cupy_awq.kernels.decoder.attention import PREFILL_TILE
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.runtime import device
from cupy_awq.tools.testing import random_activations
from tests import llm_models
from tests.backends import BACKENDS, Run, runner
from tests.logits import logits_of
from tests.paged_cache import pages
from tests.test_batch_invariant import GPU, bits
from tests.test_kernels import DTYPES, facts


def attend(run: Run, here: device.Device, qkv: Any, cache: Any, starts: list[int], steps: int) -> np.ndarray:
    """Return causal attention of ``steps`` tokens per sequence; ``starts`` are their first tokens' positions."""
    table, k, v = cache
    _, kv_heads, block, head_dim = k.shape
    some = np.concatenate([qkv[start : start + steps] for start in starts])
    sizes = qkv.shape[1] - 2 * kv_heads, kv_heads, head_dim, table.shape[1] * block, kv_heads * block * head_dim
    tiles = [
        (i * steps + at, min(PREFILL_TILE, steps - at), start + at, 1 + i)
        for i, start in enumerate(starts)
        for at in range(0, steps, PREFILL_TILE)
    ]
    plan = kernels.plan_attention(here, len(some), *sizes, qkv.dtype.name, 0.0, False, len(tiles))
    lengths = np.concatenate([np.arange(start, start + steps, dtype=np.int32) for start in starts])
    rows = {"lengths": lengths, "slots": np.repeat(np.arange(1, 1 + len(starts), dtype=np.int32), steps)}
    out = np.full_like(some[:, : sizes[0]], np.nan)
    angles = np.zeros((table.shape[1] * block, head_dim // 2), np.float32)
    read = {"qkv": some, "q_norm": None, "cos": np.cos(angles), "sin": np.sin(angles), "k": k, "v": v, "table": table}
    run(plan, {**read, **rows, "work": np.array(tiles, np.int32), "out": out})
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim"), [(60, "float16", 16), (80, "float16", 64), (90, "bfloat16", 128)]
)
def test_attention_depends_on_the_position_only(backend: str, arch: int, dtype: str, head_dim: int) -> None:
    """Attention of a token has equal bits if its prompt runs whole, in chunks, or token by token.

    Lengths lie on both sides of the kernels' tiles of keys.
    """
    rng, run, here = np.random.default_rng(0), runner(backend), facts(arch, backend)
    length, capacity, heads, kv_heads = 300, 520, 2, 1
    qkv = random_activations(rng, length, heads + 2 * kv_heads, head_dim, dtype=DTYPES[dtype])
    k, v = (random_activations(rng, 2, kv_heads, capacity, head_dim, dtype=DTYPES[dtype]) for _ in "kv")
    k[1], v[1] = k[0], v[0]
    k[:, :, length:] = v[:, :, length:] = np.nan
    cache = pages(rng, k, v)
    whole = attend(run, here, qkv, cache, [0], length)
    for start in (0, 1, 63, 64, 250, 298):
        steps = min(49, length - start)
        np.testing.assert_array_equal(
            bits(attend(run, here, qkv, cache, [start], steps)), bits(whole[start : start + steps])
        )
    for pair in ([0, 299], [63, 64], [255, 256], [257, 5]):
        np.testing.assert_array_equal(bits(attend(run, here, qkv, cache, pair, 1)), bits(whole[pair]))
    for row in (0, 64, 299):
        keys, values = (a[0, 0, : row + 1].astype(np.float64) for a in (k, v))
        for head in range(heads):
            scores = keys @ qkv[row, head].astype(np.float64) * head_dim**-0.5
            weights = np.exp(scores - scores.max())
            wanted = weights @ values / weights.sum()
            assert np.abs(whole[row, head] - wanted).max() <= (0.002 if dtype == "float16" else 0.02)


PROMPT = [int(i) for i in np.random.default_rng(5).integers(0, llm_models.VOCAB - 8, 90)]


def check_texts(model: llm.LanguageModel, prompts: list[str], tokens: int) -> None:
    """Check that greedy texts of prompts are equal alone and in a batch, for several sizes of prompt chunks."""
    whole = model.model.ops.prefill_chunk
    batch = [c.tokens for c in model.generate(prompts, raw=True, max_tokens=tokens)]
    for i, prompt in enumerate(prompts):
        model.model.ops.prefill_chunk = (whole, 1, 2, 7, 64)[i % 5]
        assert model.generate(prompt, raw=True, max_tokens=tokens)[0].tokens == batch[i]
    model.model.ops.prefill_chunk = whole


@pytest.mark.parametrize(
    ("family", "expand_weights"),
    [
        ("llama", True),
        ("qwen3", False),
        *(pytest.param("qwen2", expands, marks=pytest.mark.slow) for expands in (True, False)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("llama", False), ("qwen3", True))),
        ("glm4_moe", False),
        *(pytest.param(family, False, marks=pytest.mark.slow) for family in ("qwen2_moe", "qwen3_moe", "mixtral")),
    ],
)
def test_logits_on_the_cpu_do_not_depend_on_the_chunks(tmp_path: Path, family: str, expand_weights: bool) -> None:
    known = {**llm_models.FAMILIES, **llm_models.EXPERT_FAMILIES}
    files = llm.read(llm_models.folder(tmp_path, known[family], plain=("1.mlp.up_proj",)))
    ops = NumpyOps(files.config, expand_weights=expand_weights, batch_invariant=True)
    model = build_model(files, ops)
    alone = logits_of(model, PROMPT)
    for sizes in ([1] * 90, [2, 64, 7], [33, 1, 1, 40]):
        np.testing.assert_array_equal(bits(logits_of(model, PROMPT, *sizes)), bits(alone))
    assert np.abs(alone - llm_models.forward(files, PROMPT)).max() <= 1e-4 * np.abs(alone).max()


@pytest.mark.parametrize("device_", ["cpu", pytest.param(0, marks=GPU)])
def test_greedy_texts_are_equal_alone_in_a_batch_and_in_any_chunks(tmp_path: Path, device_: Any) -> None:
    folder = llm_models.folder(tmp_path, {**llm_models.QWEN3, "hidden_size": 128, "eos_token_id": 263}, group=32)
    model = llm.load(folder, device=device_, batch_invariant=True)
    rng = np.random.default_rng(0)
    prompts = ["".join(chr(c) for c in rng.integers(97, 123, size)) for size in rng.integers(1, 100, 16)]
    check_texts(model, prompts, 12)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*llm_models.FAMILIES, *llm_models.EXPERT_FAMILIES])
def test_logits_on_the_gpu_do_not_depend_on_the_chunks(tmp_path: Path, family: str) -> None:
    known = {**llm_models.FAMILIES, **llm_models.EXPERT_FAMILIES}
    config = {**known[family], "hidden_size": 128, "intermediate_size": 128}
    folder = llm_models.folder(tmp_path, config, group=64)
    model = llm.load(folder, device=0, batch_invariant=True).model
    alone = logits_of(model, PROMPT)
    for sizes in ([1] * 90, [2, 64, 7], [33, 1, 1, 40]):
        np.testing.assert_array_equal(bits(logits_of(model, PROMPT, *sizes)), bits(alone))
