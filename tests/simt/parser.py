# SPDX-License-Identifier: Apache-2.0
"""A parser from PTX text to instructions with resolved names.

The grammar is the part of PTX that NVRTC emits and that inline ``asm`` adds: scopes ``{ }`` may declare registers and
labels again, several statements may share a line, and ``.loc`` ends at the end of its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TYPE_BYTES = {"pred": 1, "b128": 16, "f16x2": 4, "bf16x2": 4} | {
    f"{letter}{bits}": bits // 8 for letter in "busf" for bits in (8, 16, 32, 64)
}


class PtxError(Exception):
    """The error for PTX that the parser does not know; the message names the line."""


@dataclass(frozen=True)
class Register:
    """A register. ``name`` is unique in its function; ``type`` is the declared type: pred, b16, b32, f32, ..."""

    name: str
    type: str


@dataclass(frozen=True)
class Special:
    """A predefined read-only register, such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A constant; ``float_bits`` is 32 or 64 for the forms ``0f`` and ``0d``, whose bits are in ``value``."""

    value: int | float
    float_bits: int = 0


@dataclass(frozen=True)
class Symbol:
    """A variable, parameter or label."""

    name: str


@dataclass(frozen=True)
class Address:
    """An address ``[base + offset]``; that of a tensor copy, ``[map, {x, y}]``, has coordinates."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vector:
    """A vector operand ``{a, b, c}``; an item written as ``_`` is None."""

    items: tuple[Operand | None, ...]


@dataclass(frozen=True)
class Pair:
    """Two results, written as ``a|b``."""

    first: Operand | None
    second: Operand | None


@dataclass(frozen=True)
class Not:
    """A negated predicate operand, ``!p``."""

    predicate: Register


Operand = Register | Special | Immediate | Symbol | Address | Vector | Pair | Not


@dataclass(frozen=True)
class Location:
    """A source line, and the line of the call if the code is inlined."""

    file: str
    line: int
    caller: Location | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f", inlined at {self.caller}" if self.caller else "")


@dataclass(frozen=True)
class Instruction:
    """An instruction. ``guard`` is the predicate of ``@p`` (a Not for ``@!p``); ``line`` counts in the PTX text."""

    opcode: str
    operands: tuple[Operand | None, ...]
    guard: Register | Not | None
    line: int
    source: Location | None


@dataclass(frozen=True)
class Variable:
    """A declared variable in ``space`` (global, const, shared, local, param); ``size`` 0 is dynamic shared memory."""

    name: str
    space: str
    align: int
    size: int
    data: bytes = b""


@dataclass
class Function:
    """An entry point. ``labels`` give the index of the next instruction, ``tables`` the targets of ``brx.idx``."""

    name: str
    parameters: list[Variable]
    variables: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Module:
    """A parsed module: its entry points by name. Functions declared by ``.func`` are omitted; ``call`` is refused."""

    functions: dict[str, Function]
    variables: list[Variable]


@dataclass(slots=True)
class _Statement:
    kind: str  # "text", "label", "open" or "close" (of a scope)
    text: str
    line: int
    loc: Location | None


_BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_INSTRUCTION_LINE = re.compile(r"\s*((?:@!?[\w$%]+\s+)?[a-z]\w*(?:(?:\.|::)\w+)*(?:\s[^;\"/]*)?);\s*$")
"""The regular expression for a line that holds exactly one instruction, as nearly all lines do."""
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at (\d+) (\d+) (\d+))?")
_TOKEN = re.compile(
    r"""(?P<comment>//.*)
      |(?P<mark>[{};])
      |(?P<blank>\s+)
      |(?P<label>[\w$]+)[ \t]*:(?!:)
      |(?P<text>"[^"]*"|[^{};"/\s][^{};"/]*|.)""",
    re.VERBOSE,
)
_HEADER = re.compile(r"\.(entry|func|section)\b")


