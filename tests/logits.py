# SPDX-License-Identifier: Apache-2.0
"""The logits of a whole text, which tests compare, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupy_awq.llm.decoder.backend import ChoiceOptions
from cupy_awq.llm.decoder.block_pool import BLOCK, DUMMY, count_blocks
from cupy_awq.llm.decoder.model import Model
from cupy_awq.llm.decoder.sampling import Offsets, Sampling


def logits_of(model: Model, ids: Sequence[int], *sizes: int) -> np.ndarray:
    """Return the logits [len(ids), V] of a text that runs in parts of the given sizes, what is left in one more.

    On a GPU, a part of one token is a decode step, unless it is the first.
    """
    ops, blocks = model.ops, list(range(DUMMY + 1, DUMMY + 1 + count_blocks(len(ids))))
    ends = np.cumsum([*sizes, max(len(ids) - sum(sizes), 0)]).tolist()
    parts = [(start, list(ids[start:end])) for start, end in zip([0, *ends[:-1]], ends, strict=True) if start < end]
    if ops.has_pages:
        pages, found = ops.make_pages(len(ids), len(ids)), []
        for start, part in parts:
            hidden = model.forward(ops.prepare_tokens(part)[None], pages.make_rows([(start, len(part), blocks)]))
            found.append(ops.to_numpy(model.logits(hidden))[0])
        return np.concatenate(found)
    steps, found = ops.make_steps(model.forward, model.head, 1, len(ids), len(blocks) * BLOCK), []
    with steps.stream:
        steps.assign(1, Sampling(), 0, [], Offsets({}, 0, 0))
        steps.place(1, blocks)
        for start, part in parts:
            if start and len(part) == 1:
                at = start // BLOCK
                row = 1, start, blocks[max(at - 1, 0)], blocks[at], part[0]
                logits, _ = steps.decode([row], ChoiceOptions())
            else:
                logits = model.logits(steps.prompt([(1, start, part)]))
            found.append(ops.to_numpy(logits))
    return np.concatenate(found)
