# SPDX-License-Identifier: Apache-2.0
"""Conversion of checkpoints from one format to another, exactly or, on request, with 4-bit values rounded.

The result is opened before it gets its name, so that no file is left that the readers of this package would reject.
"""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cupy_awq import atomic, checkpoint
from cupy_awq.checkpoint import Contents, Module, Tensor, model_folder, replacement, write
from cupy_awq.checkpoint.files import read_object
from cupy_awq.checkpoint.gguf import container
from cupy_awq.checkpoint.gguf.write import write_gguf
from cupy_awq.checkpoint.model_path import locate
from cupy_awq.llm.files import ak48, gguf_metadata, hugging_face
from cupy_awq.llm.files.model_files import Array, ModelFiles, Progress
from cupy_awq.llm.files.readers import is_ak48, read, read_contents
from cupy_awq.llm.files.rounding import Rounder

_Result = TypeVar("_Result")

ROPE_FREQS = "rope_freqs.weight"
"""The name of the GGUF tensor that contains the divisors of the RoPE frequencies."""

FILE_FIELDS = ("general.alignment", "general.file_type")
"""The metadata fields that describe the GGUF file and not the model, so they are not copied."""


class Converted(NamedTuple):
    """The result of `convert`: how it rounded weights, and the errors that this added."""

    roundings: dict[str, int]
    """The roundings of reading the source, as in `checkpoint.Summary.roundings`."""
    errors: dict[str, float]
    """The relative RMS error that ``rounds`` has added, by module; {} if all are 0."""


def convert(
    source: str,
    target: Path,
    format_name: str,
    progress: Progress | None = None,
    *,
    force: bool = False,
    rounds: bool = False,
) -> Converted:
    """Write a checkpoint in another format, with the same codes, scales and zero points unless ``rounds``.

    The configuration, the tokenizer and the chat template of a model are also written, but not to an ak48 file. Of a
    folder, the files of `model_folder.COPIED` are copied. No file has a permission that its source does not have.

    Args:
        source: a folder, a file or the name of a packaged model, as in `readers.read_contents`.
        target: the file to write for "gguf" and "ak48", else the folder to write, new or empty.
        format_name: "autoawq", "compressed-tensors", "gptq", "gguf" or "ak48".
        progress: a callback (number of finished steps, total number of steps), or None.
        force: True to replace the file ``target`` if it exists.
        rounds: True to round modules that the format cannot hold, as `rounding.Rounder` does.

    Raises:
        CheckpointError: the source is damaged or not supported. It is a subclass of ValueError.
        OSError: a file cannot be read or written; it exists and ``force`` is False; or the folder is not new or empty.
        ValueError: the format cannot represent the model, so that the result would not be the same when it is read; the
            message names the module and the reason. In this case no file remains, and an existing one is kept.
    """
    path = locate(source)
    rounder = Rounder(format_name) if rounds else None
    if format_name in ("gguf", "ak48") and not force and target.exists():
        raise FileExistsError(f"{target}: expected a new file, got an existing one; --force (force=True) replaces it")
    mode = atomic.common_mode(model_folder.list_weights(path))
    if format_name == "ak48":
        contents, files = read_contents(path), read(path)
        if rounder is not None:
            files = replace(files, tensors={name: partial(_read, name, files, rounder) for name in files.tensors})
        ak48.write(files, target, progress, mode=mode, check=lambda file: _open(file, target, ak48.read))
    elif format_name == "gguf":
        contents, metadata = _describe(path)
        contents = contents if rounder is None else rounder.apply(contents)
        check = partial(_check_result, target=target, path=path, contents=contents)
        write_gguf(target, contents, metadata, progress, mode=mode, check=check)
    else:
        contents = _write_folder(path, target, format_name, progress, mode, rounder)
    return Converted(checkpoint.summarize(contents).roundings, rounder.errors if rounder else {})


def _read(name: str, files: ModelFiles, rounder: Rounder) -> Module | Array:
    """Read a tensor or a quantized module by name; a module is rounded to what the target format can hold."""
    item = files.tensors[name]()
    return rounder.round(name, item) if isinstance(item, Module) else item


