# SPDX-License-Identifier: Apache-2.0
"""Tests of INT4 and INT8 packing: known words, round trips, and the messages for invalid input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cupy_awq import packing

GOLDEN = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))

# The bit shift of each of a word's eight columns, from the specification of the format.
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)


def words_of(hexes: list[str], shape: tuple[int, ...] = (-1,)) -> np.ndarray:
    return np.array([int(word, 16) for word in hexes], np.uint32).view(np.int32).reshape(shape)


def test_pack_int4_of_a_known_autoawq_word() -> None:
    golden = GOLDEN["awq_word"]
    codes = np.array(golden["logical_columns_0_to_7"], np.uint8)
    assert packing.pack_int4(codes).tolist() == [golden["word_int32"]]
    assert packing.unpack_int4(words_of([golden["word_hex"]])).tolist() == codes.tolist()
    assert [golden["word_int32"] >> 4 * p & 15 for p in range(8)] == golden["nibbles_from_bit0"]


def test_autoawq_tensors_unpack_and_pack_to_themselves() -> None:
    golden = GOLDEN["awq_gemm_k8_n16_g4"]
    for words, codes in (("qweight", "intweight"), ("qzeros", "zeros_int")):
        packed = words_of(golden[words]["hex"], golden[words]["shape"])
        logical = np.array(golden[codes]["v"], np.uint8).reshape(golden[codes]["shape"])
        np.testing.assert_array_equal(packing.pack_int4(logical), packed)
        np.testing.assert_array_equal(packing.unpack_int4(packed), logical)


def test_int4_order_gives_half2_conversion_adjacent_columns() -> None:
    golden = GOLDEN["s4_to_fp16x2"]
    codes = packing.unpack_int4(words_of([golden["source_word"]]))
    assert codes.tolist() == golden["out_values"]
    for dtype, key in (
        (np.float16, "out_fp16_hex_in_memory_order"),
        (ml_dtypes.bfloat16, "bf16_out_hex_in_memory_order"),
    ):
        assert [f"{bits:04x}" for bits in codes.astype(dtype).view(np.uint16)] == golden[key]


def test_int8_order_is_the_one_of_the_byte_permute() -> None:
    golden = GOLDEN["int8_to_fp16_prmt"]
    values = np.array(golden["logical_int8"], np.int8)
    word = packing.pack_int8(values)
    assert word.tolist() == words_of([golden["input_word"]]).tolist()
    assert packing.unpack_int8(word).tolist() == values.tolist()
    pool = word.tobytes() + bytes.fromhex("64646464")
    halves = b"".join(bytes(pool[selector >> 4 * i & 7] for i in range(4)) for selector in (0x5250, 0x5351))
    # Bytes 0x64 make halves of the value 1024 + byte, and a byte is a code + 128: subtract 1152.
    floats = np.frombuffer(halves, np.float16) - np.float16(1152)
    assert [f"{bits:04x}" for bits in floats.view(np.uint16)] == golden["out_fp16_hex"]


def test_pack_and_unpack_order_are_inverse_permutations() -> None:
    assert [packing.PACK_ORDER[i] for i in packing.UNPACK_ORDER] == list(range(8))
    assert [4 * nibble for nibble in packing.UNPACK_ORDER] == list(SHIFTS)


def shapes(multiple: int) -> st.SearchStrategy[tuple[int, ...]]:
    leading = st.lists(st.integers(0, 3), max_size=2)
    return st.builds(lambda lead, n: (*lead, n * multiple), leading, st.integers(0, 4))


@given(st.data(), st.sampled_from([1, 2, -1]))
def test_int4_round_trip_at_any_shape_and_stride(data: st.DataObject, step: int) -> None:
    codes = data.draw(hnp.arrays(np.uint8, shapes(8), elements=st.integers(0, 15)))
    # strides of two elements, or negative: -1 reverses the columns
    strided = np.repeat(codes, abs(step), axis=-1)[..., ::step]
    words = packing.pack_int4(strided)
    assert words.dtype == np.int32
    assert words.shape == (*codes.shape[:-1], codes.shape[-1] // 8)
    bits = words.view(np.uint32)[..., None] >> np.array(SHIFTS, np.uint32) & 15
    np.testing.assert_array_equal(bits.reshape(strided.shape), strided)
    np.testing.assert_array_equal(packing.unpack_int4(words), strided)
    wide = np.repeat(words, 2, axis=-1)[..., ::2]
    np.testing.assert_array_equal(packing.unpack_int4(wide), strided)


@given(hnp.arrays(np.int32, shapes(1)))
def test_every_word_survives_unpacking_and_packing(words: np.ndarray) -> None:
    np.testing.assert_array_equal(packing.pack_int4(packing.unpack_int4(words)), words)
    np.testing.assert_array_equal(packing.pack_int8(packing.unpack_int8(words)), words)


@given(hnp.arrays(np.int8, shapes(4)))
def test_int8_round_trip(values: np.ndarray) -> None:
    np.testing.assert_array_equal(packing.unpack_int8(packing.pack_int8(values)), values)
    reverse = values[..., ::-1]
    np.testing.assert_array_equal(packing.unpack_int8(packing.pack_int8(reverse)), reverse)


@pytest.mark.gpu
def test_packing_on_the_gpu_equals_the_cpu() -> None:
    import cupy

    rng = np.random.default_rng(0)
    codes, values = rng.integers(0, 16, (3, 5, 48), np.uint8), rng.integers(-128, 128, (3, 48), np.int8)
    for pack, unpack, a in (
        (packing.pack_int4, packing.unpack_int4, codes[:, ::2]),
        (packing.pack_int8, packing.unpack_int8, values[..., ::-1]),
    ):
        words = pack(cupy.asarray(a))
        np.testing.assert_array_equal(words.get(), pack(a))
        np.testing.assert_array_equal(unpack(words).get(), a)
    with pytest.raises(ValueError, match=r"^codes: expected values from 0 to 15, got 16$"):
        packing.pack_int4(cupy.full(8, 16, np.uint8))


TAKES = {
    packing.pack_int4: "codes: expected uint8 [..., N] with N divisible by 8",
    packing.unpack_int4: "words: expected int32 [..., N]",
    packing.pack_int8: "values: expected int8 [..., N] with N divisible by 4",
    packing.unpack_int8: "words: expected int32 [..., N]",
}


@pytest.mark.parametrize(
    ("function", "argument", "error", "got"),
    [
        (packing.pack_int4, np.zeros(12, np.uint8), ValueError, "uint8 [12]"),
        (packing.pack_int4, np.zeros(8, np.int64), TypeError, "int64 [8]"),
        (packing.pack_int4, np.array(3, np.uint8), ValueError, "uint8 []"),
        (packing.unpack_int4, np.zeros(2, np.uint32), TypeError, "uint32 [2]"),
        (packing.pack_int8, np.zeros(6, np.int8), ValueError, "int8 [6]"),
        (packing.pack_int8, np.zeros(8, np.uint8), TypeError, "uint8 [8]"),
        (packing.unpack_int8, np.zeros(2, np.float32), TypeError, "float32 [2]"),
    ],
)
def test_arrays_of_other_shapes_and_dtypes_are_refused(
    function: Callable[[Any], Any], argument: np.ndarray, error: type[Exception], got: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(f'{TAKES[function]}, got {got}')}$"):
        function(argument)


def test_other_types_and_codes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^codes: expected values from 0 to 15, got 16$"):
        packing.pack_int4(np.array([0] * 7 + [16], np.uint8))
    with pytest.raises(TypeError, match=r"^codes: expected a NumPy or CuPy array, got list$"):
        packing.pack_int4([0] * 8)
    with pytest.raises(TypeError, match=r"^words: expected a NumPy or CuPy array, got tuple$"):
        packing.unpack_int4((1, 2))
