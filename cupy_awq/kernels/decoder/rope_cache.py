# SPDX-License-Identifier: Apache-2.0
"""``rope_cache``: apply RoPE to k in prefill, and append k and v to the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.decoder.common import CACHE_BUFFERS, COMMON_HEADS, int32s, plan_launch
from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES
from cupy_awq.kernels.family import FunctionFamily, MemoryBoundProblem, SoleConfig, sole_configs, traffic_us
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan

NAME = "rope_cache"


@dataclass(frozen=True)
class RopeCaching(MemoryBoundProblem):
    """A rotation of k by RoPE, and a copy of k and v to the KV cache.

    Attributes:
        m, heads, kv_heads, head_dim, capacity, block_stride, dtype: as in `Attention`, for qkv instead of q.
        eps: epsilon of the RMSNorm of heads.
        norm: whether RMSNorm is applied to each head of k first.
    """

    m: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    block_stride: int
    dtype: str
    eps: float
    norm: bool

    COMMON = tuple(
        (1, 4, 4, head_dim, 32, 8, dtype, 1e-6, norm)
        for dtype in ("float16", "bfloat16")
        for head_dim, norm, _ in COMMON_HEADS
    )

    def __str__(self) -> str:
        return f"rope k[{self.m}, {self.kv_heads}, {self.head_dim}] {self.dtype}, append k and v to the cache"

    @property
    def nbytes(self) -> int:
        """The size of k and v in bytes, read and written."""
        return 4 * self.m * self.kv_heads * self.head_dim * ITEMSIZE[self.dtype]


def plan(config: SoleConfig, problem: RopeCaching, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are qkv, k_norm, cos, sin, `CACHE_BUFFERS`, k and v."""
    defines: dict[str, int | str] = {
        "X": TYPES[problem.dtype],
        "HEAD_DIM": problem.head_dim,
        "QK_NORM": int(problem.norm),
    }
    threads = 128
    sizes = int32s(problem.m, problem.heads, problem.kv_heads, problem.capacity)
    buffers = ("qkv", "k_norm", "cos", "sin", *CACHE_BUFFERS, "k", "v")
    arguments = (*buffers, *sizes, np.int64(problem.block_stride), np.float32(problem.eps))
    ctas = ceil_div(problem.m * problem.kv_heads, threads // 32)
    return plan_launch(device, NAME, defines, (ctas, 1, 1), threads, arguments)


ROPE_CACHE = FunctionFamily(NAME, sole_configs, traffic_us, plan)
