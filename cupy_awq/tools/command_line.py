# SPDX-License-Identifier: Apache-2.0
"""Command line: ``python -m cupy_awq COMMAND``; those of language models are in `llm.command_line`.

A user's mistake is one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import cupy_awq
from cupy_awq.check import HOST
from cupy_awq.runtime import placement
from cupy_awq.tools import llm_commands as command_line

DTYPES = ("float16", "bfloat16", "float32")
OPS = ("gemm", "gemm_int8", "conv2d")


class _Parser(argparse.ArgumentParser):
    """Mistakes become a ValueError, so that ``main`` reports all of them in one way."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 2 for a user's mistake, or the command's own."""
    try:
        args = _parser().parse_args(arguments)
        code: int = args.run(args)
        sys.stdout.flush()  # here, where a closed pipe can still be handled
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit would fail once more
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, MemoryError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"cupy_awq: error: {message}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m cupy_awq",
        description="AWQ INT4 weight-only linear algebra for NVIDIA GPUs: try it, look into checkpoints, time it.",
    )
    parser.add_argument("--version", action="version", version=f"cupy_awq {cupy_awq.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, run: Any, summary: str, text: str = "", examples: Sequence[str] = ()
    ) -> argparse.ArgumentParser:
        lines = [f"  python -m cupy_awq {name} {example}".rstrip() for example in examples]
        added = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.{text}",
            epilog="\n".join(["examples:", *lines]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run)
        return added

    demo = command("demo", _demo, "run a real quantized layer, checked and timed", DEMO, ["", "--json"])
    demo.add_argument("--json", action="store_true", help="a list of objects instead of text")

    info = command("info", _info, "print what a checkpoint holds", INFO, ["Qwen3-8B-AWQ/", "model.safetensors --json"])
    info.add_argument("path", metavar="PATH", help="folder or safetensors file in the AutoAWQ gemm format")
    info.add_argument("--json", action="store_true", help="an object instead of text")

    examples = [
        "4096x12288 --m 1,16,64",
        "4096x4096 12288x4096 --m 1,4,16,64,256 --plot times.png",
        "--model qwen3-8b",
        "--op gemm_int8 4096x12288",
        "--op conv2d 64x64 256x256 --m 1,8,32 --image 14",
    ]
    bench = command("bench", _bench, "time x @ W for shapes that you name", BENCH, examples)
    bench.add_argument(
        "shapes", metavar="KxN", nargs="*", type=_shape, help="in features x out features, such as 4096x12288"
    )
    bench.add_argument(
        "--op", choices=OPS, default="gemm", help="gemm (default), gemm_int8 (W4A8), or conv2d (shapes are CIxCO)"
    )
    bench.add_argument("--image", metavar="S", type=int, default=56, help="conv2d: of S x S pixels (default: 56)")
    bench.add_argument("--window", metavar="S", type=int, default=3, help="conv2d: of S x S taps (default: 3)")
    bench.add_argument(
        "--m", metavar="M,M,...", type=_counts, default=[1, 16, 64], help="rows of x, or images (default: 1,16,64)"
    )
    bench.add_argument(
        "--group-size", metavar="G", type=int, default=128, help="rows of W that share a scale, -1: K (default: 128)"
    )
    bench.add_argument("--dtype", choices=DTYPES, default="float16", help="of x (default: float16)")
    bench.add_argument(
        "--kernel", metavar="NAME", help="gemm with this kernel on AWQ's own arrays (default: AwqLinear and its choice)"
    )
    bench.add_argument("--plan", action="store_true", help="through cupy_awq.plan, made once for each weight")
    bench.add_argument("--json", action="store_true", help="an object instead of text")
    bench.add_argument(
        "--plot", metavar="FILE.png", type=Path, help="also draw time / roofline over M (needs matplotlib)"
    )
    bench.add_argument(
        "--model", metavar="NAME", help="instead: a whole model of random weights, such as qwen3-8b, behind 1024 tokens"
    )

    tune = command("tune", _tune, "measure the fastest configurations on this GPU", TUNE, ["4096x12288 12288x4096"])
    tune.add_argument("shapes", metavar="KxN", nargs="+", type=_shape, help="in features x out features")
    tune.add_argument(
        "--m", metavar="M,M,...", type=_counts, default=TUNE_ROWS, help="rows of x (default: 1 to 4096, powers of two)"
    )
    tune.add_argument(
        "--group-size", metavar="G", type=int, default=128, help="rows of W that share a scale, -1: K (default: 128)"
    )
    tune.add_argument("--tries", metavar="T", type=int, default=12, help="configurations for each M (default: 12)")

    compile_ = command(
        "compile", _compile, "compile every kernel, with no GPU", COMPILE, ["--arch 90a", "--arch 80 --arch 89"]
    )
    compile_.add_argument(
        "--arch",
        metavar="ARCH",
        action="append",
        required=True,
        help="compute capability, such as 75 or 90a; repeatable",
    )

    examples = ["1 12288 4096 --arch 90", "16 12288 4096 --arch 90 --layer"]
    explain = command("explain", _explain, "print each kernel, legal or why not, and the choice", "", examples)
    explain.add_argument("m", metavar="M", type=int, help="rows of x")
    explain.add_argument("n", metavar="N", type=int, help="out features")
    explain.add_argument("k", metavar="K", type=int, help="in features")
    explain.add_argument("--group-size", metavar="G", type=int, default=128, help="(default: 128)")
    explain.add_argument("--dtype", choices=DTYPES, default="float16", help="of x (default: float16)")
    explain.add_argument(
        "--arch", metavar="ARCH", type=int, help="compute capability, such as 90 (default: the current GPU's)"
    )
    explain.add_argument(
        "--layer",
        action="store_true",
        help="kernels of AwqLinear, which repacks its weight on Hopper (default: of gemm)",
    )
    command_line.add(command)
    return parser


