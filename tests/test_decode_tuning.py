# SPDX-License-Identifier: Apache-2.0
"""Tests of tuned configurations for decode steps: the search, the layers that it runs, and the table it writes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_awq import llm
from cupy_awq.kernels import select, tuned
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem
from cupy_awq.kernels.select import Candidate
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.cuda_backend import CudaOps
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.ops.repack import RepackedWeight
from cupy_awq.runtime import device, placement
from cupy_awq.runtime.launch_plan import LaunchPlan
from cupy_awq.tools import autotune, bench_llm, decode_tuning
from cupy_awq.tools.command_line import main
from tests import llm_models
from tests.conftest import forget_tuned
from tests.logits import logits_of

H100 = device.nominal(90)
SOME = select.candidates(Problem(1, 4096, 4096, 128, layouts=(AWQ, FRAGMENTS)), H100)["gemm_sm90"]
assert not isinstance(SOME, str)
FIRST, SECOND, THIRD = SOME[:3]


def timers(costs: dict[tuple[str, Candidate], float], bonus: set[tuple[str, Candidate]]) -> Callable[..., Callable]:
    """Return a fake ``make_timer``: a step takes the sum of its choices' costs, and 6 us less with all of ``bonus``."""

    def make_timer(chosen: Mapping[str, Candidate]) -> Callable[[], float]:
        us = sum(costs[choice] for choice in chosen.items())
        return lambda: us - 6 * (bonus <= set(chosen.items()))

    return make_timer


def test_each_shape_is_searched_and_then_pairs_of_neighbours() -> None:
    """Alone, the first configurations of shapes a and b are fastest, but their third ones are faster together.

    A search of each shape alone would miss that pair.
    """
    costs = {("a", FIRST): 1.0, ("a", SECOND): 2.0, ("a", THIRD): 3.0}
    costs |= {("b", FIRST): 1.0, ("b", SECOND): 2.0, ("b", THIRD): 4.0, ("c", FIRST): 5.0, ("c", SECOND): 2.0}
    make_timer = timers(costs, {("a", THIRD), ("b", THIRD)})
    present = dict.fromkeys("abc", FIRST)
    reports: list[str] = []
    trials = {"a": [FIRST, SECOND, THIRD], "b": [SECOND, THIRD], "c": [SECOND]}
    best = decode_tuning.search(make_timer, present, trials, reports.append)
    assert best == {"a": THIRD, "b": THIRD, "c": SECOND}
    assert reports == ["a", "b", "c", "a and b", "b and c", "c and a"]
    assert decode_tuning.compare(make_timer, present, best) == (best, 7.0, 3.0)


def test_a_search_without_a_faster_configuration_keeps_the_present_one() -> None:
    make_timer = timers({("a", FIRST): 1.0, ("a", SECOND): 2.0}, {("a", THIRD)})
    reports: list[str] = []
    assert decode_tuning.search(make_timer, {"a": FIRST}, {"a": [SECOND]}, reports.append) == {"a": FIRST}
    assert reports == ["a"]


@pytest.mark.parametrize(("after_us", "is_kept"), [(99.9, False), (99.1, False), (98.9, True), (100.0, False)])
def test_a_gain_below_the_variation_of_the_times_replaces_nothing(after_us: float, is_kept: bool) -> None:
    make_timer = timers({("a", FIRST): 100.0, ("a", SECOND): after_us}, {("a", THIRD)})
    best = {"a": SECOND}
    found = decode_tuning.compare(make_timer, {"a": FIRST}, best)
    assert found == (best if is_kept else {}, 100.0, after_us)


def test_the_tables_name_the_configurations_and_the_times() -> None:
    steps = [
        decode_tuning.TunedStep(1, 16, 410.0, 380.0, {"4096x6144 stream": FIRST}),
        decode_tuning.TunedStep(2, 16, 430.0, 430.0, {}),
    ]
    head, row, _, *times = decode_tuning.render(steps).splitlines()
    assert head.split() == ["shape", "fastest", "configuration", "sequences"]
    assert row.startswith("4096x6144")
    assert FIRST.family.label(FIRST.config) in row
    assert [line.split()[-1] for line in times] == ["gain", "1.08x", "none"]
    assert [line.split()[-1] for line in decode_tuning.render(steps[1:]).splitlines()] == ["gain", "none"]


