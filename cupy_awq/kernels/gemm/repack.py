# SPDX-License-Identifier: Apache-2.0
"""``repack``: convert a weight from the AWQ layout to the fragment layout."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_awq.kernels.family import FunctionFamily, MemoryBoundProblem, SoleConfig, sole_configs, traffic_us
from cupy_awq.kernels.gemm.layouts import FragmentLayout
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan

NAME = "repack"


@dataclass(frozen=True)
class Repacking(MemoryBoundProblem):
    """A conversion of a weight from the AWQ layout.

    Attributes:
        layout: the layout of the result.
        strides: row strides of qweight, scales and qzeros in elements, or None if all are contiguous.
    """

    layout: FragmentLayout
    strides: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"repack W[{self.layout.k}, {self.layout.n}] group size {self.layout.group_size}"

    @property
    def nbytes(self) -> int:
        """The size of the AWQ tensors and of the fragment layout in bytes."""
        return 2 * self.layout.nbytes


def refusal(problem: Repacking, device: Device) -> str | None:
    return problem.layout.refusal()


def plan(config: SoleConfig, problem: Repacking, device: Device) -> LaunchPlan:
    return problem.layout.pack(device, problem.strides)


REPACK = FunctionFamily(NAME, sole_configs, traffic_us, plan, refusal)
