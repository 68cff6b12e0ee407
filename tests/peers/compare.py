# SPDX-License-Identifier: Apache-2.0
"""Measure cupy_awq and other W4A16 libraries side by side on one Hopper GPU, in one process, with cold weights.

    bash tests/peers/prepare.sh .peers      # once: the peers' compiled kernels, about 25 MB
    python tests/peers/compare.py --libraries .peers --json tests/peers/h100.json
    python tests/peers/render.py --plot
    python tests/peers/compare.py --libraries .peers --peers fp16,marlin,ours --shapes 4096x12288 --ms 1,16,64,1024
    python tests/peers/compare.py --libraries .peers --random 7 --count 24 --json tests/peers/random_7.json

It needs PyTorch 2.11 for CUDA 13, Triton and Python 3.12, which the package itself does not.

Shapes are KxN. The script prints microseconds per call, the roofline, and for `ours` the ratio to the roofline and to
the best peer. Method: group size 128, zero points, random data. Weights rotate over copies of more than 170 MB in
total, so that they come from HBM and not from L2. Each figure is the median of 7 replays of a CUDA graph of at least 20
calls, straight after 60 ms of the same replays. Each peer's first result is checked against float32.

`roof` is max(bytes / read bandwidth, flops / fp16 rate), both measured in this run. `read` is the fastest of four
streaming kernels over the weight's bytes in such a graph, launches included. `rec` is the best of the recorded llm-awq,
Humming and TurboMind cells (recorded.json, same kind of GPU, same method), scaled by this run's Marlin over the
recorded one; it counts as a peer.

`--random SEED` draws the shapes and nine values of M as random_problems.py describes: K a multiple of 128, N of 64,
both log-uniform in 1024..32768, K * N <= 4e8, M log-uniform in 1..4096. `floor`, which replaces `roof` on the screen
and in the file, is max(roof, 2.2 us): an empty dependent launch and one memory round trip take that long.
"""

import argparse
import json
import lzma
import math
import os
import sys
import tempfile
from typing import Any

import torch
import triton
import triton.language as tl

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARIES = HERE
"""The folder with the peers' libraries; `main` sets it."""
GROUP_SIZE = 128
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The column that each nibble of an AWQ word holds."""
MARLIN_SCALE_ORDER = [i + 8 * j for i in range(8) for j in range(8)]
UINT4 = 1125899906843648
"""vLLM's scalar type id of unsigned 4-bit codes with zero points."""
COLD_BYTES = 170e6
"""Weights rotate over copies of more bytes than this, several times the L2 cache."""
MAX_ERROR = 2e-2
"""The relative error above which a result counts as wrong."""
DEVICE = torch.device("cuda:0")


