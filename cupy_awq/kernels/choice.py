# SPDX-License-Identifier: Apache-2.0
"""The choice of a kernel for the problems of 8-bit products, quantization and convolutions."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from cupy_awq.kernels import (
    conv2d_int8,
    conv2d_simt,
    conv2d_sm80,
    conv2d_sm90,
    conv2d_sm90_large,
    gemm_int8_simt,
    gemm_int8_sm90,
    gemv_int8,
    quantize_fp8,
    quantize_rows,
)
from cupy_awq.kernels.conv2d_int8 import Int8Convolution
from cupy_awq.kernels.conv2d_problem import Convolution
from cupy_awq.kernels.family import AnyFamily, Config, KernelProblem
from cupy_awq.kernels.gemm_int8_mma import GEMM_INT8_SM75, GEMM_INT8_SM80
from cupy_awq.kernels.int8_problem import Int8Problem
from cupy_awq.kernels.quantize_fp8 import Fp8Quantization
from cupy_awq.kernels.quantize_rows import RowQuantization
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan
from cupy_awq.runtime.workspace import COUNTERS, WORKSPACE_BYTES

FAMILIES_OF: dict[type, tuple[AnyFamily, ...]] = {
    Int8Problem: (gemv_int8, GEMM_INT8_SM75, GEMM_INT8_SM80, gemm_int8_sm90, gemm_int8_simt),
    RowQuantization: (quantize_rows,),
    Fp8Quantization: (quantize_fp8,),
    Convolution: (conv2d_sm90, conv2d_sm90_large, conv2d_sm80, conv2d_simt),
    Int8Convolution: (conv2d_int8,),
}
"""The families of each type of problem."""


@dataclass(frozen=True)
class Choice:
    """The kernel that solves a problem."""

    family: AnyFamily
    config: Config
    plan: LaunchPlan

    @property
    def name(self) -> str:
        """The name of the family."""
        return self.family.NAME


@functools.lru_cache(maxsize=4096)
def choose(problem: KernelProblem, device: Device) -> Choice:
    """Return the fastest legal configuration by cost model; ValueError with each family's reason if there is none."""
    legal = []
    reasons = []
    for family in FAMILIES_OF[type(problem)]:
        reason = family.refuse(problem, device)
        if reason is not None:
            reasons.append(f"{family.NAME} {reason}")
            continue
        for config in family.configs(problem, device):
            partial_bytes, counters = family.workspace(config, problem)
            if partial_bytes <= WORKSPACE_BYTES and counters <= COUNTERS:
                legal.append((family.estimate_us(config, problem, device), family, config))
    if not legal:
        raise ValueError(f"no kernel fits: {'; '.join(reasons)}")
    _, family, config = min(legal, key=lambda candidate: candidate[0])
    return Choice(family, config, family.plan(config, problem, device))
