# SPDX-License-Identifier: Apache-2.0
"""Tests of convolutions with many pixels on Hopper: conv2d_sm90 with a dequantized weight, and 1x1 filters as GEMMs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq.kernels.conv2d import conv2d_sm90
from cupy_awq.kernels.conv2d.conv2d_gemm import CONV2D_GEMM
from cupy_awq.kernels.conv2d.conv2d_sm90 import CONV2D_SM90
from cupy_awq.kernels.conv2d.conv2d_sm90_config import Conv2dSm90Config
from cupy_awq.kernels.conv2d.problem import Convolution, ConvolutionSizes
from cupy_awq.kernels.epilogue import EPILOGUE_ACTIVATIONS
from cupy_awq.runtime import device
from tests.backends import few_examples, sample
from tests.test_conv2d import ON_HOPPER, check_convolution, draw_sm90_problem, with_strides
from tests.test_kernels import DTYPES, facts


def dense_configs(problem: Convolution, gpu: device.Device) -> list[Conv2dSm90Config]:
    """Return the configurations with a weight dequantized beforehand, which are chosen only for many pixels."""
    return list(conv2d_sm90._dense_configs(problem, gpu))


@ON_HOPPER
@pytest.mark.parametrize(("kernel", "outputs", "dtype"), [(3, 64, "float16"), (3, 72, "bfloat16"), (1, 200, "float16")])
def test_every_tile_with_a_dequantized_weight(backend: str, kernel: int, outputs: int, dtype: str) -> None:
    """Every tile that takes a dequantized weight is right where it is partly empty in pixels, outputs and channels.

    K is whole or split.
    """
    sizes = ConvolutionSizes(3, 9, 9, 72, outputs, 1, kernel, kernel, 9, 9, pad_h=kernel // 2, pad_w=kernel // 2)
    problem = with_strides(sizes, block_size=32, bits=4, weight_offset=True, dtype=dtype, bias_dtype="float32")
    here = facts(90, backend)
    found = dense_configs(problem, here)
    # An image has 81 pixels, so a tile of 256 within one image is not offered.
    assert {c.pixels for c in found if not c.halo} == set(conv2d_sm90.DENSE_PIXELS[: 7 if kernel == 1 else 6])
    assert {c.pixels for c in found if c.halo} == {pixels for pixels, _ in conv2d_sm90.HALO_PIXELS if kernel == 3}
    forms = {(c.wg_co, c.wg_px, c.ctas_per_sm) for c in found}
    two = (1, 2) if outputs == 64 else (2, 1)
    assert forms >= {(1, 1, 2), (*two, 1), (*two, 2)}
    assert ((3, 1, 1) in forms, (4, 1, 1) in forms) == ((False, True) if outputs == 200 else (False, False))
    for config in sample(found, backend, 10, outputs):
        check_convolution(backend, problem, CONV2D_SM90, config, here, seed=kernel)


@ON_HOPPER
@pytest.mark.parametrize("outputs", [136, 144, 256])
def test_three_and_four_warpgroups_along_outputs(backend: str, outputs: int) -> None:
    """Three warpgroups compute three tiles of 64 outputs; four compute four, of which some are not stored."""
    sizes = ConvolutionSizes(3, 9, 9, 24, outputs, 1, 1, 1, 9, 9)
    problem = with_strides(sizes, block_size=32, bits=4, weight_offset=True, dtype="float16", bias_dtype="float32")
    here = replace(facts(90, backend), sm_count=2)
    found = [c for c in dense_configs(problem, here) if c.wg_co > 2]
    assert {(c.wg_co, c.ctas_per_sm) for c in found} == ({(4, 1)} if outputs > 192 else {(3, 1), (3, 2), (4, 1)})
    for config in found:
        check_convolution(backend, problem, CONV2D_SM90, config, here, seed=outputs)


@ON_HOPPER
@pytest.mark.parametrize("stride", [(2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("pad", [0, 1, 2])
def test_boxes_for_all_taps_of_a_strided_convolution(backend: str, stride: tuple[int, int], pad: int) -> None:
    """One copy loads the pixels for all filter taps of a strided convolution, up to two pixels outside.

    Sizes are odd and even; K is whole or split.
    """
    dilation = 1 + pad % 2
    out = [(size + 2 * pad - 2 * dilation - 1) // step + 1 for size, step in zip((17, 20), stride, strict=True)]
    sizes = ConvolutionSizes(1, 17, 20, 130, 72, 1, 3, 3, *out, *stride, pad, pad, dilation, dilation)
    problem = with_strides(sizes, block_size=32, bits=4, weight_offset=True, dtype="bfloat16", bias_dtype="float32")
    here = facts(90, backend)
    found = [c for c in dense_configs(problem, here) if c.halo]
    assert {c.split_k for c in found} == {1, 2, 4}
    for config in sample(found, backend, 10, 3 * pad + stride[0]):
        check_convolution(backend, problem, CONV2D_SM90, config, here, seed=pad)


def test_a_stride_of_3_needs_a_box_for_each_tap() -> None:
    sizes = ConvolutionSizes(2, 28, 28, 64, 64, 1, 3, 3, 13, 13, 2, 2)
    problem = with_strides(sizes, block_size=32, bits=4, weight_offset=True, dtype="float16")
    assert any(c.halo for c in dense_configs(problem, device.nominal(90)))
    sizes = sizes._replace(out_h=9, stride_h=3)
    problem = with_strides(sizes, block_size=32, bits=4, weight_offset=True, dtype="float16")
    assert not any(c.halo for c in dense_configs(problem, device.nominal(90)))


@ON_HOPPER
def test_a_large_dilation_needs_a_dequantized_weight_and_a_box_for_each_tap(backend: str) -> None:
    """Filter taps 60 pixels apart need one copy each: a box of pixels for all taps would not fit in shared memory.

    Only kernels with a dequantized weight can copy per tap.
    """
    sizes = ConvolutionSizes(2, 12, 12, 64, 64, 1, 3, 3, 12, 12, 1, 1, 60, 60, 60, 60)
    problem = with_strides(sizes, block_size=32, bits=4, weight_offset=True, dtype="float16")
    here = facts(90, backend)
    found = CONV2D_SM90.configs(problem, here)
    assert {(config.dense, config.halo) for config in found} == {(True, False)}
    assert CONV2D_SM90.refusal(problem, here) is None
    check_convolution(backend, problem, CONV2D_SM90, found[0], here, seed=0)


@ON_HOPPER
@given(data=st.data())
@few_examples
def test_any_convolution_with_a_dequantized_weight(backend: str, data: st.DataObject) -> None:
    """Random convolutions are right on conv2d_sm90 with a dequantized weight, also with more tiles than CTAs."""
    draw = data.draw
    problem = draw_sm90_problem(draw, 20, [8, 64, 72, 200], 5)
    here = replace(facts(90, backend), sm_count=draw(st.sampled_from([2, 132])))
    config = draw(st.sampled_from(dense_configs(problem, here)))
    check_convolution(backend, problem, CONV2D_SM90, config, here, seed=draw(st.integers(0, 99)))


@ON_HOPPER
@given(data=st.data())
@few_examples
def test_any_pointwise_convolution_as_a_gemm(backend: str, data: st.DataObject) -> None:
    """A 1x1 convolution run as a GEMM is right for odd numbers of pixels, outputs and k tiles.

    Blocks have any size, and x may have padding between pixels.
    """
    draw = data.draw
    batch, height, width = draw(st.integers(1, 3)), draw(st.integers(6, 9)), draw(st.integers(6, 9))
    channels, outputs = 64 * draw(st.integers(1, 5)), draw(st.sampled_from([8, 64, 72, 136, 200]))
    problem = with_strides(
        ConvolutionSizes(batch, height, width, channels, outputs, 1, 1, 1, height, width),
        block_size=draw(st.sampled_from([32, 64, 128, channels, 1024])),
        bits=4,
        weight_offset=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        bias_dtype=draw(st.sampled_from([None, *DTYPES])),
        activation=draw(st.sampled_from(EPILOGUE_ACTIVATIONS)),
        limits=(-0.5, 0.75),
    )
    if draw(st.booleans()):
        pitch = channels + 8
        problem = replace(problem, strides=(height * width * pitch, width * pitch, pitch, 1))
    here = facts(90, backend)
    assert CONV2D_GEMM.refusal(problem, here) is None
    config = draw(st.sampled_from(CONV2D_GEMM.configs(problem, here)))
    check_convolution(backend, problem, CONV2D_GEMM, config, here, seed=draw(st.integers(0, 99)))


def test_what_is_not_a_gemm() -> None:
    here = device.nominal(90)
    sizes = ConvolutionSizes(2, 14, 14, 128, 64, 1, 1, 1, 14, 14)
    problem = with_strides(sizes, block_size=32, bits=4, weight_offset=True, dtype="float16")
    assert CONV2D_GEMM.refusal(problem, here) is None
    assert "needs sm_90" in str(CONV2D_GEMM.refusal(problem, device.nominal(80)))
    assert "not float32" in str(CONV2D_GEMM.refusal(replace(problem, dtype="float32"), here))
    assert "not 8 bits" in str(CONV2D_GEMM.refusal(replace(problem, bits=8), here))
    assert "NHWC" in str(CONV2D_GEMM.refusal(replace(problem, y_aligned=False), here))
    assert "multiple of 64, not 72" in str(
        CONV2D_GEMM.refusal(replace(problem, sizes=sizes._replace(channels=72)), here)
    )
    assert "not 48" in str(CONV2D_GEMM.refusal(replace(problem, block_size=48), here))
    few = with_strides(
        ConvolutionSizes(1, 4, 8, 128, 64, 1, 1, 1, 4, 8), block_size=32, bits=4, weight_offset=True, dtype="float16"
    )
    assert "needs 33 pixels of y, not 32" in str(CONV2D_GEMM.refusal(few, here))
    for change in ({"kernel_h": 3, "kernel_w": 3, "pad_h": 1, "pad_w": 1}, {"pad_h": 1, "out_h": 16}):
        assert "1x1 filter" in str(CONV2D_GEMM.refusal(replace(problem, sizes=sizes._replace(**change)), here))
    strided = replace(problem, sizes=sizes._replace(stride_h=2, stride_w=2, out_h=7, out_w=7)).without_stride()
    assert "single row" in str(CONV2D_GEMM.refusal(strided, here))
    with_gaps = replace(problem, strides=(15 * 14 * 128, 14 * 128, 128, 1))
    assert "single row" in str(CONV2D_GEMM.refusal(with_gaps, here))
