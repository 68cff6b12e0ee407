# SPDX-License-Identifier: Apache-2.0
"""The public operations, one module each: check the arguments, select a kernel, plan the launch, launch it.

Arrays in host memory go to `cupy_awq.reference`. Arrays on a GPU go to its kernels, on the current stream, without a
copy to the host and without synchronization.
"""
