# SPDX-License-Identifier: Apache-2.0
"""`load`, which assembles a `LanguageModel` from its files and a back end."""

from __future__ import annotations

import os
from typing import Any

from cupy_awq import check_scalar
from cupy_awq.llm.decoder.build import build_model, make_ops
from cupy_awq.llm.files.model_files import Progress
from cupy_awq.llm.files.readers import read
from cupy_awq.llm.language_model import LanguageModel
from cupy_awq.runtime import placement


def load(
    path: str | os.PathLike[str],
    /,
    *,
    device: Any = None,
    progress: Progress | None = None,
    batch_invariant: bool = False,
) -> LanguageModel:
    """Load a model with its tokenizer onto a device, ready to generate text.

    On a GPU, linear layers in 4-bit formats stay 4-bit. Weights of the GGUF types Q8_0, Q6_K, Q5_0 and IQ4_NL with at
    least 2048 in features keep 8-bit codes, with the same results as in float16; all other weights become 16-bit. On
    the CPU, all weights become float32 if this takes at most half of the machine's memory.

    Args:
        path: a folder, file or model name, as in `cupy_awq.llm.read`.
        device: "cpu", "cuda", "cuda:1", a device ordinal, or None for CuPy's current device (the CPU if there is none).
        progress: a callback (number of finished steps, total number of steps), called while tensors are read; or None.
        batch_invariant: True to make the bits of a token's logits independent of the other sequences of the batch and
            of the chunks in which a prompt is processed, so that a greedy completion is the same alone and in a batch,
            unless the batch ends earlier (see ``max_tokens`` of `LanguageModel.generate`). Decoding is slower, mostly
            for long contexts.

    Raises:
        CheckpointError, OSError, TypeError, ValueError: the same errors as `cupy_awq.llm.read`; also ValueError
            if the device does not exist or cannot run the model.
        MemoryError: the memory of the GPU or of the host is exhausted.
    """
    index = placement.resolve(device)
    invariant = check_scalar.validate_flag(batch_invariant, "batch_invariant")
    files = read(path)
    tokenizer = files.load_tokenizer()
    tokenizer.prepare()  # the worker process starts while the weights are read
    with placement.use_device(index):
        model = build_model(files, make_ops(files, index, batch_invariant=invariant), progress)
    return LanguageModel(files.config, model, tokenizer, files.stop_ids)
