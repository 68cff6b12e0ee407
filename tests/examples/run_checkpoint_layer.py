# SPDX-License-Identifier: Apache-2.0
"""Load the AutoAWQ checkpoint that ships with the package and run the MLP of its decoder layer.

python tests/examples/run_checkpoint_layer.py
"""

from pathlib import Path

import numpy as np

import cupy_awq

# The path may be a folder or a file (safetensors, GGUF or a .pt of llm-awq). Without device="cpu" the layers go to the
# current GPU, if there is one.
path = Path(cupy_awq.__file__).parent / "data" / "smollm2-mlp"
layers = cupy_awq.load(path, device="cpu")
for name, layer in layers.items():
    print(name, layer)

# gate and up share x, so one layer with a fused SwiGLU computes silu(x @ gate) * (x @ up).
gate, up, down = (layers[f"model.layers.0.mlp.{name}_proj"] for name in ("gate", "up", "down"))
gated = cupy_awq.AwqLinear.concatenate([gate, up], activation="swiglu")

x = np.random.default_rng(0).standard_normal((4, gate.shape[0])).astype(np.float16)
y = down(gated(x), residual=x)
print(f"x {x.shape} -> y {y.shape} {y.dtype}")
