# SPDX-License-Identifier: Apache-2.0
"""The operations that `bench` and `tune` time on random data, by the name that the option ``--op`` takes.

On a GPU the weights are cold in L2: an operation has one call for each of several copies of its weight, which together
are at least three times as large as the L2 cache. All calls share x, which is therefore warm in L2, as after a
preceding layer. To add an operation, write a class that implements `Operation` and add it to `OPERATIONS`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from cupy_awq import check_scalar, reference
from cupy_awq.block_weight import BlockQuantizedWeight, from_packed
from cupy_awq.check import HOST, Array
from cupy_awq.gemm_layer import GemmLayer
from cupy_awq.int8_linear import Int8Linear
from cupy_awq.kernels.conv2d.problem import nhwc_problem
from cupy_awq.kernels.family import KernelProblem
from cupy_awq.kernels.gemm.gemm_mma_fragments import GEMM_MMA_FRAGMENTS
from cupy_awq.kernels.gemm.problem import INT8_FRAGMENTS, INT8_ROWS, Problem
from cupy_awq.kernels.int8.problem import Int8Problem
from cupy_awq.linear import AwqLinear
from cupy_awq.ops.conv2d import conv2d
from cupy_awq.ops.gemm import gemm
from cupy_awq.ops.plan import plan
from cupy_awq.ops.prepared_gemm import run_gemm
from cupy_awq.ops.quantized_linear import gemm_int8, quantize_activations
from cupy_awq.ops.repack import repack
from cupy_awq.packing import namespace
from cupy_awq.runtime import device as devices
from cupy_awq.runtime import placement
from cupy_awq.tools import testing, timing
from cupy_awq.weight import PackedWeight

Call = Callable[[], object]
Shape = tuple[int, int]

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
"""The dtypes of x, by name."""

MAX_COPIES = 512
"""The largest number of copies of a weight; only weights far smaller than a real layer's need that many."""

CONVOLUTION_BLOCK = 32
"""The number of input channels per quantization block in the weight of a convolution."""


@dataclass(frozen=True)
class Settings:
    """The options of an operation to time.

    Attributes:
        device: the device ordinal, or HOST.
        group_size: the number of rows of W per group; -1 means K.
        dtype: the name of the dtype of x, a key of DTYPES.
        kernel: the name of the kernel to force in calls of `gemm`; None to time `AwqLinear` with the selected kernel.
        batch_invariant: whether to time the batch-invariant mode of `AwqLinear`; only with ``kernel`` None.
        planned: whether to time calls of a `Plan`.
        image: the height and width of the images of a convolution, in pixels.
        window: the height and width of the filter of a convolution.
        experts: the number of experts of a grouped product.
        top_k: the number of experts per token.
        cached: whether calls cache their launches, as users' calls do. Must be False if different kernels are forced in
            turn.
    """

    device: int
    group_size: int = 128
    dtype: str = "float16"
    kernel: str | None = None
    batch_invariant: bool = False
    planned: bool = False
    image: int = 56
    window: int = 3
    experts: int = 8
    top_k: int = 2
    cached: bool = True


class Operation(Protocol):
    """An operation with random weights of one shape, which `bench` and `tune` time.

    Attributes:
        is_fp16: whether the operation multiplies floats, so that the fp16 throughput bounds its roofline.
        label: the shape of the weight as text.
        weight: the dtype and quantization of the weight as text.
    """

    is_fp16: bool
    label: str
    weight: str

    def __init__(self, shape: Shape, settings: Settings) -> None: ...

    @staticmethod
    def check(shape: Shape, settings: Settings) -> None:
        """Raise ValueError if the operation does not support the shape."""
        ...

    def calls(self, m: int) -> list[Call]:
        """Return one function per copy of the weight; each runs the operation on ``m`` rows of x or ``m`` images."""
        ...

    def nbytes(self, m: int) -> int:
        """Return the total size of W, x and y in bytes."""
        ...

    def flops(self, m: int) -> int:
        """Return the number of operations; a multiply-add is two."""
        ...

    def other_us(self, m: int) -> dict[str, float | None]:
        """Return the times of alternative implementations in microseconds, by name; None if one is not available."""
        ...


