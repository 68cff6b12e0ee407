# SPDX-License-Identifier: Apache-2.0
"""Compilation of kernels with NVRTC into the disk cache, and loading of the binaries.

A kernel is compiled to a cubin, or to PTX for a GPU that is newer than the kernel's target. The name of the file in the
cache contains a digest of the sources, the constants, the options and NVRTC's version, so that later processes find the
binary and compile nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cupy_awq.runtime import disk_cache, placement, sources
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan

OPTIONS = ("--std=c++17", "--generate-line-info", "--ptxas-options=-v")
"""The NVRTC options of every compilation; the line info, for profilers and compute-sanitizer, costs no run time."""


class CompileError(RuntimeError):
    """A compilation error of NVRTC; the message contains the compilation log with files and lines."""


@dataclass(frozen=True)
class Resources:
    """The resource usage of a kernel, as reported by ptxas.

    Attributes:
        registers: number of registers per thread.
        shared_bytes: static shared memory per CTA, in bytes.
        local_bytes: local memory per thread, in bytes: spilled registers and arrays that are indexed at run time.
        serialized: whether ptxas serialized the wgmma instructions, which makes the kernel slow.
    """

    registers: int
    shared_bytes: int
    local_bytes: int
    serialized: bool = False


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes:
        code: content of the cubin, or the PTX.
        path: path of the file in the disk cache, or None if the cache folder is not writable.
        resources: resource usage, or None for PTX, which the driver compiles when it loads the kernel.
        newly_compiled: whether this call compiled the kernel; False if the kernel was in the cache.
    """

    code: bytes
    path: Path | None
    resources: Resources | None
    newly_compiled: bool


