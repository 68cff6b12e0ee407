# SPDX-License-Identifier: Apache-2.0
"""The time of a call: on a GPU the median of CUDA graph replays, on the CPU the median of runs."""

from __future__ import annotations

import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cupy_awq.check import HOST

Call = Callable[[], object]

SAMPLES = 7
"""The number of samples; their median is returned."""
WARM_MS = 60.0
"""The length of the same work right before the samples, in milliseconds: a GPU raises its clocks under load."""
CPU_SECONDS = 0.2
"""The least total length of the samples on the CPU."""


def time_calls(calls: Sequence[Call], device: int) -> float:
    """Return the median microseconds of one call on a GPU, which must be current, or on the CPU (HOST)."""
    return on_cpu(calls) if device == HOST else on_gpu(calls)


def on_cpu(calls: Sequence[Call]) -> float:
    """Return the median microseconds of one call on the CPU; the calls take turns.

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
    """Return the median microseconds of one call on the current GPU.

    The calls take turns in a batch of at least 20 (fewer if they are long), captured as one CUDA graph. They must write
    to existing arrays. CuPy refuses to capture cuBLAS: with ``graph=False`` a host function holds the stream until the
    whole batch is queued, so that no host time is measured either, only the slightly wider gaps between launches.
    """
    import cupy

    device = cupy.cuda.Device()
    device.synchronize()  # a non-blocking stream does not wait for work of the default stream
    stream = _stream(device.id)
    with stream:
        for call in calls:
            call()  # the first call compiles and allocates
        begin = stream.record()
        for call in calls:
            call()
        guess = _milliseconds(begin, stream.record()) / len(calls)
        batch = list(calls) * (math.ceil(20 / len(calls)) if guess < 1 else 1)
        samples = _replayed(stream, batch) if graph else _queued(stream, batch)
    return statistics.median(samples) / len(batch) * 1e3


@functools.cache
def _stream(device: int) -> Any:
    """Return the one stream for all measurements on a GPU: memory pools and workspaces belong to a stream."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def _milliseconds(begin: Any, end: Any) -> float:
    import cupy

    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end))


def _warm_runs(once: float) -> int:
    return min(600, math.ceil(WARM_MS / max(once, 1e-3)))


def _replayed(stream: Any, batch: Sequence[Call]) -> list[float]:
    """Return the milliseconds of graph replays; each is launched while the previous one runs, so no gap is timed."""
    stream.begin_capture()
    for call in batch:
        call()
    graph = stream.end_capture()
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
    """Return the milliseconds of the batch, queued each time behind a host function that holds the stream."""

    def sample() -> float:
        launched = threading.Event()
        # The limit of a second only matters if a launch itself waits for the stream.
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
    """Return whether CuPy finds cuBLAS (the extra ``blas``)."""
    try:
        import cupy.cublas  # noqa: F401
    except (ImportError, OSError):
        return False
    return True
