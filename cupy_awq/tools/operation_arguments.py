# SPDX-License-Identifier: Apache-2.0
"""The arguments of commands that run an operation on random weights: ``bench``, ``tune`` and ``explain``."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cupy_awq.tools.operations import Settings

DTYPES = ("float16", "bfloat16", "float32")
OPS = ("gemm", "gemm_int8", "int8_linear", "conv2d", "gemm_grouped", "moe")
OPERATION_OPTIONS = ("op", "dtype", "group_size", "image", "window", "experts", "top_k")
"""The options of an operation on random weights, which do not apply to a --model."""


def add_operation(parser: argparse.ArgumentParser, nargs: str, ms: str) -> None:
    """Add the arguments for the operation and its sizes to ``parser``; ``ms`` describes the default of --m."""
    parser.add_argument(
        "shapes",
        metavar="KxN",
        nargs=nargs,
        type=_parse_shape,
        help="shape of W: in features x out features, as 4096x12288",
    )
    parser.add_argument("--m", metavar="M,M,...", type=_parse_counts, help=f"rows of x (default: {ms})")
    parser.add_argument(
        "--group-size",
        metavar="G",
        type=int,
        help="GEMMs: rows of W per group, -1 for K (default: 128)",
    )
    parser.add_argument(
        "--op",
        choices=OPS,
        help="gemm (default); gemm_int8 (W4A8); int8_linear (W8A16); conv2d: KxN is input x output channels, M is the"
        " number of images; gemm_grouped: M rows sorted by expert; moe: KxN is hidden size x width of an expert, M is"
        " the tokens",
    )
    parser.add_argument("--image", metavar="S", type=int, help="conv2d: S x S pixels (default: 56)")
    parser.add_argument("--window", metavar="S", type=int, help="conv2d: S x S filter (default: 3)")
    parser.add_argument("--experts", metavar="E", type=parse_count, help="gemm_grouped, moe: experts (default: 8)")
    parser.add_argument("--top-k", metavar="K", type=parse_count, help="moe: experts per token (default: 2)")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the option for the dtype of x to ``parser``."""
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of x (default: float16); not for conv2d")


def _parse_shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected KxN such as 4096x12288, got {text!r}")
    return int(match[1]), int(match[2])


def _parse_counts(text: str) -> list[int]:
    counts = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d{0,8}", count) for count in counts):
        raise argparse.ArgumentTypeError(f"expected positive integers of at most nine digits, as in 1,16, got {text!r}")
    return [int(count) for count in counts]


def parse_count(text: str) -> int:
    """Return a positive integer; raise ArgumentTypeError for another text."""
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise argparse.ArgumentTypeError(f"expected a positive integer of at most nine digits, got {text!r}")
    return int(text)


def check_operation(args: argparse.Namespace, command: str) -> str:
    """Return the operation that ``--op`` selects; raise ValueError if an option of another operation is given."""
    from cupy_awq.kernels.registry import FAMILIES_OF

    op: str = args.op or "gemm"
    kernel = getattr(args, "kernel", None)
    if kernel is not None and not any(kernel in families for families in FAMILIES_OF.values()):
        raise ValueError(f"--kernel: expected one that explain lists, got {kernel!r:.80}")
    if (command, op) == ("tune", "moe"):
        raise ValueError("tune: expected --op gemm_grouped for the products of experts, got moe")
    others = ["group_size", "dtype"] if op == "conv2d" else ["image", "window"]
    others += [] if op == "moe" else ["top_k"] if op == "gemm_grouped" else ["experts", "top_k"]
    only_gemm = () if op == "gemm" else ("kernel", "plan", "batch_invariant", "layer", "order")
    refuse(args, f"{command}: --op {op}", *others, *only_gemm)
    return op


def refuse(args: argparse.Namespace, case: str, *names: str) -> None:
    """Raise ValueError if an option of ``names`` is given; ignore names that the command does not have."""
    values = {f"--{name.replace('_', '-')}": getattr(args, name, None) for name in names}
    given = [option for option, value in values.items() if value is not None and value is not False]
    if given:
        raise ValueError(f"{case} takes no {', '.join(given)}")


def make_settings(args: argparse.Namespace, device: int, **options: Any) -> Settings:
    """Return the settings of an operation from the arguments; an ``option`` that is None has its default."""
    from cupy_awq.tools.operations import Settings

    options |= {name: getattr(args, name) for name in ("group_size", "image", "window", "experts", "top_k")}
    return Settings(device, **{name: value for name, value in options.items() if value is not None})
