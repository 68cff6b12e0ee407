# SPDX-License-Identifier: Apache-2.0
"""``conv2d_simt``, ``conv2d_sm80`` and ``conv2d_int8``: convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cupy_awq.kernels.problem import ACTIVATIONS, TYPES, ceil_div, split_counts
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Argument, Kernel, LaunchPlan
from cupy_awq.runtime.workspace import COUNTERS, WORKSPACE_BYTES

THREADS = 256
UNIT = 8
"""Channels that tensor cores' kernels take at a time."""
TILE_UNITS = 8
TILE_BYTES = TILE_UNITS * UNIT * 2
"""Of a row of a tile of K."""


class Sizes(NamedTuple):
    """The sizes of a convolution, as the kernels take them; channels and outputs of one group."""

    batch: int
    height: int
    width: int
    channels: int
    outputs: int
    groups: int
    kernel_h: int
    kernel_w: int
    out_h: int
    out_w: int
    stride_h: int = 1
    stride_w: int = 1
    pad_h: int = 0
    pad_w: int = 0
    dilation_h: int = 1
    dilation_w: int = 1

    @property
    def pixels(self) -> int:
        """Of y."""
        return self.batch * self.out_h * self.out_w


@dataclass(frozen=True)
class Convolution:
    """A convolution with a weight of 4 or 8 ``bits`` in blocks of ``block`` channels.

    ``strides`` are x's (batch, row, pixel, channel), in values; ``nhwc`` is the order of y. ``aligned``: x starts at a
    multiple of 16 bytes; ``y_aligned``: so does y.
    """

    sizes: Sizes
    block: int
    bits: int
    weight_offset: bool
    dtype: str
    strides: tuple[int, int, int, int]
    nhwc: bool = True
    bias_dtype: str | None = None
    activation: str | None = None
    limits: tuple[float, float] = (0.0, 0.0)
    aligned: bool = True
    y_aligned: bool = True

    def simplest(self) -> Convolution:
        """The same without steps: a 1x1 kernel reads its own pixels alone, which may lie further apart."""
        sizes = self.sizes
        ends = (sizes.out_h - 1) * sizes.stride_h, (sizes.out_w - 1) * sizes.stride_w
        outside = sizes.pad_h or sizes.pad_w or ends[0] >= sizes.height or ends[1] >= sizes.width
        if (sizes.kernel_h, sizes.kernel_w) != (1, 1) or outside or (sizes.stride_h, sizes.stride_w) == (1, 1):
            return self
        batch, row, pixel, channel = self.strides
        strides = batch, row * sizes.stride_h, pixel * sizes.stride_w, channel
        plain = sizes._replace(height=sizes.out_h, width=sizes.out_w, stride_h=1, stride_w=1)
        return replace(self, sizes=plain, strides=strides)

    def defines(self) -> tuple[tuple[str, int | str], ...]:
        """The constants of both kernels."""
        return (
            ("X", TYPES[self.dtype]),
            ("NHWC", int(self.nhwc)),
            ("WEIGHT_OFFSET", int(self.weight_offset)),
            ("ACTIVATION", ACTIVATIONS[self.activation]),
            ("GATED", 0),
            ("HAS_BIAS", int(self.bias_dtype is not None)),
            ("BIAS", TYPES[self.bias_dtype or "float16"]),
            ("HAS_RESIDUAL", 0),
        )

    def scalars(self, strides: int, block: int) -> tuple[Argument, ...]:
        """All but the pointers."""
        limits = map(np.float32, self.limits)
        return (*map(np.int64, self.strides[:strides]), np.int32(block), *map(np.int32, self.sizes), *limits)


@dataclass(frozen=True)
class SimtConfig:
    """CUDA cores; takes everything."""

    splits: int = 1

    def plan(self, problem: Convolution, device: Device) -> LaunchPlan:
        defines = (*problem.defines(), ("ZERO", 1 << (problem.bits - 1)), ("THREADS", THREADS))
        kernel = Kernel("conv2d/conv2d_simt.cu", "conv2d_simt", defines, device.target)
        pointers = ("x", "codes", "parameters", "bias", "y")
        arguments = (*pointers, *problem.scalars(4, problem.block))
        return LaunchPlan(kernel, _outputs_grid(problem.sizes), (THREADS, 1, 1), arguments)

    def workspace(self, problem: Convolution) -> tuple[int, int]:
        return 0, 0


@dataclass(frozen=True)
class MmaConfig:
    """A tile of ``warps_m * warp_m`` pixels and 32 outputs for each of ``warps_n`` warps, in ``stages`` stages."""

    warp_m: int
    warps_m: int
    warps_n: int
    stages: int
    splits: int

    @property
    def block_m(self) -> int:
        return self.warp_m * self.warps_m

    @property
    def block_n(self) -> int:
        return 32 * self.warps_n

    @property
    def shared_bytes(self) -> int:
        return TILE_BYTES * (self.stages * self.block_m + 2 * self.block_n)

    def tiles(self, problem: Convolution) -> tuple[int, int]:
        """Along pixels, and along the outputs of all groups."""
        sizes = problem.sizes
        return ceil_div(sizes.pixels, self.block_m), ceil_div(sizes.outputs, self.block_n) * sizes.groups

    def plan(self, problem: Convolution, device: Device) -> LaunchPlan:
        defines = (
            *problem.defines(),
            ("BITS", problem.bits),
            ("WARP_M", self.warp_m),
            ("WARPS_M", self.warps_m),
            ("WARPS_N", self.warps_n),
            ("STAGES", self.stages),
            ("EVEN", int(problem.y_aligned and problem.sizes.outputs % 2 == 0)),
        )
        kernel = Kernel("conv2d/conv2d_sm80.cu", "conv2d_sm80", defines, device.target)
        block = ceil_div(min(problem.block, problem.sizes.channels), UNIT)
        pointers = ("x", "codes", "scales", "offsets", "bias", "y", "partials", "counters")
        threads = 32 * self.warps_m * self.warps_n
        grid = (*self.tiles(problem), self.splits)
        return LaunchPlan(kernel, grid, (threads, 1, 1), (*pointers, *problem.scalars(3, block)), self.shared_bytes)

    def workspace(self, problem: Convolution) -> tuple[int, int]:
        """Bytes of partial sums and number of counters."""
        if self.splits == 1:
            return 0, 0
        rows, columns = self.tiles(problem)
        return rows * columns * self.splits * self.block_m * self.block_n * 4, rows * columns


