# SPDX-License-Identifier: Apache-2.0
"""`RowSampler`: the choice of the tokens of one completion, on the CPU."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.llm.decoder.sampling import Offsets, choose_token
from cupy_awq.llm.engine.request import Request, TokenChoice

Array = npt.NDArray[Any]


class RowSampler:
    """The sampling state of one completion.

    The logits get, in this order: bias, presence and frequency penalties (`Offsets`); -inf for stop tokens that come
    too early and for tokens that the constraint forbids; then what `choose_token` does: repetition penalty,
    temperature, top_k, top_p, min_p and noise.

    Args:
        request: the request.
        choice: the index of the completion, from which the noise is derived.
        vocab: the number of tokens of the vocabulary.
        stop_ids: the tokens that end a text.
    """

    def __init__(self, request: Request, choice: int, vocab: int, stop_ids: Collection[int]) -> None:
        self._request, self._choice = request, choice
        self._stop_ids = list(stop_ids)
        self._offsets = make_offsets(request)
        self._length = len(request.prompt)
        self._seen = np.zeros(vocab if request.sampling.repetition_penalty != 1 else 0, bool)
        if self._seen.size:
            self._seen[list(request.prompt)] = True
        self._constraint = None if request.make_constraint is None else request.make_constraint()

    def choose(self, logits: Array) -> TokenChoice:
        """Return the next token, given the model's logits, float32 [V], which the function may overwrite.

        Raises ValueError if the logits contain NaN, or if the constraint permits no token.
        """
        request, raw = self._request, logits
        if request.logprobs is not None:
            logits = logits.copy()
        if self._offsets.values:
            self._offsets.apply(logits)
        if self._length - len(request.prompt) < request.min_tokens:
            logits[self._stop_ids] = -np.inf
        if self._constraint is not None:
            self._constraint.apply(logits)
        token = choose_token(logits, request.sampling, seen=self._seen, sequence=self._choice, position=self._length)
        if self._constraint is not None:
            self._constraint.accept(token)
        self._length += 1
        self._offsets.add(token)
        if self._seen.size:
            self._seen[token] = True
        return TokenChoice(token) if request.logprobs is None else with_logprobs(request.logprobs, token, raw)


def make_offsets(request: Request, generated: Iterable[int] = ()) -> Offsets:
    """Return the bias and the penalties of a completion with the given tokens."""
    return Offsets(request.logit_bias, request.presence_penalty, request.frequency_penalty, generated)


def with_logprobs(count: int, token: int, logits: Array) -> TokenChoice:
    """Return a token with its log-probability, given logits [V], and those of the ``count`` most likely tokens."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    likely = np.argpartition(-values, min(count, len(values) - 1))[:count] if count else np.empty(0, np.int64)
    top = likely[np.argsort(-values[likely], kind="stable")]
    return TokenChoice(token, float(values[token]), tuple((int(i), float(values[i])) for i in top))
