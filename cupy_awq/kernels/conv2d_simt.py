# SPDX-License-Identifier: Apache-2.0
"""``conv2d_simt``: the fallback for convolutions of any size, on CUDA cores of any architecture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.conv2d_problem import Convolution, activation_refusal, output_grid, tensor_core_refusal
from cupy_awq.kernels.family import Workspace
from cupy_awq.kernels.problem import ceil_div
from cupy_awq.packing import namespace
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "conv2d_simt"
RESIDENT_THREADS = 2048
"""The number of resident threads per SM that the cost model assumes."""
LAUNCH_US = 2.0
"""The launch overhead in the cost model, in microseconds; not fitted to measurements."""
MULTIPLY_ADD_US = 0.02
"""The time of one multiply-add by every resident thread of an SM, in microseconds; not fitted to measurements."""


@dataclass(frozen=True)
class Conv2dSimtConfig:
    """A configuration of ``conv2d_simt``, which has one thread per element of y.

    Attributes:
        threads: number of threads per CTA.
    """

    threads: int = 256

    split_k = 1


def refusal(problem: Convolution, device: Device) -> str | None:
    """Return why the family cannot solve the problem or which family supersedes it; None if neither."""
    if tensor_core_refusal(problem, device) is None:
        return "is replaced by the tensor-core kernels, which support this problem"
    return activation_refusal(problem)


def configs(problem: Convolution, device: Device) -> list[Conv2dSimtConfig]:
    """Return the only configuration."""
    return [Conv2dSimtConfig()]


def estimate_us(config: Conv2dSimtConfig, problem: Convolution, device: Device) -> float:
    """Return the run time in microseconds: the multiply-adds of one thread, once for each wave of threads."""
    sizes = problem.sizes
    elements = sizes.pixels * sizes.outputs * sizes.groups
    multiply_adds = sizes.kernel_h * sizes.kernel_w * sizes.channels
    return LAUNCH_US + ceil_div(elements, device.sm_count * RESIDENT_THREADS) * multiply_adds * MULTIPLY_ADD_US


def plan(config: Conv2dSimtConfig, problem: Convolution, device: Device) -> LaunchPlan:
    """Return the launch plan. Its buffers are x, codes, parameters, bias and y."""
    defines = (*problem.defines(), ("ZERO", 1 << (problem.bits - 1)), ("THREADS", config.threads))
    kernel = Kernel("conv2d/conv2d_simt.cu", NAME, defines, device.target)
    arguments = ("x", "codes", "parameters", "bias", "y", *problem.scalars(4, problem.block_size))
    return LaunchPlan(kernel, output_grid(problem.sizes, config.threads), (config.threads, 1, 1), arguments)


def workspace(config: Conv2dSimtConfig, problem: Convolution) -> Workspace:
    """Return an empty workspace, since K is not split."""
    return Workspace()


def prepare_weight(weight: BlockQuantizedWeight, problem: Convolution) -> dict[str, Array]:
    """Return the weight buffers "codes", uint8, and "parameters", float32 [2, Co, blocks] (scale, offset)."""
    xp = namespace(weight.scale)

    def parameters() -> Array:
        scale = weight.scale.astype(np.float32)
        return xp.stack((scale, scale * 0 if weight.offset is None else weight.offset.astype(np.float32)))

    return {
        "codes": weight.layout("simt codes", lambda: xp.ascontiguousarray(weight.codes)),
        "parameters": weight.layout("simt parameters", parameters),
    }
