# SPDX-License-Identifier: Apache-2.0
"""The command ``convert``, which writes a 4-bit checkpoint in another format."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from cupy_awq.checkpoint import model_folder
from cupy_awq.checkpoint.write import WRITERS
from cupy_awq.tools.progress import show_bar

SUFFIXES = {".gguf": "gguf", ".ak48": "ak48"}
"""The format by the suffix of the file to write."""
CHOICES = (*WRITERS, *SUFFIXES.values())
"""The accepted values of ``--format``."""

MORE = """

Writing rounds nothing but the dense tensors of an ak48 file; what `info` lists as rounded
is rounded once when SRC is read. A format that cannot hold the codes, scales and zero
points is an error that says why. SRC is any checkpoint that `info` reads. DST is a file
for gguf and ak48, else a folder, new or empty.

  autoawq             packed zero points, one group size, no activation order
  compressed-tensors  packed or symmetric zero points, any group sizes, activation order
  gptq                packed zero points (version 2), one group size, activation order
  gguf                Q4_0 (symmetric) and Q4_1 (offsets): group sizes that are multiples
                      of 32, no activation order, scales and the products of scale and
                      zero point that are exact in float16
  ak48                a Qwen3 of OrinMLLM: scales that are exact in float16, dense tensors
                      as float16; put tokenizer.json beside the file"""


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command. ``command`` creates a parser from (name, function to run, summary, help text, examples)."""
    examples = [
        "Qwen3-8B-GPTQ/ Qwen3-8B-CT/ --format compressed-tensors",
        "model-v2.pt model.gguf",
        "Qwen3-8B-mlx-4bit/ qwen3.gguf",
        "Qwen3-8B-AWQ/ qwen3.ak48",
    ]
    parser = command("convert", _convert, "write a 4-bit checkpoint in another format", MORE, examples)
    parser.add_argument("source", metavar="SRC", help="folder or file of a 4-bit checkpoint, or the name smollm2")
    parser.add_argument("target", metavar="DST", type=Path, help="the folder or file to write")
    parser.add_argument("--force", action="store_true", help="replace the file DST if it exists")
    parser.add_argument("--format", choices=CHOICES, help="default: that of the suffix .gguf or .ak48 of DST")


def _convert(args: argparse.Namespace) -> int:
    from cupy_awq.llm.files.convert import convert
    from cupy_awq.llm.files.readers import locate
    from cupy_awq.tools.info import list_roundings

    suffix = SUFFIXES.get(args.target.suffix)
    name = args.format or suffix
    if name is None:
        raise ValueError(f"--format: expected one of {', '.join(CHOICES)} for the folder {args.target}, got none")
    if suffix != (name if name in SUFFIXES.values() else None):
        wanted = f"a file name that ends in .{name}" if name in SUFFIXES.values() else f"a folder for {name}"
        raise ValueError(f"DST: expected {wanted}, got {args.target}")
    roundings = convert(args.source, args.target, name, show_bar if sys.stderr.isatty() else None, force=args.force)
    for line in list_roundings(roundings):
        print(line, file=sys.stderr)
    path = locate(args.source)
    if path.is_file() and len(parts := model_folder.list_weights(path)) > 1:
        print(f"{path}: a split model, of which all {len(parts)} parts were read", file=sys.stderr)
    files = [args.target] if args.target.is_file() else [file for file in args.target.iterdir() if file.is_file()]
    print(f"{args.target}: {sum(os.path.getsize(file) for file in files) / 1e6:.1f} MB")
    return 0
