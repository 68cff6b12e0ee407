# SPDX-License-Identifier: Apache-2.0
"""Pass arrays of another library (JAX, Numba, TensorFlow, PyTorch) without a copy, by DLPack.

python tests/examples/exchange_arrays.py
"""

from typing import Any

import numpy as np

import cupy_awq


class Foreign:
    """An array of some library: it has the two methods of DLPack and is no NumPy or CuPy array."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


rng = np.random.default_rng(0)
weight = cupy_awq.quantize(rng.standard_normal((256, 64), np.float32))
x = rng.standard_normal((4, 256)).astype(np.float16)
out = np.full((4, 64), np.nan, np.float16)

# The result is a NumPy or CuPy array, on the device of the weight, and exports DLPack itself:
# jax.dlpack.from_dlpack(y), torch.from_dlpack(y).
y = cupy_awq.AwqLinear(weight)(Foreign(x))
print(f"y is a {type(y).__module__}.{type(y).__name__} {y.shape}, DLPack device {y.__dlpack_device__()}")

# An array of the other library as the output: it is filled in place.
cupy_awq.AwqLinear(weight)(Foreign(x), out=Foreign(out))
print(f"out filled in place: {bool((out == y).all())}")
