# SPDX-License-Identifier: Apache-2.0
"""Atomic writing of files: a reader sees either the complete new file or the old file, even if the writer is killed."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

SUFFIX = ".part"
"""The suffix of the names of unfinished files and folders, which readers do not open."""


def name_aside(path: Path) -> Path:
    """Return a random temporary path beside ``path``, for a file or folder that is renamed to ``path`` later."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}{SUFFIX}")


def new_folder(path: str | os.PathLike[str]) -> Path:
    """Return the resolved path of a folder that does not exist or is empty, and that a rename can create or replace.

    Raises:
        FileExistsError: the path is a file or a folder with files, the current folder, or a mount point.
    """
    folder = Path(path).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        found = "one with files" if folder.is_dir() else "a file"
        raise FileExistsError(f"{path}: expected a new or empty folder, got {found}")
    if folder == Path.cwd() or os.path.ismount(folder):
        found = "the current one" if folder == Path.cwd() else "a mount point"
        raise FileExistsError(f"{path}: expected a folder that can be replaced, got {found}")
    return folder


@contextlib.contextmanager
def create(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing; at the end of the block, rename it to ``path``, replacing an existing file.

    If the block raises an error, the temporary file is removed and the existing file is kept. If the process is killed,
    the temporary file is left behind, with the suffix `SUFFIX`.

    Raises:
        OSError: the file cannot be written; the error names ``path``.
    """
    aside = name_aside(path)
    try:
        file = aside.open("xb")  # mode x fails if the file exists: another process's file must not be removed below
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(aside)):
            raise  # the error names a file other than the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from None
