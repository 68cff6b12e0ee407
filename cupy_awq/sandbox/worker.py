# SPDX-License-Identifier: Apache-2.0
"""`Worker`: a child process that runs the functions of `cupy_awq.sandbox.program` under limits of memory and time.

The operating system enforces the limits, so no list of costly operations is needed. On Linux the process ends when it
exceeds `MEMORY_BYTES` or the CPU seconds of a call; on macOS, which ignores limits of address space, only the CPU
seconds are enforced; on Windows, only the time on the clock. Requests and replies are JSON over pipes: a reply cannot
construct objects. The next call after a limit starts a new process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import struct
import subprocess
import sys
import threading
import weakref
from typing import Any

from cupy_awq.sandbox.program import MEMORY_EXIT

MEMORY_BYTES = 160 << 20
"""The address space of a worker in bytes beyond what Python takes; `MEMORY_PER_BYTE` times the request is added."""

MEMORY_PER_BYTE = 128
"""The address space in bytes per byte of a request: a token of a few characters takes 200 bytes and more."""

MEMORY_LIMIT = 400 << 20
"""The largest address space in bytes of a call, however long its request."""

CPU_SECONDS = 1.0
"""The CPU time that a call may take, in seconds, plus that for the size of its request."""

BYTES_PER_SECOND = 1 << 23
"""The bytes of a request that add one second to its limits of time."""

CLOCK_SECONDS = 1.5 if sys.platform == "win32" else 20.0
"""The seconds on the clock that are added to the CPU time of a call. The sum is the only limit on Windows."""

POLLS = hasattr(select, "poll")
"""Whether the system can wait for a pipe for a limited time; on Windows, a timer kills the process instead."""

START_SECONDS = 60
"""The time in seconds in which a worker must have started."""

REPLY_BYTES = 1 << 28
"""The size in bytes above which a reply is refused."""

ENVIRONMENT = ("LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "SYSTEMROOT", "TZ")
"""The environment variables that a worker inherits. Others, which can contain secrets, stay out of it."""

START = "import sys; sys.path[:] = {path!r}; from cupy_awq.sandbox import program; program.main()"


class LimitError(ValueError):
    """The error for a call that exceeds a limit, or that crashes the worker."""


class ProgramError(ValueError):
    """The error that a function raised in the worker. Attribute ``kind``: the name of its exception's class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Worker:
    """A worker process that is started by the first call. Threads may share it; it runs one call at a time.

    Args:
        memory: the address space in bytes beyond what Python takes.

    Attributes:
        starts: the number of processes that have been started.
    """

    def __init__(self, memory: int = MEMORY_BYTES) -> None:
        self.starts = 0
        self._memory = memory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_idle = False  # False also after an interrupted call, whose reply could still come
        _workers.add(self)

    def call(self, function: str, /, *, cpu_seconds: float = CPU_SECONDS, **arguments: Any) -> Any:
        """Return the result of a function of `program.FUNCTIONS`.

        Args:
            function: the name of the function.
            cpu_seconds: the CPU time in seconds; a second is added for each `BYTES_PER_SECOND` of the arguments.
            arguments: the arguments, of types that JSON has.

        Raises:
            LimitError: the call exceeds a limit or crashes the process. The next call starts a new process.
            ProgramError: the function raised an exception.
        """
        body = json.dumps(arguments).encode("ascii")
        seconds = cpu_seconds + len(body) / BYTES_PER_SECOND
        memory = min(self._memory + MEMORY_PER_BYTE * len(body), MEMORY_LIMIT)
        header = json.dumps({"function": function, "cpu": seconds, "memory": memory}).encode("ascii")
        with self._lock:
            process = self._start()
            reply = self._exchange(process, [header, body], CLOCK_SECONDS + seconds)
            if reply is None:
                raise LimitError(_describe_end(process.wait(), seconds, memory))
        if "error" in reply:
            raise ProgramError(*reply["error"])
        return reply["result"]

    def close(self) -> None:
        """End the process, if it runs. The next call starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # closing fails if a part of a request was never read
                        pipe.close()

    def __del__(self) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        """Return the running process. Raises LimitError if it cannot be started."""
        error = f"expected a worker process of {sys.executable!r} to start, got none"
        if self._process is not None and self._is_idle and self._process.poll() is None:
            return self._process
        self.close()
        path = [os.path.abspath(entry) for entry in sys.path]
        inherited = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        self.starts += 1
        try:
            process = self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", START.format(path=path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"RAYON_NUM_THREADS": "1", **inherited},
                # Ctrl-C at the terminal must not reach the process: a session or, on Windows, a console of its own.
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as reason:
            raise LimitError(f"{error}: {reason}") from None
        if self._exchange(process, [], START_SECONDS) is None:
            raise LimitError(error)
        return process

    def _exchange(self, process: subprocess.Popen[bytes], frames: list[bytes], seconds: float) -> Any:
        """Send frames and return the reply, or None if the process has ended, after ``seconds`` by a kill.

        On any exception, such as Ctrl-C, the process ends too.
        """
        self._is_idle = False
        timer = None
        try:
            if not POLLS:
                timer = threading.Timer(seconds, process.kill)
                timer.start()
            reply = _converse(process.stdin, process.stdout, frames, seconds)
            self._is_idle = reply is not None
            return reply
        finally:
            if timer is not None:
                timer.cancel()
            if not self._is_idle:
                self.close()


def _converse(stdin: Any, stdout: Any, frames: list[bytes], seconds: float) -> Any:
    """Write frames to a process and return its reply.

    Return None if a pipe has been closed, also by `_close_all` when this process ends and a thread of it still waits,
    or, if `POLLS`, if no reply begins within ``seconds``.
    """
    try:
        for frame in frames:
            stdin.write(struct.pack("<I", len(frame)))
            stdin.write(frame)
        stdin.flush()
        if POLLS:
            poll = select.poll()
            poll.register(stdout, select.POLLIN)
            if not poll.poll(1000 * seconds):
                return None
        head = stdout.read(4)
        if len(head) < 4:
            return None
        (size,) = struct.unpack("<I", head)
        body = stdout.read(size) if size <= REPLY_BYTES else b""
    except (BrokenPipeError, ConnectionError, ValueError):  # ValueError: the pipe is closed on this side
        return None
    return json.loads(body) if len(body) == size else None


def _describe_end(code: int, seconds: float, memory: int) -> str:
    """Return the message for a worker process that ended with an exit code or, if negative, by a signal."""
    if code == MEMORY_EXIT or -code in (6, 11):  # SIGABRT or SIGSEGV: out of memory or stack
        return f"expected at most {memory >> 20} MiB of memory, got more"
    if code < 0 or sys.platform == "win32":
        return f"expected at most {seconds:.1f} s of CPU time, got more"
    return f"expected a result, got the exit code {code} of the worker process"


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@functools.cache
def shared() -> Worker:
    """Return the worker for calls that leave no state in it: templates and regular expressions."""
    return Worker()


@atexit.register
def _close_all() -> None:
    for worker in list(_workers):
        worker.close()


def _forget_all() -> None:
    """Leave the processes to the parent after a fork: two processes must not talk to one worker."""
    for worker in list(_workers):
        worker._lock, worker._process = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
