# SPDX-License-Identifier: Apache-2.0
"""The same GGUF file through cupy_awq and through Hugging Face transformers, both on the CPU in float32.

Over the first tokens of a text: at how many positions both find the same token the most likely, the largest difference
of a logit, and both perplexities. Needs transformers, torch, gguf and accelerate beside cupy_awq[llm]:

    python tests/peers/transformers_score.py smollm2.gguf README.md --tokens 2000
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import transformers

from cupy_awq import llm


def ours(model: llm.LanguageModel, ids: list[int]) -> np.ndarray:
    cache = model.model.ops.cache(1, len(ids))
    return np.concatenate([model.model.logits(hidden)[0] for hidden in model.model.append(cache, 0, ids)])


def theirs(path: Path, ids: list[int]) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def perplexity(logits: np.ndarray, ids: list[int]) -> float:
    scores = torch.log_softmax(torch.from_numpy(logits[:-1]).double(), dim=1)
    return float(torch.exp(-scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    options = parser.parse_args()

    model = llm.load(options.model, device="cpu")
    ids = model.tokenizer.encode(options.text.read_text())[: options.tokens]
    a, b = ours(model, ids), theirs(options.model, ids)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    print(f"{versions}; {len(ids)} tokens of {options.text.name}")
    print(f"same most likely token at {(a.argmax(1) == b.argmax(1)).mean():.2%} of the positions")
    print(f"largest difference of a logit {np.abs(a - b).max():.4f}, largest logit {np.abs(b).max():.1f}")
    mine, other = perplexity(a, ids), perplexity(b, ids)
    print(f"perplexity {mine:.4f} and {other:.4f}: {mine / other - 1:+.3%}")


if __name__ == "__main__":
    main()
