# SPDX-License-Identifier: Apache-2.0
"""AWQ INT4 weight-only linear algebra for NVIDIA GPUs, with no PyTorch.

The operations compute y = x @ W for x [..., K] in float16, bfloat16 or float32, and W [K, N] as 4-bit codes with a
scale and a zero point for each column and group of ``group_size`` rows. They run on the CPU for NumPy arrays, and on
the GPU for CuPy arrays.

A public name is imported from its module at its first use, so importing one part of the package, such as
``cupy_awq.checkpoint``, does not load the others.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "AwqLinear": "linear",
    "BlockQuantizedWeight": "block_weight",
    "Checkpoint": "loader",
    "CheckpointError": "checkpoint",
    "Int8Linear": "int8_linear",
    "MoeLayer": "ops.moe_layer",
    "PackedExperts": "ops.packed_experts",
    "PackedWeight": "weight",
    "Plan": "ops.plan",
    "conv2d": "ops.conv2d",
    "conv2d_int8": "ops.conv2d_int8",
    "dequantize": "ops.dequantize",
    "dequantize_s4_to_fp16x2": "ops.int_to_fp16",
    "explain": "ops.gemm",
    "from_mnn": "block_weight",
    "from_packed": "block_weight",
    "gemm": "ops.gemm",
    "gemm_grouped": "ops.experts",
    "gemm_int8": "ops.quantized_linear",
    "gemv": "ops.gemm",
    "int8_to_fp16": "ops.int_to_fp16",
    "linear_fp8": "ops.quantized_linear",
    "linear_int8": "ops.quantized_linear",
    "load": "loader",
    "moe": "ops.experts",
    "pack_int4": "packing",
    "plan": "ops.plan",
    "quantize": "quantizer",
    "quantize_activations": "ops.quantized_linear",
    "save": "saver",
    "topk": "ops.experts",
    "unpack_int4": "packing",
}
"""The module that defines each public name; ``__init__.pyi`` declares the same names for type checkers."""

_SUBMODULES = ("checkpoint", "llm", "packing", "reference")
"""The names of the public submodules, which are attributes of the package."""

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name or submodule at its first use."""
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, including those not imported yet; helpers and imported modules are left out."""
    return sorted({*(name for name in globals() if name.startswith("__")), *_MODULES, *_SUBMODULES})
