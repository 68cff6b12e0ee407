# SPDX-License-Identifier: Apache-2.0
"""The registry of all kernel families: for each type of problem, the families among which `select.choose` chooses."""

from __future__ import annotations

from cupy_awq.kernels.conv2d.conv2d_gemm import CONV2D_GEMM
from cupy_awq.kernels.conv2d.conv2d_int8 import CONV2D_INT8, Int8Convolution
from cupy_awq.kernels.conv2d.conv2d_mma import CONV2D_MMA
from cupy_awq.kernels.conv2d.conv2d_simt import CONV2D_SIMT
from cupy_awq.kernels.conv2d.conv2d_sm90 import CONV2D_SM90
from cupy_awq.kernels.conv2d.problem import Convolution
from cupy_awq.kernels.decoder.attention import ATTENTION, ATTENTION_MMA, Attention
from cupy_awq.kernels.decoder.begin_step import BEGIN_STEP, StepPreparation
from cupy_awq.kernels.decoder.decode_attention import DECODE_ATTENTION, DECODE_ATTENTION_MMA, DecodeAttention
from cupy_awq.kernels.decoder.dense import DENSE, DENSE_INT8, DENSE_INT8_MMA, DENSE_MMA, DENSE_SM90, DenseProduct
from cupy_awq.kernels.decoder.embed import EMBED, Embedding
from cupy_awq.kernels.decoder.rms_norm import RMS_NORM, RmsNormalization
from cupy_awq.kernels.decoder.rope_cache import ROPE_CACHE, RopeCaching
from cupy_awq.kernels.decoder.sampling import SAMPLE_TOKEN, SAMPLING_THRESHOLD, ThresholdSearch, TokenSampling
from cupy_awq.kernels.decoder.swiglu import SWIGLU, GatedActivation
from cupy_awq.kernels.dequantize.dequantize import DEQUANTIZE, Dequantization
from cupy_awq.kernels.dequantize.int_to_fp16 import INT_TO_FP16, Conversion
from cupy_awq.kernels.experts.expert_gemm import EXPERT_GEMM
from cupy_awq.kernels.experts.expert_gemm_simt import EXPERT_GEMM_SIMT
from cupy_awq.kernels.experts.expert_gemm_sm90 import EXPERT_GEMM_SM90
from cupy_awq.kernels.experts.expert_gemm_tiles import EXPERT_GEMM_TILES
from cupy_awq.kernels.experts.problem import ExpertProduct
from cupy_awq.kernels.experts.routing import (
    CHOOSE_EXPERTS,
    ROUTE_TOKENS,
    SORT_TOKENS,
    SUM_EXPERTS,
    ExpertChoice,
    ExpertSum,
    TokenRouting,
    TokenSort,
)
from cupy_awq.kernels.family import AnyFamily, KernelProblem
from cupy_awq.kernels.gemm.gather_columns import GATHER_COLUMNS, ColumnGather
from cupy_awq.kernels.gemm.gemm_mma import GEMM_SM75, GEMM_SM80
from cupy_awq.kernels.gemm.gemm_mma_fragments import GEMM_MMA_FRAGMENTS
from cupy_awq.kernels.gemm.gemm_simt import GEMM_SIMT
from cupy_awq.kernels.gemm.gemm_sm90 import GEMM_SM90
from cupy_awq.kernels.gemm.gemm_sm90_large import GEMM_SM90_LARGE
from cupy_awq.kernels.gemm.gemm_sm90_raw import GEMM_SM90_RAW
from cupy_awq.kernels.gemm.gemm_w8a16_simt import GEMM_W8A16_SIMT
from cupy_awq.kernels.gemm.gemv import GEMM_SMALL, GEMV
from cupy_awq.kernels.gemm.problem import Problem
from cupy_awq.kernels.gemm.repack import REPACK, Repacking
from cupy_awq.kernels.int8.gemm_int8_mma import GEMM_INT8_SM75, GEMM_INT8_SM80
from cupy_awq.kernels.int8.gemm_int8_simt import GEMM_INT8_SIMT
from cupy_awq.kernels.int8.gemm_int8_sm90 import GEMM_INT8_SM90
from cupy_awq.kernels.int8.gemm_w4a8_mma import GEMM_W4A8_MMA
from cupy_awq.kernels.int8.gemm_w4a8_sm90 import GEMM_W4A8_SM90
from cupy_awq.kernels.int8.gemv_int8 import GEMV_INT8
from cupy_awq.kernels.int8.problem import Int8Problem
from cupy_awq.kernels.int8.quantize_fp8 import QUANTIZE_FP8, Fp8Quantization
from cupy_awq.kernels.int8.quantize_rows import QUANTIZE_ROWS, RowQuantization
from cupy_awq.kernels.quantization.refine_group import REFINE_GROUP, GroupRefinement
from cupy_awq.kernels.quantization.round_channels import ROUND_CHANNELS, ChannelRounding

