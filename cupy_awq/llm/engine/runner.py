# SPDX-License-Identifier: Apache-2.0
"""`PagedRunner`: a step of the scheduler to tokens, by the model and its pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cupy_awq.llm.decoder.model import Model
from cupy_awq.llm.decoder.states import Pages
from cupy_awq.llm.engine import scheduler
from cupy_awq.llm.engine.request import TokenChoice
from cupy_awq.llm.engine.row_sampler import RowSampler
from cupy_awq.llm.engine.scheduler import Part, Step


class Outcome(NamedTuple):
    """The tokens that a part of a step chose, none if it does not end its sequence, and an error or ""."""

    tokens: Sequence[TokenChoice] = ()
    error: str = ""


class Runner(Protocol):
    """The part of an engine that runs its steps."""

    def run(self, step: Step, samplers: Mapping[scheduler.Sequence, RowSampler]) -> list[Outcome]:
        """Run a step and return the outcome of each part. An error of one sequence is part of its outcome."""
        ...


class PagedRunner:
    """A runner on the CPU: one forward pass over the rows of all sequences, then the choice of tokens row by row.

    With a model that was loaded with ``batch_invariant=True``, GEMMs and attention compute each row separately, so the
    tokens of a sequence do not depend on the others, on chunks, on cached prefixes or on drafts.
    """

    def __init__(self, model: Model, pages: Pages) -> None:
        self._model, self._pages = model, pages

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