def pack_columns(x, order=range(8)):
    """Return codes [R, N] as int32 words [R, N/8], eight columns to a word."""
    r, n = x.shape
    x = x.view(r, n // 8, 8)[:, :, list(order)].to(torch.int32)
    out = torch.zeros(r, n // 8, dtype=torch.int32, device=x.device)
    for i in range(8):
        out |= x[:, :, i] << (4 * i)
    return out.contiguous()


def pack_rows(x):
    """Return codes [K, N] as int32 words [K/8, N], eight rows to a word."""
    k, n = x.shape
    x = x.view(k // 8, 8, n).to(torch.int32)
    out = torch.zeros(k // 8, n, dtype=torch.int32, device=x.device)
    for i in range(8):
        out |= x[:, i] << (4 * i)
    return out.contiguous()


class Problem:
    """Random 4-bit codes `q` [K, N], zero points `z` and scales `s` [K/G, N]; `bytes` is their packed size."""

    def __init__(self, k, n):
        g = torch.Generator(device=DEVICE)
        g.manual_seed(k * 7 + n)
        self.k, self.n = k, n
        self.q = torch.randint(0, 16, (k, n), dtype=torch.uint8, device=DEVICE, generator=g)
        self.z = torch.randint(0, 16, (k // GROUP_SIZE, n), dtype=torch.uint8, device=DEVICE, generator=g)
        self.s = (torch.rand(k // GROUP_SIZE, n, device=DEVICE, generator=g) * 0.01 + 0.005).half()
        self.bytes = k * n // 2 + k // GROUP_SIZE * n * 2 + k // GROUP_SIZE * n // 2

    def dense(self):
        """Return the dequantized weight [K, N] in float16."""
        w = torch.empty(self.k, self.n, dtype=torch.float16, device=DEVICE)
        for i in range(0, self.k, GROUP_SIZE):
            group, rows = i // GROUP_SIZE, slice(i, i + GROUP_SIZE)
            w[rows] = ((self.q[rows].float() - self.z[group].float()) * self.s[group].float()).half()
        return w


def count_copies(nbytes):
    """Return how many copies of `nbytes` keep weights out of L2."""
    return max(2, math.ceil(COLD_BYTES / nbytes))


def load_library(name):
    """Unpack and load a library that prepare.sh made."""
    path = os.path.join(tempfile.gettempdir(), "peers_" + name)
    if not os.path.exists(path):
        with lzma.open(os.path.join(LIBRARIES, name + ".xz")) as src, open(path + ".part", "wb") as dst:
            dst.write(src.read())
        os.rename(path + ".part", path)
    torch.ops.load_library(path)


# A peer takes a problem; it returns the dtype of x and one call per copy of the weight.


def fp16(p):
    """cuBLAS with the weight [K, N]."""
    w = p.dense()
    return torch.float16, [lambda x, w=w.clone(): torch.mm(x, w) for _ in range(count_copies(w.numel() * 2))]


def fp16_tn(p):
    """cuBLAS with the weight [N, K]."""
    w = p.dense().t().contiguous()
    return torch.float16, [
        lambda x, w=w.clone(): torch.nn.functional.linear(x, w) for _ in range(count_copies(w.numel() * 2))
    ]


def marlin(p):
    """Marlin of vLLM."""
    load_library("vllm_C.so")
    ops, k, n = torch.ops._C, p.k, p.n
    none = torch.empty(0, dtype=torch.int, device=DEVICE)
    work = torch.zeros(528, dtype=torch.int, device=DEVICE)
    q = ops.gptq_marlin_repack(pack_rows(p.q), none, k, n, 4, False)
    s = p.s.reshape(-1, 64)[:, MARLIN_SCALE_ORDER].reshape(-1, n).contiguous()
    z = pack_columns(p.z.reshape(-1, 64)[:, MARLIN_SCALE_ORDER].reshape(-1, n), AWQ_ORDER)
    return torch.float16, [
        lambda x, q=q.clone(), s=s.clone(), z=z.clone(): ops.marlin_gemm(
            x, None, q, None, s, None, None, z, none, none, work, UINT4, x.shape[0], n, k, True, False, True, False
        )
        for _ in range(count_copies(p.bytes))
    ]


def machete(p):
    """Machete of vLLM."""
    load_library("vllm_C.so")
    ops = torch.ops._C
    q = ops.machete_prepack_B(pack_rows(p.q).t().contiguous().t(), torch.float16, UINT4, torch.float16)
    z = (-1.0 * p.s * p.z.half()).contiguous()

    def clone(t):
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=DEVICE).copy_(t)

    return torch.float16, [
        lambda x, q=clone(q), s=p.s.clone(), z=z.clone(): ops.machete_mm(
            x, q, UINT4, None, s, z, GROUP_SIZE, None, None, None
        )
        for _ in range(count_copies(p.bytes))
    ]


def fbgemm(p):
    """bf16i4bf16_shuffled of FBGEMM; x is bfloat16."""
    load_library("fbgemm_genai.so")
    ops = torch.ops.fbgemm
    w = (p.q.to(torch.int8) - 8).t().contiguous()
    w = torch.bitwise_or(torch.bitwise_and(w[:, ::2], 0xF), torch.bitwise_left_shift(w[:, 1::2], 4)).contiguous()
    z = ((8.0 - p.z.float()) * p.s.float()).to(torch.bfloat16).contiguous()
    torch.cuda.synchronize()
    w, s = ops.preshuffle_i4(w, p.s.to(torch.bfloat16).contiguous())
    torch.cuda.synchronize()
    return torch.bfloat16, [
        lambda x, w=w.clone(), s=s.clone(), z=z.clone(): ops.bf16i4bf16_shuffled(x, w, s, z)
        for _ in range(count_copies(p.bytes))
    ]


def ours(p):
    """cupy_awq.AwqLinear."""
    import cupy

    import cupy_awq

    q, z = pack_columns(p.q, AWQ_ORDER), pack_columns(p.z, AWQ_ORDER)
    layers = [
        cupy_awq.AwqLinear(cupy_awq.PackedWeight(cupy.from_dlpack(q), cupy.from_dlpack(p.s), cupy.from_dlpack(z)))
        for _ in range(count_copies(p.bytes))
    ]
    torch.cuda.synchronize()

    def call(x, layer):
        y = torch.empty(x.shape[0], p.n, dtype=x.dtype, device=DEVICE)
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            layer(cupy.from_dlpack(x), out=cupy.from_dlpack(y))
        return y

    return torch.float16, [lambda x, layer=layer: call(x, layer) for layer in layers]


PEERS = {f.__name__: f for f in (fp16, fp16_tn, marlin, machete, fbgemm, ours)}
STREAM = torch.cuda.Stream()


def estimate_us(calls, out_bytes=0):
    """Return the median microseconds of one call; the calls rotate inside one CUDA graph."""

    def event():
        e = torch.cuda.Event(enable_timing=True)
        e.record(STREAM)
        return e

    with torch.cuda.stream(STREAM):
        for c in calls[:3]:
            c()
        STREAM.synchronize()
        a = event()
        for i in range(3):
            calls[i % len(calls)]()
        b = event()
        STREAM.synchronize()
        guess = a.elapsed_time(b) / 3e-3
    length = len(calls) * max(1, math.ceil(20 / len(calls)))
    length = max(2, min(length, 40, int(30e3 / guess) or 2, int(6e9 / max(out_bytes, 1))))
    graph = torch.cuda.CUDAGraph()
    outputs: list[torch.Tensor] = []  # alive as long as the graph, which writes them
    with torch.cuda.graph(graph, stream=STREAM, capture_error_mode="relaxed"):
        outputs.extend(calls[i % len(calls)]() for i in range(length))
    with torch.cuda.stream(STREAM):
        graph.replay()
        STREAM.synchronize()
        a = event()
        graph.replay()
        b = event()
        STREAM.synchronize()
        for _ in range(min(600, max(1, math.ceil(60 / a.elapsed_time(b))))):
            graph.replay()
        pairs = []
        for _ in range(7):
            a = event()
            graph.replay()
            pairs.append((a, event()))
        STREAM.synchronize()
    return sorted(a.elapsed_time(b) / length * 1e3 for a, b in pairs)[3]


@triton.jit
def read_kernel(src, out, ITERS: tl.constexpr, BLOCK: tl.constexpr):
    """Read ITERS * BLOCK int32 values per program and write their combined value, so that no load is dropped."""
    pid = tl.program_id(0)
    acc = tl.zeros((BLOCK,), tl.int32)
    for i in range(ITERS):
        acc ^= tl.load(src + pid.to(tl.int64) * ITERS * BLOCK + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + pid, tl.sum(acc))


def read_us(nbytes):
    """Return the microseconds of the fastest of four streaming reads of `nbytes`, cold, inside a graph."""
    n = nbytes // 4
    src = torch.randint(0, 2**31 - 1, (n * count_copies(nbytes) + 65536,), dtype=torch.int32, device=DEVICE)
    best = math.inf
    for block, warps, iters in ((1024, 4, 4), (2048, 8, 4), (1024, 4, 8), (4096, 8, 2)):
        grid = max(1, n // (block * iters))
        out = torch.empty(grid, dtype=torch.int32, device=DEVICE)
        best = min(
            best,
            estimate_us(
                [
                    lambda c=c: read_kernel[(grid,)](src[c * n :], out, iters, block, num_warps=warps)
                    for c in range(count_copies(nbytes))
                ]
            ),
        )
    return best


def measure_fp16_tflops():
    """Return the rate of cuBLAS in float16 for M = N = K = 8192."""
    x = torch.randn(8192, 8192, device=DEVICE).half()
    return 2 * 8192**3 / estimate_us([lambda: torch.mm(x, x)]) / 1e6


def measure(problem, peer, ms):
    """Return a row of the JSON file for each M that the peer runs: its time, its error, and whether that is small."""
    k, n = problem.k, problem.n
    try:
        dtype, calls = PEERS[peer](problem)
    except Exception as error:
        print(f"{peer}: {type(error).__name__}: {error}"[:200], flush=True)
        return []
    dense = problem.dense().float()
    x_all = torch.randn(max(ms), k, device=DEVICE)
    rows: list[dict[str, Any]] = []
    for m in ms:
        x = x_all[:m].to(dtype)
        copies = min(len(calls), max(2, math.ceil(COLD_BYTES / (m * k * 2))))
        xs = [x.clone() for _ in range(copies)]
        try:
            with torch.cuda.stream(STREAM):
                STREAM.wait_stream(torch.cuda.default_stream())
                y = calls[0](xs[0])
            torch.cuda.synchronize()
            expected = x[:64].float() @ dense
            error = ((y[:64].float() - expected).norm() / expected.norm()).item()
            bound = [lambda call=call, x=xs[i % copies]: call(x) for i, call in enumerate(calls)]
            us = estimate_us(bound, m * n * 2)
            ok = bool(torch.isfinite(y).all()) and error < MAX_ERROR
            rows.append(dict(k=k, n=n, m=m, peer=peer, us=us, error=error, ok=ok))
        except Exception as error:
            print(f"{peer} {k}x{n} M={m}: {type(error).__name__}: {error}"[:200], flush=True)
    return rows


def recorded_us(recorded, shape, m, marlin_us):
    """Return the best recorded time, scaled to this GPU by Marlin's; nan where there is none."""

    def lookup(peer):
        return recorded[peer].get(shape, {}).get(str(m), math.nan)

    scale = 1.0 if math.isnan(marlin_us) else marlin_us / lookup("marlin")
    times = (lookup(peer) * scale for peer in ("humming", "turbomind", "llm-awq"))
    return min((us for us in times if not math.isnan(us)), default=math.nan)


def main():
    """Measure, print and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="fp16,fp16_tn,marlin,machete,fbgemm,ours")
    parser.add_argument("--shapes", default="4096x4096,4096x12288,12288x4096,8192x8192,8192x28672,28672x8192")
    parser.add_argument("--random", metavar="SEED", type=int, help="draw random shapes and values of M")
    parser.add_argument("--count", type=int, default=24, help="number of random shapes (default: %(default)s)")
    parser.add_argument("--ms", default="1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192")
    parser.add_argument(
        "--project", default=os.path.dirname(os.path.dirname(HERE)), help="folder that holds the package cupy_awq"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--libraries", metavar="DIR", default=HERE, help="the folder that prepare.sh filled")
    arguments = parser.parse_args()
    global LIBRARIES
    LIBRARIES = arguments.libraries
    sys.path.insert(0, arguments.project)
    torch.set_grad_enabled(False)
    from tests.peers import random_problems

    names, ms = arguments.peers.split(","), [int(m) for m in arguments.ms.split(",")]
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")]
    if arguments.random is not None:
        shapes, ms = random_problems.shapes(arguments.random, arguments.count), random_problems.rows(arguments.random)
    if "ours" in names:
        from cupy_awq.runtime import device

        random_problems.compile_chosen([(k, n, m) for k, n in shapes for m in ms], device.current())
    read_gbs = (1 << 30) / read_us(1 << 30) / 1e3
    fp16_tflops = measure_fp16_tflops()
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}: read {read_gbs:.0f} GB/s, fp16 8192^3 {fp16_tflops:.0f} TFLOP/s", flush=True)
    with open(os.path.join(HERE, "recorded.json")) as file:
        recorded = json.load(file)
    rows: list[dict[str, Any]] = []
    ratios: dict[int, list[tuple[float, float]]] = {}
    for k, n in shapes:
        problem = Problem(k, n)
        weight_read_us = read_us(problem.bytes) if arguments.random is None else math.nan
        table: dict[tuple[str, int], float] = {}
        for peer in names:
            for row in measure(problem, peer, ms):
                table[peer, row["m"]] = row["us"] if row["ok"] else math.nan
                rows.append(row)
            torch.cuda.empty_cache()
        bound = "roof" if arguments.random is None else "floor"
        header = [*names, "rec", "read", bound, f"our/{bound}", "best/our"]
        print(f"\nK={k} N={n}   microseconds\n{'M':>5} " + " ".join(f"{name:>8}" for name in header))
        for m in ms:
            roof = max((problem.bytes + 2 * m * (k + n)) / read_gbs / 1e3, 2 * m * k * n / fp16_tflops / 1e6)
            if arguments.random is not None:
                roof = max(roof, random_problems.LATENCY_US)
            rec = recorded_us(recorded, f"{k}x{n}", m, table.get(("marlin", m), math.nan))
            times = [rec, *(table.get((peer, m), math.nan) for peer in names if peer != "ours")]
            others = [us for us in times if not math.isnan(us)]
            mine = table.get(("ours", m))
            shown = [*(table.get((peer, m), math.nan) for peer in names), rec, weight_read_us, roof]
            line = f"{m:>5} " + " ".join(f"{us:8.1f}" for us in shown)
            if mine and others:
                line += f" {mine / roof:8.2f} {min(others) / mine:8.2f}"
                band = next(limit for limit in (16, 128, 1024, 1 << 30) if m <= limit)
                ratios.setdefault(band, []).append((mine / roof, min(others) / mine))
            print(line, flush=True)
            rows.append(dict(k=k, n=n, m=m, peer="roof", us=roof))
            if not math.isnan(rec):
                rows.append(dict(k=k, n=n, m=m, peer="recorded", us=rec, ok=True))
    for band, pairs in ratios.items():
        means = [math.exp(sum(math.log(pair[i]) for pair in pairs) / len(pairs)) for i in (0, 1)]
        worst = min(best for _, best in pairs)
        print(
            f"M up to {min(band, 8192)}: ours / {bound} {means[0]:.2f}, best peer / ours {means[1]:.2f}"
            f" (worst cell {worst:.2f}; {sum(best < 1 / 1.05 for _, best in pairs)} of {len(pairs)} over 5% slower)"
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            run = dict(gpu=gpu, read_gbs=read_gbs, fp16_tflops=fp16_tflops, seed=arguments.random, rows=rows)
            json.dump(run, file)


if __name__ == "__main__":
    main()
