# SPDX-License-Identifier: Apache-2.0
"""Zero every device image in a CUDA shared library but those for sm_90, so that it compresses to a few MB.

    python3 prune_fatbin.py IN.so OUT.so MODE     MODE "ptx": where there is no sm_90 image, keep PTX for at most sm_90

Needs readelf (binutils). The result loads and runs on Hopper only.
"""

import collections
import re
import struct
import subprocess
import sys
from pathlib import Path

src, dst, mode = sys.argv[1:4]
b = bytearray(Path(src).read_bytes())
out = subprocess.run(["readelf", "-SW", src], capture_output=True, text=True).stdout
secs = []
for line in out.splitlines():
    m = re.search(r"\]\s+(\.nv_fatbin|__nv_relfatbin)\s+\S+\s+([0-9a-f]+)\s+([0-9a-f]+)\s+([0-9a-f]+)", line)
    if m:
        secs.append((m.group(1), int(m.group(3), 16), int(m.group(4), 16)))
kept = collections.Counter()
z = 0
for _, off, size in secs:
    p = off
    while p < off + size - 16:
        magic, ver, hs, fs = struct.unpack_from("<IHHQ", b, p)
        if magic != 0xBA55ED50:
            p += 8
            continue
        q = p + hs
        end = p + hs + fs
        ents = []
        while q < end:
            kind, v, ehs, esz = struct.unpack_from("<HHIQ", b, q)
            arch = struct.unpack_from("<I", b, q + 28)[0]
            ents.append((q, kind, ehs, esz, arch))
            q += ehs + esz
        has90 = any(k == 2 and a == 90 for _, k, _, _, a in ents)
        for q, kind, ehs, esz, arch in ents:
            if has90:
                k = kind == 2 and arch == 90
            elif mode == "ptx":
                k = kind == 1 and arch <= 90
            else:
                k = False
            if k:
                kept[(kind, arch)] += esz
            else:
                b[q + ehs : q + ehs + esz] = bytes(esz)
                z += esz
        p = end
print("kept", dict(kept), "zeroed", z)
Path(dst).write_bytes(b)
