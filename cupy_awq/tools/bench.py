# SPDX-License-Identifier: Apache-2.0
"""Times of x @ W for shapes given on the command line: ``python -m cupy_awq bench 4096x12288 --m 1,16,64``.

On a GPU the weights are cold: calls rotate over copies that together exceed three times the L2 cache. x stays the
same and is as warm as a preceding layer would leave it. The roofline of a product is max(bytes / read bandwidth,
flops / fp16 rate), where bytes are those of the weight, x and y, and both ceilings are measured in the same run;
without cuBLAS the fp16 rate is the nominal one of the chip. Codes and scales are random.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupy_awq import check, reference
from cupy_awq.check import HOST, Array
from cupy_awq.linear import AwqLinear
from cupy_awq.ops.gemm import gemm
from cupy_awq.ops.plan import plan
from cupy_awq.packing import namespace
from cupy_awq.runtime import device as devices
from cupy_awq.runtime import placement
from cupy_awq.tools import table, testing, timing
from cupy_awq.weight import PackedWeight

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}

MAX_COPIES = 512
"""Bound of the calls in one batch; only weights far smaller than any layer's then stay in L2."""

FP16_FLOPS_PER_SM_CLOCK = {
    60: 256,
    61: 4,
    62: 256,
    70: 1024,
    75: 1024,
    80: 2048,
    86: 1024,
    90: 4096,
    100: 8192,
    120: 1024,
}
"""Float16 rate by compute capability, with tensor cores where there are some; the others take the one before."""

SIDE = 8192
"""Rows and columns of the square product that measures the fp16 rate."""


@dataclass(frozen=True)
class Ceilings:
    """What the roofline is made of; ``measured`` tells whether the fp16 rate is."""

    read_gbs: float
    tflops: float
    measured: bool

    def estimate_us(self, nbytes: int, flops: int) -> float:
        """The roofline of a problem.

        >>> Ceilings(read_gbs=3000, tflops=600, measured=True).estimate_us(3_000_000, 0)
        1.0
        """
        return max(nbytes / self.read_gbs / 1e3, flops / self.tflops / 1e6)


@dataclass(frozen=True)
class Row:
    """One product: microseconds a call, bytes and flops of it, and the roofline and fp16 times, None where unknown."""

    k: int
    n: int
    m: int
    group_size: int
    dtype: str
    kernel: str
    us: float
    nbytes: int
    roofline_us: float | None
    fp16_us: float | None

    @property
    def gbs(self) -> float:
        return self.nbytes / self.us / 1e3

    @property
    def tflops(self) -> float:
        return 2 * self.m * self.n * self.k / self.us / 1e6

    @property
    def over_roofline(self) -> float | None:
        """Time over the roofline's; 1 is the best possible."""
        return None if self.roofline_us is None else self.us / self.roofline_us

    @property
    def over_fp16(self) -> float | None:
        """Time of the unquantized fp16 product over ours; more than 1 is faster than fp16."""
        return None if self.fp16_us is None else self.fp16_us / self.us

    def to_json(self) -> dict[str, Any]:
        derived = ("gbs", "tflops", "over_roofline", "over_fp16")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def run(
    shapes: Sequence[tuple[int, int]],
    ms: Sequence[int],
    *,
    group_size: int,
    dtype: str,
    kernel: str | None,
    planned: bool,
    device: int,
    progress: Callable[[str], None],
) -> tuple[list[Row], Ceilings | None]:
    """Time every (K, N) of ``shapes`` at every M: AwqLinear and what it chooses, or `gemm` with a ``kernel``.

    If they are ``planned``, through a `plan` of the same.

    The ceilings are None on the CPU. Raises ValueError for a shape that the format does not allow, before anything is
    timed, and for one that the kernel does not allow.
    """
    check_shapes(shapes, group_size)
    ceilings = None
    rows = []
    with placement.use_device(device):
        if device != HOST:
            progress("read bandwidth and fp16 rate")
            ceilings = _ceilings(device)
        for k, n in shapes:
            progress(f"{k}x{n}: random weight")
            rng = np.random.default_rng(0)
            scales = np.float16 if dtype == "float32" else DTYPES[dtype]
            weight = testing.random_weight(rng, k, n, group_size, dtype=scales)
            fp16 = Fp16(weight, device) if device != HOST and timing.cublas() else None
            layers = cold_layers(weight, device)
            for m in ms:
                progress(f"{k}x{n}: M={m}")
                x = testing.random_activations(rng, m, k, dtype=DTYPES[dtype])
                us, name = _time(layers, placement.to_device(x, device), kernel, planned, device)
                nbytes = weight.nbytes + m * (k + n) * x.itemsize
                fp16_us = fp16(x.astype(np.float16)) if fp16 else None
                roofline_us = ceilings.estimate_us(nbytes, 2 * m * n * k) if ceilings else None
                rows.append(Row(k, n, m, weight.group_size, dtype, name, us, nbytes, roofline_us, fp16_us))
    return rows, ceilings


