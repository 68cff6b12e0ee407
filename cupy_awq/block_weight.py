# SPDX-License-Identifier: Apache-2.0
"""`BlockQuantizedWeight`: 4- or 8-bit weights of convolutions and linear layers with per-block scales and offsets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cupy_awq import check, check_scalar
from cupy_awq.check import Array
from cupy_awq.packing import namespace, pack_int4, unpack_int4
from cupy_awq.weight import PackedWeight, check_packed

MAX_ZERO_POINT = 8
"""The largest magnitude of a zero point: (4-bit code - 8) + zero point is then within -16 .. 15."""


@dataclass(frozen=True, eq=False, repr=False, init=False)
class BlockQuantizedWeight:
    """A weight [Co, Kh, Kw, Ci/groups] of 4- or 8-bit codes with a scale and an offset per block of input channels.

        value[co, y, x, ci] = (code[co, y, x, ci] - 2**(bits - 1)) * scale[co, b] + offset[co, b],  b = ci // block_size

    The weight of a linear layer with K in features and N out features has the shape [N, 1, 1, K].

    Args:
        codes: the codes, uint8 [Co, Kh, Kw, Ci/groups], each below 2**bits.
        scale: the scales, float16, bfloat16 or float32 [Co, blocks].
        offset: the offsets, an array of the shape and dtype of ``scale``; None if all are 0.
        bits: the number of bits per code, 4 or 8.
        block_size: the number of input channels per block; the last block of a channel group may be shorter. By default
            ceil(Ci/groups / blocks).

    All arrays are NumPy arrays, or CuPy arrays on one GPU. Do not modify them: at the first use, layouts for the
    kernels are derived from the arrays and cached.

    Raises:
        TypeError: an argument is not an array, lies on another device than the others, or has an unsupported dtype.
        ValueError: the shapes do not match, or a code is 2**bits or larger.

    >>> weight = BlockQuantizedWeight(np.zeros((8, 3, 3, 20), np.uint8), np.ones((8, 2), np.float16), None)
    >>> weight
    BlockQuantizedWeight(Co=8, kernel=3x3, Ci/groups=20, 4 bits, block_size=10, float16, no offsets)
    """

    stored: Array
    """The codes as they are stored.

    8-bit codes are uint8 [Co, Kh, Kw, Ci/groups]. 4-bit codes are words in AWQ order, as in `PackedWeight.qweight`:
    int32 [Kh * Kw * Ci/groups, ceil(Co / 8)].
    """
    shape: tuple[int, int, int, int]
    """The shape of the weight, (Co, Kh, Kw, Ci/groups)."""
    scale: Array
    """The scales, float16, bfloat16 or float32 [Co, blocks]."""
    offset: Array | None
    """The offsets, with the shape and dtype of ``scale``; None if all are 0."""
    bits: int
    """The number of bits per code, 4 or 8."""
    block_size: int
    """The number of input channels per block. A block has one scale and one offset for each output channel."""
    device: int
    """The device ordinal, or `check.HOST`."""

    def __init__(
        self, codes: Array, scale: Array, offset: Array | None, /, *, bits: int = 4, block_size: int | None = None
    ) -> None:
        device = check.device_id(codes, "codes")
        if codes.dtype != check.UINT8:
            raise TypeError(f"codes: expected uint8, got {codes.dtype}")
        if len(codes.shape) != 4 or 0 in codes.shape:
            raise ValueError(f"codes: expected a non-empty [Co, Kh, Kw, Ci/groups], got shape {codes.shape}")
        _check_bits(bits)
        if bits == 4 and (largest := int(codes.max())) > 15:
            raise ValueError(f"codes: expected 0 .. 15 for bits=4, got {largest}")
        shape = tuple(int(size) for size in codes.shape)
        size = _checked_block_size(shape, scale, offset, block_size, device)
        self._set(_packed(codes) if bits == 4 else codes, shape, scale, offset, bits, size, device)

    def _set(self, *values: Any) -> None:
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)

    @property
    def codes(self) -> Array:
        """The codes, uint8 [Co, Kh, Kw, Ci/groups]. Every access unpacks 4-bit codes."""
        if self.bits == 8:
            return self.stored
        codes = unpack_int4(self.stored)[:, : self.shape[0]].T
        return namespace(codes).ascontiguousarray(codes).reshape(self.shape)

    @property
    def blocks(self) -> int:
        """The number of blocks of input channels."""
        return int(self.scale.shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the scales and the offsets."""
        dtype: np.dtype[Any] = self.scale.dtype
        return dtype

    @property
    def nbytes(self) -> int:
        """The total size of codes, scales and offsets in bytes."""
        return int(self.stored.nbytes + self.scale.nbytes + (0 if self.offset is None else self.offset.nbytes))

    @cached_property
    def zero_points(self) -> Array | None:
        """The zero points offset / scale, int8 [Co, blocks]; None unless all are integers in -8 .. 8, as in AWQ.

        With zero points, a value is (code - 8 + zero_point) * scale, without an offset. 8-bit weights have None.
        """
        if self.bits == 8 or self.offset is None:
            return None
        xp = namespace(self.scale)
        scale, offset = self.scale.astype(np.float32), self.offset.astype(np.float32)
        with np.errstate(all="ignore"):  # no warning: scales and offsets that are not finite give None
            quotient = xp.rint(offset / xp.where(scale == 0, np.float32(1), scale))
            quotient = xp.clip(quotient, -MAX_ZERO_POINT, MAX_ZERO_POINT)
            zero_points = quotient.astype(np.int8)
            return zero_points if bool((quotient * scale == offset).all()) else None

    @cached_property
    def exact_scale_dtype(self) -> str:
        """The narrowest of float16, bfloat16 and float32 that represents all scales exactly."""
        if self.dtype.itemsize == 2:
            return self.dtype.name
        with np.errstate(over="ignore"):
            if bool((self.scale.astype(np.float16) == self.scale).all()):
                return "float16"
        # A float32 is exactly a bfloat16 if its lower 16 bits are 0.
        return "bfloat16" if bool((self.scale.view(np.uint16)[..., ::2] == 0).all()) else "float32"

    @cached_property
    def layouts(self) -> dict[Any, Any]:
        """The cached layouts of the weight that kernels read, by the key that is passed to `layout`."""
        return {}

    def layout(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the layout with the key ``key``; at the first call, create it by ``make()`` and cache it.

        On a GPU, the first call synchronizes the current stream before it caches the layout, as other threads and
        streams may use it next. During stream capture the synchronization fails, and the layout is not cached.
        """
        if key not in self.layouts:
            made = make()
            _synchronize(namespace(self.stored))
            self.layouts.setdefault(key, made)
        return self.layouts[key]

    def __repr__(self) -> str:
        co, kh, kw, ci = self.shape
        offsets = "no offsets" if self.offset is None else "offsets"
        place = "" if self.device == check.HOST else f", GPU {self.device}"
        return (
            f"BlockQuantizedWeight(Co={co}, kernel={kh}x{kw}, Ci/groups={ci}, {self.bits} bits, "
            f"block_size={self.block_size}, {self.dtype}, {offsets}{place})"
        )


def from_mnn(
    packed: Array, scale: Array, offset: Array | None, /, *, kernel: tuple[int, int], in_channels: int, bits: int = 4
) -> BlockQuantizedWeight:
    """Convert a weight in MNN's layout for weight-only quantized convolutions.

    Args:
        packed: the codes q. For 4 bits, q + 8 as uint8 [Co_p, Kh*Kw, Ci_p/2], where byte s holds channel 2s in its high
            nibble and channel 2s + 1 in its low nibble; for 8 bits, q as int8 [Co_p, Kh*Kw, Ci_p]. Co_p and Ci_p are Co
            and Ci rounded up to multiples of 8.
        scale, offset: the scales and offsets [Co, blocks], as in `BlockQuantizedWeight`; the number of blocks must
            divide ``in_channels``.
        kernel: the filter size (Kh, Kw).
        in_channels: the number of input channels Ci, without padding.
        bits: the number of bits per code, 4 or 8.

    Raises:
        TypeError, ValueError: an argument is invalid, or two arguments contradict each other; the message names one.

    >>> packed = np.full((8, 1, 4), 0x98, np.uint8)  # q = 1 for even channels, 0 for odd ones
    >>> from_mnn(packed, np.ones((2, 1), np.float16), None, kernel=(1, 1), in_channels=4).codes[:, 0, 0]
    array([[9, 8, 9, 8],
           [9, 8, 9, 8]], dtype=uint8)
    """
    check.device_id(packed, "packed")
    _check_bits(bits)
    expected_dtype = check.UINT8 if bits == 4 else check.INT8
    if packed.dtype != expected_dtype:
        raise TypeError(f"packed: expected {expected_dtype} for bits={bits}, got {packed.dtype}")
    check.device_id(scale, "scale")
    if len(scale.shape) != 2 or 0 in scale.shape:
        raise ValueError(f"scale: expected a non-empty [Co, blocks], got shape {scale.shape}")
    co, blocks = scale.shape
    if not isinstance(kernel, tuple) or len(kernel) != 2:
        raise TypeError(f"kernel: expected (Kh, Kw), got {type(kernel).__name__}")
    kh, kw = (check_scalar.validate_integer(size, "kernel", 1) for size in kernel)
    in_channels = check_scalar.validate_integer(in_channels, "in_channels", 1)
    expected = (-(-co // 8) * 8, kh * kw, -(-in_channels // 8) * 8 * bits // 8)
    if packed.shape != expected:
        layout = f"[Co_p, Kh*Kw, Ci_p{'/2' if bits == 4 else ''}]"
        raise ValueError(f"packed: expected {layout} = {list(expected)}, got {list(packed.shape)}")
    if in_channels % blocks:
        raise ValueError(f"in_channels: expected a multiple of the {blocks} blocks of scale, got {in_channels}")
    if bits == 4:
        codes = namespace(packed).stack((packed >> np.uint8(4), packed & np.uint8(15)), axis=-1)
    else:
        codes = packed.view(np.uint8) ^ np.uint8(128)
    codes = codes.reshape(expected[0], kh, kw, -1)[:co, ..., :in_channels]
    return BlockQuantizedWeight(codes.copy(), scale, offset, bits=bits)


def from_packed(weight: PackedWeight, /) -> BlockQuantizedWeight:
    """Convert an AWQ weight [K, N] to a block-quantized weight [N, 1, 1, K] with the same values; groups become blocks.

    The codes are not copied but shared. Scales and offsets become float32, in which (8 - zero) * scale is exact. A
    float offset o becomes o + 8 * scale, rounded to float32. On a GPU, the function synchronizes the current stream.

    Raises:
        TypeError: ``weight`` is not a `PackedWeight`.

    >>> from cupy_awq import quantize
    >>> from_packed(quantize(np.eye(32, 16, dtype=np.float32), group_size=16))
    BlockQuantizedWeight(Co=16, kernel=1x1, Ci/groups=32, 4 bits, block_size=16, float32, offsets)
    """
    check_packed(weight)
    k, n = weight.shape
    xp = namespace(weight.qweight)
    scale = xp.ascontiguousarray(weight.scales.T).astype(np.float32)
    offset = None
    if weight.spec.zeros == "packed":
        offset = (8 - unpack_int4(weight.qzeros).T.astype(np.float32)) * scale
    elif weight.qzeros is not None:
        offset = weight.qzeros.T.astype(np.float32) + 8 * scale
    block_weight = object.__new__(BlockQuantizedWeight)
    block_weight._set(weight.qweight, (n, 1, 1, k), scale, offset, 4, weight.group_size, weight.spec.device)
    _synchronize(xp)
    return block_weight


def _check_bits(bits: Any) -> None:
    if not isinstance(bits, (int, np.integer)) or bits not in (4, 8):
        raise ValueError(f"bits: expected 4 or 8, got {check_scalar.shorten(bits)}")


def _checked_block_size(
    shape: tuple[int, ...], scale: Array, offset: Array | None, block_size: int | None, device: int
) -> int:
    """Return the block size for codes of ``shape``: ``block_size``, or by default the one inferred from the scales.

    Raises TypeError or ValueError if scales, offsets or block size do not fit the codes.
    """
    outputs, channels = shape[0], shape[3]
    check.validate_device(scale, "scale", device, "codes")
    if scale.dtype not in check.FLOATS:
        raise TypeError(f"scale: expected float16, bfloat16 or float32, got {scale.dtype}")
    if len(scale.shape) != 2 or scale.shape[0] != outputs or scale.shape[1] == 0:
        raise ValueError(f"scale: expected [Co, blocks] with Co={outputs} as in codes, got shape {scale.shape}")
    if offset is not None:
        check.validate_device(offset, "offset", device, "codes")
        if offset.dtype != scale.dtype:
            raise TypeError(f"offset: expected {scale.dtype} as in scale, got {offset.dtype}")
        if offset.shape != scale.shape:
            raise ValueError(f"offset: expected the shape of scale, {scale.shape}, got {offset.shape}")
    blocks = int(scale.shape[1])
    size = -(-channels // blocks) if block_size is None else check_scalar.validate_integer(block_size, "block_size", 1)
    if -(-channels // size) != blocks:
        raise ValueError(
            f"scale: expected {-(-channels // size)} blocks for {channels} input channels in blocks of {size}, "
            f"got {blocks}"
        )
    return size


def _packed(codes: Array) -> Array:
    """Pack 4-bit codes [Co, Kh, Kw, Ci/groups] into the words of `BlockQuantizedWeight.stored`."""
    xp = namespace(codes)
    outputs = codes.shape[0]
    columns = xp.zeros((codes.size // outputs, -(-outputs // 8) * 8), np.uint8)
    columns[:, :outputs] = codes.reshape(outputs, -1).T
    words = pack_int4(columns)
    _synchronize(xp)
    return words


def _synchronize(xp: Any) -> None:
    """Wait for the current stream of CuPy, because other streams may read the weight without synchronizing."""
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()
