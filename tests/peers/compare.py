# SPDX-License-Identifier: Apache-2.0
"""Measure cupy_awq and other W4A16 libraries side by side on one Hopper GPU, in one process, with cold weights.

    bash tests/peers/prepare.sh .peers      # once: the peers' compiled kernels, about 25 MB
    python tests/peers/compare.py --libraries .peers --json tests/peers/h100.json
    python tests/peers/render.py --plot
    python tests/peers/compare.py --libraries .peers --peers fp16,marlin,ours --shapes 4096x12288 --ms 1,16,64,1024
    python tests/peers/compare.py --libraries .peers --random 7 --best 27 --json tests/peers/tables/random_h100_7.json
    python tests/peers/compare.py --libraries .peers --against tests/peers/h100.json
    CUPY_AWQ_ARCH=80 python tests/peers/compare.py --libraries .peers --peers marlin,ours --random 7 --shared-kib 100

It needs PyTorch 2.11 for CUDA 13 and Python 3.12, which the package itself does not.

Shapes are KxN. The script prints microseconds per call, the roofline, and for `ours` the ratio to the roofline and to
the best peer. Method: group size 128, zero points, random data. Weights rotate over copies of more than 170 MB in
total, so that they come from HBM and not from L2. For each shape and M, the CUDA graphs of all libraries, each of about
0.4 ms or more, are replayed round-robin: first for 60 ms, then seven times, of which the median counts. All replays are
queued before the first one ends. Each peer's first result is checked against float32.

`roof` is max(bytes / read bandwidth, flops / fp16 rate). The bandwidth is measured once. The fp16 rate is that of
cuBLAS for M = N = K = 8192; where arithmetic bounds the time, it is measured round-robin with the libraries, as the
clock depends on the power that they draw. `read` is the time of a plain kernel that reads the weight and x and writes
as many bytes as y has, the fastest of three grids, in a chain of dependent launches as the GEMMs. `rec` is the best of
the recorded llm-awq, Humming and TurboMind cells (recorded.json, same kind of GPU), scaled by this run's Marlin over
the recorded one; it counts as a peer.

`--random SEED` draws the shapes and nine values of M as random_problems.py describes: K a multiple of 128, N of 64,
both log-uniform in 1024..32768, K * N <= 4e8, M log-uniform in 1..4096. `floor`, which replaces `roof` on the screen,
is max(roof, 2.2 us): an empty dependent launch and one memory round trip take that long. The file calls both `roof`.

`--best N` also times, in N random cells, all configurations that the cost models expect to take at most 1.6 times the
lowest time, and compares the fastest one with the first choice (first_choice.py).

The file is written after each shape and cell, so a run that ends early keeps its results.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1]))

from cupy_awq import atomic  # noqa: E402
from cupy_awq.runtime import device  # noqa: E402
from cupy_awq.tools.table import render  # noqa: E402
from tests.peers import first_choice, interleave, plain_read, predicted, random_problems  # noqa: E402
from tests.peers.comparison import Comparison  # noqa: E402
from tests.peers.interleave import Graph  # noqa: E402

MAX_ERROR = 2e-2
"""The relative error above which a result counts as wrong."""
READ_BYTES = 1 << 30
"""The size in bytes of the memory over which the plain reads rotate."""
PRODUCT_SIZE = 8192
"""M, N and K of the float16 product of cuBLAS whose rate counts as the most that arithmetic can reach."""


class Ceilings:
    """The speed limits of this GPU: CUDA graphs of plain reads and of cuBLAS products, and the rates they reach.

    Attributes:
        read_gbs: the read bandwidth in GB/s.
        fp16_tflops: the rate of cuBLAS in float16 for M = N = K = PRODUCT_SIZE, in TFLOP/s.
    """

    def __init__(self) -> None:
        import cupy
        import torch

        from tests.peers import libraries

        self._sms: int = cupy.cuda.Device().attributes["MultiProcessorCount"]
        self._source = torch.randint(0, 2**31 - 1, (READ_BYTES // 4,), dtype=torch.int32, device="cuda")
        self._sink = torch.empty(READ_BYTES // 4, dtype=torch.int32, device="cuda")
        self._x = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda").half()
        self.read_gbs = 0.0
        # Successive reads overlap, so each must read other bytes: the same ones would come from L2.
        for nbytes in (READ_BYTES // 4, READ_BYTES // 32):
            us = min(libraries.times_us(self.reads(nbytes, 0, 16, 64)))
            self.read_gbs = max(self.read_gbs, nbytes / us / 1e3)
        (us,) = libraries.times_us([self.product(20)])
        self.fp16_tflops = 2 * PRODUCT_SIZE**3 / us / 1e6

    def product(self, length: int) -> Graph:
        """Return a graph of ``length`` float16 products by cuBLAS with M = N = K = PRODUCT_SIZE."""
        import torch

        from tests.peers import libraries

        return libraries.capture([lambda: torch.mm(self._x, self._x)], length)

    def reads(self, weight_bytes: int, x_bytes: int, y_bytes: int, length: int) -> list[Graph]:
        """Return the graphs of plain reads of the given sizes at rotating addresses, one graph per grid."""
        import torch

        from cupy_awq.runtime.launcher import get_launcher
        from tests.peers import libraries

        source, sink = self._source.data_ptr(), self._sink.data_ptr()
        sources = range(source, source + READ_BYTES - weight_bytes - x_bytes + 1, weight_bytes + x_bytes)
        sinks = range(sink, sink + READ_BYTES - y_bytes + 1, y_bytes)

        def call(launcher: Callable[[tuple[int, ...], int], None], i: int) -> None:
            weight, y = sources[i % len(sources)], sinks[i % len(sinks)]
            launcher((weight, weight + weight_bytes, y), torch.cuda.current_stream().cuda_stream)

        graphs = []
        for grid in plain_read.GRIDS:
            launcher = get_launcher(plain_read.plan(weight_bytes, x_bytes, y_bytes, self._sms, grid), 0)
            graphs.append(libraries.capture([partial(call, launcher, i) for i in range(length)], length))
        return graphs


class Shape:
    """A random weight [K, N] with the calls of every library on it."""

    def __init__(self, k: int, n: int, names: list[str], ms: list[int]) -> None:
        import torch

        from tests.peers import libraries

        self.k, self.n = k, n
        self._problem = libraries.Problem(k, n)
        self.bytes: int = self._problem.bytes
        self._calls: dict[str, Any] = {}
        for name in names:
            try:
                self._calls[name] = libraries.PEERS[name](self._problem)
            except Exception as error:
                print(f"{name} {k}x{n}: {type(error).__name__}: {error}"[:200], flush=True)
        self._dense = self._problem.dense.float()
        self._x = torch.randn(max(ms), k, device="cuda")

    def rows(self, m: int, ceilings: Ceilings, least_us: float) -> list[dict[str, Any]]:
        """Time all libraries with M rows of x and return the results as rows of the JSON file.

        They hold the time of each library, its error, and whether that is small; and as libraries "read", the plain
        read; "arithmetic", the arithmetic at the rate of cuBLAS; and "roof", the roofline, but at least ``least_us``.
        """
        import torch

        from tests.peers import libraries

        k, n = self.k, self.n
        flops, x_bytes, y_bytes = 2 * m * k * n, 2 * m * k, 2 * m * n
        bytes_us = (self.bytes + x_bytes + y_bytes) / ceilings.read_gbs / 1e3
        arithmetic_us = flops / ceilings.fp16_tflops / 1e6
        length = interleave.graph_length(max(bytes_us, arithmetic_us, least_us), y_bytes)
        count = min(length, max(2, math.ceil(libraries.COLD_BYTES / x_bytes)))
        xs = {}
        rows: list[dict[str, Any]] = []
        graphs = []
        for name, (dtype, calls) in self._calls.items():
            if dtype not in xs:
                x = self._x[:m].to(dtype)
                xs[dtype] = x.expand(count, *x.shape).contiguous(), x[:64].float() @ self._dense
            x, expected = xs[dtype]
            bound = [lambda call=calls[i % len(calls)], x=x[i % count]: call(x) for i in range(length)]
            try:
                with torch.cuda.stream(libraries.STREAM):
                    libraries.STREAM.wait_stream(torch.cuda.default_stream())
                    y = bound[0]()
                    error = ((y[:64].float() - expected).norm() / expected.norm()).item()
                    ok = bool(torch.isfinite(y).all()) and error < MAX_ERROR
                graphs.append(libraries.capture(bound, length))
            except Exception as failure:
                print(f"{name} {k}x{n} M={m}: {type(failure).__name__}: {failure}"[:200], flush=True)
                continue
            rows.append(dict(k=k, n=n, m=m, peer=name, us=0.0, error=error, ok=ok))
        reads = ceilings.reads(self.bytes, x_bytes, y_bytes, length)
        # The clock depends on the power that all graphs draw, so the rate of cuBLAS is measured round-robin with them.
        products = [ceilings.product(2)] if arithmetic_us > bytes_us else []
        times = libraries.times_us([*graphs, *reads, *products])
        for row, us in zip(rows, times, strict=False):
            row["us"] = us
        if products:
            arithmetic_us = times[-1] * flops / (2 * PRODUCT_SIZE**3)
        roof_us = max(bytes_us, arithmetic_us, least_us)
        read_us = min(times[len(rows) : len(rows) + len(reads)])
        bounds = {"read": read_us, "arithmetic": arithmetic_us, "roof": roof_us}
        return rows + [dict(k=k, n=n, m=m, peer=name, us=us) for name, us in bounds.items()]


def recorded_us(recorded: dict[str, Any], shape: str, m: int, marlin_us: float) -> float:
    """Return the best recorded time in microseconds, scaled to this GPU by Marlin's times; NaN without a record."""

    def lookup(peer: str) -> float:
        return float(recorded[peer].get(shape, {}).get(str(m), math.nan))

    scale = 1.0 if math.isnan(marlin_us) else marlin_us / lookup("marlin")
    times = (lookup(peer) * scale for peer in ("humming", "turbomind", "llm-awq"))
    return min((us for us in times if not math.isnan(us)), default=math.nan)


