# SPDX-License-Identifier: Apache-2.0
"""Serve a published model's shape with random weights on a GPU, from a paged cache, for `tests.peers.serve_load`.

python -m tests.peers.serve_synthetic qwen3-8b --port 8000

The text of a token is its number, so prompts of token ids and any generated tokens are valid.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import numpy as np
import tokenizers

from cupy_awq.llm import Engine, LanguageModel
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.cuda_backend import CudaOps
from cupy_awq.llm.engine.runner import DeviceRunner
from cupy_awq.llm.text.tokenizer import Tokenizer
from cupy_awq.runtime import placement
from cupy_awq.serve.listener import Listener
from cupy_awq.serve.server import LOCAL_HOSTS, Settings
from cupy_awq.tools.bench_llm import SHAPES, synthetic
from cupy_awq.tools.serve_command import tune_interpreter


def load(name: str, **options: Any) -> LanguageModel:
    """Return a model of random weights on the current GPU, with one token for each number."""
    import cupy

    decoder = SHAPES[name]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({f"{i}": i for i in range(decoder.vocab)}, []))
    inner.decoder = tokenizers.decoders.ByteLevel()
    with placement.use_device(0):
        ops = CudaOps(decoder, 0, np.dtype(np.float16), **options)
        model = build_model(synthetic(decoder, xp=cupy), ops)
    return LanguageModel(decoder, model, Tokenizer(inner, None, {}), [0])


def main() -> None:
    """Parse the arguments and serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--batch-invariant", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    model = load(args.model, batch_invariant=args.batch_invariant)
    engine = Engine(model, max_rows=args.max_rows, make_runner=DeviceRunner)
    tune_interpreter()
    print(f"serving {args.model} with {engine.stats().blocks} blocks", flush=True)
    Listener(engine, Settings(args.model, (), LOCAL_HOSTS), port=args.port).run()


if __name__ == "__main__":
    main()
