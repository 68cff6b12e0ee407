# SPDX-License-Identifier: Apache-2.0
"""``conv2d_sm90``: convolutions on Hopper's tensor cores, over images in NHWC."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cupy_awq.kernels import conv2d
from cupy_awq.kernels.conv2d import Convolution, Sizes
from cupy_awq.kernels.problem import ceil_div
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan, TensorMap

TILE_CO = 64
"""Outputs of a warpgroup."""
CHUNK = 64
"""Channels that are multiplied at a time."""
MIN_CHANNELS = 16
PIXELS = (32, 56, 64, 112, 128)
"""Of a warpgroup."""
CLUSTERS = (1, 2, 4, 8)
MAX_BOX = 256
"""Values of x along each axis from the first of a box to the last."""
MAX_STEP = 8
"""Of a tensor map, from one value to the next."""
STORE_ROW_BYTES = TILE_CO * 2 + 16


class View(NamedTuple):
    """The images as the kernel sees them: those of a 1x1 kernel may be one row of pixels."""

    batch: int
    height: int
    width: int
    out_h: int
    out_w: int
    flat: bool


def view(problem: Convolution) -> View:
    sizes = problem.sizes
    batch, row, pixel, _ = problem.strides
    steps = (sizes.kernel_h, sizes.kernel_w, sizes.stride_h, sizes.stride_w) == (1, 1, 1, 1)
    of_image = sizes.height * sizes.width * pixel
    one_row = (sizes.height == 1 or row == sizes.width * pixel) and (sizes.batch == 1 or batch == of_image)
    whole = (sizes.out_h, sizes.out_w) == (sizes.height, sizes.width)
    if steps and whole and one_row and (problem.nhwc or sizes.batch == 1):
        return View(1, 1, sizes.pixels, 1, sizes.pixels, True)
    return View(sizes.batch, sizes.height, sizes.width, sizes.out_h, sizes.out_w, False)


def co_tiles(outputs: int) -> int:
    """Tiles of the weight, so that two warpgroups can have neighbours."""
    tiles = ceil_div(outputs, TILE_CO)
    return tiles if tiles == 1 else tiles + tiles % 2


def parameter_groups(block: int, channels: int) -> int:
    """Sets of parameters of a chunk of channels: a block of the weight may span several, or a part of one."""
    return 1 if block >= channels else CHUNK // math.gcd(block, CHUNK)


def units(sizes: Sizes) -> int:
    """Of K: 64 channels of a tap."""
    return sizes.kernel_h * sizes.kernel_w * ceil_div(sizes.channels, CHUNK)


def with_border(sizes: Sizes, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of x that all taps of so many outputs take, without steps."""
    return height + (sizes.kernel_h - 1) * sizes.dilation_h, width + (sizes.kernel_w - 1) * sizes.dilation_w


def too_wide(sizes: Sizes, height: int, width: int) -> bool:
    """Whether no tensor map has boxes of so many rows and columns."""
    return max((height - 1) * sizes.stride_h, (width - 1) * sizes.stride_w) >= MAX_BOX


def x_map(problem: Convolution, images: int, height: int, width: int) -> TensorMap:
    """The images in boxes of so many images, rows and columns, and of a chunk of channels."""
    sizes, image = problem.sizes, view(problem)
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


def multiprocessors(device: Device, splits: int) -> int:
    """That clusters of ``splits`` blocks reach: of four and more, 32 did not fit on the chip at once."""
    return device.sm_count if splits < 4 else device.sm_count * 17 // 20


