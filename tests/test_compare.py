# SPDX-License-Identifier: Apache-2.0
"""Tests of the parts of tests/peers/compare.py, the comparison with other libraries, that need no GPU."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import simt
from tests.peers import compare, first_choice, interleave, plain_read, predicted, random_problems, render
from tests.peers.comparison import Comparison


def test_random_shapes_keep_their_limits() -> None:
    shapes = random_problems.shapes(3, 200)
    assert shapes == random_problems.shapes(3, 200) != random_problems.shapes(4, 200)
    assert all(k % 128 == 0 and n % 64 == 0 and k * n <= 4e8 for k, n in shapes)
    low, high = random_problems.SIZES
    assert all(low <= size <= high for shape in shapes for size in shape)
    assert sum(k > n for k, n in shapes) in range(70, 130)


@pytest.mark.parametrize("seed", range(5))
def test_each_part_of_the_range_has_a_number_of_rows(seed: int) -> None:
    rows = random_problems.rows(seed)
    assert rows == sorted(rows)
    assert rows == random_problems.rows(seed)
    assert len(set(rows)) == 9
    assert [min(8, int(9 * math.log(m) / math.log(4096) + 1e-9)) for m in rows[3:]] == list(range(3, 9))
    assert all(1 <= m <= 4096 for m in rows)


def test_a_plain_read_reads_all_and_writes_all() -> None:
    """A plain read, which bounds the time of a GEMM in the comparison, must read each word of its inputs.

    Every thread writes the XOR of what it has read, and all results together must be the XOR of all words of the input.
    So each word was read an odd number of times.
    """
    rng = np.random.default_rng(0)
    weight, x = (rng.integers(0, 1 << 32, 4 * vectors, dtype=np.uint32) for vectors in (1021, 77))
    threads = 2 * 1024
    y = np.zeros(4 * threads, np.uint32)
    plan = plain_read.plan(weight.nbytes, x.nbytes, y.nbytes, 2, (1, 1024))
    simt.run(plan, {"weight": weight, "x": x, "y": y}, landing="latest")
    total = np.bitwise_xor.reduce(np.concatenate([weight, x]).reshape(-1, 4))
    assert np.array_equal(np.bitwise_xor.reduce(y.reshape(-1, 4)), total)
    longer = np.full(4 * (threads + 100), 1, np.uint32)
    plan = plain_read.plan(weight.nbytes, x.nbytes, longer.nbytes, 2, (1, 1024))
    simt.run(plan, {"weight": weight, "x": x, "y": longer}, landing="latest")
    assert np.array_equal(longer[: 4 * threads], y)
    assert np.array_equal(longer[4 * threads :], y[:400])


def test_medians_are_per_graph_and_per_call() -> None:
    """Medians are taken per graph, and no event is waited for between warm-up and the last replay: all are queued."""
    now, order = [0.0], []
    durations = {0: itertools.cycle([2.0, 2.0, 50.0]), 1: itertools.cycle([30.0])}

    class Event:
        def __init__(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None:
            order.append("wait")

    def replay(i: int) -> None:
        order.append(i)
        now[0] += next(durations[i])

    graphs = [interleave.Graph(lambda i=i: replay(i), length) for i, length in ((0, 4), (1, 10))]
    times = interleave.medians_us(graphs, Event, lambda begin, end: end.at - begin.at)
    assert times == [2.0 / 4 * 1e3, 30.0 / 10 * 1e3]
    assert order == [0, 1, 0, 1, "wait", *[0, 1] * (len(order) // 2 - 3), "wait"]
    assert order.count(0) == 2 + math.ceil(interleave.WARM_MS / 32.0) + interleave.REPLAYS


def test_a_sample_of_cells_has_every_number_of_rows() -> None:
    cells = [(k, 64, m) for k in range(128, 1408, 128) for m in (1, 7, 100)]
    some = first_choice.sample(cells, 7, 5)
    assert some == first_choice.sample(cells, 7, 5) != first_choice.sample(cells, 7, 6)
    assert len(set(some)) == 7
    assert set(some) <= set(cells)
    assert [m for _, _, m in some] == [1, 7, 100, 1, 7, 100, 1]
    assert len(first_choice.sample(cells, 1000, 5)) == len(cells)


def run_of(ours: dict[tuple[int, int, int], float], **changes: Any) -> dict[str, Any]:
    """Return a stored run with times ``ours``; Marlin takes 12 us, cuBLAS 10, a plain read 6, the roofline is 4."""
    rows = []
    for (k, n, m), us in ours.items():
        for peer, time in {"ours": us, "marlin": 12.0, "fp16_tn": 10.0, "machete": 1.0}.items():
            rows.append({"k": k, "n": n, "m": m, "peer": peer, "us": time, "ok": peer != "machete"})
        bounds = {"read": 6.0, "arithmetic": 3.0, "roof": 4.0}
        rows += [{"k": k, "n": n, "m": m, "peer": peer, "us": us} for peer, us in bounds.items()]
    run = {"gpu": "GPU", "command": "python compare.py", "seed": 5, "read_gbs": 3000.0, "fp16_tflops": 600.0}
    return {**run, "rows": rows, **changes}


def test_summary_by_range_of_rows() -> None:
    """The summary ignores a peer with wrong results (Machete); cuBLAS bounds cells with much arithmetic."""
    run = run_of({(4096, 4096, 1): 5.0, (128, 64, 16): 20.0, (4096, 4096, 200): 10.4})
    next(row for row in run["rows"] if row["m"] == 200 and row["peer"] == "arithmetic")["us"] = 8.0
    comparison = Comparison(run)
    assert comparison.summary() == [
        ["1-16", f"{(5 / 4 * 20 / 4) ** 0.5:.2f}", "1.50", "1.00", "1 of 2", "0.50"],
        ["129-1024", "2.60", "2.00", "0.96", "0 of 1", "0.96"],
    ]
    assert [row[:2] for row in comparison.worst()] == [["128x64", "16"], ["4096x4096", "200"], ["4096x4096", "1"]]
    assert comparison.worst()[0][2:] == ["20.0", "10.0", "6.0", "4.0", "5.00", "0.50"]


def test_times_over_those_of_another_run() -> None:
    comparison = Comparison(run_of({(128, 64, 1): 6.0, (256, 64, 1): 8.0, (512, 64, 17): 3.0}))
    other = Comparison(run_of({(128, 64, 1): 4.0, (256, 64, 1): 8.0}))
    assert comparison.against(other) == [["1-16", "2", f"{1.5**0.5:.2f}", "1.00", "1.50"]]


def test_first_choices_are_summarized() -> None:
    choices = [{"k": 128, "n": 64, "m": m, "first_us": us, "best_us": 2.0} for m, us in ((1, 2.0), (2, 2.2), (99, 2.0))]
    comparison = Comparison(run_of({(128, 64, 1): 6.0}, choices=choices))
    assert comparison.choice_summary() == [["1-16", "2", f"{1.1**0.5:.3f}", "1.10"], ["17-128", "1", "1.000", "1.00"]]


def test_a_cut_off_run_is_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A run that ended early, without peers or first choices, is rendered without the tables about them."""
    run = run_of({(128, 64, 1): 6.0})
    run["rows"] = [row for row in run["rows"] if row["peer"] in ("ours", "roof")]
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "random_h100_5.json").write_text(json.dumps(run))
    monkeypatch.setattr(render, "HERE", tmp_path)
    text = "\n".join(render.untuned_section())
    assert "### GPU, seed 5: 3000 GB/s read" in text
    assert "    python compare.py\n" in text
    assert "| 1-16 | 1.50 |  |  | 0 of 0 | nan |" in text
    compare.print_summary(Comparison(run), None)
    assert "128x64" in capsys.readouterr().out


