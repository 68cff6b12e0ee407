# SPDX-License-Identifier: Apache-2.0
"""Writing of checkpoint folders in the formats of AutoAWQ, compressed-tensors and GPTQ.

Codes and zero points are repacked and scales are copied, all without rounding, so reading the folder returns bitwise
equal values. None of these formats can store float offsets.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq import atomic
from cupy_awq.checkpoint import nibbles, replacement, safetensors
from cupy_awq.checkpoint.config import COMPRESSION, HUGGING_FACE, MLX
from cupy_awq.checkpoint.contents import Contents
from cupy_awq.checkpoint.files import check_path, read_object
from cupy_awq.checkpoint.module import Module, ModuleSpec
from cupy_awq.checkpoint.tensors import INDEX, Tensor
from cupy_awq.packing import SYMMETRIC

Array = npt.NDArray[Any]

SHARD_BYTES = 5_000_000_000
"""The largest size of a safetensors file in bytes; larger checkpoints are split into shards."""

OWN_FILE = re.compile(r"model(-\d{5})?\.safetensors|" + re.escape(INDEX))
"""The regular expression for the names of the safetensors files and the index that `save` writes and replaces."""

CONFIG = "config.json"


@dataclass(frozen=True)
class Writer:
    """The functions that write one format.

    Attributes:
        pack: the function that returns the tensors of a module by suffix.
        configure: the function that returns the ``quantization_config``, given the properties of all quantized modules
            by name and a list of the names of dense modules.
        holds_order: whether the format can store an activation order.
    """

    pack: Callable[[Module], dict[str, Array]]
    configure: Callable[[Mapping[str, ModuleSpec], list[str]], dict[str, Any]]
    holds_order: bool


def save(
    folder: str | os.PathLike[str],
    contents: Contents,
    format_name: str,
    /,
    *,
    progress: Callable[[int, int], None] | None = None,
    check: Callable[[Path], object] | None = None,
) -> None:
    """Write a checkpoint folder: safetensors files, an index if there are several, and config.json.

    If the folder has a config.json, only its quantization is replaced. Modules are converted one by one,
    so the peak memory is about one shard (`SHARD_BYTES`). All files are written to a temporary subfolder, whose name
    ends in ".part", and replace the earlier ones when they are complete. After an error, the earlier checkpoint is as
    it was; after a kill, `read` finds the whole earlier or the whole new one (`cupy_awq.checkpoint.replacement`). A new
    file has no permission that the file that it replaces did not have.

    Args:
        folder: the folder, which is created if it does not exist. Safetensors files and an index in it that have the
            names that `save` writes (`OWN_FILE`) are replaced, whoever wrote them.
        contents: a checkpoint from `cupy_awq.checkpoint.read`, which may have been read from ``folder``.
        format_name: "autoawq", "compressed-tensors" or "gptq".
        progress: a callback (number of modules and tensors converted, total number), or None.
        check: a function that is called with the temporary folder of the complete checkpoint, and that raises an error
            to keep the earlier one; or None.

    Raises:
        CheckpointError: config.json is damaged, or a module cannot be read. It is a subclass of ValueError.
        FileExistsError: the folder contains safetensors files or an index of other names.
        OSError: a file cannot be written, or another process saves to the folder.
        ValueError: the format is unknown or cannot represent a module. In this case nothing is written.
    """
    writer, specs = _find_writer(contents, format_name)
    settings = writer.configure(specs, _list_dense_modules(contents)) if specs else None
    path = check_path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with replacement.replace(path, lambda name: name == CONFIG or OWN_FILE.fullmatch(name) is not None) as new:
        earlier = _list_earlier_files(path)
        config = read_object(path / CONFIG) if (path / CONFIG).is_file() else {}
        entry = {} if settings is None else {HUGGING_FACE: settings}
        _write_json(new / CONFIG, {**_without_quantization(config), **entry})
        _write_tensors(new, contents, writer, progress)
        _narrow_modes(new, path, earlier)
        if check is not None:
            check(new)


def write_file(
    path: Path, contents: Contents, format_name: str, *, check: Callable[[Path], object] | None = None
) -> None:
    """Write a checkpoint as one safetensors file without a configuration; the arguments and errors are as in `save`."""
    writer, _ = _find_writer(contents, format_name)
    safetensors.write(path, dict(_convert_tensors(contents, writer, None)), check=check)


def _find_writer(contents: Contents, format_name: str) -> tuple[Writer, dict[str, ModuleSpec]]:
    """Return the writer of a format, and the properties of the modules that stay quantized.

    Raises ValueError if the format is unknown or cannot represent a module.
    """
    if format_name not in WRITERS:
        raise ValueError(f"format_name: expected {', '.join(WRITERS)}, got {format_name!r:.80}")
    writer = WRITERS[format_name]
    specs = {name: spec for name, spec in contents.specs.items() if contents.is_module(name)}
    for name, spec in specs.items():
        _check(name, spec, format_name, writer)
    return writer, specs


def _narrow_modes(new: Path, path: Path, earlier: Sequence[Path]) -> None:
    """Give new files no permission that config.json, or one of the earlier safetensors files, does not have."""
    mode = atomic.common_mode(earlier)
    for file in new.iterdir():
        is_config = file.name == CONFIG and (path / CONFIG).is_file()
        atomic.narrow_mode(file, (path / CONFIG).stat().st_mode if is_config else mode)


def _list_earlier_files(path: Path) -> list[Path]:
    """Return the safetensors files and indices in a folder, which have the names that `save` writes.

    Raises FileExistsError if the folder has one of another name.
    """
    found = [*path.glob("*.safetensors"), *path.glob("*.safetensors.index.json")]
    for file in found:
        if not OWN_FILE.fullmatch(file.name):
            raise FileExistsError(f"{file}: expected a folder without safetensors files of another checkpoint, got one")
    return found


def _write_tensors(path: Path, contents: Contents, writer: Writer, progress: Callable[[int, int], None] | None) -> None:
    """Write all tensors to one file, or to shards with an index."""
    shard: dict[str, Array] = {}
    files: dict[str, str] = {}
    nbytes = 0
    for name, array in _convert_tensors(contents, writer, progress):
        if shard and nbytes + array.nbytes > SHARD_BYTES:
            _write_shard(path, shard, files)
            shard, nbytes = {}, 0
        shard[name] = array
        nbytes += array.nbytes
    if not files:
        safetensors.write(path / "model.safetensors", shard)
        return
    _write_shard(path, shard, files)
    _write_json(path / INDEX, {"metadata": {}, "weight_map": files})


def _write_json(file: Path, value: dict[str, Any]) -> None:
    with atomic.create(file) as opened:
        opened.write(json.dumps(value, indent=2).encode() + b"\n")


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without quantization entries, at its top level and in ``text_config``."""
    kept = {key: value for key, value in config.items() if key not in (MLX, HUGGING_FACE, COMPRESSION)}
    if isinstance(kept.get("text_config"), dict):
        kept["text_config"] = _without_quantization(kept["text_config"])
    return kept


