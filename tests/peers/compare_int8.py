# SPDX-License-Identifier: Apache-2.0
"""Compare integer products, float8 layers and convolutions with cuBLAS and cuDNN on one GPU, in one process.

    python tests/peers/compare_int8.py gemm       # 1024 and 4096 rows, beside cuBLAS fp16 and torch._int_mm
    python tests/peers/compare_int8.py few        # 1, 4 and 8 rows
    python tests/peers/compare_int8.py w4a8       # 1 to 4096 rows, beside the roofline and W4A16
    python tests/peers/compare_int8.py conv2d     # layers of ResNet-50 and MobileNetV2 beside cuDNN fp16
    python tests/peers/compare_int8.py gemm --shapes 4096x12288 --ms 1024

Needs PyTorch, unlike the package. Shapes are KxN. Prints a Markdown table of microseconds per call: the median of 7
replays of a CUDA graph of at least 20 calls, after 60 ms of warm-up replays; those of w4a8 are replayed round-robin.
The calls rotate over copies of the weight that exceed the L2 cache, at most 24. cuDNN uses its fastest algorithm
(benchmark mode) and channels last.
"""

import argparse
import functools
import math
import os
import statistics
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import cupy as cp
import numpy as np

import cupy_awq
from cupy_awq import (
    BlockQuantizedWeight,
    conv2d,
    from_packed,
    gemm_int8,
    linear_fp8,
    linear_int8,
    quantize_activations,
)
from cupy_awq.kernels import select
from cupy_awq.ops.chosen_kernel import choose_kernel
from cupy_awq.tools import timing
from tests.peers import interleave, sweep

READ_GBS, TFLOPS = 3185, 1213
"""The measured read bandwidth of an H100 in GB/s, and cuBLAS's measured float8 rate in TFLOP/s, which bound W4A8."""
CHANNELS_LAST = torch.channels_last
COLD_BYTES = 120e6
MOST_COPIES = 24
IMAGES = (  # filter size, stride, input and output channels, image height and width
    (3, 1, 64, 64, 56),
    (3, 1, 128, 128, 28),
    (3, 1, 256, 256, 14),
    (3, 1, 512, 512, 7),
    (3, 2, 128, 128, 56),
    (1, 1, 64, 256, 56),
    (1, 1, 256, 64, 56),
    (1, 1, 1024, 256, 14),
    (1, 1, 512, 2048, 7),
    (1, 2, 256, 512, 56),
    (1, 1, 24, 144, 56),
    (1, 1, 96, 576, 14),
    (1, 1, 320, 1280, 7),
)


def copies(nbytes):
    return max(2, min(MOST_COPIES, math.ceil(COLD_BYTES / nbytes)))


def peer(calls):
    """Return the microseconds per call of PyTorch calls, captured and timed as `timing.on_gpu` does it for CuPy."""
    for call in calls:
        call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    batch = list(calls) * math.ceil(20 / len(calls))
    with torch.cuda.graph(graph):
        for call in batch:
            call()

    def replay():
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        return begin, end

    begin, end = replay()
    end.synchronize()
    for _ in range(min(600, math.ceil(timing.WARM_MS / max(begin.elapsed_time(end), 1e-3)))):
        graph.replay()
    pairs = [replay() for _ in range(timing.SAMPLES)]
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / len(batch) * 1e3


def ours(calls):
    return timing.on_gpu(calls)


def in_turns(*functions):
    """Return the microseconds per call of each list of calls; their graphs are replayed round-robin."""
    stream = cp.cuda.Stream(non_blocking=True)
    graphs = []
    cp.cuda.Device().synchronize()
    with stream:
        for calls in functions:
            batch = list(calls) * math.ceil(20 / len(calls))
            for call in calls:
                call()
            stream.begin_capture()
            for call in batch:
                call()
            graphs.append(interleave.Graph(functools.partial(stream.end_capture().launch, stream), len(batch)))
        return interleave.medians_us(graphs, stream.record, cp.cuda.get_elapsed_time)


def block_weight(n, k, block, bits, window=1):
    codes = cp.random.randint(0, 2**bits, (n, window, window, k), dtype=np.uint8)
    size = 2.0 ** (1 - bits) / math.sqrt(k * window * window)
    scale = (cp.random.uniform(0.5, 1.5, (n, math.ceil(k / block))) * size).astype(np.float16)
    offset = (cp.random.standard_normal(scale.shape) * size).astype(np.float16)
    return BlockQuantizedWeight(codes, scale, offset, bits=bits, block_size=block)


