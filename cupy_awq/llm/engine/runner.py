# SPDX-License-Identifier: Apache-2.0
"""Runners, which compute the tokens of a step of the scheduler: one class per kind of cache and device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cupy_awq.check import Array
from cupy_awq.llm.decoder.backend import ChoiceOptions, Tokens
from cupy_awq.llm.decoder.block_pool import BLOCK, count_blocks
from cupy_awq.llm.decoder.model import Model
from cupy_awq.llm.decoder.sampling import NAN_LOGITS
from cupy_awq.llm.engine import scheduler
from cupy_awq.llm.engine.request import Request, TokenChoice
from cupy_awq.llm.engine.row_sampler import RowSampler, make_offsets, with_logprobs
from cupy_awq.llm.engine.scheduler import Part, Step

SCORE_ROWS = 64
"""The number of prompt tokens whose logits are in memory at a time."""


GREEDY = ChoiceOptions()
"""The needs of a choice of the most likely tokens."""


class Outcome(NamedTuple):
    """The result of a part of a step.

    Attributes:
        tokens: the tokens that it chose, none if it does not end its sequence.
        error: what went wrong, or "".
        scored: the tokens of the prompt after those of the part, if the request asks for their log-probabilities.
    """

    tokens: Sequence[TokenChoice] = ()
    error: str = ""
    scored: Sequence[TokenChoice] = ()


class Launch(NamedTuple):
    """A step that has been started.

    Attributes:
        finish: a function that waits for the step and returns the outcome of each part. An error of one sequence is
            part of its outcome.
        is_ahead: whether the next step may be launched before this one is finished.
    """

    finish: Callable[[], list[Outcome]]
    is_ahead: bool = False


class Runner(Protocol):
    """The part of an engine that runs its steps.

    Attributes:
        blocks: the number of blocks for sequences.
        max_tokens: the largest number of tokens of a sequence.
        max_chunk: the largest number of prompt tokens per step.
    """

    blocks: int
    max_tokens: int
    max_chunk: int

    def launch(self, step: Step, samplers: Mapping[scheduler.Sequence, RowSampler]) -> Launch:
        """Start a step."""
        ...

    def wait(self) -> None:
        """Wait for all work that uses the cache."""
        ...


def make_runner(
    model: Model,
    rows: int,
    context: int,
    cache_tokens: int | None = None,
    *,
    is_batch: bool = False,
    has_drafts: bool = False,
) -> Runner:
    """Return a runner for the model's back end.

    Args:
        model: the model, whose device is current.
        rows: the largest number of sequences.
        context: the largest number of tokens of a sequence.
        cache_tokens: the number of tokens of all sequences, or None for those that fit.
        is_batch: True for a single batch instead of a server. The cache then holds ``rows`` sequences of ``context``
            tokens, and a block for each but one so that all are admitted at once, but no more; and a GPU prepares a
            step only when it comes.
        has_drafts: whether steps can have drafts.
    """
    if is_batch:
        cache_tokens = (rows * count_blocks(context) + rows - 1) * BLOCK
    if model.ops.has_pages:
        return PagedRunner(model, context, cache_tokens)
    return DeviceRunner(model, rows, context, cache_tokens, has_drafts=has_drafts, prepares=not is_batch)


class PagedRunner:
    """A runner on the CPU: one forward pass over the rows of all sequences, then the choice of tokens row by row.

    With a model that was loaded with ``batch_invariant=True``, GEMMs and attention compute each row separately, so the
    tokens of a sequence do not depend on the others, on chunks, on cached prefixes or on drafts.

    Args:
        model: the model.
        context: the largest number of tokens of a sequence.
        cache_tokens: the number of tokens of all sequences, or None for those that fit.
    """

    def __init__(self, model: Model, context: int, cache_tokens: int | None) -> None:
        self._model, self._pages = model, model.ops.make_pages(cache_tokens, context)
        self.blocks, self.max_chunk = self._pages.blocks, model.ops.prefill_chunk
        self.max_tokens = min(context, self.blocks * BLOCK)

    def launch(self, step: Step, samplers: Mapping[scheduler.Sequence, RowSampler]) -> Launch:
        """Run a step; see `Runner.launch`."""
        tokens: list[int] = []
        rows: list[int] = []
        for part in step.parts:
            tokens += part.tokens
            if part.is_last:
                rows += range(len(tokens) - len(part.drafts) - 1, len(tokens))
        batch = self._pages.make_rows(
            [(part.start, part.size + len(part.drafts), part.sequence.table.blocks) for part in step.parts]
        )
        hidden = self._model.forward(self._model.ops.prepare_tokens(tokens)[None], batch)[0]
        logits = self._model.ops.to_numpy(self._model.logits(hidden[rows])) if rows else np.empty(0, np.float32)
        outcomes = []
        for part, run in zip(step.parts, batch.runs, strict=True):
            count = 1 + len(part.drafts) if part.is_last else 0
            scored = _score(self._model, part, part.start, hidden[run.rows]) if step.is_prompt else []
            outcomes.append(_choose(part, logits[:count], samplers[part.sequence], scored))
            logits = logits[count:]
        return Launch(lambda: outcomes)

    def wait(self) -> None:
        """Return at once."""


class DeviceRunner:
    """A runner on a GPU: steps are launched ahead of the host, and choose most tokens on the device.

    Rows whose requests need their logits on the host (`_choice`) are chosen there; a step with such a row is not
    followed by another before its tokens are known.

    Args:
        model, rows, context, cache_tokens, has_drafts: as for `make_runner`.
        prepares: as for `DecoderOps.make_steps`.
    """

    def __init__(
        self,
        model: Model,
        rows: int,
        context: int,
        cache_tokens: int | None,
        *,
        has_drafts: bool = False,
        prepares: bool = True,
    ) -> None:
        sizes = rows, context, cache_tokens, scheduler.MAX_DRAFT_ROWS if has_drafts else 0
        self._model, self._has_drafts = model, has_drafts
        self._steps = model.ops.make_steps(model.forward, model.head, *sizes, prepares=prepares)
        self.blocks, self.max_chunk = self._steps.blocks, model.ops.prefill_chunk
        self.max_tokens = min(context, self.blocks * BLOCK)
        self._slots: dict[scheduler.Sequence, int] = {}
        self._free = list(range(rows, 0, -1))
        self._choices: dict[scheduler.Sequence, ChoiceOptions | None] = {}  # None on the host
        self._landed: set[scheduler.Sequence] = set()  # those whose blocks may be replaced now, after their prompts

    def launch(self, step: Step, samplers: Mapping[scheduler.Sequence, RowSampler]) -> Launch:
        """Launch a step; see `Runner.launch`."""
        with self._steps.stream:
            self._assign_slots(step, samplers)
            return self._prompt(step, samplers) if step.is_prompt else self._decode(step, samplers)

    def _assign_slots(self, step: Step, samplers: Mapping[scheduler.Sequence, RowSampler]) -> None:
        for sequence in [s for s in self._slots if s not in samplers or not s.table.blocks]:
            self._free.append(self._slots.pop(sequence))
            self._landed.discard(sequence)
            del self._choices[sequence]
        for part in step.parts if step.is_prompt or self._landed else ():
            sequence = part.sequence
            if step.is_prompt:
                if sequence not in self._slots:
                    self._slots[sequence] = self._free.pop()
                    self._choices[sequence] = self._choice(sequence.request)
                request, known = sequence.request, sequence.tokens
                offsets = make_offsets(request, known[len(request.prompt) :])
                self._steps.assign(self._slots[sequence], request.sampling, sequence.choice, known, offsets)
            if step.is_prompt or sequence in self._landed:
                self._steps.place(self._slots[sequence], sequence.table.blocks)
                self._landed.discard(sequence)

    def wait(self) -> None:
        """Wait for the step that has been launched ahead."""
        self._steps.wait()

    def _prompt(self, step: Step, samplers: Mapping[scheduler.Sequence, RowSampler]) -> Launch:
        steps, slots = self._steps, self._slots
        options, is_on_device = self._options(step)
        hidden = steps.prompt([(slots[part.sequence], part.start, part.tokens) for part in step.parts])
        ends = list(itertools.accumulate(part.size for part in step.parts))
        is_last = [part.is_last for part in step.parts]
        last = [(part, end - 1) for part, end, flag in zip(step.parts, ends, is_last, strict=True) if flag]
        if last:
            logits = steps.last_logits(hidden, [row for _, row in last])
            rows = [(slots[part.sequence], part.start + part.size - 1) for part, _ in last]
            tokens = steps.choose(logits, rows, options)
        wait = steps.mark()

        def finish() -> list[Outcome]:
            wait()
            self._landed.update(part.sequence for part in step.parts if part.sequence in samplers)
            with steps.stream:
                chosen = iter(self._outcomes([part for part, _ in last], logits, tokens, samplers) if last else ())
                outcomes = []
                for part, end, flag in zip(step.parts, ends, is_last, strict=True):
                    scored = _score(self._model, part, part.start, hidden[end - part.size : end])
                    outcomes.append((next(chosen) if flag else Outcome())._replace(scored=scored))
                return outcomes

        is_scored = any(part.sequence.request.prompt_logprobs is not None for part in step.parts)
        return Launch(finish, is_on_device and not is_scored)

    def _decode(self, step: Step, samplers: Mapping[scheduler.Sequence, RowSampler]) -> Launch:
        rows = []
        for sequence, start, _, drafts in step.parts:
            slot, blocks, tokens = self._slots[sequence], sequence.table.blocks, sequence.tokens
            for position, token in enumerate((tokens[start] if start < len(tokens) else -1, *drafts), start):
                at = position // BLOCK
                rows.append((slot, position, blocks[max(at - 1, 0)], blocks[at], token))
        has_drafts = len(rows) > len(step.parts)
        options, is_on_device = self._options(step)
        logits, chosen = self._steps.decode(rows, options, has_drafts=has_drafts)

        def finish() -> list[Outcome]:
            with self._steps.stream:
                return self._outcomes(step.parts, logits, chosen, samplers)

        return Launch(finish, is_on_device)

    def _outcomes(
        self, parts: Sequence[Part], logits: Array, chosen: Tokens, samplers: Mapping[scheduler.Sequence, RowSampler]
    ) -> list[Outcome]:
        """Wait for the tokens of parts, whose logits are in order, and return their outcomes."""
        outcomes, tokens, end = [], chosen.wait(), 0
        for part in parts:
            first, end = end, end + 1 + len(part.drafts)
            if self._choices.get(part.sequence, GREEDY) is None:
                logits_of = self._model.ops.to_numpy(logits[first:end])
                outcomes.append(_choose(part, logits_of, samplers[part.sequence]))
            else:
                outcomes.append(_accept(part.drafts, tokens[first:end]))
        return outcomes

    def _choice(self, request: Request) -> ChoiceOptions | None:
        """Return the needs of the choice of a request's tokens, or None if they are chosen on the host."""
        sampling = request.sampling
        penalizes = sampling.repetition_penalty != 1 or bool(make_offsets(request))
        is_limited = request.min_tokens or request.make_constraint is not None or request.logprobs is not None
        if is_limited or (penalizes and self._has_drafts):
            return None
        samples = sampling.temperature > 0
        filters = samples and bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p)
        return ChoiceOptions(samples, filters, penalizes)

    def _options(self, step: Step) -> tuple[ChoiceOptions, bool]:
        """Return the needs of the choice of a step's tokens, and whether it is made on the device alone."""
        needs = {self._choices[part.sequence] for part in step.parts}
        on_device = [options for options in needs if options is not None]
        return ChoiceOptions(*map(any, zip(GREEDY, *on_device, strict=True))), None not in needs


