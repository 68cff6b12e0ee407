# SPDX-License-Identifier: Apache-2.0
"""Call operations from many threads for a long time, under memory pressure, and compare each result with the first one.

    python -m tests.tools.soak --seconds 600
    python -m tests.tools.soak --seconds 20 --threads 2 --device cpu

Each thread picks an operation, a weight, a number of rows and a stream at random: a layer (also a new one), `gemm`, a
plan, on a GPU a CUDA graph (also a new one), an int8 or float8 layer, `dequantize`, a convolution, or `generate` with a
small language model. One allocation in `--failures` fails; the call must raise MemoryError or return the right bits.
The exit code is 1 if a result has other bits, any other error is raised, or memory grows. Only the memory of this
process is judged, so that other processes may use the same GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import cupy_awq
from cupy_awq import AwqLinear, BlockQuantizedWeight, PackedWeight, llm
from cupy_awq.check import HOST
from cupy_awq.runtime import device as devices
from cupy_awq.runtime import placement
from cupy_awq.tools.testing import random_activations, random_weight
from tests import llm_models

SHAPES = ((128, 64, 32), (576, 1536, 64), (1536, 576, 64), (4096, 1024, 128))
"""The (K, N, group size) of each weight."""
ROWS = (1, 2, 5, 16, 33, 100, 300)
STREAMS = 2
"""The number of streams per thread, besides the default stream, which all threads share."""
MAX_GROWTH_BYTES = 64 * 2**20
"""The largest excess, in bytes, of the second half's peak memory over the first half's."""

Call = Callable[[], Any]


class Job:
    """A call of one operation with fixed arguments, and the bits that its results must have: those of the first."""

    def __init__(self, name: str, call: Call) -> None:
        self.name = name
        self.call = call
        self.expected = to_bytes(call())

    @property
    def operation(self) -> str:
        """The operation's name, which is the job's name without its sizes ("gemm of 4 x 128": "gemm")."""
        return self.name.partition(" of ")[0]


def to_bytes(y: Any) -> bytes:
    """Return the bits of a result; on a GPU this waits for the current stream."""
    return y.encode() if isinstance(y, str) else (y.get() if hasattr(y, "get") else y).tobytes()


def make_jobs(device: int, seed: int) -> list[Job]:
    """Return a job for every operation and shape, on weights, arrays and a model that belong to these jobs alone."""
    rng = np.random.default_rng(seed)
    jobs = [*_make_convolutions(device, rng), *_make_generation(device, seed)]
    for k, n, group_size in SHAPES:
        weight = PackedWeight(*(_place(a, device) for a in _tensors(random_weight(rng, k, n, group_size))))
        jobs += _make_products(weight, device, rng)
    return jobs


def _tensors(weight: PackedWeight) -> tuple[Any, ...]:
    return weight.qweight, weight.scales, weight.qzeros


def _place(a: Any, device: int) -> Any:
    return placement.to_device(a, device)


def _make_products(weight: PackedWeight, device: int, rng: np.random.Generator) -> list[Job]:
    """Return the jobs of all operations on one weight, for each number of rows of x."""
    layer = AwqLinear(weight, activation="silu")
    integer = {"int8": AwqLinear(weight, x_dtype="int8")}
    if device == HOST or devices.of(device).arch >= 89:
        integer["fp8"] = AwqLinear(weight, x_dtype="fp8")
    jobs = [Job(f"dequantize of {weight}", lambda: cupy_awq.dequantize(*_tensors(weight)))]
    for m in ROWS if device != HOST else ROWS[:4]:
        x = _place(random_activations(rng, m, weight.shape[0]), device)
        out = _place(np.zeros((m, weight.shape[1]), np.float16), device)
        calls: dict[str, Call] = {
            "layer": lambda x=x: layer(x),
            "layer into out": lambda x=x, out=out: layer(x, out=out),
            "new layer": lambda x=x: AwqLinear(weight)(x),
            "gemm": lambda x=x: cupy_awq.gemm(x, *_tensors(weight)),
            "plan": lambda x=x, out=out: cupy_awq.plan(x, weight)(x, out),
            **{name: lambda x=x, quantized=quantized: quantized(x) for name, quantized in integer.items()},
        }
        if device != HOST:
            calls["graph"] = _capture(weight, x, out)
            calls["new graph"] = lambda x=x, out=out: _capture(weight, x, out)()
        jobs += [Job(f"{name} of {m} x {weight}", call) for name, call in calls.items()]
    return jobs


def _make_convolutions(device: int, rng: np.random.Generator) -> list[Job]:
    codes = rng.integers(0, 16, (32, 3, 3, 16), np.uint8)
    filters = BlockQuantizedWeight(_place(codes, device), _place(np.ones((32, 1), np.float16), device), None)
    images = rng.standard_normal((2, 16, 14, 14))
    x, x_int8 = _place(images.astype(np.float16), device), _place((50 * images).astype(np.int8), device)
    codes_int8, scale = _place(codes.view(np.int8), device), _place(np.ones(32, np.float32), device)
    return [
        Job("conv2d of 14 x 14", lambda: cupy_awq.conv2d(x, filters, padding=1)),
        Job("conv2d_int8 of 14 x 14", lambda: cupy_awq.conv2d_int8(x_int8, codes_int8, scale, x_scale=1, out_scale=99)),
    ]


def _make_generation(device: int, seed: int) -> list[Job]:
    with tempfile.TemporaryDirectory() as folder:
        model = llm.load(llm_models.folder(Path(folder), llm_models.QWEN3), device="cpu" if device == HOST else device)
    prompts = [f"{seed} abc", "a longer prompt than the first"]
    return [Job("generate of 2", lambda: repr([found.tokens for found in model.generate(prompts, max_tokens=6)]))]


def _capture(weight: PackedWeight, x: Any, out: Any) -> Call:
    """Return a function that replays a captured plan with a workspace of its own."""
    import cupy

    plan = cupy_awq.plan(x, weight, out=out)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        plan(x, out)
        graph = stream.end_capture()

    def replay(plan: Any = plan) -> Any:  # The plan, which owns the workspace, must live as long as the graph.
        graph.launch(cupy.cuda.get_current_stream())
        return out

    return replay


@contextmanager
def failing_allocations(device: int, every: int, random: np.random.Generator) -> Iterator[None]:
    """Let one in ``every`` device allocations of this thread raise OutOfMemoryError; 0 for none."""
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


def used_bytes(device: int) -> dict[str, int]:
    """Return the memory of this process in bytes by kind: resident host memory, and CuPy's pool on a GPU."""
    status = Path("/proc/self/statm")
    used = {"host": int(status.read_text().split()[1]) * 4096 if status.exists() else 0}
    if device != HOST:
        import cupy

        pool = cupy.get_default_memory_pool()
        used |= {"arrays": int(pool.used_bytes()), "pool": int(pool.total_bytes())}
    return used


