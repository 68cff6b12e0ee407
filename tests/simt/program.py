# SPDX-License-Identifier: Apache-2.0
"""The translation of a parsed entry point: basic blocks as Python functions, and the layout of variables."""

from __future__ import annotations

import functools
import gc
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.simt.emit import BlockCode, Names, find, namespace, special_variable, storage
from tests.simt.memory import SHARED_START, WINDOW_BITS
from tests.simt.parser import TYPE_BYTES, Function, Instruction, Module, Not, Operand, Symbol, Variable, parse

PARAMETER_WINDOW = 1 << 16
VARIABLE_WINDOW = PARAMETER_WINDOW + 1
SHARED_READ = re.compile(r"ld\.(volatile|relaxed|acquire)")
"""The regular expression for loads from memory that other threads may write."""
WRITE = re.compile(r"st\.|atom\.|red\.")
WIDTH = {"warp": 32, "warpgroup": 128, "blocks": 32}


@dataclass
class Block:
    """A basic block: the instructions ``start:stop`` of the program.

    Attributes:
        width: the number of threads that must have arrived before any of them continues; 0 if threads are independent.
        members: the operand that names the participating threads of a warp, if not all participate.
        ending: "next"; "branch", if the function returns the mask of threads that jump to ``targets[0]``; "table", if
            it returns an index into ``targets``; "exit"; or "parked", if it schedules its threads itself.
        spins: whether the block is a loop that only reads what other threads write.
    """

    start: int
    stop: int
    width: int = 0
    members: Operand | None = None
    ending: str = "next"
    targets: list[int] = field(default_factory=list)
    spins: bool = False
    function: Callable[..., Any] = lambda *_: None


@dataclass
class Program:
    """A translated kernel.

    ``registers`` are zeros of the registers' NumPy types, by Python name. ``grains`` are the widths in bytes, at most
    4, of the narrowest access to shared memory and to global memory.
    """

    name: str
    instructions: list[Instruction]
    blocks: list[Block]
    registers: dict[str, Any]
    names: Names
    parameters: list[Variable]
    parameter_offsets: list[int]
    parameter_bytes: int
    constants: list[Variable]
    shared_bytes: int
    dynamic_at: int | None
    local_bytes: int
    grains: tuple[int, int]
    text: str


@functools.lru_cache(maxsize=8)
def module(ptx: str) -> Module:
    return parse(ptx)


@functools.lru_cache(maxsize=256)
def compile_entry(ptx: str, entry: str) -> Program:
    """Compile an entry point of a PTX module; the last programs are kept."""
    gc.disable()  # Translation creates many objects and no cyclic garbage.
    try:
        parsed = module(ptx)
        if entry not in parsed.functions:
            raise KeyError(f"{entry} is not an entry; these are: {', '.join(parsed.functions)}")
        return _compile(parsed, parsed.functions[entry])
    finally:
        gc.enable()


