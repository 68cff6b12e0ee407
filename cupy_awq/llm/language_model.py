# SPDX-License-Identifier: Apache-2.0
"""`LanguageModel`: text in, text out."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupy_awq.check import Array
from cupy_awq.llm.config import Config
from cupy_awq.llm.kv_cache import Cache
from cupy_awq.llm.model import Model
from cupy_awq.llm.sampling import Sampling
from cupy_awq.llm.tokenizer import Message, Stream, Tokenizer
from cupy_awq.runtime import placement

Prompt = str | Sequence[Message]
SCORE_WINDOW = 2048
"""Tokens that a score looks back on at most, where the model's context is longer."""


@dataclass
class Completion:
    """What came of a prompt.

    Attributes:
        text: without special tokens and without the stop string.
        tokens: all that were made, the stopping one included.
        reason: "stop" for a stop token or string, "length" for the limit of tokens or of the context.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    reason: str = "length"


@dataclass
class Stats:
    """Tokens and seconds of the prompts (those that were not in the cache already) and of what followed.

    ``seconds`` run from the prompts' end to the last step's, with the time that the caller takes between two pieces, in
    which a GPU works ahead. ``steps`` counts decode steps, each of which makes a token of every sequence that is not at
    its end.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Score:
    """Log-likelihood of ``tokens`` tokens, in nats."""

    tokens: int
    log_likelihood: float

    @property
    def perplexity(self) -> float:
        return math.exp(-self.log_likelihood / self.tokens)


class LanguageModel:
    """A model with its tokenizer; made by `load`.

    Attributes:
        config, model, tokenizer: the parts.
        stop: ids of tokens that end a text.
        stats: of the last call.
    """

    def __init__(self, config: Config, model: Model, tokenizer: Tokenizer, stop: Sequence[int]) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.stop = frozenset(stop)
        self.stats = Stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        /,
        *,
        raw: bool = False,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Completion]:
        """Complete prompts, all of them at a time.

        Args:
            prompts: a text or a list of messages, or a list of such prompts. A text is what a user says, unless
                ``raw``: then it is what the model goes on from, with no chat template.
            max_tokens: at most so many for each prompt.
            sampling: see `Sampling`; by default the likeliest tokens.
            stop: texts that end a completion.
            on_text: called with the number of the prompt and its next piece of text.

        Raises:
            TypeError: ``stop`` is a text, not a list of texts.
            ValueError: a prompt that is empty or longer than the context; a cache that needs more memory than is free.
            CheckpointError: (a ValueError) there is no chat template, or it fails.
        """
        ids = [self.encode(prompt, raw=raw) for prompt in _several(prompts)]
        limit = self._limit(ids, max_tokens)
        with self._on_device():
            cache = self.model.ops.cache(len(ids), max(map(len, ids)) + limit)
        completions = [Completion() for _ in ids]
        for i, text in self._pieces(cache, ids, limit, sampling or Sampling(), stop, completions):
            if on_text is not None:
                on_text(i, text)
        return completions

    def chat(self, *, capacity: int | None = None, system: str | None = None) -> Chat:
        """A conversation of at most ``capacity`` tokens, by default 8192 or as many as the model's context has."""
        return Chat(self, capacity or min(self.config.context, 8192), system)

    def score(self, text: str, /) -> Score:
        """The log-likelihood of a text, given its first token, in windows of at most 2048 tokens.

        Raises ValueError if the text has fewer than two tokens, or the logits hold NaN.
        """
        ids = self.tokenizer.encode(text)
        if len(ids) < 2:
            raise ValueError(f"the text must have at least 2 tokens, got {len(ids)}")
        self._check_ids(ids)
        with self._on_device():
            score = self._score(ids)
        if math.isnan(score.log_likelihood):
            raise ValueError("the logits hold NaN: the model's weights are damaged, or its values overflow")
        return score

    def _score(self, ids: Sequence[int]) -> Score:
        window = min(self.config.context, SCORE_WINDOW, len(ids))
        cache = self.model.ops.cache(1, window)
        count, total = 0, 0.0
        for start in range(0, len(ids) - 1, window - 1):
            part = ids[start : start + window]
            cache.reuse(0, part[:1])
            done = 0
            for hidden in self.model.append(cache, 0, part[:-1]):
                for first in range(0, hidden.shape[1], 64):  # a whole chunk of logits would be large
                    logits = _host(self.model.logits(hidden[:, first : first + 64]))[0].astype(np.float64)
                    wanted = part[done + first + 1 : done + first + 1 + len(logits)]
                    top = logits.max(axis=1)
                    likely = logits[np.arange(len(wanted)), wanted] - top
                    total += float((likely - np.log(np.exp(logits - top[:, None]).sum(axis=1))).sum())
                    count += len(wanted)
                done += hidden.shape[1]
        return Score(count, total)

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The tokens of a prompt, as `generate` feeds them to the model."""
        if raw and not isinstance(prompt, str):
            raise ValueError("a raw prompt must be a text, got messages")
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt) if raw else self.tokenizer.chat([{"role": "user", "content": prompt}])
        else:
            ids = self.tokenizer.chat(prompt)
        self._check_ids(ids)
        return ids

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Where the model's GPU is the current one. Between the pieces of a text, the caller's is."""
        return placement.use_device(self.model.ops.index)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise ValueError("the prompt must have at least one token, got none")
        if max(ids) >= self.config.vocab:
            raise ValueError(f"token {max(ids)} is not in the model's vocabulary of {self.config.vocab}")

    def _limit(self, ids: Sequence[Sequence[int]], max_tokens: int) -> int:
        """How many tokens the context leaves for answers."""
        _check_max_tokens(max_tokens)
        if not ids:
            raise ValueError("prompts must have at least one prompt, got none")
        longest = max(map(len, ids))
        if longest >= self.config.context:
            raise ValueError(f"the prompt has {longest} tokens, but the model's context is {self.config.context}")
        return min(max_tokens, self.config.context - longest)

    def _pieces(
        self,
        cache: Cache,
        ids: Sequence[Sequence[int]],
        limit: int,
        sampling: Sampling,
        stop: Sequence[str],
        completions: Sequence[Completion],
    ) -> Iterator[tuple[int, str]]:
        """(number of the prompt, next piece of its text), while the completions are filled."""
        if isinstance(stop, str):
            raise TypeError(f"stop must be a list of texts, got the text {stop!r}")
        model, stats = self.model, Stats()
        self.stats = stats

        def step_logits(tokens: Array) -> Array:
            return model.logits(model.forward(tokens[:, None], cache))[:, -1]

        with self._on_device():
            decoder = model.ops.decoder(step_logits, cache, sampling)
        with contextlib.closing(decoder):
            began = time.perf_counter()
            tokens = []
            with self._on_device():
                for i, prompt in enumerate(ids):
                    new = prompt[cache.reuse(i, prompt) :]
                    stats.prompt_tokens += len(new)
                    *_, hidden = model.append(cache, i, new)
                    tokens.append(decoder.put(i, model.logits(hidden[:, -1])[0]))
            stats.prompt_seconds = time.perf_counter() - began
            began = time.perf_counter()
            writers = [Writer(self.tokenizer.stream(), stop) for _ in ids]
            open_ = set(range(len(ids)))
            for step in range(limit):
                for i in sorted(open_):
                    completion, writer, token = completions[i], writers[i], tokens[i]
                    completion.tokens.append(token)
                    text = "" if token in self.stop else writer.step(token)
                    ended = token in self.stop or writer.stopped
                    if ended or step == limit - 1:
                        open_.remove(i)
                        completion.reason = "stop" if ended else "length"
                        text += writer.rest()
                    completion.text += text
                    if text:
                        yield i, text
                if not open_:
                    break
                with self._on_device():
                    tokens = decoder.step()
                stats.seconds = time.perf_counter() - began
                stats.tokens += len(open_)
                stats.steps += 1


