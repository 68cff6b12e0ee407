# SPDX-License-Identifier: Apache-2.0
"""Run layers from many threads for a long time, under memory pressure, and compare each result with the first one.

    python -m tests.tools.soak --seconds 600
    python -m tests.tools.soak --seconds 20 --threads 2 --device cpu

Each thread picks a layer, a number of rows and a way to call it at random: the layer, `gemm`, a plan, or on a GPU a
captured graph; on a GPU each thread has a stream. One allocation in `--failures` fails; the call must raise MemoryError
or return the right bits. The exit code is 1 if any result has other bits, any other error is raised, or memory grows.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import cupy_awq
from cupy_awq import AwqLinear, PackedWeight
from cupy_awq.check import HOST
from cupy_awq.runtime import placement
from cupy_awq.tools.testing import random_activations, random_weight

SHAPES = ((128, 64, 32), (576, 1536, 64), (1536, 576, 64), (4096, 1024, 128))
"""The weights' (K, N, group size)."""
ROWS = (1, 2, 5, 16, 33, 100, 300)
MAX_GROWTH_BYTES = 64 * 2**20
"""The memory that may be in use after the second half of the run, above that after the first half."""

Call = Callable[[], Any]


class Job:
    """One combination of a weight, rows and a way to call, with the bits of its first result."""

    def __init__(self, name: str, call: Call) -> None:
        self.name = name
        self.call = call
        self.expected = to_bytes(call())


def to_bytes(y: Any) -> bytes:
    """Return the bits of a result; on a GPU this waits for the current stream."""
    return (y.get() if hasattr(y, "get") else y).tobytes()


def make_jobs(device: int, seed: int) -> list[Job]:
    """Return jobs for all shapes, with weights and arrays of their own."""
    rng = np.random.default_rng(seed)
    jobs = []
    for k, n, group_size in SHAPES:
        weight = PackedWeight(*(_place(a, device) for a in _tensors(random_weight(rng, k, n, group_size))))
        jobs += jobs_of(weight, device, rng)
    return jobs


def _tensors(weight: PackedWeight) -> tuple[Any, ...]:
    return weight.qweight, weight.scales, weight.qzeros


def _place(a: Any, device: int) -> Any:
    return placement.to_device(a, device)


def jobs_of(weight: PackedWeight, device: int, rng: np.random.Generator) -> list[Job]:
    """Return a weight's jobs for all rows."""
    layer = AwqLinear(weight, activation="silu")
    int8 = AwqLinear(weight, x_dtype="int8")
    jobs = []
    for m in ROWS if device != HOST else ROWS[:4]:
        x = _place(random_activations(rng, m, weight.shape[0]), device)
        out = _place(np.zeros((m, weight.shape[1]), np.float16), device)
        calls: dict[str, Call] = {
            "layer": lambda x=x: layer(x),
            "layer into out": lambda x=x, out=out: layer(x, out=out),
            "int8": lambda x=x: int8(x),
            "gemm": lambda x=x: cupy_awq.gemm(x, *_tensors(weight)),
            "plan": lambda x=x, out=out: cupy_awq.plan(x, weight)(x, out),
        }
        if device != HOST:
            calls["graph"] = capture(weight, x, out)
        jobs += [Job(f"{name} of {m} x {weight}", call) for name, call in calls.items()]
    return jobs


def capture(weight: PackedWeight, x: Any, out: Any) -> Call:
    """Return a replay of a captured plan, whose workspace is its own."""
    import cupy

    plan = cupy_awq.plan(x, weight, out=out)
    stream = cupy.cuda.get_current_stream()
    stream.begin_capture()
    plan(x, out)
    graph = stream.end_capture()

    def replay(plan: Any = plan) -> Any:  # the plan's workspace must live as long as the graph
        graph.launch()
        return out

    return replay


