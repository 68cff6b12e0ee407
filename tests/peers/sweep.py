# SPDX-License-Identifier: Apache-2.0
"""Time every legal configuration on random problems, to fit cost models and to judge the first choice.

    python -m tests.peers.sweep --seconds 240 --json sweep.jsonl
    python -m tests.peers.sweep --op gemm_int8 --rows 17-512 --seconds 60 --json int8.jsonl
    python -m tests.peers.sweep --summary sweep.jsonl
    python -m tests.peers.fit sweep.jsonl --models wgmma-16 wgmma-32 wgmma-64 wgmma

Each line of the file is one configuration: op, device, problem, family, config, us (measured), estimate_us (cost
model). Files of several GPUs may be joined; they hold whole problems only. The script also prints a table by GPU and M:
the time of the first choice relative to that of the fastest configuration (mean, largest, and mean by the latter's
duration), and its modelled over its measured time.

Problems are drawn as by `compare.py --random`, but each has its own shape and M; 1x1 convolutions have 7x7 to 56x56
images, and their M counts pixels. Weights, and x of a W4A16 GEMM, rotate over copies of more than 170 MB in total, so
that they come from HBM; small weights of a convolution over 24 copies. The configurations of a problem are captured in
CUDA graphs of about 240 us each, which are replayed round-robin, so that all run at the same clock in spite of the
power limit (interleave.py). All CPU cores but one compile kernels of later problems meanwhile.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from cupy_awq.block_weight import BlockQuantizedWeight, from_packed
from cupy_awq.kernels import select
from cupy_awq.kernels.gemm.problem import FRAGMENTS, Problem
from cupy_awq.kernels.select import Candidate
from cupy_awq.ops.chosen_kernel import ChosenKernel
from cupy_awq.runtime.launcher import get_launcher
from cupy_awq.runtime.workspace import COUNTER_BYTES, workspace_address
from cupy_awq.weight import PackedWeight
from tests.peers.interleave import Graph, medians_us
from tests.peers.random_problems import ROWS, build, compile_pool, geometric_mean, log_uniform, shape

COLD_BYTES = 170e6
"""The total size in bytes, several times the L2 cache, that the copies of a weight must exceed."""
MAX_FLOPS = 8e11
"""The largest number of floating-point operations of a problem, which take about 1 ms."""
MAX_ERROR = 0.02
"""The relative difference from the result of the first configuration above which a result counts as wrong."""
MOST_CHECKED = 1 << 22
"""The largest number of elements of y that are compared."""
GRAPH_US = 240.0
"""The approximate time of a graph in microseconds."""
ROW_RANGES = ((1, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 1024), (1025, math.inf))
"""The ranges of M in a table of first choices. Most of them have cost constants of their own."""
DURATIONS_US = (6.0, 20.0)
"""The bounds, in microseconds, of the columns of a table of first choices, by the time of the fastest configuration."""

Buffers = dict[str, Any]
Bound = tuple[Any, tuple[int, ...]]
"""A launcher with the addresses of its buffers."""


def packed_weight(k: int, n: int) -> PackedWeight:
    """Return a random weight on the GPU with group size 128 and packed zero points."""
    import cupy

    def words(rows: int) -> Any:
        return cupy.random.randint(-(2**31), 2**31 - 1, (rows, n // 8), dtype=cupy.int32)

    scales = (cupy.random.uniform(0.5, 1.5, (k // 128, n)) / (8 * math.sqrt(k))).astype(cupy.float16)
    return PackedWeight(words(k), scales, words(k // 128))


def activations(*shape: int) -> Any:
    """Return random float16 activations on the GPU."""
    import cupy

    return cupy.random.standard_normal(shape, dtype=cupy.float32).astype(cupy.float16)


def copies(nbytes: float, at_most: int = 512) -> int:
    """Return the number of copies with which arrays of ``nbytes`` bytes are cold in L2."""
    return min(at_most, max(2, math.ceil(COLD_BYTES / nbytes)))


class Gemm:
    """W4A16 GEMMs on the repacked weight, as AwqLinear(keep_weight=False) computes them."""

    def __init__(self, k: int, n: int, m: int) -> None:
        import cupy

        from cupy_awq.ops.repack import RepackedWeight, repack

        weight = repack(packed_weight(k, n))
        assert isinstance(weight, RepackedWeight)
        fields = {"scale_exponent": weight.scale_exponent, "wide_scales": weight.wide_scales}
        self.problem = Problem(m, n, k, 128, layouts=(FRAGMENTS,), **fields)
        count = copies(weight.repacked.nbytes)
        weights = [weight.repacked.copy() for _ in range(count)]
        xs = [activations(m, k) for _ in range(copies(m * k * 2, count))]
        ys = [cupy.empty((m, n), cupy.float16) for _ in xs]
        parts = zip(weights, itertools.cycle(xs), itertools.cycle(ys), strict=False)
        self._buffers = [{"weight": w, "x": x, "y": y, "bias": None, "residual": None} for w, x, y in parts]

    def launches(self, candidate: Candidate) -> list[tuple[Any, Buffers]]:
        """Return (plan, buffers) of one launch per copy of the weight."""
        plan = candidate.family.plan(candidate.config, self.problem, gpu())
        return [(plan, buffers) for buffers in self._buffers]


class Recorded:
    """An operation on block-quantized weights, of which the last launch is recorded and timed alone."""

    def __init__(self, calls: list[Callable[[], object]]) -> None:
        self._calls = calls
        with select.recorded() as choices:
            calls[0]()
        self.problem = choices[-1].problem

    def launches(self, candidate: Candidate) -> list[tuple[Any, Buffers]]:
        """Return (plan, buffers) of one launch per copy of the weight."""
        found = []
        launch = ChosenKernel.launch

        def record(chosen: ChosenKernel, buffers: Any) -> None:
            launch(chosen, buffers)
            last.append((chosen.choice.plan, buffers))

        with mock.patch.object(ChosenKernel, "launch", record), select.forced(candidate):
            for call in self._calls:
                last: list[tuple[Any, Buffers]] = []
                call()
                found.append(last[-1])
        return found


def w4a8(kind: str, k: int, n: int, m: int) -> Recorded:
    """Return `gemm_int8` with blocks of 128 or one scale per row ("rows"), or `linear_fp8` without its quantization."""
    import cupy

    import cupy_awq

    packed = packed_weight(k, n)
    weights = [
        from_packed(PackedWeight(packed.qweight.copy(), packed.scales, packed.qzeros)) for _ in range(copies(k * n / 2))
    ]
    x, y = activations(m, k), cupy.empty((m, n), cupy.float16)
    if kind == "linear_fp8":
        return Recorded([lambda w=w: cupy_awq.linear_fp8(x, w, out=y) for w in weights])
    block_size = None if kind == "gemm_int8_rows" else 128
    quantized = cupy_awq.quantize_activations(x, block_size=block_size, symmetric=True)
    return Recorded([lambda w=w: cupy_awq.gemm_int8(*quantized, w, out=y) for w in weights])


def conv2d(rng: random.Random, m: int) -> Recorded:
    """Return a 1x1 convolution of NHWC images in float16."""
    import cupy

    import cupy_awq

    ci, co = (8 * round(log_uniform(rng, 16, 2048) / 8) for _ in range(2))
    side = rng.choice((7, 14, 28, 56))
    batch = max(1, min(32, round(m / side**2)))
    x, y = activations(batch, side, side, ci), cupy.empty((batch, side, side, co), cupy.float16)
    codes = cupy.random.randint(0, 16, (co, 1, 1, ci)).astype(cupy.uint8)
    scale = (cupy.random.uniform(0.5, 1.5, (co, math.ceil(ci / 32))) / (8 * math.sqrt(ci))).astype(cupy.float16)
    weights = [
        BlockQuantizedWeight(codes.copy(), scale, scale.copy(), bits=4, block_size=32)
        for _ in range(copies(ci * co / 2, 24))
    ]
    return Recorded([lambda w=w: cupy_awq.conv2d(x, w, layout="NHWC", out=y) for w in weights])


GEMMS: dict[str, Callable[[int, int, int], Any]] = {
    "gemm": Gemm,
    **{kind: functools.partial(w4a8, kind) for kind in ("gemm_int8", "gemm_int8_rows", "linear_fp8")},
}
"""The functions that make the GEMMs of sizes (K, N, M), by the name of the operation."""


def gpu() -> Any:
    """Return the `Device` of the current GPU."""
    from cupy_awq.runtime import device

    return device.current()


def bind(launches: list[tuple[Any, Buffers]], stream: Any) -> list[Bound]:
    """Return, for each launch, its launcher with the addresses of its buffers."""
    begin = workspace_address(0, stream.ptr)
    workspace = {"counters": begin, "partials": begin + COUNTER_BYTES}

    def address(name: str, buffers: Buffers) -> int:
        if name in workspace:
            return workspace[name]
        return 0 if buffers[name] is None else int(buffers[name].data.ptr)

    found = []
    for plan, buffers in launches:
        launcher = get_launcher(plan, 0)
        found.append((launcher, tuple(address(name, buffers) for name in launcher.buffers)))
    return found


def capture(bound: list[Bound], first: int, stream: Any, estimate_us: float) -> Graph:
    """Return a CUDA graph of about GRAPH_US that runs the launches in a cycle, from number ``first`` on."""
    length = max(2, math.ceil(GRAPH_US / estimate_us))
    stream.begin_capture()
    for launcher, pointers in itertools.islice(itertools.cycle(bound), first, first + length):
        launcher(pointers, stream.ptr)
    return Graph(functools.partial(stream.end_capture().launch, stream), length)


def error(bound: Bound, y: Any, stream: Any, expected: Any) -> tuple[float, Any]:
    """Return the relative difference of a launch's y from ``expected`` (0 if that is None), and y."""
    import cupy

    launcher, pointers = bound
    y.fill(math.nan)
    launcher(pointers, stream.ptr)
    found = y.ravel()[:MOST_CHECKED].astype(cupy.float32)
    if expected is None:
        return (0.0 if bool(cupy.isfinite(found).all()) else math.nan), found
    return float(cupy.linalg.norm(found - expected) / cupy.linalg.norm(expected)), found


