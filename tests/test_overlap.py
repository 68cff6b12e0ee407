# SPDX-License-Identifier: Apache-2.0
"""Results that would overwrite a weight, or themselves, are refused by every operation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cupy_awq
from cupy_awq import AwqLinear, BlockQuantizedWeight, PackedWeight, overlap, reference
from cupy_awq.tools.testing import random_weight

K, N, M = 64, 32, 3
MEMORY = np.zeros(1 << 14, np.uint8)
"""The memory in which the tests place weights, and results that overlap them."""


def at(offset: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array that begins ``offset`` bytes into MEMORY."""
    return np.ndarray(shape, dtype, MEMORY.data, offset)


def packed() -> PackedWeight:
    """Return a 4-bit weight in MEMORY: codes at byte 0, scales at byte 1024, zero points at byte 1280."""
    weight = random_weight(np.random.default_rng(0), K, N, 16)
    arrays = at(0, (K, N // 8), np.int32), at(1024, (4, N), np.float16), at(1280, (4, N // 8), np.int32)
    for a, values in zip(arrays, (weight.qweight, weight.scales, weight.qzeros), strict=True):
        a[...] = values
    return PackedWeight(*arrays)


def block() -> BlockQuantizedWeight:
    """Return an 8-bit block-quantized weight in MEMORY: codes at byte 0, scales at byte 2048."""
    return BlockQuantizedWeight(at(0, (N, 1, 1, K), np.uint8), at(2048, (N, 2), np.float16), None, bits=8)


X = np.ones((M, K), np.float16)
BIAS = at(8192, (N,), np.float16)
IMAGE = np.ones((1, M, 1, K), np.float16)


def call_int8(out: np.ndarray) -> Any:
    return cupy_awq.gemm_int8(*cupy_awq.quantize_activations(X, block_size=32), block(), block_size=32, out=out)


def call_conv2d_int8(out: np.ndarray) -> Any:
    codes, scale = at(0, (N, 1, 1, K), np.int8), np.ones(N, np.float32)
    return cupy_awq.conv2d_int8(IMAGE.astype(np.int8), codes, scale, x_scale=1, out_scale=9, layout="NHWC", out=out)


OPERATIONS: dict[str, tuple[Callable[[np.ndarray], Any], tuple[int, ...], Any]] = {
    "gemm": (lambda out: cupy_awq.gemm(X, packed(), bias=BIAS, out=out), (M, N), np.float16),
    "gemv": (lambda out: cupy_awq.gemv(X[0], packed(), out=out), (N,), np.float16),
    "layer": (lambda out: AwqLinear(packed(), bias=BIAS)(X, out=out), (M, N), np.float16),
    "int8 layer": (lambda out: AwqLinear(packed(), x_dtype="int8")(X, out=out), (M, N), np.float16),
    "plan": (lambda out: cupy_awq.plan((M, K), packed(), bias=BIAS)(X, out), (M, N), np.float16),
    "dequantize": (lambda out: cupy_awq.dequantize(*packed().tensors.values(), out=out), (K, N), np.float16),
    "reference": (lambda out: reference.matmul(X, *packed().tensors.values(), out=out), (M, N), np.float16),
    "words": (lambda out: cupy_awq.int8_to_fp16(at(0, (M, N // 4), np.int32), out=out), (M, N), np.float16),
    "gemm_int8": (call_int8, (M, N), np.float16),
    "linear_int8": (lambda out: cupy_awq.linear_int8(X, block(), out=out), (M, N), np.float16),
    "conv2d": (lambda out: cupy_awq.conv2d(IMAGE, block(), layout="NHWC", out=out), (1, M, 1, N), np.float16),
    "conv2d_int8": (call_conv2d_int8, (1, M, 1, N), np.int8),
}
"""Each operation as a function of ``out``, and the shape and dtype of ``out``."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_result_that_overlaps_a_weight_is_refused(name: str) -> None:
    call, shape, dtype = OPERATIONS[name]
    assert call(apart := at(12288 - 4096 + 128, shape, dtype)) is apart
    before = MEMORY[:2048].tobytes()
    with pytest.raises(ValueError, match=r"^out: expected memory that does not overlap \w+, got an array that does$"):
        call(at(64, shape, dtype))
    assert MEMORY[:2048].tobytes() == before


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_result_whose_elements_share_memory_is_refused(name: str) -> None:
    call, shape, dtype = OPERATIONS[name]
    for strides in ((0,) * len(shape), (*np.zeros(shape, dtype).strides[:-1], 0)):
        out = as_strided(np.zeros(shape, dtype), shape, strides)
        with pytest.raises(ValueError, match=r"^out: expected elements that do not share memory, got strides \("):
            call(out)


def test_the_message_names_the_array_and_touching_arrays_do_not_overlap() -> None:
    weight = packed()
    for offset, name in ((1024 - 2, "qweight"), (1024, "scales"), (1279, "scales"), (1280, "qzeros"), (8190, "bias")):
        out = at(offset - offset % 2, (1, N), np.float16)
        with pytest.raises(ValueError, match=f"^out: expected memory that does not overlap {name}, "):
            cupy_awq.gemm(X[:1], weight, bias=BIAS, out=out)
    end = 1280 + weight.qzeros.nbytes
    assert cupy_awq.gemm(X[:1], weight, out=at(end, (1, N), np.float16)).shape == (1, N)


def test_an_array_has_shared_elements_if_its_strides_say_so() -> None:
    """`shares_elements` never says False wrongly, and says True for no view that indexing can make.

    It is compared with the addresses of all elements, for many strides.
    """
    base = np.zeros(400, np.int16)
    for shape in itertools.product((1, 2, 3), repeat=3):
        for steps in itertools.product((-4, 0, 2, 6), repeat=3):
            a = as_strided(base[200:], shape, steps)
            addresses = [sum(i * s for i, s in zip(index, steps, strict=True)) for index in np.ndindex(shape)]
            low, high = overlap.byte_span(a)
            assert (low, high) == (min(addresses), max(addresses) + 2)
            if len(set(addresses)) < a.size:
                assert overlap.shares_elements(a)
    whole = np.zeros((6, 8, 4), np.int16)
    for view in (whole, whole.T, whole[::-2, 1:, ::3], whole[:, 0].T, whole.diagonal(), whole[:0], whole[None, 2:3]):
        assert not overlap.shares_elements(view)
