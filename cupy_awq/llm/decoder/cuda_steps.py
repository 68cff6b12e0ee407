# SPDX-License-Identifier: Apache-2.0
"""`CudaSteps`: steps of any sequences on a GPU, over a paged KV cache; each step is a CUDA graph by size."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupy_awq.check import Array
from cupy_awq.kernels.decoder import decoder as kernels
from cupy_awq.kernels.decoder.attention import PREFILL_TILE
from cupy_awq.kernels.decoder.begin_step import MAX_ROWS, ROW_FIELDS, work_items
from cupy_awq.kernels.decoder.decode_attention import choose_splits
from cupy_awq.kernels.decoder.sampling import MAX_SAMPLE_CTAS, SLOT_OPTIONS, slot_options
from cupy_awq.llm.decoder import states
from cupy_awq.llm.decoder.backend import Forward, Steps
from cupy_awq.llm.decoder.block_pool import BLOCK, DUMMY, count_blocks
from cupy_awq.llm.decoder.decode_loop import LaunchingOps
from cupy_awq.llm.decoder.forward import Projection
from cupy_awq.llm.decoder.sampling import Sampling
from cupy_awq.llm.decoder.states import KvState
from cupy_awq.llm.families.rope import Rope
from cupy_awq.runtime.compile import load_functions
from cupy_awq.runtime.graph import capture
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
"""The number of steps whose rows and tokens have host memory of their own; more than are launched at a time."""


@dataclass(frozen=True)
class CudaRows:
    """A ragged batch on a GPU: each row is a token of any sequence.

    Attributes:
        layers: the states of the layers, with a block of the cache in place of each sequence.
        rotations: the cosines and sines of each RoPE, float32 [positions, head_dim / 2] each.
        table: int32 [slots, width], the block of each `BLOCK` tokens of a sequence. Slot 0 is that of padding rows.
        lengths: int32 [M], the position of each row; -1 for padding rows, which are not appended to the cache.
        slots: int32 [M], the slot of each row.
        work: int32 [items, 4], what attention computes: tiles of rows or, in a decode step, ranges of keys.
        splits: the number of ranges of keys of a row, or 0 if ``work`` are tiles.
        has_drafts: whether several rows of a decode step may be of one sequence.
    """

    layers: tuple[KvState, ...]
    rotations: Mapping[Rope, tuple[Array, Array]]
    table: Array
    lengths: Array
    slots: Array
    work: Array
    splits: int = 0
    has_drafts: bool = False

    @property
    def tiles(self) -> int:
        """The number of tiles in ``work``, or 0 if it has ranges of keys."""
        return 0 if self.splits else len(self.work)

    @property
    def capacity(self) -> int:
        """The largest number of tokens of a sequence."""
        return int(self.table.shape[1]) * BLOCK


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


class _Graph:
    """A step of a fixed number of rows, which is captured once.

    Attributes:
        inputs: int32, what the host writes before each launch.
        result: what each launch writes: the logits [size, V] of a decode step, or the hidden states [1, size, hidden].
        run: a function that launches the kernels and sets ``result``.
        graph: the captured graph.
    """

    inputs: Array
    result: Array = None
    run: Callable[[], None]
    graph: Any = None

    def capture(self, stream: Any) -> None:
        """Capture the step on the current stream, after an eager one, which allocates what the graph reuses."""
        self.run()
        self.result = None
        self.graph = capture(stream, self.run)

    def launch(self, inputs: npt.NDArray[np.int32], stream: Any) -> Array:
        """Launch the step in the order of the stream, and return its result, which the next launch overwrites."""
        copy_to(self.inputs, inputs, stream)
        self.graph.launch(stream)
        return self.result


class _DecodeGraph(_Graph):
    """A decode step of ``size`` rows, of ``splits`` ranges of keys each.

    Attributes:
        inputs: the buffer ``rows`` of ``begin_step``.
        tokens, lengths, slots, work: its other buffers.
    """

    def __init__(self, size: int, splits: int) -> None:
        import cupy

        self.inputs = cupy.asarray(np.full((size, ROW_FIELDS), -1, np.int32))
        self.tokens, self.lengths, self.slots = (cupy.zeros(size, np.int32) for _ in range(3))
        self.work = cupy.zeros((work_items(size, splits), 4), np.int32)


class _PromptGraph(_Graph):
    """A step of ``size`` prompt tokens in at most ``tiles`` tiles, of which some may be empty.

    Attributes:
        inputs: the tiles, as in `CudaRows.work`, and then the token, the position and the slot of each row.
    """

    def __init__(self, size: int, tiles: int) -> None:
        import cupy

        self.size, self.tiles = size, tiles
        self.inputs = cupy.asarray(self.pack([], [], [], []))

    def pack(
        self, tiles: Sequence[tuple[int, ...]], tokens: list[int], positions: Sequence[Array], slots: list[int]
    ) -> npt.NDArray[np.int32]:
        """Return the inputs for some rows; padding rows follow them."""
        m, packed = len(tokens), np.zeros(4 * self.tiles + 3 * self.size, np.int32)
        tiles = sorted([*tiles, *self.padding(m)], key=lambda tile: -tile[2])  # tiles with many keys start first
        packed[: 4 * len(tiles)] = np.array(tiles).reshape(-1)
        ids, lengths, places = packed[4 * self.tiles :].reshape(3, -1)
        lengths[m:] = -1
        if m:
            ids[:m], lengths[:m], places[:m] = tokens, np.concatenate(positions), slots
        return packed

    def padding(self, m: int) -> list[tuple[int, ...]]:
        """Return the tiles of padding rows after m rows."""
        begins = range(m, self.size, PREFILL_TILE)
        return [(begin, min(PREFILL_TILE, self.size - begin), 0, 0) for begin in begins]


class CudaSteps(Steps):
    """The implementation of `Steps`. Only one thread may use it.

    All launches are on one stream, so a block that a finished sequence gives up is written only after the last launched
    step that reads it. The intermediate arrays of all graphs share one memory pool, because only one graph runs at a
    time.

    Args:
        ops: the back end.
        forward, head: those of the model.
        rows: the largest number of sequences.
        positions: the largest number of tokens of a sequence.
        blocks: the number of blocks that sequences can own.
        draft_rows: the largest number of rows of a decode step with drafts; 0 if there are none.
        batch_invariant: whether decode steps use the attention kernel for prompts.
    """

    def __init__(
        self, ops: LaunchingOps, forward: Forward, head: Projection, rows: int, positions: int, blocks: int,
        draft_rows: int, batch_invariant: bool,
    ) -> None:  # fmt: skip
        import cupy

        if rows > MAX_ROWS:
            raise ValueError(f"max_rows: expected at most {MAX_ROWS} on a GPU, got {rows}")
        self._ops, self._forward, self._head, self._batch_invariant = ops, forward, head, batch_invariant
        self.stream, _ = ops.decode_stream
        self._pool = cupy.cuda.MemoryPool()
        self.blocks = blocks
        layers, dtype = ops.config.layers, ops.dtype
        self._layers = tuple(KvState.allocate(s.mixer, DUMMY + 1 + blocks, BLOCK, dtype, cupy) for s in layers)
        self._rotations = states.make_rotations(layers, count_blocks(positions) * BLOCK, cupy, whole_heads=True)
        self._table = cupy.zeros((1 + rows, count_blocks(positions)), np.int32)
        self._newest = cupy.zeros(1 + rows, np.int32)
        self._options = cupy.asarray(np.zeros((1 + rows) * SLOT_OPTIONS.itemsize, np.uint8))
        self._sizes = [size for size in GRAPH_SIZES if size <= next_size(max(rows, draft_rows))]
        most = self._sizes[-1]
        self._limits = cupy.zeros(most, np.float32)
        self._partials = cupy.zeros((most, MAX_SAMPLE_CTAS), np.uint64)
        self._counters = cupy.zeros(most, np.uint32)
        self._host_rows = pinned((IN_FLIGHT, most, ROW_FIELDS), ops.device_index)[0]
        self._host_tokens, self._token_views = pinned((IN_FLIGHT, most), ops.device_index)
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(IN_FLIGHT)]
        self._count = 0
        cupy.cuda.get_current_stream().synchronize()
        self._graphs = {(size, False): self._decode_graph(size) for size in reversed(self._sizes)}
        drafted = [size for size in self._sizes if 1 < size <= next_size(max(draft_rows, 1))]
        self._graphs |= {(size, True): self._decode_graph(size, has_drafts=True) for size in reversed(drafted)}
        sizes = [size for size in PROMPT_SIZES if size < ops.prefill_chunk] + [ops.prefill_chunk]
        self._prompts = [self._prompt_graph(size, rows, size == sizes[-1]) for size in sizes]
        with self.stream:
            self._warm_up()
        self.stream.synchronize()

    def _warm_up(self) -> None:
        """Compile and load the kernels of all steps, and capture the graphs. The rows are those of padding."""
        import cupy

        graphs = [*self._prompts[::-1], *self._graphs.values()]  # the largest first: the others reuse its memory
        with collect_kernels() as kernels, cupy.cuda.using_allocator(self._pool.malloc):
            for graph in graphs:
                graph.run()
                graph.result = None
            self._warm_up_choice()
        load_functions(kernels, functools.partial(_log_progress, "loaded %d of %d kernels"))
        with cupy.cuda.using_allocator(self._pool.malloc):
            for i, graph in enumerate(graphs, 1):
                graph.capture(self.stream)
                _log_progress("captured %d of %d steps", i, len(graphs))
        self._warm_up_choice()

    def _warm_up_choice(self) -> None:
        """Launch the head and every choice of tokens for every number of rows."""
        import cupy

        hidden = cupy.zeros((1, self._ops.config.hidden), self._ops.dtype)
        for size in reversed(self._sizes):
            logits = self.last_logits(hidden, [0] * size)
            for samples, filters in ((False, False), (True, False), (True, True)):
                self.choose(logits, [(0, 0)], samples=samples, filters=filters)

    def assign(self, slot: int, sampling: Sampling, choice: int, blocks: Sequence[int]) -> None:
        itemsize = SLOT_OPTIONS.itemsize
        options = self._options[slot * itemsize : (slot + 1) * itemsize]
        copy_to(options, slot_options(sampling, choice).view(np.uint8), self.stream)
        copy_to(self._table[slot, : len(blocks)], np.array(blocks, np.int32), self.stream)

    def prompt(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> Array:
        tokens: list[int] = []
        positions, slots, tiles = [], [], []
        for slot, start, new in parts:
            for i in range(0, len(new), PREFILL_TILE):
                tiles.append((len(tokens) + i, min(PREFILL_TILE, len(new) - i), start + i, slot))
            tokens += new
            positions.append(np.arange(start, start + len(new)))
            slots += [slot] * len(new)
        m = len(tokens)
        fitting = (g for g in self._prompts if g.size >= m and g.tiles >= len(tiles) + len(g.padding(m)))
        graph = next(fitting)
        return graph.launch(graph.pack(tiles, tokens, positions, slots), self.stream)[0, :m]

    def last_logits(self, hidden: Array, rows: Sequence[int]) -> Array:
        size = self._size(len(rows))
        return self._head(gather_rows(hidden, [*rows, *[rows[0]] * (size - len(rows))], self.stream))

    def choose(self, logits: Array, rows: Sequence[tuple[int, int]], *, samples: bool, filters: bool) -> CudaTokens:
        import cupy

        host = np.zeros((2, len(logits)), np.int32)  # slot 0 for padding rows
        host[:, : len(rows)] = np.array(rows, np.int32).T
        device = cupy.empty(host.shape, np.int32)
        copy_to(device, host, self.stream)
        return self._choose(logits, *device, samples=samples, filters=filters)

    def decode(
        self, rows: Sequence[tuple[int, ...]], *, samples: bool, filters: bool, has_drafts: bool = False
    ) -> tuple[Array, CudaTokens]:
        size = self._size(len(rows))
        graph, host = self._graphs[size, has_drafts], self._host_rows[self._count % IN_FLIGHT][:size]
        host[: len(rows)] = rows
        host[len(rows) :] = -1
        logits = graph.launch(host, self.stream)
        return logits, self._choose(logits, graph.slots, graph.lengths, samples=samples, filters=filters)

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

    def _choose(self, logits: Array, slots: Array, lengths: Array, *, samples: bool, filters: bool) -> CudaTokens:
        """Choose the next token of each row from its logits [m, V]."""
        m, vocab = logits.shape
        ops, at = self._ops, self._count % IN_FLIGHT
        self._count += 1
        read = {"logits": logits, "seen": None, "slots": slots, "options": self._options}
        limits = self._limits if samples and filters else None
        if limits is not None:
            plan = kernels.plan_sampling_threshold(ops.device, m, vocab, 1.0, by_slot=True)
            ops.run(plan, **read, limits=limits)
        plan = kernels.plan_sample_token(ops.device, m, vocab, temperature=float(samples), by_slot=True)
        written = {"tokens": self._newest, "partials": self._partials, "counters": self._counters}
        ops.run(plan, **read, **written, limits=limits, lengths=lengths, host_tokens=self._token_views[at])
        self._events[at].record(self.stream)
        return CudaTokens(self._host_tokens[at][:m], self._events[at])

    def _decode_graph(self, size: int, has_drafts: bool = False) -> _DecodeGraph:
        splits = 0 if self._batch_invariant else _choose_splits(self._ops, size)
        graph = _DecodeGraph(size, splits)
        written = {name: getattr(graph, name) for name in ("tokens", "lengths", "slots", "work")}
        plan = kernels.plan_begin_step(self._ops.device, size, int(self._table.shape[1]), splits)
        cache = self._layers, self._rotations, self._table

        def run() -> None:
            self._ops.run(plan, rows=graph.inputs, newest=self._newest, table=self._table, **written)
            batch = CudaRows(*cache, graph.lengths, graph.slots, graph.work, splits, has_drafts)
            graph.result = self._head(self._forward(graph.tokens[None], batch)[0])

        graph.run = run
        return graph

    def _prompt_graph(self, size: int, rows: int, is_largest: bool) -> _PromptGraph:
        # A batch with more tiles runs at the next larger size. Empty tiles take time, so most sizes have few of them.
        graph = _PromptGraph(size, size // PREFILL_TILE + (rows + 1 if is_largest else min(rows + 1, size // 8)))
        work = graph.inputs[: 4 * graph.tiles].reshape(-1, 4)
        tokens, lengths, slots = graph.inputs[4 * graph.tiles :].reshape(3, -1)
        batch = CudaRows(self._layers, self._rotations, self._table, lengths, slots, work)

        def run() -> None:
            graph.result = self._forward(tokens[None], batch)

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


def choose_blocks(ops: LaunchingOps, rows: int, positions: int, tokens: int | None, free_bytes: int) -> int:
    """Return the number of blocks for ``tokens`` tokens or, by default, for all rows as far as they fit.

    Raises ValueError if they do not fit into ``free_bytes``, of which an eighth is for the memory of the graphs.
    """
    block_bytes = states.count_bytes(ops.config.layers, 1, BLOCK, ops.dtype.itemsize)
    room = free_bytes * 7 // 8
    blocks = count_blocks(rows * positions if tokens is None else tokens)
    if tokens is None:
        blocks = max(1, min(blocks, room // block_bytes))
    states.check_size(blocks * block_bytes, room, f"{blocks * BLOCK}")
    return blocks


def _choose_splits(ops: LaunchingOps, m: int) -> int:
    """Return the number of ranges of keys of a row in a decode step of m rows."""
    shapes = {(spec.mixer.heads, spec.mixer.kv_heads, spec.mixer.head_dim) for spec in ops.config.layers}
    return max(choose_splits(*shape, m, ops.device) for shape in shapes)


def pinned(shape: tuple[int, ...], device_index: int) -> tuple[npt.NDArray[np.int32], cupy.ndarray]:
    """Return pinned host memory as a NumPy array and, with unified addressing, as a CuPy array; both int32."""
    import cupy

    size = 4 * int(np.prod(shape))
    memory = cupy.cuda.alloc_pinned_memory(size)
    host = np.frombuffer(memory, np.int32, size // 4).reshape(shape)
    view = cupy.cuda.UnownedMemory(memory.ptr, size, memory, device_index)
    return host, cupy.ndarray(shape, np.int32, cupy.cuda.MemoryPointer(view, 0))


def gather_rows(a: Array, rows: Sequence[int], stream: Any) -> Array:
    """Return some rows of a contiguous array on the device, without one of CuPy's kernels, which are compiled first."""
    import cupy

    taken = cupy.empty((len(rows), *a.shape[1:]), a.dtype)
    nbytes, kind = a[0].nbytes, cupy.cuda.runtime.memcpyDeviceToDevice
    for i, row in enumerate(rows):
        cupy.cuda.runtime.memcpyAsync(taken.data.ptr + i * nbytes, a.data.ptr + row * nbytes, nbytes, kind, stream.ptr)
    return taken


def copy_to(target: Array, source: npt.NDArray[Any], stream: Any) -> None:
    """Copy contiguous host memory to the device in the order of the stream, without waiting."""
    target.set(source, stream)
