# SPDX-License-Identifier: Apache-2.0
"""The user's cache folder, which contains compiled kernels and tuned configurations."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from cupy_awq import atomic

VARIABLE = "CUPY_AWQ_CACHE_DIR"
"""The environment variable that sets the cache folder."""

_has_warned = False
_warning_lock = threading.Lock()


def folder() -> Path:
    """Return the cache folder: ``$CUPY_AWQ_CACHE_DIR`` if set, else ``cupy_awq`` in the platform's user cache folder.

    The user cache folder is ``$XDG_CACHE_HOME`` or ``~/.cache``, and ``%LOCALAPPDATA%`` on Windows.
    """
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(os.environ.get(VARIABLE) or f"{base}/cupy_awq").expanduser()
    except RuntimeError:  # The user has no home folder; below the null device, every read and write fails.
        return Path(os.devnull) / "cupy_awq"


def read(path: Path) -> bytes | None:
    """Return the content of a file, or None if the file does not exist or cannot be read.

    The first file that exists but cannot be read causes a warning, once per process.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(error)
        return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes on ``folder``, which is created if missing; no lock on Windows.

    Raises:
        OSError: the folder cannot be created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":  # Windows has no locks of folders
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write(path: Path, content: bytes) -> None:
    """Write a file atomically, so that other processes never see partial content.

    Raises:
        OSError: the folder is not writable, or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.create(path) as file:
        file.write(content)


def try_write(path: Path, content: bytes) -> bool:
    """Write a file with `write` and return True; on failure, warn once per process and return False."""
    try:
        write(path, content)
    except OSError as error:
        _warn(error)
        return False
    return True


def _warn(error: OSError) -> None:
    """Warn, once per process, that the cache folder cannot be used and why."""
    global _has_warned
    with _warning_lock:
        if _has_warned:
            return
        _has_warned = True
    warnings.warn(
        f"{VARIABLE}: expected a folder that can be read and written, got {error}; this process keeps its kernels in "
        "memory",
        RuntimeWarning,
        stacklevel=2,
    )
