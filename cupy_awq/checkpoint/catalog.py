# SPDX-License-Identifier: Apache-2.0
"""The table of supported checkpoint formats, for the command ``info --formats`` and the README."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One format of checkpoints.

    Attributes:
        name: the name that the format's writers use.
        recognized: the evidence that identifies the format: an entry of the configuration, the tensors or the file.
        rounding: a description of the values that are rounded once, or "" if every 4-bit weight is read exactly.
        order: whether modules may permute x (activation order).
        writer: the value of ``convert --format`` that writes the format, or "".
    """

    name: str
    recognized: str
    rounding: str = ""
    order: bool = False
    writer: str = ""


FORMATS = (
    Row("AutoAWQ gemm", "quant_method awq, version gemm", writer="autoawq"),
    Row("AutoAWQ gemv", "quant_method awq, version gemv or gemv_fast"),
    Row("llm-awq", "one .pt file with qweight, scales and qzeros or scaled_zeros"),
    Row("GPTQ", "quant_method gptq, checkpoint_format gptq or gptq_v2", order=True, writer="gptq"),
    Row("auto-round", "quant_method auto-round, or gptq or awq by provider auto-round"),
    Row("compressed-tensors", "format pack-quantized, 4 bits", order=True, writer="compressed-tensors"),
    Row("MLX", "quantization with 4 bits, mode affine; modules of 2 or 8 bits become dense"),
    Row("GGUF Q4_0, Q4_1", "types of a .gguf file", writer="gguf"),
    Row("GGUF Q4_K", "type of a .gguf file; all others become 16-bit", "scales and offsets to float16"),
    Row("HQQ", "quant_method hqq, axis 1, safetensors", "offsets, unless zero points are integers"),
)
"""The supported formats. The README lists them in this order, in separate rows for exact and rounded reading."""


def list_readme_rows() -> list[str]:
    """Return the rows that list the checkpoint formats in the README's table of supported features."""
    exact, rounded = (", ".join(row.name for row in FORMATS if bool(row.rounding) == flag) for flag in (False, True))
    writers = ", ".join(row.writer for row in FORMATS if row.writer)
    return [f"| 4-bit, exact | {exact} |", f"| 4-bit, rounded once | {rounded}; `convert` writes {writers}, ak48 |"]
