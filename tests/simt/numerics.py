# SPDX-License-Identifier: Apache-2.0
"""Arithmetic that NumPy lacks: fused multiply-add, bfloat16, flushing of subnormals, PTX's minimum, conversions.

Register contents are arrays of unsigned integers or floats; a value that is equal in all threads may be a scalar.
bfloat16 values are held as float32 values that bfloat16 can represent.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = Any  # a NumPy array or a scalar

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float32)
_F16_VALUES = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(np.float16).astype(np.float32)


def f16_to_f32(bits: Array) -> Array:
    """Convert uint16 bits of float16 to float32, by a table that is twice as fast as NumPy's conversion."""
    return _F16_VALUES.take(bits)


def bf16_to_f32(bits: Array) -> Array:
    """Convert uint16 bits of bfloat16 to float32."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def f32_to_f16(x: Array) -> Array:
    """Round float32 or float64 to uint16 bits of float16, to nearest even; NaN becomes the canonical NaN."""
    return np.where(np.isnan(x), np.uint16(0x7FFF), np.asarray(x).astype(np.float16).view(np.uint16))


def f32_to_bf16(x: Array) -> Array:
    """Round float32 to uint16 bits of bfloat16, to nearest even; NaN becomes the canonical NaN."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def f32_to_bf16_rz(x: Array) -> Array:
    """Round float32 to uint16 bits of bfloat16, toward zero."""
    bits = np.asarray(x, np.float32).view(np.uint32) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits.astype(np.uint16))


def e4m3_to_f32(codes: Array) -> Array:
    """Convert uint8 codes of e4m3 to float32."""
    return _E4M3_VALUES.take(codes)


def f32_to_e4m3(x: Array) -> Array:
    """Round float32 to uint8 codes of e4m3, to nearest even, clamped to 448 (``.satfinite``); NaN becomes 0x7F."""
    codes = np.clip(x, np.float32(-448), np.float32(448)).astype(_E4M3).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), codes)


def halves(words: Array) -> Array:
    """Split uint32 [...] into its uint16 halves [..., 2], low half first."""
    return np.ascontiguousarray(np.asarray(words)[..., None]).view(np.uint16)


def words(halves: Array) -> Array:
    """Join uint16 halves [..., 2] to uint32 [...]: the inverse of ``halves``."""
    return np.ascontiguousarray(halves).view(np.uint32)[..., 0]


def f32_to_f16_rz(x: Array) -> Array:
    """Round float32 to uint16 bits of float16, toward zero."""
    x = np.asarray(x, np.float32)
    nearest = x.astype(np.float16)
    over = np.abs(nearest.astype(np.float32)) > np.abs(x)
    return np.where(np.isnan(x), np.uint16(0x7FFF), nearest.view(np.uint16) - over.astype(np.uint16))


def flush(x: Array) -> Array:
    """Replace float32 subnormals by zeros of the same sign (``.ftz``)."""
    bits = np.asarray(x).view(np.uint32)
    return np.where(bits & np.uint32(0x7F800000), bits, bits & np.uint32(0x80000000)).view(np.float32)


def saturate(x: Array) -> Array:
    """Clamp to [0, 1]; NaN becomes 0 (``.sat``)."""
    return np.fmin(np.fmax(x, x.dtype.type(0)), x.dtype.type(1))


def relu(x: Array) -> Array:
    """Clamp negative values and -0 to 0; NaN stays NaN (``.relu``)."""
    return np.where(x <= 0, x.dtype.type(0), x)


def minimum(x: Array, y: Array) -> Array:
    """Return the minimum, or the number if one operand is NaN; -0 counts as less than +0."""
    return np.where(x == y, np.where(np.signbit(x), x, y), np.fmin(x, y))


def maximum(x: Array, y: Array) -> Array:
    """Return the maximum, or the number if one operand is NaN; -0 counts as less than +0."""
    return np.where(x == y, np.where(np.signbit(x), y, x), np.fmax(x, y))


