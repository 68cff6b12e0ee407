# SPDX-License-Identifier: Apache-2.0
"""The decoder's operations on a GPU: activations in 16 bits, the residual stream and the logits in float32.

Intermediate arrays come from CuPy's memory pool, so that one forward pass serves every shape. A decode step is captured
into a CUDA graph, whose decoder keeps these arrays, so that nothing else gets a living graph's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cupy_awq import check
from cupy_awq.check import Array
from cupy_awq.checkpoint import Module
from cupy_awq.kernels import llm as kernels
from cupy_awq.kernels.gemm_sm90 import SQUARE_SUM_COLUMNS
from cupy_awq.kernels.problem import Fusion, ceil_div
from cupy_awq.linear import AwqLinear
from cupy_awq.llm import kv_cache as kv
from cupy_awq.llm.config import Config
from cupy_awq.llm.kv_cache import Cache
from cupy_awq.llm.sampling import Sampling
from cupy_awq.llm.source import Linear
from cupy_awq.ops.plan import FusedPlan
from cupy_awq.runtime import arrays, device, launch
from cupy_awq.runtime import workspace as workspaces
from cupy_awq.runtime.launch_plan import LaunchPlan
from cupy_awq.weight import PackedWeight

if TYPE_CHECKING:
    import cupy

Project = Callable[[Array], Array]

RESERVE = 1 << 29
"""Bytes that a cache leaves for what a forward pass needs."""


@dataclass(frozen=True)
class Residual:
    """The residual stream, ``h`` + ``delta``: float32 and the activations' dtype [.., hidden].

    Where products keep it: ``x`` is its norm but for a factor of each row, which follows from ``squares``. ``inverse``
    [m] are the factors of the norm before.
    """

    h: Array
    inverse: Array | None = None
    delta: Array | None = None
    x: Array | None = None
    squares: Array | None = None


class DeviceOps:
    """Operations for a model of ``config`` on the GPU ``index``, which must be current; as those of `HostOps`.

    ``dtype`` is that of the activations, float16 or bfloat16. To be used by one thread at a time.

    Raises ValueError for a model that the kernels cannot take.
    """

    chunk = 2048

    def __init__(self, config: Config, index: int, dtype: np.dtype[Any]) -> None:
        if config.head_dim % 8 or config.head_dim > 256 or config.hidden % 8:
            raise ValueError(
                f"a GPU needs head_dim a multiple of 8 up to 256 and hidden a multiple of 8, got {config.head_dim} and"
                f" {config.hidden}"
            )
        self.config, self.index, self.dtype = config, index, dtype
        self._facts = device.of(index)
        self._table: tuple[Any, Any] = (None, None)
        self._counters = workspaces.zeroed(4 * kernels.MAX_COUNTERS)
        self._decoding: tuple[cupy.cuda.Stream, cupy.cuda.MemoryPool] | None = None

    @property
    def decoding(self) -> tuple[cupy.cuda.Stream, cupy.cuda.MemoryPool]:
        """The stream of all decode steps, and the pool of their intermediate arrays.

        Both are made once: a stream's workspace is never freed, and a pool that is dropped leaves some of the device's
        memory behind, so that one for each text would add up.
        """
        import cupy

        if self._decoding is None:
            stream = cupy.cuda.Stream(non_blocking=True)
            workspaces.workspace(self.index, stream.ptr)
            self._decoding = stream, cupy.cuda.MemoryPool()
        return self._decoding

    def array(self, a: Array) -> cupy.ndarray:
        import cupy

        if a.ndim == 1:
            return cupy.asarray(a.astype(np.float32))
        self._table = a, cupy.asarray(a.astype(self.dtype, copy=False))
        return self._table[1]

    def projection(self, parts: Sequence[Module | Linear], *, gated: bool = False) -> Project:
        modules = [part for part in parts if isinstance(part, Module)]
        if 1 < len(modules) == len(parts) and len({_kind(part.weight) for part in modules}) == 1:
            return self._joined(modules, "swiglu" if gated else None)
        each = [self._dense(part) if isinstance(part, Linear) else self._module(part) for part in parts]
        if len(each) == 1 and not gated:
            return each[0]

        def project(x: Array) -> Array:
            import cupy

            y = cupy.concatenate([one(x) for one in each], axis=-1) if len(each) > 1 else each[0](x)
            return self._swiglu(y) if gated else y

        return project

    def head(self, part: Module | Linear) -> Project:
        return self._module(part) if isinstance(part, Module) else self._dense(part, np.dtype(np.float32))

    def embed(self, table: Array, tokens: Array) -> Residual:
        vocab, width = table.shape
        h = self._empty((*tokens.shape, width), np.float32)
        plan = kernels.embed(self._facts, tokens.size, vocab, width, self.dtype.name)
        self.run(plan, tokens=tokens, table=table, h=h)
        return Residual(h)

    def norm(self, h: Residual, weight: Array) -> Array:
        return self._norm(h, weight)[0]

    def _norm(self, h: Residual, weight: Array) -> tuple[Array, Array]:
        """The norm, and what each row of the stream was multiplied by."""
        width = h.h.shape[-1]
        m, delta = h.h.size // width, h.delta
        x, inverse = self._empty(h.h.shape), self._empty((m,), np.float32)
        plan = kernels.rms_norm(self._facts, m, width, self.dtype.name, self.config.eps, delta=delta is not None)
        self.run(plan, h=h.h, delta=delta, weight=weight, x=x, inverse=inverse)
        return x, inverse

    def project(self, h: Residual, weight: Array, then: Project) -> tuple[Residual, Array]:
        m = h.h.size // h.h.shape[-1]
        if h.x is not None and (plan := self._fused_plan(then, m, Fusion("rms_norm_x", self.config.eps))) is not None:
            inverse = self._empty((m,), np.float32)
            stream = {"h": None, "norm_weight": None, "square_sums": h.squares}
            stream |= {"previous_inverse_rms": h.inverse, "inverse_rms": inverse}
            return Residual(h.h, inverse), self._run_fused(plan, h.x, stream)
        x, inverse = self._norm(h, weight)
        return Residual(h.h, inverse), then(x)

    def add(self, h: Residual, x: Array, last: Project, following: Array | None) -> Residual:
        *rows, width = h.h.shape
        plan = self._fused_plan(last, x.size // x.shape[-1], Fusion("add_to_stream"))
        if plan is None or following is None:
            return Residual(h.h, delta=last(x))
        squares = self._empty((*rows, ceil_div(width, SQUARE_SUM_COLUMNS)), np.float32)
        stream = {"h": h.h, "norm_weight": following, "square_sums": squares}
        stream |= {"previous_inverse_rms": h.inverse, "inverse_rms": None}
        return Residual(h.h, h.inverse, x=self._run_fused(plan, x, stream), squares=squares)

    def _fused_plan(self, projection: Project, m: int, fusion: Fusion) -> FusedPlan | None:
        return projection.fused_plan(m, fusion, dtype=self.dtype) if isinstance(projection, AwqLinear) else None

    def _run_fused(self, plan: FusedPlan, x: Array, stream: dict[str, Array | None]) -> Array:
        y = self._empty((*x.shape[:-1], plan.out_features))
        self.run(plan.launch, **plan.arrays, **stream, x=x, y=y)
        return y

    def attend(self, qkv: Array, q_norm: Array | None, k_norm: Array | None, cache: Cache, layer: int) -> Array:
        config, dtype = self.config, self.dtype.name
        b, s, _ = qkv.shape
        norm = q_norm is not None
        stride = config.kv_width * cache.capacity
        sizes = config.heads, config.kv_heads, config.head_dim, cache.capacity, stride
        out = self._empty((b, s, config.q_width))
        buffers = {"lengths": cache.lengths, "k": cache.k[layer], "v": cache.v[layer]}
        new = {"qkv": qkv, "q_norm": q_norm, "k_norm": k_norm, "cos": cache.cos, "sin": cache.sin}
        if s == 1:
            plan = kernels.decode_attention(self._facts, b, *sizes, dtype, config.eps, norm=norm)
            partials, _ = kernels.attention_workspace(plan, config.head_dim)
            scratch = {"partials": self._empty((partials,), np.float32), "counters": self._counters}
            self.run(plan, **buffers, **new, **scratch, out=out)
            return out
        q = self._empty((b, s, config.q_width))
        plan = kernels.rope_cache(self._facts, b * s, s, *sizes, dtype, config.eps, norm=norm)
        self.run(plan, **buffers, **new, q=q)
        self.run(kernels.attention(self._facts, b * s, s, *sizes, dtype), **buffers, q=q, out=out)
        return out

    def cache(self, sequences: int, capacity: int) -> Cache:
        import cupy

        if sequences * self.config.heads > kernels.MAX_COUNTERS:
            most = kernels.MAX_COUNTERS // self.config.heads
            raise ValueError(f"a batch must have at most {most} sequences on a GPU, got {sequences}")
        free, _ = cupy.cuda.runtime.memGetInfo()
        pool = cupy.get_default_memory_pool()
        free += pool.free_bytes() - RESERVE
        return kv.create(self.config, sequences, capacity, self.dtype, cupy, max(free, 0))

    def tokens(self, ids: Sequence[int]) -> Array:
        import cupy

        return cupy.asarray(np.array(ids, np.int32))

    def logits(self, y: Array) -> Array:
        return y.astype(np.float32, copy=False)

    def decoder(self, step: Callable[[Array], Array], cache: Cache, sampling: Sampling) -> DeviceDecoder:
        return DeviceDecoder(self, step, cache, sampling)

    def run(self, plan: LaunchPlan, **buffers: Array | None) -> None:
        """Launch a plan over arrays by their names, on the current stream."""
        import cupy

        launcher = launch.launcher(plan, self.index)
        addresses = tuple(arrays.address(buffers[name]) for name in launcher.buffers)
        launcher(addresses, cupy.cuda.get_current_stream().ptr)

    def _empty(self, shape: tuple[int, ...], dtype: Any = None) -> cupy.ndarray:
        import cupy

        return cupy.empty(shape, self.dtype if dtype is None else dtype)

    def _module(self, part: Module) -> AwqLinear:
        return AwqLinear(_on_gpu(part.weight), bias=_put(part.bias), keep_weight=False)

    def _joined(self, parts: Sequence[Module], activation: str | None) -> AwqLinear:
        each: list[AwqLinear | PackedWeight] = []
        for part in parts:
            weight = _on_gpu(part.weight)
            each.append(weight if part.bias is None else AwqLinear(weight, bias=_put(part.bias)))
        return AwqLinear.concatenate(each, activation=activation, keep_weight=False)

    def _dense(self, part: Linear, out: np.dtype[Any] | None = None) -> Project:
        import cupy

        known, table = self._table
        w = table if part.weight is known else cupy.asarray(part.weight.astype(self.dtype, copy=False))
        bias = None if part.bias is None else cupy.asarray(part.bias.astype(np.float32))
        n, k = w.shape
        if k % 8:
            raise ValueError(f"a GPU needs K a multiple of 8 in every linear module, got {k}")
        y_dtype = out or self.dtype

        def project(x: Array) -> Array:
            x = cupy.ascontiguousarray(x)
            y = self._empty((*x.shape[:-1], n), y_dtype)
            options = self.dtype.name, y_dtype.name
            plan = kernels.dense(self._facts, x.size // k, n, k, *options, bias=bias is not None)
            self.run(plan, x=x, w=w, bias=bias, y=y)
            return y

        return project

    def _swiglu(self, x: Array) -> Array:
        width = x.shape[-1] // 2
        y = self._empty((*x.shape[:-1], width))
        self.run(kernels.swiglu(self._facts, y.size // width, width, self.dtype.name), x=x, y=y)
        return y


class DeviceDecoder:
    """As `HostDecoder`: the first step runs as it is, which loads every kernel, the second one is captured, and all
    further ones are one graph launch. Tokens, positions and what was seen live on the device, so that a step can begin
    while the host still waits for the tokens of the one before: the GPU never waits for the host. The last such step
    is in vain; it writes behind the tokens that the cache knows, and `close` waits for it.

    `choose` writes tokens where the host sees them, too: nothing but an event stands between two graphs."""

    def __init__(self, ops: DeviceOps, step: Callable[[Array], Array], cache: Cache, sampling: Sampling) -> None:
        import cupy

        self._stream, self._pool = ops.decoding
        # Another text's step may be under way: prompts, on another stream, share counters, and what it had was freed.
        self._stream.synchronize()
        rows, vocab = len(cache.tokens), ops.config.vocab
        self._ops, self._step, self._cache, self._sampling = ops, step, cache, sampling
        self._next = [0] * rows
        self._tokens = cupy.zeros(rows, np.int32)
        self._seen = cupy.zeros((rows, vocab), np.uint8) if sampling.repetition_penalty != 1 else None
        filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self._limits = cupy.zeros(rows, np.float32) if filters and sampling.temperature > 0 else None
        self._partials = cupy.zeros((rows, kernels.CHOOSE_BLOCKS), np.uint64)
        self._counters = cupy.zeros(rows, np.uint32)
        self._steps = 0
        self._graph: Any = None
        self._memory: list[Any] = []
        # Of each sequence, the last token at even and at odd positions: while the host reads one, the step after it may
        # write the other. A device knows pinned memory by the host's address.
        pinned = cupy.cuda.alloc_pinned_memory(8 * rows)
        self._arrived: npt.NDArray[Any] = np.frombuffer(pinned, np.int32, 2 * rows).reshape(rows, 2)
        memory = cupy.cuda.UnownedMemory(pinned.ptr, 8 * rows, pinned, ops.index)
        self._sent = cupy.ndarray((rows, 2), np.int32, cupy.cuda.MemoryPointer(memory, 0))
        self._arrival = cupy.cuda.Event(disable_timing=True)

    def put(self, row: int, logits: Array) -> int:
        """The first token of a sequence, from the logits [V] of its prompt."""
        one = slice(row, row + 1)
        if self._seen is not None:
            self._seen[row, self._ops.tokens(self._cache.tokens[row])] = 1
        self._choose(logits[None], one, advance=False)
        token = _checked(int(self._tokens[row]))
        self._next[row] = token
        return token

    def step(self) -> list[int]:
        """The next token of every sequence."""
        import cupy

        with self._stream, cupy.cuda.using_allocator(self._pool.malloc):
            if self._steps == 1:
                self._stream.begin_capture()
                try:
                    with cupy.cuda.using_allocator(self._kept):
                        self._advance()
                finally:
                    self._graph = self._stream.end_capture()
            if self._graph is None:
                self._advance()
            elif self._steps == 1:
                self._graph.launch(self._stream)
            self._arrival.record()
            if self._graph is not None:
                self._graph.launch(self._stream)
        self._arrival.synchronize()
        self._steps += 1
        for known, token in zip(self._cache.tokens, self._next, strict=True):
            known.append(token)
        positions = map(len, self._cache.tokens)
        self._next = [_checked(both[at % 2]) for both, at in zip(self._arrived.tolist(), positions, strict=True)]
        return list(self._next)

    def close(self) -> None:
        """Wait for the step that nobody asked for: it uses the cache, whose memory may go to others then."""
        self._stream.synchronize()

    def _kept(self, size: int) -> Any:
        """Memory that stays this decoder's: its graph writes there whenever it is launched."""
        memory = self._pool.malloc(size)
        self._memory.append(memory)
        return memory

    def _advance(self) -> None:
        self._choose(self._step(self._tokens), slice(None), advance=True)

    def _choose(self, logits: Array, rows: slice, *, advance: bool) -> None:
        sampling, ops = self._sampling, self._ops
        facts, (m, vocab) = device.of(ops.index), logits.shape
        seen, limits = (None if a is None else a[rows] for a in (self._seen, self._limits))
        options = {"temperature": sampling.temperature, "penalty": sampling.repetition_penalty}
        if limits is not None:
            filters = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
            ops.run(
                kernels.choose_limit(facts, m, vocab, **options, **filters), logits=logits, seen=seen, limits=limits
            )
        plan = kernels.choose(facts, m, vocab, row=rows.start or 0, seed=sampling.seed, **options, advance=advance)
        buffers = {"tokens": self._tokens[rows], "lengths": self._cache.lengths[rows]}
        buffers |= {"partials": self._partials[rows], "counters": self._counters[rows], "arrived": self._sent[rows]}
        ops.run(plan, logits=logits, seen=seen, limits=limits, **buffers)


def _checked(token: int) -> int:
    if token < 0:
        raise ValueError("the logits hold NaN: the model's weights are damaged, or its values overflow")
    return token


def _put(a: Array | None) -> Any:
    import cupy

    return None if a is None else cupy.asarray(a)


def _on_gpu(weight: PackedWeight) -> PackedWeight:
    return PackedWeight(_put(weight.qweight), _put(weight.scales), _put(weight.qzeros))


def _kind(weight: PackedWeight) -> tuple[Any, ...]:
    facts = weight.spec
    return facts.k, facts.group_size, facts.dtype, facts.zeros


def activation_dtype(part: Module | Linear) -> np.dtype[Any]:
    """bfloat16 for a model whose weights are, otherwise float16."""
    dtype = part.weight.dtype
    return check.BFLOAT16 if dtype == check.BFLOAT16 else check.FLOAT16
