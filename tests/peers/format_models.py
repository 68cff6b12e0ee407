# SPDX-License-Identifier: Apache-2.0
"""Helpers of read_back.py and format_writers.py: a dense model, and scores by cupy_awq and by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from cupy_awq import llm
from cupy_awq.checkpoint import safetensors
from tests.logits import logits_of

Array = npt.NDArray[Any]

PROMPTS = ("What is the capital of France?", "Name three colors.", "Write a sentence about the sea.")
"""The questions that both implementations answer greedily; the token ids of the answers are compared."""
ANSWER_TOKENS = 24


def linear_names(folder: Path) -> list[str]:
    """Return the names of the linear layers of a dense model, without ``.weight``."""
    names = safetensors.read(folder / "model.safetensors")
    return [name.removesuffix(".weight") for name in names if name.endswith("_proj.weight")]


def copy_settings(dense: Path, folder: Path, **entries: Any) -> None:
    """Copy a model's settings and tokenizer to ``folder`` and add ``entries`` to its config.json."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(dense / name, folder)
    table = json.loads((dense / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**table, **entries}))


class Scores:
    """The results of one implementation for a model: the logits of a text, and greedy answers.

    Attributes:
        logits: the logits [S, V] of the scored text.
        answers: the token ids of the greedy answers to `PROMPTS`.
    """

    def __init__(self, logits: Array, answers: list[list[int]]) -> None:
        self.logits, self.answers = logits, answers

    def perplexity(self, ids: list[int]) -> float:
        """Return the perplexity of the scored text, whose token ids are given."""
        scores = torch.log_softmax(torch.from_numpy(self.logits[:-1]).double(), dim=1)
        return float(torch.exp(-scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].mean()))


def our_scores(path: Path, ids: list[int]) -> Scores:
    """Return logits and greedy answers of a model in cupy_awq, on the CPU in float32."""
    model = llm.load(path, device="cpu")
    logits = logits_of(model.model, ids)
    completions = [model.generate(prompt, max_tokens=ANSWER_TOKENS)[0] for prompt in PROMPTS]
    return Scores(logits, [list(completion.tokens) for completion in completions])


def their_scores(model: Any, path: Path, ids: list[int]) -> Scores:
    """Return logits and greedy answers of a transformers model, on the CPU in float32.

    ``path`` is a folder or file whose tokenizer cupy_awq reads.
    """
    tokenizer = llm.read(path).load_tokenizer()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float().numpy()
        answers = []
        for prompt in PROMPTS:
            start = tokenizer.encode_chat([{"role": "user", "content": prompt}])
            done = model.generate(torch.tensor([start]), max_new_tokens=ANSWER_TOKENS, do_sample=False)
            answers.append(done[0, len(start) :].tolist())
    return Scores(logits, answers)


def dense_model(folder: Path, weights: dict[str, Array]) -> Any:
    """Return the transformers model of a dense folder with other weights [N, K] for the linear layers, by name."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[f"{name}.weight"].copy_(torch.from_numpy(np.array(weight, np.float32)))
    return model


def compare(name: str, ours: Scores, theirs: Scores, ids: list[int], stop_ids: tuple[int, ...]) -> list[Any]:
    """Return a row: name, both perplexities, their ratio - 1, the largest difference of a logit, and equal answers."""

    def cut(answer: list[int]) -> list[int]:
        ends = [i for i, token in enumerate(answer) if token in stop_ids]
        return answer[: ends[0]] if ends else answer

    first, second = ours.perplexity(ids), theirs.perplexity(ids)
    equal = sum(cut(a) == cut(b) for a, b in zip(ours.answers, theirs.answers, strict=True))
    difference = float(np.abs(ours.logits - theirs.logits).max())
    return [
        name,
        round(first, 4),
        round(second, 4),
        f"{first / second - 1:+.4%}",
        round(difference, 4),
        f"{equal} of {len(PROMPTS)}",
    ]


COLUMNS = [
    "model",
    "perplexity, cupy_awq",
    "perplexity, peer",
    "difference",
    "largest logit difference",
    "equal greedy answers",
]