def minimum_nan(x: Array, y: Array) -> Array:
    """Return the minimum, or NaN if an operand is NaN."""
    return np.where(np.isnan(x) | np.isnan(y), x.dtype.type(np.nan), minimum(x, y))


def maximum_nan(x: Array, y: Array) -> Array:
    """Return the maximum, or NaN if an operand is NaN."""
    return np.where(np.isnan(x) | np.isnan(y), x.dtype.type(np.nan), maximum(x, y))


def _sum_to_odd(x: Array, y: Array) -> Array:
    """Return float64 x + y rounded to odd: rounding it to fewer bits then equals one rounding of the exact sum."""
    total = np.asarray(x + y)
    back = total - x
    error = (x - (total - back)) + (y - back)  # Knuth's TwoSum: total + error is exact
    if not error.any():
        return total
    away = (error > 0) == (total > 0)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    wrong = even & (error != 0) & np.isfinite(total)
    step = np.where(away, np.int64(1), np.int64(-1))
    return np.where(wrong, (total.view(np.int64) + step).view(np.float64), total)


_TINY = (np.array(2.0**-125).view(np.uint64) << np.uint64(1)) - np.uint64(1)


def fma_f32(x: Array, y: Array, z: Array) -> Array:
    """Return float32 x * y + z with one rounding."""
    product = np.multiply(x, y, dtype=np.float64)  # the product of two float32 is exact in float64
    total = product + z
    # Rounding twice errs only if the first result lies half-way between two float32, or is subnormal there.
    bits = np.asarray(total).view(np.uint64)
    doubtful = (bits & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    # The magnitude; that of zero counts as larger than all others.
    doubtful |= (bits << np.uint64(1)) - np.uint64(1) < _TINY
    if doubtful.any():
        total, addend = np.array(total), np.asarray(z)
        some = (
            product[doubtful] if np.shape(product) == total.shape else np.broadcast_to(product, total.shape)[doubtful]
        )
        more = addend[doubtful] if addend.shape == total.shape else np.broadcast_to(addend, total.shape)[doubtful]
        total[doubtful] = _sum_to_odd(some, more.astype(np.float64))
    return total.astype(np.float32)


def fma_down_f32(x: Array, y: Array, z: Array) -> Array:
    """Return float32 x * y + z rounded toward minus infinity; a zero sum is -0 unless both terms are +0."""
    product = np.multiply(x, y, dtype=np.float64)
    total = _sum_to_odd(product, np.asarray(z, np.float64))
    nearest = total.astype(np.float32)
    lower = np.where(nearest > total, np.nextafter(nearest, np.float32(-np.inf)), nearest)
    return np.where((total == 0) & (np.signbit(product) | np.signbit(z)), np.float32(-0.0), lower)


def fma_f16(x: Array, y: Array, z: Array) -> Array:
    """Return x * y + z of float16 values (as float32) in float64, exact enough for one rounding to float16."""
    return np.multiply(x, y, dtype=np.float64) + z


def fma_bf16(x: Array, y: Array, z: Array) -> Array:
    """Return x * y + z of bfloat16 values (as float32) rounded to odd, for one rounding to bfloat16."""
    return f64_to_f32_odd(_sum_to_odd(np.multiply(x, y, dtype=np.float64), np.asarray(z, np.float64)))


def f64_to_f32_odd(x: Array) -> Array:
    """Round float64 to float32; an inexact result becomes the neighbor whose last bit is odd."""
    nearest = np.asarray(x).astype(np.float32)
    back = nearest.astype(np.float64)
    bits = nearest.view(np.uint32)
    truncated = bits - (np.abs(back) > np.abs(x)).astype(np.uint32)
    odd = np.where((back != x) & ~np.isnan(x), truncated | np.uint32(1), bits)
    return odd.view(np.float32)


def to_integer(x: Array, dtype: Any, rounding: str) -> Array:
    """Convert floats to integers, clamped as in PTX; NaN becomes 0, or the highest bit alone in 64 bits."""
    whole = round_whole(np.asarray(x, np.float64), rounding)
    info = np.iinfo(dtype)
    # float64 cannot hold the largest 64-bit integers: compare, do not clip.
    high = whole >= float(info.max)
    low = whole <= float(info.min)
    safe = np.where(high | low | np.isnan(whole), 0.0, whole).astype(dtype)
    result = np.where(high, dtype(info.max), np.where(low, dtype(info.min), safe))
    wide = info.bits == 64 or x.dtype == np.float64
    return np.where(
        np.isnan(whole), np.array(1 << info.bits - 1, f"u{info.bits // 8}").astype(dtype) * dtype(wide), result
    )


def round_whole(x: Array, rounding: str) -> Array:
    """Round to an integer, as a float of the same type."""
    return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding](x)


