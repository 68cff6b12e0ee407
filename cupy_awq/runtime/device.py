# SPDX-License-Identifier: Apache-2.0
"""Facts of a GPU that kernel selection needs, from the driver or, with no GPU, from a table."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace

from cupy_awq.runtime import placement

ARCH_VARIABLE = "CUPY_AWQ_ARCH"


@dataclass(frozen=True)
class Device:
    """``arch`` is the compute capability times ten and decides which kernels are legal; ``native`` is the chip's own.

    They differ only when a lower path is forced. ``read_gbs`` is the nominal memory bandwidth in GB/s.
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
        """The compiler's target: sm_90 code needs the ``a`` for wgmma, the others stay portable in their family."""
        return "90a" if self.arch == 90 else str(self.arch)


def _facts(name: str, arch: int, sms: int, block_kb: int, sm_kb: int, l2_mb: float, gbs: float) -> Device:
    return Device(name, arch, arch, sms, block_kb * 1024, sm_kb * 1024, int(l2_mb * 2**20), gbs)


NOMINAL = {
    device.arch: device
    for device in (
        _facts("Tesla P100", 60, 56, 48, 64, 4, 732),
        _facts("GeForce GTX 1080", 61, 20, 48, 96, 2, 320),
        _facts("Tesla V100", 70, 80, 96, 96, 6, 900),
        _facts("Jetson Xavier", 72, 8, 96, 96, 0.5, 137),
        _facts("Tesla T4", 75, 40, 64, 64, 4, 320),
        _facts("A100 SXM 80GB", 80, 108, 163, 164, 40, 2039),
        _facts("GeForce RTX 3090", 86, 82, 99, 100, 6, 936),
        _facts("Jetson AGX Orin", 87, 16, 163, 164, 4, 204),
        _facts("GeForce RTX 4090", 89, 128, 99, 100, 72, 1008),
        _facts("NVIDIA H100 80GB HBM3", 90, 132, 227, 228, 50, 3352),
        _facts("B200", 100, 148, 227, 228, 126, 8000),
        _facts("GeForce RTX 5090", 120, 170, 99, 100, 96, 1792),
    )
}


def nominal(arch: int) -> Device:
    """The facts of a typical GPU of compute capability ``arch``, or of the nearest older one in the table."""
    known = [a for a in NOMINAL if a <= arch]
    if not known:
        raise ValueError(f"arch: expected a compute capability of {min(NOMINAL)} or more, got {arch}")
    return replace(NOMINAL[max(known)], arch=arch, native=arch)


def forced_arch() -> int | None:
    """The architecture path that the environment forces, or None."""
    text = os.environ.get(ARCH_VARIABLE)
    if not text:
        return None
    if not text.isdecimal() or int(text) < min(NOMINAL):
        raise ValueError(f"{ARCH_VARIABLE}: expected a compute capability such as 75, got {text!r}")
    return int(text)


def current() -> Device:
    """The facts of CuPy's current device; ``CUPY_AWQ_ARCH`` lowers its architecture path."""
    import cupy

    return of(cupy.cuda.runtime.getDevice())


def current_or_nominal() -> Device:
    """The current GPU's facts, or with none those of an H100."""
    return current() if placement.gpu_count() else nominal(90)


@functools.cache
def of(index: int) -> Device:
    """The facts of the GPU numbered ``index``."""
    import cupy

    device = cupy.cuda.Device(index)
    attributes = device.attributes
    arch = int(device.compute_capability)
    forced = forced_arch()
    if forced is not None and forced > arch:
        raise ValueError(f"{ARCH_VARIABLE}: expected at most {arch}, the GPU's own, got {forced}")
    name = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
    return Device(
        name=name,
        arch=forced or arch,
        native=arch,
        sm_count=attributes["MultiProcessorCount"],
        shared_bytes_per_block=attributes["MaxSharedMemoryPerBlockOptin"],
        shared_bytes_per_sm=attributes["MaxSharedMemoryPerMultiprocessor"],
        l2_bytes=attributes["L2CacheSize"],
        # Kilohertz, two transfers a clock, bits.
        read_gbs=attributes["MemoryClockRate"] * 2e3 * attributes["GlobalMemoryBusWidth"] / 8e9,
    )
