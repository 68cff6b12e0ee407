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
