# SPDX-License-Identifier: Apache-2.0
"""The translation of integer arithmetic, logic, comparisons and moves (PTX ISA 9.7.1, 9.7.2, 9.7.6-9.7.9)."""

from __future__ import annotations

from re import Match

from tests.simt.emit import BlockCode, Operand, emits, items
from tests.simt.parser import TYPE_BYTES, Immediate, Pair, Vector

INT = r"([us](?:16|32|64))"
SYMBOL = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^", "mul": "*"}


@emits(rf"(add|sub)\.{INT}")
def add(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    b.define(d, m[2], f"{b.use(x, m[2])} {SYMBOL[m[1]]} {b.use(y, m[2])}")


@emits(r"(add|sub)(c)?(\.cc)?\.([us]32|[us]64)")
def add_with_carry(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    """Keep the carry flag in a Python variable: the compiler never splits a chain of carries across blocks."""
    kind = "u" + m[4][1:]
    left, right = b.use(x, kind), b.use(y, kind)
    dtype = f"uint{kind[1:]}"
    carry_in = f"carry.astype({dtype})" if m[2] else f"{dtype}(0)"
    first = b.temporary(f"{left} {SYMBOL[m[1]]} {right}")
    total = b.temporary(f"{first} {SYMBOL[m[1]]} {carry_in}")
    if m[3]:
        if m[1] == "add":
            b.line(f"carry = ({first} < {left}) | ({total} < {first})")
        else:
            b.line(f"carry = ({first} > {left}) | ({total} > {first})")
    b.define(d, kind, total)


@emits(rf"(mul|mad)\.(lo|hi|wide)\.{INT}")
def multiply(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, z: Operand = None) -> None:
    kind, bits = m[3], int(m[3][1:])
    left, right = b.use(x, kind), b.use(y, kind)
    wide = kind[0] + str(2 * bits)
    dtype = ("u" if kind[0] == "u" else "") + f"int{2 * bits}"
    result = kind
    if m[2] == "lo":
        product = f"{left} * {right}"
    elif m[2] == "hi" and bits == 64:
        product = f"multiply_high({left}, {right})"
    else:
        product = f"{left}.astype({dtype}) * {right}.astype({dtype})"
        result = wide
        if m[2] == "hi":
            product, result = f"({product} >> {b.constant(bits, dtype)}).astype({dtype[:-2]}{bits})", kind
    b.define(d, result, f"{product} + {b.use(z, result)}" if m[1] == "mad" else product)


@emits(r"(mul|mad)24\.(lo)\.([us]32)")
def multiply24(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, z: Operand = None) -> None:
    shift = b.constant(8, "int32" if m[3][0] == "s" else "uint32")
    left, right = (f"(({b.use(v, m[3])} << {shift}) >> {shift})" for v in (x, y))
    b.define(d, m[3], f"{left} * {right}" + (f" + {b.use(z, m[3])}" if m[1] == "mad" else ""))


@emits(rf"(div|rem)\.{INT}")
def divide(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    b.define(d, m[2], f"divide({b.use(x, m[2])}, {b.use(y, m[2])}, {m[1] == 'rem'})")


@emits(r"(neg|abs)\.(s16|s32|s64)")
def negate(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    b.define(d, m[2], f"-{b.use(x, m[2])}" if m[1] == "neg" else f"np_abs({b.use(x, m[2])})")


@emits(rf"(min|max)\.{INT}")
def integer_minimum(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    b.define(d, m[2], f"np_{m[1]}imum({b.use(x, m[2])}, {b.use(y, m[2])})")


@emits(r"(and|or|xor)\.(pred|b16|b32|b64)")
def logic(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    b.define(d, m[2], f"{b.use(x, m[2])} {SYMBOL[m[1]]} {b.use(y, m[2])}")


@emits(r"not\.(pred|b16|b32|b64)")
def invert(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    b.define(d, m[1], f"~{b.use(x, m[1])}")


@emits(r"cnot\.(b16|b32|b64)")
def is_zero(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    b.define(d, m[1], f"({b.use(x, m[1])} == 0).astype(uint{m[1][1:]})")


@emits(r"(shl|shr)\.([bus])(16|32|64)")
def shift(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    """Translate shifts: PTX clamps the amount to the register width, where NumPy's result would be undefined."""
    kind = ("b" if m[1] == "shl" else m[2]) + m[3]
    dtype = ("int" if kind[0] == "s" else "uint") + m[3]
    if isinstance(y, Immediate):
        amount = b.constant(min(int(y.value), int(m[3])), dtype)
    else:
        amount = f"np_minimum({b.use(y, 'u32')}, {b.constant(int(m[3]), 'uint32')}).astype({dtype})"
    b.define(d, kind, f"{b.use(x, kind)} {'<<' if m[1] == 'shl' else '>>'} {amount}")


@emits(r"shf\.(l|r)\.(wrap|clamp)\.b32")
def funnel_shift(b: BlockCode, m: Match[str], d: Operand, low: Operand, high: Operand, amount: Operand) -> None:
    n = b.use(amount, "u32")
    n = f"({n} & uint32(31))" if m[2] == "wrap" else f"np_minimum({n}, uint32(32))"
    both = f"({b.use(low, 'u32')}.astype(uint64) | ({b.use(high, 'u32')}.astype(uint64) << uint64(32)))"
    if m[1] == "l":
        b.define(d, "u32", f"(({both} << {n}.astype(uint64)) >> uint64(32)).astype(uint32)")
    else:
        b.define(d, "u32", f"({both} >> {n}.astype(uint64)).astype(uint32)")


TWO_INPUTS = (
    "uint32(0)", "~({y} | {z})", "(~{y} & {z})", "~{y}", "({y} & ~{z})", "~{z}", "({y} ^ {z})", "~({y} & {z})",
    "({y} & {z})", "~({y} ^ {z})", "{z}", "(~{y} | {z})", "{y}", "({y} | ~{z})", "({y} | {z})", "uint32(0xFFFFFFFF)",
)  # fmt: skip
"""The expressions of all functions of two bits, by their truth table, whose bit ``y << 1 | z`` is the value."""


@emits(r"lop3\.b32")
def lop3(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, z: Operand, table: Operand) -> None:
    """Translate ``lop3``, whose table has bit ``x << 2 | y << 1 | z``, by one expression for each half of the table."""
    left, right = b.use(y, "b32"), b.use(z, "b32")
    clear, set_ = (TWO_INPUTS[half].format(y=left, z=right) for half in (table.value & 15, table.value >> 4))
    first = b.use(x, "b32")
    if clear == set_:
        value = clear
    elif table.value & 15 == ~table.value >> 4 & 15:
        value = f"{first} ^ {clear}"
    else:
        parts = {(clear, f"~{first}"), (set_, first)}
        value = " | ".join(f"({half} & {mask})" for half, mask in sorted(parts) if half != TWO_INPUTS[0])
    b.define(d, "b32", value)


@emits(r"prmt\.b32(?:\.(f4e|b4e|rc8|ecl|ecr|rc16))?")
def permute(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, selector: Operand) -> None:
    if isinstance(selector, Immediate) and not m[1] and not selector.value & 0x8888:
        b.define(d, "b32", _permuted(b.use(x, "b32"), b.use(y, "b32"), int(selector.value)))
        return
    pick = b.use(selector, "u32")
    if m[1]:
        pick = f"permute_mode({pick}, {m[1]!r})"
    b.define(d, "b32", f"permute_bytes({b.use(x, 'b32')}, {b.use(y, 'b32')}, {pick})")


def _permuted(x: str, y: str, selector: int) -> str:
    """Return ``prmt`` with a constant selector as one shift and mask for all bytes that move equally far."""
    masks: dict[tuple[str, int], int] = {}
    for byte in range(4):
        source = selector >> 4 * byte & 7
        move = x if source < 4 else y, byte - source % 4
        masks[move] = masks.get(move, 0) | 0xFF << 8 * byte
    terms = []
    for (value, distance), mask in masks.items():
        shifted = f"({value} {'<<' if distance > 0 else '>>'} uint32({8 * abs(distance)}))" if distance else value
        whole = (0xFFFFFFFF << 8 * distance if distance > 0 else 0xFFFFFFFF >> -8 * distance) & 0xFFFFFFFF
        terms.append(shifted if mask == whole else f"({shifted} & uint32({mask}))")
    return " | ".join(terms)


@emits(r"popc\.b(32|64)")
def population(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    b.define(d, "u32", f"bit_count({b.use(x, 'b' + m[1])})")


@emits(r"(clz|brev)\.b(32|64)")
def bits(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    if m[1] == "brev":
        b.define(d, "b" + m[2], f"reverse_bits({b.use(x, 'b' + m[2])}, {m[2]})")
    else:
        b.define(d, "u32", f"leading_zeros({b.use(x, 'b' + m[2])}, {m[2]})")


@emits(r"bfind(\.shiftamt)?\.([us])(32|64)")
def find_bit(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    b.define(d, "u32", f"highest_bit({b.use(x, m[2] + m[3])}, {m[3]}, {bool(m[1])})")


@emits(r"bfe\.([us])(32|64)")
def extract(b: BlockCode, m: Match[str], d: Operand, x: Operand, position: Operand, length: Operand) -> None:
    value = b.use(x, m[1] + m[2])
    b.define(d, "b" + m[2], f"extract_field({value}, {b.use(position, 'u32')}, {b.use(length, 'u32')}, {m[2]})")


@emits(r"bfi\.b(32|64)")
def insert(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, position: Operand, length: Operand) -> None:
    values = f"{b.use(x, 'b' + m[1])}, {b.use(y, 'b' + m[1])}"
    b.define(d, "b" + m[1], f"insert_field({values}, {b.use(position, 'u32')}, {b.use(length, 'u32')}, {m[1]})")


@emits(r"dp4a\.([us])32\.([us])32")
def dot4(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, z: Operand) -> None:
    values = ", ".join(b.use(v, "b32") for v in (x, y, z))
    b.define(d, "b32", f"dot_bytes({values}, {m[1] == 's'}, {m[2] == 's'})")


@emits(r"dp2a\.(lo|hi)\.([us])32\.([us])32")
def dot2(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, z: Operand) -> None:
    values = ", ".join(b.use(v, "b32") for v in (x, y, z))
    b.define(d, "b32", f"dot_halves({values}, {m[2] == 's'}, {m[3] == 's'}, {m[1] == 'hi'})")


@emits(rf"sad\.{INT}")
def absolute_difference(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, z: Operand) -> None:
    left, right = b.use(x, m[1]), b.use(y, m[1])
    b.define(d, m[1], f"np_where({left} < {right}, {right} - {left}, {left} - {right}) + {b.use(z, m[1])}")


COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARE |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}  # unsigned comparisons


@emits(r"setp\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)(?:\.(and|or|xor))?\.([bus](?:16|32|64))")
def compare(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, p: Operand = None) -> None:
    set_predicates(b, d, f"{b.use(x, m[3])} {COMPARE[m[1]]} {b.use(y, m[3])}", m[2], p)


def set_predicates(b: BlockCode, d: Operand, test: str, combine: str | None, p: Operand) -> None:
    """Set the results of ``setp``: the comparison and, for a pair, its negation, each combined with ``p``."""
    test = b.temporary(test)
    first, second = test, f"~{test}"
    if combine:
        other = b.predicate(p)
        first, second = (f"{value} {SYMBOL[combine]} {other}" for value in (first, second))
    if isinstance(d, Pair):
        second = b.temporary(second)
    b.define_pair(d, "pred", first, second)


@emits(r"set\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)\.([us]32)\.([bus](?:16|32|64))")
def compare_to_mask(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    b.define(d, "u32", f"uint32(0) - ({b.use(x, m[3])} {COMPARE[m[1]]} {b.use(y, m[3])}).astype(uint32)")


@emits(r"selp\.([busf](?:16|32|64))")
def select(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, p: Operand) -> None:
    b.define(d, m[1], f"np_where({b.predicate(p)}, {b.use(x, m[1])}, {b.use(y, m[1])})")


@emits(r"slct\.([busf](?:32|64))\.(s32|f32)")
def select_by_sign(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, z: Operand) -> None:
    b.define(d, m[1], f"np_where({b.use(z, m[2])} >= 0, {b.use(x, m[1])}, {b.use(y, m[1])})")


@emits(r"mov\.(pred|[bus](?:16|32|64)|f32|f64)")
def move(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    """Move a value, pack ``{a, b}`` into a wider register (low part first), or unpack one."""
    if isinstance(x, Vector):
        each = 8 * TYPE_BYTES[m[1]] // len(x.items)
        dtype = f"uint{8 * TYPE_BYTES[m[1]]}"
        parts = [f"({b.use(v, f'b{each}')}.astype({dtype}) << {dtype}({k * each}))" for k, v in enumerate(x.items)]
        b.define(d, "b" + dtype[4:], " | ".join(parts))
    elif isinstance(d, Vector):
        each = 8 * TYPE_BYTES[m[1]] // len(d.items)
        value = b.temporary(b.use(x, f"b{8 * TYPE_BYTES[m[1]]}"))
        dtype = f"uint{8 * TYPE_BYTES[m[1]]}"
        for k, item in enumerate(items(d)):
            b.define(item, f"b{each}", f"({value} >> {dtype}({k * each})).astype(uint{each})")
    else:
        b.define(d, m[1], b.use(x, m[1]))


@emits(r"cvt(\.sat)?\.([us](?:8|16|32|64))\.([us](?:8|16|32|64))")
def convert(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    to, source = m[2], m[3]
    value = b.use(x, source)
    dtype = ("u" if to[0] == "u" else "") + f"int{to[1:]}"
    b.define(d, to, f"clip_integer({value}, {dtype})" if m[1] else f"{value}.astype({dtype})")
