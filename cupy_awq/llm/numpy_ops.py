# SPDX-License-Identifier: Apache-2.0
"""The decoder's operations on the CPU, in NumPy and float32."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq import reference
from cupy_awq.check import HOST
from cupy_awq.checkpoint import Module
from cupy_awq.linear import AwqLinear
from cupy_awq.llm import kv_cache as kv
from cupy_awq.llm.config import Config
from cupy_awq.llm.kv_cache import Cache
from cupy_awq.llm.sampling import Sampling, choose
from cupy_awq.llm.source import Linear

Array = npt.NDArray[Any]
Project = Callable[[Array], Array]


class HostOps:
    """Operations for a model of ``config``; ``keep``: hold the weights in float32, for speed.

    By default they are held if they take at most half of the machine's memory; otherwise quantized weights are
    dequantized block by block in each product.
    """

    index = HOST
    chunk = 512
    """Tokens of a prompt that go through the model at a time."""

    def __init__(self, config: Config, *, keep: bool | None = None) -> None:
        self.config = config
        per_layer = config.hidden * (2 * config.q_width + 2 * config.kv_width + 3 * config.intermediate)
        total = 4 * (config.layers * per_layer + config.vocab * config.hidden)
        self._keep = total <= _memory() // 2 if keep is None else keep

    def array(self, a: Array) -> Array:
        """A norm's weight or an embedding, where and as the operations want it."""
        return a.astype(np.float32) if a.ndim == 1 else a

    def projection(self, parts: Sequence[Module | Linear], *, gated: bool = False) -> Project:
        """x [.., K] -> the results of all parts side by side; ``gated``: of (gate, up), silu(gate) * up."""
        if self._keep:
            joined = np.concatenate([_dense(part) for part in parts], axis=1)
            sizes = [_columns(part) for part in parts]
            biases = [np.zeros(n) if p.bias is None else p.bias for p, n in zip(parts, sizes, strict=True)]
            bias = np.concatenate(biases).astype(np.float32)
            project = _matrix(joined, bias if any(part.bias is not None for part in parts) else None)
        else:
            each = [_streamed(part) for part in parts]

            def project(x: Array) -> Array:
                return np.concatenate([one(x) for one in each], axis=-1)

        return (lambda x: _swiglu(project(x))) if gated else project

    def head(self, part: Module | Linear) -> Project:
        """x [.., hidden] -> logits."""
        return self.projection([part])

    def embed(self, table: Array, tokens: Array) -> Array:
        """Rows of the table: the residual stream, float32 [.., hidden]."""
        return table[tokens].astype(np.float32)

    def norm(self, h: Array, weight: Array) -> Array:
        """RMSNorm of the residual stream."""
        return _rms_norm(h, weight, self.config.eps)

    def project(self, h: Array, weight: Array, then: Project) -> tuple[Array, Array]:
        """The residual stream, and ``then`` of its RMSNorm."""
        return h, then(self.norm(h, weight))

    def add(self, h: Array, x: Array, last: Project, following: Array | None) -> Array:
        """The residual stream and ``last`` of x, in place; ``following``: the weight that `project` gets, if any."""
        h += last(x)
        return h

    def attend(self, qkv: Array, q_norm: Array | None, k_norm: Array | None, cache: Cache, layer: int) -> Array:
        """Causal attention of the newest tokens to all of theirs; [B, S, q_width].

        From qkv [B, S, (heads + 2 kv_heads) * head_dim]; q and k get their norm and RoPE, k and v are written to the
        cache, behind what each sequence has.
        """
        config = self.config
        b, s, _ = qkv.shape
        heads = qkv.reshape(b, s, config.heads + 2 * config.kv_heads, config.head_dim)
        q, k, v = np.split(heads, [config.heads, config.heads + config.kv_heads], axis=2)
        if q_norm is not None and k_norm is not None:
            q, k = _rms_norm(q, q_norm, config.eps), _rms_norm(k, k_norm, config.eps)
        at = cache.lengths[:, None] + np.arange(s)
        cos, sin = cache.cos[at][:, :, None], cache.sin[at][:, :, None]
        rotated = _rotate(k, cos, sin)
        for i, start in enumerate(cache.lengths.tolist()):
            cache.k[layer, i, :, start : start + s] = rotated[i].swapaxes(0, 1)
            cache.v[layer, i, :, start : start + s] = v[i].swapaxes(0, 1)
        return self._attention(_rotate(q, cos, sin), cache, layer)

    def _attention(self, q: Array, cache: Cache, layer: int) -> Array:
        """Of q [B, S, heads, head_dim]."""
        b, s, heads, head_dim = q.shape
        kv_heads = self.config.kv_heads
        out = np.empty((b, s, heads * head_dim), np.float32)
        for i, start in enumerate(cache.lengths.tolist()):
            keys, values = cache.k[layer, i, :, : start + s], cache.v[layer, i, :, : start + s]
            # Query heads that share a key head stand together: [kv_heads, group * S, head_dim].
            grouped = q[i].swapaxes(0, 1).reshape(kv_heads, -1, head_dim)
            scores = grouped @ keys.swapaxes(1, 2)
            scores *= np.float32(head_dim**-0.5)
            if s > 1:
                hidden = np.arange(start + s) > start + np.arange(s)[:, None]
                scores.reshape(heads, s, -1)[:, hidden] = -np.inf
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            mixed = scores @ values
            mixed /= scores.sum(axis=-1, keepdims=True)
            out[i] = mixed.reshape(heads, s, head_dim).swapaxes(0, 1).reshape(s, -1)
        return out

    def cache(self, sequences: int, capacity: int) -> Cache:
        """An empty cache. Raises ValueError if the machine has not the memory."""
        return kv.create(self.config, sequences, capacity, np.float32, np, _memory() // 2)

    def tokens(self, ids: Sequence[int]) -> Array:
        return np.array(ids, np.int64)

    def logits(self, y: Array) -> Array:
        """The head's result, for the host to read."""
        return y

    def decoder(self, step: Callable[[Array], Array], cache: Cache, sampling: Sampling) -> HostDecoder:
        """What makes one token after the other; ``step`` gives the logits [B, V] of tokens [B]."""
        return HostDecoder(step, cache, sampling, self.config.vocab)


class HostDecoder:
    """Chooses tokens and feeds them back. `put` the first logits of each sequence, then `step`."""

    def __init__(self, step: Callable[[Array], Array], cache: Cache, sampling: Sampling, vocab: int) -> None:
        self._step, self._cache, self._sampling = step, cache, sampling
        self._seen = np.zeros((len(cache.tokens), vocab), bool)
        self._next = np.zeros(len(cache.tokens), np.int64)

    def put(self, row: int, logits: Array) -> int:
        """The first token of a sequence, from the logits [V] of its prompt."""
        self._seen[row, self._cache.tokens[row]] = True
        position = int(self._cache.lengths[row])
        token = choose(logits, self._sampling, seen=self._seen[row], row=row, position=position)
        self._seen[row, token] = True
        self._next[row] = token
        return token

    def step(self) -> list[int]:
        """The next token of every sequence."""
        logits = self._step(self._next)
        for row, token in enumerate(self._next.tolist()):
            self._cache.tokens[row].append(token)
        self._cache.lengths[:] += 1
        return [self.put(row, logits[row]) for row in range(len(logits))]

    def close(self) -> None:
        """Nothing is under way here when a step has returned."""


def _memory() -> int:
    """Bytes of the machine's memory; where the system does not tell, 8 GB."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 << 30


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    scale = np.float32(1) / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(eps))
    normed: Array = x * scale * weight
    return normed


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """RoPE of pairs (i, i + head_dim / 2)."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _swiglu(y: Array) -> Array:
    gate, up = np.split(y, 2, axis=-1)
    with np.errstate(over="ignore"):  # exp(-v) of a very negative v: the quotient is then 0, as it should be
        result: Array = gate / (np.float32(1) + np.exp(-gate)) * up
    return result


def _columns(part: Module | Linear) -> int:
    return part.weight.shape[1] if isinstance(part, Module) else part.weight.shape[0]


def _dense(part: Module | Linear) -> Array:
    """The weight [K, N] in float32."""
    if isinstance(part, Linear):
        return part.weight.T.astype(np.float32)
    weight = part.weight
    return reference.dequantize(weight.qweight, weight.scales, weight.qzeros, dtype=np.float32)


def _streamed(part: Module | Linear) -> Project:
    """A product that holds no float32 copy of the weight."""
    if isinstance(part, Module):
        return AwqLinear(part.weight, bias=part.bias)
    table = part.weight
    rows = max(1, (1 << 22) // table.shape[1])

    def project(x: Array) -> Array:
        blocks = [x @ table[i : i + rows].astype(np.float32).T for i in range(0, len(table), rows)]
        y = np.concatenate(blocks, axis=-1)
        return y if part.bias is None else y + part.bias.astype(np.float32)

    return project


def _matrix(weight: Array, bias: Array | None) -> Project:
    def project(x: Array) -> Array:
        y: Array = (x.reshape(-1, x.shape[-1]) @ weight).reshape(*x.shape[:-1], -1)
        if bias is not None:
            y += bias
        return y

    return project
