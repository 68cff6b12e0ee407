# SPDX-License-Identifier: Apache-2.0
"""Tests of the command line: the output of each command, and one line with exit code 2 for every mistake."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import cupy_awq
from cupy_awq.runtime import placement
from cupy_awq.tools import table, timing
from cupy_awq.tools.command_line import main
from cupy_awq.tools.demo import SMOLLM2_MLP

COMMANDS = (
    "demo",
    "info",
    "bench",
    "tune",
    "compile",
    "explain",
    "generate",
    "chat",
    "score",
    "convert",
    "quantize",
    "cache",
)


@pytest.fixture(autouse=True)
def quick_and_on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_SECONDS", 0.0)
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(placement, "gpu_count", lambda: 0)


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python -m cupy_awq`` with these arguments in a new process; return its exit code and its output."""
    environment = os.environ | {"PYTHONPATH": str(Path(cupy_awq.__file__).parents[1])}
    command = [sys.executable, "-m", "cupy_awq", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command with a mistake: check exit code 2, no output, one line on stderr, and return that line."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    *progress, line = captured.err.splitlines()
    assert captured.out == ""
    assert line.startswith("cupy_awq: error: ")
    assert all(text.startswith("bench: ") for text in progress)
    return line


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_mistake_in_a_process_is_one_line_and_exit_code_2() -> None:
    result = run("info", "nowhere")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "cupy_awq: error: nowhere: expected a file, a folder or one of smollm2, got none"
    ]


