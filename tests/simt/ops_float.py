# SPDX-License-Identifier: Apache-2.0
"""The translation of floating-point instructions and conversions (PTX ISA 9.7.3-9.7.5, 9.7.9.21).

Values of 16-bit types are widened to float32, computed there, and rounded once.
"""

from __future__ import annotations

from re import Match

from tests.simt.emit import BlockCode, Operand, emits
from tests.simt.ops_integer import COMPARE, SYMBOL, set_predicates

HALF = r"(f16|bf16)(x2)?"


def _single(b: BlockCode, operand: Operand, kind: str, ftz: str | None) -> str:
    value = b.use(operand, kind)
    return f"flush({value})" if ftz else value


def _finish(b: BlockCode, d: Operand, kind: str, value: str, ftz: str | None, sat: str | None = None) -> None:
    if ftz:
        value = f"flush({value})"
    b.define(d, kind, f"saturate({value})" if sat else value)


@emits(r"(add|sub|mul)(?:\.rn)?(\.ftz)?(\.sat)?\.(f32|f64)")
def add(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    kind = m[4]
    value = f"({_single(b, x, kind, m[2])} {SYMBOL[m[1]]} {_single(b, y, kind, m[2])})"
    _finish(b, d, kind, value, m[2], m[3])


@emits(r"(?:fma\.rn|mad\.rn|mad)(\.ftz)?(\.sat)?\.f32")
def fma(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, z: Operand) -> None:
    values = ", ".join(_single(b, v, "f32", m[1]) for v in (x, y, z))
    _finish(b, d, "f32", f"fma_f32({values})", m[1], m[2])


@emits(r"fma\.rm(\.ftz)?(\.sat)?\.f32")
def fma_down(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, z: Operand) -> None:
    values = ", ".join(_single(b, v, "f32", m[1]) for v in (x, y, z))
    _finish(b, d, "f32", f"fma_down_f32({values})", m[1], m[2])


@emits(r"div\.(?:rn|approx|full)(\.ftz)?\.(f32|f64)")
def divide(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    _finish(b, d, m[2], f"({_single(b, x, m[2], m[1])} / {_single(b, y, m[2], m[1])})", m[1])


@emits(r"(neg|abs)(\.ftz)?\.(f32|f64)")
def negate(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    value = _single(b, x, m[3], m[2])
    b.define(d, m[3], f"-{value}" if m[1] == "neg" else f"np_abs({value})")


@emits(r"(min|max)(\.ftz)?(\.NaN)?(\.xorsign\.abs)?\.(f32|f64)")
def minimum(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    left, right = _single(b, x, m[5], m[2]), _single(b, y, m[5], m[2])
    if m[4]:
        left, right = b.temporary(left), b.temporary(right)
        sign = f"(np_signbit({left}) ^ np_signbit({right}))"
        value = b.temporary(f"{m[1]}imum{'_nan' if m[3] else ''}(np_abs({left}), np_abs({right}))")
        b.define(d, m[5], f"np_where({sign}, -{value}, {value})")
    else:
        b.define(d, m[5], f"{m[1]}imum{'_nan' if m[3] else ''}({left}, {right})")


FUNCTIONS = {
    "rcp": "(1 / {})",
    "sqrt": "np_sqrt({})",
    "rsqrt": "(1 / np_sqrt({}))",
    "ex2": "np_exp2({})",
    "lg2": "np_log2({})",
    "sin": "np_sin({})",
    "cos": "np_cos({})",
    "tanh": "np_tanh({})",
}


@emits(r"(rcp|sqrt|rsqrt|ex2|lg2|sin|cos|tanh)(?:\.rn|\.approx)(\.ftz)?\.f32")
def function(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    """Compute approximate functions in float64 and round once, within the error bounds of hardware."""
    value = f"{_single(b, x, 'f32', m[2])}.astype(float64)"
    _finish(b, d, "f32", FUNCTIONS[m[1]].format(value) + ".astype(float32)", m[2])


@emits(r"copysign\.(f32|f64)")
def copy_sign(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    b.define(d, m[1], f"np_copysign({b.use(y, m[1])}, {b.use(x, m[1])})")


@emits(r"testp\.(finite|infinite|number|notanumber)\.(f32|f64)")
def test_property(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    tests = {"finite": "np_isfinite", "infinite": "np_isinf", "number": "~np_isnan", "notanumber": "np_isnan"}
    b.define(d, "pred", f"{tests[m[1]]}({b.use(x, m[2])})")


def _half(b: BlockCode, operand: Operand, kind: str, pair: str | None) -> str:
    bits = f"halves({b.use(operand, 'b32')})" if pair else b.use(operand, "b16")
    return f"{kind}_to_f32({bits})"


def _finish_half(b: BlockCode, d: Operand, kind: str, pair: str | None, value: str) -> None:
    bits = f"f32_to_{kind}({value})"
    if pair:
        b.define(d, "b32", f"words({bits})")
    else:
        b.define(d, "b16", bits)


@emits(rf"(add|sub|mul)(?:\.rn)?(\.sat)?\.{HALF}")
def add_half(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    """Add 16-bit floats in float32: with over twice their bits plus two, rounding twice equals rounding once."""
    value = f"({_half(b, x, m[3], m[4])} {SYMBOL[m[1]]} {_half(b, y, m[3], m[4])})"
    _finish_half(b, d, m[3], m[4], f"saturate({value})" if m[2] else value)


@emits(rf"fma\.rn(\.sat|\.relu)?\.{HALF}")
def fma_half(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, z: Operand) -> None:
    value = f"fma_{m[2]}({', '.join(_half(b, v, m[2], m[3]) for v in (x, y, z))})"
    finish = {None: "{}", ".sat": "saturate({})", ".relu": "relu({})"}[m[1]]
    _finish_half(b, d, m[2], m[3], finish.format(value))


@emits(rf"(neg|abs)\.{HALF}")
def negate_half(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    dtype, sign = ("b32", 0x80008000) if m[3] else ("b16", 0x8000)
    mask = b.constant(sign if m[1] == "neg" else sign ^ (0xFFFFFFFF if m[3] else 0xFFFF), f"uint{dtype[1:]}")
    b.define(d, dtype, f"{b.use(x, dtype)} {'^' if m[1] == 'neg' else '&'} {mask}")


@emits(rf"(min|max)(\.NaN)?\.{HALF}")
def minimum_half(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    left, right = _half(b, x, m[3], m[4]), _half(b, y, m[3], m[4])
    _finish_half(b, d, m[3], m[4], f"{m[1]}imum{'_nan' if m[2] else ''}({left}, {right})")


@emits(rf"(ex2|tanh)\.approx(?:\.ftz)?\.{HALF}")
def function_half(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    _finish_half(b, d, m[2], m[3], FUNCTIONS[m[1]].format(_half(b, x, m[2], m[3])))


ORDERED = r"(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)"
OPPOSITE = {"eq": "neu", "ne": "equ", "lt": "geu", "le": "gtu", "gt": "leu", "ge": "ltu"}
UNORDERED = {f"{opposite}": name for name, opposite in OPPOSITE.items()}


def _test(left: str, right: str, how: str) -> str:
    """Return the expression of a comparison; the unordered forms, and ``!=``, are true if an operand is NaN."""
    if how in ("num", "nan"):
        nan = f"(np_isnan({left}) | np_isnan({right}))"
        return nan if how == "nan" else f"~{nan}"
    if how == "ne":
        return f"({left} < {right}) | ({left} > {right})"
    if how in UNORDERED:
        return f"{left} != {right}" if how == "neu" else f"~({_test(left, right, UNORDERED[how])})"
    return f"{left} {COMPARE[how]} {right}"


@emits(rf"setp\.{ORDERED}(?:\.(and|or|xor))?(\.ftz)?\.(f32|f64)")
def compare(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, p: Operand = None) -> None:
    set_predicates(b, d, _test(_single(b, x, m[4], m[3]), _single(b, y, m[4], m[3]), m[1]), m[2], p)


@emits(rf"setp\.{ORDERED}(?:\.(and|or|xor))?(?:\.ftz)?\.(f16|bf16)")
def compare_half(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, p: Operand = None) -> None:
    set_predicates(b, d, _test(_half(b, x, m[3], None), _half(b, y, m[3], None), m[1]), m[2], p)


@emits(rf"setp\.{ORDERED}(?:\.ftz)?\.(f16|bf16)x2")
def compare_pair(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    test = b.temporary(_test(_half(b, x, m[2], "x2"), _half(b, y, m[2], "x2"), m[1]))
    b.define_pair(d, "pred", f"{test}[..., 0]", f"{test}[..., 1]")


@emits(rf"set\.{ORDERED}(?:\.ftz)?\.(f16x2|bf16x2|u32)\.(f16|bf16)x2")
def compare_pair_to_mask(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    one = {"f16x2": 0x3C00, "bf16x2": 0x3F80, "u32": 0xFFFF}[m[2]]
    test = _test(_half(b, x, m[3], "x2"), _half(b, y, m[3], "x2"), m[1])
    b.define(d, "b32", f"words(np_where({test}, {b.constant(one, 'uint16')}, uint16(0)))")


@emits(rf"set\.{ORDERED}(?:\.ftz)?\.(f32|u32|s32)\.(f32)")
def compare_to_value(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand) -> None:
    one, zero = ("float32(1)", "float32(0)") if m[2] == "f32" else ("uint32(0xFFFFFFFF)", "uint32(0)")
    b.define(
        d,
        "f32" if m[2] == "f32" else "u32",
        f"np_where({_test(b.use(x, 'f32'), b.use(y, 'f32'), m[1])}, {one}, {zero})",
    )


@emits(r"cvt\.rn\.(f32|f64)\.([us](?:8|16|32|64))")
def from_integer(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    b.define(d, m[1], f"{b.use(x, m[2])}.astype(float{m[1][1:]})")


@emits(r"cvt\.rn\.(f16|bf16)\.([us](?:8|16|32))")
def half_from_integer(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    value = f"{b.use(x, m[2])}.astype(float64)"
    _finish_half(b, d, m[1], None, value if m[1] == "f16" else f"f64_to_f32_odd({value})")


@emits(r"cvt\.(rni|rzi|rmi|rpi)(\.ftz)?(?:\.sat)?\.([us](?:8|16|32|64))\.(f32|f64)")
def to_integer(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    dtype = ("u" if m[3][0] == "u" else "") + f"int{m[3][1:]}"
    b.define(d, m[3], f"to_integer({_single(b, x, m[4], m[2])}, {dtype}, {m[1]!r})")


@emits(r"cvt\.(rni|rzi|rmi|rpi)(?:\.sat)?\.([us](?:8|16|32|64))\.(f16|bf16)")
def half_to_integer(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    dtype = ("u" if m[2][0] == "u" else "") + f"int{m[2][1:]}"
    b.define(d, m[2], f"to_integer({_half(b, x, m[3], None)}, {dtype}, {m[1]!r})")


@emits(r"cvt(?:\.(rni|rzi|rmi|rpi))?(\.ftz)?(\.sat)?\.f32\.f32")
def round_single(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    value = _single(b, x, "f32", m[2])
    _finish(b, d, "f32", f"round_whole({value}, {m[1]!r})" if m[1] else value, m[2], m[3])


@emits(r"cvt(?:\.rn)?(\.ftz)?(\.sat)?\.(f32|f64)\.(f32|f64)")
def convert(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    flushed = m[1] if m[4] == "f32" else None
    value = f"{_single(b, x, m[4], flushed)}.astype(float{m[3][1:]})"
    _finish(b, d, m[3], value, m[1] if m[3] == "f32" else None, m[2])


@emits(r"cvt(?:\.ftz)?(\.sat)?\.(f32)\.(f16|bf16)")
def from_half(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    _finish(b, d, "f32", _half(b, x, m[3], None), None, m[1])


@emits(r"cvt\.(rn|rz)(\.ftz)?(\.sat|\.relu)?\.(f16|bf16)\.(f32|f64|f16|bf16)")
def to_half(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    value = _single(b, x, m[5], m[2]) if m[5][0] == "f" and m[5] != "f16" else _half(b, x, m[5], None)
    _narrow(b, d, m[4], m[1], m[3], value, "b16")


@emits(r"cvt\.(rn|rz)(\.relu)?\.(f16|bf16)x2\.f32")
def to_pair(b: BlockCode, m: Match[str], d: Operand, high: Operand, low: Operand) -> None:
    upper = _narrowed(b, m[3], m[1], m[2], b.use(high, "f32"))
    lower = _narrowed(b, m[3], m[1], m[2], b.use(low, "f32"))
    b.define(d, "b32", f"({upper}.astype(uint32) << uint32(16)) | {lower}")


@emits(r"cvt\.rn\.satfinite\.e4m3x2\.f32")
def to_float8_pair(b: BlockCode, m: Match[str], d: Operand, high: Operand, low: Operand) -> None:
    upper, lower = (f"f32_to_e4m3({b.use(x, 'f32')}).astype(uint16)" for x in (high, low))
    b.define(d, "b16", f"({upper} << uint16(8)) | {lower}")


@emits(r"cvt\.rn\.f16x2\.e4m3x2")
def from_float8_pair(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    value = b.temporary(b.use(x, "b16"))
    lower, upper = (f"f32_to_f16(e4m3_to_f32({byte}))" for byte in (f"{value} & uint16(255)", f"{value} >> uint16(8)"))
    b.define(d, "b32", f"({upper}.astype(uint32) << uint32(16)) | {lower}")


def _narrowed(b: BlockCode, kind: str, rounding: str, finish: str | None, value: str) -> str:
    value = {None: "{}", ".sat": "saturate({})", ".relu": "relu({})"}[finish].format(value)
    return f"f32_to_{kind}{'_rz' if rounding == 'rz' else ''}({value})"


def _narrow(b: BlockCode, d: Operand, kind: str, rounding: str, finish: str | None, value: str, used: str) -> None:
    b.define(d, used, _narrowed(b, kind, rounding, finish, value))
