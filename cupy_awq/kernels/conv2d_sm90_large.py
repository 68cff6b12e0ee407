# SPDX-License-Identifier: Apache-2.0
"""``conv2d_sm90_large``: convolutions over many pixels on Hopper's tensor cores, with weights dequantized once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupy_awq.device import Device
from cupy_awq.kernels import conv2d_sm90
from cupy_awq.kernels.conv2d import Convolution
from cupy_awq.kernels.conv2d_sm90 import CHUNK, CLUSTERS, MAX_BOX, TILE_CO, View, co_tiles, units, view
from cupy_awq.kernels.problem import ceil_div
from cupy_awq.launch_plan import Kernel, LaunchPlan, TensorMap

WARPGROUPS = 2
PIXELS = (112, 128, 200, 224, 256)
"""That an instruction takes."""
STORE_BYTES = WARPGROUPS * 32 * (TILE_CO * 2 + 16)
TILE_BYTES = TILE_CO * CHUNK * 2


@dataclass(frozen=True)
class LargeConfig:
    """Two warpgroups, ``wg_co`` of them with outputs of their own, each with a ``box`` of images, rows and columns.

    An instruction takes ``pixels``, as many as the box has or more. ``splits`` blocks of a cluster divide K. A
    multiprocessor has room for ``resident`` blocks.
    """

    wg_co: int
    pixels: int
    box: tuple[int, int, int]
    stages: int
    splits: int
    resident: int

    @property
    def wg_px(self) -> int:
        return WARPGROUPS // self.wg_co

    @property
    def stage_bytes(self) -> int:
        return self.wg_px * ceil_div(self.pixels * CHUNK * 2, 1024) * 1024 + self.wg_co * TILE_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16) + STORE_BYTES

    def parts(self, problem: Convolution) -> tuple[int, int, int]:
        """Boxes along the images, their height and their width."""
        image = view(problem)
        sizes = image.batch, image.out_h, image.out_w
        images, height, width = (ceil_div(size, box) for size, box in zip(sizes, self.box, strict=True))
        return images, height, width

    def tiles(self, problem: Convolution) -> int:
        images, height, width = self.parts(problem)
        return ceil_div(images * height * width, self.wg_px) * (co_tiles(problem.sizes.outputs) // self.wg_co)

    def plan(self, problem: Convolution, device: Device) -> LaunchPlan:
        """The launch. Buffers: weight (of `forms.dense`), bias, y, x."""
        sizes, image = problem.sizes, view(problem)
        box_n, box_h, box_w = self.box
        defines = (
            *(item for item in problem.defines() if item[0] not in ("WEIGHT_OFFSET", "NHWC")),
            ("WG_CO", self.wg_co),
            ("WG_PX", self.wg_px),
            ("PIXELS", self.pixels),
            ("BOX_N", box_n),
            ("BOX_H", box_h),
            ("BOX_W", box_w),
            ("STEPS", ceil_div(min(sizes.channels, CHUNK), 16)),
            ("STAGES", self.stages),
            ("SPLITS", self.splits),
            ("RESIDENT", self.resident),
        )
        batch, row, pixel, _ = problem.strides
        x = TensorMap(
            "x",
            problem.dtype,
            dims=(sizes.channels, image.width, image.height, image.batch),
            strides=(pixel * 2, pixel * 2 if image.flat else row * 2, pixel * 2 if image.flat else batch * 2),
            box=(CHUNK, box_w, box_h, box_n),
            swizzle=128,
            steps=(1, sizes.stride_w, sizes.stride_h, 1),
        )
        tiles, (_, parts_h, parts_w) = self.tiles(problem), self.parts(problem)
        counts = tiles, co_tiles(sizes.outputs) // self.wg_co, parts_h, parts_w, units(sizes), image.batch
        numbers = (*counts, sizes.outputs, sizes.kernel_h, sizes.kernel_w, image.out_h, image.out_w, *sizes[10:])
        blocks = tiles if self.splits > 1 else min(tiles, device.sm_count * self.resident)
        return LaunchPlan(
            Kernel("conv2d_sm90_large.cu", "conv2d_sm90_large", defines, device.target),
            (blocks * self.splits, 1, 1),
            (WARPGROUPS * 128 + 32, 1, 1),
            ("weight", "bias", "y", x, *map(np.int32, numbers), *map(np.float32, problem.limits)),
            self.shared_bytes,
            cluster=(self.splits, 1, 1),
            dependent=True,
        )

    def microseconds(self, problem: Convolution, device: Device) -> float:
        """The larger of the busiest multiprocessor's work and of the traffic, and a part of the other."""
        sizes, image = problem.sizes, view(problem)
        rounds = ceil_div(self.tiles(problem) * self.splits, device.sm_count * self.resident)
        mine = ceil_div(units(sizes), self.splits)
        products = WARPGROUPS * ceil_div(min(sizes.channels, CHUNK), 16) * self.pixels / 2
        unit = self.resident * max(products, self.stage_bytes / 40) / 1500
        work = rounds * (mine * unit + 0.8 + 0.008 * self.resident * self.pixels)
        pixels = image.batch * image.out_h * image.out_w
        traffic = (sizes.batch * sizes.height * sizes.width * sizes.channels + pixels * sizes.outputs) * 2
        shared = 1 + 0.5 * self.splits if self.splits > 1 else 0.0
        return 2 + max(work, traffic / (device.read_gbs * 1e3)) + shared

    def workspace(self, problem: Convolution) -> tuple[int, int]:
        return 0, 0


