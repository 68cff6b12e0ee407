# SPDX-License-Identifier: Apache-2.0
"""The compressed-tensors format "pack-quantized", which llm-compressor writes for AWQ, GPTQ and round-to-nearest.

weight_packed [N, ceil(K/8)] int32: nibble k % 8 of word [n, k // 8] is the code of W[k, n]
weight_scale [N, ceil(K/G)] float16 or bfloat16
weight_zero_point [ceil(N/8), ceil(K/G)] int32, packed along N, or [N, ceil(K/G)] int8; absent if symmetric
weight_shape [2] int64: N, K
weight_g_idx [K] int32: the group index of each row of W; only with activation order
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from cupy_awq.checkpoint import nibbles
from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.groups import Groups, regroup, resolve_group_size
from cupy_awq.checkpoint.module import Module, ModuleSpec, Pending
from cupy_awq.checkpoint.module_tensors import INT32, INT64, SCALES, ModuleTensors, check_columns
from cupy_awq.checkpoint.rules import Patterns
from cupy_awq.checkpoint.tensors import Array
from cupy_awq.packing import SYMMETRIC, pack_int4
from cupy_awq.weight import PackedWeight

FORMAT = "pack-quantized"

PRESETS = {"W4A16": True, "W4A16_ASYM": False}
"""The supported presets, by name; all have 4 bits and groups of 128 rows. The value is True for a symmetric preset."""


@dataclass(frozen=True)
class Scheme:
    """The quantization settings of one entry of ``config_groups``.

    Attributes:
        symmetric: whether every zero point is 8.
        group_size: the number of rows of W per group; -1 means K, None infers it from each module's shapes.
    """

    symmetric: bool
    group_size: int | None


@dataclass(frozen=True)
class CompressedTensors:
    """The compressed-tensors format with the settings of one checkpoint.

    Attributes:
        schemes: (scheme, targeted names of modules and classes, targeted regular expressions) for each entry of
            ``config_groups``.
        patterns: the regular expressions of all entries, in their order.
        warning: a warning about the configuration for the user, or "".
    """

    schemes: tuple[tuple[Scheme, tuple[str, ...], tuple[str, ...]], ...]
    patterns: Patterns = field(default_factory=lambda: Patterns(()))
    warning: str = ""

    name = "compressed-tensors"
    codes_suffix = "weight_packed"
    other_suffixes = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "bias")
    dependent_suffixes = ("weight_scale", "weight_zero_point", "weight_g_idx")

    def is_quantized(self, array: Array) -> bool:
        return True

    def find_scheme(self, tensors: ModuleTensors) -> Scheme:
        """Return the scheme of a module.

        A target that is the module's name takes precedence over a regular expression, which takes precedence over the
        class "Linear". Raises CheckpointError if no target matches, or if a regular expression is too slow.
        """
        if self._only_scheme is not None:
            return self._only_scheme
        found = self._by_name.get(tensors.name)
        try:
            index = None if found else self.patterns.find(tensors.name)
        except CheckpointError as error:
            raise tensors.error(f"config_groups: targets: {error}") from None
        found = found or (None if index is None else self._by_pattern[index])
        found = found or self._by_name.get("Linear")
        if found is None:
            raise tensors.error("config_groups: expected a target that matches this module, got none")
        return found

    @cached_property
    def _only_scheme(self) -> Scheme | None:
        """The scheme of all modules if all entries of ``config_groups`` have the same scheme, else None."""
        distinct = {scheme for scheme, _, _ in self.schemes}
        return distinct.pop() if len(distinct) == 1 else None

    @cached_property
    def _by_name(self) -> Mapping[str, Scheme]:
        """The scheme by targeted name; if several entries target a name, the scheme of the first."""
        return {name: scheme for scheme, names, _ in reversed(self.schemes) for name in names}

    @cached_property
    def _by_pattern(self) -> Sequence[Scheme]:
        """The scheme of each of ``patterns``."""
        return [scheme for scheme, _, patterns in self.schemes for _ in patterns]

    def open_module(self, tensors: ModuleTensors) -> Pending:
        scheme = self.find_scheme(tensors)
        packed = tensors.matrix("weight_packed", INT32, "[N, ceil(K/8)]")
        n, k = (int(size) for size in tensors.array("weight_shape", INT64, "[N, K]", (2,)))
        if n != packed.shape[0] or not 8 * packed.shape[1] - 8 < k <= 8 * packed.shape[1]:
            raise tensors.error(f"weight_shape: expected [N, K] of weight_packed {list(packed.shape)}, got {[n, k]}")
        check_columns(tensors, n)
        group_size = scheme.group_size
        if group_size is None:
            groups_found = tensors.matrix("weight_scale", SCALES, "[N, ceil(K/G)]").shape[1]
            if k % groups_found:
                raise tensors.error(f"weight_scale: expected groups that divide K={k}, got {groups_found}")
            group_size = k // groups_found
        group_size = resolve_group_size(tensors, k, group_size)
        count = -(-k // group_size)
        scales = tensors.finite("weight_scale", tensors.array("weight_scale", SCALES, "[N, ceil(K/G)]", (n, count)))
        zeros = self._read_zeros(tensors, scheme, n, count)
        bias = tensors.bias(n)
        groups = regroup(tensors, k, group_size, _read_g_idx(tensors, k, count), "weight_g_idx")
        form = "symmetric" if zeros is None else "packed"
        spec = ModuleSpec(
            k, n, groups.size, form, scales.dtype, has_order=groups.order is not None, bias_dtype=tensors.bias_dtype()
        )
        return Pending(spec, partial(_convert, groups, k), self.warning, arrays=(packed, zeros, scales, bias))

    def _read_zeros(self, tensors: ModuleTensors, scheme: Scheme, n: int, count: int) -> Array | None:
        """Return the validated zero points as stored, or None if all are 8.

        The file stores them as packed int32 [N/8, groups], or as int8 [N, groups] with 8 subtracted from each. Raises
        CheckpointError for any other dtype or shape, and for zero points other than 8 in a symmetric scheme.
        """
        name = "weight_zero_point"
        if name not in tensors:
            return None  # up to version 0.9.2, the tensor of an asymmetric module is also omitted if it is all zeros
        if tensors.raw(name).dtype == np.int8:
            zeros = tensors.array(name, (np.dtype(np.int8),), "[N, ceil(K/G)]", (n, count))
            if zeros.min() < -8 or zeros.max() > 7:
                raise tensors.error(f"{name}: expected values of -8 to 7, got {zeros.min()} to {zeros.max()}")
            symmetric = not zeros.any()
        else:
            zeros = tensors.array(name, INT32, "[N/8, ceil(K/G)]", (n // 8, count))
            symmetric = bool((zeros.view(np.uint32) == np.uint32(SYMMETRIC)).all())
        if scheme.symmetric and not symmetric:
            raise tensors.error(f"{name}: expected zeros alone, since symmetric is true, got others")
        return None if symmetric else zeros


def _read_g_idx(tensors: ModuleTensors, k: int, count: int) -> Array | None:
    if "weight_g_idx" not in tensors:
        return None
    g_idx = tensors.array("weight_g_idx", INT32, "[K]", (k,))
    return None if count == 1 or bool((g_idx == -1).all()) else g_idx


def _convert(groups: Groups, k: int, packed: Array, zeros: Array | None, scales: Array, bias: Array | None) -> Module:
    words = nibbles.convert_column_words(packed)[:k]
    if groups.order is not None:
        nibbles.take_rows(words, groups.order)
    if zeros is not None:
        if zeros.dtype == np.int8:
            zeros = pack_int4((nibbles.transpose_matrix(zeros) + np.int8(8)).view(np.uint8))
        else:
            zeros = nibbles.reorder_columns(nibbles.transpose_matrix(zeros))
        zeros = groups.expand(zeros)
    return Module(PackedWeight(words, groups.expand(nibbles.transpose_matrix(scales)), zeros), bias, groups.order)


UNCONFIGURED = CompressedTensors(((Scheme(False, None), (), ()),))
"""The format of a file without a configuration: the settings are inferred from each module's tensors."""


