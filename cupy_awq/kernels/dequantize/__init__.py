# SPDX-License-Identifier: Apache-2.0
"""Kernels that convert integer codes to floating point: whole weights, and packed integers without scales."""
