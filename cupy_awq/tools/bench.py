# SPDX-License-Identifier: Apache-2.0
"""Times of the operations for shapes given on the command line: ``python -m cupy_awq bench 4096x12288 --m 1,16,64``.

The roofline of an operation is max(bytes / read bandwidth, flops / fp16 rate), where the bytes are those of the weight,
x and y, and both ceilings are measured in the same run; without cuBLAS the fp16 rate is the nominal one of the chip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cupy_awq.check import HOST
from cupy_awq.kernels import select
from cupy_awq.runtime import device as devices
from cupy_awq.runtime import placement
from cupy_awq.tools import table, timing
from cupy_awq.tools.operations import OPERATIONS, Settings, Shape

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
"""The float16 rate by compute capability, with tensor cores if it has them; other capabilities have the rate before."""

SIDE = 8192
"""The rows and columns of the square product that measures the fp16 rate."""


@dataclass(frozen=True)
class Ceilings:
    """The two ceilings of the roofline.

    Attributes:
        read_gbs: read bandwidth in GB/s.
        tflops: fp16 rate in TFLOP/s.
        measured: whether the fp16 rate is measured, not nominal.
    """

    read_gbs: float
    tflops: float
    measured: bool

    def roofline_us(self, nbytes: int, flops: int) -> float:
        """Return the least time for so many bytes and operations, in microseconds.

        >>> Ceilings(read_gbs=3000, tflops=600, measured=True).roofline_us(3_000_000, 0)
        1.0
        """
        return max(nbytes / self.read_gbs / 1e3, flops / self.tflops / 1e6)


@dataclass(frozen=True)
class Row:
    """The time of one operation at one M.

    Attributes:
        op: a key of OPERATIONS.
        shape, weight: the shape and the kind of the weight, in words.
        m: rows of x, or images.
        dtype: dtype of x.
        kernel: the name of the kernel, "numpy" on the CPU.
        us: microseconds of a call.
        nbytes: bytes of W, x and y.
        flops: multiplications and additions.
        roofline_us: the least time of these, None if unknown.
        other_us: the time of other ways to the same result, None where unknown, by name.
    """

    op: str
    shape: str
    weight: str
    m: int
    dtype: str
    kernel: str
    us: float
    nbytes: int
    flops: int
    roofline_us: float | None
    other_us: dict[str, float | None]

    @property
    def gbs(self) -> float:
        """GB/s of memory traffic, if each byte moves once."""
        return self.nbytes / self.us / 1e3

    @property
    def tflops(self) -> float:
        """TFLOP/s, or TOP/s of integers."""
        return self.flops / self.us / 1e6

    @property
    def over_roofline(self) -> float | None:
        """The time in units of the roofline; 1 is the best possible."""
        return None if self.roofline_us is None else self.us / self.roofline_us

    @property
    def over_fp16(self) -> float | None:
        """The speedup over cupy.matmul with fp16 weights."""
        fp16_us = self.other_us.get("fp16")
        return None if fp16_us is None else fp16_us / self.us

    def to_json(self) -> dict[str, Any]:
        """Return all figures, also those that follow from others."""
        derived = ("gbs", "tflops", "over_roofline", "over_fp16")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def run(
    op: str,
    shapes: Sequence[Shape],
    ms: Sequence[int],
    settings: Settings,
    progress: Callable[[str], None],
) -> tuple[list[Row], Ceilings | None]:
    """Time an operation for every shape at every M; return the rows and the ceilings, which are None on the CPU.

    Raises ValueError for a shape that the operation cannot have, before anything is timed, and for one that a forced
    kernel cannot solve.
    """
    make, device = OPERATIONS[op], settings.device
    for shape in shapes:
        make.check(shape, settings)
    ceilings = None
    rows = []
    with placement.use_device(device):
        if device != HOST:
            progress("read bandwidth and fp16 rate")
            ceilings = _ceilings(device)
        for shape in shapes:
            progress(f"{shape[0]}x{shape[1]}: random weight")
            operation = make(shape, settings)
            for m in dict.fromkeys(ms):
                progress(f"{operation.label}: M={m}")
                with select.recorded() as choices:
                    calls = operation.calls(m)
                    calls[0]()
                us = timing.time_calls(calls, device)
                nbytes, flops = operation.nbytes(m), operation.flops(m)
                row = Row(
                    op=op,
                    shape=operation.label,
                    weight=operation.weight,
                    m=m,
                    dtype=settings.dtype,
                    kernel=choices[-1].name if choices else "numpy",
                    us=us,
                    nbytes=nbytes,
                    flops=flops,
                    roofline_us=ceilings.roofline_us(nbytes, flops) if ceilings and operation.is_fp16 else None,
                    other_us=operation.other_us(m),
                )
                rows.append(row)
    return rows, ceilings


def _ceilings(device: int) -> Ceilings:
    """Return the measured ceilings of the current GPU."""
    read_gbs = _read_gbs()
    if timing.cublas():
        return Ceilings(read_gbs, _matmul_tflops(device), measured=True)
    import cupy

    hertz = cupy.cuda.Device(device).attributes["ClockRate"] * 1e3
    return Ceilings(read_gbs, nominal_tflops(devices.of(device), hertz), measured=False)


def _read_gbs() -> float:
    """Return the read bandwidth in GB/s: the better of copying a buffer, which reads and writes, and of its sum."""
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    source = cupy.zeros(min(2**30, free // 4) // 4, np.float32)
    target, total = cupy.empty_like(source), cupy.empty((), np.float32)
    copy_us = timing.on_gpu([lambda: cupy.copyto(target, source)])
    sum_us = timing.on_gpu([lambda: cupy.sum(source, out=total)])
    return float(source.nbytes / min(copy_us / 2, sum_us) / 1e3)


def _matmul_tflops(device: int) -> float:
    """Return the rate of a large square product in float16. Its values are random: zeros draw less power."""
    import cupy

    tile = np.random.default_rng(0).standard_normal((SIDE, 256), np.float32).astype(np.float16)
    a = cupy.tile(placement.to_device(tile, device), (1, SIDE // 256))
    b, c = a.T.copy(), cupy.empty_like(a)
    return 2 * SIDE**3 / timing.on_gpu([lambda: cupy.matmul(a, b, out=c)], graph=False) / 1e6


def nominal_tflops(gpu: devices.Device, hertz: float) -> float:
    """Return the float16 rate of a GPU in TFLOP/s at a clock in hertz."""
    known = max((arch for arch in FP16_FLOPS_PER_SM_CLOCK if arch <= gpu.native), default=60)
    return FP16_FLOPS_PER_SM_CLOCK[known] * gpu.sm_count * hertz / 1e12


def to_json(rows: Sequence[Row], ceilings: Ceilings | None, device: int) -> dict[str, Any]:
    """Return the run as JSON: the device, its ceilings and the rows."""
    return {
        "device": placement.device_name(device),
        "ceilings": None if ceilings is None else asdict(ceilings),
        "rows": [row.to_json() for row in rows],
    }


def render(rows: Sequence[Row], ceilings: Ceilings | None, device: int) -> str:
    """Return the run as text."""
    first = rows[0]
    unit, others = "TFLOP/s" if OPERATIONS[first.op].is_fp16 else "TOP/s", list(first.other_us)
    header = ["shape", "kernel", "M", "us", "GB/s", unit, "us / roofline", *(f"{name} us" for name in others)]
    header += ["fp16 / us"] if "fp16" in others else []
    cells = []
    for row in rows:
        figures = [row.us, row.gbs, row.tflops, row.over_roofline, *(row.other_us[name] for name in others)]
        figures += [row.over_fp16] if "fp16" in others else []
        cells.append([row.shape, row.kernel, str(row.m), *map(table.number, figures)])
    weights = ", ".join(dict.fromkeys(row.weight for row in rows))
    head = f"{placement.device_name(device)}: {first.op}, x {first.dtype}, {weights}"
    if ceilings is None:
        note = "No GPU here: times of the NumPy path, weights warm; no roofline and no fp16 product."
    else:
        how = "by cupy.matmul" if ceilings.measured else "nominal (cuBLAS, the extra blas, is needed to measure it)"
        roofline = f"read {ceilings.read_gbs:.0f} GB/s, fp16 {ceilings.tflops:.0f} TFLOP/s {how}"
        note = f"Weights cold in L2. Roofline: {roofline}."
    return "\n".join([head, "", table.render(header, cells, left=2), "", note])


def new_figure() -> Any:
    """Return an empty figure of matplotlib; raise ValueError if that is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install cupy-awq[plot]") from None
    return Figure(figsize=(8, 5), dpi=150, layout="constrained")


