# SPDX-License-Identifier: Apache-2.0
"""The kernel families, one module each (the interface is in `cupy_awq.kernels.family`), and the choice among them.

For a problem, `select` asks every family of the problem's type for its legal configurations, chooses one by a table of
tuned configurations or by cost model, and returns its `LaunchPlan`. Every function is pure: it needs a `Device`, but no
GPU. A configuration is a frozen dataclass that determines the compile-time constants, the grid and the shared memory of
a kernel.
"""