def divide(x: Array, y: Array, remainder: bool = False) -> Array:
    """Divide integers toward zero, or return the remainder. For a divisor of 0, hardware gives all ones, or x."""
    zero = y == 0
    safe = np.where(zero, y.dtype.type(1), y)
    quotient = x // safe
    if x.dtype.kind == "i":
        quotient = quotient + ((x - quotient * safe != 0) & ((x < 0) != (safe < 0))).astype(x.dtype)
    if remainder:
        return np.where(zero, x, x - quotient * safe)
    return np.where(zero, ~x.dtype.type(0), quotient)


def multiply_high(x: Array, y: Array) -> Array:
    """Return the upper half of the product of two 64-bit integers."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b = np.asarray(x).view(np.uint64), np.asarray(y).view(np.uint64)
    a0, a1, b0, b1 = a & mask, a >> shift, b & mask, b >> shift
    middle = a1 * b0 + (a0 * b0 >> shift)
    other = a0 * b1 + (middle & mask)
    high = a1 * b1 + (middle >> shift) + (other >> shift)
    if x.dtype.kind == "i":
        high = high - np.where(x < 0, b, np.uint64(0)) - np.where(y < 0, a, np.uint64(0))
    return high.view(x.dtype)


def permute_bytes(x: Array, y: Array, selector: Array) -> Array:
    """Execute ``prmt``: nibble k of ``selector`` selects a byte of {y, x}; its bit 3 replicates the byte's sign."""
    x, y, selector = np.broadcast_arrays(x, y, selector)
    source = np.stack((x, y), axis=-1).view(np.uint8)
    nibbles = selector[..., None] >> np.arange(0, 16, 4, dtype=np.uint32)
    bytes_ = np.take_along_axis(source, nibbles & np.uint32(7), axis=-1)
    signs = nibbles & np.uint32(8)
    if signs.any():
        bytes_ = np.where(signs, (bytes_.view(np.int8) >> 7).view(np.uint8), bytes_)
    return np.ascontiguousarray(bytes_).view(np.uint32)[..., 0]


def permute_mode(selector: Array, mode: str) -> Array:
    """Return the selector with which ``prmt`` in its default mode does what ``selector`` does in another mode."""
    table = {
        "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
        "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
        "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
        "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
        "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
        "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
    }[mode]
    return np.array(table, np.uint32)[selector & np.uint32(3)]


def reverse_bits(x: Array, width: int) -> Array:
    """Reverse the bits (``brev``)."""
    result = x & x.dtype.type(0)
    for k in range(width):
        result = result | ((x >> x.dtype.type(k)) & x.dtype.type(1)) << x.dtype.type(width - 1 - k)
    return result


def leading_zeros(x: Array, width: int) -> Array:
    """Count the leading zeros (``clz``)."""
    count = np.where(x == 0, np.uint32(width), np.uint32(0))
    found = x != 0
    step = width // 2
    while step:
        high = x >> x.dtype.type(width - step)
        empty = found & (high == 0)
        count = count + np.where(empty, np.uint32(step), np.uint32(0))
        x = np.where(empty, x << x.dtype.type(step), x)
        step //= 2
    return count


