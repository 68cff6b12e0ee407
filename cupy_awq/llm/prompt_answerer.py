# SPDX-License-Identifier: Apache-2.0
"""`PromptAnswerer`: batches of prompts through an engine, as Ray Data and `generate --input` run them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.llm.assemble import load
from cupy_awq.llm.engine.engine import Engine
from cupy_awq.llm.engine.generation import Generation
from cupy_awq.llm.engine.request import QueueFullError, Request

PROMPT_OPTIONS = ("raw", "special_tokens", "template_args")
"""The options of `Engine.submit` that are no fields of `Request`."""


class PromptAnswerer:
    """A function of batches that answers their prompts, for `ray.data.Dataset.map_batches`.

    An actor loads the model once and keeps it; Ray gives each its GPU. The arguments can be pickled, so they go into
    ``fn_constructor_kwargs``.

    Args:
        model: a path or name, as for `cupy_awq.llm.load`.
        device: as for `cupy_awq.llm.load`.
        options: ``raw``, ``special_tokens`` and ``template_args`` as for `LanguageModel.generate`, and fields of
            `cupy_awq.llm.Request`, such as ``max_tokens``.

    Raises:
        TypeError, ValueError: an option is unknown or invalid.
        CheckpointError, OSError, ValueError: the model cannot be loaded, as by `cupy_awq.llm.load`.

    Example::

        answers = ray.data.read_json("prompts.jsonl").map_batches(
            cupy_awq.llm.PromptAnswerer,
            fn_constructor_kwargs={"model": "Qwen3-8B-AWQ", "max_tokens": 256},
            num_gpus=1, concurrency=8, batch_size=128,
        )
    """

    def __init__(self, model: str, device: str | None = None, **options: Any) -> None:
        request = Request((0,), **{name: value for name, value in options.items() if name not in PROMPT_OPTIONS})
        if request.n > 1:
            raise ValueError(f"n: expected 1, as a prompt has one answer, got {request.n}")
        self._engine, self._options = Engine(load(model, device=device)), options

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a batch and "answer", a JSON object for each text or list of messages in "prompt".

        The object has "text", "reason" and "tokens" or, for a prompt that is invalid, "error".
        """
        return {**batch, "answer": self.answers(batch["prompt"])}

    def answers(self, prompts: Iterable[Any]) -> npt.NDArray[np.object_]:
        """Return the answer to each prompt, a JSON object as text; see `__call__`."""
        found = answer_all(self._engine, prompts, **self._options)
        return np.array([json.dumps(answer) for answer in found], object)


def answer_all(engine: Engine, prompts: Iterable[Any], **options: Any) -> Iterator[dict[str, Any]]:
    """Yield an answer per prompt, in order, as `PromptAnswerer` describes it.

    The engine has up to twice as many requests as it runs at a time, or as many as its queue has room for.

    Raises:
        QueueFullError: the engine has failed or was closed. Prompts without an answer have none then.
    """
    waiting: deque[Generation | str] = deque()
    for prompt in prompts:
        while len(waiting) == 2 * engine.max_rows or not _submit(engine, prompt, options, waiting):
            yield _answer(engine, waiting.popleft())
    while waiting:
        yield _answer(engine, waiting.popleft())


def _submit(engine: Engine, prompt: Any, options: Mapping[str, Any], waiting: deque[Generation | str]) -> bool:
    """Append the generation of a prompt, or an error; return False if the queue is full of earlier prompts."""
    try:
        waiting.append(engine.submit(prompt, **options))
    except (TypeError, ValueError) as error:
        waiting.append(str(error))
    except QueueFullError:
        if not waiting:
            raise
        return False
    return True


def _answer(engine: Engine, generation: Generation | str) -> dict[str, Any]:
    if isinstance(generation, str):
        return {"error": generation}
    try:
        (completion,) = generation.result()
    except RuntimeError as error:
        if engine.error is not None:
            raise QueueFullError(str(error)) from engine.error
        return {"error": str(error)}
    return {"text": completion.text, "reason": completion.reason, "tokens": len(completion.tokens)}
