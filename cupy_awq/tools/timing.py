# SPDX-License-Identifier: Apache-2.0
"""Timing of functions: the median over CUDA graph replays on a GPU, or over single calls on the CPU."""

from __future__ import annotations

import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cupy_awq.check import HOST
from cupy_awq.runtime.graph import capture

Call = Callable[[], object]

SAMPLES = 7
"""The number of samples whose median is returned; on the CPU, the smallest number of samples."""
WARM_MS = 60.0
"""The warm-up time in milliseconds: the timed work runs this long before the first sample, so that GPU clocks rise."""
CPU_SECONDS = 0.2
"""The minimum total time of all samples on the CPU, in seconds."""


def time_calls(calls: Sequence[Call], device: int) -> float:
    """Return the median time per call in microseconds, on the current GPU or on the CPU if ``device`` is HOST."""
    return on_cpu(calls) if device == HOST else on_gpu(calls)


def on_cpu(calls: Sequence[Call]) -> float:
    """Return the median time per call on the CPU in microseconds; the functions are called in alternation.

    >>> on_cpu([lambda: sum(range(1000))]) > 0
    True
    """
    calls[0]()
    times: list[float] = []
    while len(times) < SAMPLES or sum(times) < CPU_SECONDS:
        call = calls[len(times) % len(calls)]
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def on_gpu(calls: Sequence[Call], *, graph: bool = True) -> float:
    """Return the median time per call on the current GPU in microseconds.

    The functions are called in alternation. A batch of at least 20 calls (fewer if a call takes 1 ms or more) is
    captured as one CUDA graph, so calls must not allocate memory. CuPy cannot capture cuBLAS calls;
    for these, ``graph=False`` uses no graph: a host function blocks the stream until the whole batch is queued. This
    also excludes the host time, but the gaps between kernels are slightly longer.
    """
    import cupy

    device = cupy.cuda.Device()
    device.synchronize()  # a non-blocking stream does not wait for work on the default stream
    stream = _stream(device.id)
    with stream:
        for call in calls:
            call()  # before the capture: the first call compiles kernels and allocates memory
        begin = stream.record()
        for call in calls:
            call()
        guess = _milliseconds(begin, stream.record()) / len(calls)
        batch = list(calls) * (math.ceil(20 / len(calls)) if guess < 1 else 1)
        samples = _replayed(stream, batch) if graph else _queued(stream, batch)
    return statistics.median(samples) / len(batch) * 1e3


@functools.cache
def _stream(device: int) -> Any:
    """Return the stream for all measurements on a GPU; using a single stream reuses memory pools and workspaces."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def _milliseconds(begin: Any, end: Any) -> float:
    import cupy

    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end))


def _warm_runs(once: float) -> int:
    return min(600, math.ceil(WARM_MS / max(once, 1e-3)))


def _replayed(stream: Any, batch: Sequence[Call]) -> list[float]:
    """Return the times of graph replays in milliseconds; each replay is launched while the preceding one runs."""

    def launch() -> None:
        for call in batch:
            call()  # its result is freed at once, so that the next call reuses the memory

    graph = capture(stream, launch)
    begin = stream.record()
    graph.launch(stream)
    for _ in range(_warm_runs(_milliseconds(begin, stream.record()))):
        graph.launch(stream)
    pairs = []
    for _ in range(SAMPLES):
        begin = stream.record()
        graph.launch(stream)
        pairs.append((begin, stream.record()))
    return [_milliseconds(begin, end) for begin, end in pairs]


def _queued(stream: Any, batch: Sequence[Call]) -> list[float]:
    """Return the times of the batch in milliseconds; a host function blocks the stream until the batch is queued."""

    def sample() -> float:
        launched = threading.Event()
        # The timeout of one second prevents a deadlock if a launch itself waits for the stream.
        stream.launch_host_func(lambda _: launched.wait(1.0), None)
        begin = stream.record()
        for call in batch:
            call()
        end = stream.record()
        launched.set()
        return _milliseconds(begin, end)

    for _ in range(_warm_runs(sample())):
        sample()
    return [sample() for _ in range(SAMPLES)]


def cublas() -> bool:
    """Return whether CuPy can import cuBLAS, which the extra ``blas`` installs."""
    try:
        import cupy.cublas  # noqa: F401
    except (ImportError, OSError):
        return False
    return True
