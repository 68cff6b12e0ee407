# SPDX-License-Identifier: Apache-2.0
"""The decode loop on a GPU: a step is one CUDA graph, launched one step ahead of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from cupy_awq.check import Array
from cupy_awq.kernels.decoder import decoder as kernels
from cupy_awq.kernels.decoder.sampling import MAX_SAMPLE_CTAS
from cupy_awq.llm.decoder.backend import DecodeLoop, DecoderOps, StepLogits
from cupy_awq.llm.decoder.sampling import NAN_LOGITS, Sampling
from cupy_awq.llm.decoder.states import Cache
from cupy_awq.llm.families.description import Decoder
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.graph import capture
from cupy_awq.runtime.launch_plan import LaunchPlan

if TYPE_CHECKING:
    import cupy


class LaunchingOps(DecoderOps, Protocol):
    """The operations of a back end that launches kernels on a GPU."""

    config: Decoder
    """The description of the decoder."""
    device: Device
    """The properties of the GPU."""
    dtype: np.dtype[Any]
    """The dtype of activations and of the KV cache."""

    @property
    def decode_stream(self) -> tuple[cupy.cuda.Stream, cupy.cuda.MemoryPool]:
        """The CUDA stream of all decode steps, and the memory pool for their intermediate arrays."""
        ...

    def run(self, plan: LaunchPlan, **buffers: Array | None) -> None:
        """Launch a plan on the current stream. ``buffers`` maps argument names to arrays."""
        ...


class CudaDecodeLoop(DecodeLoop):
    """A decode loop that keeps tokens, positions and the tokens seen so far on the device.

    The first step runs eagerly, which loads every kernel; the second step is captured into a CUDA graph, and each later
    step is one graph launch. The graph of a step is launched before the host has read the tokens of the preceding step,
    so the GPU never waits for the host. The last launch is therefore speculative: it appends to the KV cache after the
    tokens that `Cache.tokens` records, and `close` waits for it.

    The kernel ``sample_token`` also writes the new tokens to pinned host memory, so consecutive graph launches are
    separated only by an event. Arrays allocated during capture are kept as long as the loop.
    """

    def __init__(self, ops: LaunchingOps, step_logits: StepLogits, cache: Cache, sampling: Sampling) -> None:
        import cupy

        self._stream, self._pool = ops.decode_stream
        # Wait for the speculative step of the preceding text: its memory may be reused from here on, and the prompts of
        # this text run on another stream but use the same attention counters.
        self._stream.synchronize()
        sequences, vocab = len(cache.tokens), ops.config.vocab
        self._ops, self._step_logits, self._cache, self._sampling = ops, step_logits, cache, sampling
        self._next = [0] * sequences
        self._tokens = cupy.zeros(sequences, np.int32)
        self._seen = cupy.zeros((sequences, vocab), np.uint8) if sampling.repetition_penalty != 1 else None
        has_filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self._limits = cupy.zeros(sequences, np.float32) if has_filters and sampling.temperature > 0 else None
        self._partials = cupy.zeros((sequences, MAX_SAMPLE_CTAS), np.uint64)
        self._counters = cupy.zeros(sequences, np.uint32)
        self._steps = 0
        self._graph: Any = None
        self._graph_memory: list[Any] = []
        # Two buffers for the newest tokens, used by even and by odd steps: the next step may write one buffer while the
        # host reads the other. With unified addressing, the device address of pinned memory is the host address.
        pinned = cupy.cuda.alloc_pinned_memory(8 * sequences)
        host_tokens = np.frombuffer(pinned, np.int32, 2 * sequences).reshape(sequences, 2)
        self._host_tokens: npt.NDArray[np.int32] = host_tokens
        memory = cupy.cuda.UnownedMemory(pinned.ptr, 8 * sequences, pinned, ops.device_index)
        self._host_tokens_view = cupy.ndarray((sequences, 2), np.int32, cupy.cuda.MemoryPointer(memory, 0))
        self._tokens_written = cupy.cuda.Event(disable_timing=True)

    def start(self, sequence: int, logits: Array) -> int:
        one = slice(sequence, sequence + 1)
        if self._seen is not None:
            self._seen[sequence, self._ops.prepare_tokens(self._cache.tokens[sequence])] = 1
        self._choose(logits[None], one, advance=False)
        token = _checked(int(self._tokens[sequence]))
        self._next[sequence] = token
        return token

    def step(self) -> list[int]:
        import cupy

        with self._stream, cupy.cuda.using_allocator(self._pool.malloc):
            if self._steps == 1:
                with cupy.cuda.using_allocator(self._allocate_for_graph):
                    self._graph = capture(self._stream, self._forward_and_choose)
            if self._graph is None:
                self._forward_and_choose()
            elif self._steps == 1:
                self._graph.launch(self._stream)
            self._tokens_written.record()
            if self._graph is not None:
                self._graph.launch(self._stream)
        self._tokens_written.synchronize()
        self._steps += 1
        for known, token in zip(self._cache.tokens, self._next, strict=True):
            known.append(token)
        positions = map(len, self._cache.tokens)
        self._next = [_checked(pair[at % 2]) for pair, at in zip(self._host_tokens.tolist(), positions, strict=True)]
        return list(self._next)

    def close(self) -> None:
        """Wait for the discarded speculative step; it still uses the KV cache, whose memory is about to be reused."""
        self._stream.synchronize()

    def _allocate_for_graph(self, size: int) -> Any:
        """Allocate device memory that is kept as long as the loop, because every launch of the graph writes to it."""
        memory = self._pool.malloc(size)
        self._graph_memory.append(memory)
        return memory

    def _forward_and_choose(self) -> None:
        self._choose(self._step_logits(self._tokens), slice(None), advance=True)

    def _choose(self, logits: Array, sequences: slice, *, advance: bool) -> None:
        """Choose the next token of each sequence of a slice from logits [B, V]; ``advance`` increments its length."""
        sampling, ops = self._sampling, self._ops
        gpu, (m, vocab) = ops.device, logits.shape
        seen, limits = (None if a is None else a[sequences] for a in (self._seen, self._limits))
        options: dict[str, Any] = {"temperature": sampling.temperature, "penalty": sampling.repetition_penalty}
        if limits is not None:
            filters: dict[str, Any] = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
            plan = kernels.plan_sampling_threshold(gpu, m, vocab, **options, **filters)
            ops.run(plan, logits=logits, seen=seen, limits=limits)
        options |= {"first_sequence": sequences.start or 0, "seed": sampling.seed}
        plan = kernels.plan_sample_token(gpu, m, vocab, **options, advance=advance)
        buffers = {"tokens": self._tokens[sequences], "lengths": self._cache.lengths[sequences]}
        buffers |= {"partials": self._partials[sequences], "counters": self._counters[sequences]}
        buffers |= {"host_tokens": self._host_tokens_view[sequences]}
        ops.run(plan, logits=logits, seen=seen, limits=limits, **buffers)


def _checked(token: int) -> int:
    """Return ``token``. Raises ValueError for -1, which ``sample_token`` writes if the logits contain NaN."""
    if token < 0:
        raise ValueError(NAN_LOGITS)
    return token
