# SPDX-License-Identifier: Apache-2.0
"""The selection of tests, their distribution over processes, and the count of simulated kernels.

Tests that need a GPU, a platform or a module are deselected where it is missing, not skipped, because a skip reads like
a result.
"""

from __future__ import annotations

import os

# Set before NumPy loads: BLAS threads cost more than they gain on matrices this small, and the workers fill the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import functools
import gc
import signal
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from cupy_awq import llm
from cupy_awq.kernels import select, tuned
from cupy_awq.llm import LanguageModel
from cupy_awq.runtime import disk_cache
from cupy_awq.runtime.device import forced_arch
from cupy_awq.tools.table import render
from tests import backends, llm_models, simt

# The first example of a test may take long, as it compiles a kernel.
hypothesis.settings.register_profile("cupy_awq", deadline=None)
hypothesis.settings.load_profile("cupy_awq")

collect_ignore = ["examples", "peers"]
"""The scripts that pytest does not collect: examples, which `test_examples` runs, and comparisons with other libraries.
"""

MAX_WORKERS = 8
"""The largest number of worker processes. Each keeps about 0.5 GB of kernels that the simulator has translated."""

ARCHS = (60, 75, 80, 90)
"""The compute capabilities, one for each path of the kernels: plain CUDA, sm_75, sm_80 and sm_90a."""

NOT_SLOW, NOT_REPEATED, EVERYTHING = "not (slow or repetition)", "slow or not repetition", "slow or not slow"
"""The values of the option -m by default, for `.ci/run --all`, and for all tests."""

MOST_CASES = 2
"""The number of cases of a simulated test that run by default, if its architecture paths do not need more."""

SIMULATED = {"backend", "landing"}
"""The names of test parameters by which a test runs kernels on the simulator, such as "latest" or "earliest"."""

launches: Counter[tuple[str, str]] = Counter()
"""The number of simulated launches by (kernel, compiler target), summed over the worker processes."""

deselected: Counter[str] = Counter()
"""The number of deselected tests by reason, the same in every worker."""


@pytest.fixture
def tuned_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder, in an empty cache, for the user's tables of tuned configurations."""
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path))
    forget_tuned()
    yield tmp_path / "tuned"
    forget_tuned()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small model with the architecture of Qwen3 and random 4-bit weights."""
    return llm_models.folder(tmp_path_factory.mktemp("model"), llm_models.QWEN3)


@pytest.fixture(scope="module")
def model(path: Path) -> LanguageModel:
    """Return the model of the fixture `path`, loaded on the CPU."""
    return llm.load(path, device="cpu")


def forget_tuned() -> None:
    """Forget the tables of tuned configurations and the choices made by them, so that files are read again."""
    tuned._tables.cache_clear()
    select._choose.cache_clear()


@functools.cache
def gpu() -> tuple[str, str]:
    """Return the name and the compute capability ("90") of the current GPU, or ("none", "") without one."""
    try:
        import cupy

        device = cupy.cuda.Device()
        return cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode(), device.compute_capability
    except Exception:  # CuPy is missing, or raises one of several types of errors because there is no driver.
        return "none", ""


def names_tests(config: pytest.Config) -> bool:
    """Return whether the command names files or tests, or only lists tests."""
    return bool(config.args != config.getini("testpaths") or config.option.keyword or config.option.collectonly)


def is_whole_run(config: pytest.Config) -> bool:
    """Return whether the command selects all tests, except perhaps slow ones, so that it must simulate all kernels."""
    return not names_tests(config) and config.option.markexpr in (NOT_SLOW, NOT_REPEATED, EVERYTHING, "")


def is_worker(config: pytest.Config) -> bool:
    """Return whether this process is a worker of pytest-xdist: another process prints the report."""
    return hasattr(config, "workerinput")


def pytest_report_header(config: pytest.Config) -> list[str]:
    name, capability = gpu()
    lines = [f"GPU: {name} (sm_{capability})" if capability else "GPU: none, so tests marked gpu are deselected"]
    if config.getoption("markexpr") == NOT_SLOW:
        lines.append(f'slow tests and repetitions are deselected; run all with: python -m pytest -m "{EVERYTHING}"')
    return lines


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of worker processes for ``-n auto``; 0 runs the tests in this process.

    Tests share one GPU, and a few selected tests end before workers have started.
    """
    _, capability = gpu()
    return 0 if capability or names_tests(config) else min(os.cpu_count() or 1, MAX_WORKERS)


