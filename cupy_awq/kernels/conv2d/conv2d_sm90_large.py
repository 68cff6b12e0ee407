# SPDX-License-Identifier: Apache-2.0
"""``conv2d_sm90_large``: convolution of many pixels with wgmma; the weight is dequantized to device memory beforehand.

K chunks and pixel tiles are defined as for `conv2d_sm90`, except that a pixel tile may span several images.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.conv2d.conv2d_sm90 import (
    CHUNK,
    CONV2D_SM90,
    MAX_BOX,
    TILE_CO,
    ImageView,
    co_tiles,
    image_view,
    is_box_too_large,
    k_chunks,
    reachable_sms,
    with_halo,
    x_map,
)
from cupy_awq.kernels.conv2d.problem import Convolution, ConvolutionSizes, rounded_parameters
from cupy_awq.kernels.family import Family
from cupy_awq.kernels.hopper import HOPPER
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.packing import namespace
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "conv2d_sm90_large"
MIN_PIXELS = 256
"""The smallest number of output pixels for which the dequantized weight in device memory is worthwhile."""
MAX_HALO_STRIDE = 2
"""The largest stride of a convolution whose filter taps share TMA boxes of x."""
PIXELS = (64, 80, 96, 112, 128, 200, 256)
"""The candidates for wgmma's N (output pixels) if each filter tap has its own TMA box of x."""
HALO_PIXELS = ((56, 1), (56, 2), (64, 1), (64, 2), (112, 1), (112, 2))
"""The candidates for (wgmma's N, pixel tiles per warpgroup) if one TMA box with a halo serves all filter taps."""
FORMS = {
    (2, 1): (112, 256),
    (1, 2): (64, 128),
    (2, 2): (64, 64),
    (3, 1): (112, 128),
    (3, 2): (64, 80),
    (4, 1): (112, 128),
}
"""The range of pixels per warpgroup (wgmma's N) to try, by (warpgroups per CTA, resident CTAs per SM).

With more pixels an SM has too few registers; with fewer, other forms are faster.
"""
SPLITS = (1, 2, 4)
"""The split-K factors to try."""
STORE_ROW_BYTES = TILE_CO * 2 + 16
"""The size in bytes of a pixel in the store buffer of a warpgroup, including 16 bytes of padding."""
TILE_BYTES = TILE_CO * CHUNK * 2
"""The size in bytes of a weight tile of 64 output channels x 64 input channels."""


