# SPDX-License-Identifier: Apache-2.0
"""The runtime: GPU properties, NVRTC compilation, disk cache, kernel launches, array views and split-K workspaces.

The runtime depends on AWQ only through the types of `cupy_awq.check`. CuPy and the CUDA bindings are imported only
inside functions, so all modules can be imported without them.
"""
