# SPDX-License-Identifier: Apache-2.0
"""The run-time system: GPU properties, NVRTC compilation, the disk cache, launches, arrays and workspaces.

It knows kernels, buffers and launch parameters, and nothing of AWQ. Only this package and the operations import CuPy
and the CUDA bindings, and only inside functions: importing a module needs neither.
"""
