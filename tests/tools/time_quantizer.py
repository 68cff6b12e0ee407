# SPDX-License-Identifier: Apache-2.0
"""Time the quantization of a model of Qwen3-8B's shape on a GPU: ``python -m tests.tools.time_quantizer``.

The model has a few layers with random weights and a small vocabulary; the time of all 36 layers is extrapolated from
the last layer's. Set CUPY_CACHE_DIR to an empty folder to include the compilation of CuPy's kernels, as on the first
run on a machine. With --check, a small model is quantized on the GPU and on the CPU first, and the errors of both are
compared.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from cupy.cuda import compiler

from cupy_awq import llm
from cupy_awq.checkpoint import safetensors
from cupy_awq.llm.calibrate import layer_quantizer
from tests import llm_models

LAYERS = 36
"""The number of decoder layers of Qwen3-8B."""
QWEN3_8B = {
    **llm_models.QWEN3,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
SMALL = {
    **llm_models.QWEN3,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "max_position_embeddings": 1024,
}
STEPS = ("_read", "_calibrate", "_fold", "_quantize", "tune_layer", "_output_error", "_compare_errors")
"""The functions of `cupy_awq.llm.calibrate.layer_quantizer` that are timed, the steps of quantizing one layer."""
SLOWEST = 8
"""The number of kernel compilations to print per layer, the slowest first."""


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a Hugging Face folder of a model with random bfloat16 weights, which are the same in each layer."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    linears = llm_models.linears({**config, "num_hidden_layers": 1})
    layer: dict[str, np.ndarray] = {}
    for name, (k, n) in linears.items():
        w = rng.standard_normal((n, k), np.float32)
        w *= np.float32(k**-0.5)
        layer[f"{name.removeprefix('model.layers.0.')}.weight"] = w.astype(ml_dtypes.bfloat16)
    for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
        norm = 1 + 0.1 * rng.standard_normal(config["head_dim" if "attn" in name else "hidden_size"])
        norm[::97] *= 8  # A few channels get large activations.
        layer[f"{name}.weight"] = norm.astype(ml_dtypes.bfloat16)
    tensors = {f"model.layers.{i}.{name}": a for i in range(config["num_hidden_layers"]) for name, a in layer.items()}
    hidden = config["hidden_size"]
    tensors["model.embed_tokens.weight"] = rng.standard_normal((config["vocab_size"], hidden)).astype(np.float16)
    tensors["model.norm.weight"] = np.ones(hidden, np.float16)
    safetensors.write(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    llm_models.tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def random_text(tokens: int) -> str:
    """Return random lower-case letters, each of which is a token."""
    return bytes(np.random.default_rng(1).integers(97, 123, tokens, np.uint8)).decode()


def record_times(seconds: dict[str, float]) -> None:
    """Add up the seconds of each of `STEPS` from now on, and print the steps of the first layer as they finish."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            cupy.cuda.Device().synchronize()
            seconds[name] += time.perf_counter() - start
            if seconds["layers"] < 1:
                print(f"  {name.strip('_')}: {time.perf_counter() - start:.2f} s", flush=True)
            return result

        return run

    for name in STEPS:
        setattr(layer_quantizer, name, timed(name, getattr(layer_quantizer, name)))


def record_compilations() -> list[tuple[float, str]]:
    """Return a list to which (seconds, name) of each kernel that CuPy compiles from now on is appended."""
    compiled: list[tuple[float, str]] = []
    compile_source = compiler._compile_using_nvrtc_no_warning

    def timed(source: str, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = compile_source(source, *args, **options)
        name = re.search(r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)", source)
        compiled.append((time.perf_counter() - start, name[1] if name else "unknown"))
        return result

    compiler._compile_using_nvrtc_no_warning = timed
    return compiled


def quantize(folder: Path, name: str, device: Any, samples: int, progress: Any = None) -> Sequence[Mapping[str, Any]]:
    """Quantize a model by the default method and return the layers' reports."""
    text = random_text(samples * 512 + 512)
    return llm.quantize(folder, folder / name, [text], samples=samples, device=device, progress=progress).layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=128, help="calibration sequences of 512 tokens (default: 128)")
    parser.add_argument("--check", action="store_true", help="compare the GPU with the CPU on a small model first")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model, at least 2 (default: 2)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compiled = record_compilations()
        if args.check:
            small = write_model(folder / "small", SMALL)
            gpu, cpu = (quantize(small, device_name, device, 8) for device_name, device in (("gpu", 0), ("cpu", "cpu")))
            for ours, theirs in zip(gpu, cpu, strict=True):
                print(
                    f"layer {ours['layer']} of the small model: output error {ours['output_error']:.5f} on the GPU,"
                    f" {theirs['output_error']:.5f} on the CPU"
                )
        print(f"writing {args.layers} layers", flush=True)
        large = write_model(folder / "large", QWEN3_8B | {"num_hidden_layers": args.layers})
        seconds: dict[str, float] = defaultdict(float)
        record_times(seconds)
        times: list[float] = []

        def progress(done: int, total: int, report: Any) -> None:
            times.append(time.perf_counter())
            seconds["layers"] = done
            steps = ", ".join(f"{step.strip('_')} {seconds.pop(step, 0):.2f}" for step in STEPS)
            print(f"{done} of {total} layers after {times[-1] - times[0]:.1f} s ({steps})", flush=True)
            print(f"  compiled {len(compiled)} kernels of CuPy in {sum(s for s, _ in compiled):.1f} s", flush=True)
            for slow, kernel in sorted(compiled, reverse=True)[:SLOWEST]:
                print(f"    {kernel}: {slow:.2f} s", flush=True)
            compiled.clear()
            pool = cupy.get_default_memory_pool()
            print(
                f"  memory pool {pool.total_bytes() / 1e9:.2f} GB, in use {pool.used_bytes() / 1e9:.2f} GB", flush=True
            )

        free_before = cupy.cuda.Device().mem_info[0]
        reports = quantize(large, "large", 0, args.samples, progress)
        written = time.perf_counter() - times[-1]
        used = free_before - cupy.cuda.Device().mem_info[0]
        first, last = times[1] - times[0], times[-1] - times[-2]
        print(f"output error {reports[-1]['output_error']:.4f}")
        print(
            f"first layer {first:.1f} s, last {last:.2f} s, {LAYERS} layers {first + (LAYERS - 1) * last:.0f} s,"
            f" files {written:.1f} s for {args.layers} layers"
        )
        print(f"GPU memory {used / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
