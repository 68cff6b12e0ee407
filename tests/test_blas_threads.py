# SPDX-License-Identifier: Apache-2.0
"""The number of BLAS threads: from the option, the user's variables, the cgroup's quota and the running threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_awq.tools import blas_threads
from cupy_awq.tools.blas_threads import VARIABLES, count_idle_cores, limit


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def write(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("running", "files", "cores"),
    [
        (1, {}, 8),
        (3, {}, 6),
        (30, {}, 1),
        (1, {"cpuDOTmax": "200000 100000\n"}, 2),
        (1, {"cpuDOTmax": "150000 100000\n"}, 2),
        (2, {"cpuDOTmax": "400000 100000\n"}, 3),
        (1, {"cpuDOTmax": "max 100000\n"}, 8),
        (1, {"cpu__cpuDOTcfs_quota_us": "300000\n", "cpu__cpuDOTcfs_period_us": "100000\n"}, 3),
        (1, {"cpu__cpuDOTcfs_quota_us": "-1\n", "cpu__cpuDOTcfs_period_us": "100000\n"}, 8),
        (1, {"cpuDOTmax": "garbage"}, 8),
    ],
)
def test_busy_cores_and_the_quota_of_the_cgroup_are_left_out(
    tmp_path: Path, running: int, files: dict[str, str], cores: int
) -> None:
    proc = write(tmp_path / "proc", loadavg=f"0.5 0.5 0.5 {running}/300 4242\n")
    assert count_idle_cores(proc, write(tmp_path / "cgroup", **files)) == cores


def test_a_system_without_these_files_uses_every_core(tmp_path: Path) -> None:
    assert count_idle_cores(tmp_path, tmp_path) == 8


@pytest.mark.parametrize(
    ("arguments", "before", "after"),
    [
        (["generate", "--threads", "3"], {}, "3"),
        (["generate", "--threads=5", "--stats"], {}, "5"),
        (["generate", "--threads", "2", "--threads=4"], {"OMP_NUM_THREADS": "9"}, "4"),
        (["generate", "x"], {}, "7"),
        (["generate", "--", "--threads", "3"], {}, "7"),
        (["generate", "x"], {"OMP_NUM_THREADS": "9"}, None),
        (["generate", "--threads"], {}, None),
        ([], {}, "7"),
        (["generate", "--threads", "many"], {}, None),
        (["generate", "--threads", "0"], {}, None),
    ],
)
def test_the_option_precedes_variables_which_precede_the_idle_cores(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], before: dict[str, str], after: str | None
) -> None:
    monkeypatch.setattr(blas_threads, "count_idle_cores", lambda: 7)
    environment = dict(before)
    limit(arguments, environment)
    assert environment == (before if after is None else before | dict.fromkeys(VARIABLES, after))


def test_the_module_is_imported_before_numpy() -> None:
    program = "import sys, cupy_awq.tools.blas_threads; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_a_wrong_number_of_threads_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    from cupy_awq.tools.command_line import main

    assert main(["info", "--threads", "0"]) == 2
    assert "--threads: expected a positive integer of at most nine digits, got '0'" in capsys.readouterr().err
