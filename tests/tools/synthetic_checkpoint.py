# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint of random weights and time how fast it loads: ``python -m tests.tools.synthetic_checkpoint``.

The default is a mixture of experts of 8 billion 4-bit weights in compressed-tensors' format: 62,000 tensors in 8
shards, 4.3 GB. The time is that of opening it and of converting every layer, from a warm page cache.

    python -m tests.tools.synthetic_checkpoint /tmp/moe
    python -m tests.tools.synthetic_checkpoint /tmp/moe --device 0
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import cupy_awq
from cupy_awq import checkpoint
from cupy_awq.checkpoint import safetensors
from cupy_awq.checkpoint.tensors import INDEX
from cupy_awq.tools.progress import show_bar

SHARDS = 8
GROUP = 128

CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP},
        }
    },
    "ignore": ["lm_head"],
}


def write(folder: Path, layers: int, experts: int, hidden: int = 1024, intermediate: int = 512) -> Path:
    """Write the checkpoint unless the folder has one, and return the folder."""
    if (folder / INDEX).is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        tensors: dict[str, Any] = {}
        for layer in range(shard * layers // SHARDS, (shard + 1) * layers // SHARDS):
            at = f"model.layers.{layer}"
            sizes = {f"{at}.self_attn.{p}_proj": (hidden, hidden) for p in "qkvo"}
            for expert in range(experts):
                name = f"{at}.mlp.experts.{expert}"
                sizes |= {f"{name}.{p}_proj": (intermediate, hidden) for p in ("gate", "up")}
                sizes[f"{name}.down_proj"] = hidden, intermediate
            for name, (n, k) in sizes.items():
                tensors |= {f"{name}.{part}": array for part, array in _random_module(rng, n, k).items()}
            tensors[f"{at}.mlp.gate.weight"] = np.ones((experts, hidden), np.float16)
            tensors |= {f"{at}.{norm}_layernorm.weight": np.ones(hidden, np.float16) for norm in ("input", "post")}
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        safetensors.write(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "config.json").write_text(json.dumps({"quantization_config": CONFIG}))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _random_module(rng: np.random.Generator, n: int, k: int) -> dict[str, Any]:
    def words(*shape: int) -> Any:
        return rng.integers(0, 2**32, shape, np.uint32).view(np.int32)

    return {
        "weight_packed": words(n, k // 8),
        "weight_zero_point": words(n // 8, k // GROUP),
        "weight_scale": (rng.random((n, k // GROUP)) / 100).astype(np.float16),
        "weight_shape": np.array([n, k], np.int64),
    }


def measure(folder: Path, device: Any) -> dict[str, float]:
    """Convert all layers one by one; return seconds, CPU seconds and GB of the files per second.

    On the CPU each layer is freed after its conversion, as the host's copy is after an upload; a GPU keeps its layers.
    """
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for file in folder.glob("*.safetensors"):  # read all files once, so that they are in the page cache
        file.read_bytes()
    start, cpu = time.perf_counter(), time.process_time()
    layers = checkpoint.read(folder) if device == "cpu" else cupy_awq.load(folder, device=device)
    opened = time.perf_counter()
    for done, name in enumerate(layers):
        layers[name]
        if done % 256 == 0 and sys.stderr.isatty():
            show_bar(done, len(layers))
    if sys.stderr.isatty():
        show_bar(1, 1)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return {
        "bytes": size,
        "entries": len(layers),
        "open_seconds": opened - start,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "gb_per_second": size / seconds / 1e9,
        "gb_per_cpu_second": size / cpu_seconds / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=106)
    parser.add_argument("--device", default="cpu", help="cpu or the ordinal of a GPU")
    options = parser.parse_args()
    device = int(options.device) if options.device.isdecimal() else options.device
    write(options.folder, options.layers, options.experts)
    for key, value in measure(options.folder, device).items():
        print(f"{key:16} {value:.3f}")
    print(f"{'peak_rss_mb':16} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f}")


if __name__ == "__main__":
    main()
