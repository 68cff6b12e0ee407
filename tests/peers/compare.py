# SPDX-License-Identifier: Apache-2.0
"""W4A16 peers and cupy_awq side by side on one Hopper GPU, in one process, with cold weights.

    bash tests/peers/prepare.sh .peers      # once: the peers' compiled kernels, about 25 MB
    python tests/peers/compare.py --libraries .peers --json h100.json
    python tests/peers/render.py h100.json --plot h100.png
    python tests/peers/compare.py --libraries .peers --peers fp16,marlin,ours --shapes 4096x12288 --ms 1,16,64,1024

It needs PyTorch 2.11 for CUDA 13, Triton and Python 3.12, which the package itself does not.

Shapes are KxN. Prints microseconds a call, the roofline, and for `ours` the ratio to it and that of the best peer.
Method: group size 128, zero points, random data; weights rotate over copies of more than 170 MB in total, so that they
come from memory and not from L2; each figure is the median of 7 replays of a CUDA graph of >= 20 calls, straight after
60 ms of the same replays; each peer's first result is checked against float32. `roof` = max(bytes / read bandwidth,
flops / fp16 rate), both measured in this run; `read` is the best of four plain streaming kernels over the weight's
bytes in such a graph, launches included. `rec` is the best of the recorded llm-awq, Humming and TurboMind cells
(recorded.json, same kind of GPU, same method), scaled by this run's Marlin over the recorded one; it counts as a peer.
"""

import argparse
import json
import lzma
import math
import os
import sys
import tempfile

import torch
import triton
import triton.language as tl

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARIES = HERE
G = 128
AWQ = [0, 2, 4, 6, 1, 3, 5, 7]
SCALE_ORDER = [i + 8 * j for i in range(8) for j in range(8)]
UINT4 = 1125899906843648  # vLLM's scalar type id: unsigned 4 bit with zero points
DEV = torch.device("cuda:0")


