# SPDX-License-Identifier: Apache-2.0
"""`Conv2dSm90Config`: the fields of a configuration of ``conv2d_sm90``, and its tiles, boxes of x and shared memory.

K is processed in chunks of one filter tap x 64 input channels (K chunks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from cupy_awq.kernels.conv2d.problem import Convolution, ConvolutionSizes
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.launch_plan import TensorMap

TILE_CO = 64
"""The number of output channels per warpgroup (wgmma's M)."""
CHUNK = 64
"""The number of input channels per K chunk."""
MAX_BOX = 256
"""The largest height and width of a TMA box, in pixels of x."""
STORE_ROW_BYTES = TILE_CO * 2 + 16
"""The size of a pixel in a store buffer in shared memory in bytes, including 16 bytes of padding."""
STORE_PIXELS = 32
"""The number of pixels in the store buffer of a warpgroup of a persistent CTA."""


class ImageView(NamedTuple):
    """The image sizes as the kernel sees them: for a 1x1 filter, the pixels of all images may form a single row."""

    batch: int
    """The number of images."""
    height: int
    """The input height in pixels."""
    width: int
    """The input width in pixels."""
    out_h: int
    """The number of output rows per image."""
    out_w: int
    """The number of output pixels per row."""
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


@dataclass(frozen=True)
class Conv2dSm90Config:
    """A configuration of ``conv2d_sm90``, with ``wg_co * wg_px`` consumer warpgroups per CTA.

    Each warpgroup computes 64 output channels of ``pixel_tiles`` pixel tiles.

    Attributes:
        dense: whether the weight is dequantized to device memory beforehand, and CTAs are persistent; otherwise each
            CTA has one tile and dequantizes the codes in registers.
        wg_co: number of warpgroups along output channels.
        wg_px: number of warpgroups along pixels.
        pixels: wgmma's N; the number of pixels of a pixel tile, or more if ``dense``.
        pixel_tile: size of a pixel tile: (images, rows, pixels per row).
        pixel_tiles: number of pixel tiles per warpgroup; 1 unless ``dense``.
        halo: whether TMA boxes of x with a halo serve all filter taps; otherwise each tap has its own box.
        x_stages: number of pipeline stages of x.
        weight_stages: number of pipeline stages of the weight.
        split_k: number of CTAs per cluster; each computes a slice of K.
        ctas_per_sm: number of resident CTAs per SM for which the kernel is compiled.
    """

    dense: bool
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
    def warpgroups(self) -> int:
        """The number of consumer warpgroups per CTA."""
        return self.wg_co * self.wg_px

    @property
    def threads(self) -> int:
        """The number of threads per CTA: the consumer warpgroups and one producer warp."""
        return self.warpgroups * 128 + 32

    @property
    def owned_groups(self) -> int:
        """The number of groups of 8 pixels, per warpgroup, whose split-K sums one CTA adds up and stores."""
        return ceil_div(self.pixel_tiles * self.pixels // 8, self.split_k)

    @property
    def store_bytes(self) -> int:
        """The size of the store buffers of all warpgroups in bytes."""
        pixels = STORE_PIXELS if self.dense else ceil_div(self.owned_groups, 2) * 16
        return self.warpgroups * pixels * STORE_ROW_BYTES

    @property
    def partial_bytes(self) -> int:
        """The size of the partial sums of split-K in shared memory in bytes."""
        return 0 if self.split_k == 1 else self.split_k * self.warpgroups * self.owned_groups * 2048

    def bits(self, problem: Convolution) -> int:
        """Return the number of bits per weight in device memory."""
        return 16 if self.dense else problem.bits

    def weight_bytes(self, problem: Convolution) -> int:
        """Return the size of the weight in one pipeline stage, in bytes."""
        return self.wg_co * TILE_CO * CHUNK * self.bits(problem) // 8

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

    def shared_bytes(self, problem: Convolution) -> int:
        """Return the shared memory per CTA in bytes: pipeline stages, store buffers, partial sums, and mbarriers.

        The partial sums of a persistent CTA overwrite its stages, and so do the store buffers of another one.
        """
        x_bytes, parameter_bytes = self.x_bytes(problem.sizes), 0
        if not self.dense:
            groups = parameter_groups(problem.block_size, problem.sizes.channels)
            parameter_bytes = self.wg_co * groups * TILE_CO * 4
        stages = self.x_stages * (x_bytes + parameter_bytes) + self.weight_stages * self.weight_bytes(problem)
        memory = stages + self.store_bytes if self.dense else max(stages, self.store_bytes) + self.partial_bytes
        return memory + 16 * (self.x_stages + self.weight_stages)

    def image_tiles(self, problem: Convolution) -> tuple[int, int, int]:
        """Return the numbers of pixel tiles along batch, height and width."""
        image = image_view(problem)
        sizes = image.batch, image.out_h, image.out_w
        images, height, width = (ceil_div(size, tile) for size, tile in zip(sizes, self.pixel_tile, strict=True))
        return images, height, width

    def co_blocks(self, problem: Convolution) -> int:
        """Return the number of CTA tiles along the output channels; codes are stored for whole tiles only."""
        outputs = problem.sizes.outputs
        return ceil_div(outputs, self.wg_co * TILE_CO) if self.dense else co_tiles(outputs) // self.wg_co

    def tiles(self, problem: Convolution) -> int:
        """Return the number of CTA tiles of y, each of which is computed by one cluster."""
        pixel_blocks = ceil_div(math.prod(self.image_tiles(problem)), self.wg_px * self.pixel_tiles)
        return pixel_blocks * self.co_blocks(problem)
