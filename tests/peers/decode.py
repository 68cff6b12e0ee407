# SPDX-License-Identifier: Apache-2.0
"""Time decode steps of models with random weights at many batch sizes, and write the table of RESULTS.md.

    python tests/peers/decode.py --json tests/peers/tables/decode.json
    python tests/peers/decode.py --models qwen3-8b --parts 1 16

The time of a layer is the difference between a step of the whole model and a step of its first layers, divided by the
difference of their numbers of layers. Weights are cold in L2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from cupy_awq.check import Array
from cupy_awq.llm.decoder.backend import ChoiceOptions
from cupy_awq.llm.decoder.block_pool import BLOCK, count_blocks
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.cuda_backend import CudaOps
from cupy_awq.llm.decoder.cuda_steps import CudaSteps
from cupy_awq.llm.decoder.model import Model
from cupy_awq.llm.decoder.states import count_bytes
from cupy_awq.llm.families.description import Decoder
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import placement
from cupy_awq.runtime.graph import capture
from cupy_awq.runtime.launch_plan import LaunchPlan
from cupy_awq.runtime.launcher import collect_kernels
from cupy_awq.tools.bench_llm import SHAPES, synthetic
from cupy_awq.tools.table import render

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""The batch sizes (numbers of sequences) to time."""
FEW_LAYERS = 2
"""The number of layers of the smaller of the two timed models. The output head evicts their weights from L2."""
CONTEXT = 1024
"""The number of cached tokens per sequence."""
STEPS, REPEATS = 12, 5
"""The number of steps per timing, and the number of timings, of which the median counts."""
READ_GBS = 3136
"""The read bandwidth of an H100 in GB/s, as in RESULTS.md."""
PARTS = ("qkv", "attention", "o", "gate_up", "down")
"""The names of the kernels of a layer."""


def part_of(plan: LaunchPlan, decoder: Decoder) -> str | None:
    """Return which of PARTS (the kernels of a decoder layer) a launch computes, or None for other kernels."""
    if plan.kernel.entry.startswith("decode_attention"):
        return "attention"
    sites = decoder.layers[0].sites
    sizes = {(sum(linear.n for linear in site.linears), site.linears[0].k): site.name for site in sites}
    is_gemm = plan.kernel.entry.startswith(("gemm_sm90", "gemm_mma_fragments"))
    return sizes.get(tuple(map(int, plan.scalars[1:3]))) if is_gemm else None


def compile_all(decoder: Decoder, index: int, batches: list[int]) -> None:
    """Compile the kernels of all decode steps with one thread per core."""
    model = make_model(replace(decoder, layers=decoder.layers[:FEW_LAYERS]), index)
    with collect_kernels() as kernels:
        for batch in batches:
            launch_step(make_steps(model, batch))()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compiler.build, kernels))


def make_model(decoder: Decoder, index: int) -> Model:
    """Return a model of this description on a GPU, with random weights."""
    import cupy

    return build_model(synthetic(decoder, xp=cupy), CudaOps(decoder, index, np.dtype(np.float16)))


@contextmanager
def without(ops: CudaOps, part: str | None) -> Iterator[None]:
    """Skip the launches of one of PARTS within the context, to measure the time that it takes; None skips nothing."""

    def run(plan: LaunchPlan, **buffers: Array | None) -> None:
        if part is None or part_of(plan, ops.config) != part:
            CudaOps.run(ops, plan, **buffers)

    with mock.patch.object(ops, "run", run):
        yield


def make_steps(model: Model, batch: int) -> CudaSteps:
    """Return the steps of a batch, whose cache is filled."""
    tokens = batch * count_blocks(CONTEXT + 1) * BLOCK
    steps = model.ops.make_steps(model.forward, model.head, batch, CONTEXT + 1, tokens)
    assert isinstance(steps, CudaSteps)
    for state in steps.layers:
        fill(state.k)
        fill(state.v)
    return steps


def launch_step(steps: CudaSteps) -> Callable[[], None]:
    """Return a function that launches a decode step at the position `CONTEXT`, with the choice of the tokens."""
    launch = steps.decode_kernels(CONTEXT)
    (graph,) = steps._graphs.values()

    def step() -> None:
        steps._choose(launch(), graph.slots, graph.lengths, ChoiceOptions())

    return step


def step_us(steps: CudaSteps) -> float:
    """Return the time in microseconds of a decode step, captured as a CUDA graph."""
    import cupy

    step, kept, times = launch_step(steps), [], []

    def keep(size: int) -> Any:
        kept.append(cupy.get_default_memory_pool().malloc(size))
        return kept[-1]

    cupy.cuda.get_current_stream().synchronize()
    with steps.stream as stream:
        step()
        with cupy.cuda.using_allocator(keep):
            graph = capture(stream, step)
        graph.launch(stream)
        for _ in range(REPEATS):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            for _ in range(STEPS):
                graph.launch(stream)
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) / STEPS * 1e3)
    return statistics.median(times)