def _compile(parsed: Module, function: Function) -> Program:
    function = _unguard(function)
    blocks = _split(function)
    symbols, layout = _layout(parsed, function)
    names = Names()
    codes = []
    for number, block in enumerate(blocks):
        code = BlockCode(number, symbols, names)
        for index in range(block.start, block.stop):
            code.instruction(index, function.instructions[index])
        codes.append(code)
    live = _live_out(blocks, codes)
    text = "\n".join(_function(number, code, live[number]) for number, code in enumerate(codes))
    scope = namespace() | names.constants | {"keep": keep}
    exec(compile(text, f"<{function.name}>", "exec"), scope)
    for number, block in enumerate(blocks):
        block.function = scope[f"block_{number}"]
    offsets, end = [], 0
    for parameter in function.parameters:
        end = -(-end // parameter.align) * parameter.align
        offsets.append(end)
        end += parameter.size
    return Program(
        name=function.name,
        instructions=function.instructions,
        blocks=blocks,
        registers={name: np.dtype(storage(register.type)).type(0) for register, name in names.registers.items()},
        names=names,
        parameters=function.parameters,
        parameter_offsets=offsets,
        parameter_bytes=end,
        constants=[variable for variable in parsed.variables if variable.space in ("global", "const")],
        grains=(_grain(function.instructions, "shared"), _grain(function.instructions, "global")),
        text=text,
        **layout,
    )


def _unguard(function: Function) -> Function:
    """Replace the guard (``@p``) of an instruction that ends a block or synchronizes threads by a jump around it."""
    instructions: list[Instruction] = []
    moved = {}
    labels = {}
    for index, instruction in enumerate(function.instructions):
        moved[index] = len(instructions)
        special = find(instruction.opcode)[2] and not instruction.opcode.startswith("bra")
        if instruction.guard and special:
            guard = instruction.guard.predicate if isinstance(instruction.guard, Not) else Not(instruction.guard)
            label = f"after~{index}"
            skip = replace(instruction, opcode="bra", operands=(Symbol(label),), guard=guard)
            instructions += [skip, replace(instruction, guard=None)]
            labels[label] = len(instructions)
        else:
            instructions.append(instruction)
    moved[len(function.instructions)] = len(instructions)
    labels |= {label: moved[index] for label, index in function.labels.items()}
    return Function(function.name, function.parameters, function.variables, instructions, labels, function.tables)


def _split(function: Function) -> list[Block]:
    """Split a function's instructions into basic blocks.

    An instruction that whole warps execute together starts a block, where the scheduler can gather the warp, unless the
    preceding instruction was such a one: then the warp is still converged.
    """
    instructions, labels = function.instructions, function.labels
    starts = {0, len(instructions)} | set(labels.values())
    # The kind and member mask of the last warp-wide instruction in this block, after which its warps are converged; or
    # None.
    together: tuple[str, object] | None = None
    for index, instruction in enumerate(instructions):
        kind = find(instruction.opcode)[2]
        if index in starts:
            together = None
        if kind in ("warp", "warpgroup", "blocks"):
            here = kind, _members(instruction)
            if here != together:
                starts.add(index)
            together = here
        if kind in ("ends", "blocks", "polls"):
            starts.add(index + 1)
            together = None
        if kind == "polls":
            starts.add(index)
    order = sorted(starts)
    blocks = [Block(start, stop) for start, stop in itertools.pairwise(order)]
    number = {block.start: k for k, block in enumerate(blocks)}
    number[len(instructions)] = len(blocks)
    for k, block in enumerate(blocks):
        kind = find(instructions[block.start].opcode)[2]
        block.width = WIDTH.get(kind, 0)
        block.members = _members(instructions[block.start]) if kind == "warp" else None
        last = instructions[block.stop - 1]
        root = last.opcode.split(".")[0]
        targets = [op.name for op in last.operands if isinstance(op, Symbol)] if root in ("bra", "brx") else []
        block.targets = [k + 1]
        if root == "bra":
            block.ending = "branch" if last.guard else "next"
            block.targets = [number[labels[targets[0]]]] + ([k + 1] if last.guard else [])
            opcodes = [instruction.opcode for instruction in instructions[block.start : block.stop]]
            reads = any(SHARED_READ.match(opcode) for opcode in opcodes)
            block.spins = k in block.targets and reads and not any(WRITE.match(opcode) for opcode in opcodes)
        elif root == "brx":
            block.ending = "table"
            block.targets = [number[labels[name]] for name in function.tables[targets[0]]]
        elif root in ("ret", "exit"):
            block.ending, block.targets = "exit", []
        elif find(last.opcode)[2] in ("blocks", "polls"):
            block.ending = "parked"
    end = Block(len(instructions), len(instructions), ending="exit")
    return [*blocks, end]


def _members(instruction: Instruction) -> Operand | None:
    """Return the member mask operand of a warp instruction, or None for all lanes."""
    root = instruction.opcode.split(".")[0]
    if root in ("shfl", "vote", "match", "redux", "elect") or instruction.opcode == "bar.warp.sync":
        return instruction.operands[-1]
    return None


def _layout(parsed: Module, function: Function) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the address of each variable, and the sizes of static shared and of local memory.

    Dynamic shared memory gets no better alignment than it declares, so that a kernel cannot rely on luck.
    """
    symbols: dict[str, int] = {}
    ends = {"shared": SHARED_START, "local": 0}
    dynamic = []
    for variable in [*parsed.variables, *function.variables]:
        if variable.space not in ends:
            continue
        if variable.space == "shared" and variable.size == 0:
            dynamic.append(variable)
            continue
        start = -(-ends[variable.space] // variable.align) * variable.align
        symbols[variable.name] = start
        ends[variable.space] = start + variable.size
    dynamic_at = None
    if dynamic:
        align = max(max(variable.align for variable in dynamic), 16)
        dynamic_at = -(-ends["shared"] // align) * align
        if align < SHARED_START and dynamic_at % (2 * align) == 0:
            dynamic_at += align
        symbols |= {variable.name: dynamic_at for variable in dynamic}
    kept = [variable for variable in parsed.variables if variable.space in ("global", "const")]
    symbols |= {variable.name: (VARIABLE_WINDOW + k) << WINDOW_BITS for k, variable in enumerate(kept)}
    offset = 0
    for parameter in function.parameters:
        offset = -(-offset // parameter.align) * parameter.align
        symbols[parameter.name] = (PARAMETER_WINDOW << WINDOW_BITS) + offset
        offset += parameter.size
    sizes = {"shared_bytes": ends["shared"] - SHARED_START, "dynamic_at": dynamic_at, "local_bytes": ends["local"]}
    return symbols, sizes


def _grain(instructions: list[Instruction], space: str) -> int:
    """Return the width of the narrowest access to a state space, at most 4 bytes: the grain of its races."""
    others = {"global", "shared", "local", "param", "const"} - {space}
    sizes = [4]
    for instruction in instructions:
        root, *parts = instruction.opcode.replace("::", ".").split(".")
        if root in ("ld", "st", "ldu") and not others & set(parts):
            sizes.append(TYPE_BYTES[parts[-1]])
    return min(sizes)


def _live_out(blocks: list[Block], codes: list[BlockCode]) -> list[set[str]]:
    """Return, for each basic block, the registers that it writes and that a later block may read."""
    live_in = [set(code.reads) for code in codes]
    live_out: list[set[str]] = [set() for _ in codes]
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(blocks))):
            out = set().union(*(live_in[target] for target in blocks[number].targets))
            if out != live_out[number]:
                live_out[number] = out
                live_in[number] |= out - set(codes[number].writes)
                changed = True
    return live_out


def keep(registers: dict[str, Any], active: Any, full: bool, results: tuple[tuple[str, Any], ...]) -> None:
    """Store the results of a basic block in its threads' registers; ``full`` says that all threads are active."""
    if full:
        registers.update(results)
    else:
        for name, value in results:
            registers[name] = np.where(active, value, registers[name])


def _function(number: int, code: BlockCode, live: set[str]) -> str:
    """Return the text of the Python function that executes a basic block and stores its ``live`` registers."""
    head = [f"{name} = R[{name!r}]" for name in sorted(code.names.register(r) for r in code.reads.values())]
    head += [f"{special_variable(name)} = m.special[{name!r}]" for name in sorted(code.specials)]
    if code.uses_lanes:
        head.append("lanes = m.lanes(active)")
    kept = sorted(code.names.register(register) for name, register in code.writes.items() if name in live)
    tail = [f"keep(R, active, full, ({''.join(f'({name!r}, {name}), ' for name in kept)}))"] if kept else []
    body = [*head, *code.lines, *tail, f"return {code.outcome or 'None'}"]
    return f"def block_{number}(m, R, active, full):\n" + "\n".join("    " + line for line in body) + "\n"