class Gemm:
    """The GEMM x [M, K] @ W [K, N] by `AwqLinear`, by `gemm` with a forced kernel, or by a `Plan` of either."""

    is_fp16 = True

    def __init__(self, shape: Shape, settings: Settings) -> None:
        self._k, self._n = shape
        self._settings = settings
        self.label = f"{self._k}x{self._n}"
        scales = np.dtype(np.float16) if settings.dtype == "float32" else DTYPES[settings.dtype]
        rng = np.random.default_rng(0)
        self._first = testing.random_weight(rng, self._k, self._n, settings.group_size, dtype=scales)
        self._copies = cold_weights(self._first, settings.device)
        self.weight = f"group size {self._first.group_size}"

    @staticmethod
    def check(shape: Shape, settings: Settings) -> None:
        k, n = shape
        if k == 0 or n == 0 or n % 8:
            raise ValueError(f"shape {k}x{n}: expected K > 0 and N > 0, a multiple of 8")
        check_scalar.validate_group_size(k, settings.group_size)

    @functools.cached_property
    def _layers(self) -> list[GemmLayer]:
        return [AwqLinear(weight, batch_invariant=self._settings.batch_invariant) for weight in self._copies]

    @functools.cached_property
    def _repacked(self) -> list[PackedWeight]:
        return [repack(weight) for weight in self._copies]

    @functools.cached_property
    def _fp16(self) -> Fp16:
        weight = self._first
        w = reference.dequantize(weight.qweight, weight.scales, weight.qzeros, dtype=np.float16)
        return Fp16(w, self._settings.device)

    def _x(self, m: int) -> Array:
        x = testing.random_activations(np.random.default_rng(m), m, self._k, dtype=DTYPES[self._settings.dtype])
        return placement.to_device(x, self._settings.device)

    def calls(self, m: int) -> list[Call]:
        x, kernel = self._x(m), self._settings.kernel
        y = namespace(x).empty((m, self._n), x.dtype)
        if not self._settings.cached:
            return [functools.partial(run_gemm, x, weight, out=y) for weight in self._repacked]
        if self._settings.planned:
            plans = (
                [layer.plan(x, out=y) for layer in self._layers]
                if kernel is None
                else [plan(x, weight, out=y, kernel=kernel) for weight in self._copies]
            )
            return [functools.partial(made, x, y) for made in plans]
        if kernel is None:
            return [functools.partial(layer, x, out=y) for layer in self._layers]
        return [
            functools.partial(gemm, x, weight.qweight, weight.scales, weight.qzeros, out=y, kernel=kernel)
            for weight in self._copies
        ]

    def nbytes(self, m: int) -> int:
        itemsize = int(DTYPES[self._settings.dtype].itemsize)
        return self._first.nbytes + m * (self._k + self._n) * itemsize

    def flops(self, m: int) -> int:
        return 2 * m * self._n * self._k

    def other_us(self, m: int) -> dict[str, float | None]:
        known = self._settings.device != HOST and timing.cublas()
        return {"fp16": self._fp16(self._x(m).astype(np.float16)) if known else None}


class GemmInt8(Gemm):
    """The W4A8 GEMM x [M, K] @ W [K, N] with x already quantized to int8."""

    is_fp16 = False

    @functools.cached_property
    def _blocks(self) -> list[BlockQuantizedWeight]:
        return [from_packed(weight) for weight in self._copies]

    def _quantize(self, x: Array) -> Any:
        return quantize_activations(x, block_size=self._blocks[0].block_size, symmetric=True)

    def calls(self, m: int) -> list[Call]:
        x = self._x(m)
        y = namespace(x).empty((m, self._n), x.dtype)
        xq, scale, offset, sums = self._quantize(x)
        options = {"block_size": self._blocks[0].block_size, "out": y}
        return [functools.partial(gemm_int8, xq, scale, offset, sums, weight, **options) for weight in self._blocks]

    def nbytes(self, m: int) -> int:
        return self._first.nbytes + m * (self._k + 2 * self._n)

    def other_us(self, m: int) -> dict[str, float | None]:
        x, device = self._x(m), self._settings.device
        return {
            "quantize": timing.time_calls([functools.partial(self._quantize, x)], device),
            "W4A16": timing.time_calls(super().calls(m), device),
            **super().other_us(m),
        }


