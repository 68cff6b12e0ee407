# SPDX-License-Identifier: Apache-2.0
"""`Core`: sequences and the steps that run them, in the thread of the caller.

`LanguageModel` drives one per call or conversation, and `Engine` drives one in a thread of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any, Protocol

from cupy_awq.llm.decoder.block_pool import BlockPool
from cupy_awq.llm.decoder.model import Model
from cupy_awq.llm.engine.request import Delta
from cupy_awq.llm.engine.row_sampler import RowSampler
from cupy_awq.llm.engine.runner import Launch, Outcome, Runner
from cupy_awq.llm.engine.scheduler import Draft, Scheduler, Sequence, Step
from cupy_awq.llm.families.description import Decoder
from cupy_awq.llm.generate_arguments import Prompt
from cupy_awq.llm.text.detokenizer import DecodeStream, Detokenizer, StopStrings
from cupy_awq.llm.text.tokenizer import Tokenizer

NO_MEMORY = "memory: expected enough, got none"
"""The error of the sequences of a step for which memory is insufficient."""


class TextModel(Protocol):
    """A model with its tokenizer, as `cupy_awq.llm.LanguageModel` has them.

    Attributes:
        config, model, tokenizer, stop_ids: those of `cupy_awq.llm.LanguageModel`.
    """

    config: Decoder
    model: Model
    tokenizer: Tokenizer
    stop_ids: frozenset[int]

    def encode(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        special_tokens: bool | None = None,
        template_args: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt."""
        ...


@dataclass(eq=False)
class _Row:
    """The state of a sequence that a `Core` keeps besides the scheduler's.

    Attributes:
        stream, detokenizer: its text.
        step: the function of one of them that turns a token into text; the search for stop strings takes time.
        stop_ids: the tokens that end it.
        limit: the largest number of its tokens.
        followers: the sequences that begin when its prompt is in the cache.
        count: the number of its tokens so far.
    """

    stream: DecodeStream
    detokenizer: Detokenizer
    step: Callable[[int], str]
    stop_ids: frozenset[int]
    limit: int
    followers: list[Sequence] = field(default_factory=list)
    count: int = 0


