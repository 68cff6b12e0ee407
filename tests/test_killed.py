# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed while they write the cache: no file may remain that a later run takes for valid.

A child process writes in a loop until SIGKILL ends it at a random time. Its parent then reads what is left.
`test_interrupted.py` does the same to checkpoints.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from cupy_awq import atomic
from cupy_awq.kernels import tuned
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device
from cupy_awq.runtime import disk_cache as cache
from cupy_awq.runtime.launch_plan import Kernel

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")

LOOPS = [pytest.param(10, id="10"), pytest.param(40, marks=pytest.mark.slow, id="40")]
"""The number of processes that are killed."""
LONGEST_S = 0.03
"""The longest time in seconds for which a child writes."""


def kill_during(write: Callable[[int], object], seed: int) -> None:
    """Call ``write(0)``, ``write(1)``, ... in a child process, and kill it after a random time."""
    ready, started = os.pipe()
    child = os.fork()
    if child == 0:
        _write_for_ever(write, started)
    os.close(started)
    os.read(ready, 1)
    os.close(ready)
    time.sleep(random.Random(seed).uniform(0, LONGEST_S))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child ended before it was killed"


def _write_for_ever(write: Callable[[int], object], started: int) -> NoReturn:
    """Write until the process is killed. A forked child must never return into pytest."""
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
        if i % 3 == 0:  # start with an empty cache or, now and then, with half of an entry
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
