# SPDX-License-Identifier: Apache-2.0
"""`generate --input FILE --output FILE`: many prompts through engines, which can be stopped and started again."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from cupy_awq.checkpoint.model_path import locate
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.llm import Engine, LanguageModel, Request, Sampling
from cupy_awq.llm.extra import import_extra
from cupy_awq.llm.prompt_answerer import PromptAnswerer, answer_all
from cupy_awq.tools.progress import show_bar

OPTIONS = {each.name for kind in (Request, Sampling) for each in fields(kind)} - {"prompt", "key", "continues"}
"""The options that a line of prompts cannot set: they would be ignored like other fields that are not known."""

BEGIN = b'{"id": '
"""How each line of answers begins."""

ACTOR_BATCHES, MAX_BATCH = 4, 128
"""The least batches per actor, so that all actors end at about the same time, and the most prompts per batch."""


def run(load: Callable[[], LanguageModel], source: Path, target: Path, options: dict[str, Any]) -> int:
    """Answer each prompt of a file once, in its order; return the number of prompts without an answer.

    A line of ``source`` is blank or an object with a "prompt", a text or messages, and an "id", a text or an integer,
    unless the number of the line is enough. A line of ``target`` has the id, "text", "reason" and "tokens" or, for a
    prompt that is invalid, "error". A prompt whose id ``target`` has already is not answered again.

    Args:
        load: a function that returns the model, which is called when the files are known to be valid.
        source, target: the files, in UTF-8; ``target`` is appended to, and may be a pipe or a device.
        options: "raw" and fields of `cupy_awq.llm.Request`, such as "max_tokens".

    Raises:
        ValueError: a line of ``source`` is no such object, two have the same id, or ``target`` is a file with other
            lines; it then stays as it is.
        OSError: a file cannot be read or written.
    """
    prompts = _read_missing(source, target)
    with Engine(load()) as engine:
        return _write(target, prompts, answer_all(engine, (prompt for _, prompt in prompts), **options))


def run_on_ray(
    address: str,
    actors: int | None,
    model: str,
    device: str | None,
    source: Path,
    target: Path,
    options: dict[str, Any],
) -> int:
    """Answer the prompts of a file as `run` does, with actors of a Ray cluster that load the model each.

    An actor that dies is started again, and its batch with it.

    Args:
        address: the address of the cluster, "auto" for the one of this machine, or "local" to start one.
        actors: the number of actors; by default one per GPU of the cluster, or one without.
        model, device: the model, as for `PromptAnswerer`; every node needs it, and cupy_awq. An actor on a GPU takes
            one whole GPU.
        source, target, options: as for `run`.

    Raises:
        ValueError, OSError: as by `run`; there is no such model, Ray is not installed, or there is no cluster at the
            address.
    """
    ray, data = import_extra("ray"), import_extra("ray.data")
    prompts = _read_missing(source, target)
    if not prompts:
        return 0
    locate(model)
    ray.init(address, log_to_driver=False, logging_level="error")
    try:
        gpus = 0 if device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
        count = actors or max(1, gpus)
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        lines = [{"line": json.dumps(prompt)} for _, prompt in prompts]
        batches = max(count * ACTOR_BATCHES, ceil_div(len(prompts), MAX_BATCH))
        answered = data.from_items(lines, override_num_blocks=min(batches, len(lines))).map_batches(
            _LineAnswerer,
            fn_constructor_kwargs={"model": model, "device": device, **options},
            batch_size=None,
            batch_format="numpy",
            concurrency=count,
            num_gpus=1 if gpus else 0,
        )
        return _write(target, prompts, (json.loads(row["answer"]) for row in answered.iter_rows()))
    finally:
        ray.shutdown()


class _LineAnswerer(PromptAnswerer):
    """A `PromptAnswerer` for prompts in JSON: a column can then hold texts and messages."""

    def __call__(self, batch: Any) -> dict[str, Any]:
        return {**batch, "answer": self.answers(map(json.loads, batch["line"]))}


def _write(target: Path, prompts: list[tuple[Any, Any]], answers: Iterable[dict[str, Any]]) -> int:
    """Append an answer per prompt to a file, with a progress bar; return the number of errors."""
    failed = 0
    with open(target, "a", encoding="utf-8", errors="backslashreplace") as out:  # lone surrogates become JSON's escapes
        for count, ((key, _), answer) in enumerate(zip(prompts, answers, strict=True), 1):
            failed += "error" in answer
            out.write(json.dumps({"id": key, **answer}, ensure_ascii=False) + "\n")
            out.flush()
            if sys.stderr.isatty():
                show_bar(count, len(prompts))
    return failed


def _read_missing(source: Path, target: Path) -> list[tuple[Any, Any]]:
    """Return the id and the prompt of each line of ``source`` whose answer ``target`` lacks.

    Once both files are known to be valid, a last line of ``target`` that was not written to its end is cut off.
    """
    if not target.parent.is_dir():
        raise ValueError(f"{target}: expected a file in a folder that exists, got none")
    data = target.read_bytes() if target.is_file() else b""  # reading a pipe or a device back could last forever
    end = data.rfind(b"\n") + 1
    done = {_read_answer(target, line) for line in _read_lines(target, data[:end])}
    last = data[end:]
    if not last.startswith(BEGIN[: len(last)]):
        raise ValueError(f"{target}: expected answers of an earlier run, got another last line")
    with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        _read_answer(target, (data.count(b"\n") + 1, json.loads(last)))
    prompts = [(key, prompt) for key, prompt in _read_prompts(source) if key not in done]
    if last:
        os.truncate(target, end)
    return prompts


def _read_answer(path: Path, line: tuple[int, Any]) -> Any:
    """Return the id of an answer of a file. Raises ValueError if a line is none."""
    number, entry = line
    if not (isinstance(entry, dict) and type(entry.get("id")) in (str, int) and {"text", "error"} & entry.keys()):
        expected = "an answer of an earlier run, an object with an id and a text or an error"
        raise ValueError(f"{path}: line {number}: expected {expected}, got {_describe(entry)}")
    return entry["id"]


def _read_prompts(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the id and the prompt of each line of a file of prompts."""
    seen: dict[Any, int] = {}
    for number, entry in _read_lines(path, path.read_bytes()):
        where = f"{path}: line {number}"
        if not isinstance(entry, dict) or "prompt" not in entry:
            raise ValueError(f"{where}: expected an object with a prompt, got {_describe(entry)}")
        if options := sorted(entry.keys() & OPTIONS):
            raise ValueError(f"{where}: {options[0]}: expected an option of the command, for all prompts, got a field")
        key = entry.get("id", number)
        if type(key) not in (str, int):
            raise ValueError(f"{where}: id: expected a text or an integer, got {type(key).__name__}")
        if key in seen:
            reason = "" if "id" in entry else ", the number of the line, as it has no id"
            message = f"expected an id of its own, got {key!r:.80}{reason}, which line {seen[key]} has"
            raise ValueError(f"{where}: {message}")
        seen[key] = number
        yield key, entry["prompt"]


def _read_lines(path: Path, data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line of JSON that is not blank."""
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}: line {number}, column {error.colno}: expected JSON, got {error.msg!r}"
                ) from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}: line {number}: expected JSON in UTF-8, got {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name}, which JSON does not have")


def _describe(entry: Any) -> str:
    """Return the type of a value or, of an object, its names."""
    return f"one with {', '.join(entry) or 'nothing'}"[:80] if isinstance(entry, dict) else type(entry).__name__
