# SPDX-License-Identifier: Apache-2.0
"""The translation of one basic block to Python: operands, guards, and the table of opcode emitters.

An emitter is a function decorated with the grammar of its opcodes (a regular expression that must match the whole
opcode, so that an unknown modifier is refused by name). It appends lines to a ``BlockCode``.

In the generated code ``m`` is the machine, ``R`` the registers, ``active`` the mask of the threads that execute,
``full`` whether these are all the living ones. Blocks compute for all threads; only results are masked.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tests.simt import numerics
from tests.simt.parser import (
    TYPE_BYTES,
    Address,
    Immediate,
    Instruction,
    Not,
    Pair,
    Register,
    Special,
    Symbol,
    Vector,
)

Emitter = Callable[..., None]
# An operand of an instruction, or None. Emitters raise UnknownOpcode for a kind of operand that they do not translate.
Operand = Any
_EMITTERS: list[tuple[re.Pattern[str], Emitter, str]] = []
FAMILIES = ("ops_integer", "ops_float", "ops_memory", "ops_warp", "ops_control", "ops_async")


class UnknownOpcode(Exception):
    """The error for an opcode, modifier or operand form that the simulator does not implement."""


def emits(grammar: str, kind: str = "") -> Callable[[Emitter], Emitter]:
    """Register an emitter for the opcodes that ``grammar`` matches.

    ``kind`` says what the scheduler has to do: "" nothing, the instruction runs at once; for "warp" and "warpgroup" the
    threads of the warp or warpgroup wait for each other first; "ends" ends the block by a jump or an exit; "blocks"
    suspends threads, by whole warps, and "polls" suspends single threads.
    """

    def register(emitter: Emitter) -> Emitter:
        _EMITTERS.append((re.compile(grammar), emitter, kind))
        return emitter

    return register


@functools.cache
def find(opcode: str) -> tuple[re.Match[str], Emitter, str]:
    """Return the emitter of an opcode. Raises UnknownOpcode."""
    for family in FAMILIES:
        importlib.import_module(f"tests.simt.{family}")
    for pattern, emitter, kind in _EMITTERS:
        if match := pattern.fullmatch(opcode):
            return match, emitter, kind
    raise UnknownOpcode(f"opcode not implemented: {opcode}")


def storage(declared: str) -> str:
    """Return the NumPy type that holds a register of a declared type."""
    if declared == "pred":
        return "bool"
    if declared in ("f32", "f64"):
        return f"float{declared[1:]}"
    return f"uint{8 * TYPE_BYTES[declared]}"


def computed(used: str) -> str:
    """Return the NumPy type in which an operand of a PTX type is computed; 16-bit floats are held as uint16 bits."""
    if used[0] == "s":
        return f"int{used[1:]}"
    if used in ("f16", "bf16"):
        return "uint16"
    return storage(used)


def _numpy_names() -> dict[str, Any]:
    names = "where minimum maximum abs isnan isinf isfinite signbit sqrt exp2 log2 sin cos tanh copysign"
    types = "uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64"
    np_prefixed = {f"np_{name}": getattr(np, name) for name in names.split()}
    return np_prefixed | {name: getattr(np, name) for name in types.split()} | {"bool": np.bool_}


def namespace() -> dict[str, Any]:
    """Return the globals of the generated code: NumPy functions as ``np_where``, types by name, and ``numerics``."""
    helpers = {name: value for name, value in vars(numerics).items() if callable(value) and name[0] != "_"}
    return helpers | _numpy_names()


class Names:
    """The Python variable names that the generated code of a program uses for its registers and constants."""

    def __init__(self) -> None:
        self.registers: dict[Register, str] = {}
        self.constants: dict[str, Any] = {}
        self._known: dict[tuple[str, str], str] = {}

    def register(self, register: Register) -> str:
        return self.registers.setdefault(register, f"r{len(self.registers)}")

    def constant(self, value: Any, dtype: str) -> str:
        name = self._known.setdefault((repr(value), dtype), f"k{len(self._known)}")
        self.constants[name] = np.dtype(dtype).type(value)
        return name

    def object(self, value: Any) -> str:
        """Return the name of a constant that is an arbitrary Python object, such as a rounding mode."""
        name = self._known.setdefault((repr(value), "object"), f"k{len(self._known)}")
        self.constants[name] = value
        return name


class BlockCode:
    """The code of one basic block, the registers that it reads before it writes them, and those it writes."""

    def __init__(self, number: int, symbols: Mapping[str, int], names: Names) -> None:
        self.number, self.following = number, number + 1
        self.symbols, self.names = symbols, names
        # What the block's function returns, as an expression: the mask of the threads that jump, or an index into its
        # targets.
        self.outcome = ""
        self.lines: list[str] = []
        self.reads: dict[str, Register] = {}
        self.writes: dict[str, Register] = {}
        self.specials: set[str] = set()
        self.uses_lanes = False
        self.at = 0  # the index of the current instruction
        self.guard = ""  # the predicate of the current instruction, as an expression
        self._guard_lanes = ""
        self._count = 0

    def instruction(self, index: int, instruction: Instruction) -> None:
        """Append the code of one instruction."""
        match, emitter, _ = find(instruction.opcode)
        self.at = index
        self.guard = self.predicate(instruction.guard) if instruction.guard else ""
        self._guard_lanes = ""
        try:
            emitter(self, match, *instruction.operands)
        except (TypeError, KeyError, AttributeError) as error:
            raise UnknownOpcode(
                f"operands not implemented: {instruction.opcode} {instruction.operands} (PTX line {instruction.line})"
            ) from error

    def line(self, text: str) -> None:
        self.lines.append(text)

    def temporary(self, expression: str) -> str:
        """Assign ``expression`` to a new variable and return its name."""
        self._count += 1
        self.line(f"t{self._count} = {expression}")
        return f"t{self._count}"

    def results(self, count: int, call: str) -> list[str]:
        """Assign the ``count`` arrays that ``call`` returns to new variables and return their names."""
        names = [f"t{self._count + k}" for k in range(1, count + 1)]
        self._count += count
        self.line(f"{', '.join(names)}{',' if count == 1 else ''} = {call}")
        return names

    @property
    def mask(self) -> str:
        """Return the expression for the mask of the threads that execute the instruction."""
        return f"active & {self.guard}" if self.guard else "active"

    @property
    def lanes(self) -> str:
        """Return the expression for the indices of the threads that execute the instruction."""
        if not self.guard:
            self.uses_lanes = True
            return "lanes"
        if not self._guard_lanes:
            self._guard_lanes = self.temporary(f"m.lanes({self.mask})")
        return self._guard_lanes

    def constant(self, value: Any, dtype: str) -> str:
        """Return the name of a constant of a NumPy type."""
        return self.names.constant(value, dtype)

    def register(self, register: Register) -> str:
        """Return the variable that holds a register's current value."""
        if register.name not in self.writes:
            self.reads[register.name] = register
        return self.names.register(register)

    def predicate(self, operand: Operand | None) -> str:
        if isinstance(operand, Not):
            return f"~{self.register(operand.predicate)}"
        if isinstance(operand, Register):
            return self.register(operand)
        if isinstance(operand, Immediate):
            return self.constant(bool(operand.value), "bool")
        raise TypeError(operand)

    def use(self, operand: Operand | None, used: str) -> str:
        """Return an operand as an expression of type ``used``, truncated if the register is wider."""
        dtype = computed(used)
        if used == "pred":
            return self.predicate(operand)
        if isinstance(operand, Immediate):
            return self._immediate(operand, used)
        if isinstance(operand, Symbol):
            return self.constant(self.symbols[operand.name], dtype)
        if isinstance(operand, Special):
            self.specials.add(operand.name)
            name, held = special_variable(operand.name), special_type(operand.name)
        elif isinstance(operand, Register):
            name, held = self.register(operand), storage(operand.type)
        else:
            raise TypeError(operand)
        if held == dtype:
            return name
        bits, held_bits = TYPE_BYTES[used], np.dtype(held).itemsize
        if bits == held_bits:
            return f"{name}.view({dtype})"
        if bits > held_bits:
            return f"{name}.astype({dtype})"
        return f"{name}.astype({dtype})" if dtype[0] != "f" else f"{name}.astype(uint{8 * bits}).view({dtype})"

    def _immediate(self, operand: Immediate, used: str) -> str:
        bits = 8 * TYPE_BYTES[used]
        value = operand.value
        if isinstance(value, float):
            if used not in ("f32", "f64"):
                raise TypeError(operand)
            return self.constant(value, storage(used))
        if operand.float_bits or used in ("f32", "f64"):
            width = operand.float_bits or bits
            number = np.array([value % 2**width], f"uint{width}").view(f"float{width}")[0]
            if used in ("f32", "f64"):
                return self.constant(number.astype(storage(used)), storage(used))
            if width != bits:
                raise TypeError(operand)
        value %= 2**bits
        if used[0] == "s" and value >= 2 ** (bits - 1):
            value -= 2**bits
        return self.constant(value, computed(used))

    def address(self, operand: Operand | None) -> str:
        """Return ``[base + offset]`` as an expression of type int64."""
        if not isinstance(operand, Address):
            raise TypeError(operand)
        if isinstance(operand.base, Symbol):
            return self.constant(self.symbols[operand.base.name] + operand.offset, "int64")
        if isinstance(operand.base, Immediate):
            return self.constant(operand.base.value + operand.offset, "int64")
        wide = isinstance(operand.base, Register) and storage(operand.base.type) == "uint64"
        base = self.use(operand.base, "s64") if wide else f"{self.use(operand.base, 'u32')}.astype(int64)"
        return f"({base} + {self.constant(operand.offset, 'int64')})" if operand.offset else base

    def define(self, operand: Operand | None, used: str, expression: str) -> None:
        """Set a register from an expression of type ``used``, extended if the register is wider; ``_`` drops it."""
        if operand is None:
            return
        if not isinstance(operand, Register):
            raise TypeError(operand)
        held, dtype = storage(operand.type), computed(used)
        if held != dtype:
            same = np.dtype(held).itemsize == np.dtype(dtype).itemsize
            expression = f"({expression})" + (f".view({held})" if same else f".astype({held})")
        if self.guard:
            expression = f"np_where({self.guard}, {expression}, {self.register(operand)})"
        self.line(f"{self.names.register(operand)} = {expression}")
        self.writes[operand.name] = operand

    def define_all(self, operands: Iterable[Operand | None], used: str, expressions: Iterable[str]) -> None:
        for operand, expression in zip(operands, expressions, strict=True):
            self.define(operand, used, expression)

    def define_pair(self, operand: Operand | None, used: str, first: str, second: str) -> None:
        """Set both registers of ``d|p``, or a single register to the first result."""
        if isinstance(operand, Pair):
            self.define(operand.first, used, first)
            self.define(operand.second, "pred", second)
        else:
            self.define(operand, used, first)


def special_variable(name: str) -> str:
    return "s_" + re.sub(r"\W", "_", name[1:])


def special_type(name: str) -> str:
    if name in ("%clock64", "%globaltimer"):
        return "uint64"
    return "bool" if name == "%is_explicit_cluster" else "uint32"


def items(operand: Operand | None) -> tuple[Operand | None, ...]:
    """Return the items of a vector operand, or a list of the operand itself if it is no vector."""
    return operand.items if isinstance(operand, Vector) else (operand,)
