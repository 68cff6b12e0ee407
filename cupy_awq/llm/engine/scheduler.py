# SPDX-License-Identifier: Apache-2.0
"""The scheduler: which tokens of which sequences the next step runs.

It is pure: it sees times and tokens, but no arrays, threads or clocks. A sequence waits, runs its prompt in chunks, and
decodes. Steps with chunks alternate with decode steps while any sequence decodes, and a chunk is small enough that the
time between two tokens stays below a bound; without a bound, all prompts run first. Short prompts share a chunk; only
one long prompt is begun at a time. If a decoding sequence needs a block and none is free, the sequence that was
admitted last gives up its blocks and waits again; it later runs its tokens again, except for a cached prefix.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import NamedTuple

from cupy_awq.llm.decoder.block_pool import BLOCK, BlockPool, BlockTable
from cupy_awq.llm.engine.prompt_times import PromptTimes
from cupy_awq.llm.engine.request import Request

MIN_CHUNK = 64
"""The smallest number of prompt tokens per step while other sequences decode. Larger numbers are multiples of it or,
from eight times as many tokens on, of twice as many, as the sizes of captured steps are."""

PLANNED_SHARE = 0.95
"""The share of the bound for the time between two tokens for which steps are planned, since their times vary."""

PATIENCE_SECONDS = 2.0
"""The time after which a prompt runs before shorter ones that came later, in every other step with prompts."""

EXPECTED_TOKENS = 256
"""The number of tokens of a completion for which admission keeps blocks free."""

Draft = Callable[[Tokens[int], int], Tokens[int]]
"""A function that guesses the tokens that follow those of a text, at most a given number of them."""

MAX_DRAFT_ROWS, MAX_DRAFT = 16, 7
"""The largest numbers of rows of a step with drafts, and of drafts of a sequence. So more than eight sequences have no
drafts."""

MIN_ACCEPTANCE, RETRY_TOKENS = 0.04, 64
"""The share of correct drafts below which a sequence pauses them, and the number of tokens of the pause. On an H100, a
step with one draft takes 1.04 times as long as one without."""


@dataclass(eq=False)
class Sequence:
    """One completion of a request.

    Attributes:
        request: the request.
        choice: the index of the completion.
        limit: the largest number of tokens, with those of the prompt.
        arrival: the time at which the request came, in seconds.
        admitted: the time at which the sequence first left the queue, or None.
        tokens: the prompt and the completion so far.
        table: its blocks.
        scored: the number of tokens of the prompt whose log-probabilities the request has got.
        cached: the number of tokens of the prompt that the cache held when the sequence first left the queue.
        acceptance: the share of correct drafts, the latest with the largest weight.
        draft_from: the number of tokens from which on the sequence may have drafts.
        turn: the number of earlier admissions of any sequence when this one was last admitted.
        ahead: the number of steps that have been launched for this sequence and not finished; a decode step is of one
            token.
        draft: the function that drafts its tokens, or None.
    """

    request: Request
    choice: int
    limit: int
    arrival: float
    admitted: float | None = None
    tokens: list[int] = field(default_factory=list)
    table: BlockTable = field(default_factory=BlockTable)
    cached: int = 0
    scored: int = 0
    acceptance: float = 0.5
    draft_from: int = 0
    turn: int = 0
    ahead: int = 0
    draft: Draft | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.table.salt = self.request.salt

    @property
    def remaining(self) -> int:
        """The number of tokens that have not been run."""
        return len(self.tokens) - self.table.computed

    def learn(self, share: float) -> None:
        """Note the share of correct drafts of a step; pause drafts if too few are correct."""
        self.acceptance = _mean(self.acceptance, share)
        if self.acceptance < MIN_ACCEPTANCE:
            self.acceptance, self.draft_from = 2 * MIN_ACCEPTANCE, len(self.tokens) + RETRY_TOKENS


class Part(NamedTuple):
    """The tokens of one sequence in a step: ``size`` known tokens from ``start`` on, then the drafts.

    If they end with the newest known token, the step chooses the next one, and one more after each correct draft.
    """

    sequence: Sequence
    start: int
    size: int
    drafts: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """The token ids that the step runs for this sequence, drafts included."""
        return [*self.sequence.tokens[self.start : self.start + self.size], *self.drafts]

    @property
    def is_last(self) -> bool:
        """Whether the part has the newest token of its sequence."""
        return self.start + self.size == len(self.sequence.tokens)


class Step(NamedTuple):
    """One forward pass over some tokens of one or more sequences.


    Attributes:
        parts: the tokens to run, by sequence.
        is_prompt: whether they are of prompts; else every sequence runs its newest token and perhaps drafts.
    """

    parts: tuple[Part, ...]
    is_prompt: bool


class Scheduler:
    """The sequences of an engine.

    Args:
        pool: the blocks.
        max_rows: the largest number of sequences that are not waiting.
        max_chunk: the largest number of prompt tokens per step.
        inter_token_seconds: the bound for the time between two tokens of a sequence, as far as `MIN_CHUNK` permits it,
            or infinity.
        make_draft: a function that returns the `Draft` of a sequence, or None.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_rows: int,
        max_chunk: int,
        inter_token_seconds: float,
        make_draft: Callable[[], Draft] | None = None,
    ) -> None:
        self.pool, self._max_rows, self._max_chunk = pool, max_rows, max_chunk
        self._inter_token_seconds, self._make_draft = inter_token_seconds, make_draft
        self._waiting: dict[str, deque[Sequence]] = {}
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []  # in order of age
        self._served: Counter[str] = Counter()
        self._turns = 0
        self._was_prompt = False
        self._is_patient = False
        self._prompt_times = PromptTimes()
        self._decode_seconds = 0.0
        self.preemptions = 0

    @property
    def rows(self) -> list[Sequence]:
        """The sequences that have been admitted and not ended: those whose prompts run, then those that decode."""
        return [*self._prefilling, *self._decoding]

    def waiting(self) -> Iterator[Sequence]:
        """Yield the sequences that wait for admission, those of each key together."""
        for queue in self._waiting.values():
            yield from queue

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        """Let a sequence wait, behind the others with its key or, if ``first``, before them."""
        key = sequence.request.key
        if self._make_draft is not None:
            sequence.draft = self._make_draft()
        # A returning key starts level with the others, else its old count would give it the next steps.
        if key not in self._served:
            self._served[key] = min(self._served.values(), default=0)
        queue = self._waiting.setdefault(key, deque())
        queue.appendleft(sequence) if first else queue.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, whatever its state, and release its blocks."""
        key = sequence.request.key
        for group in (self._waiting.get(key, deque()), self._prefilling, self._decoding):
            if sequence in group:
                group.remove(sequence)
        self.pool.release(sequence.table)
        sequence.ahead = 0
        if not self._waiting.get(key, True):
            del self._waiting[key]
        if key not in self._waiting and all(row.request.key != key for row in self.rows):
            self._served.pop(key, None)

    def expired(self, now: float) -> list[Sequence]:
        """Return the sequences whose time is over."""
        late = [s for s in self.waiting() if s.admitted is None and now - s.arrival > s.request.queue_seconds]
        begun = (s for s in (*self.waiting(), *self.rows) if s.admitted is not None)
        return late + [s for s in begun if now - (s.admitted or 0) > s.request.run_seconds]

    def next_step(self, now: float) -> Step | None:
        """Admit sequences and return the next step, or None if there is nothing to run."""
        while self._admit_one(now):
            pass
        is_bounded = self._decoding and self._inter_token_seconds < math.inf
        chunk = () if self._was_prompt and is_bounded else tuple(self._chunk(now))
        if chunk:
            self._was_prompt = True
            return Step(chunk, True)
        self._was_prompt = False
        parts = self._decode_parts()
        return Step(parts, False) if parts else None

    def launch_ahead(self, step: Step) -> None:
        """Note that a step without drafts runs while `next_step` is asked for the one after it.

        Sequences whose prompts end with the step then decode.
        """
        for part in step.parts:
            part.sequence.ahead += 1
            if step.is_prompt and part.is_last:
                self._begin_decoding(part.sequence)

    def may_draft(self, step: Step) -> bool:
        """Return whether the step after a decode step may have drafts; it then needs the tokens of this step."""
        return self._make_draft is not None and any(
            part.drafts or self._drafts(part.sequence, len(step.parts)) for part in step.parts
        )

    def land(self, sequence: Sequence) -> bool:
        """Note that a step that was launched ahead has ended; return whether the sequence has kept its blocks."""
        is_running = sequence.ahead > 0
        sequence.ahead -= is_running
        return is_running

    def finish_step(self, step: Step, chosen: Tokens[Tokens[int]], seconds: float | None) -> None:
        """Record the tokens that each part of a step chose, and the time that the step took in seconds.

        The time is None if the step also had parts of sequences that have left since.
        """
        if seconds is None:
            pass
        elif step.is_prompt:
            self._prompt_times.learn([(part.start, part.size) for part in step.parts], seconds)
        else:
            self._decode_seconds = _mean(self._decode_seconds, seconds)
        for (sequence, start, size, drafts), tokens in zip(step.parts, chosen, strict=True):
            sequence.tokens += tokens
            # The last token chosen has not run yet; those before it ran as drafts.
            size += max(len(tokens) - 1, 0)
            self.pool.mark_computed(sequence.table, sequence.tokens, start + size)
            self._served[sequence.request.key] += size
            if drafts:
                sequence.learn(max(len(tokens) - 1, 0) / len(drafts))
            if tokens and sequence in self._prefilling:
                self._begin_decoding(sequence)

    def _begin_decoding(self, sequence: Sequence) -> None:
        self._prefilling.remove(sequence)
        self._decoding.append(sequence)

    def _admit_one(self, now: float) -> bool:
        """Admit the next waiting sequence, if there is room; return whether it was admitted."""
        rows = self.rows
        if len(rows) >= self._max_rows or not self._waiting:
            return False
        prompts = sorted(row.remaining for row in self._prefilling)
        if len(prompts) > 1 and sum(prompts[:-1]) >= self._max_chunk:
            return False
        held = Counter(row.request.key for row in rows)
        share = max(1, self._max_rows // 2) if len(self._waiting) > 1 else self._max_rows
        keys = [key for key in self._waiting if held[key] < share]
        if not keys:
            return False
        key = min(keys, key=self._served.__getitem__)
        sequence = self._waiting[key][0]
        size, salt = len(sequence.tokens), sequence.request.salt
        if rows:
            expected = min(size + EXPECTED_TOKENS, sequence.limit)
            if self.pool.count_needed(salt, sequence.tokens, expected) + len(rows) > self.pool.free:
                return False
        known = self.pool.reuse_prefix(sequence.table, sequence.tokens)
        if not self.pool.reserve(sequence.table, size):
            raise RuntimeError(f"sequence: expected at most {self.pool.size * BLOCK} tokens, got {size}")
        self._waiting[key].popleft()
        if not self._waiting[key]:
            del self._waiting[key]
        if sequence.admitted is None:
            sequence.admitted, sequence.cached = now, known
        sequence.turn = self._turns = self._turns + 1
        self._prefilling.append(sequence)
        return True

    def _chunk(self, now: float) -> Iterator[Part]:
        """Yield the parts of a step with prompts: the shortest first or, in every other step, the longest waiting."""
        self._is_patient = not self._is_patient
        room, is_bounded = self._max_chunk, self._decoding and self._inter_token_seconds < math.inf
        taken, seconds = 0, PLANNED_SHARE * self._inter_token_seconds - self._decode_seconds

        def order(sequence: Sequence) -> tuple[float, int]:
            is_late = now - sequence.arrival > PATIENCE_SECONDS and not self._is_patient
            return (sequence.arrival if is_late else now), sequence.remaining

        for sequence in sorted((s for s in self._prefilling if not s.ahead), key=order):
            start = sequence.table.computed
            if is_bounded:
                fitting = taken + int(self._prompt_times.count_tokens(start, seconds))
                fitting -= fitting % (MIN_CHUNK if fitting < 8 * MIN_CHUNK else 2 * MIN_CHUNK)
                room = min(room, max(fitting, MIN_CHUNK) - taken)
            count = min(sequence.remaining, room)
            if count > 0:
                yield Part(sequence, start, count)
                room, taken = room - count, taken + count
                seconds -= self._prompt_times.predict(start, count)

    def _decode_parts(self) -> tuple[Part, ...]:
        """Return the newest token of each decoding sequence, after making room for it, and drafts."""
        parts = []
        for sequence in self._decoding.copy():
            known, table = len(sequence.tokens) + sequence.ahead, sequence.table
            if known >= sequence.limit and sequence.ahead:
                continue  # it ends with the step that is ahead
            while table.blocks and known > BLOCK * len(table.blocks) and not self.pool.reserve(table, known):
                self._preempt(max(self.rows, key=lambda row: row.turn))  # perhaps the sequence itself
            parts.append(Part(sequence, known - 1, 1))
        parts = [part for part in parts if part.sequence.table.blocks]
        if self._make_draft is None:
            return tuple(parts)
        for i, (sequence, start, size, _) in enumerate(parts):
            drafts = () if sequence.ahead else self._drafts(sequence, len(parts))
            if drafts and self.pool.reserve(sequence.table, len(sequence.tokens) + len(drafts)):
                parts[i] = Part(sequence, start, size, drafts)
        return tuple(parts)

    def _drafts(self, sequence: Sequence, rows: int) -> tuple[int, ...]:
        """Return the drafts after the known tokens of a sequence in a step of some sequences."""
        room = min(MAX_DRAFT, MAX_DRAFT_ROWS // rows - 1, sequence.limit - len(sequence.tokens) - 1)
        if sequence.draft is None or room < 1 or len(sequence.tokens) < sequence.draft_from:
            return ()
        return tuple(sequence.draft(sequence.tokens, room))

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks of a sequence, and let it wait before the others with its key."""
        (self._decoding if sequence in self._decoding else self._prefilling).remove(sequence)
        self.pool.release(sequence.table)
        sequence.ahead = 0
        self._waiting.setdefault(sequence.request.key, deque()).appendleft(sequence)
        self.preemptions += 1

    def check(self) -> None:
        """Raise RuntimeError if a block is lost or counted twice."""
        self.pool.check(sequence.table for sequence in self.rows)


def _mean(old: float, new: float) -> float:
    """Return the running mean of the last few values; ``old`` is 0 before the first."""
    return new if old == 0 else 0.8 * old + 0.2 * new
