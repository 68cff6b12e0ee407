# SPDX-License-Identifier: Apache-2.0
"""Score a text with the same GGUF file in cupy_awq and in Hugging Face transformers, both on the CPU in float32.

The script prints at how many positions both find the same token most likely, the largest difference of a logit, and
both perplexities. It needs transformers, torch, gguf and accelerate beside cupy_awq[llm]:

    python -m tests.peers.transformers_score smollm2.gguf README.md --tokens 2000
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from cupy_awq import llm
from tests.logits import logits_of


def our_logits(model: llm.LanguageModel, ids: list[int]) -> np.ndarray:
    """Return the logits [S, V] that cupy_awq computes for token ids on the CPU."""
    return logits_of(model.model, ids)


def their_logits(path: Path, ids: list[int]) -> np.ndarray:
    """Return the logits [S, V] that transformers computes for token ids from a GGUF file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def perplexity(logits: np.ndarray, ids: list[int]) -> float:
    """Return a text's perplexity: exp of the mean negative log-likelihood per token, from its logits [S, V]."""
    scores = torch.log_softmax(torch.from_numpy(logits[:-1]).double(), dim=1)
    return float(torch.exp(-scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].mean()))


def compare(description: str | None, model: str, tokens: int, their_logits: Callable[[Path, list[int]], Any]) -> None:
    """Parse the command line, score its text with cupy_awq and with ``their_logits``, and print the comparison.

    Args:
        description: the description of the command.
        model: the description of the command's first argument.
        tokens: the default number of tokens.
        their_logits: a function of the model's path and the token ids that returns logits [S, V].
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help=model)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=tokens, help="number of tokens (default: %(default)s)")
    options = parser.parse_args()

    ours = llm.load(options.model, device="cpu")
    ids = ours.tokenizer.encode(options.text.read_text())[: options.tokens]
    mine, theirs = our_logits(ours, ids), their_logits(options.model, ids)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    print(f"{versions}; {len(ids)} tokens of {options.text.name}")
    print(f"same most likely token at {(mine.argmax(1) == theirs.argmax(1)).mean():.2%} of the positions")
    print(f"largest difference of a logit {np.abs(mine - theirs).max():.5f}, largest logit {np.abs(theirs).max():.1f}")
    first, second = perplexity(mine, ids), perplexity(theirs, ids)
    print(f"perplexity {first:.5f} and {second:.5f}: {first / second - 1:+.3%}")


if __name__ == "__main__":
    compare(__doc__, "a GGUF file", 2000, their_logits)
