# SPDX-License-Identifier: Apache-2.0
"""Host code shared by the kernels of a decoder: launch plans with dependent launch, and query heads per CTA."""

from __future__ import annotations

import numpy as np

from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Argument, Dim3, Kernel, LaunchPlan

THREADS = 256
"""The default number of threads per CTA."""
MAX_SIMT_HEADS = 8
"""The largest number of query heads per CTA in attention without tensor cores."""
SIMT_FACTOR = 4.0
"""The modelled time of a kernel without tensor cores, over that of the kernel with them; an assumption."""
COMMON_HEADS = ((64, False, (1, 3, 4, 8)), (128, False, (1, 3, 4, 8)), (128, True, (2, 4, 8)))
"""Common values of head_dim, of whether heads are normalized (Qwen3), and of the query heads per KV head."""

CACHE_BUFFERS = ("lengths", "slots", "work", "table")
"""The names of the buffers that say where the rows of a launch are in the KV cache."""


def plan_launch(
    device: Device,
    entry: str,
    defines: dict[str, int | str],
    grid: Dim3,
    threads: int,
    arguments: tuple[Argument, ...],
    *,
    source: str | None = None,
    shared_bytes: int = 0,
) -> LaunchPlan:
    """Return the plan of kernel ``entry``, with programmatic dependent launch (PDL) where the GPU has it."""
    dependent = device.has(Capability.DEPENDENT_LAUNCH)
    constants = (*defines.items(), ("DEPENDENT", int(dependent)), ("THREADS", threads))
    kernel = Kernel(f"decoder/{source or entry}.cu", entry, constants, device.target)
    return LaunchPlan(kernel, grid, (threads, 1, 1), arguments, shared_bytes, dependent=dependent)


def int32s(*values: int) -> tuple[Argument, ...]:
    """Return kernel arguments of type int32 with these values."""
    return tuple(map(np.int32, values))


def count_cta_heads(heads_per_kv_head: int, most: int) -> int:
    """Return the number of query heads per CTA: the largest divisor of ``heads_per_kv_head`` up to ``most``."""
    return max(i for i in range(1, most + 1) if heads_per_kv_head % i == 0)


def attention_threads(cta_heads: int, head_dim: int) -> int:
    """Return the number of threads per attention CTA for which shared memory can hold the accumulators of all warps."""
    return 256 if cta_heads * head_dim <= 1024 else 128


def simt_constants(cta_heads: int, head_dim: int) -> dict[str, int | str]:
    """Return the compile-time constants (name, value) of attention without tensor cores."""
    lanes = 1 << (ceil_div(head_dim, 8) - 1).bit_length()
    return {"HEADS": cta_heads, "LANES": lanes, "UNROLL": 2 if cta_heads > 4 else 4}