def test_demo_runs_in_another_folder(tmp_path: Path) -> None:
    result = run("demo", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break differently there")
def test_reader_that_closes_the_pipe_causes_no_traceback() -> None:
    program = (
        "import os, sys; from cupy_awq.tools.command_line import main; read, write = os.pipe(); os.close(read);"
        " os.dup2(write, 1); sys.exit(main(['info', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", program, str(SMOLLM2_MLP)]
    result = subprocess.run(
        command, cwd=Path(cupy_awq.__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.skipif(sys.platform == "win32", reason="shells close streams differently there")
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("explain 128x64 --arch 80 >&-", 0),
        ("explain 128x64 >&- 2>&-", 0),
        ("info nowhere >&- 2>&- <&-", 2),
        ("--version >&-", 0),
    ],
)
def test_closed_streams_cause_no_traceback(command: str, code: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(cupy_awq.__file__).parents[1])}
    line = f'"$0" -m cupy_awq {command}'
    result = subprocess.run(["sh", "-c", line, sys.executable], env=environment, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (code, b"")


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ there")
@pytest.mark.parametrize("module", ["cupy_awq.tools.command_line", "cupy_awq.check", "numpy", "numpy.linalg"])
def test_interrupt_during_imports_prints_no_traceback(module: str) -> None:
    program = (
        "import os, runpy, signal, sys\n"
        "class Interrupt:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt)\n"
        "sys.argv = ['cupy_awq', 'explain', '128x64']\n"
        "runpy.run_module('cupy_awq', run_name='__main__', alter_sys=True)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(cupy_awq.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode in (130, -signal.SIGINT)
    assert (result.stdout, result.stderr) == ("", "")


def test_an_empty_path_is_not_the_current_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert mistake(capsys, "info", "") == "cupy_awq: error: path: expected a file or a folder, got an empty string"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"examples:\n  python -m cupy_awq {command}" in capsys.readouterr().out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n    {command} " in text for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"cupy_awq {cupy_awq.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ([], "COMMAND"),
        (["train"], "'train'"),
        (["demo", "--fast"], "--fast"),
        (["info", "x", "--formats"], "info: expected --formats alone"),
        (["explain"], "KxN"),
        (["explain", "16", "12288", "4096"], "expected KxN such as 4096x12288, got '16'"),
        (["explain", "64x9", "--group-size", "64"], "n: expected a multiple of 8, got 9"),
        (["explain", "64x8", "--dtype", "int8"], "int8"),
        (["explain", "64x8", "--group-size", "64", "--order"], "order: expected False without layer=True, got True"),
        (["explain", "64x8", "--m", "one"], "'one'"),
        (["explain", "64x8", "--group-size", "64", "--arch", "10"], "10"),
        (["tune", "64x8"], "tune: expected an NVIDIA GPU, found none"),
        (["tune"], "tune: expected shapes KxN, a --model or --rates"),
        (["tune", "64x8", "--model", "qwen3-8b"], "tune: expected shapes KxN, a --model or --rates"),
        (["compile"], "--arch"),
        (["compile", "--arch", "ninety"], "ninety"),
        (["compile", "--arch", "90", "--arch", ""], "''"),
        (["bench"], "KxN"),
        (["bench", "4096"], "expected KxN such as 4096x12288, got '4096'"),
        (["bench", "-1x8"], "-1x8"),
        (["bench", "64x8x2"], "64x8x2"),
        (["bench", "0x8", "--group-size", "-1"], "shape 0x8"),
        (["bench", "128x0"], "shape 128x0"),
        (["bench", "128x12"], "a multiple of 8"),
        (["bench", "100x8"], "K = 100"),
        (["bench", "128x8", "--group-size", "0"], "group_size"),
        (["bench", "128x8", "--group-size", "x"], "'x'"),
        (["bench", "128x8", "--dtype", "int4"], "int4"),
        (["bench", "128x8", "--m", "0"], "positive integers"),
        (["bench", "128x8", "--m", "1,,2"], "positive integers"),
        (["bench", "128x8", "--m", "1,-2"], "positive integers"),
        (["bench", "128x8", "--kernel", "magic"], "magic"),
        (["bench", "128x8", "--op", "conv3d"], "conv3d"),
        (["bench", "128x8", "--op", "gemm_int8", "--kernel", "gemv"], "takes no --kernel"),
        (["bench", "128x8", "--op", "gemm_int8", "--batch-invariant"], "--op gemm_int8 takes no --batch-invariant"),
        (["bench", "128x8", "--op", "gemm_int8", "--dtype", "bfloat16"], "--op gemm_int8 takes no --dtype"),
        (["bench", "128x8", "--image", "14", "--window", "1"], "--op gemm takes no --image, --window"),
        (["bench", "8x8", "--op", "conv2d", "--group-size", "0"], "--op conv2d takes no --group-size"),
        (["explain", "8x8", "--op", "conv2d", "--dtype", "float32", "--order"], "takes no --dtype, --order"),
        (["explain", "128x8", "--op", "gemm_int8", "--layer"], "explain: --op gemm_int8 takes no --layer"),
        (["bench", "128x8", "--kernel", "gemv", "--batch-invariant"], "expected --kernel or --batch-invariant"),
        (["bench", "--model", "qwen3-8b", "--batch-invariant"], "bench: --model takes no --batch-invariant"),
        (["bench", "--model", "qwen3-8b", "--group-size", "32"], "bench: --model takes no --group-size"),
        (["bench", "128x12", "--op", "gemm_int8"], "a multiple of 8"),
        (["bench", "8x8", "--op", "conv2d", "--image", "0"], "at least one channel, one pixel"),
        (["bench", "128x8", "--plot", "times.svg"], "FILE.png"),
        (["bench", "128x8", "--plot", "no/such/folder/times.png"], "FILE.png"),
    ],
)
def test_mistake_is_one_line(arguments: list[str], fragment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fragment in mistake(capsys, *arguments)


def test_second_bad_shape_is_found_before_the_first_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "128x8", "128x12"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_control_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cupy_awq.tools.info.describe", interrupted)
    assert main(["info", "x"]) == 130


def test_defect_of_ours_is_not_disguised_as_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(_: object) -> None:
        raise AttributeError("ours")

    monkeypatch.setattr("cupy_awq.tools.info.describe", defect)
    with pytest.raises(AttributeError, match="ours"):
        main(["info", "x"])


def test_memory_that_does_not_suffice_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("cupy_awq.tools.bench.run", exhausted)
    assert mistake(capsys, "bench", "128x8") == "cupy_awq: error: MemoryError"


def test_demo_json_has_every_layer_at_every_m_with_a_small_error(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(output(capsys, "demo", "--json"))
    assert [(row["layer"], row["m"]) for row in rows] == [
        (layer, m) for layer in ("gate_proj", "up_proj", "down_proj") for m in (1, 16, 256)
    ]
    for row in rows:
        assert row.keys() == {"layer", "m", "kernel", "error", "quantization_error", "us", "fp16_us"}
        assert row["kernel"] == "numpy"
        assert 0 < row["error"] < 5e-4
        assert 0.05 < row["quantization_error"] < 0.15
        assert row["us"] > 0
        assert row["fp16_us"] > 0


def test_demo_text_has_a_line_for_each_and_aligned_columns(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "demo")
    header, *rows = text.splitlines()[2:12]
    assert header.split() == "layer kernel M error quantization error us fp32 us".split()
    assert len(rows) == 9
    assert {len(line) for line in rows} == {len(header)}
    assert "on CPU" in text


@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("argv", "flops", "others"),
    [
        (["gemm_int8", "64x16", "--group-size", "32", "--m", "1,9"], 2 * 64 * 16, {"quantize", "W4A16", "fp16"}),
        (["int8_linear", "64x16", "--group-size", "32", "--m", "1,9"], 2 * 64 * 16, {"fp16"}),
        (["conv2d", "8x16", "--image", "5", "--window", "1", "--m", "1,2"], 2 * 25 * 8 * 16, {"INT8 weights"}),
    ],
)
def test_bench_times_every_operation(
    place: str, argv: list[str], flops: int, others: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--op", *argv, "--json"]) == 0
    one, other = json.loads(capsys.readouterr().out)["rows"]
    assert (one["flops"], set(one["other_us"])) == (flops, others)
    assert other["flops"] == flops * other["m"]
    assert one["us"] > 0
    assert one["tflops"] == pytest.approx(flops / one["us"] / 1e6)
    assert main(["bench", "--op", *argv]) == 0
    assert f"OP/s  us / roofline  {sorted(others)[0] if len(others) == 1 else 'quantize'} us" in capsys.readouterr().out


@pytest.mark.gpu
def test_demo_on_a_gpu_uses_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    for row in json.loads(output(capsys, "demo", "--json")):
        assert row["kernel"] != "numpy"
        assert 0 < row["error"] < 5e-4
        assert 0 < row["us"] < 1000
        assert (row["fp16_us"] is not None) == timing.cublas()
    assert placement.device_name(0) in output(capsys, "demo")


def test_line_breaks_in_names_cannot_split_the_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a\nb.qzeros": np.ones(3, np.int32)}, tmp_path / "f")
    assert "a\\nb.qzeros" in mistake(capsys, "info", str(tmp_path / "f"))
    assert "no where" in mistake(capsys, "info", "no\nwhere") or "no\\nwhere" in mistake(capsys, "info", "no\nwhere")


def test_explain_prints_what_the_function_says(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--group-size", "64", "--dtype", "bfloat16", "--arch", "80"
    text = output(capsys, "explain", "4096x12288", "64x128", "--m", "1,16", *options)
    tables = [
        cupy_awq.explain(m, k, n, 64, "bfloat16", arch=80) for k, n in ((4096, 12288), (64, 128)) for m in (1, 16)
    ]
    assert text == "\n\n".join(tables) + "\n"
    text = output(capsys, "explain", "4096x12288", "--m", "16", "--arch", "90", "--layer")
    assert text == cupy_awq.explain(16, 4096, 12288, 128, arch=90, layer=True) + "\n"
    assert text != output(capsys, "explain", "4096x12288", "--m", "16", "--arch", "90")
    text = output(capsys, "explain", "12288x4096", "--m", "1", "--arch", "90", "--layer", "--order")
    assert text == cupy_awq.explain(1, 12288, 4096, 128, arch=90, layer=True, order=True) + "\n"


@pytest.mark.parametrize("options", [[], ["--layer", "--order"], ["--op", "conv2d"]])
def test_explain_prints_the_table_as_json(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", "4096x4096", "--m", "1,16", "--arch", "90", *options]
    texts = output(capsys, *command).split("\n\n")
    found = json.loads(output(capsys, *command, "--json"))
    for case, text in zip(found, texts, strict=True):
        head, _, *lines = text.splitlines()
        assert head == f"{case['problem']} on {case['gpu']} (sm_{case['arch']})"
        table = lines[: len(case["kernels"])]
        for kernel, line in zip(case["kernels"], table, strict=True):
            assert line.endswith(kernel["configuration"])
            assert line.startswith("-> ") == kernel["is_chosen"]
            assert (kernel["us"] is None) == (kernel["time"] is None) == ("  -  -  " in line)
        assert lines[len(table) :] == case["notes"]
        assert case["notes"][0].startswith(("work", "modelled parts", "chosen"))


@pytest.mark.parametrize(
    ("op", "kernel"),
    [("gemm_int8", "gemm_int8_sm90"), ("conv2d", "conv2d_sm90"), ("int8_linear", "gemm_mma_fragments")],
)
def test_explain_lists_the_kernels_of_every_operation(op: str, kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "explain", "4096x4096", "--op", op, "--m", "1024", "--arch", "90")
    assert f"-> {kernel} " in text
    assert "chosen: the lowest modelled time" in text


def test_compile_compiles_the_kernels_of_all_archs_and_returns_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_all: Any = importlib.import_module("cupy_awq.tools.compile_all")
    monkeypatch.setattr(compile_all, "kernels", lambda arch, batch_invariant: [(arch, batch_invariant)])
    seen: list[list[tuple[int, bool]]] = []

    def fake(listed: list[tuple[int, bool]]) -> int:
        seen.append(listed)
        return 1

    monkeypatch.setattr(compile_all, "run", fake)
    assert main(["compile", "--arch", "80", "--arch", "90a"]) == 1
    assert main(["compile", "--arch", "90a", "--batch-invariant"]) == 1
    assert seen == [[(80, False), (90, False)], [(90, True)]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (0.09996, "0.100"),
        (0.9996, "1.00"),
        (9.996, "10.0"),
        (99.96, "100"),
        (123456.0, "123456"),
        (None, "-"),
    ],
)
def test_numbers_keep_three_digits(value: float | None, text: str) -> None:
    assert table.number(value) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_400, "999 kB"), (999_600, "1 MB"), (5 * 10**15, "5e+03 TB")],
)
def test_sizes_change_units_where_they_round_up(nbytes: int, text: str) -> None:
    assert table.size(nbytes) == text
