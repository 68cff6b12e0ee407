# SPDX-License-Identifier: Apache-2.0
"""Print the largest amounts of memory that loading a model takes: ``python -m tests.tools.loading_memory FOLDER``.

A folder that does not exist is filled with a random model first. All figures are in MB, without what the process took
before: "anonymous" memory, "mapped" pages of files and page-locked memory ("locked" alone is CuPy's), and memory of the
GPU.

    python -m tests.tools.loading_memory /tmp/model --device cuda
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from cupy_awq.check import HOST
from cupy_awq.llm.decoder.build import build_model, make_ops
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.files.readers import read
from cupy_awq.runtime import placement
from tests import llm_models

INTERVAL = 0.0005
"""The seconds between two samples."""
SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4}
MODEL = {**llm_models.QWEN3, **SIZES, "head_dim": 128, "vocab_size": 32768, "num_hidden_layers": 24}
"""The configuration of a model of 0.9 GB."""


def write(folder: Path, config: dict[str, Any]) -> Path:
    """Write a model whose layers all have the same random weights, of group size 128, and return its folder."""
    llm_models.folder(folder, {**config, "num_hidden_layers": 1}, 128)
    tensors = llm_models.tensors({**config, "num_hidden_layers": 1}, group=128)
    first = {name: array for name, array in tensors.items() if ".layers.0." in name}
    for i in range(1, config["num_hidden_layers"]):
        tensors |= {name.replace(".layers.0.", f".layers.{i}."): array for name, array in first.items()}
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": config["num_hidden_layers"]}))
    return folder


def measure(folder: Path, device: str, *, expand: bool = True) -> dict[str, float]:
    """Return the peaks of loading a model, those of their sum ("peak"), and the sizes of the weights, in MB.

    With ``expand``, a model on the CPU has float32 weights.
    """
    index = placement.resolve(device)
    with placement.use_device(index):
        _load_small(index)  # CUDA's own memory is not counted
        with _sampled(index) as peaks:
            files = read(folder)
            ops = NumpyOps(files.config, expand_weights=expand) if index == HOST else make_ops(files, index)
            model = build_model(files, ops)
            time.sleep(10 * INTERVAL)
    found = {name: value / 1e6 for name, value in peaks.items()}
    found["file"] = (folder / "model.safetensors").stat().st_size / 1e6
    table = files.config.vocab * files.config.hidden
    found["weights"] = (model.weight_bytes + (0 if files.config.tied else 2 * table)) / 1e6
    if index == HOST and expand:
        sizes = (linear.k * linear.n for layer in files.config.layers for linear in layer.linears)
        found["weights"] = 4 * (sum(sizes) + table) / 1e6
    return found


def _load_small(index: int) -> None:
    with tempfile.TemporaryDirectory() as path:
        small = read(llm_models.folder(Path(path), {**llm_models.QWEN3, "hidden_size": 128}, 32))
        build_model(small, make_ops(small, index))


@contextmanager
def _sampled(index: int) -> Iterator[dict[str, int]]:
    """Yield a dictionary to which the largest sizes since the beginning are written until the end."""
    locked, stop, pool = [0], threading.Event(), None
    if index != HOST:
        import cupy

        pool = cupy.get_default_memory_pool()
        pool.free_all_blocks()
        pinned = cupy.cuda.PinnedMemoryPool(lambda size: _counted(cupy.cuda.PinnedMemoryPointer, locked, size))
        cupy.cuda.set_pinned_memory_allocator(pinned.malloc)

    def sizes() -> dict[str, int]:
        resident, shared = (4096 * int(n) for n in Path("/proc/self/statm").read_text().split()[1:3])
        gpu = 0 if pool is None else pool.total_bytes()
        return {"anonymous": resident - shared, "mapped": shared, "locked": locked[0], "gpu": gpu}

    begin = sizes()
    peaks: dict[str, int] = {}

    def sample() -> None:
        while not stop.wait(INTERVAL):
            now = {name: size - begin[name] for name, size in sizes().items()}
            total = sum(now.values()) - now["locked"]
            for name, size in {**now, "peak": total}.items():
                peaks[name] = max(peaks.get(name, 0), size)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()


def _counted(pointer: Any, locked: list[int], size: int) -> Any:
    import cupy

    locked[0] += size
    return pointer(cupy.cuda.pinned_memory.PinnedMemory(size), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--stream", action="store_true", help="on the CPU, keep the weights of the file")
    options = parser.parse_args()
    if not options.folder.is_dir():
        write(options.folder, MODEL)
    print(json.dumps(measure(options.folder, options.device, expand=not options.stream)))


if __name__ == "__main__":
    main()
