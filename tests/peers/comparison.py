# SPDX-License-Identifier: Apache-2.0
"""The results of one run of compare.py and their summaries by range of M; needs no GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.peers.random_problems import BANDS, geometric_mean

LABELS = {
    "ours": "cupy_awq",
    "marlin": "Marlin",
    "machete": "Machete",
    "fbgemm": "FBGEMM (bf16)",
    "recorded": "best of llm-awq, Humming, TurboMind (recorded)",
    "fp16": "cuBLAS fp16",
}
"""The names of the peers in RESULTS.md and in the plot."""
SLOWER = 1.05
"""The ratio of times, ours to a peer's, above which a cell counts as slower."""
WORST = 5
"""The number of worst cells that are listed."""

Cell = tuple[int, int, int]
"""The sizes (K, N, M) of a product."""


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown from its header and rows of cells."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mean(values: Iterable[float]) -> str:
    """Return the geometric mean of the values that are not NaN, as a text with two decimals; "" if there are none."""
    some = [value for value in values if not math.isnan(value)]
    return f"{geometric_mean(some):.2f}" if some else ""


class Comparison:
    """One run of compare.py.

    Attributes:
        gpu: the name of the GPU.
        command: the command of the run, or several, one per line.
        read_gbs: the measured read bandwidth, GB/s.
        fp16_tflops: the measured rate of fp16 cuBLAS, TFLOP/s.
        seed: the seed of the random problems; None for given shapes.
        us: microseconds by (K, N, M, peer).
        ratios: (ours / roofline, best peer / ours) by (K, N, M); nan without a peer.
        choices: what first_choice.py measured, one dictionary per cell.
    """

    def __init__(self, run: dict[str, Any]) -> None:
        self.gpu: str = run["gpu"]
        self.command: str = run.get("command", "")
        self.read_gbs: float = run["read_gbs"]
        self.fp16_tflops: float = run["fp16_tflops"]
        self.seed: int | None = run.get("seed")
        self.choices: list[dict[str, Any]] = run.get("choices", [])
        self.us: dict[tuple[int, int, int, str], float] = {
            (row["k"], row["n"], row["m"], row["peer"]): row["us"] for row in run["rows"] if row.get("ok", True)
        }
        self.ratios: dict[Cell, tuple[float, float]] = {}
        for k, n, m, peer in self.us:
            if peer == "ours":
                us = self.us[k, n, m, "ours"]
                peers = [name for name in (*LABELS, "fp16_tn") if name != "ours" and (k, n, m, name) in self.us]
                best = min((self.us[k, n, m, name] for name in peers), default=math.nan)
                self.ratios[k, n, m] = us / self.us[k, n, m, "roof"], best / us

    @classmethod
    def read(cls, path: Path) -> Comparison:
        """Return the run that compare.py has stored in a JSON file."""
        return cls(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def pool(cls, paths: Iterable[Path]) -> Comparison:
        """Return the cells of several files of one GPU as one run, with the rates of the first one."""
        run, *others = map(cls.read, paths)
        for other in others:
            run.us.update(other.us)
            run.ratios.update(other.ratios)
        return run

    def by_band(self) -> list[tuple[str, list[Cell]]]:
        """Return (range of M, our cells) for each of BANDS that has cells; the last range ends at the largest M."""
        largest = max((m for _, _, m in self.ratios), default=0)
        found = []
        for low, high in BANDS:
            high = largest if (low, high) == BANDS[-1] else high
            cells = [cell for cell in self.ratios if low <= cell[2] <= high]
            if cells:
                found.append((f"{low}-{high}", cells))
        return found

    def practical(self, cell: Cell) -> float:
        """Return a cell's practical bound over its roofline, or NaN if it was not measured.

        The bound is the larger of the times of a plain read of the same bytes and of the same arithmetic by cuBLAS.
        """
        read_us, arithmetic_us = (self.us.get((*cell, name), math.nan) for name in ("read", "arithmetic"))
        return max(read_us, arithmetic_us) / self.us[(*cell, "roof")]

    def summary(self) -> list[list[str]]:
        """Return one row per range of M, with geometric means over its cells.

        The columns are the range of M, ours / roofline, plain read / roofline, best peer / ours, the number of cells
        that are over 5% slower than the best peer, and the smallest best peer / ours.
        """
        rows = []
        for label, cells in self.by_band():
            peers = [best for _, best in (self.ratios[cell] for cell in cells) if not math.isnan(best)]
            slower = sum(best < 1 / SLOWER for best in peers)
            rows.append(
                [
                    label,
                    mean(self.ratios[cell][0] for cell in cells),
                    mean(self.practical(cell) for cell in cells),
                    mean(peers),
                    f"{slower} of {len(peers)}",
                    f"{min(peers, default=math.nan):.2f}",
                ]
            )
        return rows

    def choice_summary(self) -> list[list[str]]:
        """Return one row per range of M: the number of cells, and mean and maximum of first choice / fastest."""
        rows = []
        for low, high in BANDS:
            ratios = [c["first_us"] / c["best_us"] for c in self.choices if low <= c["m"] <= high]
            if ratios:
                rows.append([f"{low}-{high}", str(len(ratios)), f"{geometric_mean(ratios):.3f}", f"{max(ratios):.2f}"])
        return rows

    def worst(self) -> list[list[str]]:
        """Return the WORST cells with the smallest best peer / ours, then those with the largest ours / roofline.

        The columns are shape, M, ours, best peer, plain read and roofline in microseconds, and the two ratios.
        """
        with_peers = [cell for cell in self.ratios if not math.isnan(self.ratios[cell][1])]
        some = sorted(with_peers, key=lambda cell: self.ratios[cell][1])[:WORST]
        some += sorted(self.ratios, key=lambda cell: -self.ratios[cell][0])[:WORST]
        rows = []
        for k, n, m in dict.fromkeys(some):
            over_roof, over_ours = self.ratios[k, n, m]
            ours = self.us[k, n, m, "ours"]
            times = (ours, over_ours * ours, self.us.get((k, n, m, "read"), math.nan), self.us[k, n, m, "roof"])
            rows.append([f"{k}x{n}", str(m), *(f"{us:.1f}" for us in times), f"{over_roof:.2f}", f"{over_ours:.2f}"])
        return rows

    def against(self, other: Comparison) -> list[list[str]]:
        """Return one row per range of M of this run's times over those of another run.

        The columns are the range of M, the number of common cells, the geometric means for ours and for the best peer,
        and our largest ratio.
        """
        rows = []
        for label, cells in self.by_band():
            common = [cell for cell in cells if cell in other.ratios]
            if not common:
                continue
            ours = [self.us[(*cell, "ours")] / other.us[(*cell, "ours")] for cell in common]
            peers = [
                ratio * self.ratios[cell][1] / other.ratios[cell][1] for ratio, cell in zip(ours, common, strict=True)
            ]
            rows.append([label, str(len(common)), mean(ours), mean(peers), f"{max(ours):.2f}"])
        return rows

    def bands(self) -> str:
        """Return a table by range of M: ours / roofline, best peer / ours and its smallest value."""
        rows = [[row[0], row[1], row[3], row[5]] for row in self.summary()]
        return markdown(BANDS_HEADER, rows)

    def peers(self) -> str:
        """Return a peer's time over ours (geometric mean), and the cells where it is faster, by peer and range of M."""
        rows = []
        bands = self.by_band()
        for peer, label in LABELS.items():
            if peer == "ours":
                continue
            names = (peer, "fp16_tn") if peer == "fp16" else (peer,)
            cells = []
            for _, some in bands:
                ratios = [
                    min(self.us[(*cell, name)] for name in names if (*cell, name) in self.us) / self.us[(*cell, "ours")]
                    for cell in some
                    if (*cell, peer) in self.us
                ]
                faster = sum(ratio < 1 for ratio in ratios)
                cells.append(f"{geometric_mean(ratios):.2f} ({faster} of {len(ratios)})" if ratios else "")
            rows.append([label, *cells])
        return markdown(["peer / ours", *(f"M = {label}" for label, _ in bands)], rows)

    def cells(self) -> str:
        """Return Markdown tables of the microseconds of all libraries, a table per shape and a line per M."""
        sections = []
        for k, n in dict.fromkeys((k, n) for k, n, _ in self.ratios):
            rows = []
            for m in sorted(m for other_k, other_n, m in self.ratios if (other_k, other_n) == (k, n)):
                times = [self.us.get((k, n, m, name)) for name in (*LABELS, "roof")]
                ratios = (f"{ratio:.2f}" for ratio in self.ratios[k, n, m])
                rows.append([str(m), *(f"{us:.1f}" if us else "" for us in times), *ratios])
            header = ["M", *LABELS.values(), "roofline", *BANDS_HEADER[1:3]]
            sections.append(f"#### {k}x{n}\n\n{markdown(header, rows)}\n")
        return "\n".join(sections)


BANDS_HEADER = ("M", "ours / roofline", "best peer / ours", "worst cell")
"""The header of the table that `Comparison.bands` returns."""
