# SPDX-License-Identifier: Apache-2.0
"""The command ``python -m cupy_awq compile``: compile every kernel for given architectures, without a GPU.

It fills the cache of a container image, prints registers, shared memory and spills of each kernel, and fails if a
kernel spills or the assembler serializes its wgmma.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from cupy_awq.kernels import conv2d_int8, conv2d_problem, int8_problem, llm, quantize_fp8, quantize_rows, select
from cupy_awq.kernels.convert import VALUES, Conversion
from cupy_awq.kernels.dequantize import Dequantization
from cupy_awq.kernels.gemm_sm90 import MAX_FUSED_ROWS, layout
from cupy_awq.kernels.problem import Fusion, Problem
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device
from cupy_awq.runtime import disk_cache as cache
from cupy_awq.runtime.launch_plan import Kernel
from cupy_awq.tools.table import render

SHAPES = ((4096, 4096), (4096, 12288), (12288, 4096), (8192, 8192), (8192, 28672), (28672, 8192))
"""(K, N) of the linear layers of 8B and 70B models."""
HOPPER_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)


def kernels(arch: int) -> list[Kernel]:
    """Return the kernels of common layers, each once: every dtype, packed zeros, group sizes 128 and 32.

    All configurations are included, except those of the Hopper families: each of them is a kernel of its own, so only
    the choices for common layers are.
    """
    facts = device.nominal(arch)
    found = [*_raw(facts), *_quantized(facts), *llm.kernels(facts)]
    if arch == 90:
        found += _hopper(facts)
    return list(dict.fromkeys(found))


def _raw(facts: device.Device) -> Iterator[Kernel]:
    for entry in VALUES:
        yield select.choose(Conversion(entry, 1, True), facts).plan.kernel
    k, n = SHAPES[0]
    for dtype in ("float16", "bfloat16", "float32"):
        scales = "bfloat16" if dtype == "bfloat16" else "float16"
        weight = Dequantization(k, n, 128, scales, "packed", dtype, True, (n // 8, n, n // 8, n))
        yield select.choose(weight, facts).plan.kernel
        for group_size, m, constant in itertools.product((128, 32), (1, 2, 4, 8, 16, 64), (False, True)):
            problem = Problem(m, n, k, group_size, dtype, scales, constant=constant)
            candidates = select.candidates(problem, facts)
            if not isinstance(candidates["gemm_sm80"], str):
                del candidates["gemm_sm75"]  # legal, but chosen only by name
            for some in candidates.values():
                if not isinstance(some, str):
                    yield from (c.family.plan(c.config, problem, facts).kernel for c in some)


def _hopper(facts: device.Device) -> Iterator[Kernel]:
    for dtype, m, (k, n) in itertools.product(("float16", "bfloat16"), HOPPER_ROWS, SHAPES):
        problem = Problem(m, n, k, 128, dtype, dtype, repacked=True)
        yield layout(problem).plan(facts).kernel
        yield select.choose(problem, facts, "gemm_sm90").plan.kernel
        if m <= MAX_FUSED_ROWS:
            fused = replace(problem, fusion=Fusion("add_to_stream" if k >= n else "rms_norm_x"))
            if n > 3 * k:
                fused = replace(fused, gated=True, activation="silu")
            yield select.choose(fused, facts).plan.kernel
        if m >= 256:
            large = select.FAMILIES["gemm_sm90_large"]
            yield from (large.plan(config, problem, facts).kernel for config in large.configs(problem, facts))


def _quantized(facts: device.Device) -> Iterator[Kernel]:
    """Yield the kernels of common 8-bit products, quantizations and convolutions, where the GPU has them."""
    for module in (quantize_rows, quantize_fp8, int8_problem, conv2d_problem, conv2d_int8):
        for problem in module.common_problems():
            if any(not isinstance(found, str) for found in select.candidates(problem, facts).values()):
                yield select.choose(problem, facts).plan.kernel


def run(archs: list[str]) -> int:
    """Compile every kernel for each of ``archs`` ("75", "90a"; an arch below the compiler's range becomes its lowest).

    Returns:
        1 if a kernel spills or has its wgmma serialized, else 0.

    Raises:
        ValueError: an arch is not a compute capability.
    """
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}a?", arch) or int(arch.rstrip("a")) < min(device.NOMINAL):
            raise ValueError(f"arch: expected a compute capability such as 75 or 90a, got {arch!r}")
    spills = serialized = 0
    rows = []
    for arch in archs:
        some = kernels(int(arch.rstrip("a")))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            binaries = pool.map(compiler.build, some)
        for kernel, binary in zip(some, binaries, strict=True):
            resources = binary.resources
            if resources is None:
                raise RuntimeError(f"{kernel.entry}: the compiler reported no resources")
            defines = " ".join(f"{name}={value}" for name, value in kernel.defines if name not in QUIET)
            rows.append(
                (
                    kernel.entry,
                    f"sm_{compiler.nearest_target(kernel.arch)}",
                    defines,
                    str(resources.registers),
                    str(resources.shared_bytes),
                    str(resources.spill_bytes),
                    "serialized" if resources.serialized else "compiled" if binary.newly_compiled else "cached",
                )
            )
            spills += resources.spill_bytes > 0
            serialized += resources.serialized
            if sys.stderr.isatty():
                print(f"\r{len(rows)} kernels", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(render(("kernel", "target", "constants", "registers", "shared bytes", "spill bytes", ""), rows, left=3))
    print(f"{len(rows)} kernels, {spills} with spills, {serialized} with serialized wgmma; cache: {cache.folder()}")
    return 1 if spills or serialized else 0


QUIET = ("ACTIVATION", "GATED", "HAS_BIAS", "BIAS", "HAS_RESIDUAL")
"""The constants that the table leaves out, as they are the same in all kernels."""
