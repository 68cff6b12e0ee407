# SPDX-License-Identifier: Apache-2.0
"""Tests of the simulator against plain Python: integers of any size and fractions that are rounded once, by thread."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests import simt
from tests.simt.case import THREADS, Case, same
from tests.simt.kernels import source_text
from tests.simt.opcodes import CASES
from tests.simt.record import simulate

FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}


def decode(bits: int, kind: str) -> Fraction | float:
    """Return the value of a float's bits: a Fraction, or a Python float for infinities, NaN and -0."""
    exponent_bits, fraction_bits = FORMATS[kind]
    sign = -1 if bits >> (exponent_bits + fraction_bits) & 1 else 1
    exponent, fraction = bits >> fraction_bits & (2**exponent_bits - 1), bits & (2**fraction_bits - 1)
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent == 2**exponent_bits - 1:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        value = sign * Fraction(fraction, 2 ** (bias - 1 + fraction_bits))
        return -0.0 if sign < 0 and not fraction else value
    return sign * (Fraction(fraction, 2**fraction_bits) + 1) * Fraction(2) ** (exponent - bias)


def encode(value: Fraction | float, kind: str, toward_zero: bool = False) -> int:
    """Return the bits of a value, rounded once to nearest even, or toward zero."""
    exponent_bits, fraction_bits = FORMATS[kind]
    top = exponent_bits + fraction_bits
    infinity = (2**exponent_bits - 1) << fraction_bits
    if isinstance(value, float):
        if math.isnan(value):
            return infinity | (2**fraction_bits - 1)
        if math.isinf(value):
            return infinity | (value < 0) << top
        if value == 0:
            return (math.copysign(1, value) < 0) << top
        value = Fraction(value)
    if not value:
        return 0
    bias = 2 ** (exponent_bits - 1) - 1
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    exponent = max(exponent, 1 - bias)
    scaled = size / Fraction(2) ** (exponent - fraction_bits)
    whole = math.floor(scaled) if toward_zero else round(scaled)
    bits = whole + ((exponent + bias - 1) << fraction_bits)
    if bits >= infinity:
        bits = infinity - 1 if toward_zero else infinity
    return bits | (value < 0) << top


def numeric(operation: str, *values: Fraction | float) -> Fraction | float:
    """Return the exact result of finite operands; else, and for the sign of zero, that of Python floats."""
    plain = [float(value) if isinstance(value, float) else value for value in values]
    formulas: dict[str, Callable[..., Fraction | float]] = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
        "fma": lambda x, y, z: x * y + z,
    }
    formula = formulas[operation]
    if all(math.isfinite(value) for value in plain):
        exact = formula(*(Fraction(value) for value in plain))
        if exact:
            return exact
    signed = [value if isinstance(value, float) else math.copysign(float(bool(value)) or 0.0, value) for value in plain]
    if operation in ("add", "sub", "fma") and all(math.isfinite(value) for value in plain):
        return formula(*signed) if not any(signed) else 0.0 if operation != "fma" else _zero_sum(signed)
    return formula(*signed)


def _zero_sum(values: list[float]) -> float:
    """Return the zero of x * y + z for a sum that is exactly 0: -0 only if both terms are -0."""
    term = values[0] * values[1]
    return (
        -0.0 if term == 0 and values[2] == 0 and math.copysign(1, term) < 0 and math.copysign(1, values[2]) < 0 else 0.0
    )


def signed(value: int, bits: int) -> int:
    value &= 2**bits - 1
    return value - 2**bits if value >> (bits - 1) else value


def operand(value: int, kind: str) -> int:
    bits = int(kind[1:])
    return signed(value, bits) if kind[0] == "s" else value & (2**bits - 1)


def bytes_of(word: int, kind: str) -> list[int]:
    return [operand(word >> shift, kind[0] + "8") for shift in range(0, 32, 8)]


