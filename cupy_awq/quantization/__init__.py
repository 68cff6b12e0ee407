# SPDX-License-Identifier: Apache-2.0
"""Quantization to 4 bits with calibration data, as pure functions of NumPy or CuPy arrays.

Weights are float32 [N, K], in the orientation of ``nn.Linear``; a group is G consecutive inputs of an output row.
No function modifies a weight.
"""

from cupy_awq.quantization.channel_scales import ChannelScales, search_channel_scales
from cupy_awq.quantization.grid import Grid, QuantizedRows
from cupy_awq.quantization.moments import Moments, MomentSum, output_error
from cupy_awq.quantization.recipe import Recipe, quantize_rows

__all__ = [
    "ChannelScales",
    "Grid",
    "MomentSum",
    "Moments",
    "QuantizedRows",
    "Recipe",
    "output_error",
    "quantize_rows",
    "search_channel_scales",
]
