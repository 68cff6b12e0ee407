# SPDX-License-Identifier: Apache-2.0
"""Measure what an activation order costs on a GPU: single layers, and the decode step of a language model.

    python -m tests.peers.compare_act_order --json tests/peers/tables/act_order.json
    python -m tests.peers.compare_act_order --model llama-3-8b

Weights are cold in L2. Of the model's layers, every linear layer has a random order: one for q, k and v, one for gate
and up, one each for o and down.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from cupy_awq import AwqLinear, PackedWeight
from cupy_awq.checkpoint import Module
from cupy_awq.llm.files.model_files import ModelFiles
from cupy_awq.runtime import device
from cupy_awq.tools import bench_llm, timing
from cupy_awq.tools.testing import random_activations, random_weight

SHAPES = ((4096, 4096), (4096, 12288), (12288, 4096), (4096, 28672), (14336, 4096))
ROWS = (1, 2, 4, 16)
TITLE = "Activation order"
TEXT = (
    "Plans of AwqLinear without and with an activation order, in microseconds, and who gathers the columns of x: the"
    " GEMM, or a launch before the GEMM, whichever the cost models expect to be faster. A decode step of a language"
    " model on a Hopper GPU, for up to 32 sequences, gathers only after its first norm: norms, attention, gate and up"
    " store their results in the order of the layer that follows."
)


def copies(weight: PackedWeight, order: Any) -> list[AwqLinear]:
    """Return layers with copies of a weight, of four times the L2 cache together, so that reads come from HBM."""
    count = max(2, -(-4 * device.current().l2_bytes // weight.nbytes))
    return [AwqLinear(weight, order=order) for _ in range(count)]


def layers() -> list[list[Any]]:
    """Time single layers; return rows of (shape, M, us without and with an order, ratio, kernel that gathers x)."""
    pairs = {}
    for k, n in SHAPES:
        order = cupy.asarray(np.random.default_rng(2).permutation(k).astype(np.int32))
        weight = random_weight(np.random.default_rng(0), k, n, 128)
        weight = PackedWeight(*map(cupy.asarray, (weight.qweight, weight.scales, weight.qzeros)))
        pairs[k, n] = copies(weight, None), copies(weight, order)
    jobs = [(some[0], (m, k)) for (k, _), pair in pairs.items() for some in pair for m in ROWS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # The first call of each plan compiles its kernels, here in parallel.
        list(pool.map(lambda job: job[0].plan(job[1]), jobs))
    rows = []
    for (k, n), (without, having) in pairs.items():
        for m in ROWS:
            x, y = cupy.asarray(random_activations(np.random.default_rng(1), m, k)), cupy.empty((m, n), np.float16)
            times = []
            for some in (without, having):
                plans = [layer.plan((m, k)) for layer in some]
                times.append(timing.on_gpu([functools.partial(plan, x, y) for plan in plans]))
            by = "a launch" if plans[0].workspace_bytes else "the GEMM"
            rows.append([f"{k}x{n}", m, *(round(us, 2) for us in times), round(times[1] / times[0], 3), by])
            print(*rows[-1], flush=True)
    return rows


def with_orders(files: ModelFiles) -> ModelFiles:
    """Return a copy of the model whose quantized layers have activation orders."""
    rng = np.random.default_rng(3)
    orders: dict[str, Any] = {}

    def ordered(read: Callable[[], Any], site: str) -> Module:
        module = read()
        order = orders.setdefault(site, rng.permutation(module.weight.shape[0]).astype(np.int32))
        return module._replace(order=order)

    tensors: dict[str, Any] = dict(files.tensors)
    for name, read in files.tensors.items():
        if name.endswith("_proj"):
            site = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("gate_proj", "up_proj")
            tensors[name] = functools.partial(ordered, read, site)
    return replace(files, tensors=tensors)


def decode_steps(name: str) -> None:
    """Print how many microseconds a decode step takes without and with activation orders, for 1 and 16 sequences."""
    synthetic = bench_llm.synthetic
    for label, make in (("without", synthetic), ("with", lambda *a, **o: with_orders(synthetic(*a, **o)))):
        bench_llm.synthetic = make
        for speed in bench_llm.measure(name, batches=(1, 16), prompt_tokens=128):
            print(f"{name} {label} orders, {speed.batch} sequences: {speed.step_seconds * 1e6:.0f} us", flush=True)
    bench_llm.synthetic = synthetic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table of single layers to this file")
    parser.add_argument("--model", help=f"measure a decode step instead: one of {', '.join(bench_llm.SHAPES)}")
    arguments = parser.parse_args()
    if arguments.model:
        decode_steps(arguments.model)
        return
    rows = layers()
    if arguments.json:
        table = {
            "title": TITLE,
            "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
            "commands": ["python -m tests.peers.compare_act_order --json tests/peers/tables/act_order.json"],
            "text": TEXT,
            "columns": ["layer", "M", "without", "with", "with / without", "gathered by"],
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
