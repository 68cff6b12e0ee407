# SPDX-License-Identifier: Apache-2.0
"""Convolution with 4- and 8-bit weights: the problem, and its kernel families."""