def times_us(operation: Any, candidates: Sequence[Candidate], stream: Any) -> list[float]:
    """Return the median time of a launch of each configuration in microseconds; infinity if its y is wrong."""
    import cupy

    graphs: dict[int, Graph] = {}
    expected, first = None, 0
    for i, candidate in enumerate(candidates):
        launches = operation.launches(candidate)
        try:
            bound = bind(launches, stream)
            difference, y = error(bound[0], launches[0][1]["y"], stream, expected)
        except RuntimeError as failure:
            print(f"{failure}: {operation.problem} {candidate.config}", flush=True)
            continue
        if not difference <= MAX_ERROR:
            print(f"WRONG by {difference}: {operation.problem} {candidate.config}", flush=True)
            continue
        expected = y if expected is None else expected
        graphs[i] = capture(bound, first, stream, candidate.us)
        # Otherwise all graphs would read the same weights, from L2 if these fit there.
        first = (first + graphs[i].length) % len(bound)
    found = [math.inf] * len(candidates)
    if graphs:
        medians = medians_us(list(graphs.values()), stream.record, cupy.cuda.get_elapsed_time)
        for i, us in zip(graphs, medians, strict=True):
            found[i] = us
    return found


def draw(op: str, rng: random.Random, low: int, high: int) -> Any:
    """Return a random operation; a GEMM has at most MAX_FLOPS operations."""
    while True:
        m = round(log_uniform(rng, low, high))
        if op == "conv2d":
            return conv2d(rng, m)
        k, n = shape(rng)
        if 2.0 * m * k * n <= MAX_FLOPS:
            return GEMMS[op](k, n, m)


