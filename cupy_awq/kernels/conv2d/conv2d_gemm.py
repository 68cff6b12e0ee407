# SPDX-License-Identifier: Apache-2.0
"""``conv2d_gemm``: a 1x1 convolution with stride 1 as a GEMM, by the kernels of `gemm_sm90` and `gemm_sm90_large`.

The pixels of all images must lie at equal distances in memory, and those of y at multiples of 16 bytes (NHWC). x is
[pixels of all images, input channels], W is [input channels, output channels]. The weight has the fragment layout,
in which offsets may take the place of zero points.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.conv2d.conv2d_sm90_config import image_view
from cupy_awq.kernels.conv2d.problem import Convolution, rounded_parameters, sm90_refusal
from cupy_awq.kernels.family import AnyFamily, FunctionFamily
from cupy_awq.kernels.gemm.fragments import ROUNDED_MIN_M
from cupy_awq.kernels.gemm.gemm_sm90 import GEMM_SM90
from cupy_awq.kernels.gemm.gemm_sm90_config import GemmSm90Config
from cupy_awq.kernels.gemm.gemm_sm90_large import GEMM_SM90_LARGE, GemmSm90LargeConfig
from cupy_awq.kernels.gemm.layouts import WEIGHT_TILE_K, WEIGHT_TILE_N, FragmentLayout
from cupy_awq.kernels.gemm.problem import FRAGMENTS, Problem, Strides
from cupy_awq.kernels.hopper import HOPPER
from cupy_awq.packing import namespace
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan

NAME = "conv2d_gemm"
SINGLE_CTA_FACTOR = 1.2
"""The factor on the modelled time of `gemm_sm90` if an SM has room for one CTA only.

The input of a convolution is in L2, as the preceding layer has written it; the cost model was fitted to cold inputs. On
an H100, configurations with room for two CTAs took 0.86 of the modelled time, the others 0.99 (333 times of 18 layers);
of the factors tried, 1.2 gives the fastest first choice among all kernels in these layers.
"""

GemmConfig: TypeAlias = GemmSm90Config | GemmSm90LargeConfig


def gemm_problem(problem: Convolution) -> Problem:
    """Return the matrix product of a 1x1 convolution: y [pixels, outputs] = x [pixels, channels] @ W."""
    sizes = problem.sizes
    n, k = sizes.outputs, sizes.channels
    return Problem(
        sizes.pixels,
        n,
        k,
        min(problem.block_size, k),
        problem.dtype,
        problem.dtype,
        "float" if problem.weight_offset else "symmetric",
        problem.bias_dtype,
        activation=problem.activation,
        limits=problem.limits,
        layouts=(FRAGMENTS,),
        strides=Strides(problem.strides[2], n // 8, n, n, n, n),
    )


def _family(config: GemmConfig) -> AnyFamily:
    """Return the GEMM family whose kernel a configuration is for."""
    return GEMM_SM90 if isinstance(config, GemmSm90Config) else GEMM_SM90_LARGE


def refusal(problem: Convolution, device: Device) -> str | None:
    sizes = problem.sizes
    reason = sm90_refusal(problem, device)
    if reason:
        return reason
    if problem.bits != 4 or sizes.groups > 1:
        return f"takes 4-bit weights and one group, not {problem.bits} bits and {sizes.groups}"
    if min(problem.strides[:3]) <= 0 or not image_view(problem).flat:
        return "needs a 1x1 filter, stride 1 and images whose pixels form a single row"
    if not problem.nhwc or not problem.y_aligned or sizes.outputs % 8:
        return "needs y in NHWC with pixels at multiples of 16 bytes"
    if sizes.pixels < ROUNDED_MIN_M:
        return f"needs {ROUNDED_MIN_M} pixels of y, not {sizes.pixels}"
    # The layout refuses float offsets because the kernel `repack` does not support them; `_repacked` does.
    return replace(FragmentLayout.of(gemm_problem(problem)), zeros="symmetric").refusal()


def configs(problem: Convolution, device: Device) -> list[GemmConfig]:
    """Return the legal configurations of both GEMM families that need no workspace."""
    gemm = gemm_problem(problem)
    small = [config for config in GEMM_SM90.configs(gemm, device) if config.scaled]
    large = [config for config in GEMM_SM90_LARGE.configs(gemm, device) if not config.stream_k_units]
    return [*small, *large]


def estimate_us(config: GemmConfig, problem: Convolution, device: Device) -> float:
    """Return the run time in microseconds: the time by the cost model of the GEMM family, and memory time in addition.

    The additional term is chosen such that this family is selected where it was the fastest of all in 15 measured
    layers on an H100. It matters if the memory time is close to the time of the GEMM.
    """
    sizes = problem.sizes
    gemm = gemm_problem(problem)
    gemm_us = _family(config).estimate_us(config, gemm, device)
    if isinstance(config, GemmSm90Config) and config.resident(gemm, device) == 1:
        gemm_us *= SINGLE_CTA_FACTOR
    traffic_us = sizes.pixels * (sizes.channels + sizes.outputs) * 2 / (device.read_gbs * 1e3)
    return gemm_us + traffic_us**2 / (2 * gemm_us)


def plan(config: GemmConfig, problem: Convolution, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are those of the GEMM family."""
    return _family(config).plan(config, gemm_problem(problem), device)


