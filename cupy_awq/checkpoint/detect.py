# SPDX-License-Identifier: Apache-2.0
"""Detection of a checkpoint's format from its configuration or, without one, from the names and shapes of its tensors.

The configuration names the format. The tensors determine which modules are quantized, and their shapes must fit the
format. Each format is in one module of this package. Its configuration reader is an entry of `METHODS`, except for MLX,
whose configuration has no ``quant_method``. `_detect_from_tensors` recognizes files without a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupy_awq.checkpoint import compressed_tensors, config, hqq, mlx
from cupy_awq.checkpoint.autoawq import AutoAwq
from cupy_awq.checkpoint.autoawq_gemv import Gemv, GemvFast
from cupy_awq.checkpoint.config import Entry
from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.format import Format
from cupy_awq.checkpoint.gptq import ONES, Gptq
from cupy_awq.checkpoint.rules import read_rules
from cupy_awq.checkpoint.tensors import Array, Tensor
from cupy_awq.packing import SYMMETRIC

Tensors = Mapping[str, Tensor]

GPTQ_VERSIONS = {"gptq": 1, "gptq_v2": 2}
"""The GPTQ version for each ``checkpoint_format`` of a configuration."""

AUTO_ROUND_VERSIONS = {
    "auto_round:auto_gptq": 1,
    "auto_round:gptq": 1,
    "auto_round:gptqmodel": 2,
    "auto_round": 2,
    "auto_round:auto_awq": None,
    "auto_round:awq": None,
}
"""The GPTQ version for each ``packing_format`` of auto-round; None for AutoAWQ's "gemm" format."""


class Detected(NamedTuple):
    """The detected format of a checkpoint, and the evidence for it."""

    layout: Format
    """The format with the settings of the checkpoint; AutoAWQ's "gemm" format if no module is quantized."""
    sentence: str
    """A sentence for the user that states the format and the file and field that identify it."""


def detect(tensors: Tensors, entry: Entry | None, group_size: int | None = None) -> Detected:
    """Detect the format of a checkpoint from its configuration, or from its tensors if there is no configuration.

    Args:
        tensors: all tensors by name.
        entry: the quantization entry of the configuration, or None without a configuration.
        group_size: the number of rows of W per group, for files that do not record it; None to infer it.

    Raises:
        CheckpointError: the format or a setting is not supported, the tensors have another format than the
            configuration names, or the format is ambiguous. The message names the key and the value in question.
    """
    if entry is None:
        layout, reason = _detect_from_tensors(tensors, group_size)
    else:
        layout, reason = _detect_from_config(tensors, entry)
        _check_layout(tensors, layout, reason)
    return Detected(layout, f"Format {layout.name}: {reason}.")


def _detect_from_config(tensors: Tensors, entry: Entry) -> tuple[Format, str]:
    table, where = entry.table, str(entry.file)
    if entry.key == config.MLX:
        return _read_mlx(tensors, table, where)
    method = table.get("quant_method")
    if method is None:
        return _detect_without_method(tensors, table, where)
    read = METHODS.get(str(method).lower())
    if read is None:
        supported = ", ".join(METHODS)
        raise CheckpointError(f"{where}: quant_method: expected {supported} or MLX's quantization, got {method!r:.80}")
    return read(tensors, table, where)


def _detect_without_method(tensors: Tensors, table: Mapping[str, Any], where: str) -> tuple[Format, str]:
    """Detect the format from a quantization configuration without ``quant_method``.

    Older AutoAWQ, MLX, older AutoGPTQ and early compressed-tensors write such configurations.

    Returns the format and a phrase that states the evidence for it, as the readers in `METHODS` do.
    """
    if "config_groups" in table:
        return _read_compressed_tensors(tensors, table, where)
    if "version" in table or "w_bit" in table or "q_group_size" in table:
        return _read_awq(tensors, table, where)
    if "bits" in table and "group_size" in table:
        if any(tensor.array.dtype == np.uint32 for tensor in tensors.values()):
            return _read_mlx(tensors, table, where)
        layouts = {_match_layout(tensor.array, scales) for _, tensor, scales in _find_codes(tensors)}
        if any(name.endswith("g_idx") for name in tensors) or layouts == {"gptq"}:
            return _read_gptq(tensors, table, where)
    raise CheckpointError(f"{where}: expected a quant_method or a version, got neither, and ambiguous tensors")


def _read_awq(tensors: Tensors, table: Mapping[str, Any], where: str) -> tuple[Format, str]:
    _check_bits(table, where, "bits", "w_bit")
    key = next((key for key in ("version", "checkpoint_format", "format") if table.get(key) is not None), "version")
    version = table.get(key, "gemm")
    group_size = _read_group_size(table, where, "group_size", "q_group_size")
    zero_point = table.get("zero_point")
    if not isinstance(zero_point, bool | None):
        raise CheckpointError(f"{where}: zero_point: expected true or false, got {zero_point!r:.80}")
    reason = f"{key} {version!r:.80} in {where}"
    if isinstance(version, str):
        if version.lower() == "gemm":
            return AutoAwq(group_size, zero_point, where), reason
        if version.lower() == "gemv":
            return Gemv(group_size), reason
        if version.lower() == "gemv_fast":
            return GemvFast(group_size), reason
    hint = "; convert a kernel's own layout back to gemm" if str(version).lower() == "marlin" else ""
    raise CheckpointError(f"{where}: {key}: expected gemm, gemv or gemv_fast, got {version!r:.80}{hint}")


