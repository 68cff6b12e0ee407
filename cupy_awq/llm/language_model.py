# SPDX-License-Identifier: Apache-2.0
"""`LanguageModel`: text in, text out.

The life of a prompt: the tokenizer converts it to tokens; a `Core` skips tokens that the KV cache already contains,
runs the others, generates one token after the other and converts them to text, up to a stop token or stop string.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cupy_awq.llm.completion import Completion, Score, Stats
from cupy_awq.llm.decoder.model import Model
from cupy_awq.llm.decoder.sampling import NAN_LOGITS, Sampling
from cupy_awq.llm.engine import scheduler
from cupy_awq.llm.engine.core import NO_MEMORY, Core
from cupy_awq.llm.engine.request import Delta, Request
from cupy_awq.llm.engine.runner import make_runner
from cupy_awq.llm.families.description import Decoder
from cupy_awq.llm.generate_arguments import (
    Prompt,
    check_max_tokens,
    check_sampling,
    check_stop,
    list_prompts,
    show_count,
)
from cupy_awq.llm.text.chat_template import Message, check_arguments, check_messages
from cupy_awq.llm.text.tokenizer import Tokenizer, check_text
from cupy_awq.runtime import placement

SCORE_WINDOW = 2048
"""The largest number of tokens per window of `LanguageModel.score`."""


MAX_ROWS = 1024
"""The largest number of completions that `LanguageModel.generate` runs at a time; others wait for them."""


class ContextFullError(ValueError):
    """The error for a conversation that exceeds its capacity. `Chat.say` can drop old turns (``drop_oldest``)."""


class LanguageModel:
    """A model with its tokenizer on one device, created by `load`. It is not thread-safe.

    Attributes:
        config: the sizes and constants of the model.
        model: the decoder.
        tokenizer: the tokenizer with its chat template.
        stop_ids: the ids of the tokens that end a text.
        stats: the token counts and times of the last `generate` or `Chat.say` call.
    """

    def __init__(self, config: Decoder, model: Model, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.stats = Stats()

    def __repr__(self) -> str:
        config, place = self.config, placement.device_name(self.model.ops.device_index)
        size = f"{len(config.layers)} layers, {self.model.weight_bytes / 1e6:.1f} MB of weights per step"
        return f"LanguageModel({config.model_type}, {size}, context {config.context}, {place})"

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        /,
        *,
        raw: bool = False,
        special_tokens: bool | None = None,
        template_args: Mapping[str, Any] | None = None,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Completion]:
        """Generate a completion for each prompt, all in one batch.

        The KV cache has memory for the longest prompt and ``max_tokens`` per prompt, of at most `MAX_ROWS` prompts.

        Args:
            prompts: a text or a list of messages, or a list of such prompts. A text is a user's message.
            raw: True to continue the texts as they are, without a chat template.
            special_tokens: True to recognize special tokens such as "<|im_end|>" in prompts, False to encode them as
                plain text, so that a prompt cannot forge a turn; by default True only with ``raw``.
            template_args: variables of the chat template, such as {"enable_thinking": False}.
            max_tokens: the largest number of tokens per completion. All completions of a batch also end at the number
                of tokens for which the longest prompt leaves room in the context.
            sampling: the sampling parameters; by default greedy.
            stop: stop strings of at most `MAX_STOP` characters, which end a completion; also special tokens such as
                "<|im_end|>".
            on_text: a callback (index of the prompt, next piece of its completion).

        Returns:
            One `Completion` for each prompt.

        Raises:
            TypeError: a prompt is neither a text nor messages whose values are texts, ``stop`` is not a list of texts,
                ``sampling`` not a `Sampling`, ``template_args`` not a dict of JSON values, or ``max_tokens`` not an
                integer.
            ValueError: a prompt is empty or leaves no room in the context, ``max_tokens`` is below 1, a stop string is
                too long, a variable of the template may not be set, the KV cache needs more memory than is free, or
                the logits contain NaN.
            CheckpointError: the chat template is missing or fails. It is a subclass of ValueError.
            MemoryError: the memory of the GPU or of the host is exhausted. The model can still be used.

        Example::

            model = cupy_awq.llm.load("smollm2")
            print(model.generate("What is the capital of France?")[0].text)
        """
        stop, sampling = check_stop(stop), check_sampling(sampling)
        encode = functools.partial(
            self.encode, raw=raw, special_tokens=special_tokens, template_args=template_args, limit=self.config.context
        )
        ids = [encode(prompt) for prompt in list_prompts(prompts)]
        limit = self._limit(ids, max_tokens)
        core = self._make_core(len(ids), max(map(len, ids)) + limit)
        options: dict[str, Any] = {"max_tokens": limit, "sampling": sampling, "stop": tuple(stop), "continues": raw}
        completions = [Completion() for _ in ids]
        for delta in self._deltas(core, [Request(tuple(prompt), **options) for prompt in ids]):
            delta.add_to(completions[delta.choice])
            if on_text is not None and delta.text:
                on_text(delta.choice, delta.text)
        return completions

    def chat(
        self,
        *,
        capacity: int | None = None,
        system: str | None = None,
        special_tokens: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> Chat:
        """Begin a conversation and return it.

        Args:
            capacity: the largest number of tokens of the conversation; by default 8192, or the model's context if that
                is smaller.
            system: the system message; by default the chat template's own system message, if it has one.
            special_tokens: True to recognize special tokens in messages; a message can then forge turns.
            template_args: variables of the chat template, such as {"enable_thinking": False}.

        Raises:
            TypeError: the capacity is not an integer, the system message not a text, or ``template_args`` not a dict of
                JSON values.
            ValueError: the capacity is below 2 or larger than the context, or needs more memory than is free, or a
                variable of the template may not be set.

        Example::

            chat = cupy_awq.llm.load("smollm2").chat(system="Be brief.")
            for piece in chat.say("Why is the sky blue?"):
                print(piece, end="", flush=True)
        """
        capacity = min(self.config.context, 8192) if capacity is None else capacity
        return Chat(self, capacity, system, special_tokens, template_args)

    def score(self, text: str, /) -> Score:
        """Return the log-likelihood of a text given its first token.

        A text longer than `SCORE_WINDOW` or the context is scored in windows, each without the tokens before it. Raises
        TypeError if ``text`` is not a str, and ValueError if it has fewer than two tokens or the logits contain NaN.
        """
        ids = self.tokenizer.encode(text)
        if len(ids) < 2:
            raise ValueError(f"text: expected at least 2 tokens, got {len(ids)}")
        self._check_ids(ids)
        window = min(self.config.context, SCORE_WINDOW, len(ids))
        core = self._make_core(1, window)
        log_likelihood = 0.0
        for start in range(0, len(ids) - 1, window - 1):
            request = Request(tuple(ids[start : start + window]), max_tokens=1, prompt_logprobs=0)
            for delta in self._deltas(core, [request]):
                log_likelihood += sum(choice.logprob for choice in delta.scored)
        if math.isnan(log_likelihood):
            raise ValueError(NAN_LOGITS)
        return Score(len(ids) - 1, log_likelihood)

    def encode(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        special_tokens: bool | None = None,
        template_args: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt, or of its beginning if the prompt has more than twice ``limit`` tokens.

        The other arguments have the same meaning as in `generate`.
        """
        special_tokens = raw if special_tokens is None else special_tokens
        if raw and not isinstance(prompt, str):
            check_messages(prompt)
            raise ValueError("prompt: expected a text with raw=True, got messages")
        if isinstance(prompt, str) and raw:
            ids = self.tokenizer.encode(prompt, special_tokens=special_tokens, limit=limit)
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids = self.tokenizer.encode_chat(
                messages, special_tokens=special_tokens, template_args=template_args, limit=limit
            )
        self._check_ids(ids)
        return ids

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that makes the model's device current; exit it before yielding to the caller."""
        return placement.use_device(self.model.ops.device_index)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise ValueError("prompt: expected at least one token, got none")
        if max(ids) >= self.config.vocab:
            raise ValueError(f"prompt: expected tokens below the vocabulary size {self.config.vocab}, got {max(ids)}")

    def _limit(self, ids: Sequence[Sequence[int]], max_tokens: int) -> int:
        """Return the largest number of tokens per completion.

        This is ``max_tokens``, or the room that the longest prompt leaves in the context, if that is smaller.
        """
        check_max_tokens(max_tokens)
        if not ids:
            raise ValueError("prompts: expected at least one prompt, got none")
        longest = max(map(len, ids))
        if longest >= self.config.context:
            got = show_count(longest, self.config.context)
            raise ValueError(f"prompt: expected fewer tokens than the context of {self.config.context}, got {got}")
        return min(max_tokens, self.config.context - longest)

    def _make_core(self, rows: int, capacity: int) -> Core:
        """Return a core for sequences of at most ``capacity`` tokens: ``rows`` at a time, or `MAX_ROWS` if fewer."""
        rows = min(rows, MAX_ROWS)
        with self._on_device():
            return Core(self, make_runner(self.model, rows, capacity, is_batch=True), max_rows=rows)

    def _deltas(self, core: Core, requests: Sequence[Request]) -> Generator[Delta, None, None]:
        """Run requests in place of those that the core has; yield the parts of their completions.

        The index of a completion is that of its request.
        """
        stats = self.stats = Stats(sum(len(request.prompt) for request in requests))
        sequences = [
            scheduler.Sequence(request, i, len(request.prompt) + request.max_tokens, 0.0)
            for i, request in enumerate(requests)
        ]
        began, begun = time.perf_counter(), set[scheduler.Sequence]()
        try:
            with self._on_device():
                core.end()
                core.begin(sequences)
            while any(sequence in core for sequence in sequences):
                with self._on_device():
                    found = core.step()
                seconds = time.perf_counter() - began
                first = [sequence for sequence, delta in found if delta.tokens and sequence not in begun]
                if first:
                    begun.update(first)
                    stats.prompt_seconds = seconds
                    stats.prompt_tokens = sum(len(s.request.prompt) - s.cached for s in sequences)
                elif count := sum(len(delta.tokens) for _, delta in found):
                    stats.seconds = seconds - stats.prompt_seconds
                    stats.tokens += count
                    stats.steps += 1
                for _, delta in found:
                    if delta.error:
                        raise MemoryError(NO_MEMORY) if delta.error == NO_MEMORY else ValueError(delta.error)
                    yield delta
        finally:
            with self._on_device():
                core.end(sequences)