@functools.cache
def nvrtc_version_and_archs() -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return NVRTC's version (major, minor) and its supported architectures in ascending order.

    Raises:
        OSError: NVRTC is not installed or cannot be loaded.
    """
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise OSError(
            f"NVRTC: expected a loadable library, got {error}; install nvidia-cuda-nvrtc-cu12>=12.8 and cuda-bindings"
        ) from error
    placement.check_status(status, "nvrtcVersion")
    status, archs = nvrtc.nvrtcGetSupportedArchs()
    placement.check_status(status, "nvrtcGetSupportedArchs")
    return (major, minor), tuple(sorted(archs))


def nearest_target(arch: str) -> str:
    """Return ``arch`` if NVRTC supports it, else the next older supported one, or the oldest if all are newer."""
    known = nvrtc_version_and_archs()[1]
    number = int(arch.rstrip("af"))
    if number in known:
        return arch
    return str(known[0] if number < known[0] else max(a for a in known if a < number))


def _compile(kernel: Kernel, arch: str, texts: Mapping[str, str], form: str) -> tuple[bytes, str]:
    """Return the cubin or PTX (``form``) of a kernel, and NVRTC's log; raise CompileError if compilation fails."""
    from cuda.bindings import nvrtc

    (source, text), *headers = texts.items()
    status, program = nvrtc.nvrtcCreateProgram(
        text.encode(),
        source.encode(),
        len(headers),
        [body.encode() for _, body in headers],
        [name.encode() for name, _ in headers],
    )
    placement.check_status(status, "nvrtcCreateProgram")
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
            raise CompileError(f"{source}: does not compile for sm_{arch} with {dict(kernel.defines)}:\n{log.strip()}")
        if form == "cubin":
            return _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log
        return _read(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0"), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(program: Any, size: Any, content: Any) -> bytes:
    """Return an output of an NVRTC program, for which ``size`` and ``content`` are the NVRTC functions."""
    status, length = size(program)
    placement.check_status(status, size.__name__)
    buffer = bytes(length)
    (status,) = content(program, buffer)
    placement.check_status(status, content.__name__)
    return buffer


def _resources(log: str) -> Resources:
    """Parse the resource usage that ptxas reports in a compilation log."""

    def number(pattern: str) -> int:
        return sum(int(found) for found in re.findall(pattern, log))

    return Resources(
        registers=number(r"Used (\d+) registers"),
        shared_bytes=number(r"(\d+) bytes smem"),
        local_bytes=number(r"(\d+) bytes stack frame"),
        serialized="wgmma.mma_async instructions are serialized" in log,
    )


def ptx(plan: LaunchPlan) -> str:
    """Return the PTX of the kernel of a launch plan; no GPU is needed."""
    return build(plan.kernel, "ptx").code.decode()


def build(kernel: Kernel, form: str = "cubin") -> Binary:
    """Return a compiled kernel, from the disk cache if possible; ``form`` is "cubin" or "ptx".

    A damaged cache entry is replaced by a newly compiled one. If the cache folder is not writable, the function warns
    once per process and keeps the kernels in memory. No GPU is needed. Threads and processes may build the same kernel
    concurrently.

    Raises:
        CompileError: the kernel does not compile.
        OSError: NVRTC is missing.
    """
    arch = nearest_target(kernel.arch)
    texts = sources.include_closure(kernel.source)
    version, _ = nvrtc_version_and_archs()
    parts = [repr((version, arch, form, OPTIONS, kernel.entry, kernel.defines)), *texts.keys(), *texts.values()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    path = disk_cache.folder() / f"{kernel.entry}-sm{arch}-{digest}.{form}"
    if path in _unsaved:
        return _unsaved[path]
    if found := _find(path):
        return found
    code, log = _compile(kernel, arch, texts, form)
    resources = _resources(log) if form == "cubin" else None
    # Write the JSON entry last: code without an entry that has its digest is ignored, so half-written files do no harm.
    if disk_cache.try_write(path, code) and disk_cache.try_write(path.with_suffix(".json"), _entry(code, resources)):
        return Binary(code, path, resources, newly_compiled=True)
    _unsaved[path] = Binary(code, None, resources, newly_compiled=False)
    return Binary(code, None, resources, newly_compiled=True)


_unsaved: dict[Path, Binary] = {}
"""The kernels that could not be written to the disk cache, by path in the cache."""


def _entry(code: bytes, resources: Resources | None) -> bytes:
    """Return the JSON entry of a kernel in the disk cache: the resources, and a digest of code and resources."""
    digest = hashlib.sha256(code + repr(resources).encode()).hexdigest()
    return json.dumps({"sha256": digest, "resources": resources and asdict(resources)}).encode()


def _find(path: Path) -> Binary | None:
    """Return the kernel at ``path`` in the disk cache, or None if it is missing or damaged."""
    entry, code = disk_cache.read(path.with_suffix(".json")), disk_cache.read(path)
    if not entry or not code:
        return None
    try:
        found = json.loads(entry)["resources"]
        resources = None if found is None else Resources(**found)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return Binary(code, path, resources, newly_compiled=False) if entry == _entry(code, resources) else None


_functions: dict[tuple[int, Kernel], tuple[Any, int]] = {}
"""The loaded function and its maximum dynamic shared memory in bytes, by (device ordinal, kernel)."""
_locks: dict[tuple[int, Kernel], threading.Lock] = {}
"""A lock per key of `_functions`: threads with other kernels need not wait for a compilation, which takes seconds."""


def _load(binary: Binary, entry: str) -> Any:
    """Return the function ``entry`` of a compiled kernel as a CuPy function on the current device."""
    import cupy

    if binary.path is not None:
        try:
            # Each call of `get_function` makes a new object, so the caller keeps the function.
            return cupy.RawModule(path=str(binary.path)).get_function(entry).kernel
        except (UnicodeEncodeError, RuntimeError) as error:
            # The driver does not find the file if its name is not text, or if another process has cleared the cache.
            if isinstance(error, RuntimeError) and not str(error).startswith("CUDA_ERROR_FILE_NOT_FOUND"):
                raise
    # `cupy.RawModule` takes binaries only as files. It would compile the source again, with -ftz=true, which flushes
    # subnormal numbers, and write the result to CuPy's own cache.
    module = cupy.cuda.Module()
    module.load(binary.code)
    return module.get_function(entry)


def load_function(kernel: Kernel, shared_bytes: int = 0) -> Any:
    """Return the kernel as a CuPy function on the current device; the first call loads the kernel.

    The function's maximum dynamic shared memory is at least ``shared_bytes``. Raises MemoryError if the memory of the
    GPU is exhausted.
    """
    import cupy
    from cuda.bindings import driver

    index = cupy.cuda.runtime.getDevice()
    key = index, kernel
    with _locks.setdefault(key, threading.Lock()):
        if key not in _functions:
            native = cupy.cuda.Device(index).compute_capability
            # A cubin is used only on the architecture for which it was compiled; PTX also runs on newer architectures,
            # except that of sm_90a, which `device.of` refuses there.
            form = "cubin" if nearest_target(kernel.arch).rstrip("a") == native else "ptx"
            binary = build(kernel, form)
            with placement.use_device(index):
                _functions[key] = _load(binary, kernel.entry), 0
        function, limit = _functions[key]
        # Never lower the maximum, because all launch plans of a kernel share the function.
        if shared_bytes > limit:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuFuncSetAttribute(driver.CUfunction(function.ptr), attribute, shared_bytes)
            placement.check_status(status, "cuFuncSetAttribute")
            _functions[key] = function, shared_bytes
        return function


def load_functions(kernels: Collection[Kernel], progress: Callable[[int, int], None]) -> None:
    """Load kernels on the current device, and compile those that are missing, on all cores.

    ``progress`` is a callback (number of loaded kernels, number of all).
    """
    import cupy

    index = cupy.cuda.runtime.getDevice()

    def load(kernel: Kernel) -> None:
        with placement.use_device(index):
            load_function(kernel)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for count, _ in enumerate(pool.map(load, kernels), 1):
            progress(count, len(kernels))
