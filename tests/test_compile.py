# SPDX-License-Identifier: Apache-2.0
"""Tests of sources, compilation and its cache without a GPU, and of launches with one."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_awq import atomic
from cupy_awq.kernels import select
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime import device, sources
from cupy_awq.runtime import disk_cache as cache
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan
from cupy_awq.tools import compile_all
from tests.conftest import ARCHS, kernels_to_simulate

SCALE = """
#include "factor.cuh"
extern "C" __global__ void scale(float* out, const float* in, int n) {
  int i = blockIdx.x * 32 + threadIdx.x;
  if (i < n) out[i] = FACTOR * half_of(in[i]);
}
"""
FACTOR = "__device__ float half_of(float v) { return v / 2; }\n"
KERNEL = Kernel("scale.cu", "scale", (("FACTOR", 3),), "80")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that takes the place of cuda_src, with one kernel and one header, and an empty cache."""
    (tmp_path / "scale.cu").write_text(SCALE)
    (tmp_path / "factor.cuh").write_text(FACTOR)
    monkeypatch.setattr(sources, "folder", lambda: tmp_path)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each compilation by NVRTC appends the architecture that it compiles for."""
    seen: list[str] = []
    real = compiler._compile

    def counted(kernel: Kernel, arch: str, *rest: object) -> tuple[bytes, str]:
        seen.append(arch)
        return real(kernel, arch, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(compiler, "_compile", counted)
    return seen


def test_closure_follows_includes_once(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text('#include "b.cuh"\n  #  include "ptx/c.cuh"\n#include <d>\n')
    (tmp_path / "b.cuh").write_text('#include "ptx/c.cuh"\n')
    (tmp_path / "ptx").mkdir()
    (tmp_path / "ptx" / "c.cuh").write_text('#include "b.cuh"\n')  # The include cycle is legal because of #pragma once.
    assert list(sources.include_closure("a.cu", tmp_path)) == ["a.cu", "b.cuh", "ptx/c.cuh"]


def test_a_kernel_is_compiled_once(root: Path, compilations: list[str]) -> None:
    first, second = compiler.build(KERNEL), compiler.build(KERNEL)
    assert (first.newly_compiled, second.newly_compiled, compilations) == (True, False, ["80"])
    assert first.path == second.path
    assert first.path is not None
    assert first.path.read_bytes() == first.code == second.code
    assert first.code[:4] == b"\x7fELF"
    assert first.resources == second.resources
    assert first.resources is not None
    assert first.resources.registers > 0
    assert first.resources.local_bytes == 0


def test_resources_are_parsed_from_the_log_of_ptxas() -> None:
    used = "Used 168 registers, 16 bytes smem\n    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads"
    warned = "ptxas warning : Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
    assert compiler._resources(used) == compiler.Resources(168, 16, 8)
    assert compiler._resources(f"{warned} insufficient register resources\n{used}").serialized


@pytest.mark.parametrize("change", ["header", "source", "define", "arch", "form"])
def test_every_input_of_a_compilation_is_part_of_the_cache_key(
    root: Path, compilations: list[str], change: str
) -> None:
    compiler.build(KERNEL)
    kernel, form = KERNEL, "cubin"
    if change == "header":
        (root / "factor.cuh").write_text(FACTOR.replace("/ 2", "/ 4"))
    elif change == "source":
        (root / "scale.cu").write_text(SCALE + "// \n")
    elif change == "define":
        kernel = Kernel("scale.cu", "scale", (("FACTOR", 5),), "80")
    elif change == "arch":
        kernel = Kernel("scale.cu", "scale", KERNEL.defines, "86")
    else:
        form = "ptx"
    assert compiler.build(kernel, form).newly_compiled
    assert len(compilations) == 2


def _damage_entry(text: str) -> Callable[[Path], object]:
    return lambda path: path.with_suffix(".json").write_text(text)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "code is empty": lambda path: path.write_bytes(b""),
    "code is lost": Path.unlink,
    "code is truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "code is garbage": lambda path: path.write_bytes(b"\x7fELF" + os.urandom(1000)),
    "one bit of the code is flipped": lambda path: path.write_bytes(
        path.read_bytes()[:500] + bytes([path.read_bytes()[500] ^ 1]) + path.read_bytes()[501:]
    ),
    "code of another kernel": lambda path: path.write_bytes(
        compiler.build(Kernel("scale.cu", "scale", (("FACTOR", 7),), "80")).code
    ),
    "entry is lost": lambda path: path.with_suffix(".json").unlink(),
    "entry is empty": _damage_entry(""),
    "entry is truncated": lambda path: _damage_entry(path.with_suffix(".json").read_text()[:-9])(path),
    "entry is a list": _damage_entry("[]"),
    "entry is null": _damage_entry("null"),
    "entry has an unknown key": lambda path: _damage_entry(
        path.with_suffix(".json").read_text().replace("registers", "cisterns")
    )(path),
    "entry has resources of another type": _damage_entry('{"resources": [3], "sha256": ""}'),
    "entry has another digest": lambda path: _damage_entry(
        path.with_suffix(".json").read_text().replace('"sha256": "', '"sha256": "0')
    )(path),
    "entry has other resources": lambda path: _damage_entry(
        path.with_suffix(".json").read_text().replace('"local_bytes": 0', '"local_bytes": 8')
    )(path),
    "entry is deeply nested": _damage_entry("[" * 100_000),
    "entry is binary": lambda path: path.with_suffix(".json").write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_cache_entry_is_compiled_again_and_replaced(
    root: Path, compilations: list[str], damage: Callable[[Path], object]
) -> None:
    first = compiler.build(KERNEL)
    assert first.path is not None
    damage(first.path)
    compilations.clear()
    assert compiler.build(KERNEL).code == first.code
    assert len(compilations) == 1
    again = compiler.build(KERNEL)
    assert (again.code, again.resources, again.newly_compiled) == (first.code, first.resources, False)


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_cache_files_follow_the_umask(root: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        compiler.build(KERNEL)
    finally:
        os.umask(before)
    files = list((root / "cache").iterdir())
    assert len(files) == 2
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}
    assert (root / "cache").stat().st_mode & 0o777 == 0o777 & ~umask


def _use_file_as_folder(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder.write_text("")


def _fill_disk(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every write fail after half of its bytes, as on a full disk."""

    def limited(descriptor: int, mode: str) -> Any:
        file = os.fdopen(descriptor, mode)
        if "w" in mode:
            write = file.write

            class Full:
                def __enter__(self) -> Full:
                    return self

                def __exit__(self, *_: object) -> None:
                    file.close()

                def write(self, content: bytes) -> None:
                    write(content[: len(content) // 2])
                    raise OSError(errno.ENOSPC, "No space left on device")

            return Full()
        return file

    monkeypatch.setattr(atomic, "open", limited, raising=False)


def _deny_reads(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every access to the cache fail, as in another user's folder with mode 0700."""

    def denied(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for name in ("open", "read_bytes", "mkdir"):
        monkeypatch.setattr(Path, name, denied)


@pytest.mark.parametrize("spoil", [_use_file_as_folder, _fill_disk, _deny_reads])
def test_a_cache_folder_that_cannot_be_used_costs_one_warning(
    root: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path, Any], None]
) -> None:
    monkeypatch.setattr(cache, "_has_warned", False)
    monkeypatch.setattr(compiler, "_unsaved", {})
    texts = sources.include_closure("scale.cu")
    monkeypatch.setattr(sources, "include_closure", lambda source: texts)
    spoil(root / "cache", monkeypatch)
    other = Kernel("scale.cu", "scale", (("FACTOR", 5),), "80")
    with pytest.warns(RuntimeWarning, match=f"{cache.VARIABLE}: expected a folder that can be read") as caught:
        first, second, third = compiler.build(KERNEL), compiler.build(KERNEL), compiler.build(other)
    assert len(caught) == 1
    assert first.code[:4] == third.code[:4] == b"\x7fELF"
    assert (first.path, second.code, second.resources) == (None, first.code, first.resources)
    assert [binary.newly_compiled for binary in (first, second, third)] == [True, False, True]
    assert len(compilations) == 2
    monkeypatch.undo()
    assert not (root / "cache").is_dir() or not list((root / "cache").iterdir())


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs root to become another user")
def test_a_cache_that_root_has_filled_is_read_by_another_user(tmp_path: Path) -> None:
    """Kernels that root has compiled are loaded by another user without compiling again, even if that user has no home.

    Container images are often built as root and run as another user.
    """
    script = (
        "import os, sys, warnings\n"
        "from cupy_awq.kernels import select\n"
        "from cupy_awq.kernels.gemm.problem import Problem\n"
        "from cupy_awq.runtime import compile, device, disk_cache, sources\n"
        "kernel = select.choose(Problem(1, 256, 256, 128), device.nominal(80)).plan.kernel\n"
        "warnings.simplefilter('always')\n"
        "os.umask(0o022)\n"
        # Read sources and load NVRTC as root, as the other user may not be allowed to read the installation.
        "texts = sources.include_closure(kernel.source)\n"
        "sources.include_closure = lambda source: texts\n"
        "real, results = compile._compile, []\n"
        "compile._compile = lambda *a: results[0] if results else results.append(real(*a)) or results[0]\n"
        "folder = os.environ[disk_cache.VARIABLE]\n"
        "os.environ[disk_cache.VARIABLE] = f'{folder}-{os.getpid()}'\n"
        "compile.build(kernel)\n"
        "os.environ[disk_cache.VARIABLE] = folder\n"
        "if len(sys.argv) > 1: os.setuid(54321)\n"
        "if len(sys.argv) > 2: os.environ.pop('CUPY_AWQ_CACHE_DIR'); os.environ.pop('HOME', None)\n"
        "print(compile.build(kernel).newly_compiled)\n"
    )
    folder = tmp_path / "cache"
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.getuid() and parent.is_relative_to(tempfile.gettempdir()):
            parent.chmod(parent.stat().st_mode | 0o055)
    tmp_path.chmod(0o755)
    environment = {**os.environ, cache.VARIABLE: str(folder)}

    def run(*arguments: str) -> tuple[str, int]:
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip(), done.stderr.count("RuntimeWarning")

    assert run() == ("True", 0)
    assert run("other") == ("False", 0)
    for path in folder.iterdir():
        path.chmod(0o600)  # Older versions wrote files that only their owner may read; they must be replaced.
    assert run("other") == ("True", 1)
    assert run("other", "homeless") == ("True", 1)


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    script = (
        "from cupy_awq.kernels import select\n"
        "from cupy_awq.runtime import compile, device\n"
        "from cupy_awq.kernels.gemm.problem import Problem\n"
        "from cuda.bindings import nvrtc\n"
        "calls = []\n"
        "real = nvrtc.nvrtcCompileProgram\n"
        "nvrtc.nvrtcCompileProgram = lambda *a: calls.append(a) or real(*a)\n"
        "plan = select.choose(Problem(1, 256, 256, 128), device.nominal(80)).plan\n"
        "compile.build(plan.kernel)\n"
        "print(len(calls))\n"
    )
    environment = {**os.environ, cache.VARIABLE: str(tmp_path)}
    counts = [
        int(subprocess.check_output([sys.executable, "-c", script], env=environment, text=True)) for _ in range(2)
    ]
    assert counts == [1, 0]


def test_threads_may_compile_the_same_kernel(root: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(compiler.build, [KERNEL] * 4))
    assert len({binary.code for binary in found}) == 1
    assert sorted(path.suffix for path in (root / "cache").iterdir()) == [".cubin", ".json"]


def test_a_compile_error_shows_file_and_line_of_the_header(root: Path) -> None:
    (root / "factor.cuh").write_text("\n\n__device__ int broken() { return missing; }\n")
    with pytest.raises(compiler.CompileError, match=r"factor\.cuh\(3\): error"):
        compiler.build(KERNEL)
    assert not (root / "cache").exists()


def test_a_target_outside_of_the_compilers_range_is_its_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "nvrtc_version_and_archs", lambda: ((13, 0), (75, 80, 90, 120)))
    assert [compiler.nearest_target(arch) for arch in ("60", "75", "86", "90a", "121")] == [
        "75",
        "75",
        "80",
        "90a",
        "120",
    ]


def test_ptx_is_the_text_for_the_plan(root: Path) -> None:
    text = compiler.ptx(LaunchPlan(KERNEL, (1, 1, 1), (32, 1, 1), ("out", "in", np.int32(3))))
    assert ".entry scale(" in text
    assert ".target sm_80" in text
    assert ".loc" in text


@pytest.mark.parametrize("arch", [60, 75, 80, 90])
def test_all_kernels_of_an_arch_are_listed_for_compilation(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compile` compiles every kernel that selection may choose for a common layer: none is left to the first call.

    Only one shape of a layer is tried here.
    """
    monkeypatch.setattr(compile_all, "SHAPES", ((12288, 4096),))
    monkeypatch.setattr(compile_all, "REPACKED_MS", (1, 16, 1024))
    listed, invariant = (set(compile_all.kernels(arch, flag)) for flag in (False, True))
    assert listed < invariant
    facts = device.nominal(arch)
    for m, repacked in itertools.product((1, 16, 1024), {False, arch == 90}):
        problem = Problem(m, 4096, 12288, 128, layouts=(AWQ, FRAGMENTS)[: 1 + repacked], batch_invariant=True)
        assert select.choose(problem, facts).plan.kernel in invariant
    for m in (1, 3, 12, 500):
        for shape in ((4096, 4096), (1536, 576)):
            problem = Problem(m, *shape, 128 if shape[0] == 4096 else 64)
            assert select.choose(problem, facts).plan.kernel in listed


@pytest.mark.slow
def test_a_run_of_all_tests_wants_every_kernel_simulated() -> None:
    wanted = {(kernel.entry, kernel.arch) for arch in ARCHS for kernel in compile_all.kernels(arch, True)}
    assert kernels_to_simulate() == wanted


def test_compile_fails_if_the_cache_cannot_be_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "cache").write_text("")
    monkeypatch.setattr(cache, "_has_warned", True)
    monkeypatch.setattr(compiler, "_unsaved", {})
    with pytest.raises(OSError, match=f"{cache.VARIABLE}: expected a folder that can be written, got"):
        compile_all.run([KERNEL])


@pytest.mark.parametrize(("index", "code"), [("i", 0), ("out[i] % 32", 1)])
def test_compile_fails_on_local_memory(root: Path, capsys: pytest.CaptureFixture[str], index: str, code: int) -> None:
    loops = "for (int i = 0; i < 32; ++i) x[INDEX] += i; for (int i = 0; i < 32; ++i) out[i] += x[i];"
    (root / "scale.cu").write_text(
        f'extern "C" __global__ void scale(unsigned* out) {{ unsigned x[32] = {{}}; {loops} }}\n'
    )
    kernel = Kernel("scale.cu", "scale", (("INDEX", index),), "80")
    assert compile_all.run([kernel]) == code
    output = capsys.readouterr()
    assert f"1 kernels, {code} with local memory" in output.out
    assert output.err == "compile: 0 of 1 kernels\ncompile: 1 of 1 kernels\n"


def test_compile_reports_progress_in_a_log(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_all, "LOG_SECONDS", 0.0)
    compile_all.run([KERNEL] * 3)
    assert capsys.readouterr().err == "".join(f"compile: {i} of 3 kernels\n" for i in range(4))


def test_compile_all_refuses_an_invalid_arch() -> None:
    for arch in ("5", "sm80", "90b", "50"):
        with pytest.raises(ValueError, match="arch: expected"):
            compile_all.kernels(arch)


@pytest.mark.gpu
def test_launch_passes_arguments_and_honours_the_stream(root: Path) -> None:
    import cupy

    from cupy_awq.runtime.launcher import launch

    native = device.current().target
    kernel = Kernel("scale.cu", "scale", (("FACTOR", 3),), native)
    plan = LaunchPlan(kernel, (4, 1, 1), (32, 1, 1), ("out", "in", np.int32(100)))
    x, y = cupy.arange(128, dtype=cupy.float32), cupy.zeros(128, cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        launch(plan, {"out": y, "in": x}, cupy.cuda.runtime.getDevice())
    stream.synchronize()
    np.testing.assert_array_equal(y.get(), np.where(np.arange(128) < 100, 1.5 * np.arange(128), 0))


@pytest.mark.gpu
def test_an_older_path_runs_on_a_newer_gpu(root: Path) -> None:
    import cupy

    from cupy_awq.runtime.launcher import launch

    plan = LaunchPlan(
        Kernel("scale.cu", "scale", (("FACTOR", 3),), "75"), (1, 1, 1), (32, 1, 1), ("out", "in", np.int32(32))
    )
    x, y = cupy.ones(32, cupy.float32), cupy.zeros(32, cupy.float32)
    launch(plan, {"out": y, "in": x}, cupy.cuda.runtime.getDevice())
    assert (y.get() == 1.5).all()


@pytest.mark.gpu
def test_a_refused_launch_names_the_kernel(root: Path) -> None:
    from cupy_awq.runtime.launcher import Launcher

    kernel = Kernel("scale.cu", "scale", KERNEL.defines, device.current().target)
    plan = LaunchPlan(kernel, (1, 1, 1), (2048, 1, 1), ("out", "in", np.int32(1)))
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx: expected success, got "):
        Launcher(plan)((0, 0), 0)


def test_a_plan_refuses_arguments_that_a_launch_would_not_take() -> None:
    for arguments in (("out", np.int32(3), "in"), ("out", "in", 3)):
        with pytest.raises(ValueError, match="arguments: expected buffers, then tensor maps, then scalars, got "):
            LaunchPlan(KERNEL, (1, 1, 1), (32, 1, 1), arguments)
