# SPDX-License-Identifier: Apache-2.0
"""``conv2d_simt``: convolutions of any sizes on CUDA cores, on any architecture; the fallback."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels.conv2d_problem import Convolution, output_grid, refuse_activation, refuse_tensor_cores
from cupy_awq.kernels.family import Workspace
from cupy_awq.kernels.problem import ceil_div
from cupy_awq.packing import namespace
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

NAME = "conv2d_simt"
RESIDENT_THREADS = 2048
START_US = 2.0
PRODUCT_US = 0.02
"""One product of all threads of an SM, for the estimate; not fitted to measurements."""


@dataclass(frozen=True)
class Conv2dSimtConfig:
    """One thread per element of y.

    Attributes:
        threads: threads of a CTA.
    """

    threads: int = 256

    split_k = 1


def refuse(problem: Convolution, device: Device) -> str | None:
    """Return why the family cannot solve the problem, or why another family replaces it; None if it can."""
    if refuse_tensor_cores(problem, device) is None:
        return "is replaced by the tensor-core kernels, which take this problem"
    return refuse_activation(problem)


def configs(problem: Convolution, device: Device) -> list[Conv2dSimtConfig]:
    """Return the one configuration."""
    return [Conv2dSimtConfig()]


def estimate_us(config: Conv2dSimtConfig, problem: Convolution, device: Device) -> float:
    """Return the expected time: the products of a thread, for each wave of threads."""
    sizes = problem.sizes
    elements = sizes.pixels * sizes.outputs * sizes.groups
    products = sizes.kernel_h * sizes.kernel_w * sizes.channels
    return START_US + ceil_div(elements, device.sm_count * RESIDENT_THREADS) * products * PRODUCT_US


def plan(config: Conv2dSimtConfig, problem: Convolution, device: Device) -> LaunchPlan:
    """Return the launch."""
    defines = (*problem.defines(), ("ZERO", 1 << (problem.bits - 1)), ("THREADS", config.threads))
    kernel = Kernel("conv2d/conv2d_simt.cu", NAME, defines, device.target)
    arguments = ("x", "codes", "parameters", "bias", "y", *problem.scalars(4, problem.block_size))
    return LaunchPlan(kernel, output_grid(problem.sizes, config.threads), (config.threads, 1, 1), arguments)


def workspace(config: Conv2dSimtConfig, problem: Convolution) -> Workspace:
    """Return an empty workspace: K is not split."""
    return Workspace()


def prepare_weight(weight: BlockQuantizedWeight, problem: Convolution) -> dict[str, Array]:
    """Return the buffers "codes", one byte per code, and "parameters", float32 [2, Co, blocks]: scale and offset."""
    xp = namespace(weight.scale)

    def parameters() -> Array:
        scale = weight.scale.astype(np.float32)
        return xp.stack((scale, scale * 0 if weight.offset is None else weight.offset.astype(np.float32)))

    return {
        "codes": weight.layout("simt codes", lambda: xp.ascontiguousarray(weight.codes)),
        "parameters": weight.layout("simt parameters", parameters),
    }
