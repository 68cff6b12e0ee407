# SPDX-License-Identifier: Apache-2.0
"""Score models that the formats' own packages write, in cupy_awq and, dequantized by their writer, in transformers.

The packages are compressed-tensors, gptqmodel (its packer, with an activation order), mlx and llama-cpp-python
(llama.cpp's quantizer, type Q4_K_M). Weights are rounded to nearest: the scores compare readers, not quantizers. All
models run on the CPU in float32. ``tests.tools.write_dense_model`` makes the dense folder:

    python -m tests.tools.write_dense_model smollm2 smollm2-dense
    python tests/peers/format_writers.py smollm2-dense README.md --json tests/peers/tables/format_writers.json
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import load_file, save_file

from cupy_awq import llm
from cupy_awq.llm.files.convert import convert
from tests.peers.format_models import (
    COLUMNS,
    compare,
    copy_settings,
    dense_model,
    linear_names,
    our_scores,
    their_scores,
)

Array = npt.NDArray[Any]

GROUP = 64


def group_range(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return minimum and maximum, extended to 0, of each group of `GROUP` columns of w [N, K], each [N, K/G]."""
    grouped = w.float().reshape(len(w), -1, GROUP)
    return grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)


def write_compressed_tensors(dense: Path, folder: Path) -> Any:
    """Write asymmetric pack-quantized weights, and return transformers' own model of the folder."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    settings = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
    args = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": settings, "format": "pack-quantized"}},
        "ignore": ["lm_head"],
    }
    copy_settings(dense, folder, quantization_config=config)
    tensors = load_file(dense / "model.safetensors")
    for name in linear_names(dense):
        w = tensors.pop(f"{name}.weight")
        low, high = group_range(w)
        scale = ((high - low) / 15).to(w.dtype)
        zero = (torch.round(-low / scale.float()) - 8).clamp(-8, 7).to(torch.int8)
        parts = PackedQuantizationCompressor.compress(
            {"weight": w, "weight_scale": scale, "weight_zero_point": zero}, scheme
        )
        tensors |= {f"{name}.{part}": array.contiguous() for part, array in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=transformers.CompressedTensorsConfig(run_compressed=False)
    )
    return model


def write_gptq(dense: Path, folder: Path) -> Any:
    """Write GPTQ version 2 with an activation order, and return a dense model of gptqmodel's dequantized weights."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": True,
        "sym": False,
        "checkpoint_format": "gptq_v2",
    }
    copy_settings(dense, folder, quantization_config=config)
    tensors = load_file(dense / "model.safetensors")
    weights: dict[str, Array] = {}
    rng = np.random.default_rng(0)
    orders: dict[int, torch.Tensor] = {}
    for name in linear_names(dense):
        w = tensors.pop(f"{name}.weight").float()
        n, k = w.shape
        # GPTQ gives layers with the same input one order: q, k and v share one, and so do gate and up.
        shared = name.rpartition(".")[0] + {"o_proj": "o", "down_proj": "d"}.get(name.rpartition(".")[2], "")
        order = orders.setdefault(hash(shared), torch.from_numpy(rng.permutation(k)))
        low, high = group_range(w[:, order])
        scale = ((high - low) / 15).half().float()
        zero = torch.round(-low / scale).clamp(0, 15)
        g_idx = torch.empty(k, dtype=torch.int32)
        g_idx[order] = torch.arange(k, dtype=torch.int32) // GROUP
        index = g_idx.long()
        linear = torch.nn.Linear(k, n, bias=False)
        codes = (torch.round(w / scale[:, index]) + zero[:, index]).clamp(0, 15)
        linear.weight.data = (codes - zero[:, index]) * scale[:, index]
        packed = TorchLinear(4, GROUP, False, True, k, n, bias=False)
        packed.pack_block(linear, scale, zero, g_idx)
        packed.eval()
        tensors |= {
            f"{name}.{part}": getattr(packed, part).contiguous().clone()
            for part in ("qweight", "qzeros", "scales", "g_idx")
        }
        weights[name] = packed.dequantize_weight().float().numpy().T
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return dense_model(dense, weights)


def write_mlx(dense: Path, folder: Path) -> Any:
    """Write MLX's affine format, also for the embedding table, and return a dense model of its dequantized weights."""
    import mlx.core as mx

    copy_settings(dense, folder, quantization={"group_size": GROUP, "bits": 4})
    tensors = mx.load(str(dense / "model.safetensors"))
    weights: dict[str, Array] = {}
    for name in [*linear_names(dense), "model.embed_tokens"]:
        codes, scales, biases = mx.quantize(tensors.pop(f"{name}.weight"), GROUP, 4)
        tensors |= {f"{name}.weight": codes, f"{name}.scales": scales, f"{name}.biases": biases}
        full = mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), GROUP, 4)
        weights[name] = np.array(full, np.float32)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    return dense_model(dense, weights)


def write_q4_k_m(dense: Path, folder: Path) -> Any:
    """Write a GGUF file by llama.cpp's quantizer, and return transformers' own model of the file."""
    import llama_cpp

    folder.mkdir()
    convert(str(dense), folder / "f16.gguf", "gguf")
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    result = llama_cpp.llama_model_quantize(
        str(folder / "f16.gguf").encode(), str(folder / "model.gguf").encode(), ctypes.byref(settings)
    )
    if result != 0:
        raise RuntimeError(f"llama_model_quantize: expected 0, got {result}")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)


WRITERS: dict[str, tuple[str, Callable[[Path, Path], Any], str]] = {
    "compressed-tensors, asymmetric": ("compressed-tensors", write_compressed_tensors, ""),
    "GPTQ v2, activation order": ("gptqmodel", write_gptq, ""),
    "MLX, affine": ("mlx", write_mlx, ""),
    "GGUF Q4_K_M": ("llama-cpp-python", write_q4_k_m, "model.gguf"),
}
"""The package, the function that writes a model, and the name of the written file ("" if it is the folder), by format.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", type=Path, help="a folder with float16 weights")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--only", choices=WRITERS, action="append", help="one model; repeatable")
    parser.add_argument("--json", type=Path, help="a file of tests/peers/tables to write")
    options = parser.parse_args()

    ids = llm.read(options.dense).load_tokenizer().encode(options.text.read_text())[: options.tokens]
    rows, versions = [], []
    for name in options.only or WRITERS:
        package, write, file = WRITERS[name]
        versions.append(f"{package} {importlib.metadata.version(package)}")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            theirs_model = write(options.dense, folder)
            path = folder / file if file else folder
            ours = our_scores(path, ids)
            theirs = their_scores(theirs_model, options.dense, ids)
            rows.append(compare(name, ours, theirs, ids, llm.read(path).stop_ids))
            print(rows[-1], flush=True)
    if options.json is not None:
        libraries = f"{', '.join(versions)}, transformers {transformers.__version__}, torch {torch.__version__}"
        table = {
            "title": "Models that the formats' own packages wrote",
            "gpu": "a CPU",
            "commands": [
                "python -m tests.tools.write_dense_model smollm2 smollm2-dense",
                "python tests/peers/format_writers.py smollm2-dense README.md --json"
                " tests/peers/tables/format_writers.json",
            ],
            "text": f"SmolLM2-135M-Instruct, {len(ids)} tokens of README.md, float32; the peer is transformers with the"
            f" weights that the format's own package dequantizes ({libraries}).",
            "columns": COLUMNS,
            "rows": rows,
        }
        options.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
