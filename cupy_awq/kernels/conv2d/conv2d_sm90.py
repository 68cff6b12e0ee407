# SPDX-License-Identifier: Apache-2.0
"""``conv2d_sm90``: convolution with wgmma over NHWC images.

The weight is dequantized in registers or, for many pixels, to device memory beforehand. A pixel tile is a rectangle of
the output; with a dequantized weight it may span several images.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.conv2d.conv2d_sm90_config import (
    CHUNK,
    MAX_BOX,
    TILE_CO,
    Conv2dSm90Config,
    ImageView,
    co_tiles,
    image_view,
    is_box_too_large,
    k_chunks,
    parameter_groups,
    x_map,
)
from cupy_awq.kernels.conv2d.conv2d_sm90_costs import estimate_us
from cupy_awq.kernels.conv2d.problem import Convolution, ConvolutionSizes, rounded_parameters, sm90_refusal
from cupy_awq.kernels.family import FunctionFamily, constants
from cupy_awq.kernels.hopper import HOPPER
from cupy_awq.kernels.tiling import RESERVED_BYTES, ceil_div
from cupy_awq.packing import namespace
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "conv2d_sm90"
MIN_CHANNELS = 16
"""The smallest number of input channels that the kernel takes: one k16 step of wgmma."""
PIXELS = (32, 56, 64, 112, 128)
"""The numbers of output pixels per warpgroup (wgmma's N) to try if the kernel dequantizes codes."""
CLUSTERS = (1, 2, 4, 8)
"""The numbers of CTAs per cluster to try if the kernel dequantizes codes; the CTAs of a cluster split K."""
MAX_BOX_STRIDE = 8
"""The largest element stride of a tensor map (``elementStrides``), in elements."""
MIN_DENSE_PIXELS = 256
"""The smallest number of output pixels for which the dequantized weight in device memory is worthwhile."""
MAX_HALO_STRIDE = 2
"""The largest stride of a convolution whose filter taps share TMA boxes of x."""
DENSE_PIXELS = (64, 80, 96, 112, 128, 200, 256)
"""The values of wgmma's N to try with a dequantized weight, if each filter tap has its own TMA box of x."""
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
DENSE_SPLITS = (1, 2, 4)
"""The split-K factors to try with a weight that is dequantized beforehand."""


def refusal(problem: Convolution, device: Device) -> str | None:
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
    """Return every configuration whose CTA fits on an SM, those with codes first."""
    found = list(_codes_configs(problem, device))
    # Persistent CTAs store y only in vectors of 16 bytes.
    stores_vectors = problem.nhwc and problem.y_aligned and problem.sizes.outputs % 8 == 0
    if problem.sizes.pixels >= MIN_DENSE_PIXELS and stores_vectors:
        found += _dense_configs(problem, device)
    return found


def plan(config: Conv2dSm90Config, problem: Convolution, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are weight, parameters, bias, y and x."""
    sizes, image = problem.sizes, image_view(problem)
    tile_n, tile_h, tile_w = config.pixel_tile
    _, box_h, box_w = config.box(sizes)
    planes_h, planes_w = config.planes(sizes)
    defines = (
        *(item for item in problem.defines() if item[0] != "WEIGHT_OFFSET"),
        ("BITS", config.bits(problem)),
        ("ALIGNED", int(problem.y_aligned and sizes.outputs % 8 == 0)),
        *constants(config, "halo wg_co wg_px pixel_tiles pixels"),
        ("TILE_N", tile_n),
        ("TILE_H", tile_h),
        ("TILE_W", tile_w),
        ("PLANES_H", planes_h),
        ("PLANES_W", planes_w),
        ("BOX_H", box_h),
        ("BOX_W", box_w),
        ("PARAMETER_GROUPS", 1 if config.dense else parameter_groups(problem.block_size, sizes.channels)),
        ("STEPS", ceil_div(min(sizes.channels, CHUNK), 16)),
        *constants(config, "x_stages weight_stages split_k ctas_per_sm"),
        ("SHARED_BYTES", config.shared_bytes(problem)),
    )
    tiles, (_, tiles_h, tiles_w) = config.tiles(problem), config.image_tiles(problem)
    counts = tiles, tiles_h * tiles_w, tiles_w, config.co_blocks(problem), co_tiles(sizes.outputs), k_chunks(sizes)
    shape = image.batch, sizes.outputs, sizes.kernel_h, sizes.kernel_w, image.out_h, image.out_w, *sizes[10:]
    is_persistent = config.dense and config.split_k == 1
    clusters = min(tiles, device.sm_count * config.ctas_per_sm) if is_persistent else tiles
    x = x_map(problem, tile_n, box_h, box_w)
    return LaunchPlan(
        Kernel("conv2d/conv2d_sm90.cu", NAME, defines, device.target),
        (clusters * config.split_k, 1, 1),
        (config.threads, 1, 1),
        ("weight", "parameters", "bias", "y", x, *map(np.int32, (*counts, *shape)), *map(np.float32, problem.limits)),
        config.shared_bytes(problem),
        cluster=(config.split_k, 1, 1),
        dependent=True,
    )


def prepare_weight(
    weight: BlockQuantizedWeight, config: Conv2dSm90Config, problem: Convolution
) -> dict[str, Array | None]:
    """Return the buffers "weight" and "parameters" (None if ``dense``), as in ``cuda_src/conv2d/conv2d_sm90.cu``."""
    dtype = np.dtype(problem.dtype)
    if config.dense:
        return {"weight": weight.layout(("dense", problem.dtype), lambda: _dense(weight, dtype)), "parameters": None}
    return {
        "weight": weight.layout("conv2d sm90 codes", lambda: _codes(weight)),
        "parameters": weight.layout(("conv2d sm90 parameters", problem.dtype), lambda: _parameters(weight, dtype)),
    }


def _codes(weight: BlockQuantizedWeight) -> Array:
    co, kh, kw, ci = weight.shape
    xp = namespace(weight.stored)
    tiles, chunks = co_tiles(co), ceil_div(ci, CHUNK)
    padded = xp.zeros((tiles * TILE_CO, kh * kw, chunks * CHUNK), np.uint8)
    padded[:co, :, :ci] = weight.codes.reshape(co, kh * kw, ci)
    # The axes are (tile, warp, row half, g, tap, chunk, k16, k half, t, pair), for lane 4 g + t of an mma; a
    # chunk is 64 channels.
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


def _codes_configs(problem: Convolution, device: Device) -> Iterator[Conv2dSm90Config]:
    sizes, image = problem.sizes, image_view(problem)
    taps = sizes.kernel_h * sizes.kernel_w
    halo = (sizes.stride_h, sizes.stride_w) == (1, 1)
    warpgroups = [(1, 1), (1, 2)] if co_tiles(sizes.outputs) == 1 else [(1, 1), (2, 1)]
    for pixels, (wg_co, wg_px), split_k in itertools.product(PIXELS, warpgroups, CLUSTERS):
        tile = (1, 1, pixels) if image.flat else (1, pixels // 8, 8)
        cta_chunks = ceil_div(k_chunks(sizes), split_k)
        if split_k > min(k_chunks(sizes), pixels // 8):
            continue
        # Clusters of 4 or more CTAs are tried only with the smallest CTAs: with larger CTAs too few are resident.
        if split_k > 2 and (wg_co, wg_px) != (1, 1):
            continue
        # Without a halo, each K chunk has a box of its own, and the stage of box i is released only after box i + 2 has
        # arrived. So at least three stages are needed, or one per K chunk.
        x_stages = min(2, ceil_div(cta_chunks + taps - 1, taps)) if halo and taps > 1 else min(4, cta_chunks)
        for stages in dict.fromkeys((min(cta_chunks, 8), min(cta_chunks, 4))):
            config = Conv2dSm90Config(False, wg_co, wg_px, pixels, tile, 1, halo, x_stages, stages, split_k, 1)
            ctas_per_sm = _max_ctas_per_sm(config, problem, device)
            # Two warpgroups with small tiles keep the tensor cores occupied only if the SM holds a second CTA.
            if ctas_per_sm >= (2 if wg_co * wg_px == 2 and pixels < 112 else 1):
                yield replace(config, ctas_per_sm=ctas_per_sm)
                break


def _max_ctas_per_sm(config: Conv2dSm90Config, problem: Convolution, device: Device) -> int:
    """Return the number of resident CTAs per SM, at most 3, or 0 if a CTA does not fit on an SM."""
    sizes = problem.sizes
    shared_bytes = config.shared_bytes(problem)
    if shared_bytes > device.shared_bytes_per_block or is_box_too_large(sizes, *config.box(sizes)[1:]):
        return 0
    # A thread needs registers for accumulators, the codes of a K chunk (``bits`` words), and about 62 others, such as
    # operand A of two K chunks. Each of the four schedulers of an SM has 16384 registers.
    registers = ceil_div(config.pixels // 2 + 62 + problem.bits + config.split_k, 8) * 8
    warps = 4 * (16384 // (32 * registers))
    return min(3, device.shared_bytes_per_sm // (shared_bytes + RESERVED_BYTES), warps // (config.threads // 32))


def _dense_configs(problem: Convolution, device: Device) -> Iterator[Conv2dSm90Config]:
    sizes, image = problem.sizes, image_view(problem)
    shapes = [(pixels, _pixel_tile(image, sizes, pixels)) for pixels in DENSE_PIXELS]
    # With N = 256 (128 accumulators) a thread has no registers to mask pixels, so the pixel tile must have N pixels.
    shapes = [shape for shape in shapes if shape[0] <= 200 or math.prod(shape[1]) == shape[0]]
    bases = [
        Conv2dSm90Config(True, wg_co, wg_px, pixels, tile, 1, False, 2, 2, 1, ctas_per_sm)
        for pixels, tile in shapes
        for wg_co, wg_px, ctas_per_sm in _forms(sizes.outputs, pixels, math.prod(tile) == pixels)
    ]
    if sizes.kernel_h * sizes.kernel_w > 1 and max(sizes.stride_h, sizes.stride_w) <= MAX_HALO_STRIDE:
        wg_co, wg_px = _two_warpgroups(sizes.outputs)
        bases += [
            Conv2dSm90Config(True, wg_co, wg_px, pixels, (1, pixels // 8, 8), tiles, True, 2, 2, 1, 1)
            for pixels, tiles in HALO_PIXELS
        ]
    for base, split_k in itertools.product(bases, DENSE_SPLITS):
        if split_k > k_chunks(sizes) or (split_k > 1 and (base.warpgroups, base.ctas_per_sm) != (2, 1)):
            continue
        config = replace(base, split_k=split_k)
        stages = _max_stages(config, problem, device)
        if stages is not None:
            yield replace(config, x_stages=stages[0], weight_stages=stages[1])


def _two_warpgroups(outputs: int) -> tuple[int, int]:
    """Return how two warpgroups of a CTA share its tile: (``wg_co`` along outputs, ``wg_px`` along pixels)."""
    return (1, 2) if outputs <= TILE_CO else (2, 1)


def _forms(outputs: int, pixels: int, is_full: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (``wg_co``, ``wg_px``, ``ctas_per_sm``) to try if each filter tap has its own TMA box of x.

    ``is_full`` is whether a pixel tile has ``pixels`` pixels. If not, four warpgroups are slower than two: by 5% for
    1x1 filters with stride 2, 112 to 488 channels and 40x40 pixels on an H100.
    """
    for (warpgroups, ctas_per_sm), (fewest, most) in FORMS.items():
        wg_co, wg_px = _two_warpgroups(outputs) if warpgroups == 2 else (warpgroups, 1)
        # CTA tiles must lie within the stored weight, which has one 64-output tile or an even number of them.
        is_stored = ceil_div(outputs, wg_co * TILE_CO) * wg_co <= co_tiles(outputs)
        if fewest <= pixels <= most and is_stored and (warpgroups < 4 or is_full):
            yield wg_co, wg_px, ctas_per_sm


def _max_stages(config: Conv2dSm90Config, problem: Convolution, device: Device) -> tuple[int, int] | None:
    """Return the numbers of stages of x and of the weight that fit in shared memory.

    Returns None if fewer than 2 stages of x or of the weight fit, if a TMA box would be too large, or if the stages
    cannot hold the partial sums of split-K, which overwrite them.
    """
    sizes = problem.sizes
    if is_box_too_large(sizes, *config.box(sizes)[1:]):
        return None
    per_cta = min(device.shared_bytes_per_block, device.shared_bytes_per_sm // config.ctas_per_sm - RESERVED_BYTES)
    free_bytes = per_cta - config.store_bytes
    x_bytes, weight_bytes = config.x_bytes(sizes), config.weight_bytes(problem)
    if config.halo:
        stages = 2, min((free_bytes - 2 * (x_bytes + 16)) // (weight_bytes + 16), 8)
    else:
        stages = (min(free_bytes // (x_bytes + weight_bytes + 32), 6),) * 2
    has_space = config.partial_bytes <= stages[0] * x_bytes + stages[1] * weight_bytes
    return stages if min(stages) >= 2 and has_space else None


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


CONV2D_SM90 = FunctionFamily(NAME, configs, estimate_us, plan, refusal, needs=HOPPER, prepare_weight=prepare_weight)
