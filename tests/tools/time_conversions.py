# SPDX-License-Identifier: Apache-2.0
"""Time the conversions of the checkpoint readers on the CPU: ``python -m tests.tools.time_conversions``.

The figures are GB of the file per second for a layer of 4096 x 12288, on one thread and on all threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from cupy_awq.checkpoint import nibbles, threads
from cupy_awq.checkpoint.gguf import dense, q4
from cupy_awq.checkpoint.gguf.container import Blocks
from cupy_awq.tools.table import render
from tests.test_formats_gguf import random_blocks

K, N = 4096, 12288
DENSE = ("Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K", "Q4_K")


def rate(function: Callable[[], object], nbytes: int) -> float:
    """Return the throughput in GB/s of a function that reads ``nbytes`` bytes: the best of five calls."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return nbytes / min(times) / 1e9


def main() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, (N, K // 8), np.uint32).view(np.int32)
    rows = words.reshape(K // 8, N)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "words along K (compressed-tensors, MLX)": (lambda: nibbles.convert_column_words(words), words.nbytes),
        "words along K, N last (GPTQ)": (lambda: nibbles.convert_row_words(rows), words.nbytes),
    }
    for kind in ("Q4_0", "Q4_1", "Q4_K"):
        block = Blocks(kind, (N, K), random_blocks(kind, N, K))
        calls[f"{kind} to packed"] = q4.open_module(block, "file").convert, block.data.nbytes
    for kind in DENSE:
        block = Blocks(kind, (N // 4, K), random_blocks(kind, N // 4, K))
        calls[f"{kind} to float16"] = (lambda block=block: dense.read_values(block, "file")), block.data.nbytes
    cores = threads.count_cores()
    lines = []
    for name, (function, nbytes) in calls.items():
        figures = []
        for count in (1, cores):
            threads.count_cores = lambda count=count: count  # type: ignore[assignment]
            figures.append(f"{rate(function, nbytes):.2f}")
        lines.append([name, *figures])
    print(render(["conversion", "1 thread", f"{min(cores, threads.MAX_THREADS)} threads"], lines))


if __name__ == "__main__":
    main()
