# SPDX-License-Identifier: Apache-2.0
"""``conv2d_sm90_large``: convolutions over many pixels on Hopper's tensor cores, with weights dequantized once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cupy_awq.kernels import conv2d_sm90
from cupy_awq.kernels.conv2d import Convolution, Sizes
from cupy_awq.kernels.conv2d_sm90 import (
    CHUNK,
    MAX_BOX,
    TILE_CO,
    View,
    co_tiles,
    multiprocessors,
    too_wide,
    units,
    view,
    with_border,
    x_map,
)
from cupy_awq.kernels.problem import ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

LEAST_PIXELS = 256
"""Of y, for which weights are dequantized to memory."""
WARPGROUPS = 2
PIXELS = (112, 128, 200, 256)
"""That an instruction takes."""
HALO_PIXELS = ((56, 1), (56, 2), (64, 1), (64, 2), (112, 1), (112, 2))
"""The same, and parts of a warpgroup, where a part has a halo."""
SPLITS = (1, 2, 4)
STORE_BYTES = WARPGROUPS * 32 * (TILE_CO * 2 + 16)
TILE_BYTES = TILE_CO * CHUNK * 2


@dataclass(frozen=True)
class LargeConfig:
    """Two warpgroups, ``wg_co`` of them with outputs of their own, each with ``parts`` of images, rows and columns.

    An instruction takes ``pixels``, as many as ``part`` has or more. ``halo``: what is brought of x for a part serves
    all taps. ``splits`` blocks of a cluster divide K.
    """

    wg_co: int
    pixels: int
    part: tuple[int, int, int]
    parts: int
    halo: bool
    x_stages: int
    weight_stages: int
    splits: int

    @property
    def wg_px(self) -> int:
        return WARPGROUPS // self.wg_co

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return self.wg_co * TILE_BYTES

    def box(self, sizes: Sizes) -> tuple[int, int, int]:
        """Images, rows and columns that are brought of x for a part."""
        images, height, width = self.part
        if not self.halo:
            return self.part
        return images, *with_border(sizes, height, width)

    def x_bytes(self, sizes: Sizes) -> int:
        """Of a stage."""
        rows = max(self.pixels, math.prod(self.box(sizes)))
        return self.wg_px * self.parts * ceil_div(rows * CHUNK * 2, 1024) * 1024

    def shared_bytes(self, sizes: Sizes) -> int:
        x, weight = self.x_bytes(sizes) + 16, self.weight_bytes + 16
        return self.x_stages * x + self.weight_stages * weight + STORE_BYTES

    def image_parts(self, problem: Convolution) -> tuple[int, int, int]:
        """Parts along the images, their height and their width."""
        image = view(problem)
        sizes = image.batch, image.out_h, image.out_w
        images, height, width = (ceil_div(size, part) for size, part in zip(sizes, self.part, strict=True))
        return images, height, width

    def tiles(self, problem: Convolution) -> int:
        parts = math.prod(self.image_parts(problem))
        return ceil_div(parts, self.wg_px * self.parts) * (co_tiles(problem.sizes.outputs) // self.wg_co)

    def plan(self, problem: Convolution, device: Device) -> LaunchPlan:
        """The launch. Buffers: weight (of `forms.dense`), bias, y, x."""
        sizes, image = problem.sizes, view(problem)
        images, tile_h, tile_w = self.part
        _, box_h, box_w = self.box(sizes)
        defines = (
            *(item for item in problem.defines() if item[0] not in ("WEIGHT_OFFSET", "NHWC")),
            ("HALO", int(self.halo)),
            ("WG_CO", self.wg_co),
            ("WG_PX", self.wg_px),
            ("PARTS", self.parts),
            ("PIXELS", self.pixels),
            ("TILE_N", images),
            ("TILE_H", tile_h),
            ("TILE_W", tile_w),
            ("BOX_H", box_h),
            ("BOX_W", box_w),
            ("STEPS", ceil_div(min(sizes.channels, CHUNK), 16)),
            ("X_STAGES", self.x_stages),
            ("WEIGHT_STAGES", self.weight_stages),
            ("SPLITS", self.splits),
        )
        tiles, (_, parts_h, parts_w) = self.tiles(problem), self.image_parts(problem)
        counts = tiles, co_tiles(sizes.outputs) // self.wg_co, parts_h, parts_w, units(sizes), image.batch
        numbers = (*counts, sizes.outputs, sizes.kernel_h, sizes.kernel_w, image.out_h, image.out_w, *sizes[10:])
        blocks = tiles if self.splits > 1 else min(tiles, device.sm_count)
        x = x_map(problem, images, box_h, box_w)
        return LaunchPlan(
            Kernel("conv2d/conv2d_sm90_large.cu", "conv2d_sm90_large", defines, device.target),
            (blocks * self.splits, 1, 1),
            (WARPGROUPS * 128 + 32, 1, 1),
            ("weight", "bias", "y", x, *map(np.int32, numbers), *map(np.float32, problem.limits)),
            self.shared_bytes(sizes),
            cluster=(self.splits, 1, 1),
            dependent=True,
        )

    def estimate_us(self, problem: Convolution, device: Device) -> float:
        """The larger of the busiest multiprocessor's work and of the traffic, and a part of the other.

        Fitted to 600 times on an H100, of 30 layers of ResNet-50 and others: 8% off (root mean square), and its first
        choice took 1.02 times as long as the best (geometric mean).
        """
        sizes = problem.sizes
        rounds = ceil_div(self.tiles(problem) * self.splits, multiprocessors(device, self.splits))
        mine = ceil_div(units(sizes), self.splits)
        boxes = ceil_div(mine, sizes.kernel_h * sizes.kernel_w) if self.halo else mine
        pixels = self.parts * self.pixels
        products = mine * WARPGROUPS * ceil_div(min(sizes.channels, CHUNK), 16) * pixels / 2 / 1760
        copies = (mine * self.weight_bytes + boxes * self.x_bytes(sizes)) / 89.7e3
        unit = max(products, copies) + 0.145 * min(products, copies)
        work = rounds * (unit + 0.54 + 0.0052 * pixels)
        if self.splits > 1:
            work += 1.28 + 0.0177 * pixels * (self.splits - 1) / self.splits
        values = sizes.batch * sizes.height * sizes.width * sizes.channels + sizes.pixels * sizes.outputs
        traffic = values * 2 / (device.read_gbs * 1e3)
        return 1.2 + max(work, traffic) + 0.24 * min(work, traffic)

    def workspace(self, problem: Convolution) -> tuple[int, int]:
        return 0, 0


def refuse(problem: Convolution, device: Device) -> str | None:
    """Why the kernel cannot take a problem, or None."""
    reason = conv2d_sm90.refuse(problem, device)
    if reason:
        return reason
    if problem.sizes.pixels < LEAST_PIXELS:
        return f"needs {LEAST_PIXELS} pixels of y, not {problem.sizes.pixels}"
    if not problem.nhwc or not problem.y_aligned or problem.sizes.outputs % 8:
        return "needs y in NHWC with pixels at multiples of 16 bytes"
    if not configs(problem, device):
        return "needs boxes of pixels that fit in shared memory"
    return None


def configs(problem: Convolution, device: Device) -> list[LargeConfig]:
    return list(_configs(problem, device))


def _configs(problem: Convolution, device: Device) -> Iterator[LargeConfig]:
    sizes, image = problem.sizes, view(problem)
    wg_co = 1 if co_tiles(sizes.outputs) == 1 else 2
    shapes = [(pixels, _part(image, sizes, pixels), 1, False) for pixels in PIXELS]
    # Beside so many sums a thread has no registers left for what lies behind a part.
    shapes = [shape for shape in shapes if shape[0] <= 200 or math.prod(shape[1]) == shape[0]]
    if sizes.kernel_h * sizes.kernel_w > 1 and (sizes.stride_h, sizes.stride_w) == (1, 1):
        shapes += [(pixels, (1, pixels // 8, 8), parts, True) for pixels, parts in HALO_PIXELS]
    for (pixels, part, parts, halo), splits in itertools.product(shapes, SPLITS):
        if splits > units(sizes):
            continue
        config = LargeConfig(wg_co, pixels, part, parts, halo, 2, 2, splits)
        stages = _stages(config, problem, device)
        if stages is not None:
            yield replace(config, x_stages=stages[0], weight_stages=stages[1])


def _stages(config: LargeConfig, problem: Convolution, device: Device) -> tuple[int, int] | None:
    """Of x and of the weight that there is room for; None if not for two of each, or if a box is too large."""
    sizes = problem.sizes
    if too_wide(sizes, *config.box(sizes)[1:]):
        return None
    room = device.shared_bytes_per_block - STORE_BYTES
    x, weight = config.x_bytes(sizes) + 16, config.weight_bytes + 16
    stages = (2, min((room - 2 * x) // weight, 8)) if config.halo else (min(room // (x + weight), 6),) * 2
    if min(stages) < 2:
        return None
    groups = ceil_div(config.parts * config.pixels // 8, config.splits)
    sums = config.splits * groups * WARPGROUPS * 2048 if config.splits > 1 else 0
    return stages if sums <= stages[0] * (x - 16) + stages[1] * (weight - 16) else None


def _part(image: View, sizes: Sizes, pixels: int) -> tuple[int, int, int]:
    """Images, rows and columns, at most ``pixels``: as many whole ones as there is room for, evenly."""
    if image.flat:
        return 1, 1, pixels
    width = _even(image.out_w, min(pixels, (MAX_BOX - 1) // sizes.stride_w + 1))
    height = _even(image.out_h, min(pixels // width, (MAX_BOX - 1) // sizes.stride_h + 1))
    whole = (height, width) == (image.out_h, image.out_w)
    return _even(image.batch, pixels // (height * width)) if whole else 1, height, width


def _even(size: int, most: int) -> int:
    """Of parts of at most ``most`` that make up ``size``, of about equal length."""
    return ceil_div(size, ceil_div(size, most))