def read_config(table: Mapping[str, Any], where: str, names: Iterable[str] = ()) -> CompressedTensors:
    """Parse ``table``, the ``quantization_config`` of a model's configuration, for modules with ``names``.

    Raises CheckpointError, with a message that starts with ``where``, if ``table`` is malformed or describes anything
    but 4-bit integer weights (per channel or per group, without sparsity and rotations) and unquantized activations.
    """
    default = table.get("format")
    if default not in (FORMAT, "mixed-precision"):
        raise CheckpointError(f"{where}: format: expected {FORMAT!r}, got {default!r:.80}")
    status = table.get("quantization_status", "compressed")
    if status != "compressed":
        raise CheckpointError(f"{where}: quantization_status: expected 'compressed', got {status!r:.80}")
    sparsity = table.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        got = sparsity.get("format") if isinstance(sparsity, dict) else sparsity
        raise CheckpointError(f"{where}: sparsity_config: format: expected 'dense', got {got!r:.80}")
    transforms = table.get("transform_config")
    if transforms and transforms != {"config_groups": {}}:
        raise CheckpointError(f"{where}: transform_config: expected none (no rotations), got {transforms!r:.80}")
    groups = table.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}: config_groups: expected an object of groups, got {groups!r:.80}")
    schemes = tuple(
        _read_group(name, group, default, f"{where}: config_groups: {name!s:.80}") for name, group in groups.items()
    )
    try:
        patterns = Patterns([pattern for _, _, patterns in schemes for pattern in patterns], names)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: config_groups: targets: {error}") from None
    warning = ""
    if table.get("kv_cache_scheme"):
        warning = f"{where}: kv_cache_scheme is ignored; the KV cache keeps the model's dtype"
    return CompressedTensors(schemes, patterns, warning)


