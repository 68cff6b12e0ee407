# SPDX-License-Identifier: Apache-2.0
"""Compare the machine code of every kernel in two compile caches, independent of names of sources and constants.

Fill one cache from each checkout, with no GPU, then compare:

    CUPY_AWQ_CACHE_DIR=/tmp/before python -m cupy_awq compile --arch 60 --arch 75 --arch 80 --arch 90a
    CUPY_AWQ_CACHE_DIR=/tmp/after python -m cupy_awq compile --arch 60 --arch 75 --arch 80 --arch 90a
    python -m tests.tools.compare_machine_code /tmp/before /tmp/after

Two kernels are equal if the bytes of their instructions and of their constant data are. Kernels are matched by entry
point, architecture and code, not by name of file or of constants, so a renamed constant is no difference. Exits with 1
if one cache holds code that the other lacks.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections import Counter
from pathlib import Path

Code = tuple[str, str, str]
"""The identity of a kernel: (entry point, architecture, digest of the code)."""


def code_digest(cubin: bytes) -> str:
    """Return the digest of a cubin's instructions (``.text``) and constant data (``.nv.constant3``).

    Line numbers, symbol names and file names, which follow the sources, are in other sections; so are the addresses of
    global constants (``.nv.constant4``), which the loader fills in.
    """
    (table_offset,) = struct.unpack_from("<Q", cubin, 40)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table_offset + i * entry_bytes) for i in range(count)]
    names_at = sections[names_index][4]
    digest = hashlib.sha256()
    for name_offset, _, _, _, offset, size in sections:
        name = cubin[names_at + name_offset : cubin.index(b"\0", names_at + name_offset)]
        if name.startswith((b".text.", b".nv.constant3")):
            digest.update(cubin[offset : offset + size])
    return digest.hexdigest()[:16]


def codes(cache: Path) -> Counter[Code]:
    """Count the kernels of a cache by their `Code`."""
    found: Counter[Code] = Counter()
    for path in cache.glob("*.cubin"):
        entry, arch, _ = path.stem.rsplit("-", 2)
        found[entry, arch, code_digest(path.read_bytes())] += 1
    return found


def main(before: str, after: str) -> int:
    """Print the differences of two caches; return 0 if there are none."""
    old, new = codes(Path(before)), codes(Path(after))
    if not old or not new:
        raise SystemExit(f"no cubin in {before if not old else after}")
    gone, added = set(old) - set(new), set(new) - set(old)
    shared = len(set(old) & set(new))
    print(f"{sum(old.values())} kernels before, {sum(new.values())} after; {shared} distinct codes in both")
    for entry, arch in sorted({code[:2] for code in gone | added}):
        counts = (sum(code[:2] == (entry, arch) for code in codes) for codes in (gone, added))
        print("{} {}: {} codes only before, {} only after".format(entry, arch, *counts))
    return 1 if gone or added else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    sys.exit(main(*sys.argv[1:]))
