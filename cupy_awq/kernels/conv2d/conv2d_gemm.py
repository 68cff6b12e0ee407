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
from cupy_awq.kernels.gemm.layouts import FragmentLayout
from cupy_awq.kernels.gemm.problem import FRAGMENTS, Problem, Strides
from cupy_awq.kernels.hopper import HOPPER
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
    return FragmentLayout.of(gemm_problem(problem)).refusal()


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
    gemm = _family(config).plan(config, gemm_problem(problem), device)
    kernel = gemm.kernel
    # The codes of a BlockQuantizedWeight have the zero point 8 beside offsets, too.
    return replace(gemm, kernel=replace(kernel, defines=(*kernel.defines, ("OFFSET_ZERO", 8))))


def prepare_weight(weight: BlockQuantizedWeight, config: GemmConfig, problem: Convolution) -> dict[str, Array | None]:
    """Return the buffer "weight" in the fragment layout, and None for "residual", which a convolution does not have."""
    layout = FragmentLayout.of(gemm_problem(problem))

    def repacked() -> Array:
        parameters = rounded_parameters(weight, np.dtype(problem.dtype))
        return layout.arrange(weight.codes.reshape(layout.n, layout.k), [a for a in parameters if a is not None])

    return {"weight": weight.layout(("repacked", problem.dtype), repacked), "residual": None}


CONV2D_GEMM = FunctionFamily(NAME, configs, estimate_us, plan, refusal, needs=HOPPER, prepare_weight=prepare_weight)