def integer(case: Case, values: list[int]) -> int | None:
    """Return the result of an integer instruction, or None for one that this reference does not cover."""
    parts = case.name.split(".")
    kind = parts[-1]
    if kind not in ("s16", "u16", "s32", "u32", "s64", "u64", "b32", "b64"):
        return None
    bits = int(kind[1:])
    x, y, z = ([operand(value, kind) for value in values] + [0, 0, 0])[:3]
    raw = [*values, 0, 0]
    name = ".".join(parts[:-1])
    if name in ("bfe", "bfi"):
        return bit_field(name, kind, raw)
    simple: dict[str, Callable[[], int]] = {
        "add": lambda: x + y,
        "sub": lambda: x - y,
        "mul.lo": lambda: x * y,
        "mul.hi": lambda: x * y >> bits,
        "mul.wide": lambda: x * y,
        "mad.lo": lambda: x * y + z,
        "mad.hi": lambda: (x * y >> bits) + z,
        "mad.wide": lambda: x * y + operand(raw[2], f"{kind[0]}{2 * bits}"),
        "mul24.lo": lambda: _low24(raw[0], kind) * _low24(raw[1], kind),
        "sad": lambda: abs(x - y) + z,
        "min": lambda: min(x, y),
        "max": lambda: max(x, y),
        "shr": lambda: x >> min(raw[1], bits),
        "shl": lambda: x << min(raw[1], bits),
        "div": lambda: _quotient(x, operand(raw[1] | 1, kind)),
        "rem": lambda: x - _quotient(x, operand(raw[1] | 1, kind)) * operand(raw[1] | 1, kind),
        "abs": lambda: abs(x),
        "neg": lambda: -x,
        "cnot": lambda: int(x == 0),
        "popc": lambda: x.bit_count(),
        "clz": lambda: bits - x.bit_length(),
        "brev": lambda: int(f"{x:0{bits}b}"[::-1], 2),
        "bfind": lambda: (~x if x < 0 else x).bit_length() - 1,
        "shf.l.wrap": lambda: ((raw[1] << 32 | raw[0]) << (raw[2] & 31)) >> 32,
        "shf.l.clamp": lambda: ((raw[1] << 32 | raw[0]) << min(raw[2], 32)) >> 32,
        "shf.r.wrap": lambda: (raw[1] << 32 | raw[0]) >> (raw[2] & 31),
        "shf.r.clamp": lambda: (raw[1] << 32 | raw[0]) >> min(raw[2], 32),
        "prmt": lambda: _permute(raw),
    }
    if name.startswith("dp4a"):
        pairs = zip(bytes_of(raw[0], name.split(".")[1]), bytes_of(raw[1], kind), strict=True)
        return sum(a * b for a, b in pairs) + raw[2]
    if name.startswith("dp2a"):
        _, half, left = name.split(".")
        halves = [signed(raw[0] >> 16 * k, 16) if left[0] == "s" else raw[0] >> 16 * k & 0xFFFF for k in range(2)]
        pair = bytes_of(raw[1], kind)[2 * (half == "hi") :][:2]
        return sum(a * b for a, b in zip(halves, pair, strict=True)) + raw[2]
    return simple[name]() if name in simple else None


def _low24(value: int, kind: str) -> int:
    return signed(value, 24) if kind[0] == "s" else value & 0xFFFFFF


