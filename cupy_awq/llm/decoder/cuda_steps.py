# SPDX-License-Identifier: Apache-2.0
"""`CudaSteps`: steps of any sequences on a GPU, over a paged KV cache, as CUDA graphs by size."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cupy_awq.check import Array
from cupy_awq.kernels.decoder import decoder as kernels
from cupy_awq.kernels.decoder.attention import PREFILL_TILE
from cupy_awq.kernels.decoder.begin_step import MAX_ROWS, ROW_FIELDS
from cupy_awq.kernels.decoder.decode_attention import choose_splits
from cupy_awq.kernels.decoder.sampling import MAX_SAMPLE_CTAS, SLOT_OPTIONS, slot_options
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.llm.decoder import states
from cupy_awq.llm.decoder.backend import ChoiceOptions, DecoderOps, Forward, Steps
from cupy_awq.llm.decoder.block_pool import BLOCK, DUMMY, count_blocks
from cupy_awq.llm.decoder.forward import Projection
from cupy_awq.llm.decoder.sampling import Offsets, Sampling
from cupy_awq.llm.decoder.step_graphs import (
    CudaKvState,
    CudaRows,
    DecodeGraph,
    PromptGraph,
    enqueue_copy,
    gather_rows,
    pinned,
)
from cupy_awq.llm.families.description import Decoder
from cupy_awq.runtime.compile import load_functions
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan
from cupy_awq.runtime.launcher import collect_kernels

if TYPE_CHECKING:
    import cupy

LOG = logging.getLogger(__name__)

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""The numbers of rows of captured decode steps."""

PROMPT_SIZES = (*range(32, 256, 32), *range(256, 512, 64), *range(512, 2049, 128))
"""The numbers of rows of captured steps with prompts. From 128 rows on, at most a fifth are padding, more where
many short parts need more tiles."""

IN_FLIGHT = 4
"""The number of steps with host memory of their own for what they read and write; more than are launched at a time."""


CHOICES = tuple(
    ChoiceOptions(samples, filters, penalizes)
    for penalizes in (False, True)
    for samples, filters in ((False, False), (True, False), (True, True))
)
"""All needs of a choice: each takes other kernels."""


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
        """The CUDA stream of all steps, and the memory pool for the intermediate arrays of captured ones."""
        ...

    def run(self, plan: LaunchPlan, **buffers: Array | None) -> None:
        """Launch a plan on the current stream. ``buffers`` maps argument names to arrays."""
        ...


class CudaTokens(NamedTuple):
    """The implementation of `Tokens`: those that a launched kernel writes.

    Attributes:
        host: int32 [rows] in pinned memory.
        event: the event after which they are there.
    """

    host: npt.NDArray[np.int32]
    event: Any

    def wait(self) -> list[int]:
        self.event.synchronize()
        tokens: list[int] = self.host.tolist()
        return tokens