@dataclass(frozen=True)
class Conv2dSm90LargeCosts:
    """Constants of the cost model, fitted on an H100 to 600 measured times of 30 layers, most of them from ResNet-50.

    The RMS error is 8%. The configuration that the model ranks first is 2% slower than the fastest one (geometric
    mean). ``box_us`` and ``imbalance`` were fitted to 742 further times of 12 layers, 9 of them with 1x1 filters.
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
    """The relative increase of the memory time per CTA slot without a tile and slot with one, with several waves."""
    traffic_overlap: float = 0.24
    """The fraction of the shorter of compute and memory time that does not overlap with the longer one."""


COSTS = Conv2dSm90LargeCosts()


@dataclass(frozen=True)
class Conv2dSm90LargeConfig:
    """A configuration of ``conv2d_sm90_large``, with ``wg_co * wg_px`` consumer warpgroups per CTA.

    Each warpgroup computes 64 output channels of ``pixel_tiles`` pixel tiles.

    Attributes:
        wg_co: number of warpgroups along output channels.
        wg_px: number of warpgroups along pixels.
        pixels: wgmma's N; at least the number of pixels of a pixel tile.
        pixel_tile: size of a pixel tile: (images, rows, pixels per row).
        pixel_tiles: number of pixel tiles per warpgroup.
        halo: whether TMA boxes of x with a halo serve all filter taps; otherwise each tap has its own box.
        x_stages: number of pipeline stages of x.
        weight_stages: number of pipeline stages of the weight.
        split_k: number of CTAs per cluster; each computes a slice of K.
        ctas_per_sm: number of resident CTAs per SM for which the kernel is compiled.
    """

    wg_co: int
    wg_px: int
    pixels: int
    pixel_tile: tuple[int, int, int]
    pixel_tiles: int
    halo: bool
    x_stages: int
    weight_stages: int
    split_k: int
    ctas_per_sm: int

    @property
    def store_bytes(self) -> int:
        """The size in bytes of the store buffers of all warpgroups, each for 32 pixels."""
        return self.warpgroups * 32 * STORE_ROW_BYTES

    @property
    def warpgroups(self) -> int:
        """The number of consumer warpgroups per CTA."""
        return self.wg_co * self.wg_px

    @property
    def weight_bytes(self) -> int:
        """The size of the weight in one pipeline stage, in bytes."""
        return self.wg_co * TILE_BYTES

    def box(self, sizes: ConvolutionSizes) -> tuple[int, int, int]:
        """Return (images, rows, pixels per row) of the TMA box of x."""
        images, height, width = self.pixel_tile
        return (images, *with_halo(sizes, height, width)) if self.halo else self.pixel_tile

    def planes(self, sizes: ConvolutionSizes) -> tuple[int, int]:
        """Return the numbers of TMA boxes along height and width per pixel tile: with a halo, one per remainder."""
        return (sizes.stride_h, sizes.stride_w) if self.halo else (1, 1)

    def x_bytes(self, sizes: ConvolutionSizes) -> int:
        """Return the size of x in one pipeline stage, in bytes."""
        rows = max(self.pixels, math.prod(self.box(sizes)))
        boxes = self.wg_px * self.pixel_tiles * math.prod(self.planes(sizes))
        return boxes * ceil_div(rows * CHUNK * 2, 1024) * 1024

    def shared_bytes(self, sizes: ConvolutionSizes) -> int:
        """Return the shared memory per CTA in bytes: pipeline stages with two mbarriers each, and store buffers."""
        x_bytes, weight_bytes = self.x_bytes(sizes) + 16, self.weight_bytes + 16
        return self.x_stages * x_bytes + self.weight_stages * weight_bytes + self.store_bytes

    def image_tiles(self, problem: Convolution) -> tuple[int, int, int]:
        """Return the numbers of pixel tiles along batch, height and width."""
        image = image_view(problem)
        sizes = image.batch, image.out_h, image.out_w
        images, height, width = (ceil_div(size, tile) for size, tile in zip(sizes, self.pixel_tile, strict=True))
        return images, height, width

    def tiles(self, problem: Convolution) -> int:
        """Return the number of CTA tiles of y, each of which is computed by one cluster."""
        pixel_blocks = ceil_div(math.prod(self.image_tiles(problem)), self.wg_px * self.pixel_tiles)
        return pixel_blocks * self.co_blocks(problem)

    def co_blocks(self, problem: Convolution) -> int:
        """Return the number of CTA tiles along the output channels."""
        return ceil_div(problem.sizes.outputs, self.wg_co * TILE_CO)


def refusal(problem: Convolution, device: Device) -> str | None:
    """Return the reason why the family cannot solve the problem, or None if it can."""
    reason = CONV2D_SM90.refusal(problem, device)
    if reason:
        return reason
    if problem.sizes.pixels < MIN_PIXELS:
        return f"needs {MIN_PIXELS} pixels of y, not {problem.sizes.pixels}"
    if not problem.nhwc or not problem.y_aligned or problem.sizes.outputs % 8:
        return "needs y in NHWC with pixels at multiples of 16 bytes"
    if not configs(problem, device):
        return "needs boxes of pixels that fit in shared memory"
    return None


def configs(problem: Convolution, device: Device) -> list[Conv2dSm90LargeConfig]:
    """Return every configuration whose CTA fits on an SM."""
    return list(_configs(problem, device))


def estimate_us(config: Conv2dSm90LargeConfig, problem: Convolution, device: Device) -> float:
    """Return the run time in microseconds: launch overhead, compute time and memory time.

    The longer of compute and memory time counts fully, and the fraction ``COSTS.traffic_overlap`` of the shorter one.
    The compute time includes copies to shared memory, epilogue and split-K reduction.
    """
    sizes = problem.sizes
    ctas, sms = config.tiles(problem) * config.split_k, reachable_sms(device, config.split_k)
    resident = min(config.ctas_per_sm, ceil_div(ctas, sms))
    waves = ceil_div(ctas, sms * resident)
    cta_chunks = ceil_div(k_chunks(sizes), config.split_k)
    boxes = ceil_div(cta_chunks, sizes.kernel_h * sizes.kernel_w) if config.halo else cta_chunks
    pixels = config.pixel_tiles * config.pixels
    wgmma_cycles = cta_chunks * config.warpgroups * ceil_div(min(sizes.channels, CHUNK), 16) * pixels / 2
    products_us = wgmma_cycles / COSTS.cycles_per_us * resident
    copied_bytes = cta_chunks * config.weight_bytes + boxes * config.x_bytes(sizes)
    copies_us = copied_bytes / COSTS.copied_bytes_per_us * resident
    chunks_us = max(products_us, copies_us) + COSTS.copy_overlap * min(products_us, copies_us)
    if not config.halo:
        chunks_us = max(chunks_us, boxes * COSTS.box_us)
    work_us = waves * (chunks_us + COSTS.tile_us + COSTS.pixel_us * pixels)
    if config.split_k > 1:
        work_us += COSTS.split_us + COSTS.split_pixel_us * pixels * (config.split_k - 1) / config.split_k
    values = sizes.batch * sizes.height * sizes.width * sizes.channels + sizes.pixels * sizes.outputs
    traffic_us = values * 2 / (device.read_gbs * 1e3)
    if waves > 1:
        traffic_us *= 1 + COSTS.imbalance * (waves * sms * resident / ctas - 1)
    return COSTS.launch_us + max(work_us, traffic_us) + COSTS.traffic_overlap * min(work_us, traffic_us)


def plan(config: Conv2dSm90LargeConfig, problem: Convolution, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are weight, bias, y and x."""
    sizes, image = problem.sizes, image_view(problem)
    images, tile_h, tile_w = config.pixel_tile
    _, box_h, box_w = config.box(sizes)
    planes_h, planes_w = config.planes(sizes)
    defines = (
        *(item for item in problem.defines() if item[0] not in ("WEIGHT_OFFSET", "NHWC")),
        ("HALO", int(config.halo)),
        ("WG_CO", config.wg_co),
        ("WG_PX", config.wg_px),
        ("PIXEL_TILES", config.pixel_tiles),
        ("PIXELS", config.pixels),
        ("TILE_N", images),
        ("TILE_H", tile_h),
        ("TILE_W", tile_w),
        ("PLANES_H", planes_h),
        ("PLANES_W", planes_w),
        ("BOX_H", box_h),
        ("BOX_W", box_w),
        ("STEPS", ceil_div(min(sizes.channels, CHUNK), 16)),
        ("X_STAGES", config.x_stages),
        ("WEIGHT_STAGES", config.weight_stages),
        ("SPLIT_K", config.split_k),
        ("CTAS_PER_SM", config.ctas_per_sm),
        ("SHARED_BYTES", config.shared_bytes(sizes)),
    )
    tiles, (_, tiles_h, tiles_w) = config.tiles(problem), config.image_tiles(problem)
    counts = tiles, config.co_blocks(problem), tiles_h, tiles_w, k_chunks(sizes), image.batch
    numbers = (*counts, sizes.outputs, sizes.kernel_h, sizes.kernel_w, image.out_h, image.out_w, *sizes[10:])
    clusters = tiles if config.split_k > 1 else min(tiles, device.sm_count * config.ctas_per_sm)
    x = x_map(problem, images, box_h, box_w)
    return LaunchPlan(
        Kernel("conv2d/conv2d_sm90_large.cu", NAME, defines, device.target),
        (clusters * config.split_k, 1, 1),
        (config.warpgroups * 128 + 32, 1, 1),
        ("weight", "bias", "y", x, *map(np.int32, numbers), *map(np.float32, problem.limits)),
        config.shared_bytes(sizes),
        cluster=(config.split_k, 1, 1),
        dependent=True,
    )