def _read_group(name: str, group: Any, default: str, where: str) -> tuple[Scheme, tuple[str, ...], tuple[str, ...]]:
    if isinstance(group, list):
        if name not in PRESETS:
            raise CheckpointError(f"{where}: expected the preset {' or '.join(PRESETS)}, got {name!r:.80}")
        return Scheme(PRESETS[name], 128), *_split_targets(group, where)
    if not isinstance(group, dict):
        raise CheckpointError(f"{where}: expected an object, got {group!r:.80}")
    layout = group.get("format") or default
    if layout != FORMAT:
        raise CheckpointError(f"{where}: format: expected {FORMAT!r}, got {layout!r:.80}")
    for part in ("input_activations", "output_activations"):
        if group.get(part) is not None:
            raise CheckpointError(f"{where}: {part}: expected null (weights alone), got {group[part]!r:.80}")
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{where}: weights: expected an object, got {weights!r:.80}")
    return _read_scheme(weights, f"{where}: weights"), *_split_targets(group.get("targets"), where)


def _read_scheme(weights: Mapping[str, Any], where: str) -> Scheme:
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    if bits != 4 or type(bits) is not int:
        raise CheckpointError(f"{where}: num_bits: expected 4, got {bits!r:.80}")
    if kind != "int":
        raise CheckpointError(f"{where}: type: expected 'int', got {kind!r:.80}")
    symmetric, group_size = weights.get("symmetric", True), weights.get("group_size")
    if type(symmetric) is not bool:
        raise CheckpointError(f"{where}: symmetric: expected true or false, got {symmetric!r:.80}")
    if group_size is not None and (type(group_size) is not int or not (group_size > 0 or group_size == -1)):
        raise CheckpointError(f"{where}: group_size: expected -1 or a positive integer, got {group_size!r:.80}")
    strategy = weights.get("strategy") or (
        "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    )
    if strategy == "channel":
        return Scheme(symmetric, -1)
    if strategy != "group":
        raise CheckpointError(f"{where}: strategy: expected 'group' or 'channel', got {strategy!r:.80}")
    if group_size is None:
        raise CheckpointError(f"{where}: group_size: expected -1 or a positive integer, got None")
    return Scheme(symmetric, group_size)


def _split_targets(targets: Any, where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the targets of an entry of ``config_groups`` into names and regular expressions, which start with "re:".

    Raises CheckpointError, whose message starts with ``where``, for malformed targets.
    """
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise CheckpointError(f"{where}: targets: expected a list of names, got {targets!r:.80}")
    patterns = tuple(target[3:] for target in targets if target.startswith("re:"))
    return tuple(target for target in targets if not target.startswith("re:")), patterns