class CudaSteps(Steps):
    """The implementation of `Steps`. Only one thread may use it.

    All launches are on one stream, so a block that a finished sequence gives up is written only after the last launched
    step that reads it. With ``prepares``, as for a server, all kernels are loaded and the steps of all sizes captured
    at once, and their graphs share the memory of intermediate arrays, because only one runs at a time. Without, every
    decode step has all rows and is captured when it is used for the second time, and prompts run eagerly.

    Args:
        ops: the back end.
        forward, head: those of the model.
        rows: the largest number of sequences.
        positions: the largest number of tokens of a sequence.
        blocks: the number of blocks that sequences can own.
        draft_rows: the largest number of rows of a decode step with drafts; 0 if there are none.
        prepares: whether all steps are prepared at once.
        batch_invariant: whether decode steps use the attention kernel for prompts.

    Attributes:
        layers: the states of the layers.
    """

    def __init__(
        self, ops: LaunchingOps, forward: Forward, head: Projection, rows: int, positions: int, blocks: int,
        draft_rows: int, prepares: bool, batch_invariant: bool,
    ) -> None:  # fmt: skip
        import cupy

        if rows > MAX_ROWS:
            raise ValueError(f"max_rows: expected at most {MAX_ROWS} on a GPU, got {rows}")
        self._ops, self._forward, self._head, self._batch_invariant = ops, forward, head, batch_invariant
        self.stream, self._pool = ops.decode_stream
        self._kept: list[Any] = []  # the memory of graphs that are captured later
        self.blocks = blocks
        layers = ops.config.layers
        self.layers = tuple(CudaKvState.allocate(s.mixer, DUMMY + 1 + blocks, ops.dtype) for s in layers)
        self._rotations = states.make_rotations(layers, count_blocks(positions) * BLOCK, cupy, whole_heads=True)
        self._table = cupy.zeros((1 + rows, count_blocks(positions)), np.int32)
        self._newest = cupy.zeros(1 + rows, np.int32)
        self._options = cupy.asarray(np.repeat(slot_options(Sampling(), 0, Offsets({}, 0, 0)), 1 + rows).view(np.uint8))
        self._seen = cupy.zeros((1 + rows, ops.config.vocab), np.uint8)
        self._offsets = cupy.zeros(self._seen.shape, np.float32)
        most = max(rows, draft_rows)
        self._sizes = [size for size in GRAPH_SIZES if size <= next_size(most)] if prepares else [most]
        most = self._sizes[-1]
        self._limits = cupy.zeros(most, np.float32)
        self._partials = cupy.zeros((most, MAX_SAMPLE_CTAS), np.uint64)
        self._counters = cupy.zeros(most, np.uint32)
        self._host_rows = pinned((IN_FLIGHT, most, ROW_FIELDS), ops.device_index)[0]
        self._host_tokens, self._token_views = pinned((IN_FLIGHT, most), ops.device_index)
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(IN_FLIGHT)]
        self._count = 0
        self._sources: list[list[npt.NDArray[Any]]] = [[] for _ in range(IN_FLIGHT)]
        self._graphs = {(size, False): self._decode_graph(size) for size in reversed(self._sizes)}
        drafted = [size for size in self._sizes if 1 < size <= next_size(max(draft_rows, 1))]
        self._graphs |= {(size, True): self._decode_graph(size, has_drafts=True) for size in reversed(drafted)}
        sizes = [*(size for size in PROMPT_SIZES if size < ops.prefill_chunk), ops.prefill_chunk] if prepares else []
        self._prompts = [self._prompt_graph(size, count_tiles(size, rows, size == sizes[-1])) for size in sizes]
        cupy.cuda.get_current_stream().synchronize()
        self.stream.synchronize()  # the last step of a cache whose memory this one may have
        if prepares:
            with self.stream:
                self._warm_up()
            self.stream.synchronize()

    def _warm_up(self) -> None:
        """Compile and load the kernels of all steps, and capture the graphs. The rows are those of padding."""
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()  # which the pool of the graphs cannot take
        graphs = [*self._prompts[::-1], *self._graphs.values()]  # the largest first: the others reuse its memory
        with collect_kernels() as kernels, cupy.cuda.using_allocator(self._pool.malloc):
            for graph in graphs:
                graph.run(graph)
                graph.result = None
            self._warm_up_choice()
        load_functions(kernels, functools.partial(_log_progress, "loaded %d of %d kernels"))
        with cupy.cuda.using_allocator(self._pool.malloc):
            for i, graph in enumerate(graphs, 1):
                graph.capture(self.stream, self._pool.malloc)
                _log_progress("captured %d of %d steps", i, len(graphs))
        self._warm_up_choice()

    def _warm_up_choice(self) -> None:
        """Launch the head and every choice of tokens for every number of rows."""
        import cupy

        hidden = cupy.zeros((1, self._ops.config.hidden), self._ops.dtype)
        for size in reversed(self._sizes):
            logits = self.last_logits(hidden, [0] * size)
            for options in CHOICES:
                self.choose(logits, [(0, 0)], options)

    def assign(self, slot: int, sampling: Sampling, choice: int, known: Sequence[int], offsets: Offsets) -> None:
        itemsize, vocab = SLOT_OPTIONS.itemsize, self._seen.shape[1]
        options = self._options[slot * itemsize : (slot + 1) * itemsize]
        self._copy(options, slot_options(sampling, choice, offsets).view(np.uint8))
        if sampling.repetition_penalty != 1 or offsets:
            seen = np.zeros(vocab, np.uint8)
            seen[known] = 1
            seen[list(offsets.generated)] = 3
            self._copy(self._seen[slot], seen)
        if offsets:
            values = np.zeros(vocab, np.float32)
            offsets.apply(values)
            self._copy(self._offsets[slot], values)

    def place(self, slot: int, blocks: Sequence[int]) -> None:
        self._copy(self._table[slot, : len(blocks)], np.array(blocks, np.int32))

    def prompt(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> Array:
        m = sum(len(new) for _, _, new in parts)
        tiles = sum(ceil_div(len(new), PREFILL_TILE) for _, _, new in parts)
        fitting = (g for g in self._prompts if g.size >= m and g.tiles >= tiles + len(g.padding(m)))
        graph = next(fitting) if self._prompts else self._prompt_graph(m, tiles)
        self._copy(graph.inputs, graph.pack(parts))
        return graph.launch(self.stream, self._keep)[0, :m]

    def last_logits(self, hidden: Array, rows: Sequence[int]) -> Array:
        size = self._size(len(rows))
        return self._head(gather_rows(hidden, [*rows, *[rows[0]] * (size - len(rows))], self.stream))

    def choose(self, logits: Array, rows: Sequence[tuple[int, int]], options: ChoiceOptions) -> CudaTokens:
        import cupy

        host = np.zeros((2, len(logits)), np.int32)  # slot 0 for padding rows
        host[:, : len(rows)] = np.array(rows, np.int32).T
        device = cupy.empty(host.shape, np.int32)
        self._copy(device, host)
        return self._choose(logits, device[0], device[1], options)

    def decode(
        self, rows: Sequence[tuple[int, ...]], options: ChoiceOptions, *, has_drafts: bool = False
    ) -> tuple[Array, CudaTokens]:
        size = self._size(len(rows))
        graph, host = self._graphs[size, has_drafts], self._host_rows[self._count % IN_FLIGHT][:size]
        host[: len(rows)] = rows
        host[len(rows) :] = -1
        self._copy(graph.inputs, host)
        logits = graph.launch(self.stream, self._keep)
        return logits, self._choose(logits, graph.slots, graph.lengths, options)

    def decode_kernels(self, position: int) -> Callable[[], Array]:
        """Return a function that launches the kernels of a decode step of all rows at a position, to measure it.

        The function returns the logits and chooses no tokens, so each call runs the same step.
        """
        rows, width, at = self._sizes[-1], count_blocks(position + 1), position // BLOCK
        graph, inputs = self._graphs[rows, False], []
        with self.stream:
            for slot in range(1, 1 + rows):
                blocks = range(DUMMY + 1 + (slot - 1) * width, DUMMY + 1 + slot * width)
                self.place(slot, blocks)
                inputs.append((slot, position, blocks[max(at - 1, 0)], blocks[at], 0))
            self._copy(graph.inputs, np.array(inputs, np.int32))

        def launch() -> Array:
            graph.run(graph)
            return graph.result

        return launch

    def _copy(self, target: Array, source: npt.NDArray[Any]) -> None:
        """Copy host memory to the device in the order of the stream, and keep it until the next steps have ended.

        A GPU that shares memory with the CPU may read the source late.
        """
        self._sources[self._count % IN_FLIGHT].append(source)
        enqueue_copy(target, source, self.stream)

    def _keep(self, size: int) -> Any:
        """Allocate device memory that is kept as long as the graphs, because every launch of one writes to it."""
        import cupy

        self._kept.append(cupy.get_default_memory_pool().malloc(size))
        return self._kept[-1]

    def _size(self, rows: int) -> int:
        """Return the number of rows of the decode step, and of the head, for some rows."""
        return next(size for size in self._sizes if size >= rows)

    def mark(self) -> Callable[[], None]:
        import cupy

        event = cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        wait: Callable[[], None] = event.synchronize
        return wait

    def wait(self) -> None:
        self.stream.synchronize()

    def _choose(self, logits: Array, slots: Array, lengths: Array, options: ChoiceOptions) -> CudaTokens:
        """Choose the next token of each row from its logits [m, V]."""
        m, vocab = logits.shape
        ops, at = self._ops, self._count % IN_FLIGHT
        self._count += 1
        self._sources[self._count % IN_FLIGHT] = []
        state = {"seen": self._seen, "offsets": self._offsets}
        read = {"logits": logits, **state, "slots": slots, "options": self._options}
        limits = self._limits if options.filters else None
        if limits is not None:
            plan = kernels.plan_sampling_threshold(ops.device, m, vocab, options.penalizes)
            ops.run(plan, **read, limits=limits)
        plan = kernels.plan_sample_token(ops.device, m, vocab, options.samples, options.penalizes)
        written = {"tokens": self._newest, "partials": self._partials, "counters": self._counters}
        ops.run(plan, **read, **written, limits=limits, lengths=lengths, host_tokens=self._token_views[at])
        self._events[at].record(self.stream)
        return CudaTokens(self._host_tokens[at][:m], self._events[at])

    def _decode_graph(self, size: int, has_drafts: bool = False) -> DecodeGraph:
        splits = 0 if self._batch_invariant else _choose_splits(self._ops, size)
        graph = DecodeGraph(size, splits)
        written = {name: getattr(graph, name) for name in ("tokens", "lengths", "slots", "work")}
        plan = kernels.plan_begin_step(self._ops.device, size, int(self._table.shape[1]), splits)
        ops, forward, head, newest, table = self._ops, self._forward, self._head, self._newest, self._table
        cache = self.layers, self._rotations, table

        def run(graph: DecodeGraph) -> None:
            ops.run(plan, rows=graph.inputs, newest=newest, table=table, **written)
            batch = CudaRows(*cache, graph.lengths, graph.slots, graph.work, splits, has_drafts)
            graph.result = head(forward(graph.tokens[None], batch)[0])

        graph.run = run
        return graph

    def _prompt_graph(self, size: int, tiles: int) -> PromptGraph:
        graph = PromptGraph(size, tiles)
        work = graph.inputs[: 4 * graph.tiles].reshape(-1, 4)
        tokens, lengths, slots = graph.inputs[4 * graph.tiles :].reshape(3, -1)
        batch = CudaRows(self.layers, self._rotations, self._table, lengths, slots, work)

        forward = self._forward

        def run(graph: PromptGraph) -> None:
            graph.result = forward(tokens[None], batch)

        graph.run = run
        return graph


def _log_progress(text: str, done: int, total: int) -> None:
    if done % 16 == 0 or done == total:
        LOG.info(f"engine: {text}", done, total)


def next_size(rows: int) -> int:
    """Return the smallest of `GRAPH_SIZES` for a number of rows.

    >>> next_size(1), next_size(33)
    (1, 48)
    """
    return next(size for size in GRAPH_SIZES if size >= rows)


def count_tiles(size: int, rows: int, is_largest: bool) -> int:
    """Return the number of tiles of a captured step with prompts; a batch with more runs at the next larger size.

    Empty tiles take time, so most sizes have few of them.
    """
    return size // PREFILL_TILE + (rows + 1 if is_largest else min(rows + 1, size // 8))


def choose_blocks(ops: LaunchingOps, rows: int, positions: int, tokens: int | None, free_bytes: int) -> int:
    """Return the number of blocks for ``tokens`` tokens or, by default, for all rows as far as they fit.

    Raises ValueError if they do not fit into ``free_bytes``, of which an eighth is for the memory of the graphs.
    """
    block_bytes = states.count_bytes(ops.config.layers, BLOCK, ops.dtype.itemsize)
    slot_bytes = 5 * ops.config.vocab  # of the penalties and biases of a row
    room = (free_bytes - (1 + rows) * slot_bytes) * 7 // 8
    blocks = count_blocks(rows * positions if tokens is None else tokens)
    if tokens is None:
        blocks = max(1, min(blocks, room // block_bytes))
    states.check_size(blocks * block_bytes, room, blocks * BLOCK)
    return blocks


def _choose_splits(ops: LaunchingOps, m: int) -> int:
    """Return the number of ranges of keys of a row in a decode step of m rows."""
    shapes = {(spec.mixer.heads, spec.mixer.kv_heads, spec.mixer.head_dim) for spec in ops.config.layers}
    return max(choose_splits(*shape, m, ops.device) for shape in shapes)
