# SPDX-License-Identifier: Apache-2.0
"""Write ``tests/golden_logits.npz``: logits that transformers computes for tiny mixtures of experts, on the CPU.

transformers 5 and torch are needed beside cupy_awq[llm]:

    python -m tests.tools.write_golden_logits

The weights are not stored: `golden_tensors` makes them from a hash of their names, so that they are 4-bit codes times
a power of two, which dense and quantized files hold exactly.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests import llm_models

FILE = Path(__file__).parents[1] / "golden_logits.npz"
IDS = [(7 * i * i + 3 * i) % llm_models.VOCAB for i in range(16)]
"""The tokens of the prompt."""


def golden_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the dense tensors of a model by Hugging Face name; each value is a 4-bit integer times a power of two."""
    shapes = {name: a.shape for name, a in llm_models.tensors(config, plain=("",)).items()}
    return {name: golden_tensor(name, shape) for name, shape in shapes.items()}


def golden_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a float32 tensor whose values depend on its name alone: about 1 in norms, small elsewhere."""
    code = golden_codes(name, shape).astype(np.float32) - 8
    if "norm" in name:
        return 1 + code / 32
    return code * np.float32(golden_scale(name, shape))


def golden_codes(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return codes from 0 to 15 of the given shape, the top bits of a multiplicative hash of their indices."""
    size = int(np.prod(shape))
    mixed = (np.arange(size, dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 20)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(60)).astype(np.uint8).reshape(shape)


def golden_scale(name: str, shape: tuple[int, ...]) -> float:
    """Return the power of two that multiplies the codes of a tensor."""
    if len(shape) == 1:
        return 2.0**-6
    return 2.0**-4 if name.endswith("gate.weight") else 2.0**-5


def write_folder(path: Path, config: dict[str, Any]) -> Path:
    """Write the dense model as a Hugging Face folder and return its path."""
    path.mkdir(exist_ok=True)
    save_file(golden_tensors(config), path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def main() -> None:
    """Compute and write the logits of every architecture."""
    import torch
    import transformers

    torch.set_grad_enabled(False)
    found = {}
    for name, config in llm_models.EXPERT_FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write_folder(Path(folder), config)
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
        if any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            raise ValueError(f"{name}: expected tensors as transformers names them, got {report}")
        found[name] = model(torch.tensor([IDS])).logits[0].numpy().astype(np.float32)
        spread = np.abs(found[name]).max(), found[name].std()
        print(name, found[name].shape, *(f"{value:.3f}" for value in spread))
    np.savez_compressed(FILE, **found)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