class Int8Gemm(Gemm):
    """The GEMM x [M, K] @ W [K, N] by `Int8Linear`: 8-bit weights, activations of 16 or 32 bits."""

    def __init__(self, shape: Shape, settings: Settings) -> None:
        self._k, self._n = shape
        self._settings = settings
        self.label = f"{self._k}x{self._n}"
        size = check_scalar.validate_group_size(self._k, settings.group_size)
        rng = np.random.default_rng(0)
        self._codes = rng.integers(0, 256, (self._n, 1, 1, self._k), np.uint8)
        self._scale = (rng.uniform(0.5, 1.5, (self._n, self._k // size)) / (64 * math.sqrt(self._k))).astype(np.float16)
        self.weight = f"INT8, group size {size}"

    @functools.cached_property
    def _layers(self) -> list[GemmLayer]:
        codes, scale = (placement.to_device(a, self._settings.device) for a in (self._codes, self._scale))
        weight = BlockQuantizedWeight(codes, scale, None, bits=8)
        copies = cold_copies(weight.nbytes, self._settings.device)
        return [Int8Linear(weight, dtype=self._settings.dtype) for _ in range(copies)]

    def calls(self, m: int) -> list[Call]:
        x = self._x(m)
        y = namespace(x).empty((m, self._n), x.dtype)
        if not self._settings.cached:
            return [functools.partial(run_gemm, x, layer._operand, out=y) for layer in self._layers]
        return [functools.partial(layer, x, out=y) for layer in self._layers]

    def nbytes(self, m: int) -> int:
        itemsize = int(DTYPES[self._settings.dtype].itemsize)
        return int(self._codes.nbytes + self._scale.nbytes) + m * (self._k + self._n) * itemsize

    @functools.cached_property
    def _fp16(self) -> Fp16:
        size = self._k // self._scale.shape[1]
        w = (self._codes.reshape(self._n, -1).T.astype(np.float16) - 128) * self._scale.T.repeat(size, axis=0)
        return Fp16(w, self._settings.device)


class Conv2d:
    """A 2-D convolution with a 4-bit weight, Ci to Co channels, over float16 NHWC images; stride 1, padding "same"."""

    is_fp16 = True

    def __init__(self, shape: Shape, settings: Settings) -> None:
        self._ci, self._co = shape
        self._settings = settings
        self._weights: dict[int, list[BlockQuantizedWeight]] = {}
        self.label = f"{self._ci}x{self._co}"
        self.weight = (
            f"INT4 in blocks of {min(CONVOLUTION_BLOCK, self._ci)}, "
            f"{settings.window}x{settings.window} kernel, {settings.image}x{settings.image} images"
        )

    @staticmethod
    def check(shape: Shape, settings: Settings) -> None:
        if settings.window < 1 or settings.image < 1 or min(shape) < 1:
            raise ValueError("conv2d: expected at least one channel, one pixel and a window of one")

    def _with_bits(self, bits: int) -> list[BlockQuantizedWeight]:
        """Return copies of the weight with codes of ``bits`` bits, 4 or 8."""
        if bits not in self._weights:
            rng, window, device = np.random.default_rng(0), self._settings.window, self._settings.device
            block = min(CONVOLUTION_BLOCK, self._ci)
            codes = rng.integers(0, 2**bits, (self._co, window, window, self._ci), np.uint8)
            size = 2.0 ** (1 - bits) / math.sqrt(self._ci * window**2)
            scale, offset = (
                (rng.uniform(0.5, 1.5, (self._co, -(-self._ci // block))) * size).astype(np.float16) for _ in range(2)
            )
            parts = [placement.to_device(a, device) for a in (codes, scale, offset)]
            self._weights[bits] = [
                BlockQuantizedWeight(*map(namespace(parts[0]).array, parts), bits=bits, block_size=block)
                for _ in range(cold_copies(codes.size * bits // 8, device))
            ]
        return self._weights[bits]

    def _calls(self, m: int, bits: int) -> list[Call]:
        image, device = self._settings.image, self._settings.device
        x = testing.random_activations(np.random.default_rng(m), m, image, image, self._ci)
        x = placement.to_device(x, device)
        y = namespace(x).empty((m, image, image, self._co), np.float16)
        options = {"padding": "same", "layout": "NHWC", "out": y}
        return [functools.partial(conv2d, x, weight, **options) for weight in self._with_bits(bits)]

    def calls(self, m: int) -> list[Call]:
        return self._calls(m, 4)

    def nbytes(self, m: int) -> int:
        taps = self._settings.window**2
        blocks = -(-self._ci // CONVOLUTION_BLOCK)
        return (self._ci * taps // 2 + 4 * blocks) * self._co + 2 * m * self._settings.image**2 * (self._ci + self._co)

    def flops(self, m: int) -> int:
        return 2 * m * self._settings.image**2 * self._ci * self._co * self._settings.window**2

    def other_us(self, m: int) -> dict[str, float | None]:
        return {"INT8 weights": timing.time_calls(self._calls(m, 8), self._settings.device)}


def typical_problem(op: str, shape: Shape, m: int, settings: Settings, gpu: devices.Device) -> KernelProblem:
    """Return the problem of an operation with contiguous arrays, which `explain` uses without a GPU."""
    OPERATIONS[op].check(shape, settings)
    if op == "conv2d":
        return nhwc_problem(m, settings.image, *shape, settings.window)
    k, n = shape
    block_size = check_scalar.validate_group_size(k, settings.group_size)
    if op == "gemm_int8":
        return Int8Problem(m, n, k, block_size, 4, False, True, settings.dtype, zero_points=True)
    form = (k, block_size, settings.dtype, settings.dtype, "symmetric")
    tensor_cores = Problem(m, n, *form, layouts=(INT8_FRAGMENTS,))
    is_readable = GEMM_MMA_FRAGMENTS.refusal(tensor_cores, gpu) is None
    return tensor_cores if is_readable else replace(tensor_cores, layouts=(INT8_ROWS,))


OPERATIONS: dict[str, type[Operation]] = {
    "gemm": Gemm,
    "gemm_int8": GemmInt8,
    "int8_linear": Int8Gemm,
    "conv2d": Conv2d,
}


class Fp16:
    """The float16 baseline: cupy.matmul, with copies of the dequantized weight that are cold in L2."""

    def __init__(self, w: Array, device: int) -> None:
        import cupy

        dense = placement.to_device(w, device)
        self._weights = [cupy.array(dense) for _ in range(cold_copies(w.nbytes, device))]

    def __call__(self, x: Array) -> float:
        """Return the time of x @ W in microseconds."""
        import cupy

        y = cupy.matmul(x, self._weights[0])
        return timing.on_gpu([functools.partial(cupy.matmul, x, w, out=y) for w in self._weights], graph=False)


def cold_copies(nbytes: int, device: int) -> int:
    """Return how many copies of a weight of ``nbytes`` bytes to use in turn, so that all are cold in L2 (CPU: 1)."""
    if device == HOST:
        return 1
    return min(MAX_COPIES, max(2, math.ceil(3 * devices.of(device).l2_bytes / nbytes)))


def cold_weights(weight: PackedWeight, device: int) -> list[PackedWeight]:
    """Return copies of a weight on a device, as many as `cold_copies` gives."""
    if device == HOST:
        return [weight]
    import cupy

    parts = [placement.to_device(part, device) for part in (weight.qweight, weight.scales, weight.qzeros)]
    return [PackedWeight(*map(cupy.array, parts)) for _ in range(cold_copies(weight.nbytes, device))]
