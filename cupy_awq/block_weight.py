# SPDX-License-Identifier: Apache-2.0
"""Weights of convolutions and linear layers as INT4 or INT8 codes with a scale and an offset for each block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cupy_awq import check
from cupy_awq.check import Array
from cupy_awq.packing import namespace, unpack_int4
from cupy_awq.weight import PackedWeight, check_packed


@dataclass(frozen=True, eq=False, repr=False, init=False)
class BlockQuantizedWeight:
    """A weight [Co, Kh, Kw, Ci/groups] as 4- or 8-bit codes, with parameters for each block of input channels.

        value[co, y, x, ci] = (code[co, y, x, ci] - 2**(bits - 1)) * scale[co, b] + offset[co, b],  b = ci // block_size

    A linear layer of K in features and N out features is [N, 1, 1, K].

    Args:
        codes: [Co, Kh, Kw, Ci/groups] uint8, one code an element, below 2**bits.
        scale: [Co, blocks] float16, bfloat16 or float32.
        offset: like scale; None where all are 0.
        bits: 4 or 8.
        block_size: input channels (within their group) that share a scale; the last block may be short. By default
            ceil(Ci/groups / blocks).

    The arrays, NumPy or CuPy, are kept as they are and must not change afterwards: kernels read a form that is made of
    them once.

    Raises:
        TypeError: not arrays of one device, or another dtype.
        ValueError: shapes that do not fit each other, or a code that has more bits.

    >>> weight = BlockQuantizedWeight(np.zeros((8, 3, 3, 20), np.uint8), np.ones((8, 2), np.float16), None)
    >>> weight
    BlockQuantizedWeight(Co=8, kernel=3x3, Ci/groups=20, 4 bits, block_size=10, float16, no offsets)
    """

    codes: Array
    scale: Array
    offset: Array | None
    bits: int
    block_size: int
    device: int
    """`check.HOST`, or the number of the GPU."""

    def __init__(
        self, codes: Array, scale: Array, offset: Array | None, /, *, bits: int = 4, block_size: int | None = None
    ) -> None:
        device = check.device_id(codes, "codes")
        if codes.dtype != check.UINT8:
            raise TypeError(f"codes must be uint8, got {codes.dtype}")
        if len(codes.shape) != 4 or 0 in codes.shape:
            raise ValueError(f"codes must be [Co, Kh, Kw, Ci/groups] with at least one element, got {codes.shape}")
        if bits not in (4, 8) or isinstance(bits, bool):
            raise ValueError(f"bits must be 4 or 8, got {bits!r}")
        if bits == 4 and (top := int(codes.max())) > 15:
            raise ValueError(f"codes must be in 0..15 for bits=4, got {top}")
        outputs, channels = codes.shape[0], codes.shape[3]
        check.on_device(scale, "scale", device, "codes")
        if scale.dtype not in check.FLOATS:
            raise TypeError(f"scale must be float16, bfloat16 or float32, got {scale.dtype}")
        if len(scale.shape) != 2 or scale.shape[0] != outputs or scale.shape[1] == 0:
            raise ValueError(f"scale must be [Co, blocks] with Co={outputs} as in codes, got shape {scale.shape}")
        if offset is not None:
            check.on_device(offset, "offset", device, "codes")
            if offset.dtype != scale.dtype:
                raise TypeError(f"offset must be {scale.dtype} like scale, got {offset.dtype}")
            if offset.shape != scale.shape:
                raise ValueError(f"offset must have the shape of scale, {scale.shape}, got {offset.shape}")
        blocks = scale.shape[1]
        if block_size is None:
            block_size = -(-channels // blocks)
        elif isinstance(block_size, bool) or not isinstance(block_size, int):
            raise TypeError(f"block_size must be an integer, got {block_size!r}")
        elif block_size < 1:
            raise ValueError(f"block_size must be positive, got {block_size}")
        if -(-channels // block_size) != blocks:
            raise ValueError(
                f"scale has {blocks} blocks, but {channels} input channels in blocks of {block_size} "
                f"are {-(-channels // block_size)}"
            )
        fields = {"codes": codes, "scale": scale, "offset": offset, "bits": bits, "block_size": block_size}
        for name, value in (*fields.items(), ("device", device)):
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(Co, Kh, Kw, Ci/groups)."""
        co, kh, kw, ci = self.codes.shape
        return co, kh, kw, ci

    @property
    def blocks(self) -> int:
        """Blocks of input channels."""
        return int(self.scale.shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of scale and offset."""
        dtype: np.dtype[Any] = self.scale.dtype
        return dtype

    @cached_property
    def prepared(self) -> dict[Any, Array]:
        """Forms that kernels read, by a key of theirs; each is made at its first use."""
        return {}

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
    """A weight from the layout of MNN's weight-only convolutions.

    Args:
        packed: for bits=4 uint8 [Co_p, Kh*Kw, Ci_p/2], where byte s holds channel 2s in its high nibble and 2s + 1 in
            its low one, each as q + 8; for bits=8 int8 [Co_p, Kh*Kw, Ci_p]. Co_p and Ci_p are multiples of 8.
        scale, offset: [Co, blocks] as in `BlockQuantizedWeight`; blocks divides ``in_channels``.
        kernel: (Kh, Kw).
        in_channels: Ci, without padding.
        bits: 4 or 8.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.

    >>> packed = np.full((8, 1, 4), 0x98, np.uint8)  # q = 1 for even channels, 0 for odd ones
    >>> from_mnn(packed, np.ones((2, 1), np.float16), None, kernel=(1, 1), in_channels=4).codes[:, 0, 0]
    array([[9, 8, 9, 8],
           [9, 8, 9, 8]], dtype=uint8)
    """
    check.device_id(packed, "packed")
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits!r}")
    wanted = check.UINT8 if bits == 4 else check.INT8
    if packed.dtype != wanted:
        raise TypeError(f"packed must be {wanted} for bits={bits}, got {packed.dtype}")
    check.device_id(scale, "scale")
    if len(scale.shape) != 2 or 0 in scale.shape:
        raise ValueError(f"scale must be [Co, blocks], got shape {scale.shape}")
    co, blocks = scale.shape
    kh, kw = kernel
    expected = (-(-co // 8) * 8, kh * kw, -(-in_channels // 8) * 8 * bits // 8)
    if packed.shape != expected:
        raise ValueError(
            f"packed must be [Co_p, Kh*Kw, Ci_p{'/2' if bits == 4 else ''}] = {expected}, got shape {packed.shape}"
        )
    if in_channels % blocks:
        raise ValueError(f"in_channels={in_channels} is not a multiple of the {blocks} blocks of scale")
    if bits == 4:
        codes = namespace(packed).stack((packed >> np.uint8(4), packed & np.uint8(15)), axis=-1)
    else:
        codes = packed.view(np.uint8) ^ np.uint8(128)
    codes = codes.reshape(expected[0], kh, kw, -1)[:co, ..., :in_channels]
    return BlockQuantizedWeight(codes.copy(), scale, offset, bits=bits)


def from_packed(weight: PackedWeight, /) -> BlockQuantizedWeight:
    """An AWQ weight [K, N] as [N, 1, 1, K] with the same values, in blocks of its groups; for `gemm_int8`.

    Scales and offsets are float32: (8 - zero) * scale is exact there.

    Raises:
        TypeError: another type.

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
    codes = xp.ascontiguousarray(unpack_int4(weight.qweight).T).reshape(n, 1, 1, k)
    return BlockQuantizedWeight(codes, scale, offset, block_size=weight.group_size)
