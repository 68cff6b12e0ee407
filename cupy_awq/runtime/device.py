# SPDX-License-Identifier: Apache-2.0
"""The properties of a GPU on which kernel selection depends, from the driver or, without a GPU, from a table.

Kernels ask for a `Capability`; no other module compares architecture numbers.
"""

from __future__ import annotations

import enum
import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cupy_awq.runtime import placement, rates
from cupy_awq.runtime.rates import DeviceRates

ARCH_VARIABLE = "CUPY_AWQ_ARCH"
"""The environment variable that sets an older target architecture, so that the kernels of an older GPU are used."""


class Capability(enum.Enum):
    """An instruction or a feature of a GPU that a kernel may need.

    The value is (name in the PTX ISA or the CUDA guide, first architecture that has it, first newer architecture that
    lacks it again or None); an architecture is 10 * compute capability.
    """

    INLINE_PTX = "inline PTX", 75, None  # older GPUs run plain CUDA C++
    MMA_M8N8K4 = "mma.m8n8k4.f16", 70, 75  # newer GPUs emulate it
    MMA_M16N8K8 = "mma.m16n8k8.f16", 75, None
    MMA_M16N8K16 = "mma.m16n8k16.f16", 80, None
    MMA_INT8_M8N8K16 = "mma.m8n8k16.s8", 75, None
    MMA_INT8_M16N8K32 = "mma.m16n8k32.s8", 80, None
    MMA_FP8 = "mma.m16n8k32.e4m3", 89, None
    LDMATRIX = "ldmatrix", 75, None
    BFLOAT16 = "bfloat16 arithmetic", 80, None
    CP_ASYNC = "cp.async", 80, None
    TMA = "TMA", 90, None
    CLUSTERS = "thread block clusters", 90, None
    DEPENDENT_LAUNCH = "programmatic dependent launch", 90, None
    WGMMA = "wgmma", 90, 91
    TCGEN05 = "tcgen05", 100, 120
    MMA_BLOCK_SCALE = "mma.m16n8k64.block_scale", 120, 130

    def is_in(self, arch: int) -> bool:
        """Return whether GPUs of an architecture have the capability."""
        _, first, end = self.value
        return arch >= first and (end is None or arch < end)

    @property
    def archs(self) -> str:
        """The architectures that have the capability, as text: "sm_90", "sm_80 or newer" or "sm_100 to sm_119".

        >>> Capability.WGMMA.archs, Capability.CP_ASYNC.archs
        ('sm_90', 'sm_80 or newer')
        """
        _, first, end = self.value
        if end is None:
            return f"sm_{first} or newer"
        return f"sm_{first}" if end == first + 1 else f"sm_{first} to sm_{end - 1}"


ARCH_SPECIFIC = frozenset({Capability.WGMMA, Capability.TCGEN05, Capability.MMA_BLOCK_SCALE})
"""The instructions that exist only in compiler targets with the suffix "a", whose code runs on one architecture."""


@functools.cache
def _capabilities(arch: int, without: tuple[Capability, ...]) -> frozenset[Capability]:
    return frozenset(capability for capability in Capability if capability.is_in(arch)).difference(without)


