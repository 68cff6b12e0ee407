# SPDX-License-Identifier: Apache-2.0
"""Read checkpoints that cupy_awq writes by the formats' own packages, and compare every weight.

A dense model is rounded to nearest in groups of 64 (GGUF: 32), written by `checkpoint.save` or ``convert``, and read by
transformers with compressed-tensors, by gptqmodel, by AutoAWQ, by the package gguf and by llama.cpp:

    python -m tests.tools.write_dense_model smollm2 smollm2-dense
    python tests/peers/read_back.py smollm2-dense README.md --json tests/peers/tables/read_back.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers

from cupy_awq import checkpoint, llm, quantize, reference
from cupy_awq.checkpoint import Contents, Module, ModuleSpec, Tensor, safetensors
from cupy_awq.checkpoint.gguf.names import DEFAULT
from cupy_awq.checkpoint.module import Pending
from cupy_awq.llm.files.convert import convert
from tests.peers.format_models import Scores, copy_settings, linear_names, our_scores

Array = npt.NDArray[Any]
Weights = dict[str, Array]

TOKENS = 200
"""The number of tokens of the text that llama.cpp scores, which keeps its run short."""


def quantized(dense: Path, group_size: int, symmetric: bool) -> Contents:
    """Return a dense folder's contents with the linear layers rounded to 4 bits."""
    names = set(linear_names(dense))
    entries: dict[str, Pending | Tensor] = {}
    for name, array in safetensors.read(dense / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module not in names:
            entries[name] = Tensor(array, dense)
            continue
        weight = quantize(array.T, group_size=group_size, symmetric=symmetric)
        if symmetric:
            weight = type(weight)(weight.qweight, weight.scales, None)
        spec = ModuleSpec(*weight.shape, group_size, weight.spec.zeros, weight.dtype)
        entries[module] = Pending(spec, lambda weight=weight: Module(weight, None))
    return Contents(entries, "", "rounded")


def our_weights(path: Path, dtype: Any = np.float16) -> Weights:
    """Return the dense weights [N, K] of all quantized modules, dequantized by cupy_awq."""
    contents = checkpoint.read(path)
    found = {}
    for name in contents.specs:
        module = contents[name]
        if isinstance(module, Module):
            weight = module.weight
            found[name] = reference.dequantize(weight.qweight, weight.scales, weight.qzeros, dtype=dtype).T
    return found


def read_compressed_tensors(path: Path, names: list[str]) -> Weights:
    """Return the dense weights [N, K] that transformers decompresses from a compressed-tensors folder, by module."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float16, quantization_config=transformers.CompressedTensorsConfig(run_compressed=False)
    )
    parameters = dict(model.named_parameters())
    return {name: parameters[f"{name}.weight"].detach().numpy() for name in names}


def read_gptq(path: Path, names: list[str]) -> Weights:
    """Return the dense weights [N, K] to which gptqmodel's layers dequantize a GPTQ folder, by module."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    tensors = {name: torch.from_numpy(np.array(a)) for name, a in safetensors.read(path / "model.safetensors").items()}
    found = {}
    for name in names:
        parts = {part: tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")}
        k, n = 8 * parts["qweight"].shape[0], parts["qweight"].shape[1]
        layer = TorchLinear(4, k // len(parts["scales"]), False, True, k, n, bias=False)
        layer.load_state_dict(parts, strict=False)
        found[name] = layer.eval().dequantize_weight().numpy().T
    return found


def read_autoawq(path: Path, names: list[str]) -> Weights:
    """Return the dense weights [N, K] to which AutoAWQ dequantizes an AutoAWQ folder, by module."""
    from awq.utils.packing_utils import dequantize_gemm

    tensors = {name: torch.from_numpy(np.array(a)) for name, a in safetensors.read(path / "model.safetensors").items()}
    found = {}
    for name in names:
        qweight, qzeros, scales = (tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
        found[name] = dequantize_gemm(qweight, qzeros, scales, 4, len(qweight) // len(scales)).numpy().T
    return found


def read_gguf(path: Path, names: list[str]) -> Weights:
    """Return the weights that the package gguf dequantizes to, with rows in Hugging Face's order."""
    attention = llm.read(path).config.layers[0].mixer
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    found = {}
    for name in names:
        tensor = tensors[DEFAULT.to_gguf(f"{name}.weight")[0]]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        count = {"q_proj": attention.heads, "k_proj": attention.kv_heads}.get(name.rpartition(".")[2])
        if count is not None:
            values = values.reshape(count, len(values) // count // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
        found[name] = values
    return found


def score_by_llama_cpp(path: Path, text: str) -> tuple[float, float]:
    """Return the perplexity of the first `TOKENS` tokens by cupy_awq and by llama.cpp, which rounds x to 8 bits.

    Raises ValueError if the tokenizers differ.
    """
    import llama_cpp

    ids = llm.read(path).load_tokenizer().encode(text)
    theirs = llama_cpp.Llama(str(path), n_ctx=TOKENS, logits_all=True, verbose=False)
    found = theirs.tokenize(text.encode(), add_bos=False, special=True)
    if found != ids:
        raise ValueError(f"llama.cpp: expected the tokens of cupy_awq, got {len(found)} others")
    ids = ids[:TOKENS]
    theirs.eval(ids)
    logits = np.array(theirs.scores[: len(ids)])
    theirs.close()
    return our_scores(path, ids).perplexity(ids), Scores(logits, []).perplexity(ids)


READERS = {
    "autoawq": ("autoawq", read_autoawq, 64, False),
    "compressed-tensors, asymmetric": ("compressed-tensors", read_compressed_tensors, 64, False),
    "compressed-tensors, symmetric": ("compressed-tensors", read_compressed_tensors, 32, True),
    "gptq": ("gptqmodel", read_gptq, 64, False),
}
"""The package, the function that reads its weights, the group size, and whether all zero points are 8, by format."""


def compare_weights(label: str, reader: str, ours: Weights, theirs: Weights) -> list[str]:
    """Return a row of the table: the file, the package that read it, and how many layers and weights differ."""
    differing = sum(int(np.count_nonzero(ours[name] != theirs[name])) for name in ours)
    row = [label, reader, f"{len(ours)} layers, {sum(a.size for a in ours.values())} weights", f"{differing} differ"]
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", type=Path, help="a folder with float16 weights")
    parser.add_argument("text", type=Path, help="a text to score with llama.cpp")
    parser.add_argument("--json", type=Path, help="a file of tests/peers/tables to write")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for label, (package, read, group_size, symmetric) in READERS.items():
            folder = root / label.replace(", ", "-")
            copy_settings(options.dense, folder)
            checkpoint.save(folder, quantized(options.dense, group_size, symmetric), label.partition(",")[0])
            ours = our_weights(folder)
            reader = f"{package} {importlib.metadata.version(package)}"
            rows.append(compare_weights(label, reader, ours, read(folder, list(ours))))
        files = {"GGUF Q4_0": root / "q4_0.gguf", "GGUF Q4_1": root / "q4_1.gguf"}
        convert(str(root / "compressed-tensors-symmetric"), files["GGUF Q4_0"], "gguf")
        convert("smollm2", files["GGUF Q4_1"], "gguf")
        for label, path in files.items():
            ours = our_weights(path, np.float32)
            reader = f"gguf {importlib.metadata.version('gguf')}"
            rows.append(compare_weights(label, reader, ours, read_gguf(path, list(ours))))
            reader = f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"
            ours_score, theirs_score = score_by_llama_cpp(path, options.text.read_text())
            compared = f"tokens; perplexity of {TOKENS}, {ours_score:.2f} by cupy_awq"
            rows.append([label, reader, compared, f"equal; {theirs_score:.2f}"])
            print(rows[-1], flush=True)
    if options.json is not None:
        table = {
            "title": "Written checkpoints in the formats' own readers",
            "gpu": "a CPU",
            "commands": [
                "python -m tests.tools.write_dense_model smollm2 smollm2-dense",
                "python tests/peers/read_back.py smollm2-dense README.md --json tests/peers/tables/read_back.json",
            ],
            "text": "SmolLM2-135M-Instruct, rounded to 4 bits and written by cupy_awq; the readers' dequantized weights"
            " are compared with ours, in float16 and for GGUF in float32.",
            "columns": ["file", "reader", "compared", "result"],
            "rows": rows,
        }
        options.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
