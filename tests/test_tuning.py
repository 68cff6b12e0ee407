# SPDX-License-Identifier: Apache-2.0
"""Tests of tuned configurations: shipped ones are legal, the user's come first, malformed files are refused."""

from __future__ import annotations

import functools
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from cupy_awq.check import HOST
from cupy_awq.kernels import select, tuned
from cupy_awq.kernels.dequantize.dequantize import Dequantization
from cupy_awq.kernels.family import KernelProblem
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Fusion, Problem
from cupy_awq.kernels.int8.quantize_rows import RowQuantization
from cupy_awq.kernels.tiling import next_power_of_two
from cupy_awq.runtime import device, placement, sources
from cupy_awq.tools import autotune as tune
from cupy_awq.tools.operations import Settings, typical_problem
from tests.conftest import forget_tuned

A100 = device.nominal(80)
PROBLEM = Problem(3, 4096, 4096, 128)


def _label(problem: Problem, facts: device.Device) -> str:
    """Return the label of the configuration that the tuned tables have for a problem."""
    found = tuned.lookup(problem, facts)
    assert found is not None
    return found.label


def _entry(candidate: select.Candidate, problem: Problem, facts: device.Device) -> str:
    """Return the text of a table entry for a candidate that takes 12.3 us."""
    source = candidate.family.plan(candidate.config, problem, facts).kernel.source
    return tuned.entry(candidate.label, 12.3, source, "13.0")


def _slowest(problem: Problem, facts: device.Device) -> select.Candidate:
    """Return the legal configuration of a problem with the highest modelled time."""
    families = select.candidates(problem, facts).values()
    return max((c for some in families if not isinstance(some, str) for c in some), key=lambda c: c.us)


def test_a_tuned_configuration_applies_to_its_shape_m_and_gpu_only(tuned_folder: Path) -> None:
    before = select.choose(PROBLEM, A100)
    some = select.candidates(PROBLEM, A100)["gemm_simt"]
    assert not isinstance(some, str)
    assert some[-1].config != before.config
    path = tuned.write(A100, {"4096x4096": {"4": _entry(some[-1], PROBLEM, A100)}})
    assert path.parent == tuned_folder
    forget_tuned()
    assert select.choose(PROBLEM, A100).config == some[-1].config
    assert select.choose(PROBLEM, A100).name == "gemm_simt"
    text = select.explain(PROBLEM, A100)
    assert text.count("-> gemm_simt") == 1
    assert text.endswith(f"chosen: the tuned configuration, measured at M=4 (your table {path})")
    for other in (replace(PROBLEM, m=5), replace(PROBLEM, n=8192)):
        assert select.choose(other, A100).name != "gemm_simt"
    assert select.choose(PROBLEM, device.nominal(86)).name != "gemm_simt"
    # an H100 that is forced onto the kernels for sm_80
    assert select.choose(PROBLEM, replace(device.nominal(90), arch=80)).name != "gemm_simt"


def test_a_fused_gemm_has_its_own_entries_and_falls_back_to_the_plain_ones(tuned_folder: Path) -> None:
    facts = device.nominal(90)
    plain = Problem(1, 4096, 4160, 128, layouts=(AWQ, FRAGMENTS))
    fused = replace(plain, fusion=Fusion("add_to_stream"))
    tuned.write(facts, {"4160x4096": {"1": "alone", "2": "both"}, "4160x4096 stream": {"1": "in a step"}})
    forget_tuned()
    assert [_label(problem, facts) for problem in (plain, fused)] == ["alone", "in a step"]
    assert [_label(replace(problem, m=2), facts) for problem in (plain, fused)] == ["both", "both"]


def test_a_tuned_configuration_applies_to_smaller_m_unless_the_model_knows_a_much_faster_one(
    tuned_folder: Path,
) -> None:
    """A tuned configuration also serves smaller M, unless the cost model knows a much faster one.

    On an H100, the tiles of 4096x12288 at M = 1024 would be mostly empty at M = 600.
    """
    here = device.nominal(90)
    problem = Problem(1024, 12288, 4096, 128, layouts=(AWQ, FRAGMENTS))
    firsts = {m: select.choose(replace(problem, m=m), here) for m in (128, 1024)}
    entries = {str(m): _entry(select.Candidate(c.family, c.config, 0.0), problem, here) for m, c in firsts.items()}
    tuned.write(here, {"4096x12288": entries})
    forget_tuned()
    for m, is_tuned in ((1024, True), (1000, True), (600, False), (100, True)):
        choice = select.choose(replace(problem, m=m), here)
        assert (choice.tuned is not None) == is_tuned
        if is_tuned:
            assert choice.config.block_m <= firsts[next_power_of_two(m)].config.block_m


