# SPDX-License-Identifier: Apache-2.0
"""The W4A16 libraries that compare.py measures, and their CUDA graphs; needs PyTorch and a GPU."""

import functools
import lzma
import math
import tempfile
from pathlib import Path

import torch

from cupy_awq import atomic
from tests.peers.interleave import MAX_CALLS, Graph, medians_us

GROUP_SIZE = 128
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The column, 0 to 7, that each nibble of an AWQ word holds."""
MARLIN_SCALE_ORDER = [i + 8 * j for i in range(8) for j in range(8)]
UINT4 = 1125899906843648
"""The id in vLLM of the scalar type for unsigned 4-bit codes with zero points."""
FOLDER = "."
"""The folder that prepare.sh filled. compare.py sets it."""
COLD_BYTES = 170e6
"""The total size in bytes, several times the L2 cache, that the copies of a weight must exceed."""
DEVICE = torch.device("cuda:0")
STREAM = torch.cuda.Stream()
"""The stream on which everything is measured."""
_anchor = torch.cuda.CUDAGraph()
"""A small graph that keeps the graphs' memory pool alive. Graphs never run at the same time, so they share it."""
with torch.cuda.graph(_anchor, stream=STREAM):
    torch.zeros(1, device=DEVICE)


def pack_columns(x, order=range(8)):
    """Return codes [R, N] as int32 words [R, N/8]; a word holds eight columns."""
    r, n = x.shape
    x = x.view(r, n // 8, 8)[:, :, list(order)].to(torch.int32)
    out = torch.zeros(r, n // 8, dtype=torch.int32, device=x.device)
    for i in range(8):
        out |= x[:, :, i] << (4 * i)
    return out.contiguous()


def pack_rows(x):
    """Return codes [K, N] as int32 words [K/8, N]; a word holds eight rows."""
    k, n = x.shape
    x = x.view(k // 8, 8, n).to(torch.int32)
    out = torch.zeros(k // 8, n, dtype=torch.int32, device=x.device)
    for i in range(8):
        out |= x[:, i] << (4 * i)
    return out.contiguous()


class Problem:
    """A random weight: codes ``q`` [K, N], zero points ``z``, scales ``s`` [K/G, N]; ``bytes`` is its packed size."""

    def __init__(self, k, n):
        g = torch.Generator(device=DEVICE)
        g.manual_seed(k * 7 + n)
        self.k, self.n = k, n
        self.q = torch.randint(0, 16, (k, n), dtype=torch.uint8, device=DEVICE, generator=g)
        self.z = torch.randint(0, 16, (k // GROUP_SIZE, n), dtype=torch.uint8, device=DEVICE, generator=g)
        self.s = (torch.rand(k // GROUP_SIZE, n, device=DEVICE, generator=g) * 0.01 + 0.005).half()
        self.bytes = k * n // 2 + k // GROUP_SIZE * n * 2 + k // GROUP_SIZE * n // 2

    @functools.cached_property
    def dense(self):
        """Return the dequantized weight [K, N] in float16."""
        groups = self.q.view(-1, GROUP_SIZE, self.n).float() - self.z[:, None].float()
        return (groups * self.s[:, None].float()).half().view(self.k, self.n)


def count_copies(nbytes):
    """Return the number of copies of ``nbytes`` that keep weights out of L2, at most the MAX_CALLS calls of a graph."""
    return min(MAX_CALLS, max(2, math.ceil(COLD_BYTES / nbytes)))


def load_library(name):
    """Unpack and load a library that prepare.sh built."""
    path = Path(tempfile.gettempdir()) / f"peers_{name}"
    if not path.exists():
        with lzma.open(Path(FOLDER) / f"{name}.xz") as src, atomic.create(path) as dst:
            dst.write(src.read())
    torch.ops.load_library(path)


def load(names):
    """Load the shared libraries that the peers ``names`` need; peers of PyTorch alone need none."""
    for library, peers in (("vllm_C.so", ("marlin", "machete")), ("fbgemm_genai.so", ("fbgemm",))):
        if set(peers) & set(names):
            load_library(library)


# A peer is a function of a problem that returns the dtype of x and a list of calls, one per copy of the weight.


def fp16(p):
    """Return the calls of cuBLAS with an fp16 weight [K, N]."""
    w = p.dense
    return torch.float16, [lambda x, w=w.clone(): torch.mm(x, w) for _ in range(count_copies(w.numel() * 2))]


def fp16_tn(p):
    """Return the calls of cuBLAS with an fp16 weight [N, K]."""
    w = p.dense.t().contiguous()
    return torch.float16, [
        lambda x, w=w.clone(): torch.nn.functional.linear(x, w) for _ in range(count_copies(w.numel() * 2))
    ]


def marlin(p):
    """Return the calls of vLLM's Marlin, on its own layout of the weight with zero points."""
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
    """Return the calls of vLLM's Machete, a kernel for Hopper, on its prepacked weight with zero points."""
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
    """Return the calls of FBGEMM's bf16i4bf16_shuffled, the only peer here whose x is bfloat16."""
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
    """Return the calls of cupy_awq.AwqLinear on its repacked weight, on arrays that DLPack exchanges."""
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


def capture(calls, length):
    """Return a graph of ``length`` calls, round-robin, in which each call has an output of its own."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(STREAM):
        graph.capture_begin(pool=_anchor.pool(), capture_error_mode="relaxed")
        try:
            outputs = [calls[i % len(calls)]() for i in range(length)]
        finally:
            graph.capture_end()
    del outputs  # Until here the outputs were kept alive: no two captured calls write the same memory.
    return Graph(graph.replay, length)


def times_us(graphs):
    """Return the median time of one call of each graph, in microseconds."""

    def mark():
        event = torch.cuda.Event(enable_timing=True)
        event.record(STREAM)
        return event

    with torch.cuda.stream(STREAM):
        return medians_us(graphs, mark, lambda begin, end: begin.elapsed_time(end))
