# SPDX-License-Identifier: Apache-2.0
"""Tests of the sm_90 samples: bulk and tensor copies, wgmma, clusters and dependent launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cupy_awq
from cupy_awq.runtime.launch_plan import LaunchPlan, TensorMap
from tests import simt
from tests.simt.bulk import swizzle
from tests.simt.kernels import SAMPLES, patched, plan, sources_in
from tests.simt.memory import FRESH

LANDINGS = pytest.mark.parametrize("landing", ["latest", "earliest"])


@pytest.fixture(autouse=True)
def _samples() -> Iterator[None]:
    with sources_in(SAMPLES):
        yield


def tensor(name: str, array: np.ndarray, box: tuple[int, ...], swizzle: int = 0) -> TensorMap:
    """Return a tensor map of a C-ordered array; box and array sizes are given innermost dimension first."""
    return TensorMap(name, array.dtype.name, array.shape[::-1], array.strides[-2::-1], box, swizzle)


@LANDINGS
def test_bulk_copies_in_and_out(landing: str) -> None:
    x = np.random.default_rng(0).standard_normal(7 * 64).astype(np.float32)
    y = np.full_like(x, np.nan)
    bulk = plan("bulk_copy.cu", ("x", "y", np.int32(x.size)), grid=(2, 1, 1), block=(64, 1, 1), arch="90a", SIZE=64)
    simt.run(bulk, {"x": x, "y": y}, landing=landing)
    np.testing.assert_array_equal(y, 2 * x)


@LANDINGS
@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_tensor_copy_swizzles_and_fills_what_lies_outside_with_zeros(landing: str, span: int) -> None:
    rows, columns = 8, (span or 64) // 2
    whole = np.arange(1, 21 * 104 + 1, dtype=np.uint16).reshape(21, 104)
    x = whole[:, :100]
    y, raw = np.zeros_like(whole), np.zeros((3, -(-100 // columns), rows, columns), np.uint16)
    maps = (tensor("x", x, (columns, rows), span), tensor("y", y[:, :100], (columns, rows), span))
    copy = plan("tensor_copy.cu", ("raw", *maps), grid=(raw.shape[1], 3, 1), arch="90a", ROWS=rows, COLUMNS=columns)
    simt.run(copy, {"x": x, "y": y, "raw": raw}, landing=landing)
    np.testing.assert_array_equal(y[:, :100], x)
    assert not y[:, 100:].any()
    padded = np.zeros((24, raw.shape[1] * columns), np.uint16)
    padded[:21, :100] = x
    boxes = padded.reshape(3, rows, -1, columns).swapaxes(1, 2)
    chunks = swizzle(np.arange(0, rows * columns * 2, 16), span) // 16
    np.testing.assert_array_equal(
        raw.reshape(3, raw.shape[1], -1, 8)[:, :, chunks], boxes.reshape(*raw.shape[:2], -1, 8)
    )


def test_a_tensor_store_at_negative_coordinates_fails() -> None:
    """An H100 reports an illegal instruction for such a store, while a copy to shared memory may begin there."""
    x, y, raw = np.ones((8, 32), np.uint16), np.zeros((8, 32), np.uint16), np.zeros((8, 32), np.uint16)
    copy = plan(
        "tensor_copy.cu", ("raw", tensor("x", x, (32, 8)), tensor("y", y, (32, 8))), arch="90a", ROWS=8, COLUMNS=32
    )
    with patched("tensor_copy.cu", "tensor_load(box, &x, blockIdx.x * COLUMNS", "tensor_load(box, &x, -COLUMNS"):
        simt.run(copy, {"x": x, "y": y, "raw": raw})
    with (
        patched("tensor_copy.cu", "tensor_store(&y, box, blockIdx.x * COLUMNS", "tensor_store(&y, box, -COLUMNS"),
        pytest.raises(simt.Fault, match="negative coordinates"),
    ):
        simt.run(copy, {"x": x, "y": y, "raw": raw})


@LANDINGS
def test_tensor_copy_steps_over_rows_from_where_the_box_begins(landing: str) -> None:
    """A box takes every third row of x, from row 0, 8 or 16 on; its rows beyond the last are zeros."""
    x = np.arange(1, 32 * 32 + 1, dtype=np.uint16).reshape(32, 32)
    y, raw = np.zeros((24, 32), np.uint16), np.zeros((3, 8, 32), np.uint16)
    maps = (replace(tensor("x", x, (32, 8)), steps=(1, 3)), tensor("y", y, (32, 8)))
    copy = plan("tensor_copy.cu", ("raw", *maps), grid=(1, 3, 1), arch="90a", ROWS=8, COLUMNS=32)
    simt.run(copy, {"x": x, "y": y, "raw": raw}, landing=landing)
    beyond = np.concatenate((x, np.zeros_like(x)))
    np.testing.assert_array_equal(raw, [beyond[begin : begin + 24 : 3] for begin in (0, 8, 16)])


def product(m: int, n: int, k: int, *, from_registers: int) -> tuple[LaunchPlan, dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    x, w = (rng.integers(-8, 8, shape).astype(np.float16) for shape in ((m, k), (n, k)))
    maps = tensor("x", x, (64, 128), 128), tensor("w", w, (64, 64), 128)
    launch = plan(
        "wgmma.cu", ("y", *maps, np.int32(n), np.int32(k)), grid=(m // 128, n // 64, 1), block=(384, 1, 1),
        arch="90a", shared_bytes=2 * 24576 + 32, FROM_REGISTERS=from_registers,
    )  # fmt: skip
    return launch, {"x": x, "w": w, "y": np.full((m, n), np.nan, np.float32)}


@LANDINGS
@pytest.mark.parametrize("from_registers", [0, 1])
def test_warp_specialised_product(landing: str, from_registers: int) -> None:
    launch, buffers = product(256, 128, 320, from_registers=from_registers)
    simt.run(launch, buffers, landing=landing)
    np.testing.assert_array_equal(buffers["y"], buffers["x"].astype(np.float32) @ buffers["w"].astype(np.float32).T)


@LANDINGS
def test_cluster_shares_memory(landing: str) -> None:
    rng = np.random.default_rng(2)
    x, tiles = rng.integers(0, 99, 8).astype(np.int32), rng.integers(0, 99, (2, 32)).astype(np.int32)
    y, z, following = np.zeros(8, np.int32), np.zeros((8, 32), np.int32), np.zeros(8, np.int32)
    launch = plan(
        "cluster.cu", ("x", "y", "z", "next", tensor("tiles", tiles, (32, 1))), grid=(8, 1, 1), arch="90a",
        cluster=(4, 1, 1),
    )  # fmt: skip
    simt.run(launch, {"tiles": tiles, "x": x, "y": y, "z": z, "next": following}, landing=landing)
    np.testing.assert_array_equal(y, np.repeat(x.reshape(2, 4).sum(axis=1), 4))
    np.testing.assert_array_equal(z, np.repeat(tiles, 4, axis=0))
    np.testing.assert_array_equal(following, np.roll(x.reshape(2, 4), -1, axis=1).ravel() + 1)


def test_dependent_launch() -> None:
    x, y = np.arange(40, dtype=np.int32), np.zeros(40, np.int32)
    launch = replace(plan("dependent.cu", ("x", "y", np.int32(40)), grid=(2, 1, 1), arch="90a"), dependent=True)
    simt.run(launch, {"x": x, "y": y})
    np.testing.assert_array_equal(y, x + 1)
    wait = '  asm volatile("griddepcontrol.wait;" ::: "memory");\n'
    with patched("dependent.cu", wait, ""), pytest.raises(simt.Fault) as caught:
        simt.run(launch, {"x": x, "y": y})
    assert caught.value.kind == "early"


def test_buffers_of_the_preceding_kernel_have_their_present_names() -> None:
    """Each buffer that the simulator guards until the PDL wait exists in a launch plan.

    If a buffer were renamed, an early read of it would no longer be a fault.
    """
    folder = Path(cupy_awq.__file__).parent / "kernels"
    text = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    assert [name for name in sorted(FRESH) if f'"{name}"' not in text] == []
