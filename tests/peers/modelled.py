# SPDX-License-Identifier: Apache-2.0
"""Print the tokens/s of a decode step that the cost models predict for GPUs of the table; needs no GPU.

    python -m tests.peers.modelled
    python -m tests.peers.modelled --models qwen3-8b --devices rtx-4090 t4 --m 1,8

Nothing in the table is measured: it is the sum of the modelled times of the kernels that each GPU would run for one
token of each sequence, with CONTEXT cached tokens.
"""

from __future__ import annotations

import argparse

from cupy_awq.kernels import select
from cupy_awq.kernels.decoder.decode_attention import DecodeAttention, choose_splits
from cupy_awq.kernels.decoder.dense import DenseProduct
from cupy_awq.kernels.decoder.rms_norm import RmsNormalization
from cupy_awq.kernels.gemm.problem import FRAGMENTS, Fusion, Problem
from cupy_awq.llm.decoder.block_pool import BLOCK
from cupy_awq.llm.families.description import Attention, Decoder, Mlp
from cupy_awq.runtime.device import KNOWN, Device
from cupy_awq.tools.bench_llm import SHAPES

DEVICES = "v100 t4 rtx-2080-ti a100-80gb a10 rtx-3090 agx-orin orin-nano l4 rtx-4090 h100 h200 rtx-5090".split()
"""The GPUs of the table in RESULTS.md."""
CONTEXT = 1024
"""The number of cached tokens per sequence."""


def step_us(decoder: Decoder, m: int, gpu: Device) -> float:
    """Return the modelled time in microseconds of one decode step with ``m`` sequences.

    GEMMs on the fragment layout have the residual add and RMSNorm fused, which saves two launches a layer.
    """
    is_fused = FRAGMENTS in select.weight_layouts(decoder.hidden, decoder.hidden, 128, "float16", "packed", gpu)

    def gemm_us(k: int, n: int, role: str, gated: bool = False) -> float:
        layouts = select.weight_layouts(k, n, 128, "float16", "packed", gpu)
        fusion = {"in": Fusion("rms_norm_x"), "out": Fusion("add_to_stream")}[role] if is_fused else None
        activation = "silu" if gated else None
        problem = Problem(m, n, k, 128, activation=activation, gated=gated, layouts=layouts, fusion=fusion)
        return select.modelled_us(problem, gpu)

    norm_us = select.modelled_us(RmsNormalization(m, decoder.hidden, "float16", 1e-6, delta=True), gpu)
    total = 0.0
    for layer in decoder.layers:
        mixer, mlp = layer.mixer, layer.feed_forward
        assert isinstance(mixer, Attention)
        assert isinstance(mlp, Mlp)
        total += gemm_us(mixer.q.k, mixer.q.n + mixer.k.n + mixer.v.n, "in") + gemm_us(mixer.o.k, mixer.o.n, "out")
        total += gemm_us(mlp.gate.k, 2 * mlp.gate.n, "in", gated=True) + gemm_us(mlp.down.k, mlp.down.n, "out")
        sizes = mixer.heads, mixer.kv_heads, mixer.head_dim
        stride = mixer.kv_heads * BLOCK * mixer.head_dim
        norm, splits = mixer.q_norm is not None, choose_splits(*sizes, m, gpu)
        attention = DecodeAttention(m, *sizes, CONTEXT, stride, "float16", 1e-6, norm, splits)
        total += select.modelled_us(attention, gpu) + (0 if is_fused else 2 * norm_us)
    head = DenseProduct(m, decoder.vocab, decoder.hidden, "float16", "float32", False)
    return total + norm_us + select.modelled_us(head, gpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["qwen3-8b", "llama-3.2-1b"])
    parser.add_argument("--devices", nargs="+", choices=KNOWN, default=DEVICES)
    parser.add_argument("--m", type=lambda text: [*map(int, text.split(","))], default=[1, 16])
    arguments = parser.parse_args()
    columns = [(model, m) for model in arguments.models for m in arguments.m]
    print("| GPU (modelled, not measured) | " + " | ".join(f"{model} x {m}" for model, m in columns) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for name in arguments.devices:
        gpu = KNOWN[name]
        cells = [f"{m * 1e6 / step_us(SHAPES[model], m, gpu):,.0f}" for model, m in columns]
        print(f"| {gpu.name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
