# SPDX-License-Identifier: Apache-2.0
"""Tests of ``convert --round``: every pair of formats is exact, or rounded on request with the reported error."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupy_awq import reference
from cupy_awq.checkpoint import Module
from cupy_awq.checkpoint.gguf import container
from cupy_awq.llm.files.convert import Converted, convert
from cupy_awq.llm.files.readers import read_contents
from cupy_awq.llm.files.rounding import LIMITS, Rounder, find_best_rows, measure_error
from cupy_awq.quantizer import quantize
from cupy_awq.tools.command_line import main
from cupy_awq.weight import PackedWeight
from tests import llm_models, packers
from tests.format_files import save_folder, save_torch
from tests.packers import Packed, offsets_of
from tests.test_formats_gguf import random_blocks

Array = npt.NDArray[Any]

NAME = "model.layers.0.mlp.up_proj"
K, N = 256, 16


def packed(group_size: int = 64, dtype: Any = np.float16, *, symmetric: bool = False, order: bool = False) -> Packed:
    """Return a random weight whose zero points are 6 to 10, near 8 as in trained models, or all 8 if ``symmetric``."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (K, N), np.uint8)
    zeros = rng.integers(6, 11, (K // group_size, N), np.uint8)
    if symmetric:
        zeros[:] = 8
    scales = (0.01 + rng.random((K // group_size, N)) / 50).astype(dtype)
    g_idx = np.arange(K, dtype=np.int32) // group_size
    return Packed(codes, zeros, scales, group_size, rng.permutation(g_idx) if order else g_idx)


def fold(path: Path, parts: dict[str, Array], settings: dict[str, Any], key: str = "quantization_config") -> Path:
    return save_folder(path, {f"{NAME}.{part}": array for part, array in parts.items()}, {key: settings})


def awq(version: str, group_size: int = 64) -> dict[str, Any]:
    return {"quant_method": "awq", "version": version, "bits": 4, "group_size": group_size}


def gptq(path: Path, w: Packed, version: int = 2) -> Path:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": w.group_size, "desc_act": True}
    return fold(path, packers.gptq(w, version), settings | {"checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version]})


def tensors_in_packs(path: Path, w: Packed) -> Path:
    return fold(path, packers.compressed_tensors(w), packers.compressed_tensors_config(w))


def blocks(path: Path, kind: str) -> Path:
    """Write a GGUF file of random blocks of one type.

    In Q4_K, d and dmin are positive, so that every group has values of both signs.
    """
    data = random_blocks(kind, N, K).reshape(N, -1)
    if kind == "Q4_K":
        rows = data.reshape(N, -1, 144)
        rows[..., :4] = np.array([0.001, 0.008], np.float16).view(np.uint8)
    number = next(i for i, (name, _, _) in container.TYPES.items() if name == kind)
    name = b"blk.0.ffn_up.weight"
    header = struct.pack(f"<4sIQQQ{len(name)}sIQQIQ", b"GGUF", 3, 1, 0, len(name), name, 2, K, N, number, 0)
    file = path.with_suffix(".gguf")  # a GGUF file without metadata: single layers, not a model
    file.write_bytes(header + bytes(-len(header) % 32) + data.tobytes())
    return file


SOURCES: dict[str, Callable[[Path], Path]] = {
    "autoawq": lambda p: fold(p, packers.awq_gemm(packed()), awq("gemm")),
    "autoawq, bfloat16": lambda p: fold(p, packers.awq_gemm(packed(dtype=ml_dtypes.bfloat16)), awq("gemm")),
    "autoawq, groups of 16": lambda p: fold(p, packers.awq_gemm(packed(16)), awq("gemm", 16)),
    "autoawq gemv": lambda p: fold(p, packers.awq_gemv(packed()), awq("gemv")),
    "autoawq gemv_fast": lambda p: fold(p, packers.awq_gemv_fast(packed(), offsets_of(packed())), awq("gemv_fast")),
    "llm-awq": lambda p: save_torch(
        p.with_suffix(".pt"),
        {
            f"{NAME}.{part}": array
            for part, array in packers.awq_gemv_fast(packed(), offsets_of(packed()), "scaled_zeros").items()
        },
    ),
    "gptq v1": lambda p: gptq(p, packed(), 1),
    "gptq, order": lambda p: gptq(p, packed(order=True)),
    "compressed-tensors, symmetric": lambda p: tensors_in_packs(p, packed(symmetric=True)),
    "compressed-tensors, symmetric, bfloat16": lambda p: tensors_in_packs(
        p, packed(symmetric=True, dtype=ml_dtypes.bfloat16)
    ),
    "compressed-tensors, order": lambda p: tensors_in_packs(p, packed(order=True, dtype=ml_dtypes.bfloat16)),
    "mlx": lambda p: fold(
        p, packers.mlx(packed(), offsets_of(packed())), {"bits": 4, "group_size": 64}, "quantization"
    ),
    "hqq": lambda p: fold(p, packers.hqq(packed(), packed().zeros + np.float16(0.4)), packers.HQQ_CONFIG),
    "gguf Q4_0": lambda p: blocks(p, "Q4_0"),
    "gguf Q4_1": lambda p: blocks(p, "Q4_1"),
    "gguf Q4_K": lambda p: blocks(p, "Q4_K"),
}
"""A function per readable format, also for variants, that writes a checkpoint with one layer into a folder.

The variants have bfloat16 scales, small groups or an activation order.
"""

WITH_OFFSETS = ("autoawq gemv_fast", "llm-awq", "mlx", "hqq", "gguf Q4_1", "gguf Q4_K")


def dense(module: Module) -> Array:
    """Return W [K, N] of a module in float64; row k belongs to column k of x, also with an activation order."""
    weight = module.weight
    groups = np.arange(len(weight.qweight)) // weight.group_size
    codes, scales = reference.unpack_int4(weight.qweight).astype(np.float64), weight.scales.astype(np.float64)[groups]
    if weight.spec.zeros == "float":
        w = codes * scales + np.asarray(weight.qzeros).astype(np.float64)[groups]
    else:
        w = (codes - (8 if weight.qzeros is None else reference.unpack_int4(weight.qzeros)[groups])) * scales
    return w if module.order is None else w[np.argsort(module.order)]


def relative(found: Array, wanted: Array) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def check_pair(source: Path, folder: Path, target: str) -> bool:
    """Convert a checkpoint exactly; if that is refused, round as the message says. Return whether it was exact."""

    def run(*, rounds: bool) -> tuple[Converted, Path]:
        out = folder / (f"{rounds}.{target}" if target in ("gguf", "ak48") else f"{rounds}")
        return convert(str(source), out, target, rounds=rounds), out

    refusal = ""
    try:
        converted, out = run(rounds=False)
        assert converted.errors == {}
    except ValueError as error:
        refusal = str(error)
        assert "`convert --round`" in refusal
        converted, out = run(rounds=True)
        assert converted.errors
    before, after = read_contents(source), read_contents(out)
    modules = [name for name in before if before.is_module(name)]
    assert set(modules) == {name for name in after if after.is_module(name)}
    for name in modules:
        old, new = before[name], after[name]
        assert isinstance(old, Module)
        assert isinstance(new, Module)
        if refusal:
            error = relative(dense(new), dense(old))
            assert error == pytest.approx(converted.errors.get(name, 0.0), rel=1e-3, abs=1e-6)
            assert error < 0.12, name
        else:
            np.testing.assert_array_equal(dense(new), dense(old))
    return not refusal


@pytest.mark.parametrize("target", ["autoawq", "compressed-tensors", "gptq", "gguf"])
@pytest.mark.parametrize("source", SOURCES)
def test_every_format_reaches_every_other(tmp_path: Path, source: str, target: str) -> None:
    is_exact = check_pair(SOURCES[source](tmp_path / "in"), tmp_path, target)
    if target in ("compressed-tensors", "gptq"):
        assert is_exact == (source not in WITH_OFFSETS)


@pytest.mark.parametrize("source", LIMITS)
def test_every_written_format_of_a_model_reaches_every_other(tmp_path: Path, source: str) -> None:
    path = llm_models.folder(tmp_path / "in", llm_models.QWEN3, 32)
    if source != "autoawq":
        first = tmp_path / ("in/m." + source if source in ("gguf", "ak48") else "source")
        convert(str(path), first, source, rounds=True)
        path = first
    for target in LIMITS:
        (tmp_path / target).mkdir()
        if target == "ak48":
            (tmp_path / target / "tokenizer.json").write_bytes((tmp_path / "in" / "tokenizer.json").read_bytes())
        assert check_pair(path, tmp_path / target, target) == (source == target or "gguf" not in (source, target))


def test_the_command_reports_each_module_and_the_worst(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = SOURCES["mlx"](tmp_path / "in")
    assert main(["convert", str(path), str(tmp_path / "out"), "--format", "autoawq"]) == 2
    assert "got float offsets; `convert --round` rounds them" in capsys.readouterr().err
    assert main(["convert", str(path), str(tmp_path / "out"), "--format", "autoawq", "--round"]) == 0
    header, row, summary, size = capsys.readouterr().out.splitlines()
    assert header == "error of W   module"
    assert row.endswith(f"%    {NAME}")
    assert summary.startswith("--round: 1 modules with errors, median ")
    assert summary.endswith(f"({NAME})")
    assert size.endswith(" MB")


def test_the_best_of_several_ranges_is_better_than_the_whole_range() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((64, 512)).astype(np.float32)
    grouped = w.reshape(64, -1, 32)
    low, step = grouped.min(axis=-1, keepdims=True), np.ptp(grouped, axis=-1, keepdims=True) / 15
    offset = (np.rint((grouped - low) / step) * step + low).reshape(w.shape).astype(np.float32)
    best = relative(find_best_rows(offset, 32, np.dtype(np.float16)).dequantize(), offset)
    weight = quantize(np.ascontiguousarray(offset.T), group_size=32)
    nearest = relative(reference.dequantize(*weight.tensors.values(), dtype=np.float32).T, offset)
    assert best < 0.9 * nearest


def test_scales_beyond_float16_and_weights_of_zero() -> None:
    large = PackedWeight(np.zeros((32, 1), np.int32), np.full((1, 8), 1e6, ml_dtypes.bfloat16), None)
    with pytest.raises(ValueError, match="module 'm': expected scales and offsets within the range of float16, got la"):
        Rounder("ak48").round("m", Module(large, None))
    zero = Module(
        PackedWeight(np.zeros((32, 1), np.int32), np.zeros((1, 8), np.float16), np.zeros((1, 8), np.float16)), None
    )
    rounder = Rounder("autoawq")
    rounded = rounder.round("m", zero)
    assert not dense(rounded).any()
    assert rounder.errors == {}
    assert measure_error(zero, rounded) == 0


def test_bias_and_kept_order_are_those_of_the_source() -> None:
    w = packed(order=True, dtype=ml_dtypes.bfloat16)
    order = np.argsort(w.g_idx, kind="stable").astype(np.int32)
    weight = quantize(w.dense().astype(np.float32)[order], group_size=64)
    module = Module(weight, np.ones(N, np.float16), order)
    assert Rounder("gptq").round("m", module) == module
    rounded = Rounder("autoawq").round("m", module)
    assert rounded.bias is module.bias
    assert rounded.order is None
    assert relative(dense(rounded), dense(module)) < 0.12
