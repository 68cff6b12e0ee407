# SPDX-License-Identifier: Apache-2.0
"""`Launcher`: launches with ``cuLaunchKernelEx``, with tensor maps, launch attributes and kernel arguments."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import struct
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from cupy_awq.check import Array
from cupy_awq.runtime import arrays, placement
from cupy_awq.runtime import compile as compiler
from cupy_awq.runtime.launch_plan import Kernel, LaunchPlan, TensorMap

MAP_BYTES = 128
"""The size of a CUtensorMap in bytes."""
MAP_TYPES = {
    "float16": "FLOAT16",
    "bfloat16": "BFLOAT16",
    "float32": "FLOAT32",
    "int8": "UINT8",
    "uint8": "UINT8",
    "uint32": "UINT32",
}
"""The CUtensorMapDataType of each `TensorMap.dtype`; int8 has none, but UINT8 works, since TMA converts no values."""

L1_SHARED_PERCENT = 25
"""The shared-memory carveout for kernels with ``prefers_l1``, in percent of the largest shared memory per SM."""


@functools.lru_cache(maxsize=4096)
def encode_tensor_map(tensor_map: TensorMap, address: int) -> bytes:
    """Return the bytes of the CUtensorMap for a buffer at ``address``, which must be a multiple of 16.

    Raises:
        RuntimeError: the driver rejects the tensor map.
    """
    from cuda.bindings import driver

    rank = len(tensor_map.dims)
    steps = tensor_map.steps or (1,) * rank
    status, encoded = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{MAP_TYPES[tensor_map.dtype]}"),
        rank,
        address,
        [driver.cuuint64_t(size) for size in tensor_map.dims],
        [driver.cuuint64_t(stride) for stride in tensor_map.strides],
        [driver.cuuint32_t((size - 1) * step + 1) for size, step in zip(tensor_map.box, steps, strict=True)],
        [driver.cuuint32_t(step) for step in steps],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(
            driver.CUtensorMapSwizzle,
            f"CU_TENSOR_MAP_SWIZZLE_{f'{tensor_map.swizzle}B' if tensor_map.swizzle else 'NONE'}",
        ),
        getattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{tensor_map.promotion}B"),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    placement.check_status(status, "cuTensorMapEncodeTiled", f" for {tensor_map}")
    return ctypes.string_at(encoded.getPtr(), MAP_BYTES)


_collected: ContextVar[dict[Kernel, None] | None] = ContextVar("collected", default=None)


@contextlib.contextmanager
def collect_kernels() -> Iterator[dict[Kernel, None]]:
    """Collect the kernels of launches in the dict that it yields; in the context, they are not loaded or launched."""
    kernels: dict[Kernel, None] = {}
    token = _collected.set(kernels)
    try:
        yield kernels
    finally:
        _collected.reset(token)


class _Arguments(threading.local):
    """The kernel arguments of a launch plan in host memory, with one copy per thread.

    The driver takes an array of pointers to the arguments. Only buffer addresses and tensor maps change between
    launches.

    Attributes:
        address: address of the array of pointers.
        set_pointers: function that stores the addresses of the buffers; its arguments are the addresses in order.
    """

    def __init__(self, pointers: int, maps: tuple[TensorMap, ...], scalars: tuple[bytes, ...]) -> None:
        values = [bytes(8)] * pointers + [bytes(MAP_BYTES)] * len(maps) + list(scalars)
        offsets = list(itertools.accumulate(map(len, values), initial=0))
        self._buffer = ctypes.create_string_buffer(b"".join(values), offsets[-1])
        base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * len(values))(*(base + offset for offset in offsets[:-1]))
        self.address = ctypes.addressof(self._pointers)
        self._maps = [(tensor_map, base + offset) for tensor_map, offset in zip(maps, offsets[pointers:], strict=False)]
        self._encoded_for = [0] * len(maps)
        self.set_pointers = functools.partial(struct.Struct(f"={pointers}Q").pack_into, self._buffer, 0)

    def set_map(self, i: int, address: int) -> None:
        """Encode tensor map ``i`` for the buffer at ``address``, unless the last launch used the same address."""
        if self._encoded_for[i] != address:
            tensor_map, place = self._maps[i]
            ctypes.memmove(place, encode_tensor_map(tensor_map, address), MAP_BYTES)
            self._encoded_for[i] = address


class Launcher:
    """A launch plan whose kernel is loaded on the current device; each call launches the kernel.

    ``launcher(pointers, stream)`` takes the addresses of the plan's buffers in the order of ``launcher.buffers``, and
    a stream handle. Threads may share a launcher, and its calls can be captured into a CUDA graph.

    Attributes:
        plan: the launch plan.
        buffers: names of the plan's buffers; the buffers of tensor maps come last.

    Raises:
        CompileError: the kernel does not compile.
        MemoryError: the memory of the GPU is exhausted.
        RuntimeError: in a call, if the driver reports any other error.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        from cuda.bindings import driver

        self.plan = plan
        self.buffers = plan.buffers
        self._pointer_count = len(plan.pointers)
        self._arguments = _Arguments(self._pointer_count, plan.maps, tuple(scalar.tobytes() for scalar in plan.scalars))
        self._cupy_function: Any = None
        self._driver = driver
        self._configs: dict[int, Any] = {}
        if _collected.get() is None:
            self._load()

    def _load(self) -> None:
        driver, plan = self._driver, self.plan
        # Keep a reference to the CuPy function, because the module is unloaded without it.
        self._cupy_function = compiler.load_function(plan.kernel, plan.shared_bytes)
        self._function = driver.CUfunction(self._cupy_function.ptr)
        if plan.prefers_l1:
            carveout = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            # The carveout is only a hint, so errors are ignored.
            driver.cuFuncSetAttribute(self._function, carveout, L1_SHARED_PERCENT)

    def _make_config(self, stream: int) -> Any:
        """Return a new launch configuration for a stream; there is one per stream, so that none is ever modified."""
        driver, plan = self._driver, self.plan
        if self._cupy_function is None:
            self._load()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = plan.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = plan.block
        config.sharedMemBytes = plan.shared_bytes
        config.hStream = driver.CUstream(stream)
        kinds = driver.CUlaunchAttributeID
        attributes = []
        if plan.cluster != (1, 1, 1):
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = plan.cluster
            attributes.append(attribute)
        if plan.dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config

    def __call__(self, pointers: tuple[int, ...], stream: int) -> None:
        """Launch the kernel on the stream with handle ``stream``; ``pointers`` are the addresses of ``buffers``."""
        kernels = _collected.get()
        if kernels is not None:
            kernels[self.plan.kernel] = None
            return
        config = self._configs.get(stream)
        if config is None:
            config = self._configs[stream] = self._make_config(stream)
        arguments = self._arguments
        count = self._pointer_count
        arguments.set_pointers(*pointers[:count])
        for i, address in enumerate(pointers[count:]):
            arguments.set_map(i, address)
        (status,) = self._driver.cuLaunchKernelEx(config, self._function, arguments.address, 0)
        if status != 0:
            placement.check_status(status, "cuLaunchKernelEx", f" for {self.plan}")


@functools.lru_cache(maxsize=4096)
def get_launcher(plan: LaunchPlan, index: int) -> Launcher:
    """Return the launcher of a plan on the current GPU, whose ordinal is ``index``; equal plans share a launcher."""
    return Launcher(plan)


def launch(plan: LaunchPlan, buffers: Mapping[str, Array | None], index: int) -> None:
    """Launch a plan on the current stream of the current GPU, whose ordinal is ``index``.

    ``buffers`` are CuPy arrays by the names of the plan's buffers; None is passed as a null pointer.
    """
    import cupy

    launcher = get_launcher(plan, index)
    pointers = tuple(arrays.address(buffers[name]) for name in launcher.buffers)
    launcher(pointers, cupy.cuda.get_current_stream().ptr)