@dataclass(frozen=True)
class Config:
    """``wg_co`` times ``wg_px`` warpgroups, each with 64 outputs and ``tile_h`` times ``tile_w`` pixels.

    ``halo``: a box of pixels serves all taps. ``splits`` blocks of a cluster divide K. A multiprocessor has room for
    ``resident`` blocks.
    """

    wg_co: int
    wg_px: int
    tile_h: int
    tile_w: int
    halo: bool
    x_stages: int
    code_stages: int
    splits: int
    resident: int

    @property
    def warpgroups(self) -> int:
        return self.wg_co * self.wg_px

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + 32

    @property
    def pixels(self) -> int:
        """Of a warpgroup."""
        return self.tile_h * self.tile_w

    def box(self, sizes: Sizes) -> tuple[int, int]:
        """Rows and columns of pixels."""
        if not self.halo:
            return self.tile_h, self.tile_w
        return with_border(sizes, self.tile_h, self.tile_w)

    def ring_bytes(self, problem: Convolution) -> int:
        """Of all stages, or of what takes their place on its way to y."""
        height, width = self.box(problem.sizes)
        x = self.wg_px * ceil_div(height * width * CHUNK * 2, 1024) * 1024
        parameters = self.wg_co * parameter_groups(problem.block, problem.sizes.channels) * TILE_CO * 4
        codes = self.wg_co * TILE_CO * CHUNK * problem.bits // 8
        groups = ceil_div(self.pixels // 8, self.splits)
        stored = self.warpgroups * ceil_div(groups, 2) * 16 * STORE_ROW_BYTES
        return max(self.x_stages * (x + parameters) + self.code_stages * codes, stored)

    def shared_bytes(self, problem: Convolution) -> int:
        groups = ceil_div(self.pixels // 8, self.splits)
        sums = 0 if self.splits == 1 else self.splits * self.warpgroups * groups * 2048
        return self.ring_bytes(problem) + sums + 16 * (self.x_stages + self.code_stages)

    def tiles(self, problem: Convolution) -> int:
        image = view(problem)
        parts = image.batch * ceil_div(image.out_h, self.tile_h) * ceil_div(image.out_w, self.tile_w)
        return ceil_div(parts, self.wg_px) * (co_tiles(problem.sizes.outputs) // self.wg_co)

    def plan(self, problem: Convolution, device: Device) -> LaunchPlan:
        """The launch. Buffers: codes, parameters (of `forms`), bias, y, x."""
        sizes, image = problem.sizes, view(problem)
        box_h, box_w = self.box(sizes)
        defines = (
            *(item for item in problem.defines() if item[0] != "WEIGHT_OFFSET"),
            ("BITS", problem.bits),
            ("ALIGNED", int(problem.y_aligned and sizes.outputs % 8 == 0)),
            ("WG_CO", self.wg_co),
            ("WG_PX", self.wg_px),
            ("TILE_H", self.tile_h),
            ("TILE_W", self.tile_w),
            ("HALO", int(self.halo)),
            ("BOX_H", box_h),
            ("BOX_W", box_w),
            ("GROUPS", parameter_groups(problem.block, sizes.channels)),
            ("STEPS", ceil_div(min(sizes.channels, CHUNK), 16)),
            ("X_STAGES", self.x_stages),
            ("CODE_STAGES", self.code_stages),
            ("RING_BYTES", self.ring_bytes(problem)),
            ("SPLITS", self.splits),
            ("RESIDENT", self.resident),
        )
        parts_h, parts_w = ceil_div(image.out_h, self.tile_h), ceil_div(image.out_w, self.tile_w)
        co_blocks = co_tiles(sizes.outputs) // self.wg_co
        counts = parts_h * parts_w, parts_w, co_blocks, units(sizes), image.batch, sizes.outputs
        numbers = (*counts, sizes.kernel_h, sizes.kernel_w, image.out_h, image.out_w, *sizes[10:])
        x = x_map(problem, 1, box_h, box_w)
        return LaunchPlan(
            Kernel("conv2d/conv2d_sm90.cu", "conv2d_sm90", defines, device.target),
            (self.tiles(problem) * self.splits, 1, 1),
            (self.threads, 1, 1),
            ("codes", "parameters", "bias", "y", x, *map(np.int32, numbers), *map(np.float32, problem.limits)),
            self.shared_bytes(problem),
            cluster=(self.splits, 1, 1),
            dependent=True,
        )

    def estimate_us(self, problem: Convolution, device: Device) -> float:
        """The larger of the busiest multiprocessor's work and of the traffic, and a part of the other.

        Fitted to 151 times on an H100: 15% off (root mean square), and its first choice took 1.02 times as long as the
        best (geometric mean); then raised by a tenth, to be compared with that of conv2d_sm90_large. The next unit's
        weights are converted in the shadow of the tensor cores only where other warpgroups have them: a warpgroup alone
        takes 386 cycles more than its products, three are at their rate.
        """
        sizes = problem.sizes
        box_h, box_w = self.box(sizes)
        blocks = self.tiles(problem) * self.splits
        mine = ceil_div(units(sizes), self.splits)
        rounds = ceil_div(blocks, multiprocessors(device, self.splits) * self.resident)
        together = self.resident * self.warpgroups
        products = ceil_div(min(sizes.channels, CHUNK), 16) * self.pixels / 2
        unit = max(together * max(0.87 * products, 180), products + 386) / 1700
        work = rounds * (mine * unit + 1.14 + 0.0033 * together * self.pixels)
        y_bytes = sizes.pixels * sizes.outputs * 2
        x_bytes = sizes.batch * sizes.height * sizes.width * sizes.channels * 2
        boxes = ceil_div(mine, sizes.kernel_h * sizes.kernel_w) if self.halo else mine
        copied = self.wg_px * box_h * box_w * CHUNK * 2 * boxes + mine * self.wg_co * TILE_CO * CHUNK * problem.bits / 8
        traffic = max((blocks * copied + y_bytes) / 5.7e6, (x_bytes + y_bytes) / (device.read_gbs * 1e3))
        shared = 0.8 + 0.25 * self.splits if self.splits > 1 else 0.0
        return 1.1 * (max(work, traffic) + 0.4 * min(work, traffic) + shared)

    def workspace(self, problem: Convolution) -> tuple[int, int]:
        return 0, 0


def refuse(problem: Convolution, device: Device) -> str | None:
    """Why the kernel cannot take a problem, or None."""
    sizes = problem.sizes
    if device.arch != 90:
        return f"needs sm_90, not sm_{device.arch}"
    reason = conv2d.refuse(problem, device)
    if reason:
        return reason
    if sizes.groups > 1:
        return f"takes one group, not {sizes.groups}"
    if sizes.channels < MIN_CHANNELS:
        return f"needs {MIN_CHANNELS} channels or more, not {sizes.channels}"
    if problem.block % 16 and problem.block < sizes.channels:
        return f"needs blocks that are multiples of 16 channels, not {problem.block}"
    if max(sizes.stride_h, sizes.stride_w) > MAX_STEP:
        return f"takes steps of up to {MAX_STEP} pixels, not {max(sizes.stride_h, sizes.stride_w)}"
    if min(problem.strides[:3]) <= 0:
        return "needs x with strides of its own in each direction"
    if not configs(problem, device):
        return "needs boxes of pixels that fit in shared memory"
    return None


def configs(problem: Convolution, device: Device) -> list[Config]:
    return list(_configs(problem, device))


def _configs(problem: Convolution, device: Device) -> Iterator[Config]:
    sizes, image = problem.sizes, view(problem)
    taps = sizes.kernel_h * sizes.kernel_w
    halo = (sizes.stride_h, sizes.stride_w) == (1, 1)
    warpgroups = [(1, 1), (1, 2)] if co_tiles(sizes.outputs) == 1 else [(1, 1), (2, 1)]
    for pixels, (wg_co, wg_px), splits in itertools.product(PIXELS, warpgroups, CLUSTERS):
        tile = (1, pixels) if image.flat else (pixels // 8, 8)
        mine = ceil_div(units(sizes), splits)
        if splits > min(units(sizes), pixels // 8):
            continue
        # Clusters of four and more were never faster with large blocks: fewer of them fit on the chip.
        if splits > 2 and (wg_co, wg_px) != (1, 1):
            continue
        # A box is released after the next but one has come, if it serves one unit.
        x_stages = min(2, ceil_div(mine + taps - 1, taps)) if halo and taps > 1 else min(4, mine)
        for code_stages in dict.fromkeys((min(mine, 8), min(mine, 4))):
            config = Config(wg_co, wg_px, *tile, halo, x_stages, code_stages, splits, 1)
            most = _most_resident(config, problem, device)
            # Two warpgroups with small tiles need others beside them.
            if most >= (2 if wg_co * wg_px == 2 and pixels < 112 else 1):
                yield replace(config, resident=most)
                break


def _most_resident(config: Config, problem: Convolution, device: Device) -> int:
    """Blocks that a multiprocessor has room for, at most three; 0 if a block is too large."""
    sizes = problem.sizes
    box = config.box(sizes)
    shared = config.shared_bytes(problem)
    if shared > device.shared_bytes_per_block:
        return 0
    if too_wide(sizes, *box):
        return 0
    # Sums, two units of operand A, and the rest, for each of four schedulers; a block takes 1 KB of shared memory more.
    registers = ceil_div(config.pixels // 2 + 62 + problem.bits + config.splits, 8) * 8
    warps = 4 * (16384 // (32 * registers))
    return min(3, device.shared_bytes_per_sm // (shared + 1024), warps // (config.threads // 32))
