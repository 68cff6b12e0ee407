# SPDX-License-Identifier: Apache-2.0
"""The kernel families, one module each, by the contract of `cupy_awq.kernels.family`, and the choice among them.

A problem goes to `select`, which asks every family of its type for legal configurations, ranks them by cost model or
takes a tuned one, and returns a `LaunchPlan`. All of it is pure: it needs a `Device`, but no GPU. The compile-time
constants, the grid and the shared memory of a kernel follow from one frozen dataclass, its configuration.
"""
