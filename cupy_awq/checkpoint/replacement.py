# SPDX-License-Identifier: Apache-2.0
"""Replacement of all files of a checkpoint at once: a reader finds the old files or the new ones, never some of each.

A file system renames one file at a time. So the new files are written to a temporary folder, which one rename turns
into the folder `JOURNAL`: from then on, the new checkpoint is in force, and `find` takes its files from there. Then
the old files are moved aside, the new ones move in, and the journal, with the old files, is deleted. An error before
the end restores the old files. After a kill, readers still find all new files, and the next `replace` completes the
move.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from cupy_awq import atomic
from cupy_awq.checkpoint.files import CheckpointError, check_file_name, read_object

JOURNAL = "model.replacing"
"""The name of the folder of a replacement that has begun, inside the folder of the checkpoint."""

NEW, OLD, LIST = "new", "old", "files.json"
"""The names in the journal: the folder of files to move in, the folder of files moved aside, the list of new names."""


def list_names(folder: Path) -> list[str] | None:
    """Return the names of a checkpoint's files if a replacement has begun and not ended, else None.

    Raises CheckpointError for a journal without a valid list.
    """
    file = folder / JOURNAL / LIST
    if not file.is_file():
        return None
    names = read_object(file).get("files")
    if not isinstance(names, list):
        raise CheckpointError(f"{file}: files: expected a list of names, got {names!r:.80}")
    for name in names:
        check_file_name(name, f"{file}: files")
    return names


def find(folder: Path, name: str) -> Path:
    """Return the path of the file ``name`` of a checkpoint: in the journal if it has not moved to its place yet."""
    file = folder / JOURNAL / NEW / name
    return file if file.is_file() else folder / name


@contextlib.contextmanager
def replace(folder: Path, is_own: Callable[[str], bool]) -> Iterator[Path]:
    """Yield an empty folder for new files; at the end of the block, replace the files of a checkpoint by them.

    If the block or the replacement raises an error, the old files are as before.

    Args:
        folder: the folder of the checkpoint. Only one process can replace its files at a time.
        is_own: a function that returns whether a file of this name belongs to the checkpoint, so that it is deleted.

    Raises:
        BlockingIOError: another process is replacing the files.
        CheckpointError: the journal of an earlier replacement is damaged.
        OSError: a file cannot be moved.
    """
    with atomic.lock(folder):
        _complete(folder, is_own)
        part = atomic.name_aside(folder / "model")
        part.mkdir(0o700)
        try:
            for name in (NEW, OLD):
                (part / name).mkdir()
            yield part / NEW
            names = sorted(file.name for file in (part / NEW).iterdir())
            with atomic.create(part / LIST) as opened:
                opened.write(json.dumps({"files": names}).encode())
            try:
                part.rename(folder / JOURNAL)
                _move(folder, names, is_own)
                (folder / JOURNAL).rename(part)
            except BaseException:
                _roll_back(folder, names, part)
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _complete(folder: Path, is_own: Callable[[str], bool]) -> None:
    """Complete the replacement that a killed process has left, if there is one."""
    names = list_names(folder)
    if names is None:
        return
    if foreign := [name for name in names if not is_own(name)]:
        raise CheckpointError(f"{folder / JOURNAL}: expected files of a checkpoint, got {foreign[0]!r:.200}")
    _move(folder, names, is_own)
    part = atomic.name_aside(folder / "model")
    (folder / JOURNAL).rename(part)
    shutil.rmtree(part, ignore_errors=True)


def _move(folder: Path, names: list[str], is_own: Callable[[str], bool]) -> None:
    """Move old files to the journal, then new ones to their places; a repetition completes an interrupted move."""
    journal = folder / JOURNAL
    waiting = [name for name in names if os.path.lexists(journal / NEW / name)]
    for file in list(folder.iterdir()):
        is_old = is_own(file.name) and (file.name in waiting or file.name not in names)
        if is_old and (file.is_symlink() or not file.is_dir()):
            file.replace(journal / OLD / file.name)
    for name in waiting:
        (journal / NEW / name).replace(folder / name)


def _roll_back(folder: Path, names: list[str], part: Path) -> None:
    """Move all files back, and rename the journal to ``part``, which exists unless the replacement has begun."""
    journal = folder / JOURNAL
    if part.exists():
        return
    for name in names:
        if not os.path.lexists(journal / NEW / name):
            (folder / name).replace(journal / NEW / name)
    for file in list((journal / OLD).iterdir()):
        file.replace(folder / file.name)
    journal.rename(part)
