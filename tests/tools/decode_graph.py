# SPDX-License-Identifier: Apache-2.0
"""Prints the kernels of a decode step's CUDA graph in order, so that two checkouts can be compared; needs a GPU.

python -m tests.tools.decode_graph qwen3-8b --batch 1 --batch 16 > /tmp/after
diff /tmp/before /tmp/after
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from cupy_awq.tools import bench_llm


def list_kernels(graph: Any) -> list[str]:
    """Return a line for each kernel of a captured CuPy graph, in the order of capture: name, grid and CTA size."""
    from cuda.bindings import driver

    def check(result: tuple[Any, ...]) -> Any:
        status, *values = result
        if status != 0:
            raise RuntimeError(f"expected success, got {status}")
        return values[0] if len(values) == 1 else values

    handle = driver.CUgraph(graph.graph)
    _, count = check(driver.cuGraphGetNodes(handle, 0))
    nodes, _ = check(driver.cuGraphGetNodes(handle, count))
    lines = []
    for node in nodes:
        if check(driver.cuGraphNodeGetType(node)) != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            lines.append("(no kernel)")
            continue
        p = check(driver.cuGraphKernelNodeGetParams(node))
        name = check(driver.cuFuncGetName(p.func)).decode()
        grid, block = (p.gridDimX, p.gridDimY, p.gridDimZ), (p.blockDimX, p.blockDimY, p.blockDimZ)
        lines.append(f"{name} grid={grid} block={block} shared={p.sharedMemBytes}")
    return lines


def record(name: str, batch: int, loop: Any) -> list[str]:
    """Return the kernels of the decode step of a model with random weights; ``loop`` is the module that captures it."""
    found: list[list[str]] = []
    original: Callable[..., Any] = loop.capture

    def capture(*arguments: Any) -> Any:
        graph = original(*arguments)
        found.append(list_kernels(graph))
        return graph

    with mock.patch.object(loop, "capture", capture):
        bench_llm.measure(name, batches=(batch,), prompt_tokens=64, steps=1)
    return found[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(bench_llm.SHAPES))
    parser.add_argument("--batch", type=int, action="append", help="sequences (default: 1); repeatable")
    args = parser.parse_args()
    loop = importlib.import_module(bench_llm.build_model.__module__.rpartition(".")[0] + ".step_graphs")
    for name in args.models:
        for batch in args.batch or [1]:
            lines = record(name, batch, loop)
            print(f"{name} x {batch}: {len(lines)} nodes")
            print("\n".join(lines))


if __name__ == "__main__":
    main()
