# SPDX-License-Identifier: Apache-2.0
"""Time layers of experts of cupy_awq, beside vLLM's Marlin if it is there, on one GPU with cold weights.

    python tests/peers/moe.py --random 7 --json moe.json
    python tests/peers/moe.py --models qwen3-30b,mixtral-8x7b --ms 1,16,256,4096 --skewed
    bash tests/peers/prepare.sh .peers moe
    python tests/peers/moe.py --random 7 --libraries .peers

A model is hidden x width with experts and top_k. ``--random SEED`` draws six models (8 to 512 experts, top_k from 1 to
10, sizes from 512 to 16384) and nine numbers of tokens from 1 to 4096, log-uniformly. The time is that of `MoeLayer`:
from the ids to the weighted sum, in a CUDA graph whose calls have a routing of their own, over copies of the weights of
which consecutive calls touch more than 170 MB. ``--skewed`` draws expert e with a weight of 1 / rank. The roofline is
max(bytes of touched experts, x and y / read bandwidth, flops / fp16 rate), both as `bench` measures them. The first
tokens are checked against float64. With ``--libraries``, which needs PyTorch, "marlin" is vLLM's kernel with its sort,
SwiGLU and sum.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cupy_awq import MoeLayer, PackedExperts
from cupy_awq.expert_check import EXPERT_ACTIVATIONS
from cupy_awq.kernels.experts.layer import ExpertForm, ExpertLayer, plan_layer
from cupy_awq.kernels.gemm.problem import FRAGMENTS
from cupy_awq.runtime import device, placement
from cupy_awq.runtime.launch_plan import Kernel
from cupy_awq.tools import bench, timing
from cupy_awq.tools.table import render
from tests.peers.random_problems import build, compile_pool, geometric_mean, log_uniform, rows

GROUP = 128
COLD_BYTES = 170e6
"""The size in bytes of the experts that consecutive calls of one token touch."""
MAX_BYTES = 24e9
"""The largest size in bytes of all copies of a layer's weights."""
ROUTINGS = 20
"""The number of calls with routings of their own."""
POOL = (1 << 24) - 3
"""The number of random values, which are repeated to fill the weights."""
CHECKED = 2
"""The number of tokens that are checked."""
SLICES = 32
"""The number of slices of K into which the check divides a product."""
BANDS = (8, 64, 512, 4096)
"""The largest number of tokens of each range over which figures are summarized."""


class Model(NamedTuple):
    """The sizes of a layer of experts."""

    hidden: int
    width: int
    experts: int
    top_k: int

    @property
    def expert_bytes(self) -> int:
        """The size of an expert's weights in bytes."""
        return 3 * self.hidden * self.width // GROUP * (GROUP // 2 + 2) + 3 * self.hidden * self.width // GROUP // 2

    @property
    def copies(self) -> int:
        """The number of copies of the weights, so many that calls find their experts cold in L2."""
        cold = math.ceil(COLD_BYTES / (self.top_k * self.expert_bytes))
        return max(1, min(16, cold, int(MAX_BYTES / (self.experts * self.expert_bytes))))


MODELS = {
    "qwen3-30b": Model(2048, 768, 128, 8),
    "mixtral-8x7b": Model(4096, 14336, 8, 2),
    "qwen3-235b": Model(4096, 1536, 128, 8),
    "deepseek-v3/4": Model(7168, 2048, 64, 8),
}


