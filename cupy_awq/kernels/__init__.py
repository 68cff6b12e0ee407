# SPDX-License-Identifier: Apache-2.0
"""The kernel families, one module each (the interface is in `cupy_awq.kernels.family`), and the choice among them.

`select` takes a problem, asks every family for that type of problem for its legal configurations, picks the fastest by
cost model or by a table of tuned configurations, and returns a `LaunchPlan`. Every function is pure and needs a
`Device`, but no GPU. A configuration is a frozen dataclass that determines the compile-time constants, the grid and the
shared memory of a kernel.
"""