def test_help_needs_no_pytorch() -> None:
    text = subprocess.run([sys.executable, compare.__file__, "--help"], capture_output=True, text=True, check=True)
    assert "--random SEED" in text.stdout


def test_compiles_the_first_choices_and_the_configurations_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy_awq.runtime import device

    class Pool:
        def __init__(self) -> None:
            self.kernels: list[Any] = []

        def submit(self, function: Any, kernel: Any, form: str = "cubin") -> Any:
            assert function is random_problems.build
            assert form == "cubin"
            self.kernels.append(kernel)
            return kernel

    gpu = device.nominal(90)
    monkeypatch.setattr(device, "current", lambda: gpu)
    pool: Any = Pool()
    first = random_problems.submit_chosen(pool, [(4096, 4096, 1), (4096, 4096, 100)], gpu)
    assert len(first) == len(set(pool.kernels)) == 2
    every: Any = first_choice.submit(pool, [(4096, 4096, 1), (4096, 4096, 100)], gpu)
    assert [kernel in some for kernel, some in zip(first, every.values(), strict=True)] == [True, True]
    assert all(len(some) > 20 for some in every.values())


def test_a_setting_limits_the_gpu_and_a_table_compares_its_times() -> None:
    from cupy_awq.runtime import device

    gpu = device.nominal(90)
    limited = predicted.Setting(80, sms=16, shared_kib=100).limit(gpu)
    assert (limited.arch, limited.native, limited.sm_count, limited.shared_bytes_per_sm) == (80, 90, 16, 102400)
    for problem in predicted.problems(1, 6):
        found = predicted.first_candidates(problem, limited, 3)
        assert all(candidate.config.shared_bytes(problem) <= 99 << 10 for candidate in found)
        assert [candidate.us for candidate in found] == sorted(candidate.us for candidate in found)
    times = [{"estimate_us": [9.0, 10.0], "us": [10.0, 8.0]}, {"estimate_us": [12.0], "us": [10.0]}]
    rows = predicted.summarize([{"setting": "sm_80", **record} for record in times])
    assert rows == [["sm_80", 2, "1.04", "15.0%", "1.118", "1.25"]]
