# SPDX-License-Identifier: Apache-2.0
"""Compile a part of the kernels that ``python -m cupy_awq compile`` compiles, which takes more than half an hour:

    python -m tests.tools.compile_sample 60 75 80 87 90a 100 120

Exits with 1 if a kernel uses local memory or if its wgmma instructions are serialized.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from cupy_awq.runtime.launch_plan import Kernel
from cupy_awq.tools import compile_all


def sample(kernels: Iterable[Kernel]) -> Iterator[Kernel]:
    """Yield every kernel on each of its architectures, and each value of its compile-time constants on one of them.

    Of several kernels with the same values, the first one is taken.
    """
    covered: set[tuple[str, ...]] = set()
    for kernel in kernels:
        values = {(kernel.entry, kernel.arch), *((kernel.entry, *map(str, define)) for define in kernel.defines)}
        if not values <= covered:
            yield kernel
        covered |= values


if __name__ == "__main__":
    listed = [kernel for arch in sys.argv[1:] for kernel in compile_all.kernels(arch)]
    # Large tiles are listed last. They need the most registers, so take them rather than small ones.
    sys.exit(compile_all.run(list(sample(reversed(listed)))))
