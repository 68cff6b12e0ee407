# SPDX-License-Identifier: Apache-2.0
"""The files of a model's folder beside its weights, such as the tokenizer, and their copy to a new folder."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from cupy_awq import atomic
from cupy_awq.checkpoint import replacement
from cupy_awq.checkpoint.files import MAX_JSON_BYTES, CheckpointError, read_small_file
from cupy_awq.checkpoint.gguf.container import PART_NAME

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
    "NOTICE.txt",
)
"""The names of the files that `copy_files` copies."""

BLOBS = "blobs"
"""The folder of the Hub's cache that holds the files: ``snapshots/<revision>`` has links to ``../../blobs/<hash>``."""


def list_files(folder: Path) -> list[tuple[str, Path]]:
    """Return (name, path) of each file of `COPIED` that the folder has.

    A link is followed to a file of the same folder, or of the folder "blobs" beside it or one level above, as in the
    cache of the Hugging Face Hub. A link to any other file could make a copy of a file that the model must not see.

    Raises:
        CheckpointError: a file is too large, no regular file, or a link that leads elsewhere.
    """
    root = folder.resolve()
    allowed = (root, root / replacement.JOURNAL / replacement.NEW, root.parent / BLOBS, root.parent.parent / BLOBS)
    found = []
    for name in COPIED:
        file = replacement.find(folder, name)
        if not os.path.lexists(file):
            continue
        path = file.resolve()
        if path.parent not in allowed:
            raise CheckpointError(f"{file}: expected a file of the folder, got a link that leads out of it")
        if not path.is_file():
            raise CheckpointError(f"{file}: expected a regular file, got another kind")
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise CheckpointError(f"{file}: expected at most {MAX_JSON_BYTES} bytes, got {size}")
        found.append((name, path))
    return found


def copy_files(source: Path, folder: Path) -> None:
    """Copy the files of `COPIED` from a model's folder, each with the permissions of the original.

    Raises:
        CheckpointError: `list_files` raises it.
        OSError: a file cannot be read or written.
    """
    for name, path in list_files(source):
        data = read_small_file(path)
        with atomic.create(folder / name, mode=path.stat().st_mode & 0o666) as file:
            file.write(data)


def list_weights(path: Path) -> Sequence[Path]:
    """Return the files of weights of a checkpoint, which are as private as a copy of them should be."""
    if not path.is_dir():
        part = PART_NAME.fullmatch(path.name)
        return [path] if part is None else list(path.parent.glob(f"{glob.escape(part[1])}-*-of-{part[3]}.gguf"))
    return [file for file in path.iterdir() if file.suffix in (".safetensors", ".gguf") and file.is_file()]
