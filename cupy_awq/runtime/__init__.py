# SPDX-License-Identifier: Apache-2.0
"""The device side of Python: GPU properties, NVRTC compilation, the disk cache, launches, arrays and workspaces."""
