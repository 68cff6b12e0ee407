# SPDX-License-Identifier: Apache-2.0
"""The public operations, one module each: check the arguments, select a kernel, plan the launch, launch it.

NumPy arrays go to `cupy_awq.reference`; arrays of a GPU to its kernels, on the current stream, with no copy to the host
and no synchronization.
"""
