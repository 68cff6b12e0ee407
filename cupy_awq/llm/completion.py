# SPDX-License-Identifier: Apache-2.0
"""The results of `LanguageModel`: `Completion`, `Stats` and `Score`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Completion:
    """The completion of a prompt.

    Attributes:
        text: the text, without special tokens and without the stop string.
        tokens: the ids of all generated tokens, including a stop token.
        reason: the cause of the end: "stop" for a stop token or a stop string, "length" for the token limit, "" if the
            completion is unfinished.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    reason: str = ""


@dataclass
class Stats:
    """The token counts and times of one `generate` or `Chat.say` call.

    Attributes:
        prompt_tokens: the number of prompt tokens that the model ran; tokens reused from the KV cache do not count.
        prompt_seconds: the prefill time in seconds, including the choice of each completion's first token.
        tokens: the number of tokens from decode steps, which excludes the first token of each completion.
        steps: the number of decode steps; each step generates one token for every unfinished sequence.
        seconds: the time in seconds from the end of the prefill to the end of the last step. It includes the time that
            the caller spends between pieces of text, during which a GPU already runs the next step.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Score:
    """The log-likelihood of a text.

    Attributes:
        tokens: the number of scored tokens: all tokens of the text but the first.
        log_likelihood: the sum of the log-probabilities of the scored tokens, in nats.
    """

    tokens: int
    log_likelihood: float

    @property
    def perplexity(self) -> float:
        """The perplexity: exp of the mean negative log-likelihood per token."""
        return math.exp(-self.log_likelihood / self.tokens)