def prepare_weight(weight: BlockQuantizedWeight, config: GemmConfig, problem: Convolution) -> dict[str, Array | None]:
    """Return the buffer "weight" in the fragment layout, and None for "residual", which a convolution does not have."""
    layout = FragmentLayout.of(gemm_problem(problem))
    repacked = weight.layout(("repacked", problem.dtype), lambda: _repacked(weight, layout, np.dtype(problem.dtype)))
    return {"weight": repacked, "residual": None}


def _repacked(weight: BlockQuantizedWeight, layout: FragmentLayout, dtype: np.dtype[np.generic]) -> Array:
    """Return the weight in the layout of ``cuda_src/gemm/repacked_layout.cuh``, uint8 [nbytes]."""
    xp = namespace(weight.stored)
    columns, k_tiles = layout.tile_columns, layout.k_tiles
    padded = xp.zeros((columns * WEIGHT_TILE_N, k_tiles * WEIGHT_TILE_K), np.uint8)
    padded[: layout.n, : layout.k] = weight.codes.reshape(layout.n, layout.k)
    # The axes are (tile column, 16 columns, column half, g, k tile, k64, k16, k half, t, pair), for lane 4 g + t of an
    # mma. The order is [tile column, k tile, k64, 16 columns, g, t, k16][pair, k half, column half]; the last three
    # axes are the nibbles of a word, lowest first.
    axes = padded.reshape(columns, 2, 2, 8, k_tiles, 2, 4, 2, 4, 2)
    nibbles = axes.transpose(0, 4, 5, 1, 3, 8, 6, 9, 7, 2).reshape(columns, k_tiles, -1, 2)
    parts = [nibbles[..., 0] | nibbles[..., 1] << np.uint8(4)]

    # The groups of each k tile; a group that spans several k tiles is copied to each of them.
    first = np.arange(k_tiles * layout.groups) * (WEIGHT_TILE_K // layout.groups) // layout.group_size
    inside = int((first < weight.blocks).sum())
    scale, offset = rounded_parameters(weight, dtype)
    parameters = [a for a in (scale, offset) if a is not None]
    values = xp.zeros((len(parameters), columns * WEIGHT_TILE_N, len(first)), dtype)
    for index, a in enumerate(parameters):
        values[index, : layout.n, :inside] = a.take(xp.asarray(first[:inside]), axis=1)
    # From (parameter, tile column, 16 columns, column half, g, k tile, group) to [tile column, k tile, group,
    # 16 columns, parameter, g, column half], where g = lane / 4.
    groups = values.reshape(len(parameters), columns, 2, 2, 8, k_tiles, layout.groups).transpose(1, 5, 6, 2, 0, 4, 3)
    parts.append(xp.ascontiguousarray(groups).view(np.uint8).reshape(columns, k_tiles, -1))
    return xp.ascontiguousarray(xp.concatenate(parts, axis=2)).reshape(-1)


CONV2D_GEMM = FunctionFamily(NAME, configs, estimate_us, plan, refusal, needs=HOPPER, prepare_weight=prepare_weight)
