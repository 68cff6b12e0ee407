# SPDX-License-Identifier: Apache-2.0
"""From a launch plan to machine code and a launch.

NVRTC compiles a kernel to a cubin (or to PTX, for a GPU newer than the target) in the user's cache folder, named by a
digest of everything that went in, so that a second process compiles nothing. Knows nothing of AWQ.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cupy_awq.runtime import disk_cache as cache
from cupy_awq.runtime import sources
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

OPTIONS = ("--std=c++17", "--generate-line-info", "--ptxas-options=-v")
"""Options of every compilation: line numbers cost nothing at run time and let faults and profiles name source lines."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message holds its log, with file and line."""


@dataclass(frozen=True)
class Resources:
    """What the assembler says of a kernel: registers a thread, static shared bytes, bytes of spills and of stack.

    ``serialized``: its wgmma wait for each other, for want of registers or of order.
    """

    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int
    serialized: bool = False


@dataclass(frozen=True)
class Binary:
    """A compiled kernel on disk. ``resources`` is None for PTX, which only the driver assembles."""

    path: Path
    resources: Resources | None
    fresh: bool


def _check(status: Any, what: str) -> None:
    if int(status) != 0:
        raise RuntimeError(f"{what} failed: {status.name}")


@functools.cache
def compiler() -> tuple[tuple[int, int], tuple[int, ...]]:
    """NVRTC's version and the architectures that it knows, in rising order. Raises OSError if it is not there."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise OSError(
            f"NVRTC cannot be loaded ({error}); install nvidia-cuda-nvrtc-cu12>=12.8 and cuda-bindings"
        ) from error
    _check(status, "nvrtcVersion")
    status, archs = nvrtc.nvrtcGetSupportedArchs()
    _check(status, "nvrtcGetSupportedArchs")
    return (major, minor), tuple(sorted(archs))


def target(arch: str) -> str:
    """The compiler's target nearest to ``arch``: itself, or the end of the compiler's range that lies on its side."""
    known = compiler()[1]
    number = int(arch.rstrip("af"))
    if number in known:
        return arch
    return str(known[0] if number < known[0] else max(a for a in known if a < number))


def _compile(kernel: Kernel, arch: str, texts: Mapping[str, str], form: str) -> tuple[bytes, str]:
    """The cubin or PTX of a kernel and the compiler's log."""
    from cuda.bindings import nvrtc

    (source, text), *headers = texts.items()
    status, program = nvrtc.nvrtcCreateProgram(
        text.encode(),
        source.encode(),
        len(headers),
        [body.encode() for _, body in headers],
        [name.encode() for name, _ in headers],
    )
    _check(status, "nvrtcCreateProgram")
    try:
        options = [f"-arch={'sm' if form == 'cubin' else 'compute'}_{arch}", *OPTIONS]
        options += [f"-D{name}={value}" for name, value in kernel.defines]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = (
            _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            .rstrip(b"\0")
            .decode(errors="replace")
        )
        if int(status) != 0:
            raise CompileError(f"{source} does not compile for sm_{arch} with {dict(kernel.defines)}:\n{log.strip()}")
        if form == "cubin":
            return _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log
        return _read(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0"), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(program: Any, size: Any, content: Any) -> bytes:
    status, length = size(program)
    _check(status, size.__name__)
    buffer = bytes(length)
    (status,) = content(program, buffer)
    _check(status, content.__name__)
    return buffer


def _resources(log: str) -> Resources:
    def number(pattern: str) -> int:
        return sum(int(found) for found in re.findall(pattern, log))

    return Resources(
        registers=number(r"Used (\d+) registers"),
        shared_bytes=number(r"(\d+) bytes smem"),
        spill_bytes=number(r"(\d+) bytes spill"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        serialized="wgmma.mma_async instructions are serialized" in log,
    )


def ptx(plan: LaunchPlan) -> str:
    """The PTX that NVRTC emits for a plan's kernel. Needs no GPU."""
    return build(plan.kernel, "ptx").path.read_text(encoding="utf-8")


def build(kernel: Kernel, form: str = "cubin") -> Binary:
    """Compile a kernel to a ``"cubin"`` or to ``"ptx"``, or find it in the cache. Needs no GPU. Thread-safe.

    Raises CompileError, with NVRTC's log, if it does not compile.
    """
    arch = target(kernel.arch)
    texts = sources.closure(kernel.source)
    version, _ = compiler()
    parts = [repr((version, arch, form, OPTIONS, kernel.entry, kernel.defines)), *texts.keys(), *texts.values()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    path = cache.folder() / f"{kernel.entry}-sm{arch}-{digest}.{form}"
    facts = path.with_suffix(".json")
    try:
        resources = Resources(**json.loads(facts.read_text(encoding="utf-8"))) if form == "cubin" else None
        if path.stat().st_size:
            return Binary(path, resources, fresh=False)
    except FileNotFoundError:
        pass
    code, log = _compile(kernel, arch, texts, form)
    resources = _resources(log) if form == "cubin" else None
    cache.write(path, code)
    if resources is not None:
        cache.write(facts, json.dumps(asdict(resources)).encode())
    return Binary(path, resources, fresh=True)


_functions: dict[tuple[int, Kernel, int], Any] = {}
_functions_lock = threading.Lock()


def function(kernel: Kernel, shared_bytes: int = 0) -> Any:
    """The kernel loaded on the current device, once, with room for ``shared_bytes`` of dynamic shared memory."""
    import cupy

    index = cupy.cuda.runtime.getDevice()
    key = index, kernel, shared_bytes
    with _functions_lock:
        if key not in _functions:
            native = cupy.cuda.Device(index).compute_capability
            # A cubin runs on its own architecture alone; PTX runs on all newer ones.
            form = "cubin" if target(kernel.arch).rstrip("a") == native else "ptx"
            raw = cupy.RawModule(path=str(build(kernel, form).path)).get_function(kernel.entry)
            # The driver has one function for all launches of a kernel, whatever shared memory they ask for.
            if shared_bytes > raw.max_dynamic_shared_size_bytes:
                raw.max_dynamic_shared_size_bytes = shared_bytes
            _functions[key] = raw
        return _functions[key]