@dataclass(frozen=True)
class Device:
    """The properties of a GPU.

    Attributes:
        name: model name.
        arch: target architecture (10 * compute capability) for which kernels are chosen and compiled; less than
            ``native`` if CUPY_AWQ_ARCH sets an older one.
        native: architecture of the GPU (10 * compute capability).
        sm_count: number of SMs.
        shared_bytes_per_block: largest dynamic shared memory per CTA, in bytes.
        shared_bytes_per_sm: shared memory per SM, in bytes.
        l2_bytes: size of the L2 cache in bytes.
        rates: how fast the GPU is.
        without: capabilities of the target architecture that the GPU lacks, for tests of other code paths.
    """

    name: str
    arch: int
    native: int
    sm_count: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    l2_bytes: int
    rates: DeviceRates
    without: tuple[Capability, ...] = ()

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of the target architecture, except those in ``without``."""
        return _capabilities(self.arch, self.without)

    def has(self, *needs: Capability) -> bool:
        """Return whether the GPU has all capabilities ``needs``."""
        return self.capabilities.issuperset(needs)

    def refusal(self, needs: Iterable[Capability], dtype: str = "float16") -> str | None:
        """Return the reason why kernels that need some capabilities cannot run on the GPU, or None if they can.

        For the dtype "bfloat16" they also need `Capability.BFLOAT16`.

        >>> nominal(80).refusal([Capability.CP_ASYNC, Capability.TMA])
        'needs sm_90 or newer, not sm_80'
        >>> nominal(75).refusal([Capability.LDMATRIX], "bfloat16")
        'needs sm_80 or newer, not sm_75'
        """
        for capability in (*needs, *([Capability.BFLOAT16] if dtype == "bfloat16" else [])):
            if not capability.is_in(self.arch):
                return f"needs {capability.archs}, not sm_{self.arch}"
            if capability in self.without:
                return f"needs {capability.value[0]}, which {self.name} lacks"
        return None

    @property
    def target(self) -> str:
        """The compiler target of kernels that need no instruction of ARCH_SPECIFIC.

        It is the architecture, with the suffix "a" if the GPU has wgmma, so that all its kernels have one target.
        """
        return self.target_for(())

    def target_for(self, needs: Iterable[Capability]) -> str:
        """Return the compiler target of kernels that need some capabilities, such as "100a" for tcgen05.

        >>> nominal(100).target, nominal(100).target_for([Capability.TCGEN05]), nominal(90).target
        ('100', '100a', '90a')
        """
        is_specific = self.has(Capability.WGMMA) or not ARCH_SPECIFIC.isdisjoint(needs)
        return f"{self.arch}a" if is_specific else str(self.arch)

    @property
    def is_native(self) -> bool:
        """Whether kernels are compiled for the GPU's own architecture: ``CUPY_AWQ_ARCH`` does not set an older one."""
        return self.arch == self.native

    @property
    def read_gbs(self) -> float:
        """The nominal memory bandwidth in GB/s, or what `tune` measured; see `DeviceRates`."""
        return self.rates.read_gbs

    def read_us(self, nbytes: float) -> float:
        """Return the time in microseconds to read or write ``nbytes`` of device memory at the nominal bandwidth."""
        return nbytes / (self.rates.read_gbs * 1e3)


ARCHITECTURES = (60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)
"""The architectures (10 * compute capability) of NVIDIA's GPUs since Pascal."""
TYPICAL = "p100 gtx-1080 v100 xavier t4 a100-80gb rtx-3090 agx-orin rtx-4090 h100 b200 thor rtx-5090 gb10".split()
"""The names of the GPUs that stand for all of their architecture, one each."""


def _device(gpu: rates.Gpu) -> Device:
    known = rates.ARCHITECTURES[gpu.arch]
    shared = known.block_kib * 1024, known.sm_kib * 1024
    return Device(gpu.name, gpu.arch, gpu.arch, gpu.sm_count, *shared, int(gpu.l2_mib * 2**20), gpu.rates)


KNOWN = {name: _device(gpu) for name, gpu in rates.GPUS.items()}
"""The properties of the GPUs of the table, by the name that ``--device`` takes."""
NOMINAL = {KNOWN[name].arch: KNOWN[name] for name in TYPICAL}
"""The properties of one typical GPU per architecture (10 * compute capability)."""


def nominal(arch: int | str) -> Device:
    """Return the properties of a typical GPU of ``arch``, or of the closest older architecture in `NOMINAL`.

    Args:
        arch: 10 * compute capability: 90, "90", "90a" or "sm_90a".

    Raises:
        ValueError: ``arch`` is none of these, or not in `ARCHITECTURES`.

    >>> nominal(90).sm_count, nominal("sm_87").name
    (132, 'Jetson AGX Orin')
    """
    match = re.fullmatch(r"(?:sm_)?([0-9]{2,3})[af]?", str(arch))
    number = 0 if match is None else int(match[1])
    if number not in ARCHITECTURES:
        known = ", ".join(map(str, ARCHITECTURES))
        raise ValueError(f"arch: expected one of {known}, also written as sm_90 or 90a, got {arch!r:.80}")
    return replace(NOMINAL[max(a for a in NOMINAL if a <= number)], arch=number, native=number)