def legal(problem: Any, within: float) -> list[Candidate]:
    """Return the legal configurations with at most ``within`` times the lowest modelled time, lowest first."""
    found = select.candidates(problem, gpu()).values()
    some = [candidate for listed in found if not isinstance(listed, str) for candidate in listed]
    least = min(candidate.us for candidate in some)
    return sorted((c for c in some if c.us <= within * least), key=lambda candidate: candidate.us)


def sweep(op: str, seed: int, low: int, high: int, seconds: float, within: float) -> Iterator[list[dict[str, Any]]]:
    """Yield the records of one problem after the other, one per configuration, until ``seconds`` have passed."""
    import cupy

    deadline = time.monotonic() + seconds
    rng = random.Random(f"sweep {op} {seed}")
    stream = cupy.cuda.Stream(non_blocking=True)
    futures: dict[Any, Future[None]] = {}
    queue: collections.deque[tuple[Any, list[Candidate], list[Future[None]]]] = collections.deque()
    pool = compile_pool()
    try:
        with stream:
            while time.monotonic() < deadline:
                open_futures = [future for future in futures.values() if not future.done()]
                if len(open_futures) < 64 and len(queue) < 4:
                    operation = draw(op, rng, low, high)
                    candidates = legal(operation.problem, within)
                    mine = []
                    for candidate in candidates:
                        kernel = candidate.family.plan(candidate.config, operation.problem, gpu()).kernel
                        if kernel not in futures:
                            futures[kernel] = pool.submit(build, kernel)
                        mine.append(futures[kernel])
                    queue.append((operation, candidates, mine))
                    continue
                waiting = [future for future in queue[0][2] if not future.done()]
                if waiting:
                    wait(waiting, timeout=deadline - time.monotonic(), return_when=FIRST_COMPLETED)
                    continue
                operation, candidates, _ = queue.popleft()
                times = times_us(operation, candidates, stream)
                found = [
                    {
                        "op": op,
                        "device": asdict(gpu()),
                        "problem": asdict(operation.problem),
                        "family": candidate.family.NAME,
                        "config": vars(candidate.config),
                        "us": round(us, 3),
                        "estimate_us": round(candidate.us, 3),
                    }
                    for candidate, us in zip(candidates, times, strict=True)
                    if us < math.inf
                ]
                yield found
                del operation
                get_launcher.cache_clear()
                cupy.get_default_memory_pool().free_all_blocks()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class FirstChoice(NamedTuple):
    """The configuration of a problem with the lowest modelled time.

    Attributes:
        gpu: the name of the GPU.
        m: the number of rows, or of pixels of a convolution.
        best_us: the time of the fastest configuration, in microseconds.
        over_best: the time of the first choice, relative to that of the fastest configuration.
        estimate: the modelled time of the first choice, relative to its measured time.
    """

    gpu: str
    m: int
    best_us: float
    over_best: float
    estimate: float


