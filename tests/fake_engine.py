# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: its runner derives the next token from all earlier ones, and checks the cache's blocks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupy_awq.check import HOST
from cupy_awq.llm import Engine, LanguageModel, Request, TokenChoice
from cupy_awq.llm.decoder.block_pool import BLOCK, DUMMY
from cupy_awq.llm.engine.runner import Launch, Outcome
from cupy_awq.llm.engine.scheduler import Step
from cupy_awq.llm.text.tokenizer import Tokenizer
from tests import llm_models

STOP = 258
"""The token id that ends a completion."""


def next_token(tokens: Sequence[int], choice: int) -> int:
    """Return the token after ``tokens``, which looks random: a byte below 128 or, for one text in 16, `STOP`."""
    digest = zlib.crc32(np.array([choice, *tokens], np.int32).tobytes())
    return STOP if digest % 16 == 0 else (digest >> 8) % 128


def completion(request: Request, choice: int = 0) -> list[int]:
    """Return the tokens of completion number ``choice`` of a request, as an engine must generate them."""
    tokens, start = list(request.prompt), len(request.prompt)
    stops = () if request.ignore_stop_tokens else (STOP,)
    while len(tokens) < start + request.max_tokens and not (len(tokens) > start and tokens[-1] in stops):
        tokens.append(next_token(tokens, choice))
    return tokens[start:]


class FakeRunner:
    """A runner whose cache blocks hold tokens instead of keys and values.

    It raises AssertionError if the blocks of a sequence do not hold all its earlier tokens. If ``is_ahead``, steps
    are launched ahead, and the runner knows the tokens that they chose before its caller does.
    """

    max_chunk = 128

    def __init__(self, blocks: int, is_ahead: bool = False) -> None:
        self.blocks, self.max_tokens = blocks, min(1000, blocks * BLOCK)
        self.memory = np.full((1 + blocks, BLOCK), -1)
        self.steps: list[Step] = []
        self.is_ahead, self.newest = is_ahead, dict[Any, int]()
        self.before_step = lambda step: None

    def launch(self, step: Step, samplers: Mapping[Any, Any]) -> Launch:
        self.before_step(step)
        self.steps.append(step)
        outcomes = []
        known = {}
        for part in step.parts:
            sequence, blocks = part.sequence, np.array(part.sequence.table.blocks)
            assert DUMMY not in blocks
            known[sequence] = tokens = list(sequence.tokens)
            if part.start == len(tokens):
                tokens.append(self.newest[sequence])
            new = [*tokens[part.start : part.start + part.size], *part.drafts]
            places = np.arange(part.start, part.start + len(new))
            self.memory[blocks[places // BLOCK], places % BLOCK] = new
        # All parts write before any reads: in a forward pass the rows of a batch see each other's keys and values.
        for part in step.parts:
            sequence, end = part.sequence, part.start + part.size
            held = self.memory[part.sequence.table.blocks].reshape(-1)[:end]
            tokens = known[sequence]
            assert held.tolist() == tokens[:end]
            chosen: list[TokenChoice] = []
            for draft in [*part.drafts, -1] if end == len(tokens) else ():
                chosen.append(TokenChoice(next_token(tokens, sequence.choice)))
                tokens.append(chosen[-1].token)
                self.newest[sequence] = chosen[-1].token
                if chosen[-1].token != draft:
                    break
            outcomes.append(Outcome(chosen))
        return Launch(lambda: outcomes, self.is_ahead)

    def wait(self) -> None:
        pass


def make_model() -> LanguageModel:
    """Return a model of 1,000 tokens of context with a tokenizer and no layers."""
    config = SimpleNamespace(vocab=llm_models.VOCAB, context=1000)
    ops = SimpleNamespace(prefill_chunk=128, device_index=HOST)
    tokenizer = Tokenizer(llm_models.tokenizer(), llm_models.TEMPLATE, {})
    return LanguageModel(config, SimpleNamespace(ops=ops), tokenizer, [STOP])


def make_engine(blocks: int = 40, is_ahead: bool = False, **options: Any) -> tuple[Engine, FakeRunner]:
    """Return an engine with a fake runner, and the runner; the context is 1,000 tokens."""
    runner = FakeRunner(blocks, is_ahead)
    return Engine(make_model(), make_runner=lambda *_, **__: runner, **options), runner
