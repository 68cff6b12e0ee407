# SPDX-License-Identifier: Apache-2.0
"""The hardware rates of GPUs, in which all cost models are written: of a table, or measured by ``tune --rates``."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from cupy_awq.runtime import disk_cache as cache

READ_FRACTION = 0.95
"""The fraction of ``read_gbs`` that a plain read of device memory reaches (H100 and H200)."""
L2_FRACTION = 0.75
"""``l2_gbs`` over the bandwidth of reading a quarter of L2 again and again (H100), which no GEMM reaches."""
LOADED_LATENCY = 1.7
"""``latency_us`` over the latency of a load while nothing else runs (H100)."""


@dataclass(frozen=True)
class DeviceRates:
    """The hardware rates of a GPU. Rates of multiply-adds are those of one SM per clock cycle.

    Attributes:
        clock_mhz: SM clock under load, in MHz.
        read_gbs: bandwidth of device memory by the data sheet in GB/s, or the measured one over READ_FRACTION.
        l2_gbs: bandwidth of reads of all SMs from L2, in GB/s; see L2_FRACTION.
        mma_fp32: multiply-adds of mma.sync of float16 with float32 accumulators.
        mma_int8: multiply-adds of mma.sync of int8.
        mma_fp8: multiply-adds of mma.sync of e4m3 with float32 accumulators.
        tensor: multiply-adds of float16 by the fastest instruction: mma.sync, wgmma or tcgen05.
        fma: multiply-adds of float32 by CUDA cores.
        issue: warp instructions.
        launch_us: time of an empty kernel in a CUDA graph, in microseconds.
        latency_us: latency of a load from device memory under load, in microseconds.
    """

    clock_mhz: float
    read_gbs: float
    l2_gbs: float
    mma_fp32: float
    mma_int8: float
    mma_fp8: float
    tensor: float
    fma: float
    issue: float
    launch_us: float
    latency_us: float


class Architecture(NamedTuple):
    """The properties that GPUs of one architecture share; the rates of multiply-adds are those of `DeviceRates`.

    Attributes:
        block_kib, sm_kib: largest dynamic shared memory per CTA, and shared memory per SM, in KiB.
        l2_bytes: bytes per clock cycle that each SM reads from L2 while all SMs do.
    """

    block_kib: int
    sm_kib: int
    mma_fp32: int
    mma_int8: int
    mma_fp8: int
    tensor: int
    fma: int
    l2_bytes: float


# Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Rates of multiply-adds:
# NVIDIA's white papers of P100, V100, Turing, A100, GA102, AGX Orin, Ada, H100 and RTX Blackwell. mma.sync on Hopper,
# which emulates that of e4m3: register loops on an H100; newer GPUs with tcgen05 are assumed to have mma.sync of an
# A100. L2: 2155 GB/s of a V100 and 1270 of a T4 (Jia et al., "Dissecting the NVIDIA Turing T4 GPU"), the others by the
# articles of Chips and Cheese.
ARCHITECTURES = {
    60: Architecture(48, 64, 0, 0, 0, 128, 64, 16),
    61: Architecture(48, 96, 0, 0, 0, 2, 128, 16),
    70: Architecture(96, 96, 512, 0, 0, 512, 64, 17.6),
    72: Architecture(96, 96, 512, 0, 0, 512, 64, 17.6),
    75: Architecture(64, 64, 512, 1024, 0, 512, 64, 20),
    80: Architecture(163, 164, 1024, 2048, 0, 1024, 64, 32),
    86: Architecture(99, 100, 512, 1024, 0, 512, 128, 17),
    87: Architecture(163, 164, 1024, 2048, 0, 1024, 128, 32),
    89: Architecture(99, 100, 512, 1024, 1024, 512, 128, 15.5),
    90: Architecture(227, 228, 1200, 2400, 700, 2048, 128, 24.7),
    100: Architecture(227, 228, 1024, 2048, 2048, 4096, 128, 24.7),
    110: Architecture(227, 228, 1024, 2048, 2048, 4096, 128, 24.7),
    120: Architecture(99, 100, 512, 1024, 1024, 512, 128, 15.5),
    121: Architecture(99, 100, 512, 1024, 1024, 512, 128, 15.5),
}
"""The architectures of the GPUs in `GPUS`, by 10 * compute capability."""


class Gpu(NamedTuple):
    """One row of the table of GPUs.

    Attributes:
        name: model name.
        arch: architecture (10 * compute capability).
        sm_count: number of SMs.
        clock_mhz, read_gbs: as in `DeviceRates`.
        l2_mib: size of the L2 cache in MiB.
        tensor_share: fraction of the architecture's tensor-core rates that the GPU has.
    """

    name: str
    arch: int
    sm_count: int
    clock_mhz: float
    read_gbs: float
    l2_mib: float
    tensor_share: float = 1.0

    @property
    def has_half_rate(self) -> bool:
        """Whether mma.sync with float32 accumulators runs at half rate, as on GeForce cards since Turing."""
        return ARCHITECTURES[self.arch].mma_int8 > 0 and self.name.startswith(("GeForce", "NVIDIA GB10"))

    @property
    def rates(self) -> DeviceRates:
        """The nominal rates of the GPU."""
        known, share = ARCHITECTURES[self.arch], self.tensor_share
        half = share / 2 if self.has_half_rate else share
        # GPUs that share LPDDR memory with the CPU have longer latencies.
        is_unified = self.name.startswith(("Jetson", "NVIDIA GB10"))
        return DeviceRates(
            clock_mhz=self.clock_mhz,
            read_gbs=self.read_gbs,
            l2_gbs=known.l2_bytes * self.sm_count * self.clock_mhz / 1e3,
            mma_fp32=known.mma_fp32 * half,
            mma_int8=known.mma_int8 * share,
            mma_fp8=known.mma_fp8 * half,
            tensor=known.tensor * share,
            fma=known.fma,
            issue=4,
            launch_us=1.5 if is_unified else 0.9,
            latency_us=0.9 if is_unified else 0.6,
        )


# SMs, boost clocks, memory bandwidth and L2: NVIDIA's data sheets, white papers and Jetson module data sheets; of
# H100, H200 and H20 the clock that a GEMM sustains. An H20 has a quarter of the tensor-core rate (148 TFLOP/s).
GPUS = {
    "p100": Gpu("Tesla P100", 60, 56, 1480, 732, 4),
    "gtx-1080": Gpu("GeForce GTX 1080", 61, 20, 1733, 320, 2),
    "v100": Gpu("Tesla V100", 70, 80, 1530, 900, 6),
    "xavier": Gpu("Jetson Xavier", 72, 8, 1377, 137, 0.5),
    "t4": Gpu("Tesla T4", 75, 40, 1590, 320, 4),
    "rtx-2080-ti": Gpu("GeForce RTX 2080 Ti", 75, 68, 1545, 616, 5.5),
    "a30": Gpu("NVIDIA A30", 80, 56, 1440, 933, 24),
    "a100-40gb": Gpu("A100 SXM 40GB", 80, 108, 1410, 1555, 40),
    "a100-80gb": Gpu("A100 SXM 80GB", 80, 108, 1410, 2039, 40),
    "a10": Gpu("NVIDIA A10", 86, 72, 1695, 600, 6),
    "rtx-a6000": Gpu("RTX A6000", 86, 84, 1800, 768, 6),
    "rtx-3060": Gpu("GeForce RTX 3060", 86, 28, 1777, 360, 3),
    "rtx-3090": Gpu("GeForce RTX 3090", 86, 82, 1695, 936, 6),
    "orin-nano": Gpu("Jetson Orin Nano", 87, 8, 1020, 102, 2),
    "orin-nx": Gpu("Jetson Orin NX", 87, 8, 918, 102, 2),
    "agx-orin": Gpu("Jetson AGX Orin", 87, 16, 1300, 204, 4),
    "l4": Gpu("NVIDIA L4", 89, 58, 2040, 300, 48),
    "l40s": Gpu("NVIDIA L40S", 89, 142, 2520, 864, 96),
    "rtx-4060": Gpu("GeForce RTX 4060", 89, 24, 2460, 272, 24),
    "rtx-4070": Gpu("GeForce RTX 4070", 89, 46, 2475, 504, 36),
    "rtx-4090": Gpu("GeForce RTX 4090", 89, 128, 2520, 1008, 72),
    "h20": Gpu("NVIDIA H20", 90, 78, 1750, 4000, 60, tensor_share=0.25),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 90, 132, 1750, 3352, 50),
    "h200": Gpu("NVIDIA H200", 90, 132, 1750, 4917, 50),
    "b200": Gpu("NVIDIA B200", 100, 148, 1850, 8000, 126),
    "thor": Gpu("Jetson Thor", 110, 20, 1575, 273, 32),
    "rtx-5060": Gpu("GeForce RTX 5060", 120, 30, 2497, 448, 32),
    "rtx-5070": Gpu("GeForce RTX 5070", 120, 48, 2512, 672, 48),
    "rtx-5090": Gpu("GeForce RTX 5090", 120, 170, 2407, 1792, 96),
    "gb10": Gpu("NVIDIA GB10", 121, 48, 2418, 273, 24),
}
"""The known GPUs by the name that ``--device`` takes."""


def closest(name: str, arch: int, sm_count: int) -> Gpu:
    """Return the known GPU that is most like another one: of its architecture, brand, number of SMs and name.

    >>> [closest(*gpu).name for gpu in (("NVIDIA GeForce RTX 4080 SUPER", 89, 80), ("Orin", 87, 8), ("T4G", 75, 40))]
    ['GeForce RTX 4070', 'Jetson Orin Nano', 'Tesla T4']
    """
    words = set(re.split(r"\W+", name.lower()))
    newest = max(known.arch for known in GPUS.values() if known.arch <= arch)

    def distance(item: tuple[str, Gpu]) -> tuple[bool, int, int]:
        key, known = item
        other_kind = ("geforce" in words) != known.name.startswith("GeForce")
        return other_kind, abs(known.sm_count - sm_count), -len(words.intersection(key.split("-")))

    return min((item for item in GPUS.items() if item[1].arch == newest), key=distance)[1]


def file_name(name: str) -> str:
    """Return the name of the file of a GPU model in the cache folder's parts for rates and for configurations."""
    return re.sub(r"\W+", "-", name).strip("-").lower() + ".json"


def path(name: str) -> Path:
    """Return the path of the file with the measured rates of a GPU model, in the user's cache folder."""
    return cache.folder() / "rates" / file_name(name)


def read(name: str, nominal: DeviceRates) -> DeviceRates:
    """Return the rates of a GPU model: those that ``tune --rates`` has measured, and the nominal ones of the others.

    Raises:
        ValueError: the file of the measured rates has other content.
    """
    content = cache.read(path(name))
    if content is None:
        return nominal
    try:
        found = json.loads(content)
        if all(isinstance(value, float) and 0 < value < math.inf for value in found.values()):
            return replace(nominal, **found)
    except (ValueError, AttributeError, TypeError, RecursionError):
        pass
    raise ValueError(f"{path(name)}: expected positive rates of a GPU, got other content; remove the file")


def write(name: str, measured: dict[str, float]) -> Path:
    """Store measured rates, fields of `DeviceRates`, for processes that start later; return the path of the file.

    Raises:
        OSError: the folder is not writable.
    """
    cache.write(path(name), (json.dumps(measured, indent=1) + "\n").encode())
    return path(name)
