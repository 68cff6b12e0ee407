# SPDX-License-Identifier: Apache-2.0
"""Tests of the rates of GPUs: the table, what the driver says, and what `tune --rates` has stored."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cupy_awq
from cupy_awq.check import HOST
from cupy_awq.kernels import select
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device, rates
from cupy_awq.runtime.rates import DeviceRates
from cupy_awq.tools import rate_tuning
from cupy_awq.tools.command_line import main
from cupy_awq.tools.operations import Settings, typical_problem
from tests import simt
from tests.peers import modelled

H100 = device.KNOWN["h100"]


@pytest.mark.parametrize("name", device.KNOWN)
def test_explain_knows_every_gpu_of_the_table(name: str) -> None:
    gpu = device.KNOWN[name]
    for m in (1, 16, 300):
        text = cupy_awq.explain(m, 4096, 4096, device=name, layer=True)
        assert text.splitlines()[0].endswith(f" on {gpu.name} (sm_{gpu.arch})")
        assert text.count("\n->") == 1
    for op, m in (("gemm_int8", 16), ("int8_linear", 16), ("conv2d", 2)):
        select.choose(typical_problem(op, (256, 512), m, Settings(HOST, image=14), gpu), gpu)


def test_explain_refuses_an_unknown_gpu_and_one_beside_an_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "256x256", "--device", "rtx-4090", "--m", "1"]) == 0
    assert "on GeForce RTX 4090 (sm_89)" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"device: expected one of .*, rtx-4090, .*, got 'voodoo'"):
        cupy_awq.explain(1, 64, 64, 64, device="voodoo")
    with pytest.raises(ValueError, match=r"device: expected None with arch=80, got 'h100'"):
        cupy_awq.explain(1, 64, 64, 64, device="h100", arch=80)


def test_rates_of_the_table_are_those_of_data_sheets() -> None:
    """The table's rates are those of data sheets: dense tensor-core TFLOP/s or TOP/s.

    The columns: fp16 with float32 accumulators, the fastest fp16, and int8.
    """
    sheets = {
        "t4": (65, 65, 130),
        "rtx-2080-ti": (53.8, 107.6, 215),
        "a100-80gb": (312, 312, 624),
        "a10": (125, 125, 250),
        "rtx-3090": (71, 142, 284),
        "l4": (121, 121, 242),
        "rtx-4090": (165, 330, 660),
        "rtx-5090": (209.5, 419, 838),
        "agx-orin": (42.5, 42.5, 85),
    }
    for name, expected in sheets.items():
        gpu, found = device.KNOWN[name], device.KNOWN[name].rates
        per_tera = 2 * gpu.sm_count * found.clock_mhz / 1e6
        assert [x * per_tera for x in (found.mma_fp32, found.tensor, found.mma_int8)] == pytest.approx(expected, 0.02)
    h20 = device.KNOWN["h20"]
    assert 2 * h20.rates.tensor * h20.sm_count * h20.rates.clock_mhz / 1e6 == pytest.approx(148, 0.06)


def test_no_gpu_takes_the_kernel_of_an_older_one() -> None:
    for gpu in device.KNOWN.values():
        for m in (1, 8, 16, 17, 64, 100, 1024):
            for k, n in ((4096, 4096), (12288, 4096), (8192, 28672)):
                choice = select.choose(Problem(m, n, k, 128), gpu)
                assert choice.name != "gemm_sm75" or gpu.arch == 75


def _attributes(sm_count: int, **others: int) -> dict[str, int]:
    return defaultdict(lambda: 1, {"MultiProcessorCount": sm_count, "ClockRate": 0, **others})


def _found(monkeypatch: pytest.MonkeyPatch, name: str, arch: str, attributes: dict[str, int]) -> device.Device:
    """Return a GPU's properties, read from a fake driver with this name, compute capability and ``attributes``."""
    cupy = pytest.importorskip("cupy")
    gpu = SimpleNamespace(attributes=attributes, compute_capability=arch)
    monkeypatch.setattr(cupy.cuda, "Device", lambda index: gpu)
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda index: {"name": name.encode()})
    return device.of.__wrapped__(0)


def test_a_known_gpu_has_the_rates_of_the_table(monkeypatch: pytest.MonkeyPatch, tuned_folder: Path) -> None:
    attributes = _attributes(132, ClockRate=1980000, MemoryClockRate=2619000, GlobalMemoryBusWidth=5120)
    found = _found(monkeypatch, H100.name, "90", attributes).rates
    assert replace(found, read_gbs=H100.rates.read_gbs) == H100.rates
    assert found.read_gbs == pytest.approx(H100.rates.read_gbs, 1e-3)


