# SPDX-License-Identifier: Apache-2.0
"""Convolve images with a 4-bit weight in the layout of MNN's weight-only convolutions.

python tests/examples/convolve_mnn_weight.py
"""

import numpy as np

from cupy_awq import conv2d, from_mnn

CO, CI, KERNEL, BLOCKS = 32, 16, (3, 3), 2

rng = np.random.default_rng(0)
# uint8 [Co, Kh*Kw, Ci/2]: byte s holds channel 2s in its high nibble and 2s + 1 in its low one, each as q + 8.
packed = rng.integers(0, 256, (CO, KERNEL[0] * KERNEL[1], CI // 2), np.uint8)
scale = rng.uniform(0.01, 0.02, (CO, BLOCKS)).astype(np.float16)
offset = np.zeros((CO, BLOCKS), np.float16)
weight = from_mnn(packed, scale, offset, kernel=KERNEL, in_channels=CI)
print(weight)

images = rng.standard_normal((2, CI, 14, 14)).astype(np.float16)  # two images in NCHW
y = conv2d(images, weight, padding="same", activation="relu")
print(f"x {images.shape} -> y {y.shape} {y.dtype}")