TILES = ((64, 2, 4), (64, 2, 2), (32, 2, 2))
"""(pixels of a warp, warps along pixels, warps along outputs), the largest tile first."""


def refuse(problem: Convolution, device: Device) -> str | None:
    """Why the tensor cores cannot take a problem, or None."""
    sizes = problem.sizes
    if device.arch < 80:
        return f"needs sm_80 or newer, not sm_{device.arch}"
    if problem.dtype == "float32":
        return "takes x of float16 or bfloat16, not float32"
    if sizes.pixels >= 2**31:
        return f"needs fewer than 2**31 pixels in y, not {sizes.pixels}"
    if problem.strides[3] != 1 or any(s % UNIT for s in problem.strides[:3]) or not problem.aligned:
        return f"needs x with contiguous channels, each pixel at a multiple of {2 * UNIT} bytes"
    if sizes.groups > 1 and sizes.channels % UNIT:
        return f"needs groups of a multiple of {UNIT} channels, not {sizes.channels}"
    if problem.block % UNIT and problem.block < sizes.channels:
        return f"needs blocks that are multiples of {UNIT} channels, not {problem.block}"
    return None


def configs(problem: Convolution, device: Device) -> list[MmaConfig]:
    """All that tensor cores can launch for a problem that is not refused."""
    sizes = problem.sizes
    units = sizes.kernel_h * sizes.kernel_w * ceil_div(sizes.channels, UNIT)
    found = [
        MmaConfig(warp_m, warps_m, warps_n, 3, splits)
        for warp_m, warps_m, warps_n in TILES
        for splits in split_counts(ceil_div(units, TILE_UNITS))
    ]
    return [c for c in found if c.shared_bytes <= device.shared_bytes_per_block and _fits(c.workspace(problem))]


def choose(problem: Convolution, device: Device) -> SimtConfig | MmaConfig:
    """The largest tile that is not mostly empty and keeps the multiprocessors busy; then the splits that do."""
    if refuse(problem, device):
        return SimtConfig()
    best = None
    for config in configs(problem, device):
        rows, columns = config.tiles(problem)
        blocks = rows * columns * config.splits
        sizes = problem.sizes
        # Work of a block's tile of K, in columns of 32 pixels and 32 outputs, and what it costs to add up splits.
        area = config.block_m * config.block_n / 1024
        tiles = ceil_div(sizes.kernel_h * sizes.kernel_w * ceil_div(sizes.channels, UNIT), TILE_UNITS)
        waves = ceil_div(blocks, device.sm_count)
        cost = waves * ((6 + area) * ceil_div(tiles, config.splits) + 20) + (30 + 2 * config.splits) * (
            config.splits > 1
        )
        if best is None or cost < best[0]:
            best = cost, config
    if best is None:
        raise RuntimeError(f"no configuration for {problem}")
    return best[1]


def int8_plan(
    sizes: Sizes, strides: tuple[int, int, int, int], nhwc: bool, x_zero: int, limits: tuple[int, int], device: Device
) -> LaunchPlan:
    """The convolution of int8 with int8."""
    kernel = Kernel("conv2d/conv2d_int8.cu", "conv2d_int8", (("NHWC", int(nhwc)), ("THREADS", THREADS)), device.target)
    pointers = ("x", "codes", "fused", "multiplier", "y")
    numbers: tuple[Argument, ...] = (*map(np.int64, strides), np.int32(x_zero), *map(np.int32, sizes))
    arguments = (*pointers, *numbers, *map(np.float32, limits))
    return LaunchPlan(kernel, _outputs_grid(sizes), (THREADS, 1, 1), arguments)


def kernels(device: Device) -> Iterator[Kernel]:
    """Those of common layers: 4 and 8 bits, NHWC and NCHW."""
    sizes = Sizes(1, 56, 56, 64, 64, 1, 3, 3, 56, 56, pad_h=1, pad_w=1)
    strides = 56 * 56 * 64, 56 * 64, 64, 1
    for dtype in ("float16", "bfloat16", "float32"):
        for bits in (4, 8):
            for nhwc in (True, False):
                problem = Convolution(sizes, 32, bits, True, dtype, strides, nhwc)
                yield SimtConfig().plan(problem, device).kernel
                if nhwc and refuse(problem, device) is None:
                    yield from (config.plan(problem, device).kernel for config in configs(problem, device))
    for nhwc in (True, False):
        yield int8_plan(sizes, strides, nhwc, 0, (-128, 127), device).kernel


def _outputs_grid(sizes: Sizes) -> tuple[int, int, int]:
    """One thread for each output."""
    return ceil_div(sizes.pixels * sizes.outputs * sizes.groups, THREADS), 1, 1


def _fits(workspace: tuple[int, int]) -> bool:
    return workspace[0] <= WORKSPACE_BYTES and workspace[1] <= COUNTERS
