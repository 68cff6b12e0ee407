# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m cupy_awq bench --model``: time published language models with random weights."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from cupy_awq.check import HOST
from cupy_awq.checkpoint import CheckpointError, Module
from cupy_awq.llm.config import ModelConfig
from cupy_awq.llm.decoder.backend import DecoderOps
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.cuda_backend import CudaOps
from cupy_awq.llm.decoder.kv_cache import cache_bytes
from cupy_awq.llm.decoder.model import Model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.decoder.sampling import Sampling
from cupy_awq.llm.files.model_files import Array, ModelFiles, Progress
from cupy_awq.runtime import placement
from cupy_awq.weight import PackedWeight

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA3_2 = {"rope_type": "llama3", **_LLAMA3, "factor": 32.0}

SHAPES = {
    "qwen3-8b": ModelConfig("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 40960, 1e-6, 1e6, qk_norm=True),
    "qwen3-0.6b": ModelConfig("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960, 1e-6, 1e6, tied=True, qk_norm=True),
    "llama-3-8b": ModelConfig("llama", 4096, 14336, 32, 32, 8, 128, 128256, 8192, 1e-5, 5e5),
    "llama-3-70b": ModelConfig("llama", 8192, 28672, 80, 64, 8, 128, 128256, 8192, 1e-5, 5e5),
    "llama-3.2-1b": ModelConfig("llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072, 1e-5, 5e5, _LLAMA3_2, tied=True),
}
"""The published model configurations by name."""

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
        step_bytes: the size in bytes of the weights, keys and values that a decode step must read.
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


def synthetic(config: ModelConfig, group_size: int = 128, xp: Any = np) -> ModelFiles:
    """Return a model with random AWQ weights, a float16 LM head and embedding, and no tokenizer.

    ``xp`` is the array module: NumPy, or CuPy to create the weights on the current GPU.

    >>> files = synthetic(ModelConfig("llama", 64, 128, 1, 2, 2, 32, 96, 256), group_size=32)
    >>> files.read_linear("model.layers.0.mlp.up_proj", 64, 128).weight
    PackedWeight(K=64, N=128, group_size=32, float16, packed zeros, 4736 B)
    """
    rng = np.random.default_rng(0)
    words = xp.asarray(rng.integers(-(2**31), 2**31, _POOL_BYTES // 4, np.int32))
    halves = xp.asarray(rng.standard_normal(_POOL_BYTES // 2, np.float32).astype(np.float16))

    def repeated(pool: Array, shape: tuple[int, ...]) -> Array:
        size = math.prod(shape)
        whole: Array = xp.tile(pool, -(-size // pool.size))
        return whole[:size].reshape(shape)

    def module(k: int, n: int) -> Module:
        groups = k // group_size
        scales = (xp.abs(repeated(halves, (groups, n))) + np.float16(0.5)) * np.float16(0.1 * k**-0.5)
        return Module(PackedWeight(repeated(words, (k, n // 8)), scales, repeated(words[::-1], (groups, n // 8))), None)

    def scaled(shape: tuple[int, ...], scale: float) -> Array:
        return repeated(halves * np.float16(scale), shape)

    d, i, wide, narrow = config.hidden, config.intermediate, config.q_width, config.kv_width
    sizes = {"self_attn.q_proj": (d, wide), "self_attn.k_proj": (d, narrow), "self_attn.v_proj": (d, narrow)}
    sizes |= {"self_attn.o_proj": (wide, d), "mlp.gate_proj": (d, i), "mlp.up_proj": (d, i), "mlp.down_proj": (i, d)}
    norms = {"input_layernorm": d, "post_attention_layernorm": d}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    tensors: dict[str, Callable[[], Module | Array]] = {"model.norm.weight": partial(np.ones, d, np.float16)}
    for name in ("model.embed_tokens.weight", *([] if config.tied else ["lm_head.weight"])):
        tensors[name] = partial(scaled, (config.vocab, d), 0.02)
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.{name}": partial(module, k, n) for name, (k, n) in sizes.items()}
        tensors |= {f"{at}.{name}.weight": partial(np.ones, size, np.float16) for name, size in norms.items()}
    return ModelFiles(Path("synthetic"), config, tensors, _no_tokenizer)


def _no_tokenizer() -> NoReturn:
    raise CheckpointError("tokenizer: expected one, got a model of random weights, which has none")


def measure(
    name: str,
    *,
    batches: tuple[int, ...] = BATCHES,
    prompt_tokens: int = 1024,
    steps: int = 32,
    index: int | None = None,
    progress: Progress | None = None,
) -> list[Speed]:
    """Time a model with random weights for each batch size.

    Args:
        name: the name of the model, a key of SHAPES.
        batches: the batch sizes.
        prompt_tokens: the number of tokens per prompt.
        steps: the number of timed decode steps, which follow the prefill and `WARM_UP_STEPS` warm-up steps.
        index: the device ordinal, or `check.HOST`; by default the current GPU, or the CPU if there is none.
        progress: a callback (number of finished steps, total number of steps), called while the weights are created.

    Raises:
        ValueError: the name is unknown, or the model needs more memory than is free.
    """
    if name not in SHAPES:
        raise ValueError(f"model: expected one of {', '.join(SHAPES)}, got {name!r}")
    config = SHAPES[name]
    place = placement.resolve() if index is None else index
    with placement.use_device(place):
        host = place == HOST
        ops: DecoderOps = NumpyOps(config) if host else CudaOps(config, place, np.dtype(np.float16))
        xp: Any = np
        if place != HOST:
            import cupy

            xp = cupy
        model = build_model(synthetic(config, xp=xp), ops, progress)
        return [_measure(name, config, model, batch, prompt_tokens, steps) for batch in batches]


def _measure(name: str, config: ModelConfig, model: Model, batch: int, prompt_tokens: int, steps: int) -> Speed:
    ops = model.ops
    cache = ops.make_cache(batch, prompt_tokens + steps + WARM_UP_STEPS)
    prompt = np.random.default_rng(0).integers(0, config.vocab, prompt_tokens).tolist()
    loop = ops.make_decode_loop(partial(model.step_logits, cache), cache, Sampling())
    times = []
    for warm_up in (True, False):
        for row in range(1 if warm_up else batch):
            cache.reuse_prefix(row, prompt[:1])
            began = time.perf_counter()
            loop.start(row, model.prompt_logits(cache, row, prompt))
            times.append(time.perf_counter() - began)
    with contextlib.closing(loop):
        for _ in range(WARM_UP_STEPS):
            loop.step()
        began = time.perf_counter()
        for _ in range(steps):
            loop.step()
        seconds = (time.perf_counter() - began) / steps
    read = model.weight_bytes + cache_bytes(config, batch, prompt_tokens + steps // 2, cache.k.dtype.itemsize)
    return Speed(name, batch, prompt_tokens, min(times[1:]), seconds, read)