def refuse(problem: Convolution, device: Device) -> str | None:
    """Why the kernel cannot take a problem, or None."""
    reason = conv2d_sm90.refuse(problem, device)
    if reason:
        return reason
    if not problem.nhwc or not problem.y_aligned or problem.sizes.outputs % 8:
        return "needs y in NHWC with pixels at multiples of 16 bytes"
    return None


def configs(problem: Convolution, device: Device) -> list[LargeConfig]:
    return list(_configs(problem, device))


def _configs(problem: Convolution, device: Device) -> Iterator[LargeConfig]:
    image = view(problem)
    wg_co = 1 if co_tiles(problem.sizes.outputs) == 1 else 2
    for pixels, splits in itertools.product(PIXELS, CLUSTERS):
        box = _box(image, pixels)
        if splits > min(units(problem.sizes), 4) or not _fits(box, problem):
            continue
        for resident in (1, 2) if pixels <= 128 else (1,):
            config = LargeConfig(wg_co, pixels, box, 1, splits, resident)
            room = min(device.shared_bytes_per_block, device.shared_bytes_per_sm // resident - 1024)
            stages = min((room - STORE_BYTES) // (config.stage_bytes + 16), 6)
            sums = splits * ceil_div(pixels // 8, splits) * WARPGROUPS * 2048
            if stages >= 2 and (splits == 1 or sums <= stages * config.stage_bytes):
                yield LargeConfig(wg_co, pixels, box, stages, splits, resident)


def _box(image: View, pixels: int) -> tuple[int, int, int]:
    """Images, rows and columns of a box of at most ``pixels``: as many whole ones as there is room for, evenly."""
    width = _even(image.out_w, min(pixels, MAX_BOX))
    height = _even(image.out_h, pixels // width)
    whole = (height, width) == (image.out_h, image.out_w)
    return _even(image.batch, pixels // (height * width)) if whole else 1, height, width


def _even(size: int, most: int) -> int:
    """Of parts of at most ``most`` that make up ``size``, of about equal length."""
    return ceil_div(size, ceil_div(size, most))


def _fits(box: tuple[int, int, int], problem: Convolution) -> bool:
    _, height, width = box
    sizes = problem.sizes
    return max((height - 1) * sizes.stride_h, (width - 1) * sizes.stride_w) < MAX_BOX
