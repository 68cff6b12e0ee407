# SPDX-License-Identifier: Apache-2.0
"""The kernel families, one module each: which problems each can take, in which configurations, launched how.

All is pure: a family needs a problem and a device's facts, and no GPU. A configuration is a frozen dataclass, from
which both the compile-time constants and the launch shape come.
"""