def test_an_unknown_gpu_has_the_rates_of_its_attributes(monkeypatch: pytest.MonkeyPatch, tuned_folder: Path) -> None:
    attributes = _attributes(80, ClockRate=2550000, MemoryClockRate=11501000, GlobalMemoryBusWidth=256)
    found = _found(monkeypatch, "NVIDIA GeForce RTX 4080 SUPER", "89", attributes).rates
    assert (found.clock_mhz, found.mma_fp32, found.tensor) == (2550, 256, 512)
    assert found.read_gbs == pytest.approx(736, 1e-3)


def test_a_gpu_that_reports_no_memory_clock_has_a_bandwidth(
    monkeypatch: pytest.MonkeyPatch, tuned_folder: Path
) -> None:
    gpu = _found(monkeypatch, "Orin", "87", _attributes(8, MemoryClockRate=0))
    assert gpu.rates == device.KNOWN["orin-nano"].rates
    sizes = {"shared_bytes_per_block": 163 * 1024, "shared_bytes_per_sm": 164 * 1024}
    problem = Problem(16, 4096, 4096, 128, layouts=(AWQ, FRAGMENTS))
    assert "->" in select.explain(problem, replace(gpu, **sizes))


def test_measured_rates_replace_nominal_ones(monkeypatch: pytest.MonkeyPatch, tuned_folder: Path) -> None:
    path = rates.write(H100.name, {"read_gbs": 3000.0, "l2_gbs": 5000.0})
    assert path.parent == tuned_folder.parent / "rates"
    found = _found(monkeypatch, H100.name, "90", _attributes(132)).rates
    assert found == replace(H100.rates, read_gbs=3000.0, l2_gbs=5000.0)
    assert rates.read("another", H100.rates) == H100.rates
    for text in ("", "[]", '{"read_gbs": 0.0}', '{"read_gbs": "fast"}', '{"voodoo": 1.0}', '{"read_gbs": Infinity}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="expected positive rates of a GPU, got other content; remove the file"):
            rates.read(H100.name, H100.rates)


@pytest.mark.parametrize("name", ["t4", "a100-80gb", "l4", "h100"])
def test_the_kernels_that_measure_rates_compile(name: str) -> None:
    gpu = device.KNOWN[name]
    kinds = {"kRead", "kChase", *(kind for kind, _ in rate_tuning.mmas(gpu).values())}
    assert len(kinds) == (5 if gpu.arch >= 89 else 4)
    for kind in kinds:
        binary = compiler.build(rate_tuning.plan(gpu, kind, 1, 32, 16, 1).kernel)
        assert binary.resources is not None
        assert binary.resources.local_bytes == 0


@pytest.mark.parametrize("arch", [75, 80])
def test_the_kernel_that_measures_bandwidth_reads_all_vectors_and_the_chase_follows_links(arch: int) -> None:
    gpu = device.nominal(arch)
    magic, sink = np.uint32(0x9E3779B9), np.zeros(1, np.uint32)
    source = np.zeros((100, 4), np.uint32)
    source[97, 2] = magic  # The only vector that is not zero: only the thread that reads it writes the sink.
    simt.run(rate_tuning.plan(gpu, "kRead", 2, 32, 100, 1), {"source": source, "sink": sink})
    assert sink[0] == magic
    sink[0] = source[:] = 0
    source[0, 0], source[5, 0] = 5, magic
    simt.run(rate_tuning.plan(gpu, "kChase", 1, 1, 100, 2), {"source": source, "sink": sink})
    assert sink[0] == magic


@pytest.mark.gpu
def test_measured_rates_are_close_to_nominal_ones(tuned_folder: Path) -> None:
    gpu = device.current()
    if not gpu.is_native:
        with pytest.raises(ValueError, match="expected a GPU of sm_75 or newer and no CUPY_AWQ_ARCH"):
            rate_tuning.measure(0, lambda text: None)
        return
    for name, value in rate_tuning.measure(0, lambda text: None).items():
        assert 0.6 < value / getattr(gpu.rates, name) < 1.7, name


def test_all_rates_are_positive_where_the_gpu_has_the_instruction() -> None:
    for gpu in device.KNOWN.values():
        for field in fields(DeviceRates):
            lacks = {"mma_fp32": 70, "mma_int8": 75, "mma_fp8": 89}.get(field.name, 0) > gpu.arch
            assert (getattr(gpu.rates, field.name) > 0) != lacks, (gpu.name, field.name)


def test_the_modelled_speed_of_a_decode_step_is_that_which_was_measured() -> None:
    """The cost models predict within 15% what was measured for Qwen3-8B on an H100.

    That is 514 tokens/s with one sequence and 5,330 with sixteen.
    """
    for m, measured in ((1, 514), (16, 5330)):
        us = modelled.step_us(modelled.SHAPES["qwen3-8b"], m, H100)
        assert m * 1e6 / us == pytest.approx(measured, 0.15)
