# SPDX-License-Identifier: Apache-2.0
"""The measurement of the current GPU's rates: ``python -m cupy_awq tune --rates``.

The rates are stored in the user's cache folder, from which `cupy_awq.runtime.rates` reads them in processes that start
later: all cost models use them in place of nominal ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_awq.runtime import device as devices
from cupy_awq.runtime import launcher, placement, rates
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan
from cupy_awq.tools import timing

READ_BYTES = 1 << 30
"""The largest number of bytes that are read from device memory."""
CHASED_BYTES = 1 << 27
"""The size of the list of links whose latency is measured; more than any L2 cache holds."""
THREADS = 512
"""The number of threads per CTA; an SM holds two CTAs."""
CHAINS = 8
"""The number of mma per warp and round; kChains in CUDA must be equal."""
MMAS = (
    ("mma_fp32", "kMmaM16N8K16", 16 * 8 * 16, (Capability.MMA_M16N8K16,)),
    ("mma_fp32", "kMmaM16N8K8", 16 * 8 * 8, (Capability.MMA_M16N8K8,)),
    ("mma_int8", "kMmaM16N8K32S8", 16 * 8 * 32, (Capability.MMA_INT8_M16N8K32,)),
    ("mma_int8", "kMmaM8N8K16S8", 8 * 8 * 16, (Capability.MMA_INT8_M8N8K16,)),
    ("mma_fp8", "kMmaM16N8K32E4M3", 16 * 8 * 32, (Capability.MMA_FP8,)),
)
"""The measured instructions, the preferred one of a rate first: rate, kind of launch, multiply-adds, needs."""


def plan(gpu: Device, kind: str, ctas: int, threads: int, vectors: int, rounds: int) -> LaunchPlan:
    """Return a launch of ``cuda_src/common/rates.cu``, whose buffers are source and sink."""
    kernel = Kernel("common/rates.cu", "rates", (("KIND", kind),), gpu.target)
    arguments = ("source", "sink", np.int64(vectors), np.int32(rounds))
    return LaunchPlan(kernel, (ctas, 1, 1), (threads, 1, 1), arguments)


def mmas(gpu: Device) -> dict[str, tuple[str, int]]:
    """Return, by rate, the kind of launch and the number of multiply-adds per mma of a GPU's fastest instruction."""
    found: dict[str, tuple[str, int]] = {}
    for rate, kind, products, needs in MMAS:
        if gpu.has(*needs):
            found.setdefault(rate, (kind, products))
    return found


def measure(index: int, progress: Callable[[str], None]) -> dict[str, float]:
    """Return the measured rates of a GPU, fields of `DeviceRates`; it takes about 20 seconds.

    Raises:
        ValueError: the GPU is older than sm_75, or ``CUPY_AWQ_ARCH`` is set.
    """
    gpu = devices.of(index)
    if not gpu.is_native or not gpu.has(Capability.INLINE_PTX):
        raise ValueError(
            f"tune --rates: expected a GPU of sm_75 or newer and no {devices.ARCH_VARIABLE}, got {gpu.name}"
        )
    with placement.use_device(index):
        return measure_within(gpu, index, progress)


def measure_within(gpu: Device, index: int, progress: Callable[[str], None]) -> dict[str, float]:
    """Return the measured rates of the current GPU, whose ordinal is ``index``, within the limits of ``gpu``.

    These are an older architecture, whose mma.sync is used, and a number of SMs.
    """
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    read_bytes = min(READ_BYTES, free // 4) // 16 * 16
    source = cupy.zeros(max(read_bytes, CHASED_BYTES) // 4, np.uint32)
    sink, ctas = cupy.zeros(1, np.uint32), 2 * gpu.sm_count
    found: dict[str, float] = {}

    def call(kind: str, ctas: int, threads: int, nbytes: int, rounds: int, array: Any = source) -> timing.Call:
        progress(f"{kind} {nbytes} bytes {rounds} rounds" if nbytes else f"{kind} {rounds} rounds")
        launch = plan(gpu, kind, ctas, threads, nbytes // 16, rounds)
        return lambda: launcher.launch(launch, {"source": array, "sink": sink}, index)

    def time_us(kind: str, ctas: int, threads: int, nbytes: int, rounds: int) -> float:
        return timing.on_gpu([call(kind, ctas, threads, nbytes, rounds)])

    found["launch_us"] = time_us("kRead", 1, 32, 0, 0)
    read_us = time_us("kRead", ctas, THREADS, read_bytes, 1) - found["launch_us"]
    found["read_gbs"] = read_bytes / read_us / 1e3 / rates.READ_FRACTION
    l2_bytes, rounds = gpu.l2_bytes // 4, 50
    l2_us = time_us("kRead", ctas, THREADS, l2_bytes, rounds) - time_us("kRead", ctas, THREADS, l2_bytes, rounds // 2)
    found["l2_gbs"] = l2_bytes * (rounds - rounds // 2) / l2_us / 1e3 * rates.L2_FRACTION
    links, rounds = np.zeros((CHASED_BYTES // 16, 4), np.uint32), 2000
    order = np.random.default_rng(0).permutation(len(links)).astype(np.uint32)
    links[order, 0] = np.roll(order, -1)
    # Each launch follows the same links, so a read between two launches evicts them from L2.
    calls = [call("kRead", ctas, THREADS, CHASED_BYTES, 1)]
    evict_us = timing.on_gpu(calls)
    calls.append(call("kChase", 1, 1, CHASED_BYTES, rounds, placement.to_device(links, index)))
    found["latency_us"] = (2 * timing.on_gpu(calls) - evict_us) / rounds * rates.LOADED_LATENCY
    # A loop of mma without loads draws too little power to lower the clock, unlike a GEMM.
    clock_mhz = cupy.cuda.Device(index).attributes["ClockRate"] / 1e3
    for rate, (kind, products) in mmas(gpu).items():
        us = time_us(kind, ctas, THREADS, 0, rounds) - time_us(kind, ctas, THREADS, 0, rounds // 2)
        warps = ctas * THREADS // 32
        total = warps * CHAINS * (rounds - rounds // 2) * products
        found[rate] = total / us / (gpu.sm_count * clock_mhz)
    return found
