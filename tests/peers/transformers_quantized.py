# SPDX-License-Identifier: Apache-2.0
"""Compare a folder that ``quantize`` wrote in cupy_awq and in Hugging Face transformers, both on the CPU in float32.

A folder in the AutoAWQ format is dequantized here by AutoAWQ's formulas, and its weights are loaded as dense ones; a
folder in the compressed-tensors format is read by transformers itself, which rounds the weights to the model's dtype.
The script checks names, dtypes and shapes, and prints how far logits and perplexities differ. It needs torch,
transformers, safetensors and, for the second format, compressed-tensors beside cupy_awq[llm]:

    python -m tests.peers.transformers_quantized SmolLM2-135M-AWQ/ README.md --tokens 500
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from tests.peers.transformers_score import compare

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of an AWQ word that holds each of its eight columns."""


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Return the columns [rows, 8 * words] that AWQ words [rows, words] hold."""
    shifts = torch.tensor([4 * nibble for nibble in ORDER], dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & 15).reshape(len(words), -1)


def dequantize_awq(tensors: dict[str, torch.Tensor], group_size: int) -> dict[str, torch.Tensor]:
    """Check dtypes and shapes, and return the tensors with the quantized layers' weights as float32 [N, K]."""
    result = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part in ("qzeros", "scales"):
            continue
        if part != "qweight":
            result[name] = tensor.float()
            continue
        qzeros, scales = tensors[f"{module}.qzeros"], tensors[f"{module}.scales"]
        k, n = len(tensor), 8 * tensor.shape[1]
        forms = [(t.dtype, tuple(t.shape)) for t in (tensor, qzeros, scales)]
        groups = k // group_size
        expected = [(torch.int32, (k, n // 8)), (torch.int32, (groups, n // 8)), (torch.float16, (groups, n))]
        if forms != expected:
            raise SystemExit(f"{module}: expected {expected}, got {forms}")
        zeros = unpack(qzeros).repeat_interleave(group_size, 0)
        weight = (unpack(tensor) - zeros).float() * scales.float().repeat_interleave(group_size, 0)
        result[f"{module}.weight"] = weight.T.contiguous()
    return result


def their_model(folder: Path) -> Any:
    """Return the transformers model of a quantized folder, in float32, with weights as the module's docstring says."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    print(json.dumps({key: value for key, value in settings.items() if key != "ignore"}))
    if settings["quant_method"] == "compressed-tensors":
        options = transformers.CompressedTensorsConfig(dequantize=True)
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, quantization_config=options
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found = model.load_state_dict(dequantize_awq(tensors, settings["group_size"]), strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if found.unexpected_keys or set(found.missing_keys) - tied:
        raise SystemExit(f"expected the names of transformers, got {found}")
    model.tie_weights()
    return model.eval()


def their_logits(folder: Path, ids: list[int]) -> Any:
    """Return the logits [S, V] that transformers computes for token ids."""
    with torch.no_grad():
        return their_model(folder)(torch.tensor([ids])).logits[0].numpy()


if __name__ == "__main__":
    compare(__doc__, "a folder that quantize wrote", 500, their_logits)
