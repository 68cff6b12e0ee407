# SPDX-License-Identifier: Apache-2.0
"""The command line, ``python -m cupy_awq COMMAND``. The commands for language models are in `llm_commands`.

In all commands, shapes are KxN as in W [K, N], and --m is the number of rows of x. A user error prints one line to
stderr and exits with code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import cupy_awq
from cupy_awq.check import HOST
from cupy_awq.checkpoint.files import printable
from cupy_awq.runtime import placement
from cupy_awq.runtime.device import Device, nominal
from cupy_awq.tools import blas_threads, convert_command, llm_commands, quantize_command, serve_command, system
from cupy_awq.tools.operation_arguments import (
    OPERATION_OPTIONS,
    add_dtype,
    add_operation,
    check_operation,
    make_settings,
    parse_count,
    refuse,
)

MS = [1, 16, 64]
"""The default values of M of `bench` and `explain`."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises ValueError for invalid arguments, so that ``main`` reports all errors alike."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0 for success, 2 for a user error, or the command's own code."""
    _prepare_streams()
    try:
        args = _parser().parse_args(arguments)
        code: int = args.run(args)
        sys.stdout.flush()  # a broken pipe must raise here, where it is handled, and not at exit
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit succeeds
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not placement.is_out_of_memory(error):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"cupy_awq: error: {printable(message)}", file=sys.stderr)
        return 2


