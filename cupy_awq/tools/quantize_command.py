# SPDX-License-Identifier: Apache-2.0
"""The command ``quantize``, which reads a model with dense weights and writes a folder with 4-bit weights."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MORE = """

SRC is a Hugging Face folder with dense weights. --resume continues a run that was stopped. Use calibration text similar
to the texts that the model is used for, but none of the text that it is evaluated on."""


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command. ``command`` creates a parser from (name, function to run, summary, help text, examples)."""
    example = "SmolLM2-135M/ SmolLM2-135M-AWQ/ --calibration texts/ --group-size 64"
    parser = command("quantize", _quantize, "quantize a model to 4 bits", MORE, [example])
    parser.add_argument("source", metavar="SRC", type=Path, help="a Hugging Face folder with dense weights")
    parser.add_argument("target", metavar="DST", type=Path, help="the folder to write, new or empty")
    parser.add_argument(
        "--calibration",
        metavar="PATH",
        type=Path,
        required=True,
        help="a text file in UTF-8, or a folder of .txt and .md files",
    )
    parser.add_argument("--method", default="awq+gptq", choices=("rtn", "awq", "gptq", "awq+gptq"))
    parser.add_argument(
        "--group-size", metavar="G", type=int, default=128, help="input channels per group (default: 128)"
    )
    zeros = parser.add_mutually_exclusive_group()
    zeros.add_argument("--symmetric", action="store_true", help="use the zero point 8 everywhere")
    zeros.add_argument(
        "--asymmetric",
        dest="symmetric",
        action="store_false",
        help="compute a zero point per group and column (default)",
    )
    parser.add_argument("--samples", metavar="N", type=int, default=128, help="calibration sequences (default: 128)")
    parser.add_argument(
        "--sequence-length", metavar="N", type=int, default=512, help="tokens per calibration sequence (default: 512)"
    )
    parser.add_argument("--format", default="autoawq", choices=("autoawq", "compressed-tensors"))
    parser.add_argument("--device", metavar="cpu|N", default="cpu", help="the CPU, or a device ordinal (default: cpu)")
    parser.add_argument("--resume", action="store_true", help="continue a run that was stopped")


def read_texts(path: Path) -> list[str]:
    """Return the text of a file, or the texts of all .txt and .md files of a folder, sorted by name.

    Raises OSError if a file cannot be read, ValueError if a file is not UTF-8 or a folder contains no text.
    """
    files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: expected a folder of .txt or .md files, got none")
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: expected text in UTF-8, got {error}") from None
    return texts


def _quantize(args: argparse.Namespace) -> int:
    from cupy_awq import llm

    start = time.monotonic()
    reports = llm.quantize(
        args.source,
        args.target,
        read_texts(args.calibration),
        method=args.method,
        group_size=args.group_size,
        symmetric=args.symmetric,
        samples=args.samples,
        sequence_length=args.sequence_length,
        format_name=args.format,
        device=int(args.device) if args.device.isdecimal() else args.device,
        resume=args.resume,
        progress=_Progress() if sys.stderr.isatty() else None,
    )
    print("layer  output error  linear layers: round to nearest -> result (relative squared error)")
    for report in reports:
        nearest, result = (sum(pair[i] for pair in report["errors"].values()) / 7 for i in (0, 1))
        print(f"{report['layer']:5}  {report['output_error']:12.2%}  {nearest:.5f} -> {result:.5f}")
    print(f"{args.target}: {args.method}, group size {args.group_size}, {time.monotonic() - start:.0f} s")
    return 0


class _Progress:
    """A progress line on stderr that shows the remaining time."""

    def __init__(self) -> None:
        self._start, self._first = time.monotonic(), 0

    def __call__(self, done: int, total: int, report: Mapping[str, Any] | None) -> None:
        if report is None:
            self._first = done
            return
        left_s = (time.monotonic() - self._start) / (done - self._first) * (total - done)
        end = "\n" if done == total else ""
        sys.stderr.write(f"\rlayer {done}/{total}, {left_s:.0f} s left   {end}")
        sys.stderr.flush()
