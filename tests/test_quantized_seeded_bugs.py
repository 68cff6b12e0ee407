# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in copies of the integer and convolution kernels, each of which the tests must catch.

A bug is (file, old text, new text, (check, check)): the checks that catch it if asynchronous copies land as late, and
as early, as PTX allows. A check is the kind of the simulator's fault, "values" for a wrong result, or "nothing" if the
bug goes unnoticed. A suffix of the file selects a form of the kernel: "fp8" float8, "split" split-K, "idle" more CTAs
than tiles, "dense" a convolution whose weight is dequantized beforehand, "sm75" copies through registers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupy_awq import BlockQuantizedWeight
from cupy_awq.kernels.conv2d.conv2d_mma import CONV2D_MMA, Conv2dMmaConfig
from cupy_awq.kernels.conv2d.conv2d_sm90 import CONV2D_SM90
from cupy_awq.kernels.conv2d.conv2d_sm90_config import Conv2dSm90Config
from cupy_awq.kernels.conv2d.problem import ConvolutionSizes
from cupy_awq.kernels.int8.gemm_int8_mma import GEMM_INT8_SM80
from cupy_awq.kernels.int8.gemm_int8_sm90 import GEMM_INT8_SM90, GemmInt8Sm90Config
from cupy_awq.kernels.int8.gemv_int8 import GEMV_INT8, GemvInt8Config
from cupy_awq.kernels.int8.problem import Int8Problem
from cupy_awq.kernels.warp_tiles import WarpTileConfig
from cupy_awq.runtime import device
from tests.block_weights import random_weight
from tests.simt.kernels import patched
from tests.simt.seeds import caught_by
from tests.test_conv2d import check_convolution, with_strides
from tests.test_fp8 import check_fp8_product, check_fp8_quantization
from tests.test_gemm_int8 import check_product

SM90_CONVOLUTION = with_strides(
    ConvolutionSizes(1, 7, 7, 130, 64, 1, 3, 3, 7, 7, pad_h=1, pad_w=1),
    block_size=64,
    bits=4,
    weight_offset=True,
    dtype="float16",
)
STRIDED_CONVOLUTION = replace(
    SM90_CONVOLUTION, sizes=SM90_CONVOLUTION.sizes._replace(out_h=4, out_w=4, stride_h=2, stride_w=2)
)
CONVOLUTION = with_strides(
    ConvolutionSizes(2, 9, 9, 40, 70, 1, 3, 3, 9, 9, pad_h=1, pad_w=1),
    block_size=8,
    bits=8,
    weight_offset=True,
    dtype="float16",
)
EIGHT_IMAGES = SM90_CONVOLUTION.sizes._replace(batch=8)
RACE, VALUES, BARRIER = ("race", "race"), ("values", "values"), ("barrier", "barrier")