_REGISTERED: dict[type[KernelProblem], tuple[AnyFamily, ...]] = {
    Problem: (
        GEMV,
        GEMM_SMALL,
        GEMM_SIMT,
        GEMM_SM75,
        GEMM_SM80,
        GEMM_MMA_FRAGMENTS,
        GEMM_W8A16_SIMT,
        GEMM_SM90_RAW,
        GEMM_SM90,
        GEMM_SM90_LARGE,
    ),
    Dequantization: (DEQUANTIZE,),
    Conversion: (INT_TO_FP16,),
    Int8Problem: (
        GEMV_INT8,
        GEMM_INT8_SM75,
        GEMM_INT8_SM80,
        GEMM_W4A8_MMA,
        GEMM_W4A8_SM90,
        GEMM_INT8_SM90,
        GEMM_INT8_SIMT,
    ),
    RowQuantization: (QUANTIZE_ROWS,),
    Fp8Quantization: (QUANTIZE_FP8,),
    Convolution: (CONV2D_GEMM, CONV2D_SM90, CONV2D_MMA, CONV2D_SIMT),
    Int8Convolution: (CONV2D_INT8,),
    Repacking: (REPACK,),
    ColumnGather: (GATHER_COLUMNS,),
    GroupRefinement: (REFINE_GROUP,),
    ChannelRounding: (ROUND_CHANNELS,),
    Embedding: (EMBED,),
    StepPreparation: (BEGIN_STEP,),
    RmsNormalization: (RMS_NORM,),
    GatedActivation: (SWIGLU,),
    RopeCaching: (ROPE_CACHE,),
    Attention: (ATTENTION_MMA, ATTENTION),
    DecodeAttention: (DECODE_ATTENTION_MMA, DECODE_ATTENTION),
    DenseProduct: (DENSE_SM90, DENSE_MMA, DENSE, DENSE_INT8_MMA, DENSE_INT8),
    TokenSampling: (SAMPLE_TOKEN,),
    ThresholdSearch: (SAMPLING_THRESHOLD,),
    ExpertProduct: (EXPERT_GEMM, EXPERT_GEMM_TILES, EXPERT_GEMM_SM90, EXPERT_GEMM_SIMT),
    ExpertChoice: (CHOOSE_EXPERTS,),
    TokenRouting: (ROUTE_TOKENS,),
    TokenSort: (SORT_TOKENS,),
    ExpertSum: (SUM_EXPERTS,),
}

FAMILIES_OF: dict[type[KernelProblem], dict[str, AnyFamily]] = {
    problem: {family.NAME: family for family in some} for problem, some in _REGISTERED.items()
}
"""The kernel families by problem type, then by name."""

FAMILIES: dict[str, AnyFamily] = {name: family for some in FAMILIES_OF.values() for name, family in some.items()}
"""All kernel families, by name."""