def draw_models(seed: int, count: int = 6) -> dict[str, Model]:
    """Return random sizes of layers by name."""
    rng, found = random.Random(f"experts {seed}"), dict[str, Model]()
    while len(found) < count:
        hidden, width = (128 * round(log_uniform(rng, low, 16384) / 128) for low in (1024, 512))
        experts = round(log_uniform(rng, 8, 512))
        model = Model(hidden, width, experts, min(rng.randint(1, 10), experts // 2))
        if experts * model.expert_bytes <= MAX_BYTES / 4:
            found[f"{model.hidden}x{model.width}, {model.top_k} of {model.experts}"] = model
    return found


def draw_ids(rng: np.random.Generator, m: int, model: Model, skewed: bool) -> np.ndarray:
    """Return the distinct experts of each token, int32 [m, top_k]."""
    scores = rng.gumbel(size=(m, model.experts))
    if skewed:
        scores -= np.log(1 + rng.permutation(model.experts))
    return np.argsort(-scores, axis=1)[:, : model.top_k].astype(np.int32)


@functools.cache
def random_pools(seed: int) -> tuple[Any, Any]:
    """Return random words and scales on the GPU."""
    import cupy

    rng = np.random.default_rng(seed)
    words, scales = rng.integers(-(2**31), 2**31, POOL, np.int32), rng.uniform(2e-3, 6e-3, POOL)
    return cupy.asarray(words), cupy.asarray(scales.astype(np.float16))


@functools.cache
def column_products() -> Any:
    """Return a kernel that multiplies x [k] by slices of W [k, n] in the AWQ layout: float64 [slices, n]."""
    import cupy

    loop = f"""
        const long long column = i % width, shift = 4 * (column % 8 / 2 + column % 2 * 4);
        y = 0;
        for (long long row = i / width; row < k; row += slices) {{
            const long long group = row / {GROUP};
            const int code = q[(row * width + column) / 8] >> shift & 15;
            const int zero = z[(group * width + column) / 8] >> shift & 15;
            y += x[row] * static_cast<double>((code - zero) * static_cast<float>(s[group * width + column]));
        }}"""
    arrays = "raw int32 q, raw float16 s, raw int32 z, raw float64 x, int64 k, int64 width, int64 slices"
    return cupy.ElementwiseKernel(arrays, "float64 y", loop, "column_products")


class Weights:
    """The weights of one projection of all experts on the GPU, in the AWQ layout: qweight, scales, qzeros."""

    def __init__(self, count: int, k: int, n: int, seed: int) -> None:
        import cupy

        words, scales = random_pools(seed)

        def repeated(pool: Any, *shape: int) -> Any:
            return cupy.tile(pool, -(-math.prod(shape) // POOL))[: math.prod(shape)].reshape(shape)

        self.qweight, self.qzeros = (repeated(words, count, rows, n // 8) for rows in (k, k // GROUP))
        self.scales = repeated(scales, count, k // GROUP, n)

    def pack(self, copies: int) -> list[PackedExperts]:
        """Return copies of the weights that cupy_awq has repacked for its kernels."""
        packed = [PackedExperts(self.qweight, self.scales, self.qzeros)]
        for _ in range(copies - 1):
            packed.append(copy.copy(packed[0]))
            object.__setattr__(packed[-1], "repacked", packed[0].repacked.copy())  # the dataclass is frozen
        return packed

    def multiply(self, x: np.ndarray, expert: int) -> np.ndarray:
        """Return the product of one row with the weights of an expert in float64."""
        import cupy

        _, k, words = self.qweight.shape
        slices = cupy.empty((SLICES, 8 * words), np.float64)
        arrays = self.qweight[expert], self.scales[expert], self.qzeros[expert], cupy.asarray(x, np.float64)
        return np.asarray(column_products()(*arrays, k, 8 * words, SLICES, slices).get().sum(axis=0))


class Case:
    """The random inputs of a timing: x of ``m`` tokens, and several routings (experts of each token), one per call."""

    def __init__(self, model: Model, m: int, skewed: bool) -> None:
        import cupy

        rng = np.random.default_rng(2 * m + skewed)
        count = max(4, min(ROUTINGS, 4096 // m))
        self.host_ids = [draw_ids(rng, m, model, skewed) for _ in range(count)]
        self.ids = list(map(cupy.asarray, self.host_ids))
        scale = rng.random((m, model.top_k), np.float32)
        self.scale = cupy.asarray(scale / scale.sum(axis=1, keepdims=True))
        self.x = cupy.asarray(rng.standard_normal((m, model.hidden), np.float32).astype(np.float16))
        self.out = cupy.empty((m, model.hidden), np.float16)
        touched = [len(np.unique(ids)) for ids in self.host_ids]
        self.nbytes = int(np.mean(touched) * model.expert_bytes) + self.x.nbytes + self.out.nbytes
        self.flops = 6 * m * model.top_k * model.hidden * model.width


def reference(case: Case, gate_up: Weights, down: Weights) -> np.ndarray:
    """Return y of the first tokens of the first routing, computed in float64 by a kernel of a few lines."""
    x, scale = case.x[:CHECKED].get(), case.scale[:CHECKED].get()
    y = np.zeros(x.shape)
    for token, experts in enumerate(case.host_ids[0][:CHECKED]):
        for slot, expert in enumerate(experts):
            gate, up = np.split(gate_up.multiply(x[token], expert), 2)
            y[token] += scale[token, slot] * down.multiply(gate / (1 + np.exp(-gate)) * up, expert)
    return y


def ours(weights: list[tuple[PackedExperts, PackedExperts]], case: Case) -> list[Callable[[], Any]]:
    """Return the calls of cupy_awq, one per routing."""
    layers = [MoeLayer(*pair) for pair in weights]
    return [
        layers[i % len(layers)].plan(case.x, ids, case.scale, out=case.out) for i, ids in enumerate(case.ids)
    ]  # fmt: skip


def chosen(model: Model, m: int) -> list[Kernel]:
    """Return the kernels that cupy_awq takes for a layer of ``m`` tokens."""
    gpu, sizes = device.of(0), (model.experts, model.hidden, 2 * model.width, GROUP)
    gate_up = ExpertForm(*sizes, "float16", "packed", layout=FRAGMENTS)
    down = gate_up._replace(k=model.width, n=model.hidden)
    swiglu, width = EXPERT_ACTIVATIONS["swiglu"], model.hidden
    layer = ExpertLayer(m, model.top_k, gate_up, down, "float16", swiglu, False, width, width, width)
    return [plan.kernel for plan, _ in plan_layer(layer, gpu).plans(gpu)]


def marlin(model: Model, gate_up: Weights, down: Weights) -> Callable[[Case], list[Callable[[], Any]]]:
    """Return a function from a case to the calls of vLLM's Marlin for experts, one per routing."""
    import torch

    from tests.peers import libraries

    for name in ("vllm_C.so", "vllm_moe_C.so"):
        libraries.load_library(name)
    ops, moe = torch.ops._C, torch.ops._moe_C
    has_k_full = "is_k_full" in str(moe.moe_wna16_marlin_gemm.default._schema)
    nothing = torch.empty(0, dtype=torch.int, device="cuda")
    locks = torch.zeros(4 * 132, dtype=torch.int, device="cuda")

    def codes(words: Any) -> Any:
        """Return the codes uint8 [R, N] of words [R, N/8] in AWQ order."""
        found = torch.empty((*words.shape, 8), dtype=torch.uint8, device="cuda")
        for place, column in enumerate(libraries.AWQ_ORDER):
            found[..., column] = (words >> (4 * place)) & 15
        return found.reshape(len(words), -1)

    def pack(weight: Weights) -> tuple[Any, Any, Any]:
        q, s, z = (torch.from_dlpack(a) for a in (weight.qweight, weight.scales, weight.qzeros))
        _, k, words = q.shape
        parts = [ops.gptq_marlin_repack(libraries.pack_rows(codes(w)), nothing, k, 8 * words, 4, False) for w in q]
        order = libraries.MARLIN_SCALE_ORDER
        scales = s.reshape(-1, 64)[:, order].reshape(s.shape).contiguous()
        zeros = codes(z.reshape(-1, words)).reshape(-1, 64)[:, order].reshape(-1, 8 * words)
        packed = libraries.pack_columns(zeros, libraries.AWQ_ORDER).view(z.shape)
        return torch.stack(parts), scales, packed

    first = pack(gate_up), pack(down)
    copies = [first, *([tuple(t.clone() for t in part) for part in first] for _ in range(model.copies - 1))]

    def calls(case: Case) -> list[Callable[[], Any]]:
        m, pairs = len(case.x), len(case.x) * model.top_k
        block = next((b for b in (8, 16, 32, 48, 64) if pairs / model.experts / b < 0.9), 64)
        most = pairs + model.experts * (block - 1)
        most = min(most, pairs * block) if pairs < model.experts else most
        x, scale, out = (torch.from_dlpack(a) for a in (case.x, case.scale, case.out))
        sizes = most, math.ceil(most / block), 1
        routing = [torch.empty(n, dtype=torch.int32, device="cuda") for n in sizes]
        wide, h, y = (
            torch.empty(pairs, n, dtype=torch.float16, device="cuda")
            for n in (2 * model.width, model.width, model.hidden)
        )

        def multiply(a: Any, w: Any, c: Any, k: int, top_k: int, is_last: bool) -> None:
            q, s, z = w
            moe.moe_wna16_marlin_gemm(
                a, c, q, None, s, None, None, z, *((None, None) if has_k_full else ()), locks, *routing, scale, block,
                top_k, is_last, libraries.UINT4, len(a), c.shape[1], k, *((True,) if has_k_full else ()), False, True,
                False, -1, -1, -1,
            )  # fmt: skip

        def run(ids: Any, weights: Any) -> None:
            import cupy

            with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
                moe.moe_align_block_size(ids, model.experts, block, *routing, None)
                multiply(x, weights[0], wide, model.hidden, model.top_k, False)
                ops.silu_and_mul(h, wide)
                multiply(h, weights[1], y, model.width, 1, True)
                moe.moe_sum(y.view(m, model.top_k, -1), out)

        ids = [torch.from_dlpack(a) for a in case.ids]
        return [lambda i=i: run(ids[i], copies[i % len(copies)]) for i in range(len(ids))]

    return calls


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all models and numbers of tokens, print a line per cell, and return the cells."""
    import cupy

    models = draw_models(args.random) if args.random is not None else {name: MODELS[name] for name in args.models}
    ms = args.ms or (rows(args.random) if args.random is not None else [1, 2, 4, 8, 16, 64, 256, 1024, 4096])
    with compile_pool() as pool:
        kernels = dict.fromkeys(kernel for cell in itertools.product(models.values(), ms) for kernel in chosen(*cell))
        list(pool.map(build, kernels, itertools.repeat("cubin" if device.of(0).is_native else "ptx")))
    ceilings = bench._ceilings(0)
    gpu = placement.device_name(0)
    print(f"{gpu}: {ceilings}", flush=True)
    command = " ".join(("python tests/peers/moe.py", *sys.argv[1:]))
    run = {"gpu": gpu, "command": command, "read_gbs": ceilings.read_gbs, "fp16_tflops": ceilings.tflops}
    cells: list[dict[str, Any]] = []
    for name, model in models.items():
        projections = (model.hidden, 2 * model.width, 1), (model.width, model.hidden, 2)
        gate_up, down = (Weights(model.experts, *sizes) for sizes in projections)
        peers: dict[str, Any] = {}
        weights = list(zip(gate_up.pack(model.copies), down.pack(model.copies), strict=True))
        peers["ours"] = lambda case, weights=weights: ours(weights, case)
        if args.libraries:
            peers["marlin"] = marlin(model, gate_up, down)
        for m in ms:
            case = Case(model, m, args.skewed)
            wanted = reference(case, gate_up, down)
            cell: dict[str, Any] = {"model": name, "m": m, "roof": ceilings.roofline_us(case.nbytes, case.flops)}
            for peer, make in peers.items():
                try:
                    calls = make(case)
                    case.out.fill(np.nan)
                    cupy.cuda.Device().synchronize()  # torch.cuda.ExternalStream(0) is a stream of its own
                    calls[0]()
                    cupy.cuda.Device().synchronize()
                    error = np.linalg.norm(case.out[:CHECKED].get() - wanted) / np.linalg.norm(wanted)
                    if not error < 2e-2:
                        raise ValueError(f"expected a relative error below 2%, got {error:.2g}")
                    cell[peer] = timing.on_gpu(calls)
                except Exception as error:  # a peer may lack a kernel for some sizes
                    print(f"{peer} {name} m={m}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            cells.append(cell)
            times = " ".join(f"{peer} {cell[peer]:9.1f}" for peer in peers if peer in cell)
            print(f"{name:>28} {m:5}  roof {cell['roof']:9.1f}  {times} us", flush=True)
            if args.json:
                args.json.write_text(json.dumps(run | {"cells": cells}))
        del weights, peers, gate_up, down
        cupy.get_default_memory_pool().free_all_blocks()
    return cells


COLUMNS = ("tokens", "ours / roofline", "marlin / roofline", "marlin / ours", "worst cell")
"""The columns of `summarize`."""


def summarize(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Return the geometric means of the ratios of times by range of tokens, and the smallest of Marlin's over ours."""
    found: list[list[str]] = []
    for low, high in zip((0, *BANDS), BANDS, strict=False):
        here = [cell for cell in cells if low < cell["m"] <= high and "ours" in cell]
        both = [cell for cell in here if "marlin" in cell]
        if here:
            ratios = [
                [cell["ours"] / cell["roof"] for cell in here],
                [cell["marlin"] / cell["roof"] for cell in both],
                [cell["marlin"] / cell["ours"] for cell in both],
            ]
            means = [f"{geometric_mean(some):.2f}" if some else "-" for some in ratios]
            found.append([f"{low + 1}-{high}", *means, f"{min(ratios[2]):.2f}" if both else "-"])
    return found


def main() -> None:
    """Parse the arguments, measure and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", metavar="SEED", type=int, help="draw models and numbers of tokens")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--ms", type=lambda text: [int(m) for m in text.split(",")], help="numbers of tokens")
    parser.add_argument("--skewed", action="store_true", help="skewed routing")
    parser.add_argument("--libraries", type=Path, help="the folder that prepare.sh filled: time Marlin too")
    parser.add_argument("--json", type=Path, help="a file for the times, written after each cell")
    args = parser.parse_args()
    if args.libraries:
        from tests.peers import libraries

        libraries.FOLDER = str(args.libraries)
    print(render(COLUMNS, summarize(measure(args)), left=1))


if __name__ == "__main__":
    main()
