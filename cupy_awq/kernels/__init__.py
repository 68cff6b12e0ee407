# SPDX-License-Identifier: Apache-2.0
"""The kernel families (`cupy_awq.kernels.family` has their base class), and the choice among them.

For a problem, `select` asks every family that `registry` lists for the problem's type for its legal configurations,
chooses one by a table of tuned configurations or by cost model, and returns its `LaunchPlan`. Every function is pure:
it needs a `Device`, but no GPU. A configuration is a frozen dataclass that determines the compile-time constants, the
grid and the shared memory of a kernel.
"""
