# SPDX-License-Identifier: Apache-2.0
"""The HQQ format with groups along K (axis 1): W = (q - zero) * scale with float zero points.

The codes form a matrix C [R, G] of R = N * K/G groups; row n * K/G + g of C is group g of column n of W.

    W_q [R/2, G] uint8: row j holds row j of C in the high nibbles and row j + R/2 in the low nibbles; with the setting
        view_as_float, the same bytes with a float dtype
    scale, zero [R, 1] float16 or bfloat16
    shape [2] int64: N, K
    nbits, axis, group_size, packing, ...: one tensor for each setting
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_awq.checkpoint import nibbles
from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.module import Module, ModuleSpec, Pending
from cupy_awq.checkpoint.module_tensors import INT64, SCALES, ModuleTensors, check_columns
from cupy_awq.checkpoint.tensors import Array
from cupy_awq.packing import pack_int4
from cupy_awq.weight import PackedWeight

PACKING = "4bit_u8"
"""The supported value of the setting ``packing``: two codes per byte."""

ROUNDING = "offsets -zero * scale, rounded once"
"""The value of `ModuleSpec.rounding` for a module with fractional zero points."""


@dataclass(frozen=True)
class Hqq:
    """The HQQ format. It has no settings that apply to a whole checkpoint: each module stores its own as tensors."""

    name = "hqq"
    codes_suffix = "W_q"
    other_suffixes = (
        *("scale", "zero", "shape", "nbits", "group_size", "axis", "packing", "view_as_float", "bias"),
        *("channel_wise", "compute_dtype", "encoded_state_dict", "offload_meta", "optimize", "quant_scale"),
        *("quant_zero", "round_zero", "stores_quant_config", "unpack_view_dtype"),
        *("zero_q", "scale_q", "meta_zero", "meta_scale", "meta"),
    )
    dependent_suffixes = ("zero_q", "scale_q", "unpack_view_dtype")

    def is_quantized(self, array: Array) -> bool:
        return True

    def open_module(self, tensors: ModuleTensors) -> Pending:
        self._check_settings(tensors)
        n, k = (int(size) for size in tensors.array("shape", INT64, "[N, K]", (2,)))
        scale = tensors.matrix("scale", SCALES, "[R, 1]")
        rows = len(scale)
        codes = self._read_codes(tensors)
        group_size = codes.shape[1]
        if "group_size" in tensors and tensors.raw("group_size").dtype.kind in "iu":
            stated = tensors.integer("group_size")
            if stated != group_size:
                raise tensors.error(f"group_size: expected {group_size} as W_q has, got {stated}")
        if n < 1 or k < 1 or k % group_size or rows != n * (k // group_size) or 2 * len(codes) != rows:
            found = f"{[n, k]} with W_q {list(codes.shape)} and scale {[rows, 1]}"
            raise tensors.error(f"shape: expected [N, K] with 2 rows(W_q) = rows(scale) = N K/G, got {found}")
        check_columns(tensors, n)
        scale = tensors.finite("scale", tensors.array("scale", SCALES, "[R, 1]", (rows, 1)))
        zero = tensors.finite("zero", tensors.array("zero", (scale.dtype,), "[R, 1]", (rows, 1)))
        bias = tensors.bias(n)
        scales, zeros = (nibbles.transpose_matrix(values.reshape(n, k // group_size)) for values in (scale, zero))
        exact = zeros.astype(np.float32)
        integral = bool(((exact == np.rint(exact)) & (exact >= 0) & (exact <= 15)).all())
        if integral:
            packed = pack_int4(exact.astype(np.uint8))
        else:
            # float32 represents the product of two float16 or two bfloat16 values exactly.
            with np.errstate(over="ignore"):
                packed = (-(exact * scales.astype(np.float32))).astype(scales.dtype)
            tensors.finite("zero", packed)
        form = "packed" if integral else "float"
        rounding = "" if integral else ROUNDING
        spec = ModuleSpec(k, n, group_size, form, scales.dtype, bias_dtype=tensors.bias_dtype(), rounding=rounding)
        return Pending(spec, _convert, arrays=(codes.reshape(n // 2, k), scales, packed, bias))

    def _check_settings(self, tensors: ModuleTensors) -> None:
        """Raise CheckpointError for settings that a `PackedWeight` cannot represent."""
        for name, reason in (("zero_q", "zero points"), ("scale_q", "scales")):
            if name in tensors:
                raise tensors.error(f"{name}: expected {reason} of floats, got quantized ones")
        for name in ("quant_zero", "quant_scale"):
            if name in tensors and tensors.integer(name):
                raise tensors.error(f"{name}: expected 0, got {tensors.integer(name)}")
        if (bits := tensors.integer("nbits")) != 4:
            raise tensors.error(f"nbits: expected 4, got {bits}")
        if (axis := tensors.integer("axis")) != 1:
            raise tensors.error(f"axis: expected 1, got {axis}: its groups run over out features; quantize with axis=1")
        packing = bytes(tensors.array("packing", (np.dtype(np.uint8),), "text", (len(PACKING),))).decode("latin-1")
        if packing != PACKING:
            raise tensors.error(f"packing: expected {PACKING!r}, got {packing!r}")

    def _read_codes(self, tensors: ModuleTensors) -> Array:
        """Return W_q as uint8 [R/2, G].

        Raises CheckpointError unless W_q is 2-D with the dtype uint8, or with a float dtype if view_as_float is set.
        """
        codes = tensors.raw("W_q")
        floats = "view_as_float" in tensors and bool(tensors.integer("view_as_float"))
        if codes.ndim != 2 or (codes.dtype.kind not in "fV" if floats else codes.dtype != np.uint8):
            expected = "a float view of uint8" if floats else "uint8"
            raise tensors.error(f"W_q: expected {expected} [R/2, G], got {codes.dtype} {list(codes.shape)}")
        return np.ascontiguousarray(codes).view(np.uint8)


def _convert(codes: Array, scales: Array, zeros: Array, bias: Array | None) -> Module:
    return Module(PackedWeight(nibbles.convert_byte_halves(codes), scales, zeros), bias)


def read_config(table: Mapping[str, Any], where: str) -> Hqq:
    """Return the format after validating ``table``, the ``quantization_config`` of a configuration.

    Raises CheckpointError, whose message starts with ``where``, unless every entry has nbits 4 and axis 1.
    """
    settings = table.get("quant_config")
    if not isinstance(settings, dict):
        raise CheckpointError(f"{where}: quant_config: expected an object, got {settings!r:.80}")
    of_modules = [settings] if "weight_quant_params" in settings else list(settings.values())
    for entry in of_modules:
        weights = entry.get("weight_quant_params", entry) if isinstance(entry, dict) else None
        if not isinstance(weights, dict):
            raise CheckpointError(f"{where}: weight_quant_params: expected an object, got {weights!r:.80}")
        for name, expected in (("nbits", 4), ("axis", 1)):
            if weights.get(name, expected) != expected:
                hint = "; quantize with axis=1" if name == "axis" else ""
                raise CheckpointError(f"{where}: {name}: expected {expected}, got {weights[name]!r:.80}{hint}")
    return Hqq()
