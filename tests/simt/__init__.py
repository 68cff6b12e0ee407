# SPDX-License-Identifier: Apache-2.0
"""A SIMT simulator: executes the PTX of a launch plan on NumPy arrays, with the checks that no GPU makes.

``run`` is the way in. Reading order: parser, emit and the ops_* families, program, machine, memory, warp, barriers.
"""

from tests.simt.emit import UnknownOpcode
from tests.simt.faults import Fault
from tests.simt.parser import PtxError
from tests.simt.run import launch_counts, run

__all__ = ["Fault", "PtxError", "UnknownOpcode", "launch_counts", "run"]