def pytest_configure(config: pytest.Config) -> None:
    """Choose how much to simulate, run a named test even if it is marked slow, and let processes be interrupted."""
    if config.option.markexpr == NOT_SLOW and any("::" in argument for argument in config.args):
        config.option.markexpr = ""
    backends.is_complete = bool(gpu()[1]) or config.option.markexpr != NOT_SLOW
    # Jobs in the background of a shell ignore Ctrl-C, and so would the processes that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def mark_repetitions(items: Sequence[pytest.Item]) -> None:
    """Mark each simulated case of a test as a repetition if other cases have all of its parameter values.

    A sixth of these cases is marked slow instead. The remaining ones cover every value of every parameter, though not
    every combination; a parameter ``entry`` or ``layout`` names kernels, each of which runs on every path. A test that
    draws its problem runs once per architecture, with copies that land either late or early. Cases are visited in an
    arbitrary but fixed order, so that values of one parameter meet different values of the others; those that are
    marked slow come last, so that the others cover all values that they can.

    Of the remaining cases of a test, those after the first `MOST_CASES` are marked slow too, except the first one on
    each path, of each ``entry`` or ``layout``, and of each value of `SIMULATED`.
    """
    covered: set[tuple[str, str, str]] = set()
    kept: Counter[str] = Counter()
    for item in sorted(
        items, key=lambda item: (bool(item.get_closest_marker("slow")), zlib.crc32(item.nodeid.encode()))
    ):
        parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        if item.get_closest_marker("gpu") or not SIMULATED & set(parameters):
            continue
        function = item.nodeid.partition("[")[0]
        draws = hasattr(getattr(item, "function", None), "hypothesis")
        named = {name: value for name, value in parameters.items() if not (draws and name in SIMULATED)}
        values = {(function, "", ""), *((function, name, repr(value)) for name, value in named.items())}
        arch = parameters.get("arch", 80)
        paths = {(function, f"arch of {named.get('entry', named.get('layout'))}", repr(arch))}
        paths |= {(function, name, repr(named[name])) for name in SIMULATED & set(named)}
        if values | paths <= covered:
            item.add_marker(pytest.mark.slow if zlib.crc32(item.nodeid.encode()) % 6 == 0 else pytest.mark.repetition)
        elif kept[function] >= MOST_CASES and paths <= covered:
            item.add_marker(pytest.mark.slow)
        else:
            kept[function] += 1
        covered |= values | paths


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_repetitions(items)
    _, capability = gpu()
    is_hopper = capability == "90" and forced_arch() in (None, 90)

    def can_run(item: pytest.Item) -> bool:
        if any(mark.args[0] for mark in item.iter_markers("skipif")):
            return False
        if item.get_closest_marker("sm90"):
            return is_hopper
        return bool(capability) or not item.get_closest_marker("gpu")

    unable = [item for item in items if not can_run(item)]
    if unable:
        config.hook.pytest_deselected(items=unable)
        items[:] = [item for item in items if can_run(item)]


def pytest_collection_finish() -> None:
    """Keep the collector of cyclic garbage from searching modules and tests, which live as long as the process."""
    gc.freeze()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        reasons = [name for name in ("gpu", "slow", "repetition") if item.get_closest_marker(name)]
        deselected[reasons[0] if reasons else "other"] += 1


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Pass a worker's counts to the reporting process; fail a run of all tests that did not simulate every kernel."""
    launches.update(simt.launch_counts())
    if is_worker(session.config):
        session.config.workeroutput["launches"] = list(launches.items())  # type: ignore[attr-defined]
        session.config.workeroutput["deselected"] = dict(deselected)  # type: ignore[attr-defined]
    elif is_whole_run(session.config) and kernels_to_simulate() - set(launches):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the launches of a finished worker to the total; every worker deselects the same tests, counted once."""
    output = getattr(node, "workeroutput", {})
    launches.update({tuple(kernel): count for kernel, count in output.get("launches", ())})
    deselected.update(Counter(output.get("deselected", {})) - deselected)


@functools.cache
def kernels_to_simulate() -> set[tuple[str, str]]:
    """Return the (kernel, compiler target) pairs that the package can launch on these architecture paths.

    A few problems select every kernel, as `test_compile` checks.
    """
    from cupy_awq.tools import compile_all

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_all, "SHAPES", compile_all.SHAPES[:1])
        patch.setattr(compile_all, "REPACKED_MS", (1, 16, 1024))
        return {(kernel.entry, kernel.arch) for arch in ARCHS for kernel in compile_all.kernels(arch, True)}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if deselected:
        parts = [f"{count} {reason}" for reason, count in sorted(deselected.items())]
        terminalreporter.write_line(f"deselected: {', '.join(parts)}")
    if not is_whole_run(config):
        return
    wanted = kernels_to_simulate()
    targets = sorted({target for _, target in wanted}, key=lambda target: int(target.rstrip("a")))
    rows = []
    for entry in sorted({entry for entry, _ in wanted}):
        cells = [str(launches[entry, target]) if (entry, target) in wanted else "-" for target in targets]
        rows.append([entry, *cells])
    missing = sum(kernel not in launches for kernel in wanted)
    terminalreporter.section("simulated launches by kernel")
    terminalreporter.write_line(render(("kernel", *(f"sm_{target}" for target in targets)), rows))
    terminalreporter.write_line(f"{missing} missing")
