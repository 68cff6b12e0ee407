# SPDX-License-Identifier: Apache-2.0
"""Atomic writing of files: a reader finds the whole new file or the one before it, even if the writer is killed."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

SUFFIX = ".part"
"""The end of the names of unfinished files and folders, which no reader opens."""


def name_aside(path: Path) -> Path:
    """Return a new random name in the same folder, for what will get the name ``path`` when it is complete."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}{SUFFIX}")


@contextlib.contextmanager
def create(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing that gets the name ``path`` at the end of the block, in place of an older file.

    After an error in the block, the new file is removed and the older one remains. A killed process leaves the new file
    under the name of `name_aside`.

    Raises:
        OSError: the file cannot be written; the error names ``path``.
    """
    aside = name_aside(path)
    try:
        file = aside.open("xb")  # "x": an existing file of this name would not be ours to remove
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
            raise  # an error of another file
        raise OSError(error.errno, error.strerror, str(path)) from None
