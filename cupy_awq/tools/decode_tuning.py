# SPDX-License-Identifier: Apache-2.0
"""The measurement of tuned configurations inside a decode step: ``python -m cupy_awq tune --model Qwen3-8B-AWQ/``.

In a decode step the kernels of a layer overlap: each copies its weight while the preceding ones still run. So the
configuration that is fastest in a step is often not the one that is fastest alone. The configurations with the lowest
modelled times are tried in alternation, in steps of the first layers of the model: for each GEMM of a layer in turn,
then for pairs of neighbours. The result is stored in the user's table, for GEMMs with a `Fusion`
(`cupy_awq.kernels.tuned`). Models that share a shape share its configuration: the model tuned last decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from cupy_awq.checkpoint.model_path import locate
from cupy_awq.kernels import select, tuned
from cupy_awq.kernels.gemm.fragments import MAX_FUSED_ROWS
from cupy_awq.kernels.gemm.problem import Problem
from cupy_awq.kernels.select import Candidate
from cupy_awq.kernels.tiling import next_tuned_m
from cupy_awq.llm.decoder.block_pool import BLOCK, count_blocks
from cupy_awq.llm.decoder.build import activation_dtype, build_model
from cupy_awq.llm.decoder.cuda_backend import CudaOps
from cupy_awq.llm.decoder.model import Model
from cupy_awq.llm.files import readers
from cupy_awq.llm.files.model_files import ModelFiles
from cupy_awq.runtime import device as devices
from cupy_awq.runtime import placement
from cupy_awq.runtime.graph import capture
from cupy_awq.tools import autotune, table
from cupy_awq.tools.bench_llm import SHAPES, synthetic

CONTEXT = 1024
"""The number of cached tokens per sequence, unless the context of the model is smaller."""
SEQUENCES = (1, 2, 4, 8, 16)
"""The default numbers of sequences. With more than 16, fusion gains little."""
LAYERS = 16
"""The number of layers of a step, or fewer if the model has fewer.

