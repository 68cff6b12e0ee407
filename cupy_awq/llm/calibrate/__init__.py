# SPDX-License-Identifier: Apache-2.0
"""Quantization of a language model with calibration texts."""
