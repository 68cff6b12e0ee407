# SPDX-License-Identifier: Apache-2.0
"""An OSError at any file operation of a call, by Python's audit events: opening, renaming, deleting, listing files."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.listdir", "os.scandir"}


class _Fault:
    """The file operation that fails next. A hook cannot be removed, so the one audit hook reads this object."""

    folder: str | None = None
    count = 0
    first = -1
    lasts = False
    fired = False

    def on_operation(self, paths: tuple[Any, ...]) -> None:
        if self.folder is None or not any(str(path).startswith(self.folder) for path in paths):
            return
        number = self.count
        self.count += 1
        if number == self.first or (self.lasts and number > self.first >= 0):
            self.fired = True
            raise OSError(errno.EIO, "Input/output error", str(paths[0]))


_FAULT = _Fault()
_IS_HOOKED: list[bool] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in EVENTS:
        _FAULT.on_operation(arguments[:2] if event == "os.rename" else arguments[:1])


@contextlib.contextmanager
def fault(folder: Path, first: int, *, lasts: bool = False) -> Iterator[_Fault]:
    """Let file operation number ``first`` below a folder fail, and all later ones if ``lasts``; -1 lets none fail.

    ``count`` of the yielded object is the number of operations.
    """
    if not _IS_HOOKED:
        sys.addaudithook(_hook)
        _IS_HOOKED.append(True)
    _FAULT.folder, _FAULT.count, _FAULT.first, _FAULT.lasts, _FAULT.fired = f"{folder}", 0, first, lasts, False
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        _FAULT.on_operation((folder,))
        fsync(descriptor)

    os.fsync = sync
    try:
        yield _FAULT
    finally:
        os.fsync = fsync
        _FAULT.folder = None


def fail_at_each(
    folder: Path,
    run: Callable[[], object],
    prepare: Callable[[], object],
    check: Callable[[bool], object],
    *,
    step: int = 1,
    lasts: bool = False,
) -> int:
    """Call ``run`` once for each of its file operations, which fails; return the number of calls.

    Args:
        folder: the folder whose operations fail.
        run: the call, which raises OSError, or nothing if it does without the operation.
        prepare: a function that is called before each run.
        check: a function that is called after each run with whether it raised an error.
        step: 1 to let every operation fail, n for every n-th.
        lasts: whether all later operations fail, too.
    """
    prepare()
    with fault(folder, -1) as found:
        run()
    total = found.count
    assert total > 0
    for first in range(0, total, step):
        prepare()
        raised = False
        with fault(folder, first, lasts=lasts) as found:
            try:
                run()
            except OSError:
                raised = True
        if not found.fired:
            pytest.fail(f"operation {first} of {total} did not happen again")
        check(raised)
    return len(range(0, total, step))
