# SPDX-License-Identifier: Apache-2.0
"""Times of integer products and of convolutions: ``python -m cupy_awq bench --op gemm_int8 4096x12288 --m 1,1024``.

Weights are cold on a GPU, as in `cupy_awq.tools.bench`: calls rotate over copies that exceed three times the L2 cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cupy_awq.block_weight import BlockQuantizedWeight, from_packed
from cupy_awq.check import HOST
from cupy_awq.ops.conv2d import conv2d
from cupy_awq.ops.quantized_linear import gemm_int8, quantize_activations
from cupy_awq.runtime import placement
from cupy_awq.tools import bench, table, testing, timing

BLOCK = 32
"""Input channels of a block in a convolution."""


@dataclass(frozen=True)
class Row:
    """One operation: microseconds a call, its operations (two for a product and a sum), and what it stands beside."""

    what: str
    m: int
    us: float
    operations: int
    beside: dict[str, float | None]
    """Microseconds of other ways to the same result, None where unknown."""

    @property
    def tops(self) -> float:
        return self.operations / self.us / 1e6


def gemm(
    shapes: Sequence[tuple[int, int]],
    ms: Sequence[int],
    *,
    group_size: int,
    device: int,
    progress: Callable[[str], None],
) -> list[Row]:
    """W4A8 products x @ W, for x that is quantized already, beside the quantization of x, AwqLinear and fp16.

    Raises ValueError for a shape that the format does not allow.
    """
    rows = []
    bench.check_shapes(shapes, group_size)
    for k, n in shapes:
        progress(f"{k}x{n}: random weight")
        rng = np.random.default_rng(0)
        packed = testing.random_weight(rng, k, n, group_size)
        layers = bench.cold_layers(packed, device)
        weights = [from_packed(layer.weight) for layer in layers]
        fp16 = bench.Fp16(packed, device) if device != HOST and timing.cublas() else None
        for m in ms:
            progress(f"{k}x{n}: M={m}")
            x = testing.random_activations(rng, m, k)
            there = placement.to_device(x, device)
            block = weights[0].block_size
            quantize = functools.partial(quantize_activations, there, block_size=block, symmetric=True)
            codes = quantize()
            y = placement.to_device(np.empty((m, n), np.float16), device)
            us = _time([functools.partial(gemm_int8, *codes, w, block_size=block, out=y) for w in weights], device)
            beside = {
                "quantize": _time([quantize], device),
                "W4A16": _time([functools.partial(layer, there, out=y) for layer in layers], device),
                "fp16": fp16(x) if fp16 else None,
            }
            rows.append(Row(f"{k}x{n}", m, us, 2 * m * n * k, beside))
    return rows


def convolution(
    shapes: Sequence[tuple[int, int]],
    batches: Sequence[int],
    *,
    window: int,
    image: int,
    device: int,
    progress: Callable[[str], None],
) -> list[Row]:
    """Convolutions Ci x Co of NHWC images in float16, stride 1 and padding "same", with INT4 and with INT8 weights."""
    rows = []
    if window < 1 or image < 1 or any(ci < 1 or co < 1 for ci, co in shapes):
        raise ValueError("a convolution needs at least one channel, one pixel and a window of one")
    for ci, co in shapes:
        rng = np.random.default_rng(0)
        weights = {bits: _weights(rng, ci, co, window, bits, device) for bits in (4, 8)}
        for batch in batches:
            progress(f"{ci}x{co}: batch {batch}")
            x = placement.to_device(testing.random_activations(rng, batch, image, image, ci), device)
            y = placement.to_device(np.empty((batch, image, image, co), np.float16), device)
            four, eight = (
                _time([functools.partial(conv2d, x, w, padding="same", layout="NHWC", out=y) for w in some], device)
                for some in weights.values()
            )
            operations = 2 * batch * image**2 * ci * co * window**2
            rows.append(Row(f"{ci}x{co} {window}x{window} @{image}", batch, four, operations, {"INT8 weights": eight}))
    return rows


def _weights(
    rng: np.random.Generator, ci: int, co: int, window: int, bits: int, device: int
) -> list[BlockQuantizedWeight]:
    """Copies that take turns."""
    block = min(BLOCK, ci)
    codes = rng.integers(0, 2**bits, (co, window, window, ci), np.uint8)
    size = 2.0 ** (1 - bits) / math.sqrt(ci * window**2)
    scale, offset = (
        (rng.uniform(0.5, 1.5, (co, -(-ci // block))) * size).astype(np.float16) for _ in ("scale", "offset")
    )
    return [
        BlockQuantizedWeight(
            *(placement.to_device(a, device) for a in (codes, scale, offset)), bits=bits, block_size=block
        )
        for _ in range(bench.copies(codes.size * bits // 8, device))
    ]


def _time(calls: Sequence[Callable[[], Any]], device: int) -> float:
    return timing.on_cpu(calls) if device == HOST else timing.on_gpu(calls)


def to_json(rows: Sequence[Row], device: int) -> dict[str, Any]:
    """The run as JSON: the device and the rows."""
    return {"device": placement.device_name(device), "rows": [{**asdict(row), "tops": row.tops} for row in rows]}


def render(rows: Sequence[Row], device: int) -> str:
    """The run as text."""
    names = list(rows[0].beside)
    cells = [
        [row.what, str(row.m), *map(table.number, (row.us, row.tops, *(row.beside[name] for name in names)))]
        for row in rows
    ]
    header = ["what", "M", "us", "TOP/s", *(f"{name} us" for name in names)]
    note = "Weights warm: there is no GPU here." if device == HOST else "Weights cold in L2."
    return "\n".join([placement.device_name(device), "", table.render(header, cells), "", note])
