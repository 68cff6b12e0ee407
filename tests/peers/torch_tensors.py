# SPDX-License-Identifier: Apache-2.0
"""Pass CPU tensors of PyTorch to every function that accepts arrays of other libraries.

    python -m tests.peers.torch_tensors

It needs PyTorch, which the package and its tests do not. Each result must have the bits of the NumPy result, and
tensors that NumPy cannot view must be refused with the name of the argument.
"""

import numpy as np
import pytest
import torch

from cupy_awq import AwqLinear
from cupy_awq.tools.testing import random_weight
from tests import test_interop


def check_refusals() -> None:
    """Check that tensors with any strides are accepted, and that tensors that NumPy cannot view are refused."""
    layer, ones = AwqLinear(random_weight(np.random.default_rng(0), 64, 32, 16)), torch.ones(2, 64, dtype=torch.float16)
    expected = layer(ones.numpy()).tobytes()
    assert layer(ones.T.contiguous().T).tobytes() == layer(ones[:1].expand(2, 64)).tobytes() == expected
    assert layer(torch.ones(2, 64, dtype=torch.bfloat16).view(torch.uint16), dtype="bfloat16").shape == (2, 32)
    refused = [torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(2, 64).to_sparse(), ones.to("meta")]
    for x in [*refused, ones.requires_grad_()]:
        with pytest.raises(TypeError, match=r"^x: expected an array that NumPy can view, got Tensor: "):
            layer(x)


def main() -> None:
    test_interop.PRODUCERS["torch"] = torch.from_numpy
    for name in test_interop.VIEWED:
        test_interop.test_every_function_gives_the_bits_of_numpy_for_cpu_arrays_of_other_libraries(name, "torch")
    check_refusals()
    print(f"torch {torch.__version__}: {len(test_interop.VIEWED)} functions give the bits of NumPy")


if __name__ == "__main__":
    main()