def fill(array: Array) -> None:
    """Fill an array with float16 values from -1 to 1 that repeat every 2**20 elements."""
    import cupy

    some = cupy.asarray(np.random.default_rng(0).uniform(-1, 1, 1 << 20).astype(np.float16))
    flat = array.reshape(-1)
    for begin in range(0, flat.size, some.size):
        flat[begin : begin + some.size] = some[: flat.size - begin]


def measure(name: str, index: int, batches: list[int], parts: list[int]) -> list[dict[str, Any]]:
    """Return one row per batch size of a model, with times in microseconds.

    A row has the keys "model", "batch", "layer", "others" (the kernels outside of the layers), "step", "tokens/s" and
    "roofline" (the fraction of the roofline that is reached); for the batch sizes in ``parts`` also, by element of
    PARTS, the time that a layer takes less without it.
    """
    decoder = SHAPES[name]
    compile_all(decoder, index, batches)
    print(f"{name}: compiled", flush=True)
    few, whole = (make_model(replace(decoder, layers=decoder.layers[:n]), index) for n in (FEW_LAYERS, None))
    rows, layers = [], len(decoder.layers)
    for batch in batches:
        both = make_steps(few, batch), make_steps(whole, batch)

        def layer_and_step(part: str | None = None, both: tuple[CudaSteps, CudaSteps] = both) -> tuple[float, float]:
            assert isinstance(few.ops, CudaOps)
            assert isinstance(whole.ops, CudaOps)
            with without(few.ops, part), without(whole.ops, part):
                short, step = map(step_us, both)
            return (step - short) / (layers - FEW_LAYERS), step

        layer, step = layer_and_step()
        read = whole.weight_bytes + count_bytes(decoder.layers, batch * (CONTEXT + 1), 2)
        others = step - layers * layer
        row: dict[str, Any] = {"model": name, "batch": batch, "layer": layer, "others": others, "step": step}
        row |= {"tokens/s": batch / step * 1e6, "roofline": read / READ_GBS / 1e3 / step}
        if batch in parts:
            row |= {part: layer - layer_and_step(part)[0] for part in PARTS}
        rows.append(row)
        figures = [f"{key} {value:.3f}" if isinstance(value, float) else str(value) for key, value in row.items()]
        print(*figures, flush=True)
    return rows


def over_line(rows: list[dict[str, Any]], row: dict[str, Any]) -> float | None:
    """Return a step's time over that interpolated between the neighboring powers of two; None at a power of two."""
    batch = row["batch"]
    low = 1 << (batch.bit_length() - 1)
    steps = {other["batch"]: other["step"] for other in rows if other["model"] == row["model"]}
    if batch == low or low not in steps or 2 * low not in steps:
        return None
    line = steps[low] + (steps[2 * low] - steps[low]) * (batch - low) / low
    return float(row["step"] / line)


def cells(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the measured rows as cells of the table in RESULTS.md, in the order of HEAD."""
    found = []
    for row in rows:
        over = over_line(rows, row)
        figures = [round(row["layer"], 1), round(row["step"]), round(row["tokens/s"]), f"{row['roofline']:.1%}"]
        found.append([row["model"], row["batch"], *figures, "" if over is None else f"{over:.2f}"])
    return found


HEAD = ["model", "batch", "us per layer", "us per step", "tokens/s", "of the roofline", "over the line"]
TEXT = (
    f"A decode step of models with random weights, {CONTEXT:,} tokens of context, timed on the GPU. The roofline is the"
    f" bytes of weights, head, keys and values over {READ_GBS} GB/s. Over the line: the time of a step over the line"
    " between those of the neighbouring powers of two."
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time decode steps of models with random weights.")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["qwen3-8b", "llama-3.2-1b"])
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument(
        "--parts",
        nargs="+",
        type=int,
        default=[],
        help="batch sizes at which to leave out one kernel of a layer at a time",
    )
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args()
    index = placement.resolve()
    rows = [row for name in options.models for row in measure(name, index, options.batches, options.parts)]
    print(render(HEAD, [list(map(str, row)) for row in cells(rows)]))
    if options.json:
        table = {
            "title": "Decode steps by batch size",
            "gpu": placement.device_name(index),
            "commands": ["python tests/peers/decode.py --json tests/peers/tables/decode.json"],
            "text": TEXT,
            "columns": HEAD,
            "rows": cells(rows),
        }
        options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
