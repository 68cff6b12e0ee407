# SPDX-License-Identifier: Apache-2.0
"""Launch a plan on the current device through ``cuLaunchKernelEx``: the one place that sees launch attributes."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupy_awq import compile as compiler
from cupy_awq.launch_plan import LaunchPlan, TensorMap

FORMATS = {"int32": "i", "uint32": "I", "int64": "q", "uint64": "Q", "float32": "f"}

# Keys of the ``extra`` argument of cuLaunchKernelEx: all arguments packed in one buffer.
BUFFER_POINTER, BUFFER_SIZE, END = 1, 2, 0


class _Arguments(threading.local):
    """The packed arguments of one thread's launches of one plan."""

    def __init__(self, size: int) -> None:
        self.buffer = (ctypes.c_char * size)()
        self.size = ctypes.c_size_t(size)
        items = BUFFER_POINTER, ctypes.addressof(self.buffer), BUFFER_SIZE, ctypes.addressof(self.size), END
        self.extra = (ctypes.c_void_p * len(items))(*items)
        self.address = ctypes.addressof(self.extra)


class Launcher:
    """A plan made ready on the current device; calling it only launches.

    ``launcher(pointers, stream)`` takes the addresses of the plan's buffers in the order of ``launcher.buffers`` and a
    stream's handle. Safe to call from several threads and to capture into a CUDA graph.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        from cuda.bindings import driver

        self.plan = plan
        self.buffers = [argument for argument in plan.arguments if isinstance(argument, str)]
        if list(plan.arguments[: len(self.buffers)]) != self.buffers:
            raise ValueError(f"{plan.kernel.entry}: expected the pointers before the other arguments")
        scalars = plan.arguments[len(self.buffers) :]
        if any(isinstance(argument, TensorMap) for argument in scalars):
            raise ValueError(f"{plan.kernel.entry}: tensor maps cannot be launched yet")
        self._format = struct.Struct("Q" * len(self.buffers) + "".join(FORMATS[np.dtype(type(s)).name] for s in scalars))
        self._scalars = tuple(scalar.item() for scalar in scalars)
        self._arguments = _Arguments(self._format.size)
        # Keeping the module's object keeps the code loaded.
        self._raw = compiler.function(plan.kernel, plan.shared_bytes)
        self._function = driver.CUfunction(self._raw.kernel.ptr)
        self._driver = driver
        self._configs: dict[int, Any] = {}

    def _config(self, stream: int) -> Any:
        """The launch configuration for a stream; one object a stream, so that threads share none that changes."""
        driver, plan = self._driver, self.plan
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
        config = self._configs.get(stream)
        if config is None:
            config = self._configs[stream] = self._config(stream)
        arguments = self._arguments
        self._format.pack_into(arguments.buffer, 0, *pointers, *self._scalars)
        (status,) = self._driver.cuLaunchKernelEx(config, self._function, 0, arguments.address)
        if status != 0:
            raise RuntimeError(f"launch of {self.plan.kernel.entry} failed: {status.name}; {self.plan}")


def launch(plan: LaunchPlan, buffers: Mapping[str, Any]) -> None:
    """Launch a plan once on CuPy's current device and stream; ``buffers`` maps names to CuPy arrays, None is a null."""
    import cupy

    launcher = Launcher(plan)
    pointers = tuple(0 if buffers[name] is None else buffers[name].data.ptr for name in launcher.buffers)
    launcher(pointers, cupy.cuda.get_current_stream().ptr)
