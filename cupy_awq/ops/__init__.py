# SPDX-License-Identifier: Apache-2.0
"""The public operations. Each validates its arguments, selects a kernel, plans the launch and launches the kernel.

For arrays in host memory, `cupy_awq.reference` computes the result. For arrays on a GPU, kernels run on the current
stream, without a copy to the host and without synchronization, except that `plan` and the first call with a
block-quantized weight synchronize, and that `conv2d_int8` copies codes, scale and bias to the host.

On a GPU, all take the same path. `choose_kernel` returns a `ChosenKernel`: the choice of `cupy_awq.kernels.select`,
whose `LaunchPlan` describes the launch, and a `Launcher`, which is a launch plan whose kernel is loaded. A
`PreparedGemm` is the chosen kernel of a GEMM that is launched many times: `gemm` and `AwqLinear` cache one per layout
of their arrays, and a `Plan` is one that a user keeps.
"""
