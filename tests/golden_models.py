# SPDX-License-Identifier: Apache-2.0
"""Tiny models whose logits another implementation has computed: ``golden_logits.npz``.

The weights are not stored: `golden_tensors` makes them from a hash of their names. They are 4-bit integers times a
power of two, which dense and quantized files hold exactly. ``tests/peers/write_golden_logits.py`` writes the file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests import llm_models, packers
from tests.packers import Packed

FILE = Path(__file__).parent / "golden_logits.npz"
"""The float32 logits [tokens, vocab] by family."""
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


GROUP = 32
"""The group size of quantized files."""


def packed(name: str, k: int, n: int) -> Packed:
    """Return the quantized weight [k, n] of the linear layer whose dense weight [n, k] is the tensor ``name``."""
    codes = np.ascontiguousarray(golden_codes(name, (n, k)).T)
    scales = np.full((k // GROUP, n), golden_scale(name, (n, k)), np.float16)
    return Packed(codes, np.full((k // GROUP, n), 8, np.uint8), scales, GROUP, np.arange(k, dtype=np.int32) // GROUP)


AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq", "sym": True}
FORMATS: dict[str, tuple[Callable[[Packed], dict[str, Any]], Callable[[Packed], dict[str, np.ndarray]]]] = {
    "awq": (lambda w: {"quantization_config": AWQ}, packers.awq_gemm),
    "gptq": (lambda w: {"quantization_config": GPTQ}, lambda w: packers.gptq(w, 1)),
    "compressed-tensors": (
        lambda w: {"quantization_config": packers.compressed_tensors_config(w)}, packers.compressed_tensors,
    ),
    "mlx": (
        lambda w: {"quantization": {"bits": 4, "group_size": GROUP}}, lambda w: packers.mlx(w, packers.offsets_of(w)),
    ),
}  # fmt: skip
"""The settings that ``config.json`` adds, and the function that packs a weight, by format."""


def write_quantized(path: Path, config: dict[str, Any], form: str = "awq") -> Path:
    """Write the model with the linear layers of its decoder layers in a 4-bit format and return its folder.

    MLX files hold the experts of a projection as one tensor, ``switch_mlp.<projection>``, also those of Mixtral.
    """
    path, found = write_folder(path, config), golden_tensors(config)
    settings, pack = FORMATS[form]
    stacked: dict[str, list[np.ndarray]] = {}
    for module, (k, n) in llm_models.linears(config).items():
        weight = packed(f"{module}.weight", k, n)
        del found[f"{module}.weight"]
        layer, experts, last = module.partition(".experts.")
        for part, a in pack(weight).items():
            if form == "mlx" and experts:
                projection = last.partition(".")[2]
                projection = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(projection, projection)
                stacked.setdefault(f"{layer}.switch_mlp.{projection}.{part}", []).append(a)
            else:
                found[f"{module}.{part}"] = a
    found |= {name: np.stack(parts) for name, parts in stacked.items()}
    save_file({name: np.ascontiguousarray(a) for name, a in found.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**config, **settings(weight)}))
    return path