def test_the_first_layers_of_a_model_are_a_model(tmp_path: Path) -> None:
    files = llm.read(llm_models.folder(tmp_path, {**llm_models.QWEN3, "num_hidden_layers": 3}))
    some = decode_tuning.first_layers(files, 2)
    model = build_model(some, NumpyOps(some.config))
    assert some.config.layers == files.config.layers[:2]
    assert np.isfinite(logits_of(model, [1, 2])).all()
    assert len(decode_tuning.first_layers(files, 9).config.layers) == 3


class FakeStream:
    """A fake CUDA stream: launches take no time, and a captured graph takes the sum of its launches' ``cost`` in us."""

    def __init__(self, cost: Callable[[LaunchPlan], float]) -> None:
        self.cost, self.us, self.graph = cost, 0.0, None
        self.ptr = 0

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def synchronize(self) -> None: ...

    def begin_capture(self) -> None:
        self.graph = SimpleNamespace(us=0.0)

    def end_capture(self) -> Any:
        graph, self.graph = self.graph, None
        graph.launch = lambda stream: setattr(self, "us", self.us + graph.us)
        return graph

    def record(self) -> Any:
        return SimpleNamespace(us=self.us, synchronize=lambda: None)

    def run(self, plan: LaunchPlan) -> None:
        if self.graph is not None:
            self.graph.us += self.cost(plan)


