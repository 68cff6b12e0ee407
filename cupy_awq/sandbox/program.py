# SPDX-License-Identifier: Apache-2.0
"""The program of the worker process: it receives requests on standard input and sends replies on standard output.

A message is a length of 4 bytes and a JSON text. A request is two messages: the function with its limits, and the
arguments. A reply is {"result": value} or {"error": [name of the exception's class, text]}. The process ends when
standard input ends.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

MEMORY_EXIT = 3
"""The exit code of a process that has no memory left."""

LIBRARY_BYTES = 48 << 20
"""The address space in bytes that jinja2 and tokenizers take when they are imported, about 25 MB."""

MAX_ERROR = 2000
"""The largest length of an error's text in characters."""

_patterns: dict[str, re.Pattern[str]] = {}


def match(patterns: list[str], names: list[str]) -> tuple[list[int], float]:
    """Return, for each name, the index of the first regular expression that matches at its start, or -1.

    The second value is the CPU time in seconds.
    """
    began = time.process_time()
    if len(_patterns) > 10_000:
        _patterns.clear()
    compiled = [_patterns.get(text) or _patterns.setdefault(text, re.compile(text)) for text in patterns]
    found = [next((i for i, pattern in enumerate(compiled) if pattern.match(name)), -1) for name in names]
    return found, time.process_time() - began


def render(**arguments: Any) -> str:
    """Return the text of a conversation; see `cupy_awq.sandbox.template.render`."""
    from cupy_awq.sandbox import template

    return template.render(**arguments)


def load_tokenizer(**arguments: Any) -> dict[str, Any]:
    """Load the only tokenizer of this process; see `cupy_awq.sandbox.encoder`."""
    from cupy_awq.sandbox import encoder

    return encoder.load(**arguments)


def use_tokenizer(method: str, **arguments: Any) -> tuple[Any, float]:
    """Call a method of the loaded tokenizer; the second value is the CPU time in seconds."""
    from cupy_awq.sandbox import encoder

    began = time.process_time()
    return getattr(encoder.loaded(), method)(**arguments), time.process_time() - began


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (match, render, load_tokenizer, use_tokenizer)
}


def main() -> None:
    """Serve requests until standard input ends, which it also does if the parent process dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print must not reach the pipe of replies
    limit = _make_limiter()
    _send(replies, {"result": None})
    try:
        while (header := _receive(requests)) is not None:
            limit(header["cpu"], header["memory"])
            _send(replies, _run(FUNCTIONS[header["function"]], _receive(requests)))
    except MemoryError:
        os._exit(MEMORY_EXIT)


def _run(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": function(**arguments)}
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust code is no Exception, but a BaseException
        return {"error": [type(error).__name__, str(error)[:MAX_ERROR]]}


def _receive(pipe: BinaryIO) -> Any:
    head = pipe.read(4)
    if len(head) < 4:
        return None
    return json.loads(pipe.read(struct.unpack("<I", head)[0]))


def _send(pipe: BinaryIO, reply: Any) -> None:
    body = json.dumps(reply).encode("ascii")
    pipe.write(struct.pack("<I", len(body)) + body)
    pipe.flush()


def _make_limiter() -> Callable[[float, int], None]:
    """Return a function that sets the limits of the next call: CPU seconds, and address space in bytes."""
    try:
        import resource
    except ImportError:  # Windows has no module ``resource``, which sets the limits
        return lambda seconds, memory: None
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (0, 0))
    _, most_seconds = resource.getrlimit(resource.RLIMIT_CPU)
    _, most_bytes = resource.getrlimit(resource.RLIMIT_AS)
    base = _measure_address_space()

    def smaller(value: int, most: int) -> int:
        return value if most == resource.RLIM_INFINITY else min(value, most)

    def limit(seconds: float, memory: int) -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process; RLIMIT_CPU has whole seconds
        usage = resource.getrusage(resource.RUSAGE_SELF)
        most = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (smaller(most, most_seconds), most_seconds))
        if base is not None:
            limit_bytes = smaller(base + LIBRARY_BYTES + memory, most_bytes)
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, most_bytes))

    return limit


def _measure_address_space() -> int | None:
    """Return the address space of this process in bytes, or None where it cannot be limited, as on macOS."""
    try:
        with open("/proc/self/statm") as opened:
            return int(opened.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
