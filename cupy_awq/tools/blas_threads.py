# SPDX-License-Identifier: Apache-2.0
"""The number of threads of NumPy's BLAS, which must be chosen before NumPy is imported."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path

OPTION = "--threads"
VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""The environment variables that OpenBLAS, MKL, OpenMP and Accelerate read when they are loaded."""
SAMPLES, SAMPLE_SECONDS = 5, 0.002
"""How often, and at which distance in seconds, running threads are counted; the minimum leaves out short-lived ones."""


def limit(arguments: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Set the number of BLAS threads in the environment: that of ``--threads N``, or else `count_idle_cores`.

    More threads than idle cores make each product wait for the thread that shares its core. A variable that the user
    has set stays as it is, unless ``--threads`` is given. An N that is not a positive integer is left to the parser of
    the command line, which refuses it.
    """
    given = _find_option(arguments)
    if given is None and any(name in environment for name in VARIABLES):
        return
    if given is None or (given.isdecimal() and int(given) > 0):
        environment.update(dict.fromkeys(VARIABLES, given or str(count_idle_cores())))


def _find_option(arguments: Sequence[str]) -> str | None:
    """Return the value of the last ``--threads N`` or ``--threads=N``, or None without the option."""
    found = None
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument == "--":
            break
        if argument == OPTION:
            found = following
        elif argument.startswith(f"{OPTION}="):
            found = argument.removeprefix(f"{OPTION}=")
    return found


def count_idle_cores(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores, at least 1, that this process may use and that no other thread keeps busy.

    The cores are those of the process's affinity, at most the CPU quota of its cgroup.

    Args:
        proc: the folder of Linux's process file system, for the number of running threads.
        cgroup: the folder of the control group, version 2 or 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(cores, _read_quota(cgroup, cores))
    return max(1, cores - _count_running(proc))


def _read_quota(folder: Path, default: int) -> int:
    """Return the CPU quota of a control group in cores, rounded up, or ``default`` without a quota."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if int(quota) > 0:
                return -(-int(quota) // int(period))
        except (OSError, ValueError):  # no such file, or "max" for no quota
            continue
    return default


def _count_running(proc: Path) -> int:
    """Return the number of other threads that run on this machine or wait for a core; 0 if it is unknown."""
    counts = []
    for sample in range(SAMPLES):
        if sample:
            time.sleep(SAMPLE_SECONDS)
        try:
            counts.append(int((proc / "loadavg").read_text().split()[3].partition("/")[0]))
        except (OSError, ValueError, IndexError):
            return 0
    return max(0, min(counts) - 1)  # one of the running threads is this one
