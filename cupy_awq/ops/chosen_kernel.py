# SPDX-License-Identifier: Apache-2.0
"""The path from a validated problem to a launch, which every operation takes: select, plan, load, launch."""

from __future__ import annotations

from collections.abc import Mapping

from cupy_awq.block_weight import BlockQuantizedWeight
from cupy_awq.check import Array
from cupy_awq.kernels import select
from cupy_awq.kernels.family import KernelProblem
from cupy_awq.kernels.select import Choice
from cupy_awq.runtime import arrays, device
from cupy_awq.runtime import workspace as workspaces
from cupy_awq.runtime.launcher import get_launcher

NO_WORKSPACE = {"counters": 0, "partials": 0}
"""The addresses of the workspace's two buffers for a kernel that needs none: null pointers."""


class ChosenKernel:
    """The kernel that `choose_kernel` selects for a problem, loaded on a GPU.

    Most operations call `launch`. A GEMM keeps the kernel and calls ``launcher`` with addresses; see `PreparedGemm`.

    Attributes:
        choice: the kernel family, its configuration and its launch plan.
        launcher: the launcher of the plan.
        workspace_bytes: the size of the split-K workspace in bytes; 0 if the configuration needs none.
    """

    __slots__ = ("_index", "choice", "launcher", "workspace_bytes")

    def __init__(self, choice: Choice, index: int) -> None:
        self.choice, self._index = choice, index
        partial_bytes = choice.family.workspace(choice.config, choice.problem).partial_bytes
        self.workspace_bytes = workspaces.COUNTER_BYTES + partial_bytes if partial_bytes else 0
        self.launcher = get_launcher(choice.plan, index)

    def weight_buffers(self, weight: BlockQuantizedWeight) -> dict[str, Array | None]:
        """Return the weight's buffers for this kernel; layouts are created on first use and cached in the weight."""
        return dict(self.choice.family.prepare_weight(weight, self.choice.config, self.choice.problem))

    def launch(self, buffers: Mapping[str, Array | None]) -> None:
        """Launch the kernel on the current stream; counters and partial sums are in the stream's workspace.

        ``buffers`` contains at least the other buffers of the plan, by name; None is passed as a null pointer.
        """
        import cupy

        stream, workspace = cupy.cuda.get_current_stream().ptr, NO_WORKSPACE
        if self.workspace_bytes:
            begin = workspaces.workspace_address(self._index, stream)
            workspace = {"counters": begin, "partials": begin + workspaces.COUNTER_BYTES}
        names = self.launcher.buffers
        pointers = [workspace[name] if name in workspace else arrays.address(buffers[name]) for name in names]
        self.launcher(tuple(pointers), stream)


def choose_kernel(
    problem: KernelProblem, index: int, kernel: str | None = None, split_k: int | None = None
) -> ChosenKernel:
    """Return the kernel that `select.choose` selects for a problem, loaded on the current GPU.

    Args:
        problem: the validated operation.
        index: the ordinal of the current GPU.
        kernel, split_k: as in `select.choose`.

    Raises:
        ValueError: no kernel can solve the problem.
        CompileError, MemoryError: the kernel does not compile, or the memory of the GPU is exhausted.
    """
    return ChosenKernel(select.choose(problem, device.of(index), kernel, split_k), index)
