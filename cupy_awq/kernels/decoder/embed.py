# SPDX-License-Identifier: Apache-2.0
"""``embed``: the rows of an embedding table for tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cupy_awq.kernels.decoder.common import int32s, plan_launch
from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES
from cupy_awq.kernels.family import FunctionFamily, MemoryBoundProblem, SoleConfig, sole_configs, traffic_us
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan

NAME = "embed"


@dataclass(frozen=True)
class Embedding(MemoryBoundProblem):
    """An embedding h [m, width] = table[tokens], with a table [vocab, width].

    Attributes:
        m: number of tokens.
        vocab: number of rows of the table; a token outside the table is read as token 0.
        width: number of columns of the table.
        table_dtype: dtype of the table; h is float32.
    """

    m: int
    vocab: int
    width: int
    table_dtype: str

    COMMON = tuple((1, 8, 8, dtype) for dtype in ("float16", "bfloat16"))

    def __str__(self) -> str:
        return f"h[{self.m}, {self.width}] = table[{self.vocab}, {self.width}] {self.table_dtype}"

    @property
    def nbytes(self) -> int:
        """The size of the rows of the table and of h in bytes."""
        return self.m * self.width * (ITEMSIZE[self.table_dtype] + 4)


def plan(config: SoleConfig, problem: Embedding, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are tokens, table and h."""
    threads = 1024  # With one load of 4 values per thread, a CTA covers a row of up to 4096 values.
    arguments = ("tokens", "table", "h", *int32s(problem.vocab, problem.width))
    defines: dict[str, int | str] = {"TABLE": TYPES[problem.table_dtype]}
    plan = plan_launch(device, NAME, defines, (problem.m, 1, 1), threads, arguments)
    return replace(plan, dependent=False)


EMBED = FunctionFamily(NAME, sole_configs, traffic_us, plan)