def awq_weight(k, n, group_size):
    def words(rows):
        return cp.random.randint(-(2**31), 2**31 - 1, (rows, n // 8), dtype=cp.int32)

    scales = (cp.random.rand(k // group_size, n) * 0.01).astype(cp.float16)
    return cupy_awq.PackedWeight(words(k), scales, words(k // group_size))


def fresh():
    cp.get_default_memory_pool().free_all_blocks()
    torch.cuda.empty_cache()


def show(*cells):
    print("| " + " | ".join(f"{c:.1f}" if isinstance(c, float) else str(c) for c in cells) + " |", flush=True)


def header(*names):
    show(*names)
    print("|" + "---|" * len(names), flush=True)


def gemm(shapes, ms):
    """Time W4A8 with zero points (x with one scale per row, then per block of 128 columns), and W4A8 with offsets."""
    names = (
        "K x N",
        "M",
        "quantize",
        "W4A8, rows",
        "W4A8",
        "offsets",
        "W8A8",
        "linear_int8",
        "linear_fp8",
        "W4A16",
        "fp16",
        "_int_mm",
    )
    header(*names, "fp16 / rows", "fp16 / W4A8")
    for k, n in shapes:
        w4 = [block_weight(n, k, 128, 4) for _ in range(min(6, copies(n * k / 2)))]
        w8 = [block_weight(n, k, 128, 8) for _ in range(min(6, copies(n * k)))]
        packed = [awq_weight(k, n, 128) for _ in w4]
        layers, blocks = [cupy_awq.AwqLinear(w) for w in packed], [from_packed(w) for w in packed]
        f16 = [torch.randn(n, k, device="cuda", dtype=torch.float16) * 0.02 for _ in range(copies(2 * n * k))]
        i8 = [torch.randint(-128, 127, (n, k), device="cuda", dtype=torch.int8) for _ in range(copies(n * k))]
        for m in ms:
            x, y = cp.random.standard_normal((m, k)).astype(cp.float16), cp.empty((m, n), cp.float16)
            q, rows = (quantize_activations(x, block_size=b, symmetric=True) for b in (128, None))
            tx, tq = torch.from_dlpack(x), torch.from_dlpack(q[0])
            ty = torch.empty(m, n, device="cuda", dtype=torch.float16)
            times = [
                ours([lambda: quantize_activations(x, block_size=128, symmetric=True)]),
                ours([lambda w=w: gemm_int8(*rows, w, out=y) for w in blocks]),
                *(ours([lambda w=w: gemm_int8(*q, w, out=y) for w in weights]) for weights in (blocks, w4, w8)),
                ours([lambda w=w: linear_int8(x, w, out=y) for w in blocks]),
                ours([lambda w=w: linear_fp8(x, w, out=y) for w in blocks]),
                ours([lambda layer=layer: layer(x, out=y) for layer in layers]),
                peer([lambda w=w: torch.matmul(tx, w.T, out=ty) for w in f16]),
                peer([lambda w=w: torch._int_mm(tq, w.T) for w in i8]) if m > 16 else math.nan,
            ]
            show(f"{k} x {n}", m, *times, *(f"{times[8] / times[i]:.2f}" for i in (1, 2)))
        del w4, w8, packed, layers, blocks, f16, i8
        fresh()


def few(shapes, ms):
    header("K x N", "M", "W4A8, blocks of 128", "blocks of 32", "W8A8", "W4A16")
    for k, n in shapes:
        layers = [cupy_awq.AwqLinear(awq_weight(k, n, 128)) for _ in range(copies(n * k / 2))]
        kinds = [
            (block, [block_weight(n, k, block, bits) for _ in range(copies(n * k * bits / 8))])
            for block, bits in ((128, 4), (32, 4), (128, 8))
        ]
        for m in ms:
            x, y = cp.random.standard_normal((m, k)).astype(cp.float16), cp.empty((m, n), cp.float16)
            times = []
            for block, weights in kinds:
                q = quantize_activations(x, block_size=block, symmetric=True)
                times.append(ours([lambda w=w, q=q: gemm_int8(*q, w, out=y) for w in weights]))
            show(f"{k} x {n}", m, *times, ours([lambda layer=layer: layer(x, out=y) for layer in layers]))
        del layers, kinds
        fresh()


def product_alone(calls):
    """Return calls that repeat only the last launch of each call: the product, without the quantization of x."""
    recorded = sweep.Recorded(calls)
    chosen = select.choose(recorded.problem, sweep.gpu())
    launches = recorded.launches(select.Candidate(chosen.family, chosen.config, 0.0))
    kernel = choose_kernel(recorded.problem, 0)
    return [functools.partial(kernel.launch, buffers) for _, buffers in launches]


def w4a8(shapes, ms):
    header(
        "K x N",
        "M",
        "roofline",
        "INT8",
        "FP8",
        "FP8 and quantization",
        "W4A16",
        "best / roofline",
        "with quantization / FP8",
    )
    for k, n in shapes:
        packed = [awq_weight(k, n, 128) for _ in range(copies(n * k / 2))]
        layers, blocks = [cupy_awq.AwqLinear(w) for w in packed], [from_packed(w) for w in packed]
        for m in ms:
            x, y = cp.random.standard_normal((m, k)).astype(cp.float16), cp.empty((m, n), cp.float16)
            rows = quantize_activations(x, block_size=None, symmetric=True)
            nbytes = k * n // 2 + k // 128 * n * 5 // 2 + m * k + 2 * m * n
            roofline = max(nbytes / READ_GBS / 1e3, 2 * m * k * n / TFLOPS / 1e6)
            layer_calls = [lambda w=w: linear_fp8(x, w, out=y) for w in blocks]
            int8, fp8, both, w4a16 = in_turns(
                [lambda w=w: gemm_int8(*rows, w, out=y) for w in blocks],
                product_alone(layer_calls),
                layer_calls,
                [lambda layer=layer: layer(x, out=y) for layer in layers],
            )
            ratios = f"{min(int8, fp8) / roofline:.2f}", f"{both / fp8:.2f}"
            show(f"{k} x {n}", m, roofline, int8, fp8, both, w4a16, *ratios)
        del packed, layers, blocks
        fresh()


def convolutions(batches):
    torch.backends.cudnn.benchmark = True
    header("convolution", "batch", "INT4", "INT8", "cuDNN fp16", "cuDNN / INT4")
    for window, stride, ci, co, side in IMAGES:
        count = copies(co * ci * window * window / 2)
        w4, w8 = ([block_weight(co, ci, 32, bits, window) for _ in range(count)] for bits in (4, 8))
        f16 = [
            torch.randn(co, ci, window, window, device="cuda", dtype=torch.float16).to(
                memory_format=torch.channels_last
            )
            for _ in range(count)
        ]
        options = {"padding": window // 2, "stride": stride}
        for batch in batches:
            x = cp.random.standard_normal((batch, side, side, ci)).astype(cp.float16)
            out = (side - 1) // stride + 1
            y = cp.empty((batch, out, out, co), cp.float16)
            # channels last, the layout in which cuDNN's tensor-core kernels are fastest
            tx = torch.from_dlpack(x).permute(0, 3, 1, 2)
            times = [ours([lambda w=w: conv2d(x, w, layout="NHWC", out=y, **options) for w in ws]) for ws in (w4, w8)]
            times.append(peer([lambda w=w: torch.nn.functional.conv2d(tx, w, **options) for w in f16]))
            name = f"{window}x{window}, stride {stride}, {ci} to {co}, {side} x {side}"
            show(name, batch, *times, f"{times[2] / times[0]:.2f}")
        del w4, w8, f16
        fresh()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gemm", "few", "w4a8", "conv2d"])
    parser.add_argument("--shapes", help="KxN,.. of products")
    parser.add_argument("--ms", help="rows of x, or images in a batch")
    a = parser.parse_args()
    torch.set_grad_enabled(False)
    default_shapes = "4096x4096,4096x12288,12288x4096,8192x8192" + (",8192x28672" if a.what == "w4a8" else "")
    shapes = [tuple(map(int, shape.split("x"))) for shape in (a.shapes or default_shapes).split(",")]
    default = {
        "gemm": "1024,4096",
        "few": "1,4,8",
        "w4a8": "1,16,33,64,96,128,256,512,1024,4096",
        "conv2d": "1,8,32",
    }[a.what]
    ms = [int(m) for m in (a.ms or default).split(",")]
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}\n")
    if a.what == "conv2d":
        convolutions(ms)
    else:
        {"gemm": gemm, "few": few, "w4a8": w4a8}[a.what](shapes, ms)


if __name__ == "__main__":
    main()
