# SPDX-License-Identifier: Apache-2.0
"""The folder of the user's cache: compiled kernels, and measured choices of them."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

VARIABLE = "CUPY_AWQ_CACHE_DIR"


def folder() -> Path:
    """``$CUPY_AWQ_CACHE_DIR``, else ``cupy_awq`` in the user's cache folder."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "cupy_awq"


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, whatever other processes do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