def forced_arch() -> int | None:
    """Return the target architecture that ``CUPY_AWQ_ARCH`` sets, or None if the variable is not set.

    Raises:
        ValueError: the value is not a compute capability such as 75.
    """
    text = os.environ.get(ARCH_VARIABLE)
    if not text:
        return None
    if not text.isdecimal() or int(text) < min(NOMINAL):
        raise ValueError(f"{ARCH_VARIABLE}: expected a compute capability such as 75, got {text!r}")
    return int(text)


def current() -> Device:
    """Return the properties of CuPy's current GPU; ``arch`` is ``CUPY_AWQ_ARCH`` if the variable is set."""
    import cupy

    return of(cupy.cuda.runtime.getDevice())


def find(arch: int | str | None = None, gpu: str | None = None) -> Device:
    """Return the GPU ``gpu`` of `KNOWN` or `nominal(arch)`; for None CuPy's current GPU, or an H100 without one.

    Raises:
        ValueError: the GPU or the architecture is unknown, or both are given.

    >>> find(gpu="rtx-4090").name
    'GeForce RTX 4090'
    """
    if gpu is not None:
        if arch is not None:
            raise ValueError(f"device: expected None with arch={arch!r:.80}, got {gpu!r:.80}")
        if gpu not in KNOWN:
            raise ValueError(f"device: expected one of {', '.join(KNOWN)}, got {gpu!r:.80}")
        return KNOWN[gpu]
    if arch is None and placement.gpu_count():
        return current()
    return nominal(90 if arch is None else arch)


@functools.cache
def of(index: int) -> Device:
    """Return the properties of the GPU with ordinal ``index``; ``arch`` is ``CUPY_AWQ_ARCH`` if the variable is set.

    Raises:
        ValueError: ``CUPY_AWQ_ARCH`` is malformed, newer than the GPU, or 90 on a newer GPU, as sm_90a kernels run only
            on sm_90.
    """
    import cupy

    device = cupy.cuda.Device(index)
    attributes = device.attributes
    arch = int(device.compute_capability)
    forced = forced_arch()
    if forced is not None and forced > arch:
        raise ValueError(f"{ARCH_VARIABLE}: expected at most {arch}, the GPU's own, got {forced}")
    if forced == 90 != arch:
        raise ValueError(f"{ARCH_VARIABLE}: expected an architecture whose kernels run on sm_{arch}, got 90 (sm_90a)")
    name = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
    return Device(
        name=name,
        arch=forced or arch,
        native=arch,
        sm_count=attributes["MultiProcessorCount"],
        shared_bytes_per_block=attributes["MaxSharedMemoryPerBlockOptin"],
        shared_bytes_per_sm=attributes["MaxSharedMemoryPerMultiprocessor"],
        l2_bytes=attributes["L2CacheSize"],
        rates=rates.read(name, _nominal_rates(name, arch, attributes)),
    )


def _nominal_rates(name: str, arch: int, attributes: Mapping[str, int]) -> DeviceRates:
    """Return the rates of a GPU by its attributes, and where these say nothing those of the closest known GPU."""
    sm_count = attributes["MultiProcessorCount"]
    known = rates.closest(name, arch, sm_count)
    # The clock is in kHz, the bus width in bits, and DRAM transfers data twice per clock cycle. GPUs that share memory
    # with the CPU report no memory clock.
    read_gbs = attributes["MemoryClockRate"] * 2e3 * attributes["GlobalMemoryBusWidth"] / 8e9
    is_same = sm_count == known.sm_count
    clock_mhz = known.clock_mhz if is_same else attributes["ClockRate"] / 1e3
    return known._replace(
        sm_count=sm_count, clock_mhz=clock_mhz or known.clock_mhz, read_gbs=read_gbs or known.read_gbs
    ).rates
