# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m cupy_awq bench 4096x12288 --m 1,16,64``: time operations on given shapes.

The roofline time of an operation is max(bytes / read bandwidth, flops / fp16 throughput), where the bytes are those of
the weight, x and y. Both ceilings are measured in the same run; without cuBLAS, the fp16 throughput is the nominal one.
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
from cupy_awq.tools.expert_operations import ALL_OPERATIONS as OPERATIONS
from cupy_awq.tools.operations import Settings, Shape

SIDE = 8192
"""M, N and K of the GEMM that measures the fp16 throughput."""


@dataclass(frozen=True)
class Ceilings:
    """The two ceilings of the roofline.

    Attributes:
        read_gbs: the read bandwidth in GB/s.
        tflops: the fp16 throughput in TFLOP/s.
        measured: whether the fp16 throughput was measured; if False, it is nominal.
    """

    read_gbs: float
    tflops: float
    measured: bool

    def roofline_us(self, nbytes: int, flops: int) -> float:
        """Return the roofline time in microseconds for memory traffic in bytes and a number of operations.

        >>> Ceilings(read_gbs=3000, tflops=600, measured=True).roofline_us(3_000_000, 0)
        1.0
        """
        return max(nbytes / self.read_gbs / 1e3, flops / self.tflops / 1e6)


@dataclass(frozen=True)
class Row:
    """The time of one operation at one M.

    Attributes:
        op: the name of the operation, a key of OPERATIONS.
        shape: the shape of the weight as text.
        weight: the dtype and quantization of the weight as text.
        m: the number of rows of x, or the batch size of a convolution.
        dtype: the dtype of x.
        kernel: the name of the kernel, or "numpy" on the CPU.
        us: the median time per call in microseconds.
        nbytes: the total size of W, x and y in bytes.
        flops: the number of operations; a multiply-add is two.
        roofline_us: the roofline time in microseconds; None if unknown.
        other_us: the times of alternative implementations in microseconds, by name; None if one is not available.
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
        """The achieved memory bandwidth in GB/s, counting each byte of W, x and y once."""
        return self.nbytes / self.us / 1e3

    @property
    def tflops(self) -> float:
        """The achieved throughput in TFLOP/s, or in TOP/s for integers."""
        return self.flops / self.us / 1e6

    @property
    def over_roofline(self) -> float | None:
        """The time divided by the roofline time; None if the roofline time is unknown.

        The ratio can be slightly below 1, since the measured ceilings vary with the clock frequency.
        """
        return None if self.roofline_us is None else self.us / self.roofline_us

    @property
    def over_fp16(self) -> float | None:
        """The speedup over cupy.matmul with fp16 weights; None if cupy.matmul was not timed."""
        fp16_us = self.other_us.get("fp16")
        return None if fp16_us is None else fp16_us / self.us

    def to_json(self) -> dict[str, Any]:
        """Return all fields and derived figures as a JSON object."""
        derived = ("gbs", "tflops", "over_roofline", "over_fp16")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def run(
    op: str,
    shapes: Sequence[Shape],
    ms: Sequence[int],
    settings: Settings,
    progress: Callable[[str], None],
) -> tuple[list[Row], Ceilings | None]:
    """Time an operation for every shape and M; return the rows, and the ceilings of the roofline (None on the CPU).

    Raises ValueError before the first measurement if the operation does not support a shape, and ValueError if a forced
    kernel does not support a problem.
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
    """Measure the memory bandwidth and the fp16 throughput of the current GPU and return them."""
    read_gbs = _read_gbs()
    if timing.cublas():
        return Ceilings(read_gbs, _matmul_tflops(device), measured=True)
    import cupy

    hertz = cupy.cuda.Device(device).attributes["ClockRate"] * 1e3
    return Ceilings(read_gbs, nominal_tflops(devices.of(device), hertz), measured=False)


def _read_gbs() -> float:
    """Return the memory bandwidth in GB/s: the higher of those of a copy (bytes read plus written) and of a sum."""
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    source = cupy.zeros(min(2**30, free // 4) // 4, np.float32)
    target, total = cupy.empty_like(source), cupy.empty((), np.float32)
    copy_us = timing.on_gpu([lambda: cupy.copyto(target, source)])
    sum_us = timing.on_gpu([lambda: cupy.sum(source, out=total)])
    return float(source.nbytes / min(copy_us / 2, sum_us) / 1e3)


def _matmul_tflops(device: int) -> float:
    """Return the throughput of a large float16 GEMM in TFLOP/s. Its values are random, since zeros draw less power."""
    import cupy

    tile = np.random.default_rng(0).standard_normal((SIDE, 256), np.float32).astype(np.float16)
    a = cupy.tile(placement.to_device(tile, device), (1, SIDE // 256))
    b, c = a.T.copy(), cupy.empty_like(a)
    return 2 * SIDE**3 / timing.on_gpu([lambda: cupy.matmul(a, b, out=c)], graph=False) / 1e6


def nominal_tflops(gpu: devices.Device, hertz: float) -> float:
    """Return the nominal float16 throughput of a GPU in TFLOP/s at the clock frequency ``hertz``."""
    return 2 * gpu.rates.tensor * gpu.sm_count * hertz / 1e12


def to_json(rows: Sequence[Row], ceilings: Ceilings | None, device: int) -> dict[str, Any]:
    """Return the results as a JSON object: the device, its ceilings and the rows."""
    return {
        "device": placement.device_name(device),
        "ceilings": None if ceilings is None else asdict(ceilings),
        "rows": [row.to_json() for row in rows],
    }


def render(rows: Sequence[Row], ceilings: Ceilings | None, device: int) -> str:
    """Return the rows as a text table with notes."""
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
        note = "No GPU: times of the NumPy path with warm weights, without a roofline and an fp16 GEMM."
    else:
        how = "by cupy.matmul" if ceilings.measured else "nominal (cuBLAS, the extra blas, is needed to measure it)"
        roofline = f"read {ceilings.read_gbs:.0f} GB/s, fp16 {ceilings.tflops:.0f} TFLOP/s {how}"
        note = f"Weights cold in L2. Roofline: {roofline}."
    return "\n".join([head, "", table.render(header, cells, left=2), "", note])


def new_figure() -> Any:
    """Return an empty matplotlib figure. Raises ValueError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    return Figure(figsize=(8, 5), dpi=150, layout="constrained")


def draw(figure: Any, rows: Sequence[Row], device_name: str) -> None:
    """Plot times over M, with one line per shape and a dashed line for fp16.

    Times are relative to the roofline time, or in microseconds if it is unknown.
    """
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
