# SPDX-License-Identifier: Apache-2.0
"""Print the table of operators: the dtypes of x that each kernel supports on each architecture path, and its tests.

python -m tests.tools.operator_table
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from cupy_awq.kernels.conv2d.problem import Convolution
from cupy_awq.kernels.dequantize.int_to_fp16 import Conversion
from cupy_awq.kernels.family import AnyFamily
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, INT8_FRAGMENTS, INT8_ROWS, Problem
from cupy_awq.kernels.int8.problem import Int8Problem
from cupy_awq.kernels.int8.quantize_fp8 import Fp8Quantization
from cupy_awq.kernels.int8.quantize_rows import RowQuantization
from cupy_awq.kernels.registry import FAMILIES_OF
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
    "gemm_mma_fragments": "test_mma_repacked.py::test_any_problem, test_every_tile",
    "gemm_w8a16_simt": "test_int8_linear.py::test_any_problem_on_cuda_cores",
    "gemm_sm90_raw": RAW + ", test_few_rows_of_any_problem",
    "gemm_sm90": "test_repacked_kernels.py::test_any_repacked_problem, test_any_problem_with_a_fusion,"
    " test_any_problem_whose_kernel_gathers_x",
    "gemm_sm90_large": "test_repacked_kernels.py::test_persistent_ctas_with_stream_k",
}
INT8_TILES = "test_int8_linear.py::test_any_problem_on_tensor_cores, test_every_tile"


class Operation(NamedTuple):
    """A public operation other than a GEMM with float x, as a row of the table.

    Attributes:
        problem: the type of its problem, whose kernels the table lists; None if the operation is a kernel itself.
        rows: the rows of x that it takes, or "-" without x.
        dtypes: the dtypes of x, or of the result without x.
        test: the file and the name of its test.
        first_path: the lowest architecture path that has the operation.
    """

    problem: type | None
    rows: str
    dtypes: str
    test: str
    first_path: int = 60


FLOATS = "fp16 bf16 fp32"
OTHERS = {
    "dequantize": Operation(None, "-", FLOATS, "test_kernels.py::test_dequantize_gives_the_formulas_bits"),
    "gather_columns": Operation(
        None,
        "any",
        FLOATS,
        "test_activation_order.py::test_the_kernel_gathers_columns_of_strided_rows, test_any_gather_on_the_simulator",
    ),
    "repack": Operation(
        None,
        "-",
        "fp16 bf16",
        "test_repacked_kernels.py::test_repacking_keeps_every_code_scale_and_zero",
        first_path=90,
    ),
    "quantize_activations": Operation(
        RowQuantization, "any", FLOATS, "test_gemm_int8.py::test_quantize_rows_gives_the_bits_of_the_reference"
    ),
    "gemm_int8, linear_int8": Operation(Int8Problem, "any", FLOATS, "test_gemm_int8.py::test_any_int8_product"),
    "linear_fp8": Operation(
        Fp8Quantization,
        "any",
        FLOATS + " (sm_89 and newer)",
        "test_fp8.py::test_quantize_fp8_gives_the_bits_of_the_reference, test_fp8_on_gemm_int8_sm90,"
        " test_fp8_on_gemm_int8_sm80",
        first_path=80,
    ),
    "conv2d": Operation(Convolution, "any", FLOATS, "test_conv2d.py::test_any_convolution, test_any_sm90_convolution"),
    "conv2d_int8": Operation(None, "any", "int8", "test_conv2d.py::test_conv2d_int8_gives_the_bits_of_the_reference"),
    "dequantize_s4_to_fp16x2, int8_to_fp16": Operation(Conversion, "-", "fp16", "test_ops.py::test_conversion_kernels"),
}


def table() -> str:
    """Return the table of operators in Markdown, which tests/README.md contains."""
    lines = [
        f"| operation: kernels | rows of x | {' | '.join(PATHS.values())} | tests |",
        f"|{'---|' * (len(PATHS) + 3)}",
    ]
    forms = ("gemm", ((AWQ,), (AWQ, FRAGMENTS))), ("Int8Linear", ((INT8_ROWS,), (INT8_FRAGMENTS,)))
    for (operation, layouts), (name, family) in itertools.product(forms, FAMILIES_OF[Problem].items()):
        legal = functools.partial(_legal, family, layouts)
        rows = [m for m in (1, 2, 16, 17, 33) if any(legal(m, arch, "float16") for arch in PATHS)]
        if not rows:
            continue
        span = {(1,): "1", (2, 16): "2-16", (1, 2, 16): "1-16", (33,): "33 and more"}.get(tuple(rows), "any")
        cells = [
            " ".join(short for dtype, short in DTYPES.items() if legal(rows[0], arch, dtype)) or "-" for arch in PATHS
        ]
        test = INT8_TILES if (operation, name) == ("Int8Linear", "gemm_mma_fragments") else TESTS[name]
        lines.append(f"| `{operation}`: `{name}` | {span} | {' | '.join(cells)} | `{test}` |")
    for name, other in OTHERS.items():
        families = "" if other.problem is None else f": `{', '.join(FAMILIES_OF[other.problem])}`"
        cells = [other.dtypes if arch >= other.first_path else "-" for arch in PATHS]
        lines.append(f"| `{name}`{families} | {other.rows} | {' | '.join(cells)} | `{other.test}` |")
    return "\n".join(lines)


def _legal(family: AnyFamily, layouts: tuple[tuple[str, ...], ...], m: int, arch: int, dtype: str) -> bool:
    """Return whether a kernel family supports M rows on a GPU of this architecture, in any of the weight layouts."""
    is_int8 = AWQ not in layouts[0]
    form = (dtype, "symmetric") if is_int8 else ("float16", "packed")
    problems = (Problem(m, 256, 256, 64, dtype, *form, layouts=some) for some in layouts)
    return any(family.refusal(problem, device.nominal(arch)) is None for problem in problems)


if __name__ == "__main__":
    print(table())