def _prepare_streams() -> None:
    """Replace closed standard streams; make all of them escape characters that their encoding cannot represent."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # stays open until exit
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace" if name == "stdin" else "backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m cupy_awq",
        description="AWQ INT4 weight-only linear algebra for NVIDIA GPUs: try it, inspect checkpoints, time it.",
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
        added.add_argument(
            blas_threads.OPTION,
            metavar="N",
            type=parse_count,
            help="threads of products on the CPU (default: the cores that are idle at the start)",
        )
        added.set_defaults(run=run)
        return added

    demo = command("demo", _demo, "run a real quantized layer, check and time it", DEMO, ["", "--json"])
    demo.add_argument("--json", action="store_true", help="print a list of objects instead of text")

    examples = ["", "Qwen3-8B-AWQ/", "model.safetensors --json", "--formats"]
    summary = "print the format, the layers and the kernels of a checkpoint, or versions and GPUs without one"
    info = command("info", _info, summary, INFO, examples)
    info.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="folder, or safetensors, GGUF or PyTorch file, or the name smollm2; default: this installation",
    )
    info.add_argument("--formats", action="store_true", help="print the supported formats instead")
    info.add_argument("--json", action="store_true", help="print an object instead of text")

    examples = [
        "4096x12288 --m 1,16,64",
        "4096x4096 12288x4096 --m 1,4,16,64,256 --plot times.png",
        "4096x12288 --op gemm_int8",
        "64x64 256x256 --op conv2d --m 1,8,32 --image 14",
        "--model qwen3-8b",
        "--model qwen3-235b-a22b --layers 4",
    ]
    bench = command("bench", _bench, "time an operation for the shapes of your layers", BENCH, examples)
    add_operation(bench, nargs="*", ms=",".join(map(str, MS)))
    add_dtype(bench)
    bench.add_argument(
        "--kernel", metavar="NAME", help="gemm: force this kernel for the AWQ layout (default: AwqLinear selects one)"
    )
    bench.add_argument("--plan", action="store_true", help="gemm: time a cupy_awq.plan instead of an AwqLinear")
    bench.add_argument("--batch-invariant", action="store_true", help="gemm: time AwqLinear(batch_invariant=True)")
    bench.add_argument("--json", action="store_true", help="print an object instead of text")
    bench.add_argument(
        "--plot", metavar="FILE.png", type=Path, help="also draw time / roofline over M (needs matplotlib)"
    )
    bench.add_argument(
        "--model",
        metavar="NAME",
        help="time a model with random weights, such as qwen3-8b, after a prompt of 1024 tokens, for --m sequences"
        " (default: 1,16)",
    )
    bench.add_argument("--layers", metavar="N", type=parse_count, help="--model: run the first N layers alone")

    examples = [
        "4096x12288 12288x4096",
        "4096x12288 --op gemm_int8 --m 1,64",
        "64x64 --op conv2d --m 1,8",
        "--model Qwen3-8B-AWQ/ --m 1,4",
        "--rates",
    ]
    tune = command("tune", _tune, "measure the fastest configurations on this GPU", TUNE, examples)
    add_operation(tune, nargs="*", ms="the powers of two up to 4096; conv2d: to 32")
    tune.add_argument(
        "--tries", metavar="T", type=int, help="configurations to time per shape and M (default: 12; 60 with --model)"
    )
    tune.add_argument(
        "--model",
        metavar="MODEL",
        help="tune the GEMMs inside the decode steps of a model, for --m sequences (default: 1,2,4,8,16): a Hugging"
        " Face folder, a .gguf or .ak48 file, or a name for random weights, such as qwen3-8b",
    )

    tune.add_argument("--rates", action="store_true", help="measure the rates of this GPU that the cost models use")

    examples = ["--arch 90a", "--arch 80 --arch 89", "--arch 90a --batch-invariant"]
    compile_ = command("compile", _compile, "compile the kernels of common layers, without a GPU", COMPILE, examples)
    compile_.add_argument(
        "--arch", metavar="ARCH", action="append", required=True, help="compute capability: 75, 90a, ...; repeatable"
    )
    compile_.add_argument("--batch-invariant", action="store_true", help="also the kernels of batch_invariant=True")

    examples = [
        "4096x12288 --m 1,16 --device rtx-4090",
        "4096x12288 --m 16 --arch 90 --layer",
        "12288x4096 --m 1 --arch 90 --layer --order",
        "64x256 --op conv2d --image 14 --arch 90",
    ]
    explain = command("explain", _explain, "print each kernel's time, or why it is not legal", EXPLAIN, examples)
    add_operation(explain, nargs="+", ms=",".join(map(str, MS)))
    add_dtype(explain)
    explain.add_argument(
        "--arch",
        metavar="ARCH",
        help="compute capability, such as 90 (default: the current GPU, or an H100 without one)",
    )
    explain.add_argument("--device", metavar="GPU", help="GPU of the table of known ones, such as rtx-4090 or agx-orin")
    explain.add_argument(
        "--layer",
        action="store_true",
        help="gemm: kernels of AwqLinear, which repacks weights from sm_75 on (default: those for the AWQ layout)",
    )
    explain.add_argument(
        "--order",
        action="store_true",
        help="gemm with --layer: also say who gathers the columns of x if the layer has an activation order",
    )
    explain.add_argument(
        "--batch-invariant",
        action="store_true",
        help="gemm: configurations for which the bits of a row of y do not depend on M",
    )
    explain.add_argument("--json", action="store_true", help="print a list of objects instead of text")
    llm_commands.add(command)
    serve_command.add(command)
    quantize_command.add(command)
    convert_command.add(command)
    system.add(command)
    return parser


DEMO = """

Loads the MLP of layer 0 of SmolLM2-135M-Instruct, which the package contains, and
runs it at M = 1, 16 and 256 on the GPU if there is one, else on the CPU. fp16_us is
the time with unquantized weights: cupy.matmul in float16 (null without cuBLAS), or
NumPy in float32 on the CPU."""

INFO = """

Reads only headers and scales. The ratio is the size divided by that of the same weights
in fp16. The kernels are those of AwqLinear on the current GPU, or on an H100 without one,
for a decoding step of one row and a prompt of 512 rows."""

BENCH = """

On a GPU: the median of seven CUDA graph replays with weights that are cold in L2.
GB/s counts the bytes of W, x and y. us / roofline: 1 is the best possible, where the
roofline is max(bytes / read bandwidth, flops / fp16 throughput), measured in the same
run. fp16 / us: the speedup over cupy.matmul with fp16 weights (needs cuBLAS).
Without a GPU, the NumPy path is timed."""

TUNE = """