@pytest.mark.parametrize("is_random", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_command_stores_the_fastest_configurations(
    tuned_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_random: bool
) -> None:
    """`tune --model` stores the fastest configurations in the user's table.

    Here the faked times make the split-K factor 2 the fastest.
    """

    def cost(plan: LaunchPlan) -> float:
        defines = dict(plan.kernel.defines)
        return 1.0 + abs(int(defines["SPLIT_K"]) - 2) if defines.get("ADD_TO_STREAM") is not None else 1.0

    stream = FakeStream(cost)
    cuda = SimpleNamespace(
        Stream=lambda non_blocking: stream,
        MemoryPool=lambda: SimpleNamespace(malloc=None),
        using_allocator=contextlib.nullcontext,
        Event=lambda disable_timing: None,
        get_current_stream=lambda: stream,
        get_elapsed_time=lambda begin, end: (end.us - begin.us) / 1e3,
        runtime=SimpleNamespace(memGetInfo=lambda: (10**9, 10**9)),
    )
    names = "abs", "asarray", "concatenate", "ascontiguousarray", "empty", "ndarray", "ones", "tile", "zeros"
    functions = {name: getattr(np, name) for name in names}
    pool = SimpleNamespace(free_bytes=lambda: 0)
    monkeypatch.setitem(
        sys.modules, "cupy", SimpleNamespace(**functions, cuda=cuda, get_default_memory_pool=lambda: pool)
    )
    for name, value in {
        "cupy_awq.runtime.device.of": lambda index: H100,
        "cupy_awq.runtime.placement.resolve": lambda: 0,
        "cupy_awq.runtime.placement.use_device": contextlib.nullcontext,
        "cupy_awq.runtime.workspace.allocate_zeros": lambda nbytes: np.zeros(nbytes, np.uint8),
        "cupy_awq.llm.decoder.cuda_steps.pinned": lambda shape, index: (np.zeros(shape, np.int32), None),
        "cupy_awq.llm.decoder.cuda_steps.enqueue_copy": lambda target, source, stream: None,
        "cupy_awq.runtime.workspace.workspace_address": lambda index, stream: 0,
        "cupy_awq.linear.repack": lambda weight: RepackedWeight(weight, np.empty(1, np.uint8), 0, False),
        # GEMMs that are not fused run in NumPy, which needs the AWQ tensors kept
        "cupy_awq.ops.repack.RepackedWeight.without_original": lambda weight: weight,
        "cupy_awq.tools.autotune.build_kernels": lambda plans: None,
        "cupy_awq.tools.autotune.driver_version": lambda: "13.0",
    }.items():
        monkeypatch.setattr(name, value)
    monkeypatch.setattr(CudaOps, "run", lambda ops, plan, **arrays: stream.run(plan))
    monkeypatch.setattr(decode_tuning, "FINALISTS", 3)
    config = {**llm_models.QWEN3, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    name = str(llm_models.folder(tuned_folder.parent / "model", {**config, "num_hidden_layers": 2}, group=64))
    if is_random:
        tiny = llm_models.decoder(**{**config, "vocab_size": 96, "max_position_embeddings": 2048})
        monkeypatch.setitem(bench_llm.SHAPES, name := "tiny", tiny)
    assert main(["tune", "--model", name, "--m", "1,5", "--tries", "16"]) == 0
    text = capsys.readouterr()
    assert f"stored in {tuned_folder / tuned.file_name(H100)}" in text.out
    assert "6 sequences: 256x256 and 256x1024" in text.err
    found = tuned.read(tuned_folder / tuned.file_name(H100))
    assert found.keys() == {"256x256 stream", "256x1024 stream", "512x256 stream", "256x384 stream"}
    for entries in found.values():
        assert list(entries) == ["1", "6"]
        assert all("split_k=2" in label for label in entries.values())
    forget_tuned()
    assert main(["tune", "--model", name, "--m", "1,5", "--tries", "16"]) == 0
    assert capsys.readouterr().out.endswith("stored nothing: the present configurations are as fast\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--m", "1,33"], "--m: expected at most 32 sequences with --model, got 33"),
        (["--op", "conv2d", "--image", "14"], "tune: --model takes no --op, --image"),
        (["--group-size", "64"], "tune: --model takes no --group-size"),
        (["--model", "qwen9"], "qwen9: expected a file, a folder or one of smollm2, qwen3-8b, qwen3-0.6b, "),
    ],
)
def test_arguments_that_do_not_fit_a_model_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(placement, "resolve", lambda: 0)
    assert main(["tune", "--model", "qwen3-8b", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("is_random", [True, False])
def test_a_decode_step_is_tuned_and_uses_the_configurations_found(
    tuned_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_random: bool
) -> None:
    """On a GPU, tuning finds faster configurations than the slowest ones, with which the user's table starts.

    Later decode steps use what was found.
    """
    if is_random:
        name, whole = "tiny", bench_llm.SHAPES["qwen3-0.6b"]
        monkeypatch.setitem(bench_llm.SHAPES, name, replace(whole, layers=whole.layers[:6]))
    else:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
        config = {**llm_models.QWEN3, **sizes, "num_hidden_layers": 3}
        name = str(llm_models.folder(tuned_folder.parent / "model", config, group=128))
    index = placement.resolve()
    facts = device.of(index)
    arguments = ["tune", "--model", name, "--m", "1,5", "--tries", "6"]
    if not facts.is_native:
        assert main(arguments) == 2
        assert f"got CUPY_AWQ_ARCH={facts.arch}" in capsys.readouterr().err
        return

    def choices(sequences: int) -> dict[str, select.Choice]:
        forget_tuned()
        return decode_tuning.Step(*decode_tuning._load(name, index), sequences).fused_choices()

    slowest: tuned.Table = {}
    for sequences in (1, 6):
        for shape, choice in choices(sequences).items():
            worst = autotune.ranked(choice.problem, facts, 10_000)[-1]
            source = worst.family.plan(worst.config, choice.problem, facts).kernel.source
            slowest.setdefault(shape, {})[str(sequences)] = tuned.entry(worst.label, None, source, "13.0")
    assert len(slowest) == 4
    tuned.write(facts, slowest)
    forget_tuned()
    assert main(arguments) == 0
    assert "stored in" in capsys.readouterr().out
    found = tuned.read(tuned_folder / tuned.file_name(facts))
    assert found.keys() == slowest.keys()
    assert found != slowest
    for sequences in (1, 6):
        used = {shape: choice.family.label(choice.config) for shape, choice in choices(sequences).items()}
        assert used == {shape: entries[str(sequences)].split(", sources ")[0] for shape, entries in found.items()}
