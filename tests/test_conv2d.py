# SPDX-License-Identifier: Apache-2.0
"""The kernels of convolutions, through their launch plans: simulated and on the GPU."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_awq.int8 import BlockQuantizedWeight, arguments, conv2d, conv2d_int8, forms, gpu, reference
from cupy_awq.kernels import conv2d_sm90 as hopper
from cupy_awq.kernels import conv2d_sm90_large as large
from cupy_awq.kernels.conv2d import (
    TILES,
    Convolution,
    MmaConfig,
    SimtConfig,
    Sizes,
    choose,
    configs,
    int8_plan,
    refuse,
)
from cupy_awq.runtime import device
from tests.backends import BACKENDS, HOPPER, LANDINGS, runner
from tests.simt.bulk import check_map
from tests.test_int8 import float64_values, naive_conv, random_weight
from tests.test_kernels import ARCHS, DTYPES, facts

F32 = np.float32
Config = SimtConfig | MmaConfig | hopper.Config | large.LargeConfig


def pixels(rng: np.random.Generator, sizes: Sizes, dtype: Any, padded: int = 0) -> np.ndarray:
    """x [batch, height, width, channels] with ``padded`` channels of 0 behind it."""
    channels = sizes.channels * sizes.groups
    x = np.zeros((sizes.batch, sizes.height, sizes.width, channels + padded), dtype)
    x[..., :channels] = rng.standard_normal((*x.shape[:3], channels))
    return x


def geometry(sizes: Sizes) -> arguments.Geometry:
    s = sizes
    # Padding at the end so that the output's size is what is asked for.
    bottom = (s.out_h - 1) * s.stride_h + s.dilation_h * (s.kernel_h - 1) + 1 - s.height - s.pad_h
    right = (s.out_w - 1) * s.stride_w + s.dilation_w * (s.kernel_w - 1) + 1 - s.width - s.pad_w
    return arguments.Geometry(
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


def check_convolution(backend: str, problem: Convolution, config: Config, here: device.Device, seed: int) -> None:
    """One launch over random data, with NaN where it must write."""
    rng = np.random.default_rng(seed)
    sizes, dtype = problem.sizes, DTYPES[problem.dtype]
    shape = sizes.outputs * sizes.groups, sizes.kernel_h, sizes.kernel_w, sizes.channels
    weight = random_weight(rng, shape, problem.block, problem.bits, problem.weight_offset, dtype)
    x = pixels(rng, sizes, dtype, problem.strides[2] - sizes.channels * sizes.groups)
    x.flags.writeable = False
    bias = rng.standard_normal(shape[0]).astype(DTYPES[problem.bias_dtype]) if problem.bias_dtype else None
    y = np.full((sizes.batch, sizes.out_h, sizes.out_w, shape[0]), np.nan, dtype)
    if not problem.nhwc:
        y = np.ascontiguousarray(y.transpose(0, 3, 1, 2))
    partials, counters = config.workspace(problem)
    scratch = {"partials": np.full(partials // 4, np.nan, F32), "counters": np.zeros(counters, np.uint32)}
    scales, offsets = forms.rounded(weight, dtype)
    buffers = {"x": x, "scales": scales, "offsets": offsets, "bias": bias}
    if isinstance(config, large.LargeConfig):
        buffers["weight"] = forms.dense(weight, np.dtype(dtype))
    elif isinstance(config, hopper.Config):
        buffers["codes"], buffers["parameters"] = forms.hopper_codes(weight), forms.hopper_parameters(weight, dtype)
    elif isinstance(config, MmaConfig):
        buffers["codes"] = forms.unit_words(weight)
    else:
        buffers["codes"], buffers["parameters"] = forms.simt_codes(weight), forms.simt_parameters(weight)
    for a in buffers.values():
        if a is not None:
            a.flags.writeable = False
    plan = config.plan(problem.simplest(), here)
    every = {**buffers, **scratch, "y": y}
    runner(backend)(plan, {name: every[name] for name in plan.buffers})
    values = float64_values(weight)
    mma = not isinstance(config, SimtConfig)
    if mma:
        values = values.astype(F32).astype(dtype).astype(np.float64)  # kernels round weights to the type of x
    x64 = x[..., : sizes.channels * sizes.groups].astype(np.float64)
    wanted = reference.correlate(x64, values, geometry(sizes), 0.0)
    if bias is not None:
        wanted = wanted + bias.astype(np.float64)
    if problem.activation:
        wanted = np.clip(wanted, *problem.limits)
    got = (y if problem.nhwc else y.transpose(0, 2, 3, 1)).astype(np.float64)
    eps = float(ml_dtypes.finfo(dtype).eps)
    # A weight that was rounded through float32 may differ in its last bit.
    np.testing.assert_allclose(got, wanted, rtol=eps, atol=3e-6 + (eps / 4 if mma else 0))
    assert not scratch["counters"].any()


def with_strides(sizes: Sizes, **options: Any) -> Convolution:
    """Over x in contiguous NHWC, with channels padded to a multiple of 8 where there is one group."""
    channels = sizes.channels * sizes.groups
    padded = -(-channels // 8) * 8 if sizes.groups == 1 else channels
    strides = sizes.height * sizes.width * padded, sizes.width * padded, padded, 1
    return Convolution(sizes, strides=strides, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_tile_of_the_tensor_cores(backend: str, arch: int, dtype: str, bits: int) -> None:
    """3x3 with padding, whose last tiles are partly empty in pixels, outputs and K; one split and three."""
    sizes = Sizes(2, 9, 9, 24, 70, 1, 3, 3, 9, 9, pad_h=1, pad_w=1)
    problem = with_strides(sizes, block=16, bits=bits, weight_offset=True, dtype=dtype, bias_dtype="float32")
    here = facts(arch, backend)
    found = [c for c in configs(problem, here) if c.splits in (1, 2)]
    assert len(found) == 2 * len(TILES)
    for config in found:
        check_convolution(backend, problem, config, here, seed=bits)


@pytest.mark.parametrize("backend", LANDINGS)
@pytest.mark.parametrize("arch", ARCHS)
@given(data=st.data())
@settings(max_examples=12)
def test_any_convolution(backend: str, arch: int, data: st.DataObject) -> None:
    """Channels that no unit divides, strides, dilations, paddings, groups, 1x1 and one pixel, both orders of y."""
    draw = data.draw
    tensor = arch >= 80 and draw(st.booleans())
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
    sizes = Sizes(batch, height, width, channels, outputs, groups, *kernel, *out, *stride, *pad, *dilation)
    problem = with_strides(
        sizes,
        block=block,
        bits=draw(st.sampled_from([4, 8])),
        weight_offset=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float16", "bfloat16"] if tensor else list(DTYPES))),
        nhwc=draw(st.booleans()),
        bias_dtype=draw(st.sampled_from([None, *DTYPES])),
        activation=draw(st.sampled_from([None, "clamp"])),
        limits=(-0.5, 0.75),
    )
    here = facts(arch, backend)
    config: Config = SimtConfig()
    if tensor:
        assert refuse(problem, here) is None
        config = draw(st.sampled_from(configs(problem, here)))
    check_convolution(backend, problem, config, here, seed=draw(st.integers(0, 99)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("nhwc", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_int8_convolution_gives_the_references_bits(backend: str, arch: int, nhwc: bool, groups: int) -> None:
    rng = np.random.default_rng(groups)
    sizes = Sizes(2, 6, 5, 7, 9, groups, 3, 2, 3, 6, stride_h=2, pad_h=1, pad_w=1)
    x = rng.integers(-128, 128, (2, 6, 5, 7 * groups), np.int8)
    codes = rng.integers(-128, 128, (9 * groups, 3, 2, 7), np.int8)
    fused = rng.integers(-3000, 3000, 9 * groups, np.int32)
    multiplier = rng.uniform(1e-3, 2e-3, 9 * groups).astype(F32)
    limits = (-100, 90)
    wanted = np.empty((2, 3, 6, 9 * groups), np.int8)
    reference.conv2d_int8(x, codes, geometry(sizes), fused, multiplier, -7, limits, wanted)
    assert {-100, 90} <= set(wanted.ravel().tolist())
    y = np.full_like(wanted if nhwc else wanted.transpose(0, 3, 1, 2), 101, order="C", subok=False)
    if not nhwc:
        y = np.ascontiguousarray(y)
    strides = tuple(x.strides)
    plan = int8_plan(sizes, strides, nhwc, -7, limits, facts(arch, backend))  # type: ignore[arg-type]
    for a in (x, codes, fused, multiplier):
        a.flags.writeable = False
    runner(backend)(plan, {"x": x, "codes": codes, "fused": fused, "multiplier": multiplier, "y": y})
    np.testing.assert_array_equal(y if nhwc else y.transpose(0, 2, 3, 1), wanted)


ON_HOPPER = pytest.mark.parametrize("backend", [*LANDINGS[:2], HOPPER])


@ON_HOPPER
@pytest.mark.parametrize(("kernel", "bits", "dtype"), [(3, 4, "float16"), (1, 8, "bfloat16")])
def test_every_tile_on_hopper(backend: str, kernel: int, bits: int, dtype: str) -> None:
    """Images whose last tiles are partly empty in pixels, outputs and channels; whole tiles and split ones."""
    sizes = Sizes(2, 9, 9, 72, 136, 1, kernel, kernel, 9, 9, pad_h=kernel // 2, pad_w=kernel // 2)
    problem = with_strides(sizes, block=32, bits=bits, weight_offset=True, dtype=dtype, bias_dtype="float32")
    here = facts(90, backend)
    found = hopper.configs(problem, here)
    assert {c.pixels for c in found} == set(hopper.PIXELS)
    assert {(c.wg_co, c.wg_px) for c in found} == {(1, 1), (2, 1)}
    # Half of them with K in one part, half of them in two.
    for config in [c for c in found if c.splits == (c.pixels // 8 + c.wg_co) % 2 + 1]:
        check_convolution(backend, problem, config, here, seed=kernel)


def any_hopper_problem(draw: Any, side: int, outputs: list[int], batches: int, **options: Any) -> Convolution:
    """Channels that fill no chunk, blocks that fit in none, strides, dilations, paddings, images of up to ``side``."""
    channels = draw(st.sampled_from([16, 24, 63, 64, 80, 130]))
    kernel = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stride, dilation, pad = ((draw(st.integers(low, 2)), draw(st.integers(low, 2))) for low in (1, 1, 0))
    spread = [dilation[i] * (kernel[i] - 1) + 1 for i in range(2)]
    height, width = (draw(st.integers(max(1, spread[i] - pad[i]), side)) for i in range(2))
    out = [(size + pad[i] - spread[i]) // stride[i] + 1 for i, size in enumerate((height, width))]
    batch = draw(st.integers(1, batches))
    n = draw(st.sampled_from(outputs))
    return with_strides(
        Sizes(batch, height, width, channels, n, 1, *kernel, *out, *stride, *pad, *dilation),
        block=draw(st.sampled_from([16, 32, 48, 64, 128, 256])),
        bits=draw(st.sampled_from([4, 8])),
        weight_offset=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        bias_dtype=draw(st.sampled_from([None, *DTYPES])),
        activation=draw(st.sampled_from([None, "clamp"])),
        limits=(-0.5, 0.75),
        **options,
    )


@ON_HOPPER
@given(data=st.data())
@settings(max_examples=12)
def test_any_convolution_on_hopper(backend: str, data: st.DataObject) -> None:
    """Any size, both orders of y."""
    draw = data.draw
    nhwc, y_aligned = draw(st.booleans()), draw(st.booleans())
    problem = any_hopper_problem(draw, 11, [1, 8, 60, 64, 70, 200], 3, nhwc=nhwc, y_aligned=y_aligned)
    here = facts(90, backend)
    assert hopper.refuse(problem, here) is None
    config = draw(st.sampled_from(hopper.configs(problem, here)))
    check_convolution(backend, problem, config, here, seed=draw(st.integers(0, 99)))


@ON_HOPPER
@pytest.mark.parametrize(("kernel", "outputs", "dtype"), [(3, 64, "float16"), (3, 72, "bfloat16"), (1, 200, "float16")])
def test_every_large_tile_on_hopper(backend: str, kernel: int, outputs: int, dtype: str) -> None:
    """Images whose last tiles are partly empty in pixels, outputs and channels; whole tiles and split ones."""
    sizes = Sizes(3, 9, 9, 72, outputs, 1, kernel, kernel, 9, 9, pad_h=kernel // 2, pad_w=kernel // 2)
    problem = with_strides(sizes, block=32, bits=4, weight_offset=True, dtype=dtype, bias_dtype="float32")
    here = facts(90, backend)
    found = large.configs(problem, here)
    assert {c.pixels for c in found if not c.halo} == set(large.PIXELS if kernel == 1 else large.PIXELS[:-1])
    assert {c.pixels for c in found if c.halo} == {pixels for pixels, _ in large.HALO_PIXELS if kernel == 3}
    # There are three of a shape, for as many splits.
    for config in [c for i, c in enumerate(found) if backend == "gpu" or (i + i // 3) % 3 == outputs % 3]:
        check_convolution(backend, problem, config, here, seed=kernel)


@ON_HOPPER
@given(data=st.data())
@settings(max_examples=12)
def test_any_large_convolution_on_hopper(backend: str, data: st.DataObject) -> None:
    """Any size; more tiles than blocks."""
    draw = data.draw
    problem = any_hopper_problem(draw, 20, [8, 64, 72, 200], 5)
    here = replace(facts(90, backend), sm_count=draw(st.sampled_from([2, 132])))
    config = draw(st.sampled_from(large.configs(problem, here)))
    check_convolution(backend, problem, config, here, seed=draw(st.integers(0, 99)))


@ON_HOPPER
@pytest.mark.parametrize("size", [(2, 1), (2, 2), (3, 2)])
def test_images_that_steps_leave_one_row_of_on_hopper(backend: str, size: tuple[int, int]) -> None:
    """Their pixels are not one row of all images: rows that nobody reads lie between them."""
    sizes = Sizes(3, *size, 16, 8, 1, 1, 1, 1, size[1], stride_h=size[0])
    problem = with_strides(sizes, block=16, bits=4, weight_offset=False, dtype="float16")
    here = facts(90, backend)
    for config in (hopper.configs(problem, here)[0], large.configs(problem, here)[0]):
        check_convolution(backend, problem, config, here, seed=1)


def test_hopper_refuses_what_it_cannot_read_and_says_why() -> None:
    here = device.nominal(90)
    problem = with_strides(
        Sizes(1, 14, 14, 64, 64, 1, 3, 3, 14, 14, pad_h=1, pad_w=1),
        block=32,
        bits=4,
        weight_offset=True,
        dtype="float16",
    )
    assert hopper.refuse(problem, here) is None
    assert hopper.refuse(problem, device.nominal(80)) == "needs sm_90, not sm_80"
    assert hopper.refuse(replace(problem, dtype="float32"), here) == "takes x of float16 or bfloat16, not float32"
    assert "one group, not 2" in str(hopper.refuse(replace(problem, sizes=problem.sizes._replace(groups=2)), here))
    assert "16 channels" in str(hopper.refuse(replace(problem, sizes=problem.sizes._replace(channels=8)), here))
    assert "multiples of 16 channels, not 8" in str(hopper.refuse(replace(problem, block=8), here))
    assert "strides" in str(hopper.refuse(replace(problem, strides=(0, 896, 64, 1)), here))
    far = problem.sizes._replace(dilation_h=200, dilation_w=200, pad_h=200, pad_w=200)
    assert "shared memory" in str(hopper.refuse(replace(problem, sizes=far), here))


def test_many_pixels_go_to_the_large_tiles() -> None:
    here = device.nominal(90)
    many = with_strides(
        Sizes(32, 56, 56, 64, 64, 1, 3, 3, 56, 56, pad_h=1, pad_w=1),
        block=32,
        bits=4,
        weight_offset=True,
        dtype="float16",
    )
    assert large.refuse(many, here) is None
    config, _ = gpu.chosen_convolution(many, here)
    assert isinstance(config, large.LargeConfig)
    assert config.halo
    assert "NHWC" in str(large.refuse(replace(many, nhwc=False), here))
    assert "16 bytes" in str(large.refuse(replace(many, y_aligned=False), here))
    assert "needs sm_90" in str(large.refuse(many, device.nominal(80)))
    few = many.sizes._replace(batch=1, height=15, width=17, out_h=15, out_w=17)
    assert large.refuse(replace(many, sizes=few), here) == "needs 256 pixels of y, not 255"
    assert isinstance(gpu.chosen_convolution(replace(many, sizes=few), here)[0], hopper.Config)


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize("shape", [(4, 300, 300, 3, 3), (2, 1, 8192, 1, 8), (4, 50, 2100, 1, 1)])
def test_each_step_has_a_kernel(stride: int, shape: tuple[int, ...]) -> None:
    """Boxes of a tensor map span 256 values at most, in steps of 8 at most."""
    batch, height, width, *kernel = shape
    out = [(size - taps) // stride + 1 for size, taps in zip((height, width), kernel, strict=True)]
    sizes = Sizes(batch, height, width, 64, 64, 1, *kernel, *out, stride, stride)
    problem = with_strides(sizes, block=32, bits=4, weight_offset=True, dtype="float16").simplest()
    here = device.nominal(90)
    config, plan = gpu.chosen_convolution(problem, here)
    assert isinstance(config, MmaConfig) == (problem.sizes.stride_w > 8)
    for tensor_map in plan.maps:
        check_map(tensor_map, 0)
    steps = hopper.refuse(problem, here)
    assert steps is None or "steps of up to 8 pixels" in steps
    assert (steps is None) == (large.refuse(problem, here) is None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("after", [0, 2])
def test_a_1x1_kernel_with_steps(backend: str, arch: int, after: int) -> None:
    """It is one without, unless padding behind the image has outputs of its own."""
    out = (5, 3) if after == 0 else (6, 4)
    sizes = Sizes(2, 9, 8, 16, 8, 1, 1, 1, *out, stride_h=2, stride_w=3)
    problem = with_strides(sizes, block=16, bits=4, weight_offset=True, dtype="float16")
    simplest = problem.simplest()
    assert (simplest is problem) == bool(after)
    if not after:
        assert simplest.sizes == Sizes(2, 5, 3, 16, 8, 1, 1, 1, 5, 3)
        assert simplest.strides == (9 * 8 * 16, 2 * 8 * 16, 3 * 16, 1)
    assert replace(problem, sizes=sizes._replace(pad_w=1)).simplest().sizes.pad_w == 1
    here = facts(arch, backend)
    found: list[Config] = [SimtConfig()]
    if arch >= 80:
        found.append(configs(problem, here)[0])
    if arch == 90:
        found += [hopper.configs(simplest, here)[0], large.configs(simplest, here)[0]]
    for config in found:
        check_convolution(backend, problem, config, here, seed=after)


def test_one_image_has_the_strides_of_a_batch() -> None:
    """A new axis has a stride of 0, which no tensor map takes."""
    x = np.zeros((5, 6, 8), np.float16)
    assert gpu._strides(x[None], True) == (240, 48, 8, 1)
    assert gpu._strides(x[None], False) == (240, 8, 1, 48)


def test_selection_splits_small_images_and_says_why_it_refuses() -> None:
    here = device.nominal(90)
    large = with_strides(
        Sizes(32, 56, 56, 64, 256, 1, 1, 1, 56, 56), block=64, bits=4, weight_offset=True, dtype="float16"
    )
    small = replace(large, sizes=Sizes(1, 7, 7, 512, 512, 1, 3, 3, 7, 7, pad_h=1, pad_w=1))
    chosen = choose(large, here), choose(small, here)
    assert all(isinstance(config, MmaConfig) for config in chosen)
    assert chosen[0].splits == 1
    assert chosen[1].splits > 1
    assert refuse(large, device.nominal(75)) == "needs sm_80 or newer, not sm_75"
    assert refuse(replace(large, dtype="float32"), here) == "takes x of float16 or bfloat16, not float32"
    assert "multiple of 16 bytes" in str(refuse(replace(large, aligned=False), here))
    assert "multiples of 8 channels, not 12" in str(refuse(replace(large, block=12), here))
    depthwise = with_strides(
        Sizes(1, 8, 8, 1, 1, 32, 3, 3, 6, 6), block=1, bits=8, weight_offset=False, dtype="float16"
    )
    assert refuse(depthwise, here) == "needs groups of a multiple of 8 channels, not 1"
    assert isinstance(choose(depthwise, here), SimtConfig)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("shape", [(3, 16, 7, 1), (64, 72, 3, 1), (32, 32, 3, 32), (48, 40, 1, 2), (64, 72, 1, 1)])
@pytest.mark.parametrize("side", [13, 50])
def test_operation_on_a_gpu(dtype: str, layout: str, shape: tuple[int, ...], side: int) -> None:
    """Images that tensor cores can read, those that are copied for them, and those that CUDA cores take; few and many
    pixels."""
    import cupy

    ci, co, kernel, groups = shape
    rng = np.random.default_rng(ci)
    weight = random_weight(rng, (co, kernel, kernel, ci // groups), 16, dtype=DTYPES[dtype])
    there = BlockQuantizedWeight(*map(cupy.asarray, (weight.codes, weight.scale, weight.offset)), block_size=16)
    x = rng.standard_normal((2, ci, side, side - 2) if layout == "NCHW" else (2, side, side - 2, ci))
    x = x.astype(DTYPES[dtype])
    bias = rng.standard_normal(co).astype(F32)
    options = {"stride": 2, "padding": "same", "groups": groups, "activation": "relu6", "layout": layout}
    wanted = conv2d(x, weight, bias=bias, **options).astype(np.float64)
    out = cupy.asarray(np.full(wanted.shape, np.nan, DTYPES[dtype]))
    assert conv2d(cupy.asarray(x), there, bias=cupy.asarray(bias), out=out, **options) is out
    eps = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    np.testing.assert_allclose(out.get().astype(np.float64), wanted, rtol=2 * eps, atol=2 * eps + 5e-6)


@pytest.mark.gpu
def test_what_a_capture_left_unmade_is_made_again() -> None:
    import cupy

    rng = np.random.default_rng(0)
    weight = random_weight(rng, (64, 3, 3, 64), 32, dtype=np.float16)
    there = BlockQuantizedWeight(*map(cupy.asarray, (weight.codes, weight.scale, weight.offset)), block_size=32)
    x = rng.standard_normal((1, 40, 40, 64)).astype(np.float16)
    far, out = cupy.asarray(x), cupy.empty((1, 40, 40, 64), np.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError):
            conv2d(far, there, padding=1, layout="NHWC", out=out)
        with suppress(RuntimeError):
            stream.end_capture()
    assert not there.prepared
    wanted = conv2d(x, weight, padding=1, layout="NHWC").astype(np.float64)
    got = conv2d(far, there, padding=1, layout="NHWC", out=out).get().astype(np.float64)
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_int8_operation_on_a_gpu_gives_the_cpus_bits(layout: str) -> None:
    import cupy

    rng = np.random.default_rng(0)
    x = rng.integers(-128, 128, (2, 8, 8, 8), np.int8)
    codes = rng.integers(-128, 128, (6, 3, 3, 8), np.int8)
    scale, bias = rng.uniform(0.001, 0.01, 6).astype(F32), rng.standard_normal(6).astype(F32)
    options: dict[str, Any] = {"x_scale": 0.02, "out_scale": 0.3, "x_zero": 3, "out_zero": -4, "padding": 1}
    wanted = conv2d_int8(x, codes, scale, bias=bias, layout=layout, **options)
    far = [cupy.asarray(a) for a in (x, codes, scale)]
    y = conv2d_int8(*far, bias=cupy.asarray(bias), layout=layout, **options)
    np.testing.assert_array_equal(y.get(), wanted)


def test_reference_correlation_is_the_naive_one() -> None:
    """What the kernels' tests are measured with, against loops over single outputs."""
    rng = np.random.default_rng(3)
    sizes = Sizes(2, 6, 5, 2, 3, 2, 3, 2, 3, 6, stride_h=2, pad_h=1, pad_w=1)
    x, w = rng.standard_normal((2, 6, 5, 4)), rng.standard_normal((6, 3, 2, 2))
    g = geometry(sizes)
    y = reference.correlate(x, w, g, 0.5)
    wanted = naive_conv(x.transpose(0, 3, 1, 2), w, g.stride, g.padding, g.dilation, 2, 0.5)
    np.testing.assert_allclose(y.transpose(0, 3, 1, 2), wanted, atol=1e-12)
