# SPDX-License-Identifier: Apache-2.0
"""``conv2d_simt``: the fallback for convolutions of any size, on CUDA cores of any architecture."""

from __future__ import annotations

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.conv2d.problem import (
    Convolution,
    SimtConfig,
    output_grid,
    simt_estimate_us,
    tensor_core_refusal,
)
from cupy_awq.kernels.epilogue import clamp_refusal
from cupy_awq.kernels.family import FunctionFamily
from cupy_awq.packing import namespace
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "conv2d_simt"


def refusal(problem: Convolution, device: Device) -> str | None:
    if tensor_core_refusal(problem, device) is None:
        return "is replaced by the tensor-core kernels, which support this problem"
    return clamp_refusal(problem.activation)


def configs(problem: Convolution, device: Device) -> list[SimtConfig]:
    """Return the family's single configuration: the problem determines the launch."""
    return [SimtConfig()]


def estimate_us(config: SimtConfig, problem: Convolution, device: Device) -> float:
    return simt_estimate_us(problem.sizes, device)


def plan(config: SimtConfig, problem: Convolution, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are x, codes, parameters, bias and y."""
    defines = (*problem.defines(), ("ZERO", 1 << (problem.bits - 1)), ("THREADS", config.threads))
    kernel = Kernel("conv2d/conv2d_simt.cu", NAME, defines, device.target)
    arguments = ("x", "codes", "parameters", "bias", "y", *problem.scalars(4, problem.block_size))
    return LaunchPlan(kernel, output_grid(problem.sizes, config.threads), (config.threads, 1, 1), arguments)


def prepare_weight(weight: BlockQuantizedWeight, config: SimtConfig, problem: Convolution) -> dict[str, Array]:
    """Return the weight buffers "codes", uint8, and "parameters", float32 [2, Co, blocks]: scales, then offsets."""
    xp = namespace(weight.scale)

    def parameters() -> Array:
        scale = weight.scale.astype(np.float32)
        return xp.stack((scale, scale * 0 if weight.offset is None else weight.offset.astype(np.float32)))

    return {
        "codes": weight.layout("simt codes", lambda: xp.ascontiguousarray(weight.codes)),
        "parameters": weight.layout("simt parameters", parameters),
    }


CONV2D_SIMT = FunctionFamily(NAME, configs, estimate_us, plan, refusal, prepare_weight=prepare_weight)
