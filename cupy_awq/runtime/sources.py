# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources: their folder, and the texts of all files that a source file includes."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
"""The regular expression of an include directive; its group is the name of the included file."""


@functools.cache
def folder() -> Path:
    """Return the folder of the CUDA sources: inside an installed package, or next to the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "cuda_src"
    return inside if inside.is_dir() else package.parent / "cuda_src"


@functools.cache
def digest(source: str) -> str:
    """Return the first 12 hexadecimal digits of a digest of a source file and all included files."""
    return hashlib.sha256("\0".join(include_closure(source).values()).encode()).hexdigest()[:12]


def include_closure(source: str, root: Path | None = None) -> dict[str, str]:
    """Return the texts of ``source`` and of all directly and indirectly included files, by name; ``source`` is first.

    All names are relative to ``root`` (by default `folder`), not to the including file. NVRTC gets only these texts and
    no include path, so a kernel cannot depend on other files.
    """
    root = root or folder()
    texts: dict[str, str] = {}
    pending = [source]
    while pending:
        name = pending.pop()
        if name not in texts:
            texts[name] = (root / name).read_text(encoding="utf-8")
            pending += reversed(INCLUDE.findall(texts[name]))
    return texts