def pack_columns(x, order=range(8)):
    r, n = x.shape
    x = x.view(r, n // 8, 8)[:, :, list(order)].to(torch.int32)
    out = torch.zeros(r, n // 8, dtype=torch.int32, device=x.device)
    for i in range(8):
        out |= x[:, :, i] << (4 * i)
    return out.contiguous()


def pack_rows(x):
    k, n = x.shape
    x = x.view(k // 8, 8, n).to(torch.int32)
    out = torch.zeros(k // 8, n, dtype=torch.int32, device=x.device)
    for i in range(8):
        out |= x[:, i] << (4 * i)
    return out.contiguous()


class Problem:
    def __init__(self, k, n):
        g = torch.Generator(device=DEV)
        g.manual_seed(k * 7 + n)
        self.k, self.n = k, n
        self.q = torch.randint(0, 16, (k, n), dtype=torch.uint8, device=DEV, generator=g)
        self.z = torch.randint(0, 16, (k // G, n), dtype=torch.uint8, device=DEV, generator=g)
        self.s = (torch.rand(k // G, n, device=DEV, generator=g) * 0.01 + 0.005).half()
        self.bytes = k * n // 2 + k // G * n * 2 + k // G * n // 2

    def dense(self):
        w = torch.empty(self.k, self.n, dtype=torch.float16, device=DEV)
        for i in range(0, self.k, G):
            w[i : i + G] = ((self.q[i : i + G].float() - self.z[i // G].float()) * self.s[i // G].float()).half()
        return w


def copies(nbytes):
    return max(2, math.ceil(170e6 / nbytes))


def library(name):
    path = os.path.join(tempfile.gettempdir(), "peers_" + name)
    if not os.path.exists(path):
        with lzma.open(os.path.join(LIBRARIES, name + ".xz")) as src, open(path + ".part", "wb") as dst:
            dst.write(src.read())
        os.rename(path + ".part", path)
    torch.ops.load_library(path)


def fp16(p):
    w = p.dense()
    return torch.float16, [lambda x, w=w.clone(): torch.mm(x, w) for _ in range(copies(w.numel() * 2))]


def fp16_tn(p):
    w = p.dense().t().contiguous()
    return torch.float16, [
        lambda x, w=w.clone(): torch.nn.functional.linear(x, w) for _ in range(copies(w.numel() * 2))
    ]


def marlin(p):
    library("vllm_C.so")
    ops, k, n = torch.ops._C, p.k, p.n
    none = torch.empty(0, dtype=torch.int, device=DEV)
    work = torch.zeros(528, dtype=torch.int, device=DEV)
    q = ops.gptq_marlin_repack(pack_rows(p.q), none, k, n, 4, False)
    s = p.s.reshape(-1, 64)[:, SCALE_ORDER].reshape(-1, n).contiguous()
    z = pack_columns(p.z.reshape(-1, 64)[:, SCALE_ORDER].reshape(-1, n), AWQ)
    return torch.float16, [
        lambda x, q=q.clone(), s=s.clone(), z=z.clone(): ops.marlin_gemm(
            x, None, q, None, s, None, None, z, none, none, work, UINT4, x.shape[0], n, k, True, False, True, False
        )
        for _ in range(copies(p.bytes))
    ]


def machete(p):
    library("vllm_C.so")
    ops = torch.ops._C
    q = ops.machete_prepack_B(pack_rows(p.q).t().contiguous().t(), torch.float16, UINT4, torch.float16)
    z = (-1.0 * p.s * p.z.half()).contiguous()

    def clone(t):
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=DEV).copy_(t)

    return torch.float16, [
        lambda x, q=clone(q), s=p.s.clone(), z=z.clone(): ops.machete_mm(x, q, UINT4, None, s, z, G, None, None, None)
        for _ in range(copies(p.bytes))
    ]


def fbgemm(p):
    library("fbgemm_genai.so")
    ops = torch.ops.fbgemm
    w = (p.q.to(torch.int8) - 8).t().contiguous()
    w = torch.bitwise_or(torch.bitwise_and(w[:, ::2], 0xF), torch.bitwise_left_shift(w[:, 1::2], 4)).contiguous()
    z = ((8.0 - p.z.float()) * p.s.float()).to(torch.bfloat16).contiguous()
    torch.cuda.synchronize()
    w, s = ops.preshuffle_i4(w, p.s.to(torch.bfloat16).contiguous())
    torch.cuda.synchronize()
    return torch.bfloat16, [
        lambda x, w=w.clone(), s=s.clone(), z=z.clone(): ops.bf16i4bf16_shuffled(x, w, s, z)
        for _ in range(copies(p.bytes))
    ]


def ours(p):
    import cupy

    import cupy_awq

    q, z = pack_columns(p.q, AWQ), pack_columns(p.z, AWQ)
    layers = [
        cupy_awq.AwqLinear(cupy_awq.PackedWeight(cupy.from_dlpack(q), cupy.from_dlpack(p.s), cupy.from_dlpack(z)))
        for _ in range(copies(p.bytes))
    ]
    torch.cuda.synchronize()

    def call(x, layer):
        y = torch.empty(x.shape[0], p.n, dtype=x.dtype, device=DEV)
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            layer(cupy.from_dlpack(x), out=cupy.from_dlpack(y))
        return y

    return torch.float16, [lambda x, layer=layer: call(x, layer) for layer in layers]


PEERS = {f.__name__: f for f in (fp16, fp16_tn, marlin, machete, fbgemm, ours)}
STREAM = torch.cuda.Stream()


def estimate_us(calls, out_bytes=0):
    """Median time of one call; the calls rotate inside one CUDA graph."""

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
    graph, keep = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=STREAM, capture_error_mode="relaxed"):
        keep.extend(calls[i % len(calls)]() for i in range(length))
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
def _read(src, out, ITERS: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    acc = tl.zeros((BLOCK,), tl.int32)
    for i in range(ITERS):
        acc ^= tl.load(src + pid.to(tl.int64) * ITERS * BLOCK + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + pid, tl.sum(acc))


def read_floor(nbytes):
    """Microseconds that the best of four streaming reads takes for nbytes, cold, inside a graph."""
    n = nbytes // 4
    src = torch.randint(0, 2**31 - 1, (n * copies(nbytes) + 65536,), dtype=torch.int32, device=DEV)
    best = math.inf
    for block, warps, iters in ((1024, 4, 4), (2048, 8, 4), (1024, 4, 8), (4096, 8, 2)):
        grid = max(1, n // (block * iters))
        out = torch.empty(grid, dtype=torch.int32, device=DEV)
        best = min(
            best,
            estimate_us(
                [
                    lambda c=c: _read[(grid,)](src[c * n :], out, iters, block, num_warps=warps)
                    for c in range(copies(nbytes))
                ]
            ),
        )
    return best


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--peers", default="fp16,fp16_tn,marlin,machete,fbgemm,ours")
    ap.add_argument("--shapes", default="4096x4096,4096x12288,12288x4096,8192x8192,8192x28672,28672x8192")
    ap.add_argument("--ms", default="1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192")
    ap.add_argument(
        "--project", default=os.path.dirname(os.path.dirname(HERE)), help="folder that holds the package cupy_awq"
    )
    ap.add_argument("--json", metavar="FILE")
    ap.add_argument("--libraries", metavar="DIR", default=HERE, help="what prepare.sh made")
    a = ap.parse_args()
    global LIBRARIES
    LIBRARIES = a.libraries
    sys.path.insert(0, a.project)
    torch.set_grad_enabled(False)
    names, ms = a.peers.split(","), [int(m) for m in a.ms.split(",")]
    read = (1 << 30) / read_floor(1 << 30) / 1e3  # GB/s over a GiB
    x = torch.randn(8192, 8192, device=DEV).half()
    rate = 2 * 8192**3 / estimate_us([lambda: torch.mm(x, x)]) / 1e6  # TFLOP/s
    del x
    print(f"{torch.cuda.get_device_name()}: read {read:.0f} GB/s, fp16 8192^3 {rate:.0f} TFLOP/s", flush=True)
    with open(os.path.join(HERE, "recorded.json")) as f:
        recorded = json.load(f)
    rows, ratios = [], {}
    for shape in a.shapes.split(","):
        k, n = map(int, shape.split("x"))
        p = Problem(k, n)
        small = read_floor(p.bytes)
        dense = p.dense().float()
        x_all = torch.randn(max(ms), k, device=DEV)
        table = {}
        for name in names:
            try:
                dtype, fs = PEERS[name](p)
            except Exception as e:
                print(f"{name}: {type(e).__name__}: {e}"[:200], flush=True)
                continue
            for m in ms:
                x = x_all[:m].to(dtype)
                xs = [x.clone() for _ in range(min(len(fs), max(2, math.ceil(170e6 / (m * k * 2)))))]
                try:
                    with torch.cuda.stream(STREAM):
                        STREAM.wait_stream(torch.cuda.default_stream())
                        y = fs[0](xs[0])
                    torch.cuda.synchronize()
                    ref = x[:64].float() @ dense
                    error = ((y[:64].float() - ref).norm() / ref.norm()).item()
                    us = estimate_us([lambda f=f, x=xs[i % len(xs)]: f(x) for i, f in enumerate(fs)], m * n * 2)
                    ok = bool(torch.isfinite(y).all()) and error < 2e-2
                    table[name, m] = us if ok else math.nan
                    rows.append(dict(k=k, n=n, m=m, peer=name, us=us, error=error, ok=ok))
                except Exception as e:
                    print(f"{name} {shape} M={m}: {type(e).__name__}: {e}"[:200], flush=True)
            del fs
            torch.cuda.empty_cache()
        print(
            f"\nK={k} N={n}   microseconds\n{'M':>5} "
            + " ".join(f"{c:>8}" for c in [*names, "rec", "read", "roof", "our/roof", "best/our"])
        )
        for m in ms:
            roof = max((p.bytes + 2 * m * (k + n)) / read / 1e3, 2 * m * k * n / rate / 1e6)

            def then(peer):
                return recorded[peer].get(shape, {}).get(str(m), math.nan)

            scale = table.get(("marlin", m), then("marlin")) / then("marlin")
            rec = min(
                (then(c) * scale for c in ("humming", "turbomind", "llm-awq") if then(c) == then(c)), default=math.nan
            )
            others = [v for v in [rec] + [table[c, m] for c in names if c != "ours" and (c, m) in table] if v == v]
            mine = table.get(("ours", m))
            ratio = ""
            if mine and others:
                ratio = f"{mine / roof:8.2f} {min(others) / mine:8.2f}"
                band = next(b for b in (16, 128, 1024, 1 << 30) if m <= b)
                ratios.setdefault(band, []).append((mine / roof, min(others) / mine))
            print(
                f"{m:>5} "
                + " ".join(f"{table.get((c, m), math.nan):8.1f}" for c in names)
                + f" {rec:8.1f} {small:8.1f} {roof:8.1f} {ratio}",
                flush=True,
            )
            rows.append(dict(k=k, n=n, m=m, peer="roof", us=roof))
            if rec == rec:
                rows.append(dict(k=k, n=n, m=m, peer="recorded", us=rec, ok=True))
    for band, pairs in ratios.items():
        means = [math.exp(sum(math.log(p[i]) for p in pairs) / len(pairs)) for i in (0, 1)]
        worst = min(p[1] for p in pairs)
        print(
            f"rows up to {min(band, 8192)}: ours / roofline {means[0]:.2f}, best peer / ours {means[1]:.2f}"
            f" (worst cell {worst:.2f})"
        )
    if a.json:
        with open(a.json, "w") as f:
            json.dump(dict(gpu=torch.cuda.get_device_name(), read_gbs=read, fp16_tflops=rate, rows=rows), f)


if __name__ == "__main__":
    main()
