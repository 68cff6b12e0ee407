# SPDX-License-Identifier: Apache-2.0
"""A batch of rows on a GPU, and the CUDA graphs of steps, for `cuda_steps`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupy_awq.check import Array
from cupy_awq.kernels.decoder.attention import PREFILL_TILE
from cupy_awq.kernels.decoder.begin_step import ROW_FIELDS, work_items
from cupy_awq.llm.decoder.block_pool import BLOCK
from cupy_awq.llm.families.description import Attention
from cupy_awq.llm.families.rope import Rope
from cupy_awq.runtime.graph import capture

if TYPE_CHECKING:
    import cupy


class CudaKvState(NamedTuple):
    """The state of an attention layer: the keys and values, [blocks, kv_heads, BLOCK, head_dim] each."""

    k: Array
    v: Array

    @classmethod
    def allocate(cls, spec: Attention, blocks: int, dtype: np.dtype[Any]) -> CudaKvState:
        """Allocate the state of some blocks, filled with zeros."""
        import cupy

        shape = blocks, spec.kv_heads, BLOCK, spec.head_dim
        return cls(cupy.zeros(shape, dtype), cupy.zeros(shape, dtype))


@dataclass(frozen=True)
class CudaRows:
    """A ragged batch on a GPU: each row is a token of any sequence.

    Attributes:
        layers: the states of the layers.
        rotations: the cosines and sines of each RoPE, float32 [positions, head_dim / 2] each.
        table: int32 [slots, width], the block of each `BLOCK` tokens of a sequence. Slot 0 is that of padding rows.
        lengths: int32 [M], the position of each row; -1 for padding rows, which are not appended to the cache.
        slots: int32 [M], the slot of each row.
        work: int32 [items, 4], what attention computes: tiles of rows or, in a decode step, ranges of keys.
        splits: the number of ranges of keys of a row, or 0 if ``work`` are tiles.
        has_drafts: whether several rows of a decode step may be of one sequence.
    """

    layers: tuple[CudaKvState, ...]
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


class StepGraph:
    """A step of a fixed number of rows. Its first use is eager, the second one captures it.

    Attributes:
        inputs: int32, what the host writes before each launch.
        result: what each launch writes: the logits [size, V] of a decode step, or the hidden states [1, size, hidden].
        run: a function of this step that launches the kernels and sets ``result``. It refers neither to the step nor to
            what owns it, as a cycle would keep the KV cache in memory until garbage is collected.
        uses: the number of launches so far.
        graph: the captured graph.
    """

    inputs: Array
    result: Array = None
    run: Callable[[Any], None]
    uses = 0
    graph: Any = None

    def capture(self, stream: Any, malloc: Any) -> None:
        """Capture the step on the current stream, after an eager one, which loads its kernels.

        Intermediate arrays of the graph have the memory that ``malloc`` returns.
        """
        import cupy

        self.result = None
        self.run(self)
        self.result = None
        with cupy.cuda.using_allocator(malloc):
            self.graph = capture(stream, lambda: self.run(self))

    def launch(self, stream: Any, malloc: Any) -> Array:
        """Launch the step in the order of the stream, and return its result, which the next launch overwrites."""
        self.uses += 1
        if self.graph is None:
            if self.uses == 1:
                self.run(self)
                return self.result
            self.capture(stream, malloc)
        self.graph.launch(stream)
        return self.result


class DecodeGraph(StepGraph):
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


class PromptGraph(StepGraph):
    """A step of ``size`` prompt tokens in at most ``tiles`` tiles, of which some may be empty.

    Attributes:
        inputs: the tiles, as in `CudaRows.work`, and then the token, the position and the slot of each row.
    """

    def __init__(self, size: int, tiles: int) -> None:
        import cupy

        self.size, self.tiles = size, tiles
        self.inputs = cupy.asarray(self.pack([]))

    def pack(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> npt.NDArray[np.int32]:
        """Return the inputs for the parts of `Steps.prompt`; padding rows follow them."""
        packed, tiles, m = np.zeros(4 * self.tiles + 3 * self.size, np.int32), list[tuple[int, ...]](), 0
        ids, lengths, slots = packed[4 * self.tiles :].reshape(3, -1)
        for slot, start, new in parts:
            starts = range(0, len(new), PREFILL_TILE)
            tiles += ((m + i, min(PREFILL_TILE, len(new) - i), start + i, slot) for i in starts)
            rows = slice(m, m := m + len(new))
            ids[rows], lengths[rows], slots[rows] = new, np.arange(start, start + len(new)), slot
        lengths[m:] = -1
        tiles = sorted([*tiles, *self.padding(m)], key=lambda tile: -tile[2])  # tiles with many keys start first
        packed[: 4 * len(tiles)] = np.array(tiles).reshape(-1)
        return packed

    def padding(self, m: int) -> list[tuple[int, ...]]:
        """Return the tiles of padding rows after m rows."""
        begins = range(m, self.size, PREFILL_TILE)
        return [(begin, min(PREFILL_TILE, self.size - begin), 0, 0) for begin in begins]


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


def enqueue_copy(target: Array, source: npt.NDArray[Any], stream: Any) -> None:
    """Copy contiguous host memory to the device in the order of the stream, perhaps after the function has returned."""
    target.set(source, stream)
