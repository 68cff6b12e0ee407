# SPDX-License-Identifier: Apache-2.0
"""A SIMT simulator: executes the PTX of a launch plan on NumPy arrays, with the checks that no GPU makes.

``run`` is the way in. Reading order: parser (text to instructions), emit and the ops_* families (an instruction to
Python), program (basic blocks, variables), machine (threads in groups, scheduling), memory, warp (shuffles, matrices);
then barriers, copies, races and global_races; for sm_90 mbarriers, bulk and wgmma. ``opcodes`` and ``record`` compare
each instruction with a GPU; ``kernels`` compiles samples, texts and changed copies of our sources.
"""

from tests.simt.emit import UnknownOpcode
from tests.simt.faults import Fault
from tests.simt.parser import PtxError
from tests.simt.run import launch_counts, run

__all__ = ["Fault", "PtxError", "UnknownOpcode", "launch_counts", "run"]
