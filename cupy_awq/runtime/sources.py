# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources: where they lie, and all that one of them includes."""

from __future__ import annotations

import functools
import re
from pathlib import Path

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@functools.cache
def folder() -> Path:
    """The folder of the ``.cu`` files: inside the installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "cuda_src"
    return inside if inside.is_dir() else package.parent / "cuda_src"


def closure(source: str, root: Path | None = None) -> dict[str, str]:
    """Name -> text of ``source`` and of every file that it includes, directly or not; ``source`` comes first.

    Include names count from the root of ``cuda_src``, whichever file they stand in. The compiler gets these texts and
    no folder, so a kernel depends on nothing else.
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
