# SPDX-License-Identifier: Apache-2.0
"""Print the table of operators: the dtypes of x that each kernel takes on each architecture path, and its tests.

python -m tests.tools.operator_table
"""

from __future__ import annotations

from cupy_awq.kernels import select
from cupy_awq.kernels.family import AnyFamily
from cupy_awq.kernels.problem import Problem
from cupy_awq.runtime import device

PATHS = {60: "below sm_75", 75: "sm_75", 80: "sm_80 and newer", 90: "sm_90"}
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
RAW = "test_kernels.py::test_every_legal_configuration, test_any_problem_on_any_kernel"
TESTS = {
    "gemv": RAW,
    "gemm_small": RAW,
    "gemm_simt": RAW,
    "gemm_sm75": RAW,
    "gemm_sm80": RAW,
    "gemm_sm90_raw": RAW + ", test_few_rows_of_any_problem",
    "gemm_sm90": "test_repacked_kernels.py::test_any_repacked_problem, test_any_problem_with_a_fusion",
    "gemm_sm90_large": "test_repacked_kernels.py::test_persistent_ctas_with_stream_k",
}
OTHERS = {
    "dequantize": ("fp16 bf16 fp32", "test_kernels.py::test_dequantize_gives_the_formulas_bits"),
    "repack": (None, "test_repacked_kernels.py::test_repacking_keeps_every_code_scale_and_zero"),
    "quantize_activations": ("fp16 bf16 fp32", "test_gemm_int8.py::test_quantize_rows_gives_the_bits_of_the_reference"),
    "gemm_int8": ("fp16 bf16 fp32", "test_gemm_int8.py::test_any_int8_product"),
    "conv2d": ("fp16 bf16 fp32", "test_conv2d.py::test_any_convolution"),
    "conv2d_int8": ("int8", "test_conv2d.py::test_conv2d_int8_gives_the_bits_of_the_reference"),
    "dequantize_s4_to_fp16x2, int8_to_fp16": ("fp16", "test_ops.py::test_conversion_kernels"),
}


def table() -> str:
    """Return the table in Markdown."""
    lines = [
        f"| kernel | rows of x | {' | '.join(PATHS.values())} | tests |",
        f"|{'---|' * (len(PATHS) + 3)}",
    ]
    for name, family in select.FAMILIES_OF[Problem].items():
        rows = [m for m in (1, 2, 16, 17, 33) if any(_legal(family, m, arch, "float16") for arch in PATHS)]
        span = {(1,): "1", (2, 16): "2-16", (1, 2, 16): "1-16", (33,): "33 and more"}.get(tuple(rows), "any")
        cells = [
            " ".join(short for dtype, short in DTYPES.items() if _legal(family, rows[0], arch, dtype)) or "-"
            for arch in PATHS
        ]
        lines.append(f"| `{name}` | {span} | {' | '.join(cells)} | `{TESTS[name]}` |")
    for name, (dtypes, test) in OTHERS.items():
        cells = [dtypes or ("fp16 bf16" if arch == 90 else "-") for arch in PATHS]
        lines.append(f"| `{name}` | - | {' | '.join(cells)} | `{test}` |")
    return "\n".join(lines)


def _legal(family: AnyFamily, m: int, arch: int, dtype: str) -> bool:
    """Return whether the family is legal for a weight in the AWQ layout or in the repacked layout."""
    problems = (Problem(m, 256, 256, 64, dtype, repacked=repacked) for repacked in (False, True))
    return any(family.refusal(problem, device.nominal(arch)) is None for problem in problems)


if __name__ == "__main__":
    print(table())