def _accept(drafts: Sequence[int], tokens: Sequence[int]) -> Outcome:
    """Return the first of the tokens and, as long as it is the next draft, one more; see `_choose`."""
    if not drafts and tokens[0] >= 0:
        return Outcome((TokenChoice(tokens[0]),))
    kept: list[TokenChoice] = []
    for token, draft in zip(tokens, (*drafts, -1), strict=True):
        if token < 0:
            return Outcome(kept, NAN_LOGITS)
        kept.append(TokenChoice(token))
        if token != draft:
            break
    return Outcome(kept)


def _score(model: Model, part: Part, start: int, hidden: Array) -> list[TokenChoice]:
    """Return the prompt tokens that follow hidden states [S, hidden] from position ``start`` on, if they are wanted.

    Those that an earlier step returned, before the sequence was preempted, are left out.
    """
    sequence, count = part.sequence, part.sequence.request.prompt_logprobs
    if count is None:
        return []
    first = max(start, sequence.scored)
    targets = sequence.request.prompt[first + 1 : start + 1 + len(hidden)]
    found: list[TokenChoice] = []
    for i in range(0, len(targets), SCORE_ROWS):
        rows = hidden[first - start + i : first - start + i + SCORE_ROWS]
        logits = model.ops.to_numpy(model.logits(rows))
        found += map(functools.partial(with_logprobs, count), targets[i : i + SCORE_ROWS], logits)
    sequence.scored = first + len(found)
    return found


def _choose(
    part: Part, logits: npt.NDArray[np.float32], sampler: RowSampler, scored: Sequence[TokenChoice] = ()
) -> Outcome:
    """Choose the next token and, as long as it is the next draft, one more.

    Each choice is the one that decoding without drafts would make, with the noise of its position, so drafts change no
    token.
    """
    chosen: list[TokenChoice] = []
    try:
        for row, draft in zip(logits, [*part.drafts, -1], strict=len(logits) > 0):
            chosen.append(sampler.choose(row))
            if chosen[-1].token != draft:
                break
    except ValueError as error:
        return Outcome(chosen, str(error), scored)
    return Outcome(chosen, scored=scored)
