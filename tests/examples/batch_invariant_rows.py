# SPDX-License-Identifier: Apache-2.0
"""Compute a row with the same bits alone and in a batch, so that an answer does not depend on other requests.

python tests/examples/batch_invariant_rows.py
"""

import numpy as np

import cupy_awq

rng = np.random.default_rng(0)
weight = cupy_awq.quantize(rng.standard_normal((512, 256), np.float32))
batch = rng.standard_normal((64, 512)).astype(np.float16)

# `gemm` and, for a whole model, `cupy_awq.llm.load` take the same option.
layer = cupy_awq.AwqLinear(weight, batch_invariant=True)
together = layer(batch)
for rows in (1, 7, 64):
    alone = np.concatenate([layer(part) for part in np.split(batch, range(rows, 64, rows))])
    print(f"in batches of {rows:2} rows: {int((alone != together).sum())} of {together.size} elements differ")
