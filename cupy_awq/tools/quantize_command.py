# SPDX-License-Identifier: Apache-2.0
"""The command ``quantize``, which reads a model with dense weights and writes a folder with 4-bit weights."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cupy_awq.checkpoint.files import check_downloaded
from cupy_awq.runtime import placement
from cupy_awq.tools.llm_commands import add_device

MORE = """

SRC is a Hugging Face folder with dense weights. DST becomes a folder of the same files with 4-bit weights, and with a
report: quantization_report.json, .txt and .png. A run that was stopped continues with --resume. Take calibration text
of the kinds that the model is used for, at least 4096 tokens, and none of the text that you evaluate it on."""


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command by ``command``: it makes a parser of (name, function to run, summary, help text, examples)."""
    examples = [
        "SmolLM2-135M/ SmolLM2-135M-AWQ/ --calibration texts/ --group-size 64",
        "Qwen3-8B/ Qwen3-8B-AWQ/ --calibration news.txt --evaluate manual.txt --device cuda:1",
        r"Qwen3-8B/ Qwen3-8B-AWQ/ --calibration news.txt --ignore 'layers\.0\.|down_proj'",
    ]
    parser = command("quantize", _quantize, "quantize a model to 4 bits", MORE, examples)
    parser.add_argument("source", metavar="SRC", type=Path, help="a Hugging Face folder with dense weights")
    parser.add_argument("target", metavar="DST", type=Path, help="the folder to write, new or empty")
    parser.add_argument(
        "--calibration", metavar="PATH", type=Path, help="a text file in UTF-8, or a folder of .txt and .md files"
    )
    parser.add_argument(
        "--method",
        default="awq+gptq",
        choices=("rtn", "awq", "gptq", "awq+gptq"),
        help="rtn: round to nearest; awq: channel scales and clipping; gptq: clipping and error compensation; "
        "awq+gptq: all of them, then gradient descent on the output of each layer (default)",
    )
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
    parser.add_argument(
        "--ignore",
        metavar="REGEX",
        help="keep linear layers dense that have a match in their name, such as model.layers.0.mlp.up_proj",
    )
    parser.add_argument(
        "--evaluate",
        metavar="FILE",
        type=Path,
        help="report the perplexities of SRC, of rounding to nearest and of DST on this text",
    )
    parser.add_argument(
        "--format",
        default="autoawq",
        choices=("autoawq", "compressed-tensors"),
        help="the format to write (default: autoawq)",
    )
    add_device(parser)
    parser.add_argument("--resume", action="store_true", help="continue a run that was stopped")


def read_texts(path: Path) -> list[str]:
    """Return the text of a file, or the texts of all .txt and .md files of a folder, sorted by name.

    Raises OSError if a file cannot be read, ValueError if a file is not UTF-8 or a folder contains no text.
    """
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md") and file.is_file())
    if not files:
        raise ValueError(f"{path}: expected a folder of .txt or .md files, got none")
    texts = []
    for file in files:
        with open(file, "rb") as opened:
            check_downloaded(opened.read(64), str(file))
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: expected text in UTF-8, got {error}") from None
    return texts


def _quantize(args: argparse.Namespace) -> int:
    from cupy_awq import llm
    from cupy_awq.llm.calibrate.unfinished_work import name_unfinished

    bar = _Progress(is_shown=sys.stderr.isatty())
    if args.calibration is None:
        raise ValueError(
            "--calibration: expected a text file or a folder of .txt and .md files, with at least 4096 tokens of the"
            " kinds of text that the model is used for, got none"
        )
    texts = read_texts(args.calibration)
    if args.device is None and not placement.gpu_count():
        print("quantize: no GPU here, so the CPU computes, which takes many times longer", file=sys.stderr)
    evaluate = None if args.evaluate is None else "\n".join(read_texts(args.evaluate))
    try:
        report = llm.quantize(
            args.source,
            args.target,
            texts,
            method=args.method,
            group_size=args.group_size,
            symmetric=args.symmetric,
            samples=args.samples,
            sequence_length=args.sequence_length,
            ignore=args.ignore,
            evaluate=evaluate,
            format_name=args.format,
            device=args.device,
            resume=args.resume,
            progress=bar.show_layer,
            on_step=bar.show_step,
        )
    except KeyboardInterrupt:
        bar.close()
        work = name_unfinished(args.target)
        if work.exists():
            print(f"stopped; the finished layers are in {work}: continue with --resume", file=sys.stderr)
        raise
    bar.close()
    print(report.text(), end="")
    print(f"{args.target}: written")
    if importlib.util.find_spec("matplotlib") is None:
        print("quantization_report.png: not drawn without matplotlib (extra: plot)", file=sys.stderr)
    return 0


class _Progress:
    """A progress bar on stderr that shows the remaining time and the current step; nothing unless ``is_shown``."""

    WIDTH = 30
    """The width of the bar in characters."""
    COLUMNS = 79
    """The width of the line in characters, so that each line overwrites the previous one."""

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._start, self._first = time.monotonic(), 0
        self._line = ""

    def show_layer(self, done: int, total: int, report: Mapping[str, Any] | None) -> None:
        """Show the number of finished layers; see `cupy_awq.llm.calibrate.model_quantizer.LayerProgress`."""
        left = ""
        if report is None:
            self._first = done
        else:
            seconds = round((time.monotonic() - self._start) / (done - self._first) * (total - done))
            left = f", {seconds // 60}:{seconds % 60:02} left"
        full = self.WIDTH * done // total
        self._line = f"[{'#' * full}{'.' * (self.WIDTH - full)}] layer {done} of {total}{left}"
        self._write(self._line)

    def show_step(self, step: str) -> None:
        """Show the name of the current step."""
        self._write(f"{self._line}: {step}")

    def close(self) -> None:
        """Redraw the bar without the current step and end its line, so that later output starts on a new one."""
        self._write(self._line, end="\n")

    def _write(self, line: str, end: str = "") -> None:
        if self._is_shown:
            print(f"\r{line:<{self.COLUMNS}}", end=end, file=sys.stderr, flush=True)
