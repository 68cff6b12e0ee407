# SPDX-License-Identifier: Apache-2.0
"""`generate --input FILE --output FILE`: many prompts through an engine, which can be stopped and started again."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cupy_awq.llm import Engine, Generation, LanguageModel
from cupy_awq.tools.progress import show_bar


def run(model: LanguageModel, source: Path, target: Path, raw: bool, options: dict[str, Any]) -> int:
    """Answer each prompt of a file once, in its order; return the number of prompts without an answer.

    A line of ``source`` is an object with a "prompt", a text or messages, and an "id" unless the number of the line is
    enough. A line of ``target`` has the id, "text", "reason" and "tokens" or, for a prompt that is invalid, "error". A
    prompt whose id ``target`` has already is not answered again.

    Args:
        model: the model.
        source, target: the files, in UTF-8; ``target`` is appended to.
        raw: as for `LanguageModel.generate`.
        options: the fields of `cupy_awq.llm.Request`, such as ``max_tokens``.

    Raises:
        ValueError: a line of ``source`` is no such object, or two have the same id.
        OSError: a file cannot be read or written.
    """
    done = _read_done(target)
    prompts = deque((key, prompt) for key, prompt in _read_prompts(source) if key not in done)
    total, failed = len(prompts), 0
    waiting: deque[tuple[Any, Generation | str]] = deque()
    with Engine(model) as engine, open(target, "a", encoding="utf-8") as out:
        for count in range(total):
            while prompts and len(waiting) < 2 * engine.max_rows:
                key, prompt = prompts.popleft()
                try:
                    waiting.append((key, engine.submit(prompt, raw=raw, **options)))
                except (TypeError, ValueError) as error:
                    waiting.append((key, str(error)))
            key, generation = waiting.popleft()
            answer = _answer(generation)
            failed += "error" in answer
            out.write(json.dumps({"id": key, **answer}, ensure_ascii=False) + "\n")
            out.flush()
            if sys.stderr.isatty():
                show_bar(count + 1, total)
    return failed


def _answer(generation: Generation | str) -> dict[str, Any]:
    if isinstance(generation, str):
        return {"error": generation}
    try:
        (completion,) = generation.result()
    except RuntimeError as error:
        return {"error": str(error)}
    return {"text": completion.text, "reason": completion.reason, "tokens": len(completion.tokens)}


def _read_prompts(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the id and the prompt of each line of a file of prompts."""
    seen = set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            key, prompt = entry.get("id", number), entry["prompt"]
            is_new = key not in seen
            seen.add(key)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            message = f"{path}: line {number}: expected an object with a prompt, got {type(error).__name__}"
            raise ValueError(message) from None
        if not is_new:
            raise ValueError(f"{path}: line {number}: expected an id of its own, got {key!r:.80} again")
        yield key, prompt


def _read_done(path: Path) -> set[Any]:
    """Return the ids that a file of answers has, and cut off a last line that was not written to its end."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    try:
        return {json.loads(line)["id"] for line in whole.splitlines()}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: expected answers of an earlier run, got {type(error).__name__}") from None