def _describe(path: Path) -> tuple[Contents, dict[str, Any]]:
    """Return the contents and the GGUF metadata of a checkpoint. A checkpoint that is not a model has no metadata."""
    contents = read_contents(path)
    if container.is_gguf(path):
        return contents, {key: value for key, value in container.read(path)[0].items() if key not in FILE_FIELDS}
    if not _is_model(path):
        return contents, {}
    files = read(path)
    hugging_face.check_names(path, contents, files.config)
    metadata, divisors = gguf_metadata.describe_model(files.config)
    metadata |= gguf_metadata.describe_tokenizer(files.load_tokenizer(), files.config.vocab, files.stop_ids)
    if divisors is not None:
        contents = contents.with_tensors({ROPE_FREQS: Tensor(divisors, path)})
    return contents, metadata


def _is_model(path: Path) -> bool:
    """Return whether a checkpoint is a language model: an ak48 file, or its configuration names its architecture."""
    if is_ak48(path):
        return True
    if container.is_gguf(path):
        return "general.architecture" in container.read(path)[0]
    config = replacement.find(path, "config.json")
    return config.is_file() and "model_type" in read_object(config)


def _write_folder(
    path: Path, folder: Path, format_name: str, progress: Progress | None, mode: int, rounder: Rounder | None
) -> Contents:
    """Write a folder, whose files have no permission that ``mode`` lacks, and return the contents to write."""
    folder = atomic.new_folder(folder)
    contents = read_contents(path)
    contents = contents if rounder is None else rounder.apply(contents)
    part = atomic.name_aside(folder)
    part.parent.mkdir(parents=True, exist_ok=True)
    part.mkdir()
    try:
        folder_mode = atomic.hide_folder(part)
        if path.is_dir():
            model_folder.copy_files(path, part)
        elif _is_model(path):
            hugging_face.write_settings(read(path), part)
        copied = {file.name for file in part.iterdir()} if path.is_dir() else set()
        write.save(part, contents, format_name, progress=progress)
        atomic.remove_unfinished(part)
        _check_result(part, target=folder, path=path, contents=contents)
        for file in part.iterdir():
            if file.name not in copied:
                atomic.narrow_mode(file, mode)
        part.chmod(folder_mode & path.stat().st_mode | stat.S_IRWXU if path.is_dir() else folder_mode)
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return contents


def _check_result(result: Path, *, target: Path, path: Path, contents: Contents) -> None:
    """Open a result before it gets its name. Raises ValueError if it is not read as the source is.

    Args:
        result: the temporary file or folder.
        target: the path that the result will get, for error messages.
        path: the path of the source.
        contents: the contents of the source.
    """
    wanted, found = _list_shapes(contents), _list_shapes(_open(result, target, checkpoint.read))
    differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if differing:
        expected, got = wanted.get(differing[0], "no tensor"), found.get(differing[0], "none")
        raise ValueError(f"{target}: {differing[0]!r:.200}: expected {expected} in the result, got {got}")
    try:
        read(path).load_tokenizer()
    except ValueError:
        return  # this package cannot run such a model, so it has no reader to ask
    _open(result, target, lambda file: read(file).load_tokenizer())


def _open(result: Path, target: Path, reader: Callable[[Path], _Result]) -> _Result:
    """Call a reader on a result. Raises ValueError, which names ``target`` instead, if the reader rejects it."""
    try:
        return reader(result)
    except ValueError as error:
        text = str(error).replace(str(result), str(target))
        raise ValueError(
            f"{target}: expected a result that can be read again, got one with the error: {text}"
        ) from None


def _list_shapes(contents: Contents) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by name; a module counts as its dense weight [N, K] and its bias [N]."""
    shapes: dict[str, tuple[int, ...]] = {}
    specs = contents.specs
    for name in contents:
        if not contents.is_module(name):
            shapes[name] = contents.dense_form(name)[0]
            continue
        spec = specs[name]
        shapes[f"{name}.weight"] = spec.n, spec.k
        if spec.bias_dtype is not None:
            shapes[f"{name}.bias"] = (spec.n,)
    return shapes