class Chat:
    """A conversation that keeps its KV cache, so that each turn runs only its new tokens.

    Attributes:
        messages: all messages so far.
        last: the completion of the last call of `say`, which grows while the caller iterates; None before the first.
    """

    def __init__(
        self,
        model: LanguageModel,
        capacity: int,
        system: str | None,
        special_tokens: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int):
            raise TypeError(f"capacity: expected an integer, got {capacity!r:.80}")
        if not 1 < capacity <= model.config.context:
            raise ValueError(f"capacity: expected 2..{model.config.context} (the context of the model), got {capacity}")
        if system is not None:
            check_text("system", system)
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.last: Completion | None = None
        self._model, self._special_tokens = model, special_tokens
        self._template_args = check_arguments(template_args)
        self._core, self._capacity = model._make_core(1, capacity), capacity
        self._turn = 0

    def __repr__(self) -> str:
        return f"Chat({len(self.messages)} messages, capacity of {self._capacity} tokens, {self._model!r})"

    def reset(self) -> None:
        """Begin a new conversation with the same system message. An answer that is not complete is not added."""
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]
        self.last = None
        self._turn += 1

    def say(
        self,
        text: str,
        /,
        *,
        max_tokens: int = 1024,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        drop_oldest: bool = False,
    ) -> Iterator[str]:
        """Yield the answer to ``text``, piece by piece.

        ``text`` and the answer are added to the conversation when the answer is complete or its iterator is closed. If
        `say` is called again before that, this iterator ends and nothing is added.

        Args:
            text: the user's message.
            max_tokens, sampling, stop: as for `LanguageModel.generate`.
            drop_oldest: True to drop the oldest turns until there is room for ``max_tokens`` tokens, or for a quarter
                of the capacity if that is less.

        Raises:
            TypeError: ``text`` is not a str, ``stop`` not a list of texts, ``sampling`` not a `Sampling`, or
                ``max_tokens`` not an integer.
            ValueError: ``max_tokens`` is below 1, or a stop string is too long.
            ContextFullError: the conversation would exceed its capacity and stays unchanged. A subclass of ValueError.
        """
        check_text("text", text)
        check_max_tokens(max_tokens)
        return self._say(text, max_tokens, check_sampling(sampling), check_stop(stop), drop_oldest)

    def _say(
        self, text: str, max_tokens: int, sampling: Sampling, stop: Sequence[str], drop_oldest: bool
    ) -> Iterator[str]:
        model, capacity = self._model, self._capacity
        completion = self.last = Completion()
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        wanted = min(max_tokens, capacity // 4) if drop_oldest else 1
        while True:
            ids = model.encode(
                messages, special_tokens=self._special_tokens, template_args=self._template_args, limit=capacity
            )
            room = capacity - len(ids)
            first = int(messages[0]["role"] == "system")
            if room >= wanted or len(messages) - first < 3 or not drop_oldest:
                break
            del messages[first : first + 2]
        if room < 1:
            got = show_count(len(ids), capacity)
            raise ContextFullError(f"conversation: expected fewer tokens than its capacity of {capacity}, got {got}")
        limit = min(max_tokens, room)
        turn = self._turn = self._turn + 1
        try:
            request = Request(tuple(ids), max_tokens=limit, sampling=sampling, stop=tuple(stop))
            with contextlib.closing(model._deltas(self._core, [request])) as deltas:
                for delta in deltas:
                    delta.add_to(completion)
                    if delta.text:
                        yield delta.text
                    if turn != self._turn:
                        break  # the KV cache now belongs to a later call of `say`
        finally:
            if completion.tokens and turn == self._turn:
                self.messages = [*messages, {"role": "assistant", "content": completion.text}]