def draw(figure: Any, rows: Sequence[Row], device_name: str) -> None:
    """Draw time over M, one line per shape and fp16 dashed: in units of the roofline if it is known, else in us."""
    relative = all(row.roofline_us for row in rows)
    axes = figure.add_subplot()
    for shape in dict.fromkeys(row.shape for row in rows):
        some = sorted((row for row in rows if row.shape == shape), key=lambda row: row.m)
        ms = [row.m for row in some]
        units = [row.roofline_us or 1.0 for row in some]
        times = [row.us / unit for row, unit in zip(some, units, strict=True)]
        (line,) = axes.plot(ms, times, marker="o", markersize=5, linewidth=2, label=shape)
        fp16 = [(row.m, row.other_us.get("fp16"), unit) for row, unit in zip(some, units, strict=True)]
        points = [(m, us / unit) for m, us, unit in fp16 if us]
        if points:
            axes.plot(*zip(*points, strict=True), linestyle="--", linewidth=1, color=line.get_color(), alpha=0.7)
    if any(row.other_us.get("fp16") for row in rows):
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
    axes.set_xlabel("M, rows of x or images")
    axes.set_ylabel("time / roofline" if relative else "time, microseconds")
    axes.set_title(f"{rows[0].op}, {rows[0].weight}, x in {rows[0].dtype}\n{device_name}", loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="shape", frameon=False, alignment="left")
