# SPDX-License-Identifier: Apache-2.0
"""``conv2d_sm90``: convolution with wgmma over NHWC images; the weight is dequantized in registers.

K is processed in chunks of one filter tap x 64 input channels (K chunks). A pixel tile is a rectangle of the output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.conv2d.problem import Convolution, ConvolutionSizes, sm90_refusal
from cupy_awq.kernels.family import Family
from cupy_awq.kernels.hopper import HOPPER
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.packing import namespace
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan, TensorMap

NAME = "conv2d_sm90"
TILE_CO = 64
"""The number of output channels per warpgroup (wgmma's M)."""
CHUNK = 64
"""The number of input channels per K chunk."""
MIN_CHANNELS = 16
"""The smallest number of input channels."""
PIXELS = (32, 56, 64, 112, 128)
"""The candidates for the number of output pixels per warpgroup (wgmma's N)."""
CLUSTERS = (1, 2, 4, 8)
"""The candidates for the number of CTAs per cluster, which is also the split-K factor."""
MAX_BOX = 256
"""The largest height and width of a TMA box, in pixels of x."""
MAX_BOX_STRIDE = 8
"""The largest element stride of a tensor map (``elementStrides``), in elements."""
STORE_ROW_BYTES = TILE_CO * 2 + 16
"""The size of one pixel of the output tile in shared memory in bytes, including 16 bytes of padding."""


@dataclass(frozen=True)
class Conv2dSm90Costs:
    """Constants of the cost model, fitted to 151 measured times on an H100; RMS error 15%.

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


COSTS = Conv2dSm90Costs()


class ImageView(NamedTuple):
    """The image sizes as the kernel sees them: for a 1x1 filter, the pixels of all images may form a single row."""

    batch: int
    """The number of images."""
    height: int
    """The input height in pixels."""
    width: int
    """The input width in pixels."""
    out_h: int
    """The output height in pixels."""
    out_w: int
    """The output width in pixels."""
    flat: bool
    """Whether the pixels of all images form a single row."""


def image_view(problem: Convolution) -> ImageView:
    """Return the image sizes as the kernel sees them: a single row of pixels if filter and strides permit it."""
    sizes = problem.sizes
    batch, row, pixel, _ = problem.strides
    pointwise = (sizes.kernel_h, sizes.kernel_w, sizes.stride_h, sizes.stride_w) == (1, 1, 1, 1)
    image_elements = sizes.height * sizes.width * pixel
    contiguous = (sizes.height == 1 or row == sizes.width * pixel) and (sizes.batch == 1 or batch == image_elements)
    same_size = (sizes.out_h, sizes.out_w) == (sizes.height, sizes.width)
    if pointwise and same_size and contiguous and (problem.nhwc or sizes.batch == 1):
        return ImageView(1, 1, sizes.pixels, 1, sizes.pixels, True)
    return ImageView(sizes.batch, sizes.height, sizes.width, sizes.out_h, sizes.out_w, False)


def co_tiles(outputs: int) -> int:
    """Return the number of 64-channel tiles of the output: 1, or an even number, because a CTA may take two tiles."""
    tiles = ceil_div(outputs, TILE_CO)
    return tiles if tiles == 1 else tiles + tiles % 2


def parameter_groups(block_size: int, channels: int) -> int:
    """Return the number of (scale, offset) pairs per output channel and 64 input channels."""
    return 1 if block_size >= channels else CHUNK // math.gcd(block_size, CHUNK)


def k_chunks(sizes: ConvolutionSizes) -> int:
    """Return the number of K chunks, each of one filter tap x 64 input channels."""
    return sizes.kernel_h * sizes.kernel_w * ceil_div(sizes.channels, CHUNK)


def with_halo(sizes: ConvolutionSizes, height: int, width: int) -> tuple[int, int]:
    """Return (height, width) in pixels of the boxes that hold the input of all filter taps of an output rectangle.

    With a stride s, there is a box for each of the s * s remainders of (row, column) modulo s.
    """
    above, left = sizes.pad_h % sizes.stride_h, sizes.pad_w % sizes.stride_w
    below, right = (sizes.kernel_h - 1) * sizes.dilation_h, (sizes.kernel_w - 1) * sizes.dilation_w
    return height + (above + below) // sizes.stride_h, width + (left + right) // sizes.stride_w


def is_box_too_large(sizes: ConvolutionSizes, height: int, width: int) -> bool:
    """Return whether a TMA box of ``height`` x ``width`` pixels of x, spaced by the stride, would exceed MAX_BOX."""
    return max((height - 1) * sizes.stride_h, (width - 1) * sizes.stride_w) >= MAX_BOX


def x_map(problem: Convolution, images: int, height: int, width: int) -> TensorMap:
    """Return the tensor map of x with boxes of ``images`` x ``height`` x ``width`` pixels x 64 channels."""
    sizes, image = problem.sizes, image_view(problem)
    batch, row, pixel, _ = problem.strides
    return TensorMap(
        "x",
        problem.dtype,
        dims=(sizes.channels, image.width, image.height, image.batch),
        strides=(pixel * 2, pixel * 2 if image.flat else row * 2, pixel * 2 if image.flat else batch * 2),
        box=(CHUNK, width, height, images),
        swizzle=128,
        steps=(1, sizes.stride_w, sizes.stride_h, 1),
    )


def reachable_sms(device: Device, split_k: int) -> int:
    """Return the number of SMs that clusters of ``split_k`` CTAs can occupy."""
    return device.sm_count if split_k < 4 else int(device.sm_count * COSTS.cluster_occupancy)


@dataclass(frozen=True)
class Conv2dSm90Config:
    """A configuration of ``conv2d_sm90``: ``wg_co * wg_px`` warpgroups per CTA.

    Each warpgroup computes 64 output channels of a pixel tile of ``tile_h * tile_w`` output pixels.

    Attributes:
        wg_co: number of warpgroups along output channels.
        wg_px: number of warpgroups along pixels.
        tile_h: height of a pixel tile.
        tile_w: width of a pixel tile.
        halo: whether one TMA box of x with a halo serves all filter taps; otherwise each tap has its own box.
        x_stages: number of pipeline stages of x.
        code_stages: number of pipeline stages of the weight's codes.
        split_k: number of CTAs per cluster; each computes a slice of K.
        ctas_per_sm: number of resident CTAs per SM for which the kernel is compiled.
    """

    wg_co: int
    wg_px: int
    tile_h: int
    tile_w: int
    halo: bool
    x_stages: int
    code_stages: int
    split_k: int
    ctas_per_sm: int

    @property
    def warpgroups(self) -> int:
        """The number of consumer warpgroups per CTA."""
        return self.wg_co * self.wg_px

    @property
    def threads(self) -> int:
        """The number of threads per CTA: the consumer warpgroups and one producer warp."""
        return self.warpgroups * 128 + 32

    @property
    def pixels(self) -> int:
        """The number of output pixels per warpgroup."""
        return self.tile_h * self.tile_w

    def box(self, sizes: ConvolutionSizes) -> tuple[int, int]:
        """Return (rows, pixels per row) of the TMA box of x."""
        return with_halo(sizes, self.tile_h, self.tile_w) if self.halo else (self.tile_h, self.tile_w)

    def shared_bytes(self, problem: Convolution) -> int:
        """Return the shared memory per CTA in bytes: pipeline stages or output tile, partial sums, and mbarriers."""
        height, width = self.box(problem.sizes)
        x_bytes = self.wg_px * ceil_div(height * width * CHUNK * 2, 1024) * 1024
        parameter_bytes = self.wg_co * parameter_groups(problem.block_size, problem.sizes.channels) * TILE_CO * 4
        code_bytes = self.wg_co * TILE_CO * CHUNK * problem.bits // 8
        stage_bytes = self.x_stages * (x_bytes + parameter_bytes) + self.code_stages * code_bytes
        owned_groups = ceil_div(self.pixels // 8, self.split_k)  # number of 8-pixel groups that a CTA sums and stores
        store_bytes = self.warpgroups * ceil_div(owned_groups, 2) * 16 * STORE_ROW_BYTES
        partial_bytes = 0 if self.split_k == 1 else self.split_k * self.warpgroups * owned_groups * 2048
        return max(stage_bytes, store_bytes) + partial_bytes + 16 * (self.x_stages + self.code_stages)

    def tiles(self, problem: Convolution) -> int:
        """Return the number of CTA tiles of y, each of which is computed by one cluster."""
        image = image_view(problem)
        pixel_tiles = image.batch * ceil_div(image.out_h, self.tile_h) * ceil_div(image.out_w, self.tile_w)
        return ceil_div(pixel_tiles, self.wg_px) * (co_tiles(problem.sizes.outputs) // self.wg_co)


def refusal(problem: Convolution, device: Device) -> str | None:
    """Return the reason why the family cannot solve the problem, or None if it can."""
    sizes = problem.sizes
    reason = sm90_refusal(problem, device)
    if reason:
        return reason
    if sizes.groups > 1:
        return f"takes one group, not {sizes.groups}"
    if sizes.channels < MIN_CHANNELS:
        return f"needs {MIN_CHANNELS} channels or more, not {sizes.channels}"
    if problem.block_size % 16 and problem.block_size < sizes.channels:
        return f"needs blocks that are multiples of 16 channels, not {problem.block_size}"
    if max(sizes.stride_h, sizes.stride_w) > MAX_BOX_STRIDE:
        return f"takes strides of up to {MAX_BOX_STRIDE} pixels, not {max(sizes.stride_h, sizes.stride_w)}"
    if min(problem.strides[:3]) <= 0:
        return "needs x with positive strides"
    if not configs(problem, device):
        return "needs boxes of pixels that fit in shared memory"
    return None


def configs(problem: Convolution, device: Device) -> list[Conv2dSm90Config]:
    """Return every configuration whose CTA fits on an SM."""
    return list(_configs(problem, device))


def estimate_us(config: Conv2dSm90Config, problem: Convolution, device: Device) -> float:
    """Return the run time in microseconds: compute time, memory time and split-K reduction.

    The longer of compute and memory time counts fully, and the fraction ``COSTS.overlap`` of the shorter one.
    """
    sizes = problem.sizes
    box_h, box_w = config.box(sizes)
    ctas = config.tiles(problem) * config.split_k
    cta_chunks = ceil_div(k_chunks(sizes), config.split_k)
    waves = ceil_div(ctas, reachable_sms(device, config.split_k) * config.ctas_per_sm)
    warpgroups_per_sm = config.ctas_per_sm * config.warpgroups
    wgmma_cycles = ceil_div(min(sizes.channels, CHUNK), 16) * config.pixels / 2
    sm_cycles = warpgroups_per_sm * max(COSTS.product_factor * wgmma_cycles, COSTS.min_chunk_cycles)
    chunk_us = max(sm_cycles, wgmma_cycles + COSTS.conversion_cycles) / COSTS.cycles_per_us
    work_us = waves * (cta_chunks * chunk_us + COSTS.tile_us + COSTS.pixel_us * warpgroups_per_sm * config.pixels)
    y_bytes = sizes.pixels * sizes.outputs * 2
    x_bytes = sizes.batch * sizes.height * sizes.width * sizes.channels * 2
    boxes = ceil_div(cta_chunks, sizes.kernel_h * sizes.kernel_w) if config.halo else cta_chunks
    box_bytes = config.wg_px * box_h * box_w * CHUNK * 2
    cta_bytes = box_bytes * boxes + cta_chunks * config.wg_co * TILE_CO * CHUNK * problem.bits / 8
    l2_us = (ctas * cta_bytes + y_bytes) / COSTS.l2_bytes_per_us
    traffic_us = max(l2_us, (x_bytes + y_bytes) / (device.read_gbs * 1e3))
    split_us = COSTS.split_us + COSTS.each_split_us * config.split_k if config.split_k > 1 else 0.0
    return max(work_us, traffic_us) + COSTS.overlap * min(work_us, traffic_us) + split_us


def plan(config: Conv2dSm90Config, problem: Convolution, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are codes, parameters, bias, y and x."""
    sizes, image = problem.sizes, image_view(problem)
    box_h, box_w = config.box(sizes)
    defines = (
        *(item for item in problem.defines() if item[0] != "WEIGHT_OFFSET"),
        ("BITS", problem.bits),
        ("ALIGNED", int(problem.y_aligned and sizes.outputs % 8 == 0)),
        ("WG_CO", config.wg_co),
        ("WG_PX", config.wg_px),
        ("TILE_H", config.tile_h),
        ("TILE_W", config.tile_w),
        ("HALO", int(config.halo)),
        ("BOX_H", box_h),
        ("BOX_W", box_w),
        ("PARAMETER_GROUPS", parameter_groups(problem.block_size, sizes.channels)),
        ("STEPS", ceil_div(min(sizes.channels, CHUNK), 16)),
        ("X_STAGES", config.x_stages),
        ("CODE_STAGES", config.code_stages),
        ("SPLIT_K", config.split_k),
        ("CTAS_PER_SM", config.ctas_per_sm),
        ("SHARED_BYTES", config.shared_bytes(problem)),
    )
    tiles_h, tiles_w = ceil_div(image.out_h, config.tile_h), ceil_div(image.out_w, config.tile_w)
    co_blocks = co_tiles(sizes.outputs) // config.wg_co
    counts = tiles_h * tiles_w, tiles_w, co_blocks, k_chunks(sizes), image.batch, sizes.outputs
    numbers = (*counts, sizes.kernel_h, sizes.kernel_w, image.out_h, image.out_w, *sizes[10:])
    x = x_map(problem, 1, box_h, box_w)
    return LaunchPlan(
        Kernel("conv2d/conv2d_sm90.cu", NAME, defines, device.target),
        (config.tiles(problem) * config.split_k, 1, 1),
        (config.threads, 1, 1),
        ("codes", "parameters", "bias", "y", x, *map(np.int32, numbers), *map(np.float32, problem.limits)),
        config.shared_bytes(problem),
        cluster=(config.split_k, 1, 1),
        dependent=True,
    )


def prepare_weight(weight: BlockQuantizedWeight, problem: Convolution) -> dict[str, Array]:
    """Return the weight buffers "codes" and "parameters", in the layouts of ``cuda_src/conv2d/conv2d_sm90.cu``."""
    dtype = np.dtype(problem.dtype)
    return {
        "codes": weight.layout("conv2d sm90 codes", lambda: _codes(weight)),
        "parameters": weight.layout(("conv2d sm90 parameters", problem.dtype), lambda: _parameters(weight, dtype)),
    }


def _codes(weight: BlockQuantizedWeight) -> Array:
    co, kh, kw, ci = weight.shape
    xp = namespace(weight.stored)
    tiles, chunks = co_tiles(co), ceil_div(ci, CHUNK)
    padded = xp.zeros((tiles * TILE_CO, kh * kw, chunks * CHUNK), np.uint8)
    padded[:co, :, :ci] = weight.codes.reshape(co, kh * kw, ci)
    # The axes are (tile, warp, row half, g, tap, chunk, k16, k half, t, pair), where g and t are the row and column
    # groups of an mma fragment and "chunk" is 64 channels.
    axes = padded.reshape(tiles, 4, 2, 8, kh * kw, chunks, 4, 2, 4, 2)
    if weight.bits == 4:
        # The order is [chunk, tap, tile, warp, g, t, k16][pair, k half, row half]; the last three axes are the nibbles
        # of a word, lowest first.
        nibbles = axes.transpose(5, 4, 0, 1, 3, 8, 6, 9, 7, 2).reshape(-1, 8)
        words = nibbles[:, ::2] | nibbles[:, 1::2] << np.uint8(4)
    else:
        # The order is [chunk, tap, tile, pair of k16, warp, g, t, k16][k half][pair, row half].
        axes = axes.reshape(tiles, 4, 2, 8, kh * kw, chunks, 2, 2, 2, 4, 2)
        words = axes.transpose(5, 4, 0, 6, 1, 3, 9, 7, 8, 10, 2)
    return xp.ascontiguousarray(words)


def _parameters(weight: BlockQuantizedWeight, dtype: np.dtype[np.generic]) -> Array:
    """Return the (scale, offset) pairs [ceil(Ci / 64), tiles, groups, 64, 2], rounded to ``dtype``, the dtype of x."""
    co, _, _, ci = weight.shape
    xp = namespace(weight.scale)
    tiles, chunks = co_tiles(co), ceil_div(ci, CHUNK)
    groups = parameter_groups(weight.block_size, ci)
    weight_blocks = xp.asarray([begin // weight.block_size for begin in range(0, ci, CHUNK // groups)])
    padded = xp.zeros((chunks * groups, tiles * TILE_CO, 2), dtype)
    for index, a in enumerate((weight.scale, weight.offset)):
        if a is not None:
            padded[: len(weight_blocks), :co, index] = a.take(weight_blocks, axis=1).T.astype(dtype)
    ordered = padded.reshape(chunks, groups, tiles, TILE_CO, 2).transpose(0, 2, 1, 3, 4)
    return xp.ascontiguousarray(ordered)


def _configs(problem: Convolution, device: Device) -> Iterator[Conv2dSm90Config]:
    sizes, image = problem.sizes, image_view(problem)
    taps = sizes.kernel_h * sizes.kernel_w
    halo = (sizes.stride_h, sizes.stride_w) == (1, 1)
    warpgroups = [(1, 1), (1, 2)] if co_tiles(sizes.outputs) == 1 else [(1, 1), (2, 1)]
    for pixels, (wg_co, wg_px), split_k in itertools.product(PIXELS, warpgroups, CLUSTERS):
        tile = (1, pixels) if image.flat else (pixels // 8, 8)
        cta_chunks = ceil_div(k_chunks(sizes), split_k)
        if split_k > min(k_chunks(sizes), pixels // 8):
            continue
        # Clusters of 4 or more CTAs are tried only with the smallest CTAs: with larger CTAs too few are resident.
        if split_k > 2 and (wg_co, wg_px) != (1, 1):
            continue
        # Without a halo, each K chunk has a box of its own, and the stage of box i is released only after box i + 2 has
        # arrived. So at least three stages are needed, or one per K chunk.
        x_stages = min(2, ceil_div(cta_chunks + taps - 1, taps)) if halo and taps > 1 else min(4, cta_chunks)
        for code_stages in dict.fromkeys((min(cta_chunks, 8), min(cta_chunks, 4))):
            config = Conv2dSm90Config(wg_co, wg_px, *tile, halo, x_stages, code_stages, split_k, 1)
            ctas_per_sm = _max_ctas_per_sm(config, problem, device)
            # Two warpgroups with small tiles keep the tensor cores occupied only if the SM holds a second CTA.
            if ctas_per_sm >= (2 if wg_co * wg_px == 2 and pixels < 112 else 1):
                yield replace(config, ctas_per_sm=ctas_per_sm)
                break


def _max_ctas_per_sm(config: Conv2dSm90Config, problem: Convolution, device: Device) -> int:
    """Return the number of resident CTAs per SM, at most 3, or 0 if a CTA does not fit on an SM."""
    sizes = problem.sizes
    shared_bytes = config.shared_bytes(problem)
    if shared_bytes > device.shared_bytes_per_block or is_box_too_large(sizes, *config.box(sizes)):
        return 0
    # A thread needs registers for accumulators, the codes of a K chunk (``bits`` words), and about 62 others, such as
    # operand A of two K chunks. Each of the four schedulers of an SM has 16384 registers.
    registers = ceil_div(config.pixels // 2 + 62 + problem.bits + config.split_k, 8) * 8
    warps = 4 * (16384 // (32 * registers))
    # The driver reserves 1 KiB of shared memory for each CTA.
    return min(3, device.shared_bytes_per_sm // (shared_bytes + 1024), warps // (config.threads // 32))


class Conv2dSm90(Family[Convolution, Conv2dSm90Config]):
    """The family ``conv2d_sm90``."""

    NAME = NAME
    needs = HOPPER
    refusal = staticmethod(refusal)
    configs = staticmethod(configs)
    estimate_us = staticmethod(estimate_us)
    plan = staticmethod(plan)
    prepare_weight = staticmethod(prepare_weight)


CONV2D_SM90 = Conv2dSm90()