def _statements(text: str) -> Iterator[_Statement]:
    """Split the text into statements, labels and scope delimiters."""
    files = {number: Path(name).name for number, name in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    seen: dict[tuple[str, ...], Location] = {}
    start, loc = 1, None
    parts: list[str] = []
    for line, content in enumerate(text.split("\n"), 1):
        if not parts and (instruction := _INSTRUCTION_LINE.match(content)):
            yield _Statement("text", instruction[1], line, loc)
            continue
        if place := _LOC.match(content):
            file, number, column, *inlined = place.groups()
            if number != "0":  # line 0 means unknown: keep the preceding location
                caller = seen.get(tuple(inlined)) if inlined[0] else None
                loc = seen[file, number, column] = Location(files.get(file, "?"), int(number), caller)
            continue
        if content.lstrip().startswith(".file"):
            continue
        for token in _TOKEN.finditer(content):
            word, kind = token[0], token.lastgroup
            if kind == "mark" and (word == ";" or _is_scope(parts)):
                if parts or word == "{":
                    yield _Statement("open" if word == "{" else "text", "".join(parts).strip(), start, loc)
                if word == "}":
                    yield _Statement("close", "", line, loc)
                parts = []
            elif kind == "label" and not parts:
                yield _Statement("label", token["label"], line, loc)
            elif kind in ("text", "mark", "label"):
                if not parts:
                    start = line
                parts.append(word)
            elif parts:
                parts.append(" ")
        if parts:
            parts.append(" ")


def _is_scope(parts: list[str]) -> bool:
    """Return whether the brace after ``parts`` opens a scope, rather than a vector operand or an initializer."""
    return not parts or bool(_HEADER.search("".join(parts)))


_VARIABLE = re.compile(
    r"(?:\.(?:extern|visible|weak)\s+)*\.(?P<space>global|const|shared|local|param)\b\s*(?:\.attribute\([^)]*\)\s*)?"
    r"(?P<marks>(?:\.ptr\s*|\.align\s+\d+\s*|\.(?:global|const|shared|local)\s+)*)\.(?P<type>\w+)\s*"
    r"(?P<marks2>(?:\.ptr\s*|\.align\s+\d+\s*|\.(?:global|const|shared|local)\s+)*)"
    r"(?P<name>[\w$%]+)\s*(?P<dims>(?:\[\d*\])*)\s*(?:=\s*(?P<init>.*))?$",
    re.DOTALL,
)


def _variable(text: str) -> Variable:
    match = _VARIABLE.match(text.strip())
    if not match:
        raise PtxError(f"declaration not understood: {text}")
    each = TYPE_BYTES[match["type"]]
    count = 1
    for dim in re.findall(r"\[(\d*)\]", match["dims"]):
        count *= int(dim or 0)
    # The .align after a pointer's type is the alignment of the data that it points to, not of the parameter.
    align = re.search(r"\.align\s+(\d+)", match["marks"])
    values = re.findall(r"[^\s,{}]+", match["init"] or "")
    data = b"".join((_number(value).value % 2 ** (8 * each)).to_bytes(each, "little") for value in values)
    return Variable(match["name"], match["space"], int(align[1]) if align else each, each * count, data)


_NUMBER = re.compile(r"(-?)(?:0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})|(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?)$")
_DECIMAL = re.compile(r"-?\d+\.\d*(?:[eE][-+]?\d+)?$")


def _number(text: str) -> Immediate:
    if match := _NUMBER.match(text):
        sign, single, double, integer = match.groups()
        if single or double:
            if sign:
                raise PtxError(f"negated float bits: {text}")
            return Immediate(int(single or double, 16), 32 if single else 64)
        octal = len(integer) > 1 and integer[0] == "0" and integer.isdigit()
        value = int(integer, 8 if octal else 0)
        return Immediate(-value if sign else value)
    if _DECIMAL.match(text):
        return Immediate(float(text))
    raise PtxError(f"number not understood: {text}")


class _Scope:
    """The registers and labels that one ``{ }`` of PTX declares. Inner scopes hide outer ones."""

    def __init__(self, parent: _Scope | None, serial: int) -> None:
        self.parent = parent
        self.suffix = f"~{serial}" if parent else ""
        self.registers: dict[str, Register] = {}
        self.ranges: dict[str, tuple[str, int]] = {}
        self.labels: dict[str, str] = {}
        # A cache from an operand's text to the operand, used once all declarations of the function are known.
        self.operands: dict[str, Operand | None] = {}

    def declare(self, text: str) -> None:
        """Declare registers from the text of a ``.reg`` statement, such as ``.reg .b32 %r<58>, p``."""
        match = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", text, re.DOTALL)
        if not match:
            raise PtxError(f"declaration not understood: {text}")
        for name in match[2].split(","):
            prefix, _, count = name.strip().partition("<")
            if count:
                self.ranges[prefix] = match[1], int(count.rstrip(">"))
            else:
                self.registers[prefix] = Register(prefix + self.suffix, match[1])

    def register(self, name: str) -> Register | None:
        if name in self.registers:
            return self.registers[name]
        prefix = name.rstrip("0123456789")
        if prefix in self.ranges and prefix != name and int(name[len(prefix) :]) < self.ranges[prefix][1]:
            self.registers[name] = Register(name + self.suffix, self.ranges[prefix][0])
            return self.registers[name]
        return self.parent.register(name) if self.parent else None

    def label(self, name: str) -> str | None:
        return self.labels.get(name) or (self.parent.label(name) if self.parent else None)


def _split(text: str) -> list[str]:
    """Return the parts of a text between the commas that are outside of brackets."""
    if "{" not in text:
        return [part.strip() for part in text.split(",") if part.strip()]
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in ")}]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


_INSTRUCTION = re.compile(r"(?:@(!?)\s*([\w$%]+)\s+)?([\w.:]+)\s*(.*)$", re.DOTALL)


class _Body:
    """The builder of one function. It reads all declarations first, so that labels can be used before them."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def build(self, statements: list[_Statement]) -> None:
        scopes = self._declare(statements)
        for statement, scope in zip(statements, scopes, strict=True):
            text = statement.text
            if statement.kind == "label":
                label = scope.label(text)
                if label is None:
                    raise PtxError(f"PTX line {statement.line}: no such label: {text}")
                self.function.labels[label] = len(self.function.instructions)
            elif text.startswith(".branchtargets"):
                table = [name for name, at in self.function.labels.items() if at == len(self.function.instructions)][-1]
                self.function.tables[table] = [
                    scope.label(name.strip()) or "" for name in text.removeprefix(".branchtargets").split(",")
                ]
            elif statement.kind == "text" and not text.startswith("."):
                self.function.instructions.append(self._instruction(statement, scope))

    def _declare(self, statements: list[_Statement]) -> list[_Scope]:
        """Read all declarations and return the scope of each statement."""
        scope = _Scope(None, 0)
        scopes = []
        for serial, statement in enumerate(statements, 1):
            if statement.kind == "open":
                scope = _Scope(scope, serial)
            scopes.append(scope)
            if statement.kind == "close" and scope.parent:
                scope = scope.parent
            elif statement.kind == "label":
                scope.labels[statement.text] = statement.text + scope.suffix
            elif statement.text.startswith(".reg"):
                scope.declare(statement.text)
            elif statement.text.startswith((".shared", ".local")):
                self.function.variables.append(_variable(statement.text))
        return scopes

    def _instruction(self, statement: _Statement, scope: _Scope) -> Instruction:
        match = _INSTRUCTION.match(statement.text)
        if not match:
            raise PtxError(f"PTX line {statement.line}: not understood: {statement.text}")
        negated, predicate, opcode, rest = match.groups()
        try:
            guard = self._operand(("!" if negated else "") + predicate, scope) if predicate else None
            operands = tuple(self._operand(part, scope) for part in _split(rest))
        except PtxError as error:
            raise PtxError(f"PTX line {statement.line}: {error}") from None
        assert guard is None or isinstance(guard, (Register, Not))
        return Instruction(opcode, operands, guard, statement.line, statement.loc)

    def _operand(self, text: str, scope: _Scope) -> Operand | None:
        if text not in scope.operands:
            scope.operands[text] = self._read_operand(text, scope)
        return scope.operands[text]

    def _read_operand(self, text: str, scope: _Scope) -> Operand | None:
        if text == "_":
            return None
        if text[0] == "[":
            return self._address(text[1:-1].strip(), scope)
        if text[0] == "{":
            return Vector(tuple(self._operand(item.strip(), scope) for item in text[1:-1].split(",")))
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip(), scope), self._operand(second.strip(), scope))
        if text[0] == "!":
            register = scope.register(text[1:].strip())
            if register is None:
                raise PtxError(f"no such predicate: {text}")
            return Not(register)
        if register := scope.register(text):
            return register
        if text[0].isdigit() or text[0] == "-":
            return _number(text)
        if text[0] == "%":
            return Special(text)
        if label := scope.label(text):
            return Symbol(label)
        return Symbol(text)

    def _address(self, text: str, scope: _Scope) -> Address:
        place, _, coordinates = text.partition(",")
        base, _, offset = place.partition("+")
        operand = self._operand(base.strip(), scope)
        vector = self._operand(coordinates.strip(), scope) if coordinates else None
        if operand is None or not (vector is None or isinstance(vector, Vector)):
            raise PtxError(f"address not understood: [{text}]")
        items = tuple(item for item in vector.items if item is not None) if vector else ()
        return Address(operand, int(offset.strip() or "0", 0), items)


_UNUSED = re.compile(r"^\s*\.(?:version|target|address_size)\b[^\n]*|^\s*\.section\b[^{]*\{[^}]*\}", re.MULTILINE)


def parse(text: str) -> Module:
    """Parse the PTX of one module. Raises PtxError for what it does not understand."""
    module = Module({}, [])
    for unused in (_BLOCK_COMMENT, _UNUSED):
        text = unused.sub(lambda match: " " + "\n" * match[0].count("\n"), text)
    statements = list(_statements(text))
    position = 0
    while position < len(statements):
        statement = statements[position]
        position += 1
        if statement.kind == "open":
            end = _closing(statements, position)
            if entry := re.search(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?", statement.text, re.DOTALL):
                parameters = [_variable(part) for part in (entry[2] or "").split(",") if part.strip()]
                function = Function(entry[1], parameters)
                _Body(function).build(statements[position : end - 1])
                module.functions[entry[1]] = function
            position = end
        elif re.match(r"(\.(extern|visible|weak)\s+)*\.(global|const|shared)\b", statement.text):
            module.variables.append(_variable(statement.text))
    return module


def _closing(statements: list[_Statement], position: int) -> int:
    """Return the index after the end of the scope that was opened before ``position``."""
    depth = 1
    while depth:
        depth += {"open": 1, "close": -1}.get(statements[position].kind, 0)
        position += 1
    return position