def extract_field(x: Array, position: Array, length: Array, width: int) -> Array:
    """Execute ``bfe``: a signed ``x`` is sign-extended."""
    unsigned = np.asarray(x).view(np.uint64 if width == 64 else np.uint32).astype(np.uint64)
    position = (position & np.uint32(255)).astype(np.uint64)
    length = (length & np.uint32(255)).astype(np.uint64)
    one, all_ones = np.uint64(1), ~np.uint64(0)
    mask = np.where(length >= 64, all_ones, (one << length) - one)
    field = (unsigned >> position) & mask
    if x.dtype.kind == "i":
        last = np.minimum(position + np.maximum(length, one) - one, np.uint64(width - 1))
        sign = np.where(length == 0, np.uint64(0), (unsigned >> last) & one)
        known = np.where(position >= width, np.uint64(0), np.minimum(length, np.uint64(width) - position))
        fill = np.where(known >= 64, np.uint64(0), all_ones << known)
        field = np.where(sign != 0, field | fill, field)
    return field.astype(np.uint64 if width == 64 else np.uint32)


def insert_field(x: Array, y: Array, position: Array, length: Array, width: int) -> Array:
    """Execute ``bfi``: insert the low bits of ``x`` into ``y``."""
    position = (position & np.uint32(255)).astype(np.uint64)
    length = (length & np.uint32(255)).astype(np.uint64)
    one = np.uint64(1)
    mask = np.where(length >= 64, ~np.uint64(0), (one << length) - one) << position
    result = (y.astype(np.uint64) & ~mask) | ((x.astype(np.uint64) << position) & mask)
    return result.astype(np.uint64 if width == 64 else np.uint32)


def dot_bytes(x: Array, y: Array, z: Array, signed_x: bool, signed_y: bool) -> Array:
    """Execute ``dp4a``: multiply the four bytes of uint32 words and accumulate in 32 bits."""
    total = np.asarray(z).view(np.uint32)
    for k in range(0, 32, 8):
        a = (x >> np.uint32(k)).astype(np.int8 if signed_x else np.uint8).astype(np.int64)
        b = (y >> np.uint32(k)).astype(np.int8 if signed_y else np.uint8).astype(np.int64)
        total = total + (a * b).astype(np.uint32)
    return total


def dot_halves(x: Array, y: Array, z: Array, signed_x: bool, signed_y: bool, high: bool) -> Array:
    """Execute ``dp2a``: multiply two 16-bit values of ``x`` by the low (or high) bytes of ``y`` and accumulate."""
    total = np.asarray(z).view(np.uint32)
    for k in range(2):
        a = (x >> np.uint32(16 * k)).astype(np.int16 if signed_x else np.uint16).astype(np.int64)
        b = (y >> np.uint32(16 * high + 8 * k)).astype(np.int8 if signed_y else np.uint8).astype(np.int64)
        total = total + (a * b).astype(np.uint32)
    return total


def bit_count(x: Array) -> Array:
    """Count the bits that are set (``popc``)."""
    return np.bitwise_count(x).astype(np.uint32)


def highest_bit(x: Array, width: int, as_shift: bool) -> Array:
    """Execute ``bfind``: return the highest bit that differs from the sign, or its shift to the top; -1 if none."""
    unsigned = np.uint64 if width == 64 else np.uint32
    if x.dtype.kind == "i":
        x = np.where(x < 0, ~x, x).view(unsigned)
    zeros = leading_zeros(x, width)
    return np.where(zeros == width, np.uint32(0xFFFFFFFF), zeros if as_shift else np.uint32(width - 1) - zeros)


def clip_integer(x: Array, dtype: Any) -> Array:
    """Convert between integer types with saturation."""
    goal, own = np.iinfo(dtype), np.iinfo(x.dtype)
    return np.clip(x, x.dtype.type(max(goal.min, own.min)), x.dtype.type(min(goal.max, own.max))).astype(dtype)
