# SPDX-License-Identifier: Apache-2.0
"""Versions, GPUs and the cache folder: ``info`` without a checkpoint, and the command ``cache``."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import cupy_awq
from cupy_awq.runtime import device, disk_cache, placement
from cupy_awq.runtime.compile import nvrtc_version_and_archs
from cupy_awq.tools import table

PACKAGES = ("numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "tokenizers", "jinja2", "gguf")
"""The distributions whose versions are printed if they are installed."""


def describe() -> dict[str, Any]:
    """Return the versions, the GPUs with their nominal rates, and the cache folder with its size, as a JSON object."""
    versions = {"cupy_awq": cupy_awq.__version__, "Python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        versions["NVRTC"] = ".".join(map(str, nvrtc_version_and_archs()[0]))
    except OSError:
        versions["NVRTC"] = "none"
    gpus = []
    for index in range(placement.gpu_count()):
        with placement.use_device(index):
            gpus.append({"index": index, **asdict(device.of(index))})
    return {"versions": versions, "gpus": gpus, "cache": describe_cache()}


def render(content: dict[str, Any]) -> str:
    """Return the versions, GPUs and cache folder, as `describe` gives them, as lines of text."""
    width = max(map(len, content["versions"]))
    lines = [f"{name:{width}}  {version}" for name, version in content["versions"].items()]
    lines.append("")
    for gpu in content["gpus"]:
        forced = "" if gpu["arch"] == gpu["native"] else f", running kernels of sm_{gpu['arch']}"
        lines.append(
            f"GPU {gpu['index']}: {gpu['name']} (sm_{gpu['native']}{forced}), {gpu['sm_count']} SMs, L2"
            f" {table.size(gpu['l2_bytes'])}, memory {gpu['rates']['read_gbs']:.0f} GB/s"
        )
    if not content["gpus"]:
        lines.append("GPU: none that CuPy can use; functions run on the CPU")
    return "\n".join([*lines, "", render_cache(content["cache"])])


def describe_cache() -> dict[str, Any]:
    """Return the path of the cache folder, and the number and total size in bytes of its files, as a JSON object."""
    folder = disk_cache.folder()
    files = _list_files(folder)
    return {"folder": str(folder), "files": len(files), "bytes": sum(file.stat().st_size for file in files)}


def render_cache(cache: dict[str, Any]) -> str:
    """Return the path, files and size of the cache folder, as `describe_cache` gives them, as lines of text."""
    return f"cache: {cache['folder']}: {cache['files']} files, {table.size(cache['bytes'])}"


def clear_cache() -> int:
    """Delete the compiled kernels and the tuned configurations of the cache folder; return the number of files.

    Files of other kinds stay. Processes that have loaded a kernel keep it.
    """
    files = _list_files(disk_cache.folder())
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def _list_files(folder: Path) -> list[Path]:
    """Return the files that this package writes into its cache folder."""
    kernels = (file for file in folder.glob("*-sm*") if file.suffix in (".cubin", ".ptx", ".json"))
    return sorted(file for file in (*kernels, *folder.glob("tuned/*.json")) if file.is_file())


CACHE = """

The cache folder ($CUPY_AWQ_CACHE_DIR, else cupy_awq in the user's cache folder) holds
compiled kernels and what `tune` measured. Without --clear, prints its size."""


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command by ``command``: it makes a parser of (name, function to run, summary, help text, examples)."""
    parser = command("cache", _cache, "print the size of the cache folder, or clear it", CACHE, ["", "--clear"])
    parser.add_argument("--clear", action="store_true", help="delete the compiled kernels and tuned configurations")
    parser.add_argument("--json", action="store_true", help="print an object instead of text")


def _cache(args: argparse.Namespace) -> int:
    cleared = {"deleted": clear_cache()} if args.clear else {}
    content = describe_cache() | cleared
    text = render_cache(content) + (f"; deleted {cleared['deleted']} files" if cleared else "")
    print(json.dumps(content, indent=2) if args.json else text)
    return 0
