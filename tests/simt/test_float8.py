# SPDX-License-Identifier: Apache-2.0
"""Tests of the simulator's e4m3 against ml_dtypes: all codes, values half-way between them, and products of wgmma."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests import simt
from tests.simt.case import THREADS, Case
from tests.simt.kernels import source_text
from tests.simt.opcodes import CASES, warpgroup

NARROW = Case("cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e4m3x2.f32 o0, a0, a1;", ("b16",), ("f32", "f32"), "90")
WIDEN = Case("cvt.rn.f16x2.e4m3x2", "cvt.rn.f16x2.e4m3x2 o0, a0;", ("f16x2",), ("b16",), "90")
PRODUCTS = {
    where: warpgroup("e4m3", "f32", 16, 1, "128B", where == "registers", False) for where in ("registers", "shared")
}
MMA = "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
PRODUCTS["warp"] = Case(
    MMA.replace("s8", "e4m3").replace("s32", "f32"),
    CASES[MMA].text.replace("s8", "e4m3").replace("s32", "f32"),
    ("f32",) * 4,
    ("b32:small",) * 6 + ("f32:small",) * 4,
    "90",
)
CODES = np.arange(256, dtype=np.uint8)
VALUES = CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def results(case: Case, x: np.ndarray) -> np.ndarray:
    """Return the results [words, threads] of a case's kernel for the inputs x, uint32 [operands, threads]."""
    buffers = case.buffers() | {"x": x}
    with source_text(case.source, case.kernel()):
        simt.run(case.plan(), buffers)
    return buffers["y"]


def converted(values: np.ndarray) -> np.ndarray:
    """Return the e4m3 codes to which the simulator's cvt.rn.satfinite.e4m3x2.f32 rounds float32 values.

    The instruction takes two values; the second one goes to the low byte, so pairs are swapped on the way in.
    """
    padded = np.zeros(-(-len(values) // (2 * THREADS)) * 2 * THREADS, np.float32)
    padded[: len(values)] = values
    codes = []
    for part in padded.reshape(-1, THREADS, 2):
        x = np.ascontiguousarray(part[:, ::-1].T).view(np.uint32)
        words = results(NARROW, x)[0]
        codes.append(np.stack((words & 255, words >> 8), axis=1).ravel())
    return np.concatenate(codes)[: len(values)]


def test_values_round_to_the_nearest_code_of_two_to_the_even_one() -> None:
    numbers = VALUES[:127]
    np.testing.assert_array_equal(converted(numbers), CODES[:127])
    between = (numbers[1:] + numbers[:-1]) / 2
    below, above = (np.nextafter(between, np.float32(limit)) for limit in (0, 1000))
    np.testing.assert_array_equal(converted(below), CODES[:126])
    np.testing.assert_array_equal(converted(above), CODES[1:127])
    np.testing.assert_array_equal(converted(between), CODES[:126] + CODES[:126] % 2)
    np.testing.assert_array_equal(converted(-above), CODES[129:255])


def test_what_is_too_large_becomes_the_largest_and_nan_stays() -> None:
    values = np.array([449, 1e30, np.inf, -500, -np.inf, np.nan, -np.nan, -0.0], np.float32)
    np.testing.assert_array_equal(converted(values), [0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7F, 0x7F, 0x80])


def test_codes_widen_to_their_values() -> None:
    words = results(WIDEN, CODES.view(np.uint16).astype(np.uint32)[None])[0]
    np.testing.assert_array_equal(words.view(np.float16).astype(np.float32), VALUES)


@pytest.mark.parametrize("where", PRODUCTS)
def test_products_are_those_of_the_values(where: str) -> None:
    """The e4m3 codes 0 to 3 are 0 to 3 times 2**-9, so float8 products must be the integer ones times 2**-18."""
    case = PRODUCTS[where]
    integers = CASES[case.name.replace("e4m3", "s8").replace("f32", "s32")]
    x = case.buffers()["x"]
    x[6:] = 0  # no accumulators: 0 has the same bits in both types
    assert x.max() <= 0x03030303
    wanted = results(integers, x).view(np.int32)
    assert wanted.any()
    np.testing.assert_array_equal(results(case, x).view(np.float32) * 2**18, wanted)


@pytest.mark.parametrize("form", ["k32.s32.e4m3.e4m3", "k32.f32.e4m3.s8", "k16.f32.e4m3.e4m3"])
def test_forms_that_do_not_exist_are_refused_by_name(form: str) -> None:
    case = PRODUCTS["registers"]
    text = case.kernel().replace("k32.f32.e4m3.e4m3", form)
    with source_text(case.source, text), pytest.raises(simt.UnknownOpcode, match=form.replace(".", r"\.")):
        simt.run(case.plan(), case.buffers())
