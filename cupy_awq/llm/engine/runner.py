# SPDX-License-Identifier: Apache-2.0
"""`PagedRunner` and `SlotRunner`: a step of the scheduler to tokens, by the model and its cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cupy_awq.llm.decoder.block_pool import BLOCK, count_blocks
from cupy_awq.llm.decoder.model import Model
from cupy_awq.llm.decoder.states import Cache
from cupy_awq.llm.engine import scheduler
from cupy_awq.llm.engine.request import TokenChoice
from cupy_awq.llm.engine.row_sampler import RowSampler
from cupy_awq.llm.engine.scheduler import Part, Step


class Outcome(NamedTuple):
    """The tokens that a part of a step chose, none if it does not end its sequence, and an error or ""."""

    tokens: Sequence[TokenChoice] = ()
    error: str = ""


class Runner(Protocol):
    """The part of an engine that runs its steps.

    Attributes:
        blocks: the number of blocks for sequences.
        max_tokens: the largest number of tokens of a sequence.
        is_paged: whether sequences can share blocks, give them up, and have drafts.
    """

    blocks: int
    max_tokens: int
    is_paged: bool

    def run(self, step: Step, samplers: Mapping[scheduler.Sequence, RowSampler]) -> list[Outcome]:
        """Run a step and return the outcome of each part. An error of one sequence is part of its outcome."""
        ...


class PagedRunner:
    """A runner on the CPU: one forward pass over the rows of all sequences, then the choice of tokens row by row.

    With a model that was loaded with ``batch_invariant=True``, GEMMs and attention compute each row separately, so the
    tokens of a sequence do not depend on the others, on chunks, on cached prefixes or on drafts.

    Args:
        model: the model.
        context: the largest number of tokens of a sequence.
        cache_tokens: the number of tokens of all sequences, or None for those that fit.
    """

    is_paged = True

    def __init__(self, model: Model, context: int, cache_tokens: int | None) -> None:
        self._model, self._pages = model, model.ops.make_pages(cache_tokens, context)
        self.blocks = self._pages.blocks
        self.max_tokens = min(context, self.blocks * BLOCK)

    def run(self, step: Step, samplers: Mapping[scheduler.Sequence, RowSampler]) -> list[Outcome]:
        """Run a step and return the outcome of each part."""
        tokens: list[int] = []
        rows: list[int] = []
        for part in step.parts:
            tokens += part.tokens
            if part.is_last:
                rows += range(len(tokens) - len(part.drafts) - 1, len(tokens))
        batch = self._pages.make_rows(
            [(part.start, part.size + len(part.drafts), part.sequence.table.blocks) for part in step.parts]
        )
        logits = self._model.ops.to_numpy(self._model.row_logits(batch, tokens, rows))
        outcomes = []
        for part in step.parts:
            count = 1 + len(part.drafts) if part.is_last else 0
            outcomes.append(_choose(part, logits[:count], samplers[part.sequence]))
            logits = logits[count:]
        return outcomes


class SlotRunner:
    """A runner for a back end without paged attention: each sequence has a slot, a sequence of one contiguous cache.

    Prompts run one after the other. A decode step runs a token in every slot up to the last one in use: the token of a
    slot that does not decode is written after the tokens of the slot, where the next token overwrites it.

    Args:
        model: the model.
        context: the largest number of tokens of a sequence.
        slots: the number of slots.
        cache_tokens: the number of tokens of all slots, or None for those that fit, up to the context in each slot.
    """

    is_paged = False

    def __init__(self, model: Model, context: int, slots: int, cache_tokens: int | None) -> None:
        self._model = model
        self.max_tokens = context if cache_tokens is None else min(context, cache_tokens // slots)
        self._cache = self._allocate(slots, is_fixed=cache_tokens is not None)
        # One more block per slot than needed: admission keeps them free, so no sequence is ever preempted.
        self.blocks = slots * (1 + count_blocks(self.max_tokens))
        self._slots: dict[scheduler.Sequence, int] = {}
        self._free = list(range(slots))

    def _allocate(self, slots: int, *, is_fixed: bool) -> Cache:
        """Return the cache; unless its size ``is_fixed``, halve it until it fits into memory."""
        while True:
            try:
                return self._model.ops.make_cache(slots, self.max_tokens)
            except ValueError:
                if is_fixed or self.max_tokens < 2 * BLOCK:
                    raise
                self.max_tokens //= 2

    def run(self, step: Step, samplers: Mapping[scheduler.Sequence, RowSampler]) -> list[Outcome]:
        """Run a step and return the outcome of each part."""
        for sequence in self._slots.keys() - samplers.keys():
            slot = self._slots.pop(sequence)
            self._cache.lengths[slot] = 0
            self._cache.tokens[slot].clear()
            self._free.append(slot)
        if step.is_prompt:
            return [_choose(part, self._run_prompt(part), samplers[part.sequence]) for part in step.parts]
        logits = self._decode(step)
        slots = (self._slots[part.sequence] for part in step.parts)
        rows = [logits[slot : slot + 1] for slot in slots]
        return [_choose(part, row, samplers[part.sequence]) for part, row in zip(step.parts, rows, strict=True)]

    def _run_prompt(self, part: Part) -> npt.NDArray[np.float32]:
        """Run a part of a prompt; return the logits [1, V] of its last token, or [0] if the prompt goes on."""
        if part.sequence not in self._slots:
            self._free.sort(reverse=True)
            self._slots[part.sequence] = self._free.pop()
        slot = self._slots[part.sequence]
        logits = self._model.prompt_logits(self._cache, slot, part.tokens)
        return self._model.ops.to_numpy(logits[None]) if part.is_last else np.empty(0, np.float32)

    def _decode(self, step: Step) -> npt.NDArray[np.float32]:
        """Run the newest token of all slots up to the last in use; return their logits [slots, V]."""
        count = 1 + max(self._slots.values())
        tokens, advance = [0] * count, [0] * count
        for part in step.parts:
            slot = self._slots[part.sequence]
            tokens[slot], advance[slot] = part.tokens[0], 1
            self._cache.tokens[slot].append(part.tokens[0])
        view = self._cache.select(slice(count))
        logits = self._model.step_logits(view, self._model.ops.prepare_tokens(tokens))
        view.lengths[:] += self._model.ops.prepare_tokens(advance).astype(np.int32)
        return self._model.ops.to_numpy(logits)


def _choose(part: Part, logits: npt.NDArray[np.float32], sampler: RowSampler) -> Outcome:
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
        return Outcome(chosen, str(error))
    return Outcome(chosen)