def _read_gptq(tensors: Tensors, table: Mapping[str, Any], where: str) -> tuple[Format, str]:
    _check_bits(table, where, "bits")
    key = "checkpoint_format" if table.get("checkpoint_format") is not None else "format"
    stated = table.get(key)
    version = GPTQ_VERSIONS.get(str(stated or "gptq").lower())
    if version is None:
        hint = "; convert a kernel's own layout back to gptq first"
        raise CheckpointError(f"{where}: {key}: expected gptq or gptq_v2, got {stated!r:.80}{hint}")
    if table.get("is_marlin_format"):
        got = f"{table['is_marlin_format']!r:.80}: marlin is a kernel's own layout"
        raise CheckpointError(f"{where}: is_marlin_format: expected false, got {got}; convert it back to gptq first")
    if table.get("pack_dtype", "int32") != "int32":
        raise CheckpointError(f"{where}: pack_dtype: expected 'int32', got {table['pack_dtype']!r:.80}")
    for name, tensor in tensors.items():
        if name.endswith(".B") and name.removesuffix("B") + "s" in tensors:
            raise CheckpointError(f"{tensor.file}: tensor {name!r:.200}: expected qweight, got marlin's B and s")
    group_size = _read_group_size(table, where, "group_size")
    rules = read_rules(table.get("dynamic"), "dynamic", where, has_names=False, names=_list_modules(tensors))
    reason = f"{key} {stated!r:.80} in {where}" if stated else f"quant_method 'gptq' in {where}"
    by_auto_gptq = "gptqmodel" not in str(table.get("meta"))[:1000] and table.get("provider") != "auto-round"
    return Gptq(version, group_size, rules, checks_zeros=version == 1 and by_auto_gptq), reason


def _read_auto_round(tensors: Tensors, table: Mapping[str, Any], where: str) -> tuple[Format, str]:
    _check_bits(table, where, "bits")
    key = "packing_format" if "packing_format" in table else "backend"
    packing = table.get(key)
    if not isinstance(packing, str) or packing not in AUTO_ROUND_VERSIONS:
        raise CheckpointError(f"{where}: {key}: expected {', '.join(AUTO_ROUND_VERSIONS)}, got {packing!r:.80}")
    if table.get("data_type", "int") != "int":
        raise CheckpointError(f"{where}: data_type: expected 'int', got {table['data_type']!r:.80}")
    act_bits = table.get("act_bits", 16)
    if type(act_bits) is not int or act_bits < 16:
        raise CheckpointError(f"{where}: act_bits: expected 16 (weights alone are quantized), got {act_bits!r:.80}")
    rules = read_rules(table.get("extra_config"), "extra_config", where, has_names=True, names=_list_modules(tensors))
    version, reason = AUTO_ROUND_VERSIONS[packing], f"{key} {packing!r:.80} in {where}"
    if version is None:
        return AutoAwq(None, False if table.get("sym") else None, where, rules), reason
    return Gptq(version, _read_group_size(table, where, "group_size"), rules, is_default=True), reason


def _read_compressed_tensors(tensors: Tensors, table: Mapping[str, Any], where: str) -> tuple[Format, str]:
    return compressed_tensors.read_config(
        table, where, _list_modules(tensors)
    ), f"format {table.get('format')!r:.80} in {where}"


def _read_hqq(tensors: Tensors, table: Mapping[str, Any], where: str) -> tuple[Format, str]:
    return hqq.read_config(table, where), f"quant_method 'hqq' in {where}"


def _read_mlx(tensors: Tensors, table: Mapping[str, Any], where: str) -> tuple[Format, str]:
    return mlx.read_config(table, where), f"quantization with {table.get('bits')} bits in {where}"


METHODS: dict[str, Callable[[Tensors, Mapping[str, Any], str], tuple[Format, str]]] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "auto-round": _read_auto_round,
    "intel/auto-round": _read_auto_round,
    "compressed-tensors": _read_compressed_tensors,
    "hqq": _read_hqq,
}
"""The configuration readers by ``quant_method`` in lower case.

A reader maps (tensors by name, the quantization entry, the configuration's path) to the format and a phrase that states
the evidence for it. It raises CheckpointError for settings that are not supported.
"""


def _list_modules(tensors: Tensors) -> set[str]:
    """Return the names of all modules: the names of tensors up to the last dot."""
    return {name.rpartition(".")[0] for name in tensors}


def _check_bits(table: Mapping[str, Any], where: str, *keys: str) -> None:
    key = next((key for key in keys if key in table), keys[0])
    bits = table.get(key)
    if type(bits) is not int or bits != 4:
        raise CheckpointError(f"{where}: {key}: expected 4, got {bits!r:.80}")


