# SPDX-License-Identifier: Apache-2.0
"""The report of a quantization as JSON, text and a plot: errors of each layer, perplexities, run time and memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NAME = "quantization_report"
"""The name of the report's files without the suffix."""


@dataclass(frozen=True)
class Report:
    """The errors of all layers, the perplexities, the run time and the memory of a quantization.


    Attributes:
        method, group_size: the settings of `quantize`.
        layers: a dictionary for each layer: its index "layer", and the "errors", "output_error", "few_tokens" and
            "nearest_output_error" of `QuantizedLayer`.
        perplexities: the perplexity of the evaluation text for the models "16-bit", "rtn" and "result"; empty without
            a text.
        seconds: the run time in seconds without the evaluation, counted from the start or the resumption.
        memory_bytes: the peak memory of the process in bytes, by device: "cpu" and, if a GPU was used, "gpu". A value
            is None if it is unknown.
    """

    method: str
    group_size: int
    layers: Sequence[Mapping[str, Any]]
    perplexities: Mapping[str, float]
    seconds: float
    memory_bytes: Mapping[str, int | None]

    def text(self) -> str:
        """Return the errors of each layer as a text table, and below it perplexities, time and memory."""
        lines = [
            "Error of the outputs relative to the original outputs, round to nearest -> result",
            "layer   whole layer           linear layers, squared error",
        ]
        for layer in self.layers:
            pairs = list(layer["errors"].values()) or [(0.0, 0.0)]
            nearest, result = (sum(pair[i] for pair in pairs) / len(pairs) for i in (0, 1))
            outputs = f"{layer['nearest_output_error']:7.2%} -> {layer['output_error']:7.2%}"
            lines.append(f"{layer['layer']:5}   {outputs:20}  {nearest:.5f} -> {result:.5f}")
        for layer in self.layers:
            if few := ", ".join(f"{name} ({tokens})" for name, tokens in layer["few_tokens"].items()):
                lines.append(f"layer {layer['layer']}: rounded to nearest for few calibration tokens: {few}")
        for name, perplexity in self.perplexities.items():
            lines.append(f"perplexity {name:7} {perplexity:9.4f}")
        memory = [f"{value / 1e9:.2f} GB ({name})" for name, value in self.memory_bytes.items() if value is not None]
        parts = [self.method, f"group size {self.group_size}", f"{self.seconds:.0f} s", *memory]
        return "\n".join([*lines, ", ".join(parts)]) + "\n"

    def write(self, folder: Path) -> None:
        """Write the report as JSON and text to a folder, and as a plot if matplotlib is installed."""
        (folder / f"{NAME}.json").write_text(json.dumps(asdict(self), indent=2) + "\n")
        (folder / f"{NAME}.txt").write_text(self.text())
        try:
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator
        except ImportError:
            return
        figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        numbers = [layer["layer"] for layer in self.layers]
        for key, label, color in (
            ("nearest_output_error", "round to nearest", "gray"),
            ("output_error", self.method, "black"),
        ):
            axes.plot(numbers, [100 * layer[key] for layer in self.layers], marker="o", color=color, label=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("decoder layer")
        axes.set_ylabel("relative error of the output, %")
        axes.set_title(f"Quantization to 4 bits, group size {self.group_size}", loc="left", fontsize=11)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        figure.savefig(folder / f"{NAME}.png")


def peak_memory(on_gpu: bool) -> dict[str, int | None]:
    """Return the peak memory of this process in bytes: on the CPU, and in CuPy's memory pool on the current GPU."""
    found: dict[str, int | None] = {"cpu": _peak_host_bytes()}
    if on_gpu:
        import cupy

        found["gpu"] = cupy.get_default_memory_pool().total_bytes()
    return found


def _peak_host_bytes() -> int | None:
    """Return the largest resident set size of this process in bytes, or None if the system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
