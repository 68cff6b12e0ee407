# SPDX-License-Identifier: Apache-2.0
"""The commands `explain`, `bench` and `tune` on products and layers of experts."""

from __future__ import annotations

import json

import pytest

from cupy_awq.check import HOST
from cupy_awq.kernels import select
from cupy_awq.kernels.experts.problem import ExpertProduct
from cupy_awq.runtime import device
from cupy_awq.tools.command_line import main
from cupy_awq.tools.expert_operations import GemmGrouped, Moe, touched_bytes, typical_problems
from cupy_awq.tools.operations import Settings


@pytest.mark.parametrize("arch", [70, 75, 80, 90])
@pytest.mark.parametrize("m", [1, 40])
def test_problems_of_a_layer_have_kernels_on_every_path(arch: int, m: int) -> None:
    """A layer takes two launches for few tokens on sm_80 and newer, four for many tokens or on older GPUs."""
    gpu = device.nominal(arch)
    problems = typical_problems("moe", (2048, 768), m, Settings(HOST, experts=128, top_k=8), gpu)
    assert len(problems) == (2 if m == 1 and arch >= 80 else 4)
    names = [select.choose(problem, gpu).name for problem in problems]
    assert ("expert_gemm_simt" in names) == (arch == 70)
    (product,) = typical_problems("gemm_grouped", (2048, 768), 64, Settings(HOST), gpu)
    key = product.tuning_key
    assert key is not None
    assert key.shapes == ("experts sorted 8 2048x768",)


@pytest.mark.parametrize("name", ["p100", "gtx-1080", "v100", "t4", "agx-orin", "rtx-4090", "h100"])
def test_modelled_times_are_at_least_those_of_the_reads_of_the_weights(name: str) -> None:
    gpu = device.KNOWN[name]
    for m in (1, 16):
        (product,) = typical_problems("gemm_grouped", (4096, 14336), m, Settings(HOST, experts=8, top_k=2), gpu)
        times = [row.us for row in select.explain_kernels(product, gpu) if row.us is not None]
        assert times
        assert isinstance(product, ExpertProduct)
        assert min(times) > 0.9 * gpu.read_us(product.touched_bytes)


def test_explain_prints_every_launch(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", "2048x768", "--op", "moe", "--m", "1", "--experts", "128", "--top-k", "8", "--arch", "90"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["problem"].split(", ")[1].split()[-1] for entry in found] == ["float16", "float16"]
    assert main(command) == 0
    assert "@ 128 experts W[768, 2048]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("op", "options", "nbytes"),
    [
        ("gemm_grouped", [], 3 * 64 * 32 // 2 + 3 * 2 * 32 * 5 // 2 + 2 * 900 * 96),
        ("moe", ["--top-k", "3"], 3 * 3 * 64 * 32 // 2 + 3 * (2 * 64 + 64) * 5 // 2 + 4 * 900 * 64),
    ],
)
def test_bench_on_the_cpu(capsys: pytest.CaptureFixture[str], op: str, options: list[str], nbytes: int) -> None:
    """The bytes that a row reports are those of all three experts, which 900 rows touch."""
    command = ["bench", "64x32", "--op", op, "--m", "900", "--experts", "3", "--group-size", "32", "--json", *options]
    assert main(command) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["op"] == op
    assert row["nbytes"] == nbytes
    assert row["kernel"] == "numpy"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "64x64", "--experts", "2"], "--op gemm takes no --experts"),
        (["bench", "64x64", "--op", "gemm_grouped", "--top-k", "2"], "--op gemm_grouped takes no --top-k"),
        (["bench", "64x64", "--kernel", "absent"], "--kernel: expected one that explain lists, got 'absent'"),
        (["bench", "64x64", "--model", "qwen3-8b"], "bench: expected shapes KxN or a --model, got both"),
        (["bench", "64x64", "--m", "1000000000"], "expected positive integers of at most nine digits"),
        (["bench", "64x12", "--op", "gemm_grouped"], "a multiple of 8"),
        (["explain", "128x64", "--op", "moe"], "group_size: expected a divisor of K = 64"),
        (["explain", "128x128", "--op", "moe", "--top-k", "9"], "--top-k: expected at most 8"),
    ],
)
def test_invalid_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_work_counts_touched_experts() -> None:
    settings = Settings(HOST, group_size=32, experts=4, top_k=1)
    one = 64 * 32 // 2 + 2 * 32 * 5 // 2
    assert touched_bytes(1, settings, (64, 32)) == one
    assert touched_bytes(10**6, settings, (64, 32)) == 4 * one
    assert GemmGrouped((64, 32), settings).flops(5) == 2 * 5 * 64 * 32
    assert Moe((64, 32), settings).flops(5) == 6 * 5 * 64 * 32
