# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m cupy_awq compile --arch 90a``: compile common kernels for given architectures, without a GPU.

The command fills the compile cache, for example of a container image, and checks the kernels: it prints the registers,
shared memory and local memory of each kernel, and fails if a kernel uses local memory or if the compiler serializes its
wgmma instructions. Local memory holds spilled registers and arrays that are indexed at run time; the accumulators of
wgmma must never lie there, because the compiler stores them before the wait for wgmma.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from cupy_awq.kernels import select, tuned
from cupy_awq.kernels.family import KernelProblem
from cupy_awq.kernels.gemm import fragments, gather_columns, gemm_sm90
from cupy_awq.kernels.gemm.layouts import FragmentLayout
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Fusion, Problem
from cupy_awq.kernels.registry import FAMILIES_OF
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device
from cupy_awq.runtime import disk_cache as cache
from cupy_awq.runtime.launch_plan import Kernel
from cupy_awq.tools.table import render

SHAPES = ((4096, 4096), (4096, 12288), (12288, 4096), (8192, 8192), (8192, 28672), (28672, 8192))
"""The shapes (K, N) of linear layers for which kernels are compiled: from models with 8 and 70 billion weights."""
REPACKED_MS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
"""The values of M for which the kernels that read the fragment layout are compiled."""
SHARED_CONSTANTS = ("ACTIVATION", "GATED", "HAS_BIAS", "BIAS", "HAS_RESIDUAL")
"""The compile-time constants of the epilogue, which the table that ``compile`` prints omits."""


def kernels(arch: int | str, batch_invariant: bool = False) -> list[Kernel]:
    """Return the kernels that common layers use on an architecture, such as 75 or "90a", without duplicates.

    With ``batch_invariant``, also return those that `gemm` and `AwqLinear` use with ``batch_invariant=True``.

    Raises:
        ValueError: ``arch`` is unknown.
    """
    gpu = device.nominal(arch)
    found = [*_awq_layout(gpu), *_common(gpu)]
    if FRAGMENTS in _layouts(gpu) and gpu.has(*gemm_sm90.GEMM_SM90.needs):
        for table in sorted(tuned.SHIPPED.glob("*.json")):  # each GPU model with tuned configurations
            found += _hopper_fragments(replace(gpu, name=table.stem))
    elif FRAGMENTS in _layouts(gpu):
        found += _fragment_layout(gpu)
    if batch_invariant:
        found += _batch_invariant(gpu)
    return list(dict.fromkeys(found))


def _layouts(gpu: device.Device) -> tuple[str, ...]:
    """Return the layouts in which `AwqLinear` stores the weights of `SHAPES`."""
    k, n = SHAPES[0]
    return select.weight_layouts(k, n, 128, "float16", "packed", gpu)


def _configurations(problem: KernelProblem, gpu: device.Device, families: Iterable[str]) -> Iterator[Kernel]:
    """Yield the kernels of all legal configurations of the given families."""
    for name, some in select.candidates(problem, gpu).items():
        if name in families and not isinstance(some, str):
            yield from (family.plan(config, problem, gpu).kernel for family, config, _ in some)


def _awq_layout(gpu: device.Device) -> Iterator[Kernel]:
    """Yield the kernels that read the AWQ layout in every configuration, for each dtype and group sizes 128 and 32."""
    k, n = SHAPES[0]
    for dtype, group_size, m, may_prefetch in itertools.product(
        ("float16", "bfloat16", "float32"), (128, 32), (1, 2, 4, 8, 16, 64), (False, True)
    ):
        scales = "bfloat16" if dtype == "bfloat16" else "float16"
        yield from _configurations(
            Problem(m, n, k, group_size, dtype, scales, may_prefetch_weights=may_prefetch), gpu, FAMILIES_OF[Problem]
        )


def _fragment_layout(gpu: device.Device) -> Iterator[Kernel]:
    """Yield the kernels that read the fragment layout, in the configurations selected for `SHAPES` and `REPACKED_MS`.

    All legal configurations would be too many.
    """
    for dtype, m, (k, n) in itertools.product(("float16", "bfloat16"), REPACKED_MS, SHAPES):
        if FRAGMENTS not in select.weight_layouts(k, n, 128, dtype, "packed", gpu):
            continue
        problem = Problem(m, n, k, 128, dtype, dtype, layouts=(AWQ, FRAGMENTS))
        yield FragmentLayout.of(problem).pack(gpu).kernel
        yield select.choose(problem, gpu).plan.kernel
        if m <= fragments.MAX_FUSED_ROWS:
            yield select.choose(_fused(problem), gpu).plan.kernel