def _quotient(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _permute(raw: list[int]) -> int:
    source = [raw[k // 4] >> 8 * (k % 4) & 255 for k in range(8)]
    result = 0
    for k in range(4):
        pick = raw[2] >> 4 * k & 15
        byte = source[pick & 7]
        result |= (0 if byte < 128 else 255) << 8 * k if pick & 8 else byte << 8 * k
    return result


def bit_field(name: str, kind: str, raw: list[int]) -> int:
    """Return the result of ``bfe`` or ``bfi`` by the bit-by-bit pseudo-code of the PTX ISA."""
    bits = int(kind[1:])
    top = bits - 1
    if name == "bfe":
        position, length = raw[1] & 255, raw[2] & 255
        sign = 0 if kind[0] == "u" or length == 0 else raw[0] >> min(position + length - 1, top) & 1
        return sum(
            (raw[0] >> (position + i) & 1 if i < length and position + i <= top else sign) << i for i in range(bits)
        )
    position, length = raw[2] & 255, raw[3] & 255
    result = raw[1]
    for i in range(length):
        if position + i <= top:
            result = result & ~(1 << position + i) | (raw[0] >> i & 1) << position + i
    return result


def floating(case: Case, values: list[int]) -> int | None:
    """Return the result of a floating-point instruction, by exact fractions; None if it is not covered here."""
    match = re.fullmatch(r"(add|sub|mul|fma)\.rn\.(f16|bf16|f32)(x2)?", case.name)
    if match:
        operation, kind, pair = match.groups()
        return _by_parts(lambda *v: encode(numeric(operation, *(decode(b, kind) for b in v)), kind), values, pair)
    match = re.fullmatch(r"cvt\.(rn|rz)\.(f16|bf16)(x2)?\.f32", case.name)
    if match:
        rounding, kind, pair = match.groups()
        parts = [encode(decode(value, "f32"), kind, rounding == "rz") for value in values]
        return parts[0] << 16 | parts[1] if pair else parts[0]
    match = re.fullmatch(r"cvt\.(?:rn\.)?(f32|f16|f64)\.([us]\d+|f16|bf16|f32)", case.name)
    if match:
        kind, source = match.groups()
        return encode(decode(values[0], source) if source[0] in "fb" else Fraction(operand(values[0], source)), kind)
    match = re.fullmatch(r"cvt\.(rni|rzi|rmi|rpi)\.([us]\d+)\.(f32|f16)", case.name)
    if match:
        rounding, kind, source = match.groups()
        return _to_integer(decode(values[0], source), rounding, kind)
    return None


def _to_integer(value: Fraction | float, rounding: str, kind: str) -> int:
    bits = int(kind[1:])
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind[0] == "s" else (0, 2**bits - 1)
    if isinstance(value, float):
        if math.isnan(value):
            return 2 ** (bits - 1) if bits == 64 else 0
        return 0 if value == 0 else high if value > 0 else low
    rounded: dict[str, Callable[[Fraction], int]] = {
        "rni": round,
        "rzi": math.trunc,
        "rmi": math.floor,
        "rpi": math.ceil,
    }
    whole = rounded[rounding](value)
    return min(max(whole, low), high)


def _by_parts(function: Callable[..., int], values: list[int], pair: str | None) -> int:
    if not pair:
        return function(*values)
    return function(*(v & 0xFFFF for v in values)) | function(*(v >> 16 for v in values)) << 16


def reference(case: Case, threads: int = THREADS) -> np.ndarray | None:
    """Return a case's expected results, uint32 [words, threads], or None if its instruction is not covered here."""
    if len(case.outputs) != 1:
        return None
    words = case.buffers()["x"][:, :threads]
    columns: list[list[int]] = []
    row = 0
    for full in case.inputs:
        wide = full.partition(":")[0][-2:] == "64"
        low = [int(word) for word in words[row]]
        columns.append([a | int(b) << 32 for a, b in zip(low, words[row + 1], strict=True)] if wide else low)
        row += 2 if wide else 1
    found = []
    for values in zip(*columns, strict=True):
        result = integer(case, list(values))
        result = floating(case, list(values)) if result is None else result
        if result is None:
            return None
        found.append(result)
    bits = int(re.sub(r"x2|\D", "", case.outputs[0])) * (2 if case.outputs[0].endswith("x2") else 1)
    # A result narrower than a word occupies the low bits, and the others are 0.
    masked = [value & (2**bits - 1) for value in found]
    rows = [[value & 0xFFFFFFFF for value in masked]] + ([[value >> 32 for value in masked]] if bits == 64 else [])
    return np.array(rows, np.uint32)


KNOWN = [name for name, case in CASES.items() if reference(case, 1) is not None]


def test_the_reference_knows_most_arithmetic() -> None:
    assert len(KNOWN) > 150


@pytest.mark.parametrize("name", KNOWN)
def test_arithmetic(name: str) -> None:
    case = CASES[name]
    wanted, found = reference(case), simulate(case)
    assert wanted is not None
    agrees = same(case, found, wanted)
    if not agrees.all():
        row, thread = (int(index[0]) for index in np.nonzero(~agrees))
        given = ", ".join(f"{word:#x}" for word in case.buffers()["x"][:, thread])
        pytest.fail(f"[{given}]: {found[row, thread]:#x}, not {wanted[row, thread]:#x}")


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("lop3")])
def test_logic_of_three_operands(name: str) -> None:
    case = CASES[name]
    table = int(name.split()[1], 16)
    x, y, z = case.buffers()["x"]
    wanted = np.zeros(THREADS, np.uint32)
    for k in range(32):
        index = (x >> k & 1) << 2 | (y >> k & 1) << 1 | (z >> k & 1)
        wanted |= (np.uint32(table) >> index & 1) << k
    np.testing.assert_array_equal(simulate(case)[0], wanted)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("shfl", "vote", "match", "redux"))])