class Chat:
    """A conversation that keeps its keys and values, so that a turn costs only what is new in it."""

    def __init__(self, model: LanguageModel, capacity: int, system: str | None) -> None:
        if not 1 < capacity <= model.config.context:
            raise ValueError(f"capacity must be in 2..{model.config.context}, the model's context, got {capacity}")
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._model = model
        with model._on_device():
            self._cache = model.model.ops.cache(1, capacity)
        self._turn = 0

    def say(
        self, text: str, /, *, max_tokens: int = 1024, sampling: Sampling | None = None, stop: Sequence[str] = ()
    ) -> Iterator[str]:
        """The answer to ``text``, piece by piece. Both join the conversation when the answer ends, or is cut off; an
        answer that is not at its end when the next one begins says no more, and neither it nor its text joins.

        Raises TypeError for a ``stop`` that is a text, and ValueError for ``max_tokens`` below 1 or if the conversation
        is longer than its capacity; it is then as it was before.
        """
        _check_max_tokens(max_tokens)
        model, cache = self._model, self._cache
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = model.encode(messages)
        room = cache.capacity - len(ids)
        if room < 1:
            raise ValueError(f"the conversation has {len(ids)} tokens, but room for {cache.capacity}")
        completion = Completion()
        limit = min(max_tokens, room)
        turn = self._turn = self._turn + 1
        try:
            pieces = model._pieces(cache, [ids], limit, sampling or Sampling(), stop, [completion])
            for _, piece in pieces:
                yield piece
                if turn != self._turn:
                    break  # the cache is the next turn's
        finally:
            if completion.tokens and turn == self._turn:
                self.messages = [*messages, {"role": "assistant", "content": completion.text}]


class Writer:
    """Text from tokens, held back while it may be the beginning of a stop string."""

    def __init__(self, stream: Stream, stop: Sequence[str]) -> None:
        self._stream = stream
        self._stop = [text for text in stop if text]
        self._held = ""
        self.stopped = False

    def step(self, token: int) -> str:
        """The text that is now certain."""
        text = self._held + self._stream.step(token)
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        longest = max(map(len, self._stop), default=0)
        tails = (text[i:] for i in range(max(0, len(text) - longest + 1), len(text)))
        self._held = next((tail for tail in tails if any(stop.startswith(tail) for stop in self._stop)), "")
        return text[: len(text) - len(self._held)]

    def rest(self) -> str:
        """What was held back, when no more tokens come."""
        held, self._held = self._held, ""
        return held


def _check_max_tokens(max_tokens: int) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], dict)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _host(a: Any) -> Any:
    return a if isinstance(a, np.ndarray) else a.get()
