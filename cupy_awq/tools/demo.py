# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m cupy_awq demo``: run, check and time a real quantized MLP.

The package contains the MLP of layer 0 of SmolLM2-135M-Instruct as an AutoAWQ folder. The demo measures the error of
each GEMM on random x. The quantization error norm(W_awq - W) / norm(W) was measured when the folder was built and is
stored in its ``config.json``, since the folder does not contain the original weights. W is the weight of the public
GGUF file, which is itself quantized (Q4_1: 4-bit codes in blocks of 32).
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cupy_awq import reference
from cupy_awq.check import HOST, Array
from cupy_awq.checkpoint.files import read_object
from cupy_awq.loader import load
from cupy_awq.runtime import placement
from cupy_awq.tools import table, testing, timing
from cupy_awq.weight import PackedWeight

SMOLLM2_MLP = Path(__file__).parents[1] / "data" / "smollm2-mlp"
"""The checkpoint folder of the MLP, built by ``tests/tools/rebuild_smollm2_mlp.py``."""

PREFIX = "model.layers.0.mlp."
LAYERS = ("gate_proj", "up_proj", "down_proj")
ROWS = (1, 16, 256)


@dataclass(frozen=True)
class Row:
    """The result of one layer at one M.

    Attributes:
        layer: the name of the layer.
        m: the number of rows of x.
        kernel: the name of the kernel, or "numpy" on the CPU.
        error: the relative error of y compared to the float64 product with the same 4-bit weights.
        quantization_error: the relative error of the 4-bit weights, norm(W_awq - W) / norm(W).
        us: the median time per call in microseconds.
        fp16_us: the median time in microseconds of the same GEMM with float16 weights (on the CPU, float32); None on a
            GPU without cuBLAS.
    """

    layer: str
    m: int
    kernel: str
    error: float
    quantization_error: float
    us: float
    fp16_us: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        return asdict(self)


def measure(device: int) -> list[Row]:
    """Run, check and time every layer of `SMOLLM2_MLP` on a device; return one row per layer and M."""
    errors = read_object(SMOLLM2_MLP / "config.json")["quantization_error"]
    layers = load(SMOLLM2_MLP, device=device if device != HOST else "cpu")
    weights = load(SMOLLM2_MLP, device="cpu")
    rng = np.random.default_rng(0)
    rows = []
    with placement.use_device(device):
        for name in LAYERS:
            layer, weight = layers[PREFIX + name], weights[PREFIX + name].weight
            for m in ROWS:
                x = rng.standard_normal((m, weight.shape[0])).astype(np.float16)
                placed = placement.to_device(x, device)
                y = layer(placed)
                error = testing.relative_error(y, x, weight)
                us = timing.time_calls([functools.partial(layer, placed, out=y)], device)
                rows.append(
                    Row(name, m, layer.kernel_for(m), error, errors[PREFIX + name], us, _unquantized(x, weight, device))
                )
    return rows


def _unquantized(x: Array, weight: PackedWeight, device: int) -> float | None:
    """Return the time of x @ W in microseconds: cuBLAS in float16 (None without it), or NumPy in float32 on the CPU."""
    w = reference.dequantize(weight.qweight, weight.scales, weight.qzeros)
    if device == HOST:
        x, w = x.astype(np.float32), w.astype(np.float32)
        return timing.on_cpu([lambda: x @ w])
    if not timing.cublas():
        return None
    import cupy

    x, w = placement.to_device(x, device), placement.to_device(w, device)
    y = cupy.matmul(x, w)
    return timing.on_gpu([lambda: cupy.matmul(x, w, out=y)], graph=False)


def render(rows: list[Row], device: int) -> str:
    """Return the rows as a text table with a heading and notes."""
    cpu = device == HOST
    header = ["layer", "kernel", "M", "error", "quantization error", "us", "fp32 us" if cpu else "fp16 us"]
    cells = [
        [
            row.layer,
            row.kernel,
            str(row.m),
            f"{row.error:.1e}",
            f"{row.quantization_error:.1%}",
            table.number(row.us),
            table.number(row.fp16_us),
        ]
        for row in rows
    ]
    if cpu:
        baseline = "fp32 us: the GEMM with unquantized weights, NumPy in float32"
    elif rows[0].fp16_us is None:
        baseline = "fp16 us: needs cuBLAS, pip install nvidia-cublas-cu12"
    else:
        baseline = "fp16 us: the GEMM with unquantized weights, cupy.matmul (cuBLAS); all weights are in the L2 cache"
    return "\n".join(
        [
            f"SmolLM2-135M-Instruct, MLP of layer 0, AWQ INT4, group size 64, on {placement.device_name(device)}",
            "",
            table.render(header, cells, left=2),
            "",
            "error: y compared to the float64 product with the same 4-bit weights; quantization error: of the weights",
            baseline,
        ]
    )
