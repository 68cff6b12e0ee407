# SPDX-License-Identifier: Apache-2.0
"""Tests of processes that are killed while they write: no file may remain that a later run takes for valid.

A child process writes in a loop until SIGKILL ends it at a random time. Its parent then reads what is left.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from cupy_awq import atomic, llm
from cupy_awq.checkpoint import Contents, Module, read, save
from cupy_awq.checkpoint import write as checkpoint_write
from cupy_awq.kernels import tuned
from cupy_awq.llm.files import ak48
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device
from cupy_awq.runtime import disk_cache as cache
from cupy_awq.runtime.launch_plan import Kernel
from tests import llm_models
from tests.llm_models import QWEN3
from tests.packers import Packed
from tests.test_formats_write import open_weight
from tests.test_llm_quantize import OPTIONS, TEXT, dense_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")

LOOPS = [pytest.param(10, id="10"), pytest.param(40, marks=pytest.mark.slow, id="40")]
"""The number of processes that are killed."""
QUANTIZATIONS = [pytest.param(10, id="10"), pytest.param(15, marks=pytest.mark.slow, id="15")]
"""The number of quantizing processes that are killed. Each quantization takes half a second."""
LONGEST_S = 0.03
"""The longest time in seconds for which a child writes."""


def kill_during(write: Callable[[int], object], seed: int, longest_s: float = LONGEST_S) -> None:
    """Call ``write(0)``, ``write(1)``, ... in a child process, and kill it after a random time."""
    ready, started = os.pipe()
    child = os.fork()
    if child == 0:
        _write_for_ever(write, started)
    os.close(started)
    os.read(ready, 1)
    os.close(ready)
    time.sleep(random.Random(seed).uniform(0, longest_s))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child ended before it was killed"


def _write_for_ever(write: Callable[[int], object], started: int) -> NoReturn:
    """Write until the process is killed: a forked child must not return to pytest's frames."""
    try:
        os.write(started, b".")
        i = 0
        while True:
            write(i)
            i += 1
    finally:
        os._exit(1)


@pytest.mark.parametrize("loops", LOOPS)
def test_a_killed_compilation_leaves_no_kernel_that_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loops: int
) -> None:
    def compile_fake(kernel: Kernel, *_: object) -> tuple[bytes, str]:
        return np.random.default_rng(int(kernel.defines[0][1])).bytes(2_000_000), "Used 8 registers"

    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiler, "_compile", compile_fake)
    kernels = [Kernel("dequantize/dequantize.cu", "dequantize", (("SEED", seed),), "80") for seed in range(3)]
    codes = [compile_fake(kernel)[0] for kernel in kernels]
    compiler.build(kernels[0])

    def write(i: int) -> None:
        if i % 3 == 0:  # Sometimes start with an empty cache, or with half of an entry.
            for path in tmp_path.glob("*.json" if i % 2 else "*.cubin"):
                path.unlink()
        compiler.build(kernels[i % 3])

    for seed in range(loops):
        kill_during(write, seed)
        found = [compiler.build(kernel) for kernel in kernels]
        assert [binary.code for binary in found] == codes
        assert all(compiler.build(kernel).newly_compiled is False for kernel in kernels)
        for path in tmp_path.glob(f"*{atomic.SUFFIX}"):
            path.unlink()


@pytest.mark.parametrize("loops", LOOPS)
def test_a_killed_tune_leaves_a_whole_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loops: int) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    a100 = device.nominal(80)
    path = tuned.write(a100, {"8x8": {"1": "first"}})

    def write(i: int) -> None:
        tuned.write(a100, {f"{8 * k + 16}x{i}": {str(m): "x" * 100 for m in range(20)} for k in range(20)})

    for seed in range(loops):
        kill_during(write, seed)
        table = tuned.read(path)
        assert table["8x8"] == {"1": "first"}
        assert all(len(entries) == 20 for shape, entries in table.items() if shape != "8x8")
        path.unlink()
        tuned.write(a100, {"8x8": {"1": "first"}})