On an H100, configurations found in steps of 4 and 12 layers took up to 4% and 2% longer in steps of all layers.
"""
REPLAYS = 6
"""The number of steps per timing."""
FINALISTS = 10
"""The number of fastest configurations per GEMM that are tried in all pairs with those of the next GEMM."""
LEAST_GAIN = 0.01
"""The smallest gain, relative to the time of a step, for which configurations replace the present ones."""

Timer = Callable[[], float]


@dataclass(frozen=True)
class TunedStep:
    """The times of a decode step before and after tuning, and the configurations that were found.

    Attributes:
        sequences: the number of sequences.
        layers: the number of layers of the step.
        before_us, after_us: the time of the step before and after tuning, in microseconds.
        found: the configuration of each GEMM, by its shape in the tables of tuned configurations; empty if the present
            ones are as fast.
        entries: the texts of these configurations in the tables.
    """

    sequences: int
    layers: int
    before_us: float
    after_us: float
    found: dict[str, Candidate]
    entries: dict[str, str] = field(default_factory=dict)


def run(
    model: str, sequences: Sequence[int], *, tries: int, index: int, progress: Callable[[str], None]
) -> Iterator[TunedStep]:
    """Yield the fastest configurations of the GEMMs of a decode step for each number of sequences, in ascending order.

    Args:
        model: the path of a model, as for `readers.read`, or a key of `SHAPES` for random weights.
        sequences: the numbers of sequences, which are rounded up by `next_tuned_m`.
        tries: the largest number of configurations to try per GEMM.
        index: the device ordinal.
        progress: a callback that receives a line of text before each stage.

    Raises:
        ValueError: there are more than `MAX_FUSED_ROWS` sequences, ``CUPY_AWQ_ARCH`` is set, or no GEMM of the step is
            fused, because the GPU has no tensor cores or the weights are not 4-bit.
        CheckpointError, OSError: the model cannot be read, as for `readers.read`.
    """
    if max(sequences) > MAX_FUSED_ROWS:
        raise ValueError(f"--m: expected at most {MAX_FUSED_ROWS} sequences with --model, got {max(sequences)}")
    if model not in SHAPES:
        locate(model, SHAPES)
    autotune.require_native(index)
    with placement.use_device(index):
        progress("loading the first layers")
        small, ops = _load(model, index)
    for count in sorted(set(map(next_tuned_m, sequences))):
        with placement.use_device(index):
            step = _tune(small, ops, count, tries, progress)
        yield step


def _tune(model: Model, ops: CudaOps, sequences: int, tries: int, progress: Callable[[str], None]) -> TunedStep:
    def report(text: str) -> None:
        progress(f"{sequences} sequences: {text}")

    step, gpu = Step(model, ops, sequences), ops.device
    choices = step.fused_choices()
    if not choices:
        raise ValueError(
            f"tune: expected a decode step with fused GEMMs, got none on {gpu.name}; tune the shapes KxN of its layers"
        )
    present = {
        shape: Candidate(c.family, c.config, c.family.estimate_us(c.config, c.problem, gpu))
        for shape, c in choices.items()
    }
    trials = {shape: autotune.ranked(choice.problem, gpu, tries) for shape, choice in choices.items()}
    report("compiling")
    autotune.build_kernels(
        [c.family.plan(c.config, choices[shape].problem, gpu) for shape, some in trials.items() for c in some]
    )
    best = search(step.timer, present, trials, report)
    found, before_us, after_us = compare(step.timer, present, best)
    entries = {}
    for shape, (family, config, _) in found.items():
        source = family.plan(config, choices[shape].problem, gpu).kernel.source
        entries[shape] = tuned.entry(family.label(config), None, source, autotune.driver_version())
    return TunedStep(sequences, len(ops.config.layers), before_us, after_us, found, entries)


def search(
    make_timer: Callable[[Mapping[str, Candidate]], Timer],
    present: Mapping[str, Candidate],
    trials: Mapping[str, Sequence[Candidate]],
    report: Callable[[str], None],
) -> dict[str, Candidate]:
    """Return the fastest configurations by shape.

    First, all configurations of one shape are tried while those of the other shapes stay. Then, since neighbours
    compete for the SMs, all pairs of the `FINALISTS` of two neighbours are tried.

    Args:
        make_timer: a function that returns the timer of a step with a configuration for each shape.
        present: the configurations that the step uses so far, by shape.
        trials: the configurations to try, by shape, in the order of execution.
        report: a callback that receives the shapes whose configurations are about to be tried.
    """
    best, finalists = dict(present), {}

    def try_all(choices: Sequence[dict[str, Candidate]]) -> list[dict[str, Candidate]]:
        """Try several changes of ``best``, make the fastest one, and return them in the order of their times."""
        report(" and ".join(shape.split()[0] for shape in choices[0]))
        now = {shape: best[shape] for shape in choices[0]}
        tried = [now, *(choice for choice in choices if choice != now)]
        at, times = autotune.fastest([make_timer(best | choice) for choice in tried])
        best.update(tried[at])
        return [tried[i] for i in sorted(range(len(tried)), key=times.__getitem__)]

    for shape, some in trials.items():
        ranked = try_all([{shape: candidate} for candidate in some])
        finalists[shape] = [choice[shape] for choice in ranked[:FINALISTS]]
    shapes = list(trials)
    neighbours = [*itertools.pairwise(shapes), *([(shapes[-1], shapes[0])] if len(shapes) > 2 else [])]
    for a, b in neighbours:
        try_all([{a: x, b: y} for x, y in itertools.product(finalists[a], finalists[b])])
    return best


def compare(
    make_timer: Callable[[Mapping[str, Candidate]], Timer],
    present: Mapping[str, Candidate],
    best: Mapping[str, Candidate],
) -> tuple[dict[str, Candidate], float, float]:
    """Return ``best``, or an empty dict if it gains less than `LEAST_GAIN`; and the times of ``present`` and ``best``.

    ``make_timer`` is a function as for `search`; the times are in microseconds.
    """
    _, (before_us, after_us) = autotune.fastest([make_timer(present), make_timer(best)])
    return dict(best) if after_us < (1 - LEAST_GAIN) * before_us else {}, before_us, after_us


class Step:
    """A decode step of a model on the current GPU, which can be timed with different configurations of its GEMMs.

    Args:
        model: the model.
        ops: the back end of the model.
        sequences: the number of sequences.
    """

    def __init__(self, model: Model, ops: CudaOps, sequences: int) -> None:
        import cupy

        context = min(CONTEXT, ops.config.context - 1)
        tokens = sequences * count_blocks(context + 1) * BLOCK
        self._steps = ops.make_steps(model.forward, model.head, sequences, context + 1, tokens)
        for state in self._steps.layers:
            values = np.random.default_rng(0).standard_normal(state.k.shape[-1], np.float32)
            state.k[...] = state.v[...] = cupy.asarray(values.astype(state.k.dtype))
        self._launch = self._steps.decode_kernels(context)
        self._stream, self._pool = ops.decode_stream
        cupy.cuda.get_current_stream().synchronize()

    def fused_choices(self) -> dict[str, select.Choice]:
        """Return the present choices for the GEMMs with a `Fusion`, by shape, in the order of execution."""
        with select.recorded() as choices:
            self._run()
        found: dict[str, select.Choice] = {}
        for choice in choices:
            if isinstance(choice.problem, Problem) and choice.problem.fusion is not None:
                found.setdefault(choice.problem.tuning_key.shapes[0], choice)
        return found

    def timer(self, candidates: Mapping[str, Candidate]) -> Timer:
        """Return a function that returns the time of a step in microseconds, with a configuration for each shape.

        The function launches a CUDA graph. Graphs may share memory, even if the pool has given it to others since: they
        run one after the other, and nothing else runs meanwhile.
        """
        import cupy

        with select.forced_shapes(candidates):
            self._run()  # so that kernels are compiled and the memory pool is filled before the capture
            graph = capture(self._stream, self._run)

        def time_steps() -> float:
            begin = self._stream.record()
            for _ in range(REPLAYS):
                graph.launch(self._stream)
            end = self._stream.record()
            end.synchronize()
            return float(cupy.cuda.get_elapsed_time(begin, end)) / REPLAYS * 1e3

        return time_steps

    def _run(self) -> None:
        import cupy

        with self._stream, cupy.cuda.using_allocator(self._pool.malloc):
            self._launch()


def _load(name: str, index: int) -> tuple[Model, CudaOps]:
    """Return a model with only the first `LAYERS` layers, but with its embedding and output head, and its back end.

    ``name`` is a key of `SHAPES`, for random weights, or a model to read. ``index`` is the ordinal of the current GPU.
    """
    import cupy

    files = first_layers(synthetic(SHAPES[name], xp=cupy) if name in SHAPES else readers.read(name), LAYERS)
    ops = CudaOps(files.config, index, activation_dtype(files, devices.of(index)))
    return build_model(files, ops), ops


def first_layers(files: ModelFiles, count: int) -> ModelFiles:
    """Return a model that consists of the first ``count`` layers of a model, or of all if there are fewer."""
    first, others = files.config.layers[:count], files.config.layers[count:]
    left_out = tuple(f"{layer.name}." for layer in others)
    tensors = {name: read for name, read in files.tensors.items() if not name.startswith(left_out)}
    return replace(files, config=replace(files.config, layers=first), tensors=tensors)


def keep(step: TunedStep, index: int) -> Path:
    """Add the configurations of a step to the user's tuning table, which each process reads once; return its path."""
    entries = {shape: {str(step.sequences): text} for shape, text in step.entries.items()}
    return tuned.write(devices.of(index), entries)


def render(steps: Sequence[TunedStep]) -> str:
    """Return the configurations and the times of the steps as text tables."""
    labels = [
        [shape.split()[0], candidate.label, str(step.sequences)]
        for step in steps
        for shape, candidate in step.found.items()
    ]
    times = [
        [
            str(step.sequences),
            str(step.layers),
            table.number(step.before_us),
            table.number(step.after_us),
            f"{step.before_us / step.after_us:.2f}x" if step.found else "none",
        ]
        for step in steps
    ]
    summary = table.render(["sequences", "layers", "us per step before", "after", "gain"], times)
    if not labels:
        return summary
    return f"{table.render(['shape', 'fastest configuration', 'sequences'], labels, left=2)}\n\n{summary}"
