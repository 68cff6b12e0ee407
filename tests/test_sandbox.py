# SPDX-License-Identifier: Apache-2.0
"""The worker process: limits, restarts, threads, forks, interruptions, and what it inherits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cupy_awq.sandbox import worker
from cupy_awq.sandbox.worker import LimitError, ProgramError, Worker

SLOW = {"patterns": ["(a+)+$"], "names": ["a" * 100 + "!"]}
QUICK = {"patterns": ["b", "a"], "names": ["ab", "c"]}
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")


@pytest.fixture
def child() -> Iterator[Worker]:
    child = Worker()
    yield child
    child.close()


def match(child: Worker, **arguments: Any) -> Any:
    return child.call("match", **arguments)[0]


def test_a_worker_starts_at_the_first_call_and_stays(child: Worker) -> None:
    assert child.starts == 0
    assert [match(child, **QUICK) for _ in range(3)] == [[1, -1]] * 3
    assert child.starts == 1


@POSIX
def test_a_call_that_exceeds_its_cpu_time_ends_and_the_next_starts_a_new_process(child: Worker) -> None:
    with pytest.raises(LimitError, match=r"expected at most 0\.3 s of CPU time, got more"):
        match(child, cpu_seconds=0.3, **SLOW)
    assert match(child, **QUICK) == [1, -1]
    assert child.starts == 2


@LINUX
def test_a_call_that_exceeds_its_memory_ends(child: Worker) -> None:
    with pytest.raises(LimitError, match="expected at most 160 MiB of memory, got more"):
        child.call("render", template="{{ ('x' * 300000000) | length }}", variables={}, max_characters=9)
    assert (
        child.call("render", template="{{ ('x' * 30000000) | length }}", variables={}, max_characters=9) == "30000000"
    )
    assert child.starts == 2


@pytest.mark.parametrize("polls", [pytest.param(True, marks=POSIX), False])
def test_a_call_that_takes_too_long_on_the_clock_is_killed(
    child: Worker, monkeypatch: pytest.MonkeyPatch, polls: bool
) -> None:
    """A call that exceeds the wall-clock limit is killed, by a poll or, as on Windows, by a timer."""
    monkeypatch.setattr(worker, "POLLS", polls)
    match(child, **QUICK)
    monkeypatch.setattr(worker, "CLOCK_SECONDS", -999.5)
    began = time.perf_counter()
    with pytest.raises(LimitError, match="expected at most"):
        match(child, cpu_seconds=1000, **SLOW)
    assert time.perf_counter() - began < 10
    monkeypatch.undo()
    assert match(child, **QUICK) == [1, -1]


def test_an_exception_of_the_program_leaves_the_process_running(child: Worker) -> None:
    with pytest.raises(ProgramError, match="unterminated character set") as caught:
        match(child, patterns=["["], names=[])
    assert caught.value.kind in ("error", "PatternError")
    assert match(child, **QUICK) == [1, -1]
    assert child.starts == 1


@POSIX
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_process_that_died_is_replaced(child: Worker, number: str) -> None:
    match(child, **QUICK)
    assert child._process is not None
    os.kill(child._process.pid, getattr(signal, number))
    child._process.wait()
    assert match(child, **QUICK) == [1, -1]
    assert child.starts == 2


@POSIX
def test_a_crash_during_a_call_is_a_limit_error(child: Worker) -> None:
    match(child, **QUICK)
    process = child._process
    assert process is not None
    threading.Timer(0.2, process.send_signal, [signal.SIGSEGV]).start()
    with pytest.raises(LimitError, match="expected"):
        match(child, cpu_seconds=20, **SLOW)
    assert match(child, **QUICK) == [1, -1]


@POSIX
def test_an_interrupted_call_leaves_no_reply_for_the_next(child: Worker) -> None:
    match(child, **QUICK)
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        match(child, cpu_seconds=20, **SLOW)
    assert match(child, **QUICK) == [1, -1]
    assert child.starts == 2


def test_threads_share_a_worker(child: Worker) -> None:
    wrong = []

    def work(i: int) -> None:
        for k in range(50):
            name = f"n{i}-{k}"
            if match(child, patterns=["x", name], names=[name]) != [1]:
                wrong.append(name)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not wrong
    assert child.starts == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_a_worker_of_its_own(child: Worker) -> None:
    match(child, **QUICK)
    pid = os.fork()
    if pid == 0:
        try:
            is_right = match(child, **QUICK) == [1, -1]
            child.close()
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert match(child, **QUICK) == [1, -1]
    assert child.starts == 1


@LINUX
def test_a_worker_inherits_no_secrets_and_writes_no_files(child: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    match(child, **QUICK)
    assert child._process is not None
    pid = child._process.pid
    with open(f"/proc/{pid}/environ", "rb") as opened:
        assert b"secret" not in opened.read()
    with open(f"/proc/{pid}/limits") as opened:
        limits = {line[:25].strip(): line[25:].split()[0] for line in opened}
    assert limits["Max file size"] == limits["Max core file size"] == "0"
    assert int(limits["Max cpu time"]) < 5
    with open(f"/proc/{pid}/statm") as opened:
        taken = int(opened.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    assert int(limits["Max address space"]) < taken + (220 << 20)
    assert os.getsid(pid) != os.getsid(0)


def test_a_worker_ends_with_its_parent() -> None:
    program = (
        "from cupy_awq.sandbox.worker import shared; shared().call('match', patterns=[], names=[]);"
        " print(shared()._process.pid, flush=True); import os; os._exit(1)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    pid = int(result.stdout)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and is_running(pid):
        time.sleep(0.05)
    assert not is_running(pid)


@pytest.mark.parametrize("wait", [0.0, 0.05, 0.2])
def test_a_program_that_ends_while_a_worker_starts_prints_nothing(wait: float) -> None:
    program = f"import time; from cupy_awq.llm.text import chat_template; chat_template.prepare(); time.sleep({wait})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_process_that_is_closed_while_it_starts_is_a_limit_error(child: Worker) -> None:
    threading.Timer(0.01, child.close).start()
    with contextlib.suppress(LimitError):
        match(child, **QUICK)
    assert match(child, **QUICK) == match(child, **QUICK)


def test_a_worker_that_is_no_longer_used_ends() -> None:
    child = Worker()
    match(child, **QUICK)
    assert child._process is not None
    pid = child._process.pid
    del child
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    if sys.platform == "win32":
        return f" {pid} " in subprocess.run(["tasklist"], capture_output=True, text=True, check=True).stdout
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as opened:  # a zombie (state Z) counts as ended
            return opened.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_program_without_a_main_guard_can_use_a_worker() -> None:
    """A program without `if __name__ == "__main__"` can use the worker: its main module is not run again.

    multiprocessing would run it.
    """
    program = (
        "from cupy_awq.sandbox.worker import shared\nprint(shared().call('match', patterns=['a'], names=['a'])[0])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[0]\n"
    assert result.stderr == ""


def test_a_long_reply_and_a_long_request_pass_the_pipes(child: Worker) -> None:
    text = "é\ud800\n" * 1_000_000
    assert child.call("render", template="{{ x }}", variables={"x": text}, max_characters=len(text)) == text


def test_a_worker_that_cannot_start_is_an_error(child: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "START", "raise SystemExit(5) #{path}")
    with pytest.raises(LimitError, match=r"expected a worker process of .* to start, got none"):
        match(child, **QUICK)
    monkeypatch.undo()
    assert match(child, **QUICK) == [1, -1]
