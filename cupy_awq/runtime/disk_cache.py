# SPDX-License-Identifier: Apache-2.0
"""The user's cache folder: compiled kernels and tuned configurations."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

VARIABLE = "CUPY_AWQ_CACHE_DIR"
"""The environment variable that sets the cache folder."""


def folder() -> Path:
    """Return ``$CUPY_AWQ_CACHE_DIR``, or ``cupy_awq`` in the platform's cache folder of the user."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "cupy_awq"


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: other processes see the whole content or no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
