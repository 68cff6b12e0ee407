# SPDX-License-Identifier: Apache-2.0
"""The properties of a GPU on which kernel selection depends, from the driver or, without a GPU, from a table."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace

from cupy_awq.runtime import placement

ARCH_VARIABLE = "CUPY_AWQ_ARCH"
"""The environment variable that sets an older target architecture, so that the kernels of an older GPU are used."""


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
        read_gbs: nominal memory bandwidth in GB/s.
    """

    name: str
    arch: int
    native: int
    sm_count: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    l2_bytes: int
    read_gbs: float

    @property
    def target(self) -> str:
        """The compiler target: ``arch``, but "90a" for sm_90, because wgmma requires it."""
        return "90a" if self.arch == 90 else str(self.arch)


def _device(name: str, arch: int, sms: int, block_kb: int, sm_kb: int, l2_mb: float, gbs: float) -> Device:
    return Device(name, arch, arch, sms, block_kb * 1024, sm_kb * 1024, int(l2_mb * 2**20), gbs)


NOMINAL = {
    device.arch: device
    for device in (
        _device("Tesla P100", 60, 56, 48, 64, 4, 732),
        _device("GeForce GTX 1080", 61, 20, 48, 96, 2, 320),
        _device("Tesla V100", 70, 80, 96, 96, 6, 900),
        _device("Jetson Xavier", 72, 8, 96, 96, 0.5, 137),
        _device("Tesla T4", 75, 40, 64, 64, 4, 320),
        _device("A100 SXM 80GB", 80, 108, 163, 164, 40, 2039),
        _device("GeForce RTX 3090", 86, 82, 99, 100, 6, 936),
        _device("Jetson AGX Orin", 87, 16, 163, 164, 4, 204),
        _device("GeForce RTX 4090", 89, 128, 99, 100, 72, 1008),
        _device("NVIDIA H100 80GB HBM3", 90, 132, 227, 228, 50, 3352),
        _device("B200", 100, 148, 227, 228, 126, 8000),
        _device("GeForce RTX 5090", 120, 170, 99, 100, 96, 1792),
    )
}
"""The properties of one typical GPU per architecture (10 * compute capability)."""


def nominal(arch: int) -> Device:
    """Return the properties of a typical GPU of ``arch``, or of the closest older architecture in `NOMINAL`.

    Raises:
        ValueError: ``arch`` is older than all architectures in `NOMINAL`.

    >>> nominal(90).sm_count
    132
    """
    known = [a for a in NOMINAL if a <= arch]
    if not known:
        raise ValueError(f"arch: expected a compute capability of {min(NOMINAL)} or more, got {arch}")
    return replace(NOMINAL[max(known)], arch=arch, native=arch)


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


def current_or_nominal() -> Device:
    """Return the properties of CuPy's current GPU, or of an H100 if there is no GPU."""
    return current() if placement.gpu_count() else nominal(90)


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
        # The clock is in kHz, the bus width in bits, and DRAM transfers data twice per clock cycle.
        read_gbs=attributes["MemoryClockRate"] * 2e3 * attributes["GlobalMemoryBusWidth"] / 8e9,
    )