@pytest.mark.parametrize("loops", LOOPS)
def test_a_killed_conversion_leaves_no_model_or_a_whole_one(tmp_path: Path, loops: int) -> None:
    folder = llm_models.folder(tmp_path, QWEN3)
    files = llm.read(folder)
    out = tmp_path / "m.ak48"
    ak48.write(files, out)
    whole = out.read_bytes()
    out.unlink()

    def write(i: int) -> None:
        out.unlink(missing_ok=True)
        ak48.write(files, out)

    for seed in range(loops):
        kill_during(write, seed)
        if out.exists():
            assert out.read_bytes() == whole
            out.unlink()
        ak48.write(files, out)
        assert out.read_bytes() == whole
        out.unlink()


def discard(folder: Path) -> None:
    """Remove a folder in one step, so that a killed process leaves no half of it under its name."""
    if folder.exists():
        shutil.rmtree(folder.rename(folder.with_name(f"{random.random()}")))


def describe(contents: Contents) -> dict[str, bytes]:
    """Return the bytes of every tensor of a checkpoint, by name."""
    found: dict[str, bytes] = {}
    for name, item in contents.items():
        if isinstance(item, Module):
            weight = item.weight
            found |= {f"{name}.{part}": np.asarray(getattr(weight, part)).tobytes() for part in ("qweight", "scales")}
        else:
            found[name] = item.array.tobytes()
    return found


def two_checkpoints(path: Path) -> list[Contents]:
    """Return two checkpoints with the same names and other values."""
    both = []
    for value in (1, 2):
        codes, zeros = np.full((64, 16), value, np.uint8), np.ones((4, 16), np.uint8)
        weight = Packed(codes, zeros, np.full((4, 16), value, np.float16), 16, np.arange(64) // 16)
        plain = {f"t{i}": np.full(600, value, np.float32) for i in range(4)}
        both.append(open_weight(path / f"in{value}", weight, **plain))
    return both


@pytest.mark.parametrize("loops", [pytest.param(20, id="20"), pytest.param(300, marks=pytest.mark.slow, id="300")])
def test_a_killed_save_leaves_the_whole_old_checkpoint_or_the_whole_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loops: int
) -> None:
    """Two checkpoints, of several shards or one file, replace each other."""
    both = two_checkpoints(tmp_path)
    wanted = [describe(contents) for contents in both]
    out = tmp_path / "out"
    save(out, both[0], "autoawq")
    (out / "notes.txt").write_text("mine")

    def write(i: int) -> None:
        monkeypatch.setattr(checkpoint_write, "SHARD_BYTES", 3000 if i % 2 else 10**9)
        save(out, both[i % 2], ("autoawq", "gptq", "compressed-tensors")[i % 3])

    for seed in range(loops):
        kill_during(write, seed)
        assert describe(read(out)) in wanted
        if seed % 2:
            save(out, both[seed % 3 % 2], "gptq")
            assert describe(read(out)) == wanted[seed % 3 % 2]
        assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("loops", QUANTIZATIONS)
def test_a_killed_quantization_leaves_no_model_or_a_whole_one_and_can_resume(tmp_path: Path, loops: int) -> None:
    model, out = dense_folder(tmp_path / "dense", llm_models.LLAMA), tmp_path / "out"
    options = {**OPTIONS, "method": "rtn"}
    start = time.monotonic()
    llm.quantize(model, tmp_path / "whole", [TEXT], **options)
    elapsed = time.monotonic() - start

    def read_files(folder: Path) -> dict[str, bytes]:
        """Return the contents of all files, of the reports, which have times, only that they are there."""
        return {file.name: b"" if "report" in file.name else file.read_bytes() for file in folder.iterdir()}

    whole = read_files(tmp_path / "whole")

    def write(i: int) -> None:
        llm.quantize(model, out, [TEXT], resume=True, **options)
        discard(out)

    for seed in range(loops):
        kill_during(write, seed, longest_s=1.2 * elapsed)
        if seed % 2 and not out.exists():
            llm.quantize(model, out, [TEXT], resume=True, **options)
        if out.exists():
            assert read_files(out) == whole
            discard(out)
