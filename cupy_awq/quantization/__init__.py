# SPDX-License-Identifier: Apache-2.0
"""Quantization to 4 bits with calibration data, for NumPy and CuPy arrays.

Weights W are float32 [N, K] in the orientation of ``nn.Linear``: row n holds the weights of output n. A group is G
consecutive weights of a row, which share a scale and a zero point. No function modifies a weight.

All searches minimize the output error trace(D H D^T) (`output_error`), where D [N, K] is the quantized weight minus W,
and H [K, K] are the second moments of the inputs (`Moments`).
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