class Soak:
    """A run with several threads.

    Attributes:
        counts: the number of calls by outcome.
        operations: the number of right results by operation.
        faults: descriptions of all errors.
        growth: the excess of the second half's peak memory over the first half's in bytes, by kind of memory.
    """

    def __init__(self, device: int, failures: int) -> None:
        self.device, self.failures = device, failures
        self.counts: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.faults: list[str] = []
        self.growth: dict[str, int] = {}
        self._lock = threading.Lock()
        with self._on_device():
            self._shared = make_jobs(device, 0)
        self._ready: threading.Barrier | None = None
        self._end = 0.0

    def _on_device(self) -> Any:
        return placement.use_device(self.device)

    def run(self, threads: int, seconds: float) -> None:
        """Run the threads for some seconds, and print progress lines on stderr."""
        self._ready = threading.Barrier(threads + 1)
        workers = [threading.Thread(target=self._work, args=(seed,), daemon=True) for seed in range(1, threads + 1)]
        for worker in workers:
            worker.start()
        self._end = float("inf")
        self._ready.wait()
        start = time.monotonic()
        self._end = start + seconds
        peaks: list[Counter[str]] = [Counter(), Counter()]
        shown = 0.0
        while (elapsed := time.monotonic() - start) < seconds:
            peaks[elapsed > seconds / 2] |= Counter(used_bytes(self.device))
            if elapsed - shown >= max(2.0, seconds / 40):
                shown = elapsed
                print(f"soak: {elapsed:.0f} of {seconds:g} s: {self.describe()}", file=sys.stderr, flush=True)
            time.sleep(min(0.2, seconds / 20))
        for worker in workers:
            worker.join()
        self.growth = {kind: peak - peaks[0][kind] for kind, peak in peaks[1].items()}
        for kind, growth in self.growth.items():
            if growth > MAX_GROWTH_BYTES:
                self.faults.append(f"{kind} memory: expected growth of at most {MAX_GROWTH_BYTES} bytes, got {growth}")

    def describe(self) -> str:
        """Return one line with the number of calls by outcome and the growth of memory."""
        with self._lock:
            counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.counts.items()))
            faults = len(self.faults)
        used = ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in used_bytes(self.device).items())
        return f"{counts}, {faults} faults; {used}"

    def _work(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        assert self._ready is not None
        with self._on_device():
            try:
                # Hold the lock while the first calls load their kernels: otherwise all threads would compile the same
                # ones.
                with self._lock:
                    own = make_jobs(self.device, seed)
                # A captured graph, an output array or a model may serve one thread at a time; a layer without ``out``
                # serves all.
                alone = {"layer into out", "plan", "graph", "new graph", "generate"}
                jobs: dict[str, list[Job]] = {}
                for job in own + [job for job in self._shared if job.operation not in alone]:
                    jobs.setdefault(job.operation, []).append(job)
                streams = self._make_streams()
            finally:
                self._ready.wait()
            while time.monotonic() < self._end:
                choices = jobs[list(jobs)[random.integers(len(jobs))]]
                with streams[random.integers(len(streams))]:
                    self._call(choices[random.integers(len(choices))], random)

    def _make_streams(self) -> list[Any]:
        if self.device == HOST:
            return [placement.use_device(HOST)]
        import cupy

        return [cupy.cuda.Stream.null, *(cupy.cuda.Stream(non_blocking=True) for _ in range(STREAMS))]

    def _call(self, job: Job, random: np.random.Generator) -> None:
        fault = ""
        try:
            with failing_allocations(self.device, self.failures, random):
                y = job.call()
            outcome = "right" if to_bytes(y) == job.expected else "wrong"
            fault = f"{job.name}: expected the bits of the first call, got others" if outcome == "wrong" else ""
        except MemoryError:
            outcome = "out of memory"
        except Exception as error:  # a call may raise nothing but MemoryError
            outcome, fault = "error", f"{job.name}: expected a result or MemoryError, got {error!r}"
        with self._lock:
            self.counts[outcome] += 1
            self.operations[job.operation] += outcome == "right"
            self.faults += [fault] if fault else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, required=True, help="how long to run, after the first calls")
    parser.add_argument("--threads", type=int, default=8, help="(default: 8)")
    parser.add_argument("--failures", type=int, default=50, help="one allocation in this many fails (default: 50)")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="(default: the GPU if there is one)")
    arguments = parser.parse_args()
    device = placement.resolve("cpu" if arguments.device == "cpu" else None)
    if arguments.device == "gpu" and device == HOST:
        parser.error("--device gpu: expected an NVIDIA GPU, found none")
    soak = Soak(device, arguments.failures)
    soak.run(arguments.threads, arguments.seconds)
    growth = ", ".join(f"{kind} {size / 1e6:+.1f} MB" for kind, size in soak.growth.items())
    print("right results:", ", ".join(f"{count} {name}" for name, count in sorted(soak.operations.items())))
    for fault in soak.faults[:20]:
        print(fault)
    where = f"{placement.device_name(device)}, {arguments.threads} threads, {arguments.seconds:g} s"
    print(f"soak: {where}: {soak.describe()}; growth {growth}")
    return 1 if soak.faults or not soak.operations.total() else 0


if __name__ == "__main__":
    sys.exit(main())