Times the configurations with the lowest modelled times, with weights that are cold
in L2, and stores the fastest for each shape and M in the user's cache
(CUPY_AWQ_CACHE_DIR), from which processes that start later read it. A gemm of any group
size and dtype uses the configuration of M = 16, for example, for 9 to 16 rows.
--rates measures bandwidths, latencies and rates of instructions in about 20 s instead.
In a decode step the kernels of a layer overlap, so with --model the GEMMs
are timed in steps of the model's first layers with 1024 cached tokens per sequence."""

COMPILE = """

Fills the cache of compiled kernels (CUPY_AWQ_CACHE_DIR), for example of a container
image. Kernels with a bias, a residual or an activation, for symmetric weights, other
shapes or other M are compiled at first use. Prints registers, shared memory and local
memory. The exit code is 1 if a kernel uses local memory (spilled registers, arrays
indexed at run time) or if the compiler serializes its wgmma instructions."""

EXPLAIN = """

"->" marks the kernel that is chosen. Its time is "measured" if `tune` recorded it for
this GPU model; all others are "modelled" by the kernel's cost model. The line "chosen"
says whether the cost models or a table of tuned configurations determined the choice."""


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

    if args.formats:
        if args.path is not None or args.json:
            raise ValueError("info: expected --formats alone")
        print(info.render_formats())
        return 0
    if args.path is None:
        found = system.describe()
        return _print(found, system.render(found), args.json)
    content = info.describe(args.path)
    return _print(content, info.render(content), args.json)


def _bench(args: argparse.Namespace) -> int:
    from cupy_awq.tools import bench

    if (args.model is None) == (not args.shapes):
        raise ValueError(f"bench: expected shapes KxN or a --model, got {'both' if args.shapes else 'neither'}")
    if args.model is not None:
        return _bench_model(args)
    op = check_operation(args, "bench")
    refuse(args, "bench: an operation", "layers")
    if op not in ("gemm", "int8_linear"):
        refuse(args, f"bench: --op {op}", "dtype")
    if args.kernel and args.batch_invariant:
        raise ValueError("bench: expected --kernel or --batch-invariant, got both")
    figure = bench.new_figure() if args.plot else None  # raises before the benchmark if matplotlib is missing
    if args.plot and not (args.plot.suffix == ".png" and args.plot.absolute().parent.is_dir()):
        raise ValueError(f"--plot: expected FILE.png in a folder that exists, got {args.plot}")
    device = placement.resolve()
    options = {"kernel": args.kernel, "planned": args.plan, "batch_invariant": args.batch_invariant}
    settings = make_settings(args, device, dtype=args.dtype, **options)
    rows, ceilings = bench.run(op, args.shapes, args.m or MS, settings, lambda text: _progress("bench", text))
    if figure:
        bench.draw(figure, rows, placement.device_name(device))
        figure.savefig(args.plot)
    return _print(bench.to_json(rows, ceilings, device), bench.render(rows, ceilings, device), args.json)


def _bench_model(args: argparse.Namespace) -> int:
    from cupy_awq.tools import bench_llm as speed
    from cupy_awq.tools.table import render

    refuse(args, "bench: --model", *("kernel", "plan", "batch_invariant", "plot"), *OPERATION_OPTIONS)
    rows = speed.measure(
        args.model,
        batches=tuple(args.m or speed.BATCHES),
        layers=args.layers,
        progress=lambda done, total: _progress("bench", f"layer {done} of {total}"),
    )
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


def _progress(command: str, text: str) -> None:
    print(f"{command}: {text}", file=sys.stderr, flush=True)


def _tune(args: argparse.Namespace) -> int:
    from cupy_awq.tools import autotune

    if bool(args.shapes) + (args.model is not None) + args.rates != 1:
        raise ValueError("tune: expected shapes KxN, a --model or --rates")
    device = placement.resolve()
    if device == HOST:
        raise ValueError("tune: expected an NVIDIA GPU, found none")
    if args.tries is not None and args.tries < 1:
        raise ValueError(f"--tries: expected a positive integer, got {args.tries}")
    if args.rates:
        return _tune_rates(args, device)
    if args.model is not None:
        return _tune_model(args, device)
    op = check_operation(args, "tune")
    ms = args.m or [1 << i for i in range(6 if op == "conv2d" else 13)]
    settings = make_settings(args, device, cached=False)
    tries, rows, path = args.tries or 12, [], None
    for row in autotune.run(op, args.shapes, ms, settings, tries, progress=lambda text: _progress("tune", text)):
        rows.append(row)
        path = autotune.keep(row, device)
    print(autotune.render(rows))
    print(f"stored in {path}")
    return 0


