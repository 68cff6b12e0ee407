# SPDX-License-Identifier: Apache-2.0
"""The execution of a launch plan on NumPy arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.simt.bulk import check_map
from tests.simt.machine import Machine, padded_threads
from tests.simt.memory import BASE_ALIGNMENT, SHARED_START, WINDOW_BITS, flat_bytes
from tests.simt.program import PARAMETER_WINDOW, VARIABLE_WINDOW, Program, compile_entry

RESIDENT_THREADS = 8192
"""The number of threads up to which CTAs run together. More threads per NumPy call are faster until the cache is full.
"""

Buffers = Mapping[str, "np.ndarray | None"]

_launches: Counter[tuple[str, str]] = Counter()


def launch_counts() -> dict[tuple[str, str], int]:
    """Return the number of launches simulated in this process by (entry, architecture)."""
    return dict(_launches)


def run(plan: Any, buffers: Buffers, *, landing: str = "latest", races: bool = True) -> None:
    """Execute a `LaunchPlan` of cupy_awq; the buffers are modified in place.

    A buffer may be any view with strides >= 0: the kernel accesses the bytes from its first element to its last, at an
    address with the alignment that the view has in the array that owns its memory. The kernel must not write a
    read-only array; None is a null pointer.

    With ``landing`` "latest", asynchronous copies land as late as PTX allows; with "earliest", at once. ``races``
    switches the race detector on or off.

    Raises Fault for an error of the kernel, and UnknownOpcode for an instruction that the simulator does not implement.
    """
    from cupy_awq.runtime import compile

    program = compile_entry(compile.ptx(plan), plan.kernel.entry)
    _launches[plan.kernel.entry, str(plan.kernel.arch)] += 1
    execute(program, plan, buffers, landing=landing, races=races)


def execute(program: Program, plan: Any, buffers: Buffers, *, landing: str = "latest", races: bool = True) -> None:
    """Execute a compiled program with the shapes and arguments of a plan."""
    if landing not in ("latest", "earliest"):
        raise ValueError(f"landing: expected 'latest' or 'earliest', got {landing!r}")
    if any(extent % part for extent, part in zip(plan.grid, plan.cluster, strict=True)):
        raise ValueError(f"grid: expected multiples of the cluster {plan.cluster}, got {plan.grid}")
    places, memory = _place(plan, buffers)
    parameters, maps = _parameters(program, plan, places)
    memory.append(("the kernel's parameters", PARAMETER_WINDOW, np.frombuffer(parameters, np.uint8), 0, False))
    for window, variable in enumerate(program.constants, VARIABLE_WINDOW):
        data = np.frombuffer(variable.data.ljust(variable.size, b"\0"), np.uint8).copy()
        memory.append((variable.name, window, data, 0, variable.space == "global"))
    shared_bytes = plan.shared_bytes + (program.dynamic_at or SHARED_START + program.shared_bytes) - SHARED_START
    per_block = padded_threads(program, plan.block)
    cluster = plan.cluster[0] * plan.cluster[1] * plan.cluster[2]
    total = plan.grid[0] * plan.grid[1] * plan.grid[2]
    resident = max(RESIDENT_THREADS // (per_block * cluster), 1) * cluster
    for first in range(0, total, resident):
        machine = Machine(
            program,
            plan.grid,
            plan.block,
            plan.cluster,
            first,
            min(resident, total - first),
            shared_bytes,
            parameters,
            maps,
            dependent=plan.dependent,
            constant=("MAY_PREFETCH_WEIGHTS", 1) in plan.kernel.defines,
            races=races,
            landing=landing,
        )
        for name, window, data, offset, writable in memory:
            machine.memory.globals.add(name, window, data, offset, writable)
        machine.run()


def _place(plan: Any, buffers: Buffers) -> tuple[dict[str, int], list[Any]]:
    """Return each buffer's address, and the bytes to map there; addresses keep the arrays' alignment."""
    places, memory = {}, []
    for window, (name, array) in enumerate(buffers.items(), 1):
        if array is None:
            places[name] = 0
            continue
        data, offset = flat_bytes(array)
        memory.append((name, window, data, offset, array.flags.writeable))
        places[name] = (window << WINDOW_BITS) + offset % BASE_ALIGNMENT
    return places, memory


def _parameters(program: Program, plan: Any, places: Mapping[str, int]) -> tuple[bytes, dict[int, tuple[Any, int]]]:
    """Return the bytes of the kernel's parameters, and (tensor map, buffer address) by the map's address."""
    if len(plan.arguments) != len(program.parameters):
        raise ValueError(f"arguments: {program.name} takes {len(program.parameters)}, got {len(plan.arguments)}")
    block = bytearray(program.parameter_bytes)
    maps = {}
    for argument, parameter, offset in zip(plan.arguments, program.parameters, program.parameter_offsets, strict=True):
        if isinstance(argument, str):
            content = places[argument].to_bytes(8, "little")
        elif isinstance(argument, np.generic):
            content = argument.tobytes()
        else:
            content = bytes(128)
            check_map(argument, places[argument.buffer])
            maps[(PARAMETER_WINDOW << WINDOW_BITS) + offset] = argument, places[argument.buffer]
        if len(content) != parameter.size:
            raise ValueError(f"arguments: {parameter.name} has {parameter.size} bytes, got {argument!r}")
        block[offset : offset + len(content)] = content
    return bytes(block), maps
