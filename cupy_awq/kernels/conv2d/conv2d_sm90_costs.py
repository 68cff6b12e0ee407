# SPDX-License-Identifier: Apache-2.0
"""The cost models of ``conv2d_sm90``: one for codes, and one for a weight that has been dequantized beforehand."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_awq.kernels.conv2d.conv2d_sm90_config import CHUNK, Conv2dSm90Config, k_chunks
from cupy_awq.kernels.conv2d.problem import Convolution
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Device


@dataclass(frozen=True)
class CodesCosts:
    """Constants of the cost model with codes, fitted to 151 measured times on an H100; RMS error 15%.

    The configuration that the model ranks first is 2% slower than the fastest one (geometric mean). With a single
    warpgroup per SM, the tensor cores idle while the warpgroup dequantizes; with three warpgroups, the tensor cores are
    always occupied.
    """

    cycles_per_us: float = 1700.0
    """The SM clock in cycles per microsecond."""
    product_factor: float = 0.87
    """The ratio of measured to nominal tensor-core cycles per K chunk, on an SM with several warpgroups."""
    min_chunk_cycles: float = 180.0
    """The lower bound of the tensor-core cycles per K chunk and warpgroup."""
    conversion_cycles: float = 386.0
    """The cycles that a warpgroup takes to dequantize the weights of a K chunk; only other warpgroups can hide them."""
    tile_us: float = 1.14
    """The fixed time of the epilogue per CTA tile, in microseconds."""
    pixel_us: float = 0.0033
    """The additional epilogue time per wave, in microseconds per output pixel, summed over the warpgroups of an SM."""
    l2_bytes_per_us: float = 5.7e6
    """The L2 bandwidth of all SMs together, in bytes per microsecond."""
    overlap: float = 0.4
    """The fraction of the shorter of compute and memory time that does not overlap with the longer one."""
    split_us: float = 0.8
    """The fixed time of the split-K reduction, in microseconds."""
    each_split_us: float = 0.25
    """The additional time of the split-K reduction per CTA of the cluster, in microseconds."""
    cluster_occupancy: float = 0.85
    """The fraction of SMs that clusters of 4 or more CTAs can occupy, because a cluster must fit in a GPC."""


@dataclass(frozen=True)
class DenseCosts:
    """Constants of the cost model with a dequantized weight, fitted to 600 measured times of 30 layers on an H100.

    Most layers are from ResNet-50. The RMS error is 8%. The configuration that the model ranks first is 2% slower than
    the fastest one (geometric mean). ``box_us`` and ``imbalance`` were fitted to 742 further times of 12 layers, 9 of
    them with 1x1 filters.
    """

    launch_us: float = 1.2
    """The launch overhead, in microseconds."""
    cycles_per_us: float = 1760.0
    """The SM clock in cycles per microsecond."""
    copied_bytes_per_us: float = 89.7e3
    """The bandwidth of one SM for copies to shared memory, in bytes per microsecond."""
    copy_overlap: float = 0.145
    """The fraction of the shorter of tensor-core and copy time that does not overlap with the longer one."""
    box_us: float = 0.37
    """The lower bound of the time per K chunk if each K chunk has a TMA box of its own, in microseconds."""
    tile_us: float = 0.54
    """The fixed time of the epilogue per CTA tile, in microseconds."""
    pixel_us: float = 0.0052
    """The additional time of the epilogue per output pixel of a warpgroup, in microseconds."""
    split_us: float = 1.28
    """The fixed time of the split-K reduction, in microseconds."""
    split_pixel_us: float = 0.0177
    """The additional time of the split-K reduction, in microseconds per pixel that a warpgroup sends to other CTAs."""
    imbalance: float = 0.6
    """The factor by which (idle CTA slots of the last wave / CTAs) increases the memory time, with several waves."""
    traffic_overlap: float = 0.24
    """The fraction of the shorter of compute and memory time that does not overlap with the longer one."""


CODES, DENSE = CodesCosts(), DenseCosts()


def estimate_us(config: Conv2dSm90Config, problem: Convolution, device: Device) -> float:
    """Return the run time in microseconds: compute time, memory time, and the split-K reduction.

    The longer of compute and memory time counts fully, and a fraction of the shorter one. The compute time includes the
    epilogue and, with a dequantized weight, copies to shared memory and the split-K reduction.
    """
    return (_dense_us if config.dense else _codes_us)(config, problem, device)


def _codes_us(config: Conv2dSm90Config, problem: Convolution, device: Device) -> float:
    sizes = problem.sizes
    _, box_h, box_w = config.box(sizes)
    ctas = config.tiles(problem) * config.split_k
    cta_chunks = ceil_div(k_chunks(sizes), config.split_k)
    waves = ceil_div(ctas, _reachable_sms(device, config.split_k) * config.ctas_per_sm)
    warpgroups_per_sm = config.ctas_per_sm * config.warpgroups
    wgmma_cycles = ceil_div(min(sizes.channels, CHUNK), 16) * config.pixels / 2
    sm_cycles = warpgroups_per_sm * max(CODES.product_factor * wgmma_cycles, CODES.min_chunk_cycles)
    chunk_us = max(sm_cycles, wgmma_cycles + CODES.conversion_cycles) / CODES.cycles_per_us
    work_us = waves * (cta_chunks * chunk_us + CODES.tile_us + CODES.pixel_us * warpgroups_per_sm * config.pixels)
    y_bytes = sizes.pixels * sizes.outputs * 2
    x_bytes = sizes.batch * sizes.height * sizes.width * sizes.channels * 2
    boxes = ceil_div(cta_chunks, sizes.kernel_h * sizes.kernel_w) if config.halo else cta_chunks
    box_bytes = config.wg_px * box_h * box_w * CHUNK * 2
    cta_bytes = box_bytes * boxes + cta_chunks * config.weight_bytes(problem)
    l2_us = (ctas * cta_bytes + y_bytes) / CODES.l2_bytes_per_us
    traffic_us = max(l2_us, (x_bytes + y_bytes) / (device.read_gbs * 1e3))
    split_us = CODES.split_us + CODES.each_split_us * config.split_k if config.split_k > 1 else 0.0
    return max(work_us, traffic_us) + CODES.overlap * min(work_us, traffic_us) + split_us


def _dense_us(config: Conv2dSm90Config, problem: Convolution, device: Device) -> float:
    sizes = problem.sizes
    ctas, sms = config.tiles(problem) * config.split_k, _reachable_sms(device, config.split_k)
    resident = min(config.ctas_per_sm, ceil_div(ctas, sms))
    waves = ceil_div(ctas, sms * resident)
    cta_chunks = ceil_div(k_chunks(sizes), config.split_k)
    boxes = ceil_div(cta_chunks, sizes.kernel_h * sizes.kernel_w) if config.halo else cta_chunks
    pixels = config.pixel_tiles * config.pixels
    wgmma_cycles = cta_chunks * config.warpgroups * ceil_div(min(sizes.channels, CHUNK), 16) * pixels / 2
    products_us = wgmma_cycles / DENSE.cycles_per_us * resident
    copied_bytes = cta_chunks * config.weight_bytes(problem) + boxes * config.x_bytes(sizes)
    copies_us = copied_bytes / DENSE.copied_bytes_per_us * resident
    chunks_us = max(products_us, copies_us) + DENSE.copy_overlap * min(products_us, copies_us)
    if not config.halo:
        chunks_us = max(chunks_us, boxes * DENSE.box_us)
    work_us = waves * (chunks_us + DENSE.tile_us + DENSE.pixel_us * pixels)
    if config.split_k > 1:
        work_us += DENSE.split_us + DENSE.split_pixel_us * pixels * (config.split_k - 1) / config.split_k
    values = sizes.batch * sizes.height * sizes.width * sizes.channels + sizes.pixels * sizes.outputs
    traffic_us = values * 2 / (device.read_gbs * 1e3)
    if waves > 1:
        traffic_us *= 1 + DENSE.imbalance * (waves * sms * resident / ctas - 1)
    return DENSE.launch_us + max(work_us, traffic_us) + DENSE.traffic_overlap * min(work_us, traffic_us)


def _reachable_sms(device: Device, split_k: int) -> int:
    """Return the number of SMs that clusters of ``split_k`` CTAs can occupy."""
    return device.sm_count if split_k < 4 else int(device.sm_count * CODES.cluster_occupancy)