SEEDS = {
    "a stage is multiplied before the copies of other threads have landed": (
        "int8/gemm_int8_mma.cuh", "<C::kStages - 2>();\n    __syncthreads();", "<C::kStages - 2>();", RACE,
    ),
    "the pipeline waits for one stage too few": (
        "int8/gemm_int8_mma.cuh", "wait<C::kStages - 2>", "wait<C::kStages - 1>", ("in flight", "race"),
    ),
    "every split adds the offsets of a block": (
        "int8/gemm_int8_mma.cuh", "      if (is_end) {\n#pragma", "      if (true) {\n#pragma", VALUES,
    ),
    "low nibbles are read from the high ones": (
        "int8/gemm_int8.cuh", ": (word << 4) & kHighNibbles", ": word & kHighNibbles", VALUES,
    ),
    "a block is scaled with the parameters of the preceding one": (
        "int8/gemm_int8_mma.cuh", "if (is_end && within + 1 < C::kXBlocks) {\n          ++within;",
        "if (is_end && within + 1 < C::kXBlocks) {", VALUES,
    ),
    "x is read before the other lanes of the warp have stored it": (
        "int8/gemv_int8.cu", "      if (pair % 4 == 0) __syncwarp();\n", "", RACE,
    ),
    "the next x overwrites values that other lanes still read": (
        "int8/gemv_int8.cu", "    }\n    __syncwarp();\n  }", "    }\n  }", RACE,
    ),
    "offsets are added with every 32 k of a block": (
        "int8/gemv_int8.cu", "if (step * kStep == b * block_size) {", "if (true) {", VALUES,
    ),
    "a column of B holds the k of another lane": (
        "int8/gemv_int8.cu", "lane / 8 == t", "(lane / 8 ^ 2) == t", VALUES,
    ),
    "the weight is read beyond its end": (
        "int8/gemv_int8.cu", "min(step, steps - 1)", "step", ("out of bounds", "out of bounds"),
    ),
    "the sums of other warps are read before they are written": (
        "int8/gemv_int8.cu", "  __syncthreads();\n  float total", "  float total", RACE,
    ),
    "a stage is released while wgmma still reads it": (
        "int8/gemm_int8_sm90.cu", "          ptx::wgmma_wait_group<0>();\n", "", ("race", "race"),
    ),
    "a stage is read before the parameters of x have been stored": (
        "int8/gemm_int8_sm90.cu", "pipeline.init_stage(lane, 1 + C::kXParameterWarps,", "pipeline.init_stage(lane, 1,",
        ("barrier", "uninitialised"),
    ),
    "a CTA of the cluster overwrites a stage that the other one still reads": (
        "int8/gemm_int8_sm90.cu", "C::kConsumerWarps * C::kClusterSize);", "C::kConsumerWarps);",
        ("barrier", "barrier"),
    ),
    "partial sums overwrite stages that the other CTA still reads": (
        "int8/gemm_int8_sm90.cu split", "        cluster_sync<C::kSplitK>();\n        typename C::Owned",
        "        typename C::Owned", RACE,
    ),
    "a slice of K takes the scales of the first slice": (
        "int8/gemm_int8_sm90.cu split", "int block = mine.begin * C::kXBlocks / block_spans;", "int block = 0;", VALUES,
    ),
    "the codes of a slice of K are those of the first slice": (
        "int8/gemm_int8_sm90.cu split", "for (int k_tile = mine.begin; k_tile < mine.end; ++k_tile)",
        "for (int k_tile = 0; k_tile < mine.end - mine.begin; ++k_tile)", VALUES,
    ),
    "a CTA stores the rows of the other CTA": (
        "int8/gemm_int8_sm90.cu split", "rank * C::kOwnedOctets);", "(1 - rank) * C::kOwnedOctets);", VALUES,
    ),
    "the last tile stores the rows of the preceding tile": (
        "int8/gemm_int8_sm90.cuh split", "row >= tile.m_block * C::kBlockM && ", "", RACE,
    ),
    "the last tile takes the scales of rows past the end": (
        "int8/gemm_int8_sm90.cu split", "tile_row_begin<C::kBlockM>(scheduler.tile().m_block, m) + local_row",
        "scheduler.tile().m_block * C::kBlockM + local_row", VALUES,
    ),
    "x is copied before the preceding kernel has written it": (
        "int8/gemm_int8_sm90.cu", "  ptx::griddepcontrol_wait();\n  int copied", "  int copied", ("early", "early"),
    ),
    "the weight that was copied early is copied again": (
        "int8/gemm_int8_sm90.cu", "int copied = early;", "int copied = 0;", ("race", "barrier"),
    ),
    "a CTA without a tile copies a weight": (
        "int8/gemm_int8_sm90.cu idle", "scheduler.is_valid() ? min(C::kStages, mine.end - mine.begin) : 0",
        "min(C::kStages, mine.end - mine.begin)", ("in flight", "nothing"),
    ),
    "the last stage is refilled while the scales of rows are read": (
        "int8/gemm_int8_sm90.cu fp8",
        "        load_x_scales(state.previous_stage(), 0);\n        release(state.previous_stage());\n",
        "        release(state.previous_stage());\n        load_x_scales(state.previous_stage(), 0);\n", RACE,
    ),
    "a warpgroup takes the parameters of the columns of the other one": (
        "int8/gemm_int8_sm90.cu fp8", "(stage_idx * C::kM64Tiles + first_m64_tile + tile)",
        "(stage_idx * C::kM64Tiles + tile)", VALUES,
    ),
    "a warpgroup stores the columns of the other one": (
        "int8/gemm_int8_sm90.cuh fp8", "(C::kHasAllRows ? warpgroup * C::kWarpgroupN : 0)",
        "(C::kHasAllRows ? (1 - warpgroup) * C::kWarpgroupN : 0)", VALUES,
    ),
    "offsets of x are multiplied by the sums of another block": (
        "int8/gemm_int8_sm90.cu", "min(block, blocks - 1)", "min(block / 2, blocks - 1)", VALUES,
    ),
    "a row of float8 is scaled with the scale of another row": (
        "int8/gemm_int8_sm90.cu fp8", "row_scales[v] = x_scale[rows[v]]", "row_scales[v] = x_scale[rows[0]]", VALUES,
    ),
    "products of float8 are not scaled with the scale of their row": (
        "int8/gemm_int8_sm90.cu fp8", "[v % C::kAccumulators] *= x_scales", "[v % C::kAccumulators] += 0 * x_scales",
        VALUES,
    ),
    "rows of float8 take scales of other blocks": (
        "int8/gemm_int8_mma.cuh fp8", "x_scale + (C::kFp8 ? row : at)", "x_scale + (C::kFp8 ? row / 2 : at)", VALUES,
    ),
    "low nibbles are shifted out of the mantissa of e4m3": (
        "int8/gemm_int8.cuh fp8", "kFp8 ? word & kLowNibbles :", "kFp8 ? (word << 1) & kHighNibbles :", VALUES,
    ),
    "a warp reads the largest values of other warps before they are written": (
        "int8/quantize_fp8.cu", "  __syncthreads();\n", "", RACE,
    ),
    "sums of all rounds go to the blocks of the first round": (
        "int8/quantize_fp8.cu", "sums[sums_begin + i / kBlockSize]", "sums[sums_begin + begin / kBlockSize]", VALUES,
    ),
    "the two values of a pair are swapped": (
        "int8/quantize_fp8.cu", "e4m3x2_f32(scaled[0], scaled[1])", "e4m3x2_f32(scaled[1], scaled[0])", VALUES,
    ),
    "the next weights overwrite the buffer that is still read": (
        "conv2d/conv2d_mma.cu", "    buffer ^= 1;\n", "", RACE,
    ),
    "a tap to the left of the image reads the preceding row": (
        "conv2d/conv2d_mma.cu", "static_cast<unsigned>(left[i] + dx) < static_cast<unsigned>(s.width)",
        "left[i] + dx < s.width", ("out of bounds", "out of bounds"),
    ),
    "the position in K does not move to the next row of the kernel": (
        "conv2d/conv2d_mma.cu", "        ++fy;\n", "", VALUES,
    ),
    "the next pixels overwrite the stage that is still read": (
        "conv2d/conv2d_mma.cu sm75", "store_pixels(refilled);", "store_pixels(stage);", RACE,
    ),
    "pixels outside of the image are those of another stage": (
        "conv2d/conv2d_mma.cu sm75", "        loaded[i] = {};\n", "", VALUES,
    ),
    "a box of x is released while wgmma still reads it": (
        "conv2d/conv2d_sm90_weight.cuh", "fetch(has_box);\n    ptx::wgmma_wait_group<1>();",
        "fetch(has_box);\n    ptx::wgmma_wait_group<2>();", RACE,
    ),
    "codes are released before all lanes have read them": (
        "hopper/pipeline.cuh", "    __syncwarp();\n    if constexpr (kClusterSize == 1) {",
        "    if constexpr (kClusterSize == 1) {", RACE,
    ),
    "a tap of the halo begins in the wrong row of the box": (
        "conv2d/conv2d_sm90.cuh", "y / C::kPlanesH * C::kBoxW", "y / C::kPlanesH * C::kTileW", VALUES,
    ),
    "every box takes the parameters of the first channels": (
        "conv2d/conv2d_sm90_weight.cuh", "x_state.stage_idx * (C::kParameterBytes / 4)", "0 * (C::kParameterBytes / 4)",
        VALUES,
    ),
    "partial sums are read before other CTAs have written them": (
        "hopper/cluster_reduction.cuh", "  cluster_sync<kClusterSize>();\n", "", ("uninitialised", "race"),
    ),
    "the rows behind a part of the pixels are not zeroed": (
        "conv2d/conv2d_sm90.cu dense", "*reinterpret_cast<Vector<uint32_t, 4>*>(memory + at) = {};", "",
        ("uninitialised", "uninitialised"),
    ),
    "wgmma reads zeros that were stored without a proxy fence": (
        "conv2d/conv2d_sm90.cu dense", "    ptx::fence_proxy_async();\n", "", RACE,
    ),
    "stages are released while wgmma still reads them": (
        "conv2d/conv2d_sm90_weight.cuh dense",
        "completed, so its stages can be released.\n      ptx::wgmma_wait_group<1>();",
        "completed, so its stages can be released.\n      ptx::wgmma_wait_group<2>();", RACE,
    ),
    "the next tile begins with the last box of the preceding one": (
        "conv2d/conv2d_sm90_weight.cuh dense", "x_state.stage_idx, lane);\n    x_state.advance_by_branch();",
        "x_state.stage_idx, lane);", ("race", "race"),
    ),
    "the last box of a tile is not released": (
        "conv2d/conv2d_sm90_weight.cuh dense",
        "    shared.x_pipeline().consumer_release(x_state.stage_idx, lane);\n", "",
        ("deadlock", "deadlock"),
    ),
    "a tap of a strided convolution reads the plane of another tap": (
        "conv2d/conv2d_sm90.cuh dense", "y % C::kPlanesH * C::kPlanesW", "y / C::kPlanesH * C::kPlanesW", VALUES,
    ),
    "the planes of a strided convolution start one pixel late": (
        "conv2d/conv2d_sm90.cu dense", "plane_w - sizes.lead_w()", "plane_w", VALUES,
    ),
    "the second part is stored in place of the first": (
        "conv2d/conv2d_sm90.cu dense", "corner = corners[pixel_tile];", "corner = corners[0];", VALUES,
    ),
    "partial sums overwrite stages that another CTA still reads": (
        "conv2d/conv2d_sm90.cu dense", "if constexpr (C::kDense) cluster_sync<C::kSplitK>();\n      constexpr",
        "constexpr", RACE,
    ),
    "a store buffer overwrites a stage that other warps still read": (
        "conv2d/conv2d_sm90.cu", "if constexpr (!C::kDense) ptx::barrier_sync(1, C::kConsumerWarps * 32);", "", RACE,
    ),
}  # fmt: skip


