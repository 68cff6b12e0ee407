# SPDX-License-Identifier: Apache-2.0
"""Quantize a weight with inputs of its layer, which lowers the error of the output at the same size.

python tests/examples/calibrate_layer.py
"""

import numpy as np

import cupy_awq

rng = np.random.default_rng(0)
w = rng.standard_normal((256, 128), np.float32)  # the weight W [K, N]
mixing = rng.standard_normal((32, 256), np.float32)  # inputs with correlated channels, as those of a language model


def draw(tokens: int) -> np.ndarray:
    """Return inputs of the layer, float32 [tokens, K]."""
    return rng.standard_normal((tokens, 32), np.float32) @ mixing + rng.standard_normal((tokens, 256), np.float32)


inputs, unseen = draw(2048), draw(512)
for name, weight in (
    ("round to nearest", cupy_awq.quantize(w, group_size=64)),
    ("calibrated", cupy_awq.quantize(w, group_size=64, inputs=inputs)),
):
    y = unseen @ weight
    print(f"{name:17}{np.linalg.norm(y - unseen @ w) / np.linalg.norm(unseen @ w):.2%} error on unseen inputs")
