# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmark: its figures, text and plot, and on a GPU that it measures the time of the work."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq.runtime import placement
from cupy_awq.tools import bench, timing
from cupy_awq.tools.bench import Ceilings, Row
from cupy_awq.tools.command_line import main
from cupy_awq.tools.operations import DTYPES, Settings

CEILINGS = Ceilings(read_gbs=2000.0, tflops=500.0, measured=True)


def row(
    k: int = 4096, n: int = 4096, m: int = 16, us: float = 10.0, roof: float | None = 5.0, fp16: float | None = 20.0
) -> Row:
    flops, others = 2 * m * n * k, {"fp16": fp16}
    return Row("gemm", f"{k}x{n}", "group size 128", m, "float16", "gemm_sm80", us, 10_000_000, flops, roof, others)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no GPU be found, and repeat timings on the CPU only a few times, so that tests end soon."""
    monkeypatch.setattr(placement, "gpu_count", lambda: 0)
    monkeypatch.setattr(timing, "CPU_SECONDS", 0.0)


def test_figures_of_a_row() -> None:
    found = row()
    assert found.gbs == 1000.0  # 10 MB in 10 us are 1000 GB/s
    assert found.tflops == pytest.approx(2 * 16 * 4096 * 4096 / 10e-6 / 1e12)
    assert found.over_roofline == 2.0
    assert found.over_fp16 == 2.0
    unknown = row(roof=None, fp16=None)
    assert (unknown.over_roofline, unknown.over_fp16) == (None, None)


def test_roofline_is_the_slower_of_reading_and_multiplying() -> None:
    assert CEILINGS.roofline_us(2_000_000, 0) == 1.0
    assert CEILINGS.roofline_us(0, 500_000_000) == 1.0
    assert CEILINGS.roofline_us(4_000_000, 500_000_000) == 2.0
    assert CEILINGS.roofline_us(2_000_000, 1_500_000_000) == 3.0


@given(
    sizes=st.tuples(*[st.integers(1, 10**6)] * 3),
    times=st.tuples(st.floats(1e-2, 1e7), *[st.none() | st.floats(1e-2, 1e7)] * 2),
)
def test_rows_survive_json_and_stay_consistent(sizes: tuple[int, ...], times: tuple[Any, ...]) -> None:
    found = row(*sizes, *times)
    read = json.loads(json.dumps(found.to_json()))
    assert read["us"] * read["tflops"] * 1e6 == pytest.approx(read["flops"])
    assert (read["over_roofline"] is None) == (read["roofline_us"] is None)
    assert (read["over_fp16"] is None) == (read["other_us"]["fp16"] is None)


def test_time_on_the_cpu_is_that_of_one_call() -> None:
    assert 2000 <= timing.on_cpu([lambda: time.sleep(0.002)]) < 20_000


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_SECONDS", 0.0)
    seen: list[int] = []
    timing.on_cpu([lambda: seen.append(0), lambda: seen.append(1)])
    assert seen == [0, *([0, 1] * timing.SAMPLES)[: timing.SAMPLES]]


@pytest.mark.usefixtures("cpu")
def test_bench_without_a_gpu_times_numpy_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "128x16", "64x8", "--m", "1,4", "--group-size", "64"]) == 0
    captured = capsys.readouterr()
    head, _, header, *rows, _, note = captured.out.splitlines()
    assert head.startswith("CPU (")
    assert header.split()[:3] == ["shape", "kernel", "M"]
    assert [line.split()[:3] for line in rows] == [
        [shape, "numpy", m] for shape in ("128x16", "64x8") for m in ("1", "4")
    ]
    assert all(line.split()[-3:] == ["-", "-", "-"] for line in rows)
    assert note.startswith("No GPU: ")
    assert "bench: 64x8: M=4" in captured.err.splitlines()


@pytest.mark.usefixtures("cpu")
def test_bench_without_a_gpu_names_no_kernel_that_did_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--plan"]):
        assert main(["bench", "128x16", "--m", "1", "--kernel", "gemv", *options]) == 0
        assert capsys.readouterr().out.splitlines()[3].split()[:3] == ["128x16", "numpy", "1"]


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_bench_json_holds_every_figure(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "64x16", "--m", "3", "--group-size", "-1", "--dtype", dtype, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (only,) = found["rows"]
    assert found["ceilings"] is None
    assert (only["op"], only["shape"], only["m"], only["dtype"]) == ("gemm", "64x16", 3, dtype)
    assert only["weight"] == "group size 64"
    size = 4 if dtype == "float32" else 2
    assert only["nbytes"] == 64 * 8 + 16 * 2 + 8 + 3 * (64 + 16) * size
    assert only["us"] > 0
    assert (only["roofline_us"], only["other_us"]) == (None, {"fp16": None})


def test_text_says_what_is_measured_and_what_nominal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "device_name", lambda index: "Test GPU")
    measured = bench.render([row()], CEILINGS, 0)
    assert measured.startswith("Test GPU: gemm, x float16, group size 128\n")
    assert measured.splitlines()[3].split() == "4096x4096 gemm_sm80 16 10.0 1000 53.7 2.00 20.0 2.00".split()
    assert measured.endswith("read 2000 GB/s, fp16 500 TFLOP/s by cupy.matmul.")
    assert "500 TFLOP/s nominal" in bench.render([row(fp16=None)], Ceilings(2000.0, 500.0, measured=False), 0)


def test_nominal_rates_are_those_of_data_sheets(monkeypatch: pytest.MonkeyPatch) -> None:
    # The manufacturers' boost clocks in MHz and dense float16 tensor-core rates in TFLOP/s.
    sheets = {70: (1530, 125), 75: (1590, 65), 80: (1410, 312), 90: (1830, 989), 89: (2520, 330)}
    for arch, (mhz, tflops) in sheets.items():
        facts = bench.devices.nominal(arch)
        assert bench.nominal_tflops(facts, mhz * 1e6) == pytest.approx(tflops, rel=0.02)


def figure(rows: list[Row]) -> Any:
    found = bench.new_figure()
    bench.draw(found, rows, "Test GPU")
    return found


def test_plot_has_a_line_for_each_shape_and_fp16_dashed() -> None:
    rows = [row(n=n, m=m, us=10.0 + m) for n in (4096, 8192) for m in (64, 1, 16)]
    (axes,) = figure(rows).axes
    solid = [line for line in axes.lines if line.get_marker() == "o"]
    dashed = [line for line in axes.lines if line.get_linestyle() == "--" and len(line.get_xdata())]
    assert [line.get_label() for line in solid] == ["4096x4096", "4096x8192"]
    assert len(dashed) == 2
    assert list(solid[0].get_xdata()) == [1, 16, 64]
    assert list(solid[0].get_ydata()) == [11 / 5, 26 / 5, 74 / 5]
    assert list(dashed[0].get_ydata()) == [4.0, 4.0, 4.0]
    assert axes.get_xscale() == "log"
    assert axes.get_ylabel() == "time / roofline"


def test_plot_without_a_roofline_shows_microseconds() -> None:
    (axes,) = figure([row(m=m, us=float(m), roof=None, fp16=None) for m in (1, 2)]).axes
    assert list(axes.lines[0].get_ydata()) == [1.0, 2.0]
    assert axes.get_ylabel() == "time, microseconds"


@pytest.mark.usefixtures("cpu")
def test_plot_is_written_as_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "times.png"
    assert main(["bench", "64x8", "--m", "1,2", "--group-size", "64", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert "64x8" in capsys.readouterr().out


@pytest.mark.usefixtures("cpu")
def test_plot_without_matplotlib_fails_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["bench", "64x8", "--group-size", "64", "--plot", "times.png"]) == 2
    assert capsys.readouterr().err == "cupy_awq: error: --plot needs matplotlib: pip install matplotlib\n"


@pytest.mark.gpu
def test_time_on_the_gpu_is_that_of_the_work_and_not_of_the_host() -> None:
    import cupy

    source = cupy.zeros(1 << 26, cupy.float32)
    target = cupy.empty_like(source)
    nominal = bench.devices.current().read_gbs

    def gbs(megabytes: int, graph: bool) -> float:
        n = megabytes << 18
        us = timing.on_gpu([lambda: cupy.copyto(target[:n], source[:n])], graph=graph)
        return 2 * n * 4 / us / 1e3

    # Other tests may use the GPU at the same time, so the best of several measurements counts.
    for graph in (True, False):
        assert 0.5 * nominal < max(gbs(256, graph) for _ in range(8)) < nominal
    # Launching an element-wise kernel takes the host several times longer than running it takes the GPU.
    tiny = cupy.zeros(8, cupy.float32)
    assert min(timing.on_gpu([lambda: cupy.add(tiny, 1, out=tiny)], graph=False) for _ in range(8)) < 5


@pytest.mark.gpu
def test_capture_leaves_the_results_of_the_calls() -> None:
    import cupy

    count = cupy.zeros((), cupy.int64)
    timing.on_gpu([lambda: cupy.add(count, 1, out=count)])
    assert int(count) > 20


@pytest.mark.gpu
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("kernel", [None, "gemm_simt"])
def test_bench_on_a_gpu_fills_every_column(kernel: str | None, planned: bool) -> None:
    settings = Settings(device=0, kernel=kernel, planned=planned)
    nominal = bench.devices.of(0).read_gbs
    kernels: list[str] = []
    # Other tests use the same GPU at the same time, so one undisturbed measurement of the read bandwidth is enough. A
    # later run finds the launches of the first one in the cache, and so chooses no kernel.
    for _ in range(8):
        rows, ceilings = bench.run("gemm", [(1024, 2048)], [2, 64], settings, progress=lambda text: None)
        kernels = kernels or [found.kernel for found in rows]
        assert ceilings is not None
        assert ceilings.read_gbs < nominal
        if ceilings.read_gbs > 0.5 * nominal:
            break
    assert ceilings.read_gbs > 0.5 * nominal
    assert ceilings.measured == timing.cublas()
    assert all(name != "numpy" and kernel in (None, name) for name in kernels)
    for found in rows:
        assert found.over_roofline is not None
        assert 0.9 < found.over_roofline < 200
        assert (found.other_us["fp16"] is not None) == timing.cublas()
