# SPDX-License-Identifier: Apache-2.0
"""Requests to an engine and its answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cupy_awq.llm.completion import Completion
from cupy_awq.llm.decoder.sampling import Sampling
from cupy_awq.llm.generate_arguments import check_max_tokens, check_sampling, check_stop

MAX_CHOICES = 8
"""The largest number of completions of one request."""

MAX_LOGPROBS = 20
"""The largest number of likely tokens that are reported for each token."""

MAX_BIASES = 300
"""The largest number of biased tokens of one request."""


class QueueFullError(RuntimeError):
    """The error for a request that arrives while too many others wait."""


class Constraint(Protocol):
    """A grammar that the tokens of one completion follow."""

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Set the logits [V] of the tokens that may not come next to -inf. Raises ValueError if none may."""
        ...

    def accept(self, token: int) -> None:
        """Record that ``token`` has been chosen and go on after it. Raises ValueError if it may not come next."""
        ...


@dataclass(frozen=True)
class Request:
    """A prompt, and how to complete it.

    Attributes:
        prompt: the token ids.
        max_tokens: the largest number of tokens per completion; the context and the cache may end it earlier.
        sampling: the sampling parameters. The random numbers depend on its seed, the index of the completion and the
            position of a token alone, so a completion does not depend on other requests.
        n: the number of completions, 1 to `MAX_CHOICES`.
        stop: stop strings, or texts of special tokens, which end a completion.
        presence_penalty: what is subtracted from the logits of tokens that the completion contains, -2 to 2.
        frequency_penalty: the same, times the number of occurrences.
        logit_bias: what is added to the logits of tokens, -100 to 100 by id.
        logprobs: the number of likely tokens to report with each token, 0 to `MAX_LOGPROBS`; None reports nothing. They
            are taken from the logits of the model, before bias, penalties, temperature and filters.
        prompt_logprobs: the same for the tokens of the prompt, except for the first, which has no probability.
        ignore_stop_tokens: True to go on after a token that ends a text.
        min_tokens: the number of tokens before which no stop token is chosen.
        continues: True if the completion continues the text of the prompt and is no text of its own.
        key: who asks, for fairness between users.
        salt: the owner of cached prefixes; requests with different salts share none.
        queue_seconds, run_seconds: the largest times in seconds in the queue, and from then on.
        make_constraint: a function that returns the `Constraint` of a new completion, or None.

    On a GPU, the host chooses the tokens of requests with ``logprobs``, ``min_tokens`` or ``make_constraint``. While
    such a request runs, no step starts before the tokens of the preceding one are known, which slows all others too.

    Raises:
        TypeError, ValueError: a value has another type or is out of range.

    >>> Request((1, 2, 3), max_tokens=5).n
    1
    """

    prompt: tuple[int, ...]
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_stop_tokens: bool = False
    min_tokens: int = 0
    continues: bool = False
    key: str = ""
    salt: str = ""
    queue_seconds: float = math.inf
    run_seconds: float = math.inf
    make_constraint: Callable[[], Constraint] | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt: expected at least one token, got none")
        check_max_tokens(self.max_tokens)
        check_sampling(self.sampling)
        object.__setattr__(self, "stop", tuple(check_stop(self.stop)))
        _check_integer("n", self.n, 1, MAX_CHOICES)
        _check_integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), 2)
        if len(self.logit_bias) > MAX_BIASES:
            raise ValueError(f"logit_bias: expected at most {MAX_BIASES} tokens, got {len(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            _check_integer("logit_bias", token, 0, 2**31)
            _check_number("logit_bias", bias, 100)


def _check_integer(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an integer, got {value!r:.80}")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low} to {high}, got {value!r:.80}")


def _check_number(name: str, value: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: expected a number, got {value!r:.80}")
    if not -most <= value <= most:
        raise ValueError(f"{name}: expected {-most} to {most}, got {value!r:.80}")


class TokenChoice(NamedTuple):
    """A generated token.

    Attributes:
        token: the id.
        logprob: its log-probability, or 0 if the request does not ask for it.
        top: the ids and log-probabilities of the most likely tokens, the most likely first.
    """

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Delta:
    """The part of a completion that is new since its last delta.

    Attributes:
        choice: the index of the completion.
        text: the new text, without special tokens and stop strings.
        tokens: the new tokens. A text may come later than its tokens, if it could be the start of a stop string.
        scored: the next tokens of the prompt, for a request with prompt_logprobs.
        reason: "" if the completion goes on; else "stop", "length", "cancelled", "timeout" or "error".
        error: what went wrong, for the reasons "timeout" and "error".
    """

    choice: int
    text: str = ""
    tokens: list[TokenChoice] = field(default_factory=list)
    scored: list[TokenChoice] = field(default_factory=list)
    reason: str = ""
    error: str = ""

    def __iadd__(self, later: Delta) -> Delta:
        """Append the delta that comes next."""
        self.text += later.text
        self.tokens += later.tokens
        self.scored += later.scored
        self.reason, self.error = later.reason, later.error
        return self

    def add_to(self, completion: Completion) -> None:
        """Add the text, the tokens and the reason to a completion."""
        completion.text += self.text
        completion.tokens += [choice.token for choice in self.tokens]
        completion.reason = self.reason