def test_exchange_within_a_warp(name: str) -> None:
    case = CASES[name]
    words = case.buffers()["x"].reshape(-1, 4, 32)
    found = simulate(case).reshape(-1, 4, 32)
    for warp in range(4):
        np.testing.assert_array_equal(found[:, warp], exchange(name, words[:, warp]))


def exchange(name: str, words: np.ndarray) -> np.ndarray:
    """Return the result of ``shfl``, ``vote``, ``match`` or ``redux`` as the PTX ISA defines it, lane by lane."""
    root, *rest = re.split(r"[. ]", name)
    values = [int(word) for word in words[0]]
    lanes = range(32)
    if root == "shfl":
        clamp = int(rest[-1], 16)
        rows = [shuffled(rest[1], values, lane, int(words[1][lane]), clamp) for lane in lanes]
        return np.array(rows, np.uint32).T
    if root == "vote":
        bits = sum((value > 2) << lane for lane, value in enumerate(values))
        result = {"all": bits == 2**32 - 1, "any": bits != 0, "uni": bits in (0, 2**32 - 1), "ballot": bits}[rest[1]]
        return np.full((1, 32), result, np.uint32)
    if root == "match":
        masks = [sum((other == value) << lane for lane, other in enumerate(values)) for value in values]
        if rest[0] == "any":
            return np.array([masks], np.uint32)
        same = masks[0] == 2**32 - 1
        return np.array([[masks[0] * same] * 32, [same] * 32], np.uint32)
    kind = rest[-1]
    typed = [operand(value, kind) for value in values]
    functions: dict[str, Callable[[list[int]], int]] = {
        "add": sum, "min": min, "max": max,
        "and": lambda v: int(np.bitwise_and.reduce(v)), "or": lambda v: int(np.bitwise_or.reduce(v)),
        "xor": lambda v: int(np.bitwise_xor.reduce(v)),
    }  # fmt: skip
    return np.full((1, 32), functions[rest[1]](typed) & 0xFFFFFFFF, np.uint32)


def shuffled(mode: str, values: list[int], lane: int, offset: int, clamp: int) -> tuple[int, int]:
    offset, segment = offset & 31, clamp >> 8 & 31
    last, first = (lane & segment) | (clamp & 31 & ~segment), lane & segment
    source = {"up": lane - offset, "down": lane + offset, "bfly": lane ^ offset, "idx": first | (offset & ~segment)}[
        mode
    ]
    valid = source >= last if mode == "up" else source <= last
    return values[source if valid else lane], int(valid)


def test_unknown_opcode_is_refused_by_name() -> None:
    case = Case("unknown", "fns.b32 o0, a0, a1, a2;", ("b32",), ("b32", "u32", "s32"))
    with source_text(case.source, case.kernel()), pytest.raises(simt.UnknownOpcode, match=r"fns\.b32"):
        simt.run(case.plan(), case.buffers())


def test_unknown_modifier_is_refused_by_name() -> None:
    case = Case("unknown_modifier", "add.rz.f32 o0, a0, a1;", ("f32",), ("f32", "f32"))
    with source_text(case.source, case.kernel()), pytest.raises(simt.UnknownOpcode, match=r"add\.rz\.f32"):
        simt.run(case.plan(), case.buffers())