@contextmanager
def failing_allocations(device: int, every: int, random: np.random.Generator) -> Iterator[None]:
    """Let one in ``every`` device allocations of this thread raise OutOfMemoryError; 0 for none, as on the CPU."""
    if device == HOST or not every:
        yield
        return
    import cupy

    pool = cupy.get_default_memory_pool()

    def allocate(size: int) -> Any:
        if random.integers(every) == 0:
            raise cupy.cuda.memory.OutOfMemoryError(size, pool.total_bytes(), 0)
        return pool.malloc(size)

    with cupy.cuda.using_allocator(allocate):
        yield


@contextmanager
def on_a_stream(device: int) -> Iterator[None]:
    """Make a new stream of the device current."""
    if device == HOST:
        yield
        return
    import cupy

    with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True):
        yield


def used_bytes(device: int) -> int:
    """Return the bytes in use: of CuPy's pool, or of this process on the CPU."""
    if device != HOST:
        import cupy

        return int(cupy.get_default_memory_pool().used_bytes())
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


class Soak:
    """A run of several threads.

    Attributes:
        counts: the calls by their outcome.
        faults: what went wrong, in words.
    """

    def __init__(self, device: int, failures: int) -> None:
        self.device, self.failures = device, failures
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._lock = threading.Lock()
        self._shared = make_jobs(device, 0)
        self._ready: threading.Barrier | None = None
        self._end = 0.0

    def run(self, threads: int, seconds: float) -> None:
        """Run the threads for some seconds and compare the memory in use at half time and at the end."""
        self._ready = threading.Barrier(threads + 1)
        workers = [threading.Thread(target=self._work, args=(seed,), daemon=True) for seed in range(1, threads + 1)]
        for worker in workers:
            worker.start()
        self._end = float("inf")
        self._ready.wait()
        start = time.monotonic()
        self._end = start + seconds
        time.sleep(seconds / 2)
        half = used_bytes(self.device)
        for worker in workers:
            worker.join()
        growth = used_bytes(self.device) - half
        print(f"memory in use: {half / 1e6:.1f} MB at half time, {growth / 1e6:+.1f} MB at the end")
        if growth > MAX_GROWTH_BYTES:
            self.faults.append(f"memory: expected growth of at most {MAX_GROWTH_BYTES} bytes, got {growth}")

    def _work(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        assert self._ready is not None
        with on_a_stream(self.device):
            try:
                with self._lock:  # no thread may allocate while another one captures
                    own = make_jobs(self.device, seed)
                # Graphs and outputs belong to one thread; a layer without an ``out`` serves all threads.
                jobs = own + [job for job in self._shared if job.name.startswith(("layer of", "int8", "gemm"))]
            finally:
                self._ready.wait()
            for _ in itertools.takewhile(lambda _: time.monotonic() < self._end, itertools.count()):
                self._call(jobs[int(random.integers(len(jobs)))], random)

    def _call(self, job: Job, random: np.random.Generator) -> None:
        fault = ""
        try:
            with failing_allocations(self.device, self.failures, random):
                y = job.call()
            outcome = "right" if to_bytes(y) == job.expected else "wrong"
            fault = f"{job.name}: expected the bits of the first call, got others" if outcome == "wrong" else ""
        except MemoryError:
            outcome = "out of memory"
        except Exception as error:  # any other error is a fault to report
            outcome, fault = "error", f"{job.name}: expected a result or MemoryError, got {error!r}"
        with self._lock:
            self.counts[outcome] += 1
            self.faults += [fault] if fault else []


def main() -> int:
    """Parse the arguments, run, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, required=True, help="how long to run")
    parser.add_argument("--threads", type=int, default=8, help="(default: 8)")
    parser.add_argument("--failures", type=int, default=50, help="one allocation in this many fails (default: 50)")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="(default: the GPU if there is one)")
    arguments = parser.parse_args()
    device = placement.resolve("cpu" if arguments.device == "cpu" else None)
    soak = Soak(device, arguments.failures)
    soak.run(arguments.threads, arguments.seconds)
    print(f"{placement.device_name(device)}, {arguments.threads} threads, {arguments.seconds:g} s: {dict(soak.counts)}")
    print("\n".join(soak.faults[:20]))
    return 1 if soak.faults or not soak.counts["right"] else 0


if __name__ == "__main__":
    sys.exit(main())