def _read_group_size(table: Mapping[str, Any], where: str, *keys: str) -> int:
    key = next((key for key in keys if key in table), keys[0])
    group_size = table.get(key)
    if type(group_size) is not int or not (group_size == -1 or group_size > 0):
        raise CheckpointError(f"{where}: {key}: expected -1 or a positive integer, got {group_size!r:.80}")
    return group_size


def _detect_from_tensors(tensors: Tensors, group_size: int | None) -> tuple[Format, str]:
    """Return the format of tensors without a configuration, and a phrase that states the evidence for it."""
    for name, tensor in tensors.items():
        suffix = name.rpartition(".")[2]
        reason = f"tensor {name!r:.200} in {tensor.file}"
        if suffix == "weight_packed":
            return compressed_tensors.UNCONFIGURED, reason
        if suffix == "W_q":
            return hqq.Hqq(), reason
        if suffix == "weight" and tensor.array.dtype == np.uint32:
            return mlx.Mlx(None), reason
    for name, tensor, scales in _find_codes(tensors):
        layout = _match_layout(tensor.array, scales)
        reason = f"{tensor.array.dtype} {list(tensor.array.shape)} of {name!r:.200} in {tensor.file}"
        if layout == "awq gemv_fast":
            return GemvFast(group_size), reason
        if layout == "gptq":
            return Gptq(_find_gptq_version(tensors, tensor.file), group_size), reason
        if layout == "awq gemv":
            return Gemv(group_size), reason
        return AutoAwq(group_size), reason  # for tensors of no known format, AutoAwq.open_module raises the error
    return AutoAwq(group_size), "no quantized modules"


def _find_gptq_version(tensors: Tensors, file: Path) -> int:
    """Return the GPTQ version, 1 or 2, in which every zero point of the tensors is 8. Version 1 stores it as 7.

    Raises CheckpointError if there is no such version: only a configuration can tell the versions apart.
    """
    words = {1: np.uint32(SYMMETRIC - ONES), 2: np.uint32(SYMMETRIC)}
    zeros = [tensor.array for name, tensor in tensors.items() if name.rpartition(".")[2] == "qzeros"]
    for version, word in words.items():
        if zeros and all(array.dtype == np.int32 and bool((array.view(np.uint32) == word).all()) for array in zeros):
            return version
    raise CheckpointError(f"{file}: expected a configuration with checkpoint_format gptq or gptq_v2, got none")


def _find_codes(tensors: Tensors) -> list[tuple[str, Tensor, Array | None]]:
    """Return (name, codes, scales or None) for every tensor of codes, which is named ``<module>.qweight``."""
    found = []
    for name, tensor in tensors.items():
        if name.rpartition(".")[2] == "qweight":
            scales = tensors.get(name.removesuffix("qweight") + "scales")
            found.append((name, tensor, None if scales is None else scales.array))
    return found


def _match_layout(codes: Array, scales: Array | None) -> str | None:
    """Return the name of the first format that ``codes`` and ``scales`` fit by dtype and shapes, or None."""
    if codes.dtype == np.int16:
        return "awq gemv_fast"
    if scales is None or codes.ndim < 2 or scales.ndim < 2:
        return None
    return next((name for name, fits in SHAPE_CHECKS.items() if fits(codes.shape[-2:], scales.shape[-2:])), None)


SHAPE_CHECKS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    "awq gemm": lambda codes, scales: 8 * codes[1] == scales[1],
    # as GPTQ, these shapes would mean groups of 8 rows, which no tool writes
    "awq gemv": lambda codes, scales: codes[0] == scales[0],
    "gptq": lambda codes, scales: codes[1] == scales[1],
    "awq gemv_fast": lambda codes, scales: False,  # the codes of this format are int16, as `_match_layout` checks
}
"""The formats with codes named ``qweight``, each with a function that compares two shapes.

The function takes the last two axes of the codes' and of the scales' shape, and returns whether they fit the format.
`_match_layout` takes the first format that fits, so a format must precede all others that accept the same shapes.
"""


def _check_layout(tensors: Tensors, layout: Format, reason: str) -> None:
    """Raise CheckpointError if a module's shapes fit another format but not the format ``layout``.

    The message contains ``reason``, the evidence for ``layout``. Raises KeyError if the codes are named ``qweight`` but
    the format is missing in `SHAPE_CHECKS`.
    """
    if layout.codes_suffix != "qweight":  # no other format uses this suffix, so none can fit
        return
    expected = layout.name.removesuffix(" v1").removesuffix(" v2")  # "gptq v1" and "gptq v2" share one entry
    fits = SHAPE_CHECKS[expected]
    for name, tensor, scales in _find_codes(tensors):
        found = _match_layout(tensor.array, scales)
        if found is None or found == expected:
            continue
        if found != "awq gemv_fast" and scales is not None and fits(tensor.array.shape[-2:], scales.shape[-2:]):
            continue
        shapes = f"{tensor.array.dtype} {list(tensor.array.shape)}"
        module = name.removesuffix("qweight").removesuffix(".")
        raise CheckpointError(
            f"{tensor.file}: module {module!r:.200}: qweight: expected the layout of {expected} ({reason}), "
            f"got {shapes}, as {found} has"
        )
