# SPDX-License-Identifier: Apache-2.0
"""A SIMT simulator: it executes the PTX of a launch plan on NumPy arrays, with checks that no GPU makes.

``run`` is the way in. Reading order: parser (PTX to instructions), emit and the ops_* families (an instruction to
Python), program (basic blocks, variables), machine (threads in groups, scheduling), memory, warp (shuffle, ldmatrix,
mma); then barriers, copies, races and global_races; for sm_90 mbarriers, bulk and wgmma. ``case``, ``opcodes`` and
``record`` compare each instruction with a GPU; ``kernels`` compiles samples, source texts and patched sources.
"""

from tests.simt.emit import UnknownOpcode
from tests.simt.faults import Fault
from tests.simt.parser import PtxError
from tests.simt.run import launch_counts, run

__all__ = ["Fault", "PtxError", "UnknownOpcode", "launch_counts", "run"]
