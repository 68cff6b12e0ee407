# SPDX-License-Identifier: Apache-2.0
"""Read mutated files of every reader in worker processes with limits of memory and time.

A reader may accept a file or raise CheckpointError, ValueError, TypeError or OSError with the path in its message.
Anything else is a finding: another exception, more memory than the limit, more time than the limit, or the end of the
process. File number i of a reader is the same at every run:

    python -m tests.tools.fuzz --files 10000              # all readers
    python -m tests.tools.fuzz --reader gguf --only 1234  # one file again, with its traceback, kept in --keep FOLDER

A reader is a `Reader` in `READERS`: to add one, give its seed files and a function that reads them.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.tools.fuzz_mutations import mutate
from tests.tools.fuzz_readers import READERS, Reader

SECONDS = 5.0
"""The limit of CPU time per file in seconds; the wall clock would also count the time of other processes."""

WAITING = 6
"""The factor by which the wall-clock time of a file may exceed `SECONDS`."""

MEMORY_BYTES = 1 << 30
"""The limit of address space, in bytes, that reading one file may add."""

UNCHANGED = -1
"""The file number for which the seed file is read as it is, which every reader must accept."""

ALLOWED = (ValueError, TypeError, OSError)
"""The types of errors that a reader may raise; CheckpointError is a ValueError."""


@dataclass(frozen=True)
class Outcome:
    """The result of one file.

    Attributes:
        reader: the name of the reader.
        number: the number of the file.
        kind: "accepted", the name of an exception, "hang" for a process that was killed, or "ended" for one that ended.
        finding: a description of the finding; "" if the outcome is allowed.
    """

    reader: str
    number: int
    kind: str
    finding: str


def read_one(reader: Reader, folder: Path, number: int) -> Outcome:
    """Damage one of the reader's seed files in ``folder``, read the folder, and restore the file."""
    rng = random.Random(f"{reader.name} {number}")
    target = folder / rng.choice(reader.targets)
    whole = target.read_bytes() if number != UNCHANGED else b""
    if number != UNCHANGED:
        target.write_bytes(mutate(whole, target.name, rng))
    kind, finding = "accepted", ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader.read(folder)
    except ALLOWED as error:
        kind = type(error).__name__
        if str(folder) not in str(error):
            finding = f"no path: {traceback.format_exc()[-1500:]}"
        elif not str(error).isprintable() or len(str(error)) > 1500:
            finding = f"unprintable or long: {str(error)[:300]!r}"
    except BaseException as error:
        kind, finding = type(error).__name__, traceback.format_exc()[-1500:]
    finally:
        if number != UNCHANGED:
            target.write_bytes(whole)
    return Outcome(reader.name, number, kind, finding)


Jobs = Sequence[tuple[Reader, int]]
"""The work of one process: (reader, file number) pairs in the order in which they are read."""


def _work(jobs: Jobs, output: int, root: Path) -> None:
    """Read one file after the other in a worker process; write "start" before each and its outcome after it."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)  # Discard stderr, to which Rust prints its panics.
    folders: dict[str, Path] = {}
    work = Path(tempfile.mkdtemp(dir=root))
    for reader, number in jobs:
        os.write(output, b"start\n")
        if reader.name not in folders:
            folders[reader.name] = Path(shutil.copytree(root / reader.name, work / reader.name))
        outcome = read_one(reader, folders[reader.name], number)
        os.write(output, json.dumps([outcome.kind, outcome.finding]).encode() + b"\n")


class _Worker:
    """A child process that reads its share of the files; if it ends or hangs, a new one continues after that file."""

    def __init__(self, jobs: Jobs, root: Path) -> None:
        self.jobs, self.root, self.done = jobs, root, 0
        self.start()

    def start(self) -> None:
        self.input, output = os.pipe()
        self.buffer, self.since, self.used = b"", time.monotonic(), 0.0
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _work(self.jobs[self.done :], output, self.root)
            finally:
                os._exit(0)
        os.close(output)

    def used_seconds(self) -> float:
        """Return the CPU time that the process has used, in seconds."""
        with contextlib.suppress(OSError, IndexError):  # The process may have ended.
            fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def finish(self, kind: str, finding: str) -> Outcome:
        reader, number = self.jobs[self.done]
        self.done += 1
        self.since, self.used = time.monotonic(), self.used_seconds()
        return Outcome(reader.name, number, kind, finding)

    def receive(self) -> Iterator[Outcome]:
        """Yield the outcomes that the process has sent; if it has ended or hangs, yield that as well and restart it."""
        ready, _, _ = select.select([self.input], [], [], 0.05)
        if ready and (data := os.read(self.input, 1 << 16)):
            *lines, self.buffer = (self.buffer + data).split(b"\n")
            for line in lines:
                self.since, self.used = time.monotonic(), self.used_seconds()
                if line != b"start":
                    yield self.finish(*json.loads(line))
            return
        elapsed = time.monotonic() - self.since
        hangs = not ready and (self.used_seconds() - self.used > SECONDS or elapsed > WAITING * SECONDS)
        if not ready and not hangs:
            return
        if hangs:
            os.kill(self.pid, signal.SIGKILL)
        status = self.close()
        if self.done < len(self.jobs):
            yield self.finish("hang" if hangs else "ended", f"after {SECONDS} s" if hangs else f"status {status}")
            if self.done < len(self.jobs):
                self.start()

    def close(self) -> int:
        """Wait for the process to end and return its exit status; 0 if that has been done before."""
        if self.pid == 0:
            return 0
        _, status = os.waitpid(self.pid, 0)
        os.close(self.input)
        self.pid = 0
        return status


def run(readers: Sequence[Reader], numbers: Sequence[int], workers: int = 2) -> list[Outcome]:
    """Read the files with these numbers by every reader, in parallel, and return all outcomes."""
    jobs = [(reader, number) for number in numbers for reader in readers]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for reader in readers:
            (root / reader.name).mkdir()
            reader.write(root / reader.name)
        running = [_Worker(jobs[i::workers], root) for i in range(min(workers, len(jobs)))]
        while running:
            for worker in running:
                outcomes.extend(worker.receive())
            for worker in [worker for worker in running if worker.done == len(worker.jobs)]:
                worker.close()
                running.remove(worker)
    return outcomes


def summarize(outcomes: Sequence[Outcome]) -> str:
    """Return a text with the number of files for each pair of a reader and a kind of outcome."""
    counts = collections.Counter((outcome.reader, outcome.kind) for outcome in outcomes)
    return "\n".join(f"{reader:20} {kind:20} {count}" for (reader, kind), count in sorted(counts.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first file")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--reader", action="append", choices=sorted(READERS), help="default: all")
    parser.add_argument("--only", metavar="NUMBER", type=int, help="read one file of one reader in this process")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="with --only: write the files there")
    options = parser.parse_args()
    readers = [READERS[name] for name in options.reader or sorted(READERS)]
    if options.only is not None:
        with contextlib.ExitStack() as stack:
            folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder.mkdir(exist_ok=True)
            readers[0].write(folder)
            print(read_one(readers[0], folder, options.only))
        return 0
    began = time.monotonic()
    numbers = range(options.first, options.first + -(-options.files // len(readers)))
    outcomes = run(readers, numbers, options.workers)
    findings = [outcome for outcome in outcomes if outcome.finding]
    for outcome in findings[:40]:
        print(f"== {outcome.reader} {outcome.number}: {outcome.kind}\n{outcome.finding}")
    print(summarize(outcomes))
    print(f"{len(outcomes)} files, {len(findings)} findings, {time.monotonic() - began:.0f} s")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
