# SPDX-License-Identifier: Apache-2.0
"""Kernels of a decoder besides the quantized GEMMs."""
