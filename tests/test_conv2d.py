# SPDX-License-Identifier: Apache-2.0
"""Tests of the convolution kernels, run from their launch plans on the simulator and on the GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq import block_reference
from cupy_awq.activation import Activation
from cupy_awq.block_check import ConvolutionShape
from cupy_awq.kernels import select
from cupy_awq.kernels.conv2d import conv2d_mma, conv2d_sm90
from cupy_awq.kernels.conv2d.conv2d_int8 import Int8Convolution
from cupy_awq.kernels.conv2d.conv2d_mma import CONV2D_MMA
from cupy_awq.kernels.conv2d.conv2d_simt import CONV2D_SIMT
from cupy_awq.kernels.conv2d.conv2d_sm90 import CONV2D_SM90
from cupy_awq.kernels.conv2d.conv2d_sm90_config import Conv2dSm90Config
from cupy_awq.kernels.conv2d.problem import (
    Convolution,
    ConvolutionSizes,
    SimtConfig,
    nhwc_problem,
    tensor_core_refusal,
)
from cupy_awq.kernels.epilogue import EPILOGUE_ACTIVATIONS
from cupy_awq.kernels.family import AnyFamily, Config
from cupy_awq.ops.conv2d import x_strides
from cupy_awq.runtime import device
from tests.backends import BACKENDS, HOPPER, LANDINGS, few_examples, runner, sample
from tests.block_weights import float64_values, naive_conv, random_weight
from tests.simt.bulk import check_map
from tests.test_kernels import ARCHS, DTYPES, facts

F32 = np.float32
SIMT = (CONV2D_SIMT, SimtConfig())


def pixels(rng: np.random.Generator, sizes: ConvolutionSizes, dtype: Any, padded: int = 0) -> np.ndarray:
    """Return random x [batch, height, width, channels], with zeros after each pixel up to ``padded`` channels."""
    channels = sizes.channels * sizes.groups
    x = np.zeros((sizes.batch, sizes.height, sizes.width, channels + padded), dtype)
    x[..., :channels] = rng.standard_normal((*x.shape[:3], channels))
    return x


def convolution_shape(sizes: ConvolutionSizes) -> ConvolutionShape:
    """Return the validated shape of a convolution of NHWC images with these sizes."""
    s = sizes
    # The padding at the end makes the output exactly as large as the sizes say.
    bottom = (s.out_h - 1) * s.stride_h + s.dilation_h * (s.kernel_h - 1) + 1 - s.height - s.pad_h
    right = (s.out_w - 1) * s.stride_w + s.dilation_w * (s.kernel_w - 1) + 1 - s.width - s.pad_w
    return ConvolutionShape(
        s.batch,
        s.channels * s.groups,
        s.height,
        s.width,
        s.outputs * s.groups,
        (s.kernel_h, s.kernel_w),
        (s.stride_h, s.stride_w),
        ((s.pad_h, max(0, bottom)), (s.pad_w, max(0, right))),
        (s.dilation_h, s.dilation_w),
        s.groups,
        (s.out_h, s.out_w),
        True,
    )


def check_convolution(
    backend: str, problem: Convolution, family: AnyFamily, config: Config, gpu: device.Device, seed: int
) -> None:
    """Launch one configuration on random data, with NaN wherever it must write, and compare with float64."""
    rng = np.random.default_rng(seed)
    sizes, dtype = problem.sizes, DTYPES[problem.dtype]
    shape = sizes.outputs * sizes.groups, sizes.kernel_h, sizes.kernel_w, sizes.channels
    weight = random_weight(rng, shape, problem.block_size, problem.bits, problem.weight_offset, dtype)
    x = pixels(rng, sizes, dtype, problem.strides[2] - sizes.channels * sizes.groups)
    bias = rng.standard_normal(shape[0]).astype(DTYPES[problem.bias_dtype]) if problem.bias_dtype else None
    y = np.full((sizes.batch, sizes.out_h, sizes.out_w, shape[0]), np.nan, dtype)
    if not problem.nhwc:
        y = np.ascontiguousarray(y.transpose(0, 3, 1, 2))
    buffers = {"x": x, "bias": bias, **family.prepare_weight(weight, config, problem)}
    for a in buffers.values():
        if a is not None:
            a.flags.writeable = False
    needs = family.workspace(config, problem)
    buffers |= {"partials": np.full(needs.partial_bytes // 4, np.nan, F32), "y": y}
    buffers["counters"] = np.zeros(needs.counters, np.uint32)
    plan = family.plan(config, problem.without_stride(), gpu)
    runner(backend)(plan, {name: buffers[name] for name in plan.buffers})
    values = float64_values(weight)
    rounds_weights = family is not CONV2D_SIMT
    if rounds_weights:
        values = values.astype(F32).astype(dtype).astype(np.float64)
    x64 = x[..., : sizes.channels * sizes.groups].astype(np.float64)
    wanted = block_reference.correlate(x64, values, convolution_shape(sizes), 0.0)
    if bias is not None:
        wanted = wanted + bias.astype(np.float64)
    wanted = Activation(problem.activation, problem.limits)(wanted)
    got = (y if problem.nhwc else y.transpose(0, 2, 3, 1)).astype(np.float64)
    eps = float(ml_dtypes.finfo(dtype).eps)
    # Weights rounded to float32 first may differ in the last bit.
    np.testing.assert_allclose(got, wanted, rtol=eps, atol=3e-6 + (eps / 4 if rounds_weights else 0))
    assert not buffers["counters"].any()


def with_strides(sizes: ConvolutionSizes, **options: Any) -> Convolution:
    """Return the problem of a convolution of contiguous NHWC images of these sizes.

    Without groups, x has its channels padded to a multiple of 8, as the tensor-core kernels need it.
    """
    channels = sizes.channels * sizes.groups
    padded = -(-channels // 8) * 8 if sizes.groups == 1 else channels
    strides = sizes.height * sizes.width * padded, sizes.width * padded, padded, 1
    return Convolution(sizes, strides=strides, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("arch", "dtype"), [(75, "float16"), *product((80, 90), ("float16", "bfloat16"))])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_mma_tile(backend: str, arch: int, dtype: str, bits: int) -> None:
    """Every tile of conv2d_mma gives right results where the last tiles are partly empty in pixels, outputs and K.

    Filters are 3x3; K is whole or split in two.
    """
    sizes = ConvolutionSizes(2, 9, 9, 24, 70, 1, 3, 3, 9, 9, pad_h=1, pad_w=1)
    problem = with_strides(sizes, block_size=16, bits=bits, weight_offset=True, dtype=dtype, bias_dtype="float32")
    here = facts(arch, backend)
    found = [c for c in CONV2D_MMA.configs(problem, here) if c.split_k in (1, 2)]
    lacks_largest = here.shared_bytes_per_block <= 64 << 10
    assert len(found) == 2 * (len(conv2d_mma.TILES) - lacks_largest)
    for config in sample(found, backend, 3, bits // 4 + (arch == 90)):
        check_convolution(backend, problem, CONV2D_MMA, config, here, seed=bits)


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("arch", ARCHS)
@given(data=st.data())
@few_examples
def test_any_convolution(backend: str, arch: int, data: st.DataObject) -> None:
    """Any channels, strides, dilations, paddings, groups, filters and layouts are right on every kernel."""
    draw = data.draw
    tensor = arch >= 75 and draw(st.booleans())
    halves = ["float16", "bfloat16"] if arch >= 80 else ["float16"]
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels = draw(st.sampled_from([8, 16, 40])) if tensor and groups > 1 else draw(st.integers(1, 40))
    block = draw(st.sampled_from([8, 16, 24, 40])) if tensor else draw(st.integers(1, 40))
    kernel = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stride, dilation, pad = ((draw(st.integers(low, 2)), draw(st.integers(low, 2))) for low in (1, 1, 0))
    spread = [dilation[i] * (kernel[i] - 1) + 1 for i in range(2)]
    height, width = (draw(st.integers(max(1, spread[i] - pad[i]), 7)) for i in range(2))
    out = [(size + pad[i] - spread[i]) // stride[i] + 1 for i, size in enumerate((height, width))]
    outputs = draw(st.integers(1, 40))
    batch = draw(st.integers(1, 2))
    sizes = ConvolutionSizes(batch, height, width, channels, outputs, groups, *kernel, *out, *stride, *pad, *dilation)
    problem = with_strides(
        sizes,
        block_size=block,
        bits=draw(st.sampled_from([4, 8])),
        weight_offset=draw(st.booleans()),
        dtype=draw(st.sampled_from(halves if tensor else list(DTYPES))),
        nhwc=draw(st.booleans()),
        bias_dtype=draw(st.sampled_from([None, *DTYPES])),
        activation=draw(st.sampled_from(EPILOGUE_ACTIVATIONS)),
        limits=(-0.5, 0.75),
    )
    here = facts(arch, backend)
    family, config = SIMT
    if tensor:
        assert tensor_core_refusal(problem, here) is None
        family, config = CONV2D_MMA, draw(st.sampled_from(CONV2D_MMA.configs(problem, here)))
    check_convolution(backend, problem, family, config, here, seed=draw(st.integers(0, 99)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("nhwc", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_conv2d_int8_gives_the_bits_of_the_reference(backend: str, arch: int, nhwc: bool, groups: int) -> None:
    rng = np.random.default_rng(groups)
    sizes = ConvolutionSizes(2, 6, 5, 7, 9, groups, 3, 2, 3, 6, stride_h=2, pad_h=1, pad_w=1)
    x = rng.integers(-128, 128, (2, 6, 5, 7 * groups), np.int8)
    codes = rng.integers(-128, 128, (9 * groups, 3, 2, 7), np.int8)
    fused = rng.integers(-3000, 3000, 9 * groups, np.int32)
    multiplier = rng.uniform(1e-3, 2e-3, 9 * groups).astype(F32)
    limits = (-100, 90)
    wanted = np.empty((2, 3, 6, 9 * groups), np.int8)
    block_reference.conv2d_int8(x, codes, convolution_shape(sizes), fused, multiplier, -7, limits, wanted)
    assert {-100, 90} <= set(wanted.ravel().tolist())
    y = np.full_like(wanted if nhwc else wanted.transpose(0, 3, 1, 2), 101, order="C", subok=False)
    if not nhwc:
        y = np.ascontiguousarray(y)
    problem = Int8Convolution(sizes, x_strides(x, True), nhwc, -7, limits)
    plan = select.choose(problem, facts(arch, backend)).plan
    for a in (x, codes, fused, multiplier):
        a.flags.writeable = False
    runner(backend)(plan, {"x": x, "codes": codes, "fused": fused, "multiplier": multiplier, "y": y})
    np.testing.assert_array_equal(y if nhwc else y.transpose(0, 2, 3, 1), wanted)


ON_HOPPER = pytest.mark.parametrize("backend", [*LANDINGS[:2], HOPPER])


@ON_HOPPER
@pytest.mark.parametrize(("kernel", "bits", "dtype"), [(3, 4, "float16"), (1, 8, "bfloat16")])
def test_every_sm90_tile(backend: str, kernel: int, bits: int, dtype: str) -> None:
    """Every tile of conv2d_sm90 is right where the last tiles are partly empty in pixels, outputs and channels.

    K is whole or split.
    """
    sizes = ConvolutionSizes(2, 9, 9, 72, 136, 1, kernel, kernel, 9, 9, pad_h=kernel // 2, pad_w=kernel // 2)
    problem = with_strides(sizes, block_size=32, bits=bits, weight_offset=True, dtype=dtype, bias_dtype="float32")
    here = facts(90, backend)
    found = [c for c in CONV2D_SM90.configs(problem, here) if not c.dense]
    assert {c.pixels for c in found} == set(conv2d_sm90.PIXELS)
    assert {(c.wg_co, c.wg_px) for c in found} == {(1, 1), (2, 1)}
    # half of the configurations leave K whole, half split it in two
    found = [c for c in found if c.split_k == (c.pixels // 8 + c.wg_co) % 2 + 1]
    for config in sample(found, backend, 2, bits // 4):
        check_convolution(backend, problem, CONV2D_SM90, config, here, seed=kernel)


def draw_sm90_problem(draw: Any, side: int, outputs: list[int], batches: int, **options: Any) -> Convolution:
    """Draw a convolution for sm_90 whose channels may not fill a chunk of 64, and whose blocks may straddle chunks."""
    channels = draw(st.sampled_from([16, 24, 63, 64, 80, 130]))
    kernel = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stride, dilation, pad = ((draw(st.integers(low, 2)), draw(st.integers(low, 2))) for low in (1, 1, 0))
    spread = [dilation[i] * (kernel[i] - 1) + 1 for i in range(2)]
    height, width = (draw(st.integers(max(1, spread[i] - pad[i]), side)) for i in range(2))
    out = [(size + pad[i] - spread[i]) // stride[i] + 1 for i, size in enumerate((height, width))]
    batch = draw(st.integers(1, batches))
    n = draw(st.sampled_from(outputs))
    return with_strides(
        ConvolutionSizes(batch, height, width, channels, n, 1, *kernel, *out, *stride, *pad, *dilation),
        block_size=draw(st.sampled_from([16, 32, 48, 64, 128, 256])),
        bits=draw(st.sampled_from([4, 8])),
        weight_offset=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        bias_dtype=draw(st.sampled_from([None, *DTYPES])),
        activation=draw(st.sampled_from(EPILOGUE_ACTIVATIONS)),
        limits=(-0.5, 0.75),
        **options,
    )


@ON_HOPPER
@given(data=st.data())
@few_examples
def test_any_sm90_convolution(backend: str, data: st.DataObject) -> None:
    """Random sizes of images, filters and channels are right on conv2d_sm90, with y in NHWC and in NCHW."""
    draw = data.draw
    nhwc, y_aligned = draw(st.booleans()), draw(st.booleans())
    problem = draw_sm90_problem(draw, 11, [1, 8, 60, 64, 70, 200], 3, nhwc=nhwc, y_aligned=y_aligned)
    here = facts(90, backend)
    assert CONV2D_SM90.refusal(problem, here) is None
    config = draw(st.sampled_from(CONV2D_SM90.configs(problem, here)))
    check_convolution(backend, problem, CONV2D_SM90, config, here, seed=draw(st.integers(0, 99)))


def one_of_each_form(problem: Convolution, gpu: device.Device) -> list[Conv2dSm90Config]:
    """Return one configuration that dequantizes codes in the kernel, and one whose weight is dequantized beforehand."""
    codes = next(conv2d_sm90._codes_configs(problem, gpu))
    return [codes, next(conv2d_sm90._dense_configs(problem, gpu))]


@ON_HOPPER
@pytest.mark.parametrize("size", [(2, 1), (2, 2), (3, 2)])
def test_strided_images_with_an_output_height_of_1(backend: str, size: tuple[int, int]) -> None:
    """With a stride, rows of pixels are skipped between images, so the outputs are not one contiguous row."""
    sizes = ConvolutionSizes(3, *size, 16, 8, 1, 1, 1, 1, size[1], stride_h=size[0])
    problem = with_strides(sizes, block_size=16, bits=4, weight_offset=False, dtype="float16")
    here = facts(90, backend)
    for config in one_of_each_form(problem, here):
        check_convolution(backend, problem, CONV2D_SM90, config, here, seed=1)


def test_sm90_refuses_what_a_tensor_map_cannot_read() -> None:
    here = device.nominal(90)
    problem = nhwc_problem(1, 14, 64, 64, 3)
    assert CONV2D_SM90.refusal(problem, here) is None
    assert CONV2D_SM90.refusal(problem, device.nominal(80)) == "needs sm_90, not sm_80"
    assert CONV2D_SM90.refusal(replace(problem, dtype="float32"), here) == "takes x of float16 or bfloat16, not float32"
    assert "one group, not 2" in str(
        CONV2D_SM90.refusal(replace(problem, sizes=problem.sizes._replace(groups=2)), here)
    )
    assert "16 channels" in str(CONV2D_SM90.refusal(replace(problem, sizes=problem.sizes._replace(channels=8)), here))
    assert "multiples of 16 channels, not 8" in str(CONV2D_SM90.refusal(replace(problem, block_size=8), here))
    assert "strides" in str(CONV2D_SM90.refusal(replace(problem, strides=(0, 896, 64, 1)), here))
    far = problem.sizes._replace(dilation_h=200, dilation_w=200, pad_h=200, pad_w=200)
    assert "shared memory" in str(CONV2D_SM90.refusal(replace(problem, sizes=far), here))


def test_the_weight_is_dequantized_beforehand_for_many_pixels() -> None:
    here = device.nominal(90)
    many = nhwc_problem(32, 56, 64, 64, 3)
    chosen = select.choose(many, here)
    assert chosen.name == "conv2d_sm90"
    assert chosen.config.dense  # type: ignore[attr-defined]
    assert chosen.config.halo  # type: ignore[attr-defined]
    few = many.sizes._replace(batch=1, height=15, width=17, out_h=15, out_w=17)
    for change in ({"nhwc": False}, {"y_aligned": False}, {"sizes": few}):
        assert not any(c.dense for c in CONV2D_SM90.configs(replace(many, **change), here))
        assert select.choose(replace(many, **change), here).name == "conv2d_sm90"


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize("shape", [(4, 300, 300, 3, 3), (2, 1, 8192, 1, 8), (4, 50, 2100, 1, 1)])
def test_every_stride_has_a_kernel(stride: int, shape: tuple[int, ...]) -> None:
    """A convolution finds a kernel also where a tensor map cannot load its pixels, as at strides above 8."""
    batch, height, width, *kernel = shape
    out = [(size - taps) // stride + 1 for size, taps in zip((height, width), kernel, strict=True)]
    sizes = ConvolutionSizes(batch, height, width, 64, 64, 1, *kernel, *out, stride, stride)
    problem = with_strides(sizes, block_size=32, bits=4, weight_offset=True, dtype="float16").without_stride()
    here = device.nominal(90)
    chosen = select.choose(problem, here)
    assert (chosen.name == "conv2d_mma") == (problem.sizes.stride_w > 8)
    for tensor_map in chosen.plan.maps:
        check_map(tensor_map, 0)
    reason = CONV2D_SM90.refusal(problem, here)
    assert reason is None or "strides of up to 8 pixels" in reason
    assert {c.dense for c in CONV2D_SM90.configs(problem, here)} == {False, True}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("after", [0, 2])
def test_a_strided_1x1_kernel(backend: str, arch: int, after: int) -> None:
    """A strided 1x1 convolution reads only the pixels it needs, as one with stride 1 on a strided view of x.

    That fails where some outputs lie in the padding at the end of the image, so those take the general kernel.
    """
    out = (5, 3) if after == 0 else (6, 4)
    sizes = ConvolutionSizes(2, 9, 8, 16, 8, 1, 1, 1, *out, stride_h=2, stride_w=3)
    problem = with_strides(sizes, block_size=16, bits=4, weight_offset=True, dtype="float16")
    dense = problem.without_stride()
    assert (dense is problem) == bool(after)
    if not after:
        assert dense.sizes == ConvolutionSizes(2, 5, 3, 16, 8, 1, 1, 1, 5, 3)
        assert dense.strides == (9 * 8 * 16, 2 * 8 * 16, 3 * 16, 1)
    assert replace(problem, sizes=sizes._replace(pad_w=1)).without_stride().sizes.pad_w == 1
    here = facts(arch, backend)
    check_convolution(backend, problem, CONV2D_SIMT, SimtConfig(), here, seed=after)
    check_convolution(backend, problem, CONV2D_MMA, CONV2D_MMA.configs(dense, here)[0], here, seed=after)
    if arch == 90:
        for config in one_of_each_form(dense, here):
            check_convolution(backend, problem, CONV2D_SM90, config, here, seed=after)


def test_the_stride_of_a_batch_of_one_is_never_0() -> None:
    """The stride of the batch dimension of x[None] is 0, which tensor maps reject, so it is replaced by a valid one."""
    x = np.zeros((5, 6, 8), np.float16)
    assert x_strides(x[None], True) == (240, 48, 8, 1)
    assert x_strides(x[None], False) == (240, 8, 1, 48)


def test_selection_splits_k_of_small_images_and_says_why_a_kernel_is_refused() -> None:
    t4, a100, h100 = map(device.nominal, (75, 80, 90))
    many = with_strides(
        ConvolutionSizes(32, 56, 56, 64, 256, 1, 1, 1, 56, 56),
        block_size=64,
        bits=4,
        weight_offset=True,
        dtype="float16",
    )
    few = replace(many, sizes=ConvolutionSizes(1, 7, 7, 512, 512, 1, 3, 3, 7, 7, pad_h=1, pad_w=1))
    for gpu in (t4, a100):
        chosen = select.choose(many, gpu), select.choose(few, gpu)
        assert all(c.name == "conv2d_mma" for c in chosen)
        assert chosen[0].config.split_k == 1
        assert chosen[1].config.split_k > 1
    assert CONV2D_MMA.refusal(many, device.nominal(70)) == "needs sm_75 or newer, not sm_70"
    assert CONV2D_MMA.refusal(replace(many, dtype="bfloat16"), t4) == "needs sm_80 or newer, not sm_75"
    assert CONV2D_MMA.refusal(many, h100) == "is replaced by conv2d_sm90"
    assert CONV2D_SIMT.refusal(many, a100) == "is replaced by the tensor-core kernels, which support this problem"
    refusal = CONV2D_MMA.refusal
    assert refusal(replace(many, dtype="float32"), a100) == "takes x of float16 or bfloat16, not float32"
    assert "multiple of 16 bytes" in str(refusal(replace(many, aligned=False), a100))
    assert "multiples of 8 channels, not 12" in str(refusal(replace(many, block_size=12), a100))
    for family in (CONV2D_SIMT, CONV2D_MMA, CONV2D_SM90):
        reason = family.refusal(replace(many, activation="silu"), h100)
        assert reason == "has no activation silu, only clamp"
    depthwise = with_strides(
        ConvolutionSizes(1, 8, 8, 1, 1, 32, 3, 3, 6, 6), block_size=1, bits=8, weight_offset=False, dtype="float16"
    )
    assert refusal(depthwise, a100) == "needs groups of a multiple of 8 channels, not 1"
    assert select.choose(depthwise, h100).name == "conv2d_simt"


def test_reference_correlation_equals_plain_loops() -> None:
    rng = np.random.default_rng(3)
    sizes = ConvolutionSizes(2, 6, 5, 2, 3, 2, 3, 2, 3, 6, stride_h=2, pad_h=1, pad_w=1)
    x, w = rng.standard_normal((2, 6, 5, 4)), rng.standard_normal((6, 3, 2, 2))
    g = convolution_shape(sizes)
    y = block_reference.correlate(x, w, g, 0.5)
    wanted = naive_conv(x.transpose(0, 3, 1, 2), w, g.stride, g.padding, g.dilation, 2, 0.5)
    np.testing.assert_allclose(y.transpose(0, 3, 1, 2), wanted, atol=1e-12)
