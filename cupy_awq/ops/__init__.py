# SPDX-License-Identifier: Apache-2.0
"""The public operations. Each validates its arguments, selects a kernel, plans the launch and launches the kernel.

For arrays in host memory, `cupy_awq.reference` computes the result. For arrays on a GPU, kernels run on the current
stream, without a copy to the host and without synchronization, except that `plan` and the first call with a
block-quantized weight synchronize, and that `conv2d_int8` copies codes, scale and bias to the host.
"""
