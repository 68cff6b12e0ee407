# SPDX-License-Identifier: Apache-2.0
"""Signals at random moments of `save`, `convert` and `quantize`: always the whole old or the whole new checkpoint.

    python -m tests.tools.stress_writes --moments 300

Each moment is drawn uniformly from the run time of a write, and a forked process that writes gets the signal then:
SIGINT, as by Ctrl-C, or SIGKILL. The parent reads what is left; every other write goes on from there.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np

from cupy_awq import atomic, llm
from cupy_awq.checkpoint import Contents, Module, read, save
from cupy_awq.checkpoint import write as checkpoint_write
from cupy_awq.llm.files.convert import convert
from tests import llm_models
from tests.packers import Packed
from tests.test_atomic import all_files
from tests.test_convert import model_folder
from tests.test_formats_write import open_weight
from tests.test_llm_quantize import OPTIONS, TEXT, dense_folder

USER_FILES = {"notes.txt": b"mine", "tokenizer.json": b"{}"}


@dataclass(frozen=True)
class Write:
    """A write that replaces an old result by a new one.

    Attributes:
        prepare: the function that restores the old result, without leftovers of other writes.
        run: the function that writes, also where an earlier run was interrupted.
        read: the function that returns what a reader finds, in a form that can be compared.
    """

    prepare: Callable[[], object]
    run: Callable[[], object]
    read: Callable[[], object]


def visible_files(folder: Path) -> dict[str, bytes]:
    """Return all files by name, except for temporary ones that an interrupted write has left behind."""
    return {name: data for name, data in all_files(folder).items() if atomic.SUFFIX not in name}


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


def make_save(folder: Path, signum: int) -> Write:
    """Return a `checkpoint.save` that replaces shards by one file, in a folder with files of the user."""
    contents, out = two_checkpoints(folder), folder / "out"

    def prepare() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        for name, data in USER_FILES.items():
            (out / name).write_bytes(data)
        (out / "config.json").write_text('{"model_type": "x", "first": 1}')
        with mock.patch.object(checkpoint_write, "SHARD_BYTES", 3000):
            save(out, contents[0], "autoawq")

    def read_whole() -> object:
        """Return all files or, since a killed process does not move files back, what `read` finds."""
        if signum == signal.SIGINT:
            return visible_files(out)
        return describe(read(out)), (out / "notes.txt").read_bytes()

    return Write(prepare, lambda: save(out, contents[1], "gptq"), read_whole)


def make_convert(name: str, folder: Path, signum: int) -> Write:
    """Return a conversion to a file that replaces an older one, or to a new folder."""
    source, out = model_folder(folder / "in", llm_models.QWEN3, 32), folder / "out"

    def prepare() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        if "." in name:
            (out / name).write_bytes(b"old")

    format_name = name.rpartition(".")[2]
    run = partial(convert, str(source), out / name, format_name, force=True)
    return Write(prepare, run, lambda: visible_files(out))


def make_quantize(folder: Path, signum: int) -> Write:
    """Return a quantization to a new folder, which resumes what an earlier one has left."""
    model, out = dense_folder(folder / "in", llm_models.LLAMA), folder / "out"

    def prepare() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()

    def run() -> None:
        with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):  # the plot would take most of the time
            llm.quantize(model, out / "new", [TEXT], resume=True, method="rtn", **OPTIONS)

    def read_result() -> object:
        """Return the files of the result; of the reports, which have times, only that they are there."""
        files = all_files(out / "new")
        return {name: b"" if "report" in name else data for name, data in files.items()}

    return Write(prepare, run, read_result)


WRITES: dict[str, Callable[[Path, int], Write]] = {
    "save": make_save,
    **{f"convert {name}": partial(make_convert, name) for name in ("m.gguf", "m.ak48", "gptq")},
    "quantize": make_quantize,
}
"""Functions that return a write in a folder, with what a reader must find after a signal."""


def stress(write: Write, signum: int, moments: int) -> Counter[str]:
    """Send a signal at random moments of a write; return how often the old and the new result was there afterwards.

    Raises AssertionError for anything else, or if a write after the last moment or an undisturbed one fails.
    """
    write.prepare()
    old = write.read()
    write.run()
    new = write.read()
    run_times = []
    for _ in range(5):
        write.prepare()
        run_times.append(run_in_child(write.run, signum, None))
    longest_s = 1.1 * statistics.median(run_times)
    draw, counts, goes_on = random.Random(moments), Counter[str](), False
    for _ in range(moments):
        if not goes_on:
            write.prepare()
        run_in_child(write.run, signum, draw.uniform(0, longest_s))
        found = write.read()
        assert found in (old, new), f"after {counts}"
        counts["new" if found == new else "old"] += 1
        goes_on = found == old and not goes_on
    if found == old:
        write.run()
    assert write.read() == new
    return counts


def run_in_child(run: Callable[[], object], signum: int, delay_s: float | None) -> float:
    """Call ``run`` in a forked process, send it a signal after a time, if any, and return its run time in seconds.

    Raises AssertionError if ``run`` raises an error other than KeyboardInterrupt.
    """
    ready, started = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.write(started, b".")
            run()
            code = 0
            if delay_s is not None:
                time.sleep(3)  # the signal may come after the last write
        except KeyboardInterrupt:
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(started)
    os.read(ready, 1)
    os.close(ready)
    began = time.monotonic()
    if delay_s is not None:
        time.sleep(delay_s)
        os.kill(child, signum)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the child ended with {status}"
    return time.monotonic() - began


def main() -> None:
    """Print, for each write and signal, how often the old and the new result was there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--moments", type=int, default=300, help="the moments of each write and signal (default: 300)")
    moments = parser.parse_args().moments
    for name, make in WRITES.items():
        for signum in (signal.SIGINT, signal.SIGKILL):
            with tempfile.TemporaryDirectory() as folder:
                began = time.monotonic()
                counts = stress(make(Path(folder), signum), signum, moments)
            seconds = time.monotonic() - began
            print(f"{name:14} {signum.name:7} {counts['old']:4} old {counts['new']:4} new {seconds:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
