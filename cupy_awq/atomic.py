# SPDX-License-Identifier: Apache-2.0
"""Atomic writing of files: a reader sees either the complete new file or the old file, even if the writer is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
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


def narrow_mode(path: Path, mode: int) -> None:
    """Remove the permissions of a file that ``mode`` lacks, so that a copy is not more public than its source.

    The owner can still read and write the file.
    """
    found = stat.S_IMODE(path.stat().st_mode)
    path.chmod(found & (mode | stat.S_IRUSR | stat.S_IWUSR))


def remove_unfinished(folder: Path) -> None:
    """Delete the unfinished files and folders in a folder that no other process writes. Raises OSError if it cannot."""
    for path in folder.glob(f"*{SUFFIX}"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def hide_folder(folder: Path) -> int:
    """Let only the owner open a folder; return the permissions that it had."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    folder.chmod(stat.S_IRWXU)
    return mode


def common_mode(paths: Iterable[Path]) -> int:
    """Return the permissions that all of the files have; all permissions if there is no file."""
    mode = 0o777
    for path in paths:
        mode &= path.stat().st_mode
    return mode


@contextlib.contextmanager
def create(path: Path, *, mode: int = 0o666, check: Callable[[Path], object] | None = None) -> Iterator[BinaryIO]:
    """Open a temporary file for writing; at the end of the block, rename it to ``path``, replacing an existing file.

    If the block raises an error, the temporary file is removed and the existing file is kept. If the process is killed,
    the temporary file is left behind, with the suffix `SUFFIX`.

    Args:
        path: the path of the file.
        mode: the permissions of the file, from which those that the umask excludes are removed, and those that the
            existing file does not have.
        check: a function that is called with the path of the complete temporary file before it is renamed, and that
            raises an error to keep the existing file.

    Raises:
        OSError: the file cannot be written; the error names ``path``.
    """
    aside = name_aside(path)
    try:
        # O_EXCL fails if the file exists: another process's file must not be removed below.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        if path.is_file():
            mode &= path.stat().st_mode
        descriptor = os.open(os.fspath(aside), flags, mode | stat.S_IRUSR | stat.S_IWUSR)
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if check is not None:
                check(aside)
            aside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(aside)):
            raise  # an error of ``block`` about another file keeps its name
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder, or on a file that is created if it does not exist.

    The system releases the lock when the process ends. A file system that cannot lock a folder is written without a
    lock, and so is a folder on Windows.

    Raises:
        BlockingIOError: another process, or another thread of this one, holds the lock.
        OSError: the file cannot be opened or locked.
    """
    is_folder = path.is_dir()
    if sys.platform == "win32" and is_folder:
        yield
        return
    descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            _lock_descriptor(descriptor)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise BlockingIOError(f"{path}: expected no other process that writes here, got one") from None
            if not is_folder:
                raise
        yield
    finally:
        os.close(descriptor)


def _lock_descriptor(descriptor: int) -> None:
    """Lock an open file. Raises OSError if it is locked or cannot be locked."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