def _convert_tensors(
    contents: Contents, writer: Writer, progress: Callable[[int, int], None] | None
) -> Iterator[tuple[str, Array]]:
    for done, (name, item) in enumerate(contents.items()):
        if progress is not None:
            progress(done + 1, len(contents))
        if isinstance(item, Tensor):
            yield name, item.array
        else:
            prefix = f"{name}." if name else ""
            for part, array in writer.pack(item).items():
                yield prefix + part, array


def _write_shard(path: Path, tensors: dict[str, Array], files: dict[str, str]) -> None:
    """Write ``tensors`` as the next shard, and add its file name to ``files`` for each tensor."""
    file = f"model-{len(set(files.values())) + 1:05}.safetensors"
    safetensors.write(path / file, tensors)
    files.update(dict.fromkeys(tensors, file))


def _check(name: str, spec: ModuleSpec, format_name: str, writer: Writer) -> None:
    where = f"module {name!r:.200}"
    if spec.zeros == "float":
        raise ValueError(
            f"{where}: expected packed or symmetric zero points for {format_name}, got float offsets; `convert --round`"
            " rounds them"
        )
    if spec.has_order and not writer.holds_order:
        raise ValueError(
            f"{where}: expected no activation order for {format_name}, got one; gptq and compressed-tensors hold it,"
            " and `convert --round` quantizes the weight again without it"
        )
    if spec.k % 8:
        raise ValueError(f"{where}: expected K to be a multiple of 8 for {format_name}, got {spec.k}")


