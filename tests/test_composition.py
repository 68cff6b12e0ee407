# SPDX-License-Identifier: Apache-2.0
"""Two instances of one kernel in one translation unit: device code is a template on the configuration."""

from __future__ import annotations

import re

import pytest

from cupy_awq.kernels import select
from cupy_awq.kernels.conv2d.problem import Convolution
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem
from cupy_awq.kernels.int8.problem import Int8Problem
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device, sources
from cupy_awq.runtime.launch_plan import Kernel
from tests.backends import fewer
from tests.simt.kernels import patched

GEMMS = (
    Problem(64, 4096, 4096, 128, layouts=(AWQ, FRAGMENTS)),
    Problem(2, 4096, 4096, 128, layouts=(AWQ, FRAGMENTS)),
    Problem(2, 4096, 4096, 128, layouts=(AWQ, FRAGMENTS), batch_invariant=True),
    Problem(2, 4096, 4096, 128),
    Problem(4096, 4096, 4096, 128, layouts=(AWQ, FRAGMENTS)),
)
ENTRIES = {
    "gemm_sm90": "kAligned",
    "gemm_sm90_mma": "kAligned",
    "gemm_sm90_mma_invariant": "kAligned",
    "gemm_sm90_raw": "kMayPrefetchWeights",
    "gemm_sm90_large": "kAligned",
    "gemm_mma_fragments": "kHasBias",
    "gemm_int8_sm90": "kHasBias",
    "gemm_w4a8_mma": "kHasBias",
    "gemm_w4a8_sm90": "kStartsNextLate",
    "conv2d_sm90": "kHasBias",
}
"""The name of a constant of each kernel that is negated in the second instance, so that the two differ."""


def kernel_of(entry: str) -> Kernel:
    """Return the kernel with this entry point that some common problem is solved by on a nominal GPU."""
    here = device.nominal(80 if entry in ("gemm_mma_fragments", "gemm_w4a8_mma") else 90)
    problems = (*GEMMS, *Int8Problem.common_problems(), *Convolution.common_problems())
    kernels = (select.choose(problem, here).plan.kernel for problem in problems)
    return next(kernel for kernel in kernels if kernel.entry == entry)


@pytest.mark.parametrize("entry", fewer(ENTRIES))
def test_two_instances_share_a_translation_unit(entry: str) -> None:
    kernel = kernel_of(entry)
    text = (sources.folder() / kernel.source).read_text(encoding="utf-8")
    (composition,) = re.findall(r"using Kernel = (\w+)<Config>;", text)
    begin = text[text.index('extern "C"') :]
    second = begin.replace("Kernel", "SecondKernel").replace("Config::", "SecondConfig::")
    second = second.replace(f"{entry}(", f"{entry}_second(", 1)
    constant = ENTRIES[entry]
    definitions = (
        f"struct SecondConfig : Config {{ static constexpr bool {constant} = !Config::{constant}; }};\n"
        f"using SecondKernel = {composition}<SecondConfig>;\n"
    )
    with patched(kernel.source, begin, begin + definitions + second):
        ptx = compiler.build(kernel, "ptx").code.decode()
    bodies = [ptx[ptx.index(f".entry {name}(") :].split(".entry ", 2)[1] for name in (entry, f"{entry}_second")]
    assert all("st.global" in body for body in bodies)