def check_shapes(shapes: Sequence[tuple[int, int]], group_size: int) -> None:
    """ValueError for (K, N) that the format does not allow."""
    for k, n in shapes:
        if k == 0 or n == 0 or n % 8:
            raise ValueError(f"shape {k}x{n}: expected K > 0 and N > 0, a multiple of 8")
        check.group_size(k, group_size)


def copies(nbytes: int, device: int) -> int:
    """How many weights take turns so that each is cold in L2; one on the CPU."""
    if device == HOST:
        return 1
    return min(MAX_COPIES, max(2, math.ceil(3 * devices.of(device).l2_bytes / nbytes)))


def cold_layers(weight: PackedWeight, device: int) -> list[AwqLinear]:
    """A layer for each copy of the weight."""
    if device == HOST:
        return [AwqLinear(weight)]
    import cupy

    parts = [placement.to_device(part, device) for part in (weight.qweight, weight.scales, weight.qzeros)]
    return [AwqLinear(PackedWeight(*map(cupy.array, parts))) for _ in range(copies(weight.nbytes, device))]


def _time(layers: Sequence[AwqLinear], x: Array, kernel: str | None, planned: bool, device: int) -> tuple[float, str]:
    """Microseconds of one product, and the name of the kernel."""
    y = namespace(x).empty((len(x), layers[0].shape[1]), x.dtype)

    def product(layer: AwqLinear) -> Callable[[], Array]:
        weight = layer.weight
        if planned:
            made = layer.plan(x, out=y) if kernel is None else plan(x, weight, out=y, kernel=kernel)
            return functools.partial(made, x, y)
        if kernel is None:
            return functools.partial(layer, x, out=y)
        return functools.partial(gemm, x, weight.qweight, weight.scales, weight.qzeros, out=y, kernel=kernel)

    calls = [product(layer) for layer in layers]
    if device == HOST:
        return timing.on_cpu(calls), "numpy"
    return timing.on_gpu(calls), kernel or layers[0].kernel_for(len(x), x.dtype)


class Fp16:
    """Times x @ W by cupy.matmul in float16, with cold copies of the dense weight."""

    def __init__(self, weight: PackedWeight, device: int) -> None:
        import cupy

        w = reference.dequantize(weight.qweight, weight.scales, weight.qzeros, dtype=np.float16)
        self._device = device
        dense = placement.to_device(w, device)
        self._weights = [cupy.array(dense) for _ in range(copies(w.nbytes, device))]

    def __call__(self, x: Array) -> float:
        import cupy

        x = placement.to_device(x, self._device)
        y = cupy.matmul(x, self._weights[0])
        return timing.on_gpu([functools.partial(cupy.matmul, x, w, out=y) for w in self._weights], graph=False)


def _ceilings(device: int) -> Ceilings:
    read_gbs = _read_gbs()
    if timing.cublas():
        return Ceilings(read_gbs, _matmul_tflops(device), measured=True)
    import cupy

    hertz = cupy.cuda.Device(device).attributes["ClockRate"] * 1e3
    return Ceilings(read_gbs, nominal_tflops(devices.of(device), hertz), measured=False)