def first_choices(records: Iterable[dict[str, Any]]) -> list[FirstChoice]:
    """Return the first choice of each problem, whose records must be adjacent."""
    found = []
    for _, group in itertools.groupby(records, lambda record: (record["op"], record["device"], record["problem"])):
        some = list(group)
        first, best_us = min(some, key=lambda record: record["estimate_us"]), min(record["us"] for record in some)
        problem, us = first["problem"], first["us"]
        m = problem.get("m") or math.prod(problem["sizes"][:3])
        found.append(FirstChoice(first["device"]["name"], m, best_us, us / best_us, first["estimate_us"] / us))
    return found


def table(choices: list[FirstChoice]) -> str:
    """Return a table of the first choices' times over the fastest times, by GPU, M and duration."""
    text = []
    edges = [0.0, *DURATIONS_US, math.inf]
    for gpu, (low, high) in itertools.product(sorted({choice.gpu for choice in choices}), ROW_RANGES):
        some = [choice for choice in choices if choice.gpu == gpu and low <= choice.m <= high]
        if not some:
            continue
        cells = []
        for shortest, longest in itertools.pairwise(edges):
            values = [choice.over_best for choice in some if shortest < choice.best_us <= longest]
            cells.append(f"{geometric_mean(values):.3f} ({len(values)})" if values else "-")
        mean, bias = (geometric_mean(getattr(choice, name) for choice in some) for name in ("over_best", "estimate"))
        worst = max(choice.over_best for choice in some)
        rows = f"{low}-{high}" if high < math.inf else f"{low}-"
        columns = " ".join(f"{cell:>13}" for cell in cells)
        text.append(f"{gpu[:22]:22} {rows:>9} {len(some):5} {mean:6.3f} {worst:6.2f} {columns} {bias:9.3f}")
    spans = " ".join(f"{f'<= {us:.0f} us':>13}" for us in DURATIONS_US)
    return "\n".join([f"{'GPU':22} {'M':>9} count   mean  worst {spans} {'longer':>13} estimate", *text])


def main() -> None:
    """Measure and write a file, or summarize one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=[*GEMMS, "conv2d"], default="gemm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", default=f"{ROWS[0]}-{ROWS[1]}", help="range of M (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument(
        "--within", type=float, default=math.inf, help="largest modelled time to measure, relative to the lowest one"
    )
    parser.add_argument("--json", metavar="FILE", help="append the records to this file")
    parser.add_argument("--summary", metavar="FILE", help="print the table of a file, and measure nothing")
    arguments = parser.parse_args()
    if arguments.summary:
        print(table(first_choices(map(json.loads, Path(arguments.summary).read_text().splitlines()))))
        return
    low, high = map(int, arguments.rows.split("-"))
    records = []
    for found in sweep(arguments.op, arguments.seed, low, high, arguments.seconds, arguments.within):
        records += found
        if arguments.json:
            with open(arguments.json, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in found)
    print(table(first_choices(records)))


if __name__ == "__main__":
    main()
