# SPDX-License-Identifier: Apache-2.0
"""Quantization of a language model to 4 bits, with texts on which the errors of its layers are minimized."""