def test_an_entry_between_powers_of_two_serves_the_rows_up_to_it(tuned_folder: Path) -> None:
    here = device.nominal(90)

    def slowest(m: int) -> str:
        problem = replace(PROBLEM, m=m, n=4160, layouts=(AWQ, FRAGMENTS))
        return _entry(_slowest(problem, here), problem, here)

    def tuned_at(m: int) -> int:
        choice = select.choose(replace(PROBLEM, m=m, n=4160, layouts=(AWQ, FRAGMENTS)), here)
        assert choice.tuned is not None
        assert choice.tuned.label in choice.family.labels(choice.config)
        return choice.tuned.m

    tuned.write(here, {"4096x4160": {"32": slowest(32), "64": slowest(64)}})
    forget_tuned()
    assert [tuned_at(m) for m in (17, 24, 25, 33, 48, 49)] == [32, 32, 32, 64, 64, 64]
    tuned.write(here, {"4096x4160": {"24": slowest(24), "48": slowest(48)}})
    forget_tuned()
    assert [tuned_at(m) for m in (17, 24, 25, 33, 40, 48, 49)] == [24, 24, 32, 48, 48, 48, 64]


def test_explain_says_why_no_tuned_configuration_determines_the_choice(tuned_folder: Path) -> None:
    here = device.nominal(75)
    problem = Problem(600, 12288, 4096, 128, layouts=(AWQ, FRAGMENTS))

    def reason(problem: KernelProblem, here: device.Device) -> str:
        return select.explain(problem, here).splitlines()[-1].removeprefix("chosen: the lowest modelled time; ")

    assert reason(problem, here) == "there is no table of tuned configurations for Tesla T4"
    first = select.choose(problem, here)
    entry = _entry(select.Candidate(first.family, first.config, 0.0), problem, here)
    path = tuned.write(here, {"4096x12288": {"1": "a", "1024": entry.replace("block_m=", "block_m=1")}})
    forget_tuned()
    table = f"(your table {path})"
    assert reason(replace(problem, k=5120, n=17408), here) == f"no tuned configuration for 5120x17408 {table}"
    missing = f"no tuned configuration for 4096x12288 at M=131072, only at M=1, 1024 {table}"
    assert reason(replace(problem, m=100_000), here) == missing
    assert reason(problem, here).endswith(f", tuned at M=1024 {table}, is not among the legal configurations")
    assert "CUPY_AWQ_ARCH selects sm_75" in reason(problem, replace(here, native=90))
    assert (
        reason(RowQuantization(8, 256, 128, "float16", True, False, True, 256), here)
        == "kernels of this operation are not tuned"
    )
    tuned.write(here, {"4096x12288": {"1024": _entry(_slowest(problem, here), problem, here)}})
    forget_tuned()
    assert reason(problem, here).endswith(", is modelled to be slower than this one at M=600")


@pytest.mark.parametrize("op", ["gemm_int8", "conv2d"])
def test_a_tuned_configuration_is_chosen_whatever_the_operation(tuned_folder: Path, op: str) -> None:
    here = device.nominal(80)
    problem = typical_problem(op, (256, 512), 3, Settings(HOST, image=14), here)
    candidates = [c for some in select.candidates(problem, here).values() if not isinstance(some, str) for c in some]
    labels = [candidate.family.label(candidate.config) for candidate in candidates]
    assert len(set(labels)) == len(labels)
    before, last = select.choose(problem, here), _slowest(problem, here)
    assert last.config != before.config
    key = problem.tuning_key
    assert key is not None
    tuned.write(here, {key.shapes[0]: {str(key.tuned_m): _entry(last, problem, here)}})
    forget_tuned()
    choice = select.choose(problem, here)
    assert (choice.family, choice.config) == (last.family, last.config)
    assert f"-> {choice.name} " in select.explain(problem, here)
    assert "12.3  measured" in select.explain(problem, here)


def test_an_entry_that_was_measured_with_other_sources_is_refused(tuned_folder: Path) -> None:
    before = select.choose(PROBLEM, A100)
    some = select.candidates(PROBLEM, A100)["gemm_simt"]
    assert not isinstance(some, str)
    text = _entry(some[-1], PROBLEM, A100)
    tuned.write(A100, {"4096x4096": {"4": text}})
    forget_tuned()
    assert select.choose(PROBLEM, A100).name == "gemm_simt"
    for refused in (text.replace(sources.digest("gemm/gemm_simt.cu"), "0123456789ab"), some[-1].label):
        tuned.write(A100, {"4096x4096": {"4": refused}})
        forget_tuned()
        assert select.choose(PROBLEM, A100).config == before.config
        assert select.explain(PROBLEM, A100).endswith(", was measured with other sources of the kernel")