def prepare_weight(weight: BlockQuantizedWeight, problem: Convolution) -> dict[str, Array]:
    """Return the buffer "weight", the dequantized weight; ``cuda_src/conv2d/conv2d_sm90_large.cu`` has the layout."""
    return {"weight": weight.layout(("dense", problem.dtype), lambda: _dense(weight, np.dtype(problem.dtype)))}


def _dense(weight: BlockQuantizedWeight, dtype: np.dtype[np.generic]) -> Array:
    """Return the dequantized weight [ceil(Ci / 64), taps, tiles, 64, 64] as uint16 bits of ``dtype``, swizzled."""
    co, kh, kw, ci = weight.shape
    xp = namespace(weight.stored)
    tiles, chunks = co_tiles(co), ceil_div(ci, CHUNK)
    blocks = xp.arange(ci) // weight.block_size
    scale, offset = (
        a if a is None else a.astype(np.float32).take(blocks, axis=1)[:, None]
        for a in rounded_parameters(weight, dtype)
    )
    values = (weight.codes.reshape(co, kh * kw, ci) - np.float32(1 << (weight.bits - 1))) * scale
    if offset is not None:
        values += offset
    padded = xp.zeros((tiles * TILE_CO, kh * kw, chunks * CHUNK), dtype)
    padded[:co, :, :ci] = values.astype(dtype)
    # Before the transposition the axes are (tile, row // 8, row % 8, tap, chunk, channel // 8, channel % 8).
    axes = padded.view(np.uint16).reshape(tiles, 8, 8, kh * kw, chunks, 8, 8).transpose(4, 3, 0, 1, 2, 5, 6)
    row = xp.arange(8)[:, None]
    swizzled = axes[..., row, row ^ xp.arange(8), :]
    return xp.ascontiguousarray(swizzled).reshape(chunks, kh * kw, tiles, 64, 64)