DEMO = """

Loads the MLP of layer 0 of SmolLM2-135M-Instruct that the package carries, and
runs it at M = 1, 16 and 256 on the GPU if there is one, else on the CPU. fp16_us is
the time of the unquantized product: cupy.matmul in float16 (null without cuBLAS),
or NumPy in float32 on the CPU."""

INFO = """

Reads the headers alone. The ratio is bytes over those of the same weights in fp16."""

BENCH = """

On a GPU: CUDA graph replays with weights that are cold in L2, median of seven.
GB/s counts the bytes of W, x and y. us / roofline: 1 is the best possible, where the
roofline is max(bytes / read bandwidth, flops / fp16 rate), measured in the same run.
fp16 / us: how many times faster than cupy.matmul with fp16 weights (needs cuBLAS).
Without a GPU, the NumPy path is timed."""

TUNE_ROWS = [1 << i for i in range(13)]
TUNE = """

Times the configurations that the model ranks first, with weights that are cold in
L2, and keeps the fastest for each shape and number of rows in the user's cache
(CUPY_AWQ_CACHE_DIR). AwqLinear uses them from the next process on, for every group
size and dtype; other numbers of rows take the next power of two's."""

COMPILE = """

Fills the cache of compiled kernels (CUPY_AWQ_CACHE_DIR), to warm a container image
or to check a build. Prints registers, shared memory and spills; exit code 1 if any
kernel spills or has its wgmma serialized."""


def _shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected KxN such as 4096x12288, got {text!r}")
    return int(match[1]), int(match[2])


def _counts(text: str) -> list[int]:
    counts = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d{0,8}", count) for count in counts):
        raise argparse.ArgumentTypeError(f"expected positive integers such as 1,16,64, got {text!r}")
    return [int(count) for count in counts]


def _print(value: Any, text: str, as_json: bool) -> int:
    print(json.dumps(value, indent=2) if as_json else text)
    return 0


def _demo(args: argparse.Namespace) -> int:
    from cupy_awq.tools import demo

    device = placement.resolve()
    rows = demo.measure(device)
    return _print([row.to_json() for row in rows], demo.render(rows, device), args.json)