def check(file: str, landing: str) -> None:
    """Check the kernels whose sources include ``file`` on small problems that have the edges which the bugs need.

    A suffix of ``file`` selects a form of the kernel, as the module's docstring says.
    """
    a100, h100 = device.nominal(80), device.nominal(90)
    if file.startswith("conv2d/conv2d_sm90") and file.endswith("dense"):
        # A strided convolution; one CTA with two tiles of four images each, where a box of pixels with a halo serves
        # all taps of each of three chunks of channels; and a box per tap and chunk, with K whole and split in two.
        halo = Conv2dSm90Config(True, 1, 2, 56, (1, 7, 8), 2, True, 2, 3, 1, 1)
        one_sm = replace(h100, sm_count=1)
        strided = Conv2dSm90Config(True, 1, 1, 56, (1, 7, 8), 1, True, 2, 3, 1, 2)
        check_convolution(landing, STRIDED_CONVOLUTION, CONV2D_SM90, strided, one_sm, seed=0)
        eight = replace(SM90_CONVOLUTION, sizes=EIGHT_IMAGES)
        check_convolution(landing, eight, CONV2D_SM90, halo, one_sm, seed=0)
        for split_k in (1, 2):
            boxes = Conv2dSm90Config(True, 1, 2, 112, (2, 7, 7), 1, False, 3, 3, split_k, 1)
            check_convolution(landing, SM90_CONVOLUTION, CONV2D_SM90, boxes, h100, seed=0)
    elif file.startswith(("conv2d/conv2d_sm90", "hopper")):
        # Three chunks of 64 channels pass through two stages of x; K is whole or split in two.
        for split_k in (1, 2):
            config = Conv2dSm90Config(False, 1, 1, 32, (1, 4, 8), 1, True, 2, 8, split_k, 1)
            check_convolution(landing, SM90_CONVOLUTION, CONV2D_SM90, config, h100, seed=0)
    elif file.startswith("conv2d"):
        gpu, stages = (device.nominal(75), 2) if file.endswith("sm75") else (a100, 3)
        check_convolution(landing, CONVOLUTION, CONV2D_MMA, Conv2dMmaConfig(32, 2, 2, stages, 1), gpu, seed=0)
    elif file == "int8/gemm_int8_sm90.cu":
        # The ring of stages is used more than once; with blocks of 64, two blocks share a stage.
        for k, block_size in ((1040, 128), (272, 64)):
            problem = Int8Problem(70, 304, k, block_size, 4, True, True, "float16")
            check_product(landing, problem, GEMM_INT8_SM90, GemmInt8Sm90Config(2, 2), h100, block_size, seed=0)
    elif file.startswith("int8/gemm_int8_sm90") and file.endswith("split"):
        # Rows end within the second tile, which is moved up and computes rows of the first one again.
        problem = Int8Problem(131, 304, 1936, 128, 4, True, True, "float16")
        check_product(landing, problem, GEMM_INT8_SM90, GemmInt8Sm90Config(1, 8, 2), h100, 128, seed=0)
    elif file == "int8/gemm_int8_sm90.cu idle":
        problem = Int8Problem(70, 152, 272, 128, 4, False, True, "float16")
        check_product(landing, problem, GEMM_INT8_SM90, GemmInt8Sm90Config(1, 2), h100, 128, seed=0)
    elif file.startswith("int8/gemm_int8_sm90") and file.endswith("fp8"):
        # Each warpgroup has all rows of its columns; one CTA computes two tiles.
        weight = random_weight(np.random.default_rng(0), (304, 1, 1, 1040), 128)
        zeros = np.random.default_rng(1).integers(-8, 9, weight.scale.shape).astype(weight.scale.dtype)
        weight = BlockQuantizedWeight(weight.codes, weight.scale, zeros * weight.scale, block_size=128)
        problem = Int8Problem(70, 304, 1040, 128, 4, False, True, "float16", fp8=True)
        check_fp8_product(landing, problem, GEMM_INT8_SM90, GemmInt8Sm90Config(1, 1), weight, seed=0)
    elif file.endswith("fp8"):
        weight = random_weight(np.random.default_rng(0), (40, 1, 1, 272), 64)
        problem = Int8Problem(20, 40, 272, 64, 4, False, True, "float16", fp8=True)
        mma = WarpTileConfig(16, 1, 4, 2, 1)
        check_fp8_product(landing, problem, GEMM_INT8_SM80, mma, weight, seed=0, arch=89)
    elif file == "int8/quantize_fp8.cu":
        # The kernel reads the row in two rounds, the second of which ends within it.
        check_fp8_quantization(landing, 1, 4112, 128, "float16", 8)
    elif file == "int8/gemv_int8.cu":
        # Warps prefetch several times, and K ends within a chunk.
        problem = Int8Problem(3, 20, 4400, 64, 4, True, True, "float16")
        check_product(landing, problem, GEMV_INT8, GemvInt8Config(4, 2), a100, 64, seed=0)
    else:
        # K is split in two parts of five stages each: a block of 96 k belongs to both, a block of 64 k to one.
        for block_size in (64, 96):
            problem = Int8Problem(20, 150, 640, block_size, 4, True, True, "float16")
            mma = WarpTileConfig(16, 1, 4, 3, 2)
            check_product(landing, problem, GEMM_INT8_SM80, mma, a100, block_size, seed=0)


def outcome(file: str, landing: str) -> str:
    """Return the check that fails for the kernels of ``file``, or "nothing" if all pass."""
    return caught_by(lambda: check(file, landing))


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted({file for file, *_ in SEEDS.values()}))
def test_kernels_pass_before_a_bug_is_planted(file: str) -> None:
    assert outcome(file, "latest") == "nothing"


FIRST = {seed[0].partition("/")[0]: name for name, seed in reversed(SEEDS.items())}.values()
"""The first bug of each folder. A run without slow tests plants only these."""


@pytest.mark.parametrize("name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in SEEDS])
def test_planted_bug_is_caught(name: str) -> None:
    file, old, new, caught = SEEDS[name]
    with patched(file.split()[0], old, new):
        assert (outcome(file, "latest"), outcome(file, "earliest")) == caught