def test_a_forced_candidate_is_chosen_for_its_own_problems_alone() -> None:
    some = select.candidates(PROBLEM, A100)["gemm_simt"]
    assert not isinstance(some, str)
    other = Dequantization(64, 64, 64, "float16", "packed", "float16", True, (8, 64, 8, 64))
    with select.recorded() as choices, select.forced(some[-1]):
        assert select.choose(PROBLEM, A100).config == some[-1].config
        assert select.choose(other, A100).name == "dequantize"
    assert select.choose(PROBLEM, A100).config != some[-1].config
    assert choices == []  # only the innermost of nested contexts records choices
    with select.recorded() as choices:
        assert select.choose(PROBLEM, A100) == choices[0]


def test_candidates_are_forced_by_shape() -> None:
    here = device.nominal(90)
    plain = Problem(1, 4096, 4096, 128, layouts=(AWQ, FRAGMENTS))
    fused = replace(plain, fusion=Fusion("add_to_stream"))
    some = select.candidates(fused, here)["gemm_sm90"]
    assert not isinstance(some, str)
    before = select.choose(plain, here), select.choose(fused, here)
    other = select.choose(replace(fused, k=8192), here)
    with select.forced_shapes({"4096x4096 stream": some[-1]}):
        assert select.choose(fused, here).config == some[-1].config != before[1].config
        assert select.choose(plain, here) == before[0]
        assert select.choose(replace(fused, k=8192), here) == other
    assert select.choose(fused, here) == before[1]


def test_an_illegal_or_unknown_entry_is_ignored(tuned_folder: Path) -> None:
    before = select.choose(PROBLEM, A100)
    tuned.write(A100, {"4096x4096": {"4": "GemmOfYore(tile=3)"}})
    forget_tuned()
    assert select.choose(PROBLEM, A100) == before


def test_new_entries_replace_only_those_of_the_same_shape_and_m(tuned_folder: Path) -> None:
    tuned.write(A100, {"8x8": {"1": "a", "2": "b"}, "16x8": {"1": "c"}})
    path = tuned.write(A100, {"8x8": {"2": "d"}})
    assert tuned.read(path) == {"8x8": {"1": "a", "2": "d"}, "16x8": {"1": "c"}}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"8x8": 3}', '{"8x8": {"1": 2}}', "\0", '{"8x8": ["a"]}', '{"8x8": {"few": "a"}}']
)
def test_a_malformed_table_is_named_and_refused(tuned_folder: Path, text: str) -> None:
    path = tuned_folder / tuned.file_name(A100)
    path.parent.mkdir()
    path.write_text(text)
    for use in (lambda: select.choose(PROBLEM, A100), lambda: tuned.write(A100, {"8x8": {"1": "a"}})):
        with pytest.raises(ValueError, match=r"expected a table of tuned configurations, .* remove the file") as caught:
            use()
        assert str(path) in str(caught.value)
    assert path.read_text() == text


def _write_rows(begin: int) -> None:
    for m in range(begin, begin + 20):
        tuned.write(A100, {"8x8": {str(m): "a"}})


def test_tables_of_processes_that_tune_at_the_same_time_are_merged(tuned_folder: Path) -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_write_rows, (1, 101, 201)))
    found = tuned.read(tuned_folder / tuned.file_name(A100))
    assert len(found["8x8"]) == 60


def test_a_table_that_cannot_be_read_is_not_replaced(tuned_folder: Path) -> None:
    path = tuned_folder / tuned.file_name(A100)
    path.mkdir(parents=True)
    with pytest.raises(OSError, match=path.name):
        tuned.write(A100, {"8x8": {"1": "a"}})


