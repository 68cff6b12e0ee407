# SPDX-License-Identifier: Apache-2.0
"""Kernels of the quantizer: rounding of channels one after the other, and refinement of scales and zero points."""