def _info(args: argparse.Namespace) -> int:
    from cupy_awq.tools import info

    facts = info.describe(args.path)
    return _print(facts, info.render(facts), args.json)


def _bench(args: argparse.Namespace) -> int:
    from cupy_awq.tools import bench

    if (args.model is None) == (not args.shapes):
        raise ValueError("bench: expected shapes KxN or a --model")
    if args.model is not None:
        return _bench_model(args)
    if args.op != "gemm":
        return _bench_int8(args)
    figure = bench.new_figure() if args.plot else None  # fails before the work
    if args.plot and not (args.plot.suffix == ".png" and args.plot.absolute().parent.is_dir()):
        raise ValueError(f"--plot: expected FILE.png in a folder that exists, got {args.plot}")
    device = placement.resolve()
    rows, ceilings = bench.run(
        args.shapes,
        args.m,
        group_size=args.group_size,
        dtype=args.dtype,
        kernel=args.kernel,
        planned=args.plan,
        device=device,
        progress=lambda text: _progress("bench", text),
    )
    if figure:
        bench.draw(figure, rows, placement.device_name(device))
        figure.savefig(args.plot)
    return _print(bench.to_json(rows, ceilings, device), bench.render(rows, ceilings, device), args.json)


def _bench_model(args: argparse.Namespace) -> int:
    from cupy_awq.tools import bench_llm as speed
    from cupy_awq.tools.table import render

    if args.kernel or args.plan or args.plot or args.dtype != "float16" or args.op != "gemm":
        raise ValueError("bench: --model takes no --kernel, --plan, --plot, --dtype or --op")
    rows = speed.measure(args.model, progress=lambda done, total: _progress("bench", f"layer {done} of {total}"))
    lines = [
        [
            f"{row.model} x {row.batch}",
            f"{row.prompt_tokens / row.prompt_seconds:.0f}",
            f"{row.batch / row.step_seconds:.1f}",
            f"{row.step_bytes / 1e9:.3f}",
            f"{row.gbs:.0f}",
        ]
        for row in rows
    ]
    table = render(("model x batch", "prompt tokens/s", "decode tokens/s", "GB a step", "GB/s"), lines)
    return _print([dataclasses.asdict(row) for row in rows], table, args.json)


def _bench_int8(args: argparse.Namespace) -> int:
    from cupy_awq.tools import bench_quantized as speed

    if args.kernel or args.plan or args.plot or args.dtype != "float16":
        raise ValueError(f"bench: --op {args.op} takes no --kernel, --plan, --plot or --dtype")
    device = placement.resolve()
    options: dict[str, Any] = {"device": device, "progress": lambda text: _progress("bench", text)}
    with placement.use_device(device):
        if args.op == "conv2d":
            rows = speed.convolution(args.shapes, args.m, window=args.window, image=args.image, **options)
        else:
            rows = speed.gemm(args.shapes, args.m, group_size=args.group_size, **options)
    return _print(speed.to_json(rows, device), speed.render(rows, device), args.json)


def _progress(command: str, text: str) -> None:
    print(f"{command}: {text}", file=sys.stderr, flush=True)


def _tune(args: argparse.Namespace) -> int:
    from cupy_awq.tools import autotune as tune

    device = placement.resolve()
    if device == HOST:
        raise ValueError("tune needs an NVIDIA GPU, and there is none")
    if args.tries < 1:
        raise ValueError(f"--tries: expected a positive integer, got {args.tries}")
    options = {"group_size": args.group_size, "tries": args.tries, "device": device}
    rows = tune.run(args.shapes, args.m, **options, progress=lambda text: _progress("tune", text))
    print(tune.render(rows))
    print(f"kept in {tune.keep(rows, device)}")
    return 0


def _compile(args: argparse.Namespace) -> int:
    from cupy_awq.tools import compile_all

    return compile_all.run(args.arch)


def _explain(args: argparse.Namespace) -> int:
    print(cupy_awq.explain(args.m, args.n, args.k, args.group_size, args.dtype, arch=args.arch, layer=args.layer))
    return 0
