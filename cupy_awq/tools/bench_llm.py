# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m cupy_awq bench --model``: time published language models with random weights."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import numpy as np

from cupy_awq.check import HOST
from cupy_awq.checkpoint import CheckpointError, Module
from cupy_awq.kernels.experts.problem import expected_touched
from cupy_awq.llm import families
from cupy_awq.llm.decoder.backend import DecoderOps
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.cuda_backend import CudaOps
from cupy_awq.llm.decoder.model import Model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.decoder.states import count_bytes
from cupy_awq.llm.engine.core import Core
from cupy_awq.llm.engine.request import Request
from cupy_awq.llm.engine.runner import make_runner
from cupy_awq.llm.engine.scheduler import Sequence
from cupy_awq.llm.families.description import Decoder, Experts, LinearSpec
from cupy_awq.llm.families.table import Table
from cupy_awq.llm.files.model_files import Array, ModelFiles, Progress
from cupy_awq.runtime import placement
from cupy_awq.weight import PackedWeight

_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
_EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
_LLAMA3 = {
    **_QWEN3,
    "model_type": "llama",
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
_LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
_LLAMA3_2 = {
    **_LLAMA3,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_TABLES: dict[str, dict[str, Any]] = {
    "qwen3-8b": _QWEN3,
    "qwen3-0.6b": {**_QWEN3, **_SMALL, "tie_word_embeddings": True},
    "llama-3-8b": _LLAMA3,
    "llama-3-70b": {**_LLAMA3, **_LARGE},
    "llama-3.2-1b": _LLAMA3_2,
    "qwen3-30b-a3b": {**_QWEN3, **_EXPERTS, "num_key_value_heads": 4},
    "qwen3-235b-a22b": {
        **_QWEN3, **_EXPERTS, "hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
        "num_attention_heads": 64, "num_key_value_heads": 4,
    },
    "mixtral-8x7b": {
        **_LLAMA3, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
        "max_position_embeddings": 32768, "rope_theta": 1e6,
    },
    "glm-4.5-air": {
        **_QWEN3, "model_type": "glm4_moe", "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 46, "num_attention_heads": 96, "vocab_size": 151552, "n_routed_experts": 128,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "attention_bias": True, "max_position_embeddings": 131072,
    },
}  # fmt: skip
SHAPES = {name: families.describe(Table(table)) for name, table in _TABLES.items()}
"""The descriptions of published models by name."""

_POOL_BYTES = 1 << 24
"""The size in bytes of the random data of a synthetic model, which is repeated to fill all weights."""

BATCHES = (1, 16)
"""The default batch sizes of `measure`."""
WARM_UP_STEPS = 3
"""The number of warm-up decode steps: an eager step, the step that captures the CUDA graph, and a graph launch."""


@dataclass(frozen=True)
class Speed:
    """The times of one model and batch size.

    Attributes:
        model: the name of the model, a key of SHAPES.
        batch: the number of sequences.
        prompt_tokens: the number of tokens per prompt.
        prompt_seconds: the shortest prefill time of a prompt in seconds, including the choice of the first new token.
        step_seconds: the time of one decode step of the whole batch in seconds.
        step_bytes: the size in bytes of the weights, keys and values that a decode step must read; of experts, those
            that a uniform routing is expected to touch.
    """

    model: str
    batch: int
    prompt_tokens: int
    prompt_seconds: float
    step_seconds: float
    step_bytes: int

    @property
    def gbs(self) -> float:
        """The memory bandwidth of a decode step in GB/s, ``step_bytes / step_seconds``."""
        return self.step_bytes / self.step_seconds / 1e9


def synthetic(decoder: Decoder, group_size: int = 128, xp: Any = np) -> ModelFiles:
    """Return a model with random AWQ weights, a float16 LM head, embedding and routers, and no tokenizer.

    Groups have ``group_size`` rows, or the largest common divisor with K. ``xp`` is the array module: NumPy, or CuPy to
    create the weights on the current GPU.

    >>> files, layer = synthetic(SHAPES["qwen3-0.6b"]), SHAPES["qwen3-0.6b"].layers[0]
    >>> files.read_linear(layer.feed_forward.up, layer.name).weight
    PackedWeight(K=1024, N=3072, group_size=128, float16, packed zeros, 1.63 MB)
    """
    rng = np.random.default_rng(0)
    words = xp.asarray(rng.integers(-(2**31), 2**31, _POOL_BYTES // 4, np.int32))
    zeros = words[::-1].copy()
    halves = xp.asarray(rng.standard_normal(_POOL_BYTES // 2, np.float32).astype(np.float16))

    def repeated(pool: Array, shape: tuple[int, ...]) -> Array:
        size = math.prod(shape)
        whole: Array = xp.tile(pool, -(-size // pool.size)) if size > pool.size else pool
        return whole[:size].reshape(shape)

    offsets = itertools.count(0, 32)

    def module(linear: LinearSpec) -> Module:
        # With equal weights of gate and up, all tokens would take the same experts: SiLU(v) * v is positive.
        offset, (k, n) = next(offsets) % (len(words) // 2), (linear.k, linear.n)
        groups = k // math.gcd(k, group_size)
        scales = (xp.abs(repeated(halves, (groups, n))) + np.float16(0.5)) * np.float16(0.1 * k**-0.5)
        weight = PackedWeight(repeated(words[offset:], (k, n // 8)), scales, repeated(zeros[offset:], (groups, n // 8)))
        return Module(weight, scaled((n,), 0.1) if linear.bias else None)

    def scaled(shape: tuple[int, ...], scale: float) -> Array:
        return repeated(halves, shape) * np.float16(scale)

    size = decoder.hidden
    tensors: dict[str, Callable[[], Module | Array]] = {
        f"{decoder.norm.name}.weight": partial(np.ones, size, np.float16)
    }
    for name in (decoder.embedding, *([] if decoder.tied else [decoder.head.name])):
        tensors[f"{name}.weight"] = partial(scaled, (decoder.vocab, size), 0.02)
    for layer in decoder.layers:
        block = layer.feed_forward
        for linear in layer.linears:
            tensors[f"{layer.name}.{linear.name}"] = partial(module, linear)
        if isinstance(block, Experts):
            for gate in (gate for gate in (block.router.linear, block.shared_gate) if gate is not None):
                tensors[f"{layer.name}.{gate.name}.weight"] = partial(scaled, (gate.n, gate.k), gate.k**-0.5)
            if block.router.bias is not None:
                tensors[f"{layer.name}.{block.router.bias}"] = partial(np.zeros, block.router.linear.n, np.float32)
        for norm in layer.norms:
            tensors[f"{layer.name}.{norm.name}.weight"] = partial(np.ones, norm.size, np.float16)
    return ModelFiles(Path("synthetic"), decoder, tensors, _no_tokenizer)


def _no_tokenizer() -> NoReturn:
    raise CheckpointError("tokenizer: expected one, got a model of random weights, which has none")


def measure(
    name: str,
    *,
    batches: tuple[int, ...] = BATCHES,
    prompt_tokens: int = 1024,
    steps: int = 32,
    layers: int | None = None,
    index: int | None = None,
    progress: Progress | None = None,
) -> list[Speed]:
    """Time a model with random weights for each batch size.

    Args:
        name: the name of the model, a key of SHAPES.
        batches: the batch sizes.
        prompt_tokens: the number of tokens per prompt.
        steps: the number of timed decode steps, which follow the prefill and `WARM_UP_STEPS` warm-up steps.
        layers: the number of layers of the model that are run, the first ones; None for all.
        index: the device ordinal, or `check.HOST`; by default the current GPU, or the CPU if there is none.
        progress: a callback (number of finished steps, total number of steps), called while the weights are created.

    Raises:
        ValueError: the name is unknown, or the model needs more memory than is free.
    """
    if name not in SHAPES:
        raise ValueError(f"model: expected one of {', '.join(SHAPES)}, got {name!r}")
    decoder = replace(SHAPES[name], layers=SHAPES[name].layers[:layers])
    place = placement.resolve() if index is None else index
    with placement.use_device(place):
        host = place == HOST
        ops: DecoderOps = NumpyOps(decoder) if host else CudaOps(decoder, place, np.dtype(np.float16))
        xp: Any = np
        if place != HOST:
            import cupy

            xp = cupy
        model = build_model(synthetic(decoder, xp=xp), ops, progress)
        return [_measure(name, decoder, model, batch, prompt_tokens, steps) for batch in batches]


def _untouched_bytes(decoder: Decoder, batch: int, group_size: int = 128) -> int:
    """Return the expected size in bytes of the weights of all experts that a decode step does not use."""
    total = 0.0
    for block in (layer.feed_forward for layer in decoder.layers if isinstance(layer.feed_forward, Experts)):
        count, mlp = block.router.linear.n, block.expert
        values = ((linear.n * linear.k, math.gcd(linear.k, group_size)) for linear in (mlp.gate, mlp.up, mlp.down))
        expert_bytes = sum(size / 2 + size // group * 5 / 2 for size, group in values)
        total += (count - expected_touched(batch * block.router.top_k, count, block.router.top_k)) * expert_bytes
    return round(total)


class _Silence:
    """A tokenizer of which no token has a text."""

    special_ids: ClassVar[dict[str, int]] = {}

    def stream(self, earlier: Any) -> _Silence:
        return self

    def step(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _measure(name: str, decoder: Decoder, model: Model, batch: int, prompt_tokens: int, steps: int) -> Speed:
    text_model: Any = SimpleNamespace(config=decoder, model=model, tokenizer=_Silence(), stop_ids=frozenset())
    most = WARM_UP_STEPS + steps + 3
    core = Core(text_model, make_runner(model, batch, prompt_tokens + most, is_batch=True), max_rows=batch)
    prompts = np.random.default_rng(0).integers(0, decoder.vocab, (batch, prompt_tokens)).tolist()

    def begin(row: int, tokens: int, salt: str = "") -> Sequence:
        request = Request(tuple(prompts[row]), max_tokens=tokens, ignore_stop_tokens=True, salt=salt)
        core.begin([sequence := Sequence(request, row, prompt_tokens + tokens, 0.0)])
        return sequence

    times = []
    for row, salt in [(0, "warm-up"), *((row, "") for row in range(batch))]:
        began = time.perf_counter()
        sequence = begin(row, 1, salt)
        while sequence in core:
            core.step()
        times.append(time.perf_counter() - began)
    sequences = [begin(row, most) for row in range(batch)]  # most of each prompt is in the cache
    while any(len(sequence.tokens) == prompt_tokens for sequence in sequences):
        core.step()
    for _ in range(WARM_UP_STEPS):
        core.step()
    began = time.perf_counter()
    for _ in range(steps):
        core.step()
    seconds = (time.perf_counter() - began) / steps
    core.end()
    read = model.weight_bytes - _untouched_bytes(decoder, batch)
    read += count_bytes(decoder.layers, batch * (prompt_tokens + steps // 2), 4 if model.ops.has_pages else 2)
    return Speed(name, batch, prompt_tokens, min(times[1:]), seconds, read)
