# SPDX-License-Identifier: Apache-2.0
"""The error that the simulator raises when a kernel breaks a rule."""

from __future__ import annotations

from tests.simt.parser import Location


class Fault(Exception):
    """An error of a simulated kernel.

    Attributes:
        kind: "out of bounds", "null pointer", "misaligned", "read-only", "uninitialised", "in flight", "race",
            "deadlock", "divergence", "barrier", "early", "invalid" or "trap".
        source: the line of the ``.cu`` or ``.cuh`` file.
        thread: the first offender as ((x, y, z) of its block in the grid, (x, y, z) in the block).
        address: the address that it accessed.
    """

    def __init__(
        self,
        kind: str,
        text: str,
        *,
        source: Location | None = None,
        opcode: str = "",
        ptx_line: int = 0,
        thread: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
        address: int | None = None,
    ) -> None:
        self.kind, self.text, self.source, self.opcode = kind, text, source, opcode
        self.ptx_line, self.thread, self.address = ptx_line, thread, address
        where = f"{source or 'unknown source line'} ({opcode}, PTX line {ptx_line})" if opcode else ""
        who = f"thread {thread[1]} of CTA {thread[0]}" if thread else ""
        place = f"address {address:#x}" if address is not None else ""
        super().__init__(": ".join(part for part in (kind, where, who, place, text) if part))