SHIPPED = [path.name for path in tuned.SHIPPED.glob("*.json")]


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_every_shipped_entry_is_chosen_on_its_gpu(tuned_folder: Path, name: str, step: int) -> None:
    """Each ``step``-th entry of a shipped table is legal and measured with the present sources of its kernel."""
    (facts,) = (gpu for gpu in device.KNOWN.values() if tuned.file_name(gpu) == name)
    shipped = tuned.read(tuned.SHIPPED / name)
    entries = [(shape, m, text) for shape, choices in shipped.items() for m, text in choices.items()]
    assert len(entries) > 5
    for shape, m, text in entries[::step]:
        size, *stream = shape.split()
        k, n = map(int, size.split("x"))
        for fusion in (Fusion("add_to_stream"), Fusion("rms_norm_x")) if stream else (None,):
            problem = Problem(int(m), n, k, 128, layouts=(AWQ, FRAGMENTS), fusion=fusion)
            choice = select.choose(problem, facts)
            us = None if choice.tuned is None else choice.tuned.us
            label, source = choice.family.label(choice.config), choice.plan.kernel.source
            assert text.startswith(tuned.entry(label, us, source, "")), (shape, m, fusion)


def test_shipped_files_are_plain_json() -> None:
    for path in tuned.SHIPPED.glob("*.json"):
        assert path.read_text() == json.dumps(tuned.read(path), indent=1) + "\n"


@pytest.mark.gpu
def test_tuning_keeps_the_fastest_and_layers_use_it(tuned_folder: Path) -> None:
    index = placement.resolve()
    settings = Settings(device=index, cached=False)
    if device.of(index).arch != device.of(index).native:  # `tune` refuses to measure on a forced architecture path
        with pytest.raises(ValueError, match=r"tune: expected kernels for sm_.*CUPY_AWQ_ARCH"):
            next(tune.run("gemm", [(512, 256)], [1], settings, tries=3, progress=lambda text: None))
        return
    rows = list(tune.run("gemm", [(512, 256)], [1, 3], settings, tries=3, progress=lambda text: None))
    assert [(row.key.tuned_m, row.tried) for row in rows] == [(1, 3), (3, 3)]
    assert all(0 < row.us <= row.modelled_us for row in rows)
    for row in rows:
        tune.keep(row, index)
    forget_tuned()
    facts = device.of(index)
    path = json.loads((tuned_folder / tuned.file_name(facts)).read_text())
    labels = [row.best.family.label(row.best.config) for row in rows]
    driver = tune.driver_version()
    entries = [tuned.entry(label, row.us, row.source, driver) for label, row in zip(labels, rows, strict=True)]
    assert path == {"512x256": dict(zip(("1", "3"), entries, strict=True))}
    for row in rows:
        problem = Problem(row.key.tuned_m, 256, 512, 128, layouts=(AWQ, FRAGMENTS)[: 1 + (device.of(index).arch == 90)])
        assert _label(problem, facts) == row.best.family.label(row.best.config)
        assert select.choose(problem, facts).config == row.best.config
    assert tune.render(rows).count("512x256") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["gemm_int8", "conv2d"])
def test_tuning_forces_each_configuration_whatever_the_operation(tuned_folder: Path, op: str) -> None:
    index = placement.resolve()
    settings = Settings(device=index, image=14, cached=False)
    if device.of(index).arch != device.of(index).native:
        return  # `tune` refuses to measure on a forced architecture path
    (row,) = tune.run(op, [(256, 256)], [2], settings, tries=4, progress=lambda text: None)
    # Conv2d_simt has a single configuration for such a layer.
    assert row.tried > 1 or row.best.family.NAME == "conv2d_simt"
    assert row.tried <= 4
    assert 0 < row.us <= row.modelled_us
    tune.keep(row, index)
    assert row.best.family.label(row.best.config) in (tuned_folder / tuned.file_name(device.of(index))).read_text()


def test_the_fastest_is_found_while_the_chip_slows_down_and_the_slower_half_leaves() -> None:
    true = [5.0, 3.0, 8.0, 2.9, 4.0, 7.0]
    seen: list[int] = []

    def measure(index: int) -> float:
        seen.append(index)
        return true[index] * (1 + 0.05 * len(seen))  # the chip slows down, so earlier measurements seem faster

    best, times = tune.fastest([functools.partial(measure, index) for index in range(len(true))])
    assert best == 3
    assert len(times) == len(true)
    assert times[best] < times[1]
    assert seen[:12] == [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]
    assert [seen.count(index) for index in range(6)] == [8, 10, 2, 10, 4, 2]
    assert times[best] < times[0]  # number 0, the present choice, takes part in all final rounds


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_configurations_go_straight_to_the_final_rounds(count: int) -> None:
    values = iter([3.0, 9.0, 1.0, 5.0, 4.0, 2.0] * 2)
    best, times = tune.fastest([lambda: next(values)] * count)
    assert 0 <= best < count
    assert len(times) == count
    assert len(list(values)) == 12 - 2 * count * tune.FINAL_ROUNDS