def _pack_zeros(module: Module) -> Array:
    """Return the packed zero points of a module, int32 [K/G, N/8]; for a symmetric module all of them are 8."""
    weight = module.weight
    if weight.qzeros is not None:
        return np.asarray(weight.qzeros)
    return np.full((len(weight.scales), weight.shape[1] // 8), SYMMETRIC, np.uint32).view(np.int32)


def _restore_rows(module: Module) -> Array:
    """Return the codes of a module as AWQ words [K, N/8] without activation order: row k multiplies x[..., k]."""
    words = np.asarray(module.weight.qweight)
    if module.order is None:
        return words
    unordered = np.empty_like(words)
    unordered[module.order] = words
    return unordered


def _group_rows(module: Module) -> npt.NDArray[np.int32]:
    """Return the group index for each column of x before x is permuted, int32 [K]."""
    k, group_size = module.weight.shape[0], module.weight.group_size
    groups = np.arange(k, dtype=np.int32) // np.int32(group_size)
    if module.order is None:
        return groups
    g_idx = np.empty_like(groups)
    g_idx[module.order] = groups
    return g_idx


def _with_bias(tensors: dict[str, Array], module: Module) -> dict[str, Array]:
    return tensors if module.bias is None else {**tensors, "bias": module.bias}


def _pack_autoawq(module: Module) -> dict[str, Array]:
    weight = module.weight
    return _with_bias({"qweight": weight.qweight, "qzeros": _pack_zeros(module), "scales": weight.scales}, module)


def _pack_gptq(module: Module) -> dict[str, Array]:
    tensors = {
        "qweight": nibbles.convert_to_row_words(_restore_rows(module)),
        "qzeros": nibbles.restore_columns(_pack_zeros(module)),
        "scales": module.weight.scales,
        "g_idx": _group_rows(module),
    }
    return _with_bias(tensors, module)


def _pack_compressed_tensors(module: Module) -> dict[str, Array]:
    weight = module.weight
    k, n = weight.shape
    tensors = {
        "weight_packed": nibbles.convert_to_column_words(_restore_rows(module)),
        "weight_scale": nibbles.transpose_matrix(weight.scales),
        "weight_shape": np.array([n, k], np.int64),
    }
    if weight.qzeros is not None:
        tensors["weight_zero_point"] = nibbles.transpose_matrix(nibbles.restore_columns(weight.qzeros))
    if module.order is not None:
        tensors["weight_g_idx"] = _group_rows(module)
    return _with_bias(tensors, module)


def _find_group_size(specs: Mapping[str, ModuleSpec]) -> int:
    sizes = {spec.group_size for spec in specs.values()}
    if len(sizes) > 1:
        found = ", ".join(map(str, sorted(sizes)))
        raise ValueError(f"expected modules of one group size, got {found}; compressed-tensors holds several")
    return sizes.pop() if sizes else 128


def _list_dense_modules(contents: Contents) -> list[str]:
    """Return the names of modules with a dense weight matrix, which the configuration lists as not quantized."""
    names = [name for name in contents if name.endswith(".weight") and not contents.is_module(name)]
    return [name.removesuffix(".weight") for name in names if len(contents.dense_form(name)[0]) == 2]


def _configure_autoawq(specs: Mapping[str, ModuleSpec], dense: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": _find_group_size(specs),
        "zero_point": True,
        "modules_to_not_convert": dense or None,
    }


def _configure_gptq(specs: Mapping[str, ModuleSpec], dense: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": 4,
        "group_size": _find_group_size(specs),
        "desc_act": any(spec.has_order for spec in specs.values()),
        "sym": all(spec.zeros == "symmetric" for spec in specs.values()),
        "dynamic": {f"-:^{re.escape(name)}$": {} for name in dense},
    }


def _configure_compressed_tensors(specs: Mapping[str, ModuleSpec], dense: list[str]) -> dict[str, Any]:
    forms: dict[tuple[int, bool], list[str]] = {}
    for name, spec in specs.items():
        forms.setdefault((spec.group_size, spec.zeros == "symmetric"), []).append(name)
    groups = {}
    for i, ((group_size, symmetric), names) in enumerate(forms.items()):
        weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group_size}
        if any(specs[name].has_order for name in names):
            weights["actorder"] = "group"
        targets = ["Linear"] if len(forms) == 1 else names
        groups[f"group_{i}"] = {"targets": targets, "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": dense,
    }


WRITERS = {
    "autoawq": Writer(_pack_autoawq, _configure_autoawq, holds_order=False),
    "compressed-tensors": Writer(_pack_compressed_tensors, _configure_compressed_tensors, holds_order=True),
    "gptq": Writer(_pack_gptq, _configure_gptq, holds_order=True),
}
"""The writers by format name."""
