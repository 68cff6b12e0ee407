# SPDX-License-Identifier: Apache-2.0
"""The kernels of a decoder besides the quantized GEMMs: attention, RMSNorm, RoPE, embedding, LM head, sampling."""