def _tune_rates(args: argparse.Namespace, device: int) -> int:
    from cupy_awq.runtime import device as devices
    from cupy_awq.runtime import rates
    from cupy_awq.tools import rate_tuning
    from cupy_awq.tools.table import render

    refuse(args, "tune: --rates", *OPERATION_OPTIONS, "m", "tries")
    gpu = devices.of(device)
    measured = rate_tuning.measure(device, lambda text: _progress("tune", text))
    path = rates.write(gpu.name, measured)
    lines = [[name, f"{us:.4g}", f"{getattr(gpu.rates, name):.4g}"] for name, us in measured.items()]
    print(render(("rate", "measured", "before"), lines))
    print(f"stored in {path}")
    return 0


def _tune_model(args: argparse.Namespace, device: int) -> int:
    from cupy_awq.tools import decode_tuning

    refuse(args, "tune: --model", *OPERATION_OPTIONS)
    steps, path = [], None
    for step in decode_tuning.run(
        args.model,
        args.m or decode_tuning.SEQUENCES,
        tries=args.tries or 60,
        index=device,
        progress=lambda text: _progress("tune", text),
    ):
        steps.append(step)
        if step.found:
            path = decode_tuning.keep(step, device)
    print(decode_tuning.render(steps))
    print(f"stored in {path}" if path else "stored nothing: the present configurations are as fast")
    return 0


def _compile(args: argparse.Namespace) -> int:
    from cupy_awq.tools import compile_all

    archs = [nominal(arch).arch for arch in args.arch]  # before listing kernels, which takes seconds for sm_90a
    return compile_all.run([kernel for arch in archs for kernel in compile_all.kernels(arch, args.batch_invariant)])


def _explain(args: argparse.Namespace) -> int:
    op = check_operation(args, "explain")
    cases = [(m, k, n) for k, n in args.shapes for m in args.m or MS]
    if op != "gemm":
        return _explain_problem(args, op, cases)
    from cupy_awq.ops.gemm import make_typical_problem

    options = {name: getattr(args, name) for name in ("arch", "device", "layer", "order", "batch_invariant")}
    options |= {"group_size": 128 if args.group_size is None else args.group_size, "dtype": args.dtype or "float16"}
    problems = [make_typical_problem(*case, **options) for case in cases]
    return _print_explained(args, problems, [cupy_awq.explain(*case, **options) for case in cases])


def _explain_problem(args: argparse.Namespace, op: str, cases: list[tuple[int, int, int]]) -> int:
    """Print the explanation of (M, K, N) for an operation other than gemm, assuming contiguous arrays."""
    from cupy_awq.kernels import select
    from cupy_awq.runtime import device
    from cupy_awq.tools.expert_operations import typical_problems

    settings = make_settings(args, HOST, dtype=args.dtype)
    gpu = device.find(args.arch, args.device)
    problems = [(problem, gpu) for m, k, n in cases for problem in typical_problems(op, (k, n), m, settings, gpu)]
    return _print_explained(args, problems, [select.explain(*problem) for problem in problems])


def _print_explained(args: argparse.Namespace, problems: Sequence[tuple[Any, Device]], texts: Sequence[str]) -> int:
    """Print the texts of `explain` or, with ``--json``, their tables and the lines below these."""
    from cupy_awq.kernels import select

    found = []
    for (problem, gpu), text in zip(problems, texts, strict=True) if args.json else ():
        table = [kernel._asdict() for kernel in select.explain_kernels(problem, gpu)]
        notes = text.splitlines()[2 + len(table) :]
        found.append({"problem": str(problem), "gpu": gpu.name, "arch": gpu.arch, "kernels": table, "notes": notes})
    _print(found, "\n\n".join(texts), args.json)
    if args.arch is None and args.device is None and not placement.gpu_count():
        print("explain: no GPU here, so an H100 is assumed; --arch or --device assumes another", file=sys.stderr)
    return 0