class Core:
    """The sequences of a model, and the steps that run them. The model's device must be current during each call.

    Args:
        model: the model.
        runner: the runner of the steps.
        max_rows, inter_token_seconds, make_draft: as for `Scheduler`.
        max_chunk: the largest number of prompt tokens per step; by default that of the runner.

    Attributes:
        scheduler: the scheduler.
    """

    def __init__(
        self,
        model: TextModel,
        runner: Runner,
        *,
        max_rows: int,
        max_chunk: int | None = None,
        inter_token_seconds: float = math.inf,
        make_draft: Callable[[], Draft] | None = None,
    ) -> None:
        self._model, self._runner = model, runner
        self.scheduler = Scheduler(
            BlockPool(1 + runner.blocks),
            max_rows=max_rows,
            max_chunk=min(max_chunk or runner.max_chunk, runner.max_chunk),
            inter_token_seconds=inter_token_seconds,
            make_draft=make_draft,
        )
        self._rows: dict[Sequence, _Row] = {}
        self._samplers: dict[Sequence, RowSampler] = {}
        self._begun = 0
        self._ahead: tuple[Step, Launch, float] | None = None
        self._finished = 0.0

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def begin(self, sequences: Several[Sequence], *, shares_prompt: bool = False) -> None:
        """Add sequences with equal stop strings; if they share a prompt, all but the first wait until it is cached."""
        pool = self.scheduler.pool
        if not self._rows and pool.free < pool.size:  # an interrupted call has not put all blocks back
            self.scheduler.pool = BlockPool(1 + pool.size)
        request, tokenizer = sequences[0].request, self._model.tokenizer
        special, stops = tokenizer.special_ids, StopStrings(request.stop)
        stop_ids = self._model.stop_ids | {special[text] for text in request.stop if text in special}
        vocab = self._model.config.vocab
        for sequence in sequences:
            if request.prompt_logprobs is not None:
                self._begun += 1
                sequence.table.salt = f"\0{self._begun}"  # so no other sequence has its prefixes
            stream = tokenizer.stream(sequence.request.prompt if request.continues else ())
            ends = frozenset() if request.ignore_stop_tokens else stop_ids
            detokenizer = Detokenizer(stream, stops)
            step = detokenizer.step if request.stop else stream.step
            limit = sequence.limit - len(sequence.request.prompt)
            self._rows[sequence] = _Row(stream, detokenizer, step, ends, limit)
            self._samplers[sequence] = RowSampler(sequence.request, sequence.choice, vocab, stop_ids)
        first = 1 if shares_prompt else len(sequences)
        for sequence in sequences[:first]:
            self.scheduler.add(sequence)
        self._rows[sequences[0]].followers = list(sequences[first:])

    def end(self, sequences: Iterable[Sequence] | None = None) -> None:
        """Forget those of the sequences, by default all, that have not ended, and release their blocks."""
        for sequence in list(self._rows if sequences is None else sequences):
            if self._rows.pop(sequence, None) is not None:
                self._samplers.pop(sequence, None)  # there is none if `begin` ran out of memory
                self.scheduler.remove(sequence)
                if not self._rows:
                    self._ahead = None
                    self._runner.wait()

    def step(self) -> list[tuple[Sequence, Delta]]:
        """Run the next step, if there is one, and return the result of `run`."""
        return self.run(self.scheduler.next_step(time.monotonic()))

    @property
    def is_ahead(self) -> bool:
        """True if a step has been launched and not finished."""
        return self._ahead is not None

    def run(self, step: Step | None) -> list[tuple[Sequence, Delta]]:
        """Launch a step of the scheduler, if there is one, and finish the one before; see `_finish`.

        The launched step is finished, too, unless the next one may be launched before. Raises what the launch raises;
        the sequences and the step before are then as they were. A step that has no memory in the end gives errors.
        """
        began = time.monotonic()
        launch = None if step is None else self._runner.launch(step, self._samplers)
        if step is not None and launch is not None and launch.is_ahead:
            if not step.is_prompt and self.scheduler.may_draft(step):
                launch = launch._replace(is_ahead=False)
            else:
                self.scheduler.launch_ahead(step)
        previous, self._ahead = self._ahead, None
        found = self._finish(*previous) if previous else []
        if step is None or launch is None:
            return found
        if not launch.is_ahead:
            return [*found, *self._finish(step, launch, began)]
        if self._rows:
            self._ahead = step, launch, began
        return found

    def _finish(self, step: Step, launch: Launch, began: float) -> list[tuple[Sequence, Delta]]:
        """Wait for a step; return what it adds to each sequence, and end those that have all their tokens."""
        try:
            outcomes = launch.finish()
        except MemoryError:
            outcomes = [Outcome(error=NO_MEMORY)] * len(step.parts)
        pairs = [
            (part, outcome)
            for part, outcome in zip(step.parts, outcomes, strict=True)
            if part.sequence in self._rows and (not launch.is_ahead or self.scheduler.land(part.sequence))
        ]
        now = time.monotonic()
        seconds = now - max(began, self._finished) if len(pairs) == len(outcomes) else None
        self._finished = now
        chosen = [[choice.token for choice in outcome.tokens] for _, outcome in pairs]
        self.scheduler.finish_step(Step(tuple(part for part, _ in pairs), step.is_prompt), chosen, seconds)
        found = [(part.sequence, self._receive(part.sequence, outcome)) for part, outcome in pairs]
        self.end(sequence for sequence, delta in found if delta.reason)
        return [(sequence, delta) for sequence, delta in found if delta.tokens or delta.scored or delta.reason]

    def _receive(self, sequence: Sequence, outcome: Outcome) -> Delta:
        """Turn the new tokens of a sequence into text, up to the one that ends it."""
        row = self._rows[sequence]
        text, reason, kept = "", "", list(outcome.tokens)
        for i, choice in enumerate(kept, 1):
            row.count += 1
            if choice.token in row.stop_ids:
                reason = "stop"
            else:
                text += row.step(choice.token)
                if row.detokenizer.stopped:
                    reason = "stop"
                elif row.count >= row.limit:
                    reason = "length"
            if reason:
                del kept[i:]
                break
        error = "" if reason else outcome.error
        if error:
            reason = "error"
        if reason:
            text += row.detokenizer.flush() + ("" if row.detokenizer.stopped else row.stream.flush())
        if row.followers and (row.count or reason):
            for follower in reversed(row.followers):
                follower.admitted = sequence.admitted
                self.scheduler.add(follower, first=True)
            row.followers = []
        return Delta(sequence.choice, text, kept, list(outcome.scored), reason, error)