def print_table(rows: list[dict[str, Any]], names: list[str], bound: str) -> None:
    """Print the microseconds of all libraries and the ratios to the roofline for one shape, a line per M."""
    header = [*names, "rec", "read", bound, f"our/{bound}", "best/our"]
    print(f"\nK={rows[0]['k']} N={rows[0]['n']}   microseconds\n{'M':>5} " + " ".join(f"{name:>8}" for name in header))
    for m in dict.fromkeys(row["m"] for row in rows):
        us = {row["peer"]: row["us"] for row in rows if row["m"] == m and row.get("ok", True)}
        shown = [us.get(name, math.nan) for name in (*names, "recorded", "read", "roof")]
        others = [us[name] for name in (*names, "recorded") if name != "ours" and name in us]
        if "ours" in us:
            shown += [us["ours"] / us["roof"], min(others, default=math.nan) / us["ours"]]
        print(
            f"{m:>5} " + " ".join(f"{x:8.{1 if i < len(names) + 3 else 2}f}" for i, x in enumerate(shown)), flush=True
        )


class Run:
    """The results of one run of this script; each step prints its results and writes all of them to the file.

    Attributes:
        gpu: the name of the GPU.
        read_gbs, fp16_tflops: its measured rates, as in `Ceilings`.
        seed: the seed of the random problems, or None.
        rows: the microseconds of every shape, M and peer.
        choices: the results of first_choice.py.
    """

    def __init__(self, path: Path | None, seed: int | None, ceilings: Ceilings) -> None:
        import torch

        self._path, self._ceilings = path, ceilings
        self.gpu = torch.cuda.get_device_name()
        self.seed = seed
        self.read_gbs, self.fp16_tflops = ceilings.read_gbs, ceilings.fp16_tflops
        self.rows: list[dict[str, Any]] = []
        self.choices: list[dict[str, Any]] = []
        self._recorded = json.loads((HERE / "recorded.json").read_text())

    def write(self) -> Comparison:
        """Write the results so far to the JSON file, if one was asked for, and return them."""
        run = {key: value for key, value in vars(self).items() if not key.startswith("_")}
        # Absolute paths of the command line exist on one machine only: keep their last part.
        words = (Path(word).name if word.startswith("/") else word for word in sys.argv)
        run["command"] = " ".join(["python", *words])
        if self._path:
            with atomic.create(self._path) as file:
                file.write(json.dumps(run).encode())
        return Comparison(run)

    def measure(self, k: int, n: int, names: list[str], ms: list[int]) -> None:
        """Time all libraries in ``names`` on a weight [K, N] at each M of ``ms``."""
        import cupy
        import torch

        begin = time.monotonic()
        shape = Shape(k, n, names, ms)
        torch.cuda.synchronize()
        built = time.monotonic()
        new: list[dict[str, Any]] = []
        for m in ms:
            found = shape.rows(m, self._ceilings, 0.0 if self.seed is None else random_problems.LATENCY_US)
            marlin_us = next((row["us"] for row in found if row["peer"] == "marlin" and row["ok"]), math.nan)
            rec = recorded_us(self._recorded, f"{k}x{n}", m, marlin_us)
            if not math.isnan(rec):
                found.append(dict(k=k, n=n, m=m, peer="recorded", us=rec, ok=True))
            new += found
        del shape
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
        self.rows += new
        self.write()
        print_table(new, names, "roof" if self.seed is None else "floor")
        print(f"{time.monotonic() - begin:.1f} s, of which {built - begin:.1f} s to pack the weights", flush=True)

    def compare_choices(self, cells: dict[first_choice.Cell, list[Any]], deadline: float) -> None:
        """Compare the first choice with the fastest configuration in each cell whose kernels were compiled in time."""
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        for cell, futures in cells.items():
            wait(futures, timeout=max(0.0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                print(f"no time left for {len(cells) - len(self.choices)} of {len(cells)} first choices")
                return
            self.choices.append(first_choice.measure(cell, stream))
            self.write()
            cupy.get_default_memory_pool().free_all_blocks()
            choice = self.choices[-1]
            print(
                f"{choice['k']}x{choice['n']} M={choice['m']}: {choice['first']} {choice['first_us']:.2f} us,"
                f" best of {choice['legal']}: {choice['best']} {choice['best_us']:.2f} us,"
                f" {choice['first_us'] / choice['best_us']:.3f}",
                flush=True,
            )


def print_summary(comparison: Comparison, against: Path | None) -> None:
    """Print tables by range of M, the worst cells and, on request, the ratios to the times of a stored run."""
    bound = "roof" if comparison.seed is None else "floor"
    ratios = f"our/{bound}", "best/our"
    tables = [
        (("M", ratios[0], f"read/{bound}", ratios[1], "over 5% slower", "worst"), comparison.summary()),
        (("shape", "M", "ours", "best peer", "read", bound, *ratios), comparison.worst()),
        (("M", "cells", "first choice / fastest", "worst"), comparison.choice_summary()),
    ]
    if against:
        rows = comparison.against(Comparison.read(against))
        tables.append((("M", "cells", f"ours / {against.name}", "best peer / the same", "ours at worst"), rows))
    for header, rows in tables:
        if rows:
            print(f"\n{render(header, rows, left=1)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="fp16,fp16_tn,marlin,machete,fbgemm,ours")
    parser.add_argument("--shapes", default="4096x4096,4096x12288,12288x4096,8192x8192,8192x28672,28672x8192")
    parser.add_argument("--random", metavar="SEED", type=int, help="draw random shapes and values of M")
    parser.add_argument("--count", type=int, default=24, help="number of random shapes (default: %(default)s)")
    parser.add_argument("--ms", default="1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192")
    parser.add_argument(
        "--best", metavar="N", type=int, default=0, help="compare the first choice with all configurations in N cells"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no shape and no cell after this time")
    parser.add_argument("--shared-kib", metavar="N", type=int, help="choose as if an SM had N KiB of shared memory")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--against", metavar="FILE", type=Path, help="also print the times over those of this file")
    parser.add_argument("--libraries", metavar="DIR", default=str(HERE), help="the folder that prepare.sh filled")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    names, ms = arguments.peers.split(","), [int(m) for m in arguments.ms.split(",")]
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")]
    if arguments.random is not None:
        shapes, ms = random_problems.shapes(arguments.random, arguments.count), random_problems.rows(arguments.random)
    cells = [(k, n, m) for k, n in shapes for m in ms]
    if arguments.shared_kib:
        limited = predicted.Setting(None, shared_kib=arguments.shared_kib).limit(device.current())
        mock.patch.object(device, "of", return_value=limited).start()
    gpu = device.current()
    marks = [("", time.monotonic())]

    def mark(step: str) -> None:
        marks.append((f"{step} {time.monotonic() - marks[-1][1]:.1f} s", time.monotonic()))

    pool = random_problems.compile_pool()
    try:
        chosen = random_problems.submit_chosen(pool, cells, gpu)
        chosen += [pool.submit(random_problems.build, kernel) for kernel in plain_read.kernels()]
        sampled = first_choice.submit(pool, first_choice.sample(cells, arguments.best, arguments.random or 0), gpu)
        mark("choices")
        import torch

        from tests.peers import libraries

        torch.set_grad_enabled(False)
        libraries.FOLDER = arguments.libraries
        libraries.load(names)
        mark("PyTorch and libraries")
        for future in chosen:
            future.result()
        mark(f"{len(chosen)} kernels")
        run = Run(arguments.json, arguments.random, Ceilings())
        mark("ceilings")
        print(f"{run.gpu}: read {run.read_gbs:.0f} GB/s, fp16 8192^3 {run.fp16_tflops:.0f} TFLOP/s")
        print(", ".join(text for text, _ in marks[1:]), flush=True)
        for i, (k, n) in enumerate(shapes):
            if time.monotonic() > deadline:
                print(f"no time left for {len(shapes) - i} of {len(shapes)} shapes")
                break
            run.measure(k, n, names, ms)
        run.compare_choices(sampled, deadline)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    print_summary(run.write(), arguments.against)


if __name__ == "__main__":
    main()
