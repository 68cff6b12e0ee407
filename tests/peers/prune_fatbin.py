# SPDX-License-Identifier: Apache-2.0
"""Zero every device image of a CUDA shared library but those for sm_90, so that it compresses to a few MB.

    python3 prune_fatbin.py IN.so OUT.so MODE     MODE "ptx": where there is no sm_90 image, keep PTX for at most sm_90

Needs readelf (binutils). The result loads and runs on Hopper only.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FATBIN_MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2
"""The numbers that a fatbin's headers use for its two kinds of device images: PTX text and cubin."""


class Image(NamedTuple):
    """One device image: its kind, its architecture, and the position of its payload in the file."""

    kind: int
    arch: int
    begin: int
    size: int


def sections(path: str) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of each section of the library that holds device code."""
    listing = subprocess.run(["readelf", "-SW", path], capture_output=True, text=True, check=True).stdout
    pattern = r"\]\s+(?:\.nv_fatbin|__nv_relfatbin)\s+\S+\s+[0-9a-f]+\s+([0-9a-f]+)\s+([0-9a-f]+)"
    for offset, size in re.findall(pattern, listing):
        yield int(offset, 16), int(size, 16)


def containers(data: bytearray, offset: int, size: int) -> Iterator[list[Image]]:
    """Yield the list of images of each fatbin container in a section."""
    position = offset
    while position < offset + size - 16:
        magic, _, header_bytes, payload_bytes = struct.unpack_from("<IHHQ", data, position)
        if magic != FATBIN_MAGIC:
            position += 8
            continue
        entry, end = position + header_bytes, position + header_bytes + payload_bytes
        images = []
        while entry < end:
            kind, _, entry_header_bytes, image_bytes = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            images.append(Image(kind, arch, entry + entry_header_bytes, image_bytes))
            entry += entry_header_bytes + image_bytes
        yield images
        position = end


def is_kept(image: Image, images: list[Image], mode: str) -> bool:
    """Return whether an image stays: the cubin for sm_90 or, in MODE "ptx" without one, PTX for at most sm_90."""
    if any(other.kind == CUBIN and other.arch == 90 for other in images):
        return image.kind == CUBIN and image.arch == 90
    return mode == "ptx" and image.kind == PTX and image.arch <= 90


def main() -> None:
    source, target, mode = sys.argv[1:4]
    data = bytearray(Path(source).read_bytes())
    kept: Counter[tuple[int, int]] = Counter()
    zeroed = 0
    for offset, size in sections(source):
        for images in containers(data, offset, size):
            for image in images:
                if is_kept(image, images, mode):
                    kept[image.kind, image.arch] += image.size
                else:
                    data[image.begin : image.begin + image.size] = bytes(image.size)
                    zeroed += image.size
    print("kept", dict(kept), "zeroed", zeroed)
    Path(target).write_bytes(data)


if __name__ == "__main__":
    main()
