# SPDX-License-Identifier: Apache-2.0
"""The command ``convert``, which writes a 4-bit checkpoint in another format."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from cupy_awq.checkpoint import model_folder
from cupy_awq.checkpoint.files import printable
from cupy_awq.checkpoint.model_path import locate
from cupy_awq.checkpoint.write import WRITERS
from cupy_awq.tools.progress import show_bar

SUFFIXES = {".gguf": "gguf", ".ak48": "ak48"}
"""The format by the suffix of the file to write."""
CHOICES = (*WRITERS, *SUFFIXES.values())
"""The accepted values of ``--format``."""

MORE = """

Without --round, writing rounds nothing but the dense tensors of an ak48 file; what `info`
lists as rounded is rounded once when SRC is read. A format that cannot hold the codes,
scales and zero points is an error that says why, and with --round the nearest weight that
it holds is written, and the relative RMS error of each such weight printed. SRC is any
checkpoint that `info` reads. DST is a file for gguf and ak48, else a folder, new or empty.

  autoawq             packed zero points, one group size, no activation order
  compressed-tensors  packed or symmetric zero points, any group sizes, activation order
  gptq                packed zero points (version 2), one group size, activation order
  gguf                Q4_0 (symmetric) and Q4_1 (offsets): group sizes that are multiples
                      of 32, no activation order, scales and the products of scale and
                      zero point that are exact in float16
  ak48                a Qwen3 of OrinMLLM: scales that are exact in float16, dense tensors
                      as float16; put tokenizer.json beside the file"""


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command by ``command``: it makes a parser of (name, function to run, summary, help text, examples)."""
    examples = [
        "Qwen3-8B-GPTQ/ Qwen3-8B-CT/ --format compressed-tensors",
        "model-v2.pt model.gguf",
        "Qwen3-8B-mlx-4bit/ qwen3.gguf",
        "Qwen3-8B-AWQ/ qwen3.gguf --round",
    ]
    parser = command("convert", _convert, "write a 4-bit checkpoint in another format", MORE, examples)
    parser.add_argument("source", metavar="SRC", help="folder or file of a 4-bit checkpoint, or the name smollm2")
    parser.add_argument("target", metavar="DST", type=Path, help="the folder or file to write")
    parser.add_argument("--force", action="store_true", help="replace the file DST if it exists")
    parser.add_argument("--round", action="store_true", help="round 4-bit weights that the format cannot hold")
    parser.add_argument("--format", choices=CHOICES, help="default: that of the suffix .gguf or .ak48 of DST")


def _convert(args: argparse.Namespace) -> int:
    from cupy_awq.llm.files.convert import convert
    from cupy_awq.tools.info import list_roundings

    suffix = SUFFIXES.get(args.target.suffix)
    name = args.format or suffix
    if name is None:
        raise ValueError(f"--format: expected one of {', '.join(CHOICES)} for the folder {args.target}, got none")
    if suffix != (name if name in SUFFIXES.values() else None):
        wanted = f"a file name that ends in .{name}" if name in SUFFIXES.values() else f"a folder for {name}"
        raise ValueError(f"DST: expected {wanted}, got {args.target}")
    progress = show_bar if sys.stderr.isatty() else None
    converted = convert(args.source, args.target, name, progress, force=args.force, rounds=args.round)
    for line in list_roundings(converted.roundings):
        print(line, file=sys.stderr)
    if args.round:
        print(describe_errors(converted.errors))
    path = locate(args.source)
    if path.is_file() and len(parts := model_folder.list_weights(path)) > 1:
        print(f"{path}: a split model, of which all {len(parts)} parts were read", file=sys.stderr)
    files = [args.target] if args.target.is_file() else [file for file in args.target.iterdir() if file.is_file()]
    print(f"{args.target}: {sum(os.path.getsize(file) for file in files) / 1e6:.1f} MB")
    return 0


def describe_errors(errors: Mapping[str, float]) -> str:
    """Return a table of the relative RMS errors by module, and a line with their median and the largest one.

    >>> print(describe_errors({"up_proj": 0.0715, "down_proj": 0.0004}))
    error of W   module
       7.150%    up_proj
       0.040%    down_proj
    --round: 2 modules with errors, median 3.595%, largest 7.150% (up_proj)
    """
    if not errors:
        return "--round: 0 modules with errors"
    worst = max(errors, key=lambda name: errors[name])
    lines = [f"{error:9.3%}    {printable(name)}" for name, error in errors.items()]
    summary = f"median {statistics.median(errors.values()):.3%}, largest {errors[worst]:.3%} ({printable(worst)})"
    return "\n".join(["error of W   module", *lines, f"--round: {len(errors)} modules with errors, {summary}"])