def _read_gbs() -> float:
    """The better of copying a buffer (which reads and writes) and summing it."""
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    source = cupy.zeros(min(2**30, free // 4) // 4, np.float32)
    target, total = cupy.empty_like(source), cupy.empty((), np.float32)
    copy_us = timing.on_gpu([lambda: cupy.copyto(target, source)])
    sum_us = timing.on_gpu([lambda: cupy.sum(source, out=total)])
    return float(source.nbytes / min(copy_us / 2, sum_us) / 1e3)


def _matmul_tflops(device: int) -> float:
    """Rate of a large square product in float16, of random values: zeros draw less power, and a chip runs faster."""
    import cupy

    tile = np.random.default_rng(0).standard_normal((SIDE, 256), np.float32).astype(np.float16)
    a = cupy.tile(placement.to_device(tile, device), (1, SIDE // 256))
    b, c = a.T.copy(), cupy.empty_like(a)
    return 2 * SIDE**3 / timing.on_gpu([lambda: cupy.matmul(a, b, out=c)], graph=False) / 1e6


def nominal_tflops(facts: devices.Device, hertz: float) -> float:
    """The float16 rate of a chip at a clock, from its compute capability and its number of SMs."""
    known = max((arch for arch in FP16_FLOPS_PER_SM_CLOCK if arch <= facts.native), default=60)
    return FP16_FLOPS_PER_SM_CLOCK[known] * facts.sm_count * hertz / 1e12


def to_json(rows: Sequence[Row], ceilings: Ceilings | None, device: int) -> dict[str, Any]:
    """The run as JSON: the device, its ceilings and the rows."""
    return {
        "device": placement.device_name(device),
        "ceilings": None if ceilings is None else asdict(ceilings),
        "rows": [row.to_json() for row in rows],
    }


def render(rows: Sequence[Row], ceilings: Ceilings | None, device: int) -> str:
    """The run as text."""
    header = ["shape", "kernel", "M", "us", "GB/s", "TFLOP/s", "us / roofline", "fp16 us", "fp16 / us"]
    cells = []
    for row in rows:
        figures = (row.us, row.gbs, row.tflops, row.over_roofline, row.fp16_us, row.over_fp16)
        cells.append([f"{row.k}x{row.n}", row.kernel, str(row.m), *map(table.number, figures)])
    group_size = ", ".join(dict.fromkeys(str(row.group_size) for row in rows))
    head = f"{placement.device_name(device)}: x {rows[0].dtype}, group size {group_size}"
    if ceilings is None:
        note = "No GPU here: times of the NumPy path, weights warm; no roofline and no fp16 product."
    else:
        how = "by cupy.matmul" if ceilings.measured else "nominal (cuBLAS, the extra blas, is needed to measure it)"
        roofline = f"read {ceilings.read_gbs:.0f} GB/s, fp16 {ceilings.tflops:.0f} TFLOP/s {how}"
        note = f"Weights cold in L2. Roofline: {roofline}."
    return "\n".join([head, "", table.render(header, cells, left=2), "", note])


def new_figure() -> Any:
    """An empty figure of matplotlib; ValueError without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install cupy-awq[plot]") from None
    return Figure(figsize=(8, 5), dpi=150, layout="constrained")


def draw(figure: Any, rows: Sequence[Row], device_name: str) -> None:
    """Time over M, a line for each shape: in units of the roofline where it is known, with fp16 dashed; else in us."""
    relative = all(row.roofline_us for row in rows)
    axes = figure.add_subplot()
    for k, n in dict.fromkeys((row.k, row.n) for row in rows):
        some = sorted((row for row in rows if (row.k, row.n) == (k, n)), key=lambda row: row.m)
        ms = [row.m for row in some]
        units = [row.roofline_us or 1.0 for row in some]
        times = [row.us / unit for row, unit in zip(some, units, strict=True)]
        (line,) = axes.plot(ms, times, marker="o", markersize=5, linewidth=2, label=f"{k} x {n}")
        fp16 = [(row.m, row.fp16_us / unit) for row, unit in zip(some, units, strict=True) if row.fp16_us]
        if fp16:
            axes.plot(*zip(*fp16, strict=True), linestyle="--", linewidth=1, color=line.get_color(), alpha=0.7)
    if any(row.fp16_us for row in rows):
        axes.plot([], [], linestyle="--", linewidth=1, color="gray", label="cupy.matmul, W in fp16")
    ticks = sorted({row.m for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(m) for m in ticks])
    axes.minorticks_off()
    if relative:
        axes.axhline(1, color="black", linewidth=1, zorder=1)
        place = axes.get_yaxis_transform()
        axes.text(0.005, 0.97, "roofline", transform=place, va="top", fontsize=9)
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
    axes.set_xlabel("M, rows of x")
    axes.set_ylabel("time / roofline" if relative else "time, microseconds")
    axes.set_title(f"x @ W, W in AWQ INT4, x in {rows[0].dtype}\n{device_name}", loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="K x N", frameon=False, alignment="left")