def _configs(problem: Convolution, device: Device) -> Iterator[Conv2dSm90LargeConfig]:
    sizes, image = problem.sizes, image_view(problem)
    shapes = [(pixels, _pixel_tile(image, sizes, pixels)) for pixels in PIXELS]
    # With N = 256 (128 accumulators) a thread has no registers to mask pixels, so the pixel tile must have N pixels.
    shapes = [shape for shape in shapes if shape[0] <= 200 or math.prod(shape[1]) == shape[0]]
    bases = [
        Conv2dSm90LargeConfig(wg_co, wg_px, pixels, tile, 1, False, 2, 2, 1, ctas_per_sm)
        for pixels, tile in shapes
        for wg_co, wg_px, ctas_per_sm in _forms(sizes.outputs, pixels, math.prod(tile) == pixels)
    ]
    if sizes.kernel_h * sizes.kernel_w > 1 and max(sizes.stride_h, sizes.stride_w) <= MAX_HALO_STRIDE:
        wg_co, wg_px = _two_warpgroups(sizes.outputs)
        bases += [
            Conv2dSm90LargeConfig(wg_co, wg_px, pixels, (1, pixels // 8, 8), tiles, True, 2, 2, 1, 1)
            for pixels, tiles in HALO_PIXELS
        ]
    for base, split_k in itertools.product(bases, SPLITS):
        if split_k > k_chunks(sizes) or (split_k > 1 and (base.warpgroups, base.ctas_per_sm) != (2, 1)):
            continue
        config = replace(base, split_k=split_k)
        stages = _max_stages(config, problem, device)
        if stages is not None:
            yield replace(config, x_stages=stages[0], weight_stages=stages[1])


def _two_warpgroups(outputs: int) -> tuple[int, int]:
    """Return (``wg_co``, ``wg_px``) of a CTA with two warpgroups."""
    return (1, 2) if outputs <= TILE_CO else (2, 1)


def _forms(outputs: int, pixels: int, is_full: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (``wg_co``, ``wg_px``, ``ctas_per_sm``) to try if each filter tap has its own TMA box of x.

    ``is_full`` is whether a pixel tile has ``pixels`` pixels. If not, four warpgroups are slower than two: by 5% for
    1x1 filters with stride 2, 112 to 488 channels and 40x40 pixels on an H100.
    """
    for (warpgroups, ctas_per_sm), (fewest, most) in FORMS.items():
        wg_co, wg_px = _two_warpgroups(outputs) if warpgroups == 2 else (warpgroups, 1)
        # The stored weight has an even number of 64-output tiles, or one.
        is_stored = ceil_div(outputs, wg_co * TILE_CO) * wg_co <= co_tiles(outputs)
        if fewest <= pixels <= most and is_stored and (warpgroups < 4 or is_full):
            yield wg_co, wg_px, ctas_per_sm


def _max_stages(config: Conv2dSm90LargeConfig, problem: Convolution, device: Device) -> tuple[int, int] | None:
    """Return the numbers of stages of x and of the weight that fit in shared memory.

    Returns None if fewer than 2 stages of x or of the weight fit, if a TMA box would be too large, or if the stages
    cannot hold the partial sums of split-K, which overwrite them.
    """
    sizes = problem.sizes
    if is_box_too_large(sizes, *config.box(sizes)[1:]):
        return None
    # The driver reserves 1 KiB of shared memory for each CTA.
    per_cta = min(device.shared_bytes_per_block, device.shared_bytes_per_sm // config.ctas_per_sm - 1024)
    free_bytes = per_cta - config.store_bytes
    x_bytes, weight_bytes = config.x_bytes(sizes) + 16, config.weight_bytes + 16
    if config.halo:
        stages = 2, min((free_bytes - 2 * x_bytes) // weight_bytes, 8)
    else:
        stages = (min(free_bytes // (x_bytes + weight_bytes), 6),) * 2
    if min(stages) < 2:
        return None
    groups = ceil_div(config.pixel_tiles * config.pixels // 8, config.split_k)
    partial_bytes = config.split_k * groups * config.warpgroups * 2048 if config.split_k > 1 else 0
    return stages if partial_bytes <= stages[0] * (x_bytes - 16) + stages[1] * (weight_bytes - 16) else None


def _pixel_tile(image: ImageView, sizes: ConvolutionSizes, pixels: int) -> tuple[int, int, int]:
    """Return (images, rows, pixels per row) of a tile of at most ``pixels`` pixels, of whole rows if possible."""
    if image.flat:
        return 1, 1, pixels
    width = _even_tile(image.out_w, min(pixels, (MAX_BOX - 1) // sizes.stride_w + 1))
    height = _even_tile(image.out_h, min(pixels // width, (MAX_BOX - 1) // sizes.stride_h + 1))
    is_whole = (height, width) == (image.out_h, image.out_w)
    return _even_tile(image.batch, pixels // (height * width)) if is_whole else 1, height, width


def _even_tile(size: int, most: int) -> int:
    """Return the tile size that divides ``size`` into the fewest tiles of at most ``most``, as evenly as possible."""
    return ceil_div(size, ceil_div(size, most))


class Conv2dSm90Large(Family[Convolution, Conv2dSm90LargeConfig]):
    """The family ``conv2d_sm90_large``."""

    NAME = NAME
    needs = HOPPER
    refusal = staticmethod(refusal)
    configs = staticmethod(configs)
    estimate_us = staticmethod(estimate_us)
    plan = staticmethod(plan)
    prepare_weight = staticmethod(prepare_weight)


CONV2D_SM90_LARGE = Conv2dSm90Large()