def _hopper_fragments(gpu: device.Device) -> Iterator[Kernel]:
    """Yield the kernels of `_fragment_layout` on a Hopper GPU."""
    for dtype, m, (k, n) in itertools.product(("float16", "bfloat16"), REPACKED_MS, SHAPES):
        problem = Problem(m, n, k, 128, dtype, dtype, layouts=(AWQ, FRAGMENTS))
        yield FragmentLayout.of(problem).pack(gpu).kernel
        yield select.choose(problem, gpu, "gemm_sm90").plan.kernel
        gathering = replace(problem, gathers_x=True)
        if gather_columns.is_fused(gathering, gpu):
            yield select.choose(gathering, gpu).plan.kernel
        if m <= fragments.MAX_FUSED_ROWS:
            yield select.choose(_fused(problem), gpu).plan.kernel
        if m >= 256:
            large = _configurations(problem, gpu, ["gemm_sm90_large"])
            # Kernels with other tile heights, which serve other M, are compiled on first use.
            yield from (kernel for kernel in large if int(dict(kernel.defines)["BLOCK_M"]) % 128 == 0)


def _fused(problem: Problem) -> Problem:
    """Return the problem with the fusion that GEMMs of such a shape, wide or narrow, have in a decode step."""
    fused = replace(problem, fusion=Fusion("add_to_stream" if problem.k >= problem.n else "rms_norm_x"))
    return replace(fused, gated=True, activation="silu") if problem.n > 3 * problem.k else fused


def _batch_invariant(gpu: device.Device) -> Iterator[Kernel]:
    """Yield the kernels of batch-invariant GEMMs that are selected for `SHAPES` and `REPACKED_MS`."""
    forms = dict.fromkeys(((AWQ,), _layouts(gpu)))
    for dtype, m, (k, n), layouts in itertools.product(("float16", "bfloat16"), REPACKED_MS, SHAPES, forms):
        problem = Problem(m, n, k, 128, dtype, dtype, layouts=layouts, batch_invariant=True)
        yield select.choose(problem, gpu).plan.kernel


def _common(gpu: device.Device) -> Iterator[Kernel]:
    """Yield the kernels of the common problems of each type that the GPU supports."""
    for kind in FAMILIES_OF:
        for problem in kind.common_problems():
            if any(not isinstance(found, str) for found in select.candidates(problem, gpu).values()):
                yield select.choose(problem, gpu).plan.kernel


LOG_SECONDS = 5.0
"""The least time between two lines of progress in a log."""


def run(listed: Sequence[Kernel]) -> int:
    """Compile kernels and print a table of them; return 1 if one uses local memory or has serialized wgmma, else 0.

    An architecture that the compiler does not support is replaced by the nearest supported one.
    """
    local = serialized = 0
    rows = []
    shown = time.monotonic()
    _show_progress(0, len(listed))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for kernel, binary in zip(listed, pool.map(compiler.build, listed), strict=True):
            if binary.path is None:
                raise OSError(f"{cache.VARIABLE}: expected a folder that can be written, got {cache.folder()}")
            resources = binary.resources
            if resources is None:
                raise RuntimeError(f"{kernel.entry}: the compiler reported no resources")
            defines = " ".join(f"{name}={value}" for name, value in kernel.defines if name not in SHARED_CONSTANTS)
            rows.append(
                (
                    kernel.entry,
                    f"sm_{compiler.nearest_target(kernel.arch)}",
                    defines,
                    str(resources.registers),
                    str(resources.shared_bytes),
                    str(resources.local_bytes),
                    "serialized" if resources.serialized else "compiled" if binary.newly_compiled else "cached",
                )
            )
            local += resources.local_bytes > 0
            serialized += resources.serialized
            if sys.stderr.isatty() or len(rows) == len(listed) or time.monotonic() - shown >= LOG_SECONDS:
                shown = time.monotonic()
                _show_progress(len(rows), len(listed))
    print(render(("kernel", "target", "constants", "registers", "shared bytes", "local bytes", ""), rows, left=3))
    print(
        f"{len(rows)} kernels, {local} with local memory, {serialized} with serialized wgmma; cache: {cache.folder()}"
    )
    return 1 if local or serialized else 0


def _show_progress(done: int, total: int) -> None:
    """Print progress to stderr: one line that is updated in a terminal, or a line of a log."""
    if sys.stderr.isatty():
        print(f"\rcompile: {done} of {total} kernels", end="\n" if done == total else "", file=sys.stderr, flush=True)
    else:
        print(f"compile: {done} of {total} kernels", file=sys.stderr, flush=True)
