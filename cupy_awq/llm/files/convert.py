# SPDX-License-Identifier: Apache-2.0
"""Conversion of checkpoints from one format to another, which rounds only the dense tensors of ak48 files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from cupy_awq import atomic, checkpoint
from cupy_awq.checkpoint import Contents, Tensor, write
from cupy_awq.checkpoint.files import read_object
from cupy_awq.checkpoint.gguf import container
from cupy_awq.checkpoint.gguf.write import write_gguf
from cupy_awq.llm.files import ak48, gguf_metadata, hugging_face
from cupy_awq.llm.files.model_files import Progress
from cupy_awq.llm.files.readers import locate, read

ROPE_FREQS = "rope_freqs.weight"
"""The name of the GGUF tensor that contains the divisors of the RoPE frequencies."""


def convert(source: str, target: Path, format_name: str, progress: Progress | None = None) -> dict[str, int]:
    """Write a checkpoint in another format, with the same codes, scales and zero points.

    The configuration, the tokenizer and the chat template of a model are also written, but not to an ak48 file.

    Args:
        source: a folder, a file or the name of a packaged model, as in `cupy_awq.llm.read` and `checkpoint.read`.
        target: the file to write for "gguf" and "ak48", else the folder to write, new or empty.
        format_name: "autoawq", "compressed-tensors", "gptq", "gguf" or "ak48".
        progress: a callback (number of finished steps, total number of steps), or None.

    Returns:
        What reading the source has rounded, as in `checkpoint.Summary.roundings`; {} for an ak48 source.

    Raises:
        CheckpointError: the source is damaged or not supported. It is a subclass of ValueError.
        OSError: a file cannot be read or written, or the folder is not new or empty.
        ValueError: the format cannot represent the model; the message names the module and the reason. In this case no
            file remains.
    """
    path = locate(source)
    if format_name == "ak48":
        roundings = {} if path.suffix == ".ak48" else checkpoint.summarize(checkpoint.read(path)).roundings
        ak48.write(read(path), target, progress)
        return roundings
    if format_name == "gguf":
        contents, metadata = _describe(path)
        write_gguf(target, contents, metadata, progress)
    else:
        contents = _write_folder(path, target, format_name, progress)
    return checkpoint.summarize(contents).roundings


def _describe(path: Path) -> tuple[Contents, dict[str, Any]]:
    """Return the contents and the GGUF metadata of a checkpoint. A checkpoint that is not a model has no metadata."""
    contents = checkpoint.read(path)
    if path.suffix == ".gguf":
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


FILE_FIELDS = ("general.alignment", "general.file_type")
"""The metadata fields that describe the GGUF file and not the model, so they are not copied."""


def _is_model(path: Path) -> bool:
    """Return whether a checkpoint is a language model: config.json or the GGUF metadata name its architecture."""
    if path.suffix == ".gguf":
        return "general.architecture" in container.read(path)[0]
    return (path / "config.json").is_file() and "model_type" in read_object(path / "config.json")


def _write_folder(path: Path, folder: Path, format_name: str, progress: Progress | None) -> Contents:
    """Write a folder and return the contents of the source."""
    folder = atomic.new_folder(folder)
    contents = checkpoint.read(path)
    part = atomic.name_aside(folder)
    part.mkdir(parents=True)
    try:
        if path.is_dir():
            write.copy_model_files(path, part)
        elif _is_model(path):
            hugging_face.write_settings(read(path), part)
        write.save(part, contents, format_name, progress=progress)
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return contents
