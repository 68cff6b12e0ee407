# SPDX-License-Identifier: Apache-2.0
"""The launch plans of the kernels in ``cuda_src/decoder``: all kernels of a decoder except the quantized GEMMs.

A ``plan_*`` function takes a device and the fields of a problem, and returns the plan that `select.choose` chooses.
"""

from __future__ import annotations

from cupy_awq.kernels.decoder.attention import Attention
from cupy_awq.kernels.decoder.begin_step import StepPreparation
from cupy_awq.kernels.decoder.decode_attention import DecodeAttention
from cupy_awq.kernels.decoder.dense import DenseProduct
from cupy_awq.kernels.decoder.embed import Embedding
from cupy_awq.kernels.decoder.rms_norm import RmsNormalization
from cupy_awq.kernels.decoder.rope_cache import RopeCaching
from cupy_awq.kernels.decoder.sampling import ThresholdSearch, TokenSampling
from cupy_awq.kernels.decoder.swiglu import GatedActivation
from cupy_awq.kernels.select import planner

plan_embed = planner(Embedding)
plan_begin_step = planner(StepPreparation)
plan_rms_norm = planner(RmsNormalization)
plan_swiglu = planner(GatedActivation)
plan_rope_cache = planner(RopeCaching)
plan_attention = planner(Attention)
plan_decode_attention = planner(DecodeAttention)
plan_dense = planner(DenseProduct)
plan_sample_token = planner(TokenSampling)
plan_sampling_threshold = planner(ThresholdSearch)
