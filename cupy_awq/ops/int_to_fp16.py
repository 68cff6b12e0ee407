# SPDX-License-Identifier: Apache-2.0
"""``dequantize_s4_to_fp16x2`` and ``int8_to_fp16``: conversion of packed integers to float16."""

from __future__ import annotations

from cupy_awq import check, overlap, reference
from cupy_awq.check import HOST, Array
from cupy_awq.kernels.dequantize.int_to_fp16 import Conversion
from cupy_awq.ops.chosen_kernel import choose_kernel
from cupy_awq.runtime import arrays, placement


def dequantize_s4_to_fp16x2(words: Array, /, *, out: Array | None = None) -> Array:
    """Return the codes (0 .. 15) of AWQ words as float16; zero points and scales are not applied.

    Args:
        words: [..., N/8] int32, codes in AWQ order: nibbles i and i + 4 of a word are columns 2 i and 2 i + 1.
        out: [..., N] float16 array to fill and return.

    Returns:
        [..., N] float16, in column order.

    Raises:
        TypeError, ValueError: an array has a wrong dtype, shape or device; the message names the array.

    The method is that of SGLang's function of the same name: a nibble q that is OR-ed into the mantissa of the float16
    1024 gives 1024 + q (four bits higher: 1024 + 16 q), and 1024 is subtracted.

    >>> import numpy as np
    >>> dequantize_s4_to_fp16x2(np.array([0x75316420], np.int32))
    array([0., 1., 2., 3., 4., 5., 6., 7.], dtype=float16)
    """
    return _convert(words, out, "s4_to_fp16x2", 8)


def int8_to_fp16(words: Array, /, *, out: Array | None = None) -> Array:
    """Return packed int8 values as float16.

    Args:
        words: [..., N/4] int32; the bytes of a word are value + 128 for the elements 0, 2, 1, 3 (see
            `cupy_awq.packing.pack_int8`).
        out: [..., N] float16 array to fill and return.

    Returns:
        [..., N] float16.

    Raises:
        TypeError, ValueError: an array has a wrong dtype, shape or device; the message names the array.

    The method is that of FasterTransformer's interleaved conversion: a byte b is combined with the byte 0x64 to the
    float16 1024 + b, and 1024 + 128 is subtracted.

    >>> import numpy as np
    >>> int8_to_fp16(np.array([-8421376], np.int32))  # 0xff7f8000
    array([-128.,   -1.,    0.,  127.], dtype=float16)
    """
    return _convert(words, out, "int8_to_fp16", 4)


def _convert(words: Array, out: Array | None, entry: str, values: int) -> Array:
    """Convert words with ``values`` values each to float16: on a GPU with the kernel ``entry``, or on the CPU."""
    words, out = arrays.views(words=words, out=out)
    check.validate_packable(words, "words", check.INT32, 1)
    shape = (*words.shape[:-1], values * words.shape[-1])
    index = check.device_id(words, "words")
    if out is not None:
        check.validate_out(out, shape, check.FLOAT16, index)
        overlap.validate_disjoint(out, words=words)
    if index == HOST:
        y = reference.dequantize_s4_to_fp16x2(words) if values == 8 else reference.int8_to_fp16(words)
        return arrays.deliver(y, out)
    import cupy

    with placement.use_device(index):
        y = out if out is not None and out.flags.c_contiguous else cupy.empty(shape, check.FLOAT16)
        if words.size:
            source = cupy.ascontiguousarray(words)
            problem = Conversion(entry, words.size, arrays.is_aligned(y.reshape(-1)))
            choose_kernel(problem, index).launch({"words": source, "out": y})
        return arrays.deliver(y, out)
