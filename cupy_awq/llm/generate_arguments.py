# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of `LanguageModel.generate` and `Chat.say`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cupy_awq.llm.decoder.sampling import Sampling
from cupy_awq.llm.text.chat_template import Message

Prompt = str | Sequence[Message]
"""A text, or the messages of a conversation."""

MAX_STOP = 1024
"""The largest length of a stop string in characters."""


def show_count(tokens: int, limit: int) -> str:
    """Return a number of tokens as text: "more than ..." above twice ``limit``, where counting stops."""
    return str(tokens) if tokens <= 2 * limit else f"more than {2 * limit}"


def check_stop(stop: Sequence[str]) -> Sequence[str]:
    """Return the stop strings as a tuple.

    Raises TypeError unless ``stop`` is an iterable of strings, not a string, and ValueError for one that is longer than
    `MAX_STOP`.
    """
    if isinstance(stop, (str, bytes)) or not isinstance(stop, Iterable):
        kind = f"the text {stop!r:.80}" if isinstance(stop, str) else type(stop).__name__
        raise TypeError(f"stop: expected a list of texts, got {kind}")
    texts = tuple(stop)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"stop: expected texts, got {text!r:.80}")
        if len(text) > MAX_STOP:
            raise ValueError(f"stop: expected texts of at most {MAX_STOP} characters, got {len(text)}")
    return texts


def check_sampling(sampling: Sampling | None) -> Sampling:
    """Return the sampling parameters, by default greedy. Raises TypeError unless they are a `Sampling`."""
    if not isinstance(sampling, Sampling | None):
        raise TypeError(f"sampling: expected a Sampling, got {sampling!r:.80}")
    return sampling or Sampling()


def check_max_tokens(max_tokens: int) -> None:
    """Raise TypeError unless ``max_tokens`` is an integer, and ValueError if it is below 1."""
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, (int, np.integer)):
        raise TypeError(f"max_tokens: expected an integer, got {max_tokens!r:.80}")
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1, got {max_tokens}")


def list_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return a prompt or several prompts as a list of prompts, which `LanguageModel.encode` validates."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]  # type: ignore[list-item]
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], Mapping) else several
