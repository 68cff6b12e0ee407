# SPDX-License-Identifier: Apache-2.0
"""The folder of unfinished work of `quantize`: what the run depends on, the finished layers, and a lock.

A later run continues the work only if nothing that the layers depend on has changed, and if the folder holds nothing
but files that `quantize` wrote. It deletes no others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cupy_awq import atomic
from cupy_awq.checkpoint import CheckpointError, safetensors
from cupy_awq.checkpoint.files import read_object

SETTINGS, LOCK = "settings.json", "lock"
"""The names of the file of what the run depends on, and of the file that a run locks."""

TEMPORARY = re.compile(r".+\.[0-9a-f]{16}\.part(\.partial)?")
"""The regular expression for the names of temporary files and folders that `atomic.name_aside` returned."""

LAYER = re.compile(r"layer-\d{5}\.(json|safetensors)")
"""The regular expression for the names of the files of a finished layer: its tensors, then its report."""

DIGEST = "digest"
"""The key of a report for the digest of the layer's tensors."""

CHUNK = 1 << 20
"""The number of bytes that are hashed at a time."""

Settings = Mapping[str, Mapping[str, Any]]
"""All that a run depends on, as JSON: the settings, the digests of the source's files and of the calibration texts."""


def name_unfinished(target: Path) -> Path:
    """Return the path of the folder of unfinished work for a folder to write."""
    target = target.resolve()
    return target.with_name(f"{target.name}.partial")


def digest_texts(texts: Iterable[str]) -> str:
    """Return a digest of texts, which also depends on where one text ends and the next begins."""
    found = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()


def digest_files(paths: Mapping[str, Path]) -> dict[str, str]:
    """Return the digest of the contents of each file by name. Raises OSError if a file cannot be read."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(paths, pool.map(_digest_file, paths.values()), strict=True))


def _digest_file(path: Path) -> str:
    found = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            found.update(data)
    return found.hexdigest()


class UnfinishedWork:
    """An open and locked folder of unfinished work.

    Attributes:
        folder: the path of the folder.
        reports: the reports of the finished layers, in order.
    """

    def __init__(self, folder: Path, reports: list[dict[str, Any]]) -> None:
        self.folder = folder
        self.reports = reports

    def tensors_file(self, layer: int) -> Path:
        """Return the path of the file of a layer's tensors."""
        return self.folder / f"layer-{layer:05}.safetensors"

    def save_layer(self, tensors: Mapping[str, Any], report: dict[str, Any]) -> None:
        """Write the next layer's tensors and then its report, whose existence marks the layer as finished."""
        file = self.tensors_file(len(self.reports))
        safetensors.write(file, tensors)
        _write_json(file.with_suffix(".json"), {**report, DIGEST: _digest_file(file)})
        self.reports.append(report)

    def make_folder(self, name: str) -> Path:
        """Return the path of a new folder, which does not exist yet and is deleted with the work."""
        return atomic.name_aside(self.folder / name)


@contextlib.contextmanager
def open_work(folder: Path, settings: Settings, *, resume: bool) -> Iterator[UnfinishedWork]:
    """Create or reopen a folder of unfinished work and lock it.

    At the end of the block the folder is deleted; after an error it is kept if it has a finished layer.

    Args:
        folder: the path of the folder. Only its owner can open it.
        settings: what the layers depend on.
        resume: True to continue work if the folder exists.

    Raises:
        BlockingIOError: another run is at work in the folder.
        FileExistsError: the folder exists and ``resume`` is False, or it holds files that `quantize` did not write.
        OSError: a file cannot be read or written.
        ValueError: the work depends on other settings; the message lists the differences.
    """
    exists = os.path.lexists(folder)
    if exists and not resume:
        raise FileExistsError(f"{folder}: expected no unfinished work, got some: resume it or delete the folder")
    if exists:
        _check_names(folder)
    else:
        _create(folder, settings)
    try:
        with atomic.lock(folder / LOCK):
            _check_names(folder)
            _check_settings(folder, read_object(folder / SETTINGS), settings)
            _delete(folder, TEMPORARY.fullmatch)
            work = UnfinishedWork(folder, _read_reports(folder))
            try:
                yield work
            except BaseException:
                with contextlib.suppress(OSError):
                    _delete(folder, TEMPORARY.fullmatch if work.reports else _is_own)
                raise
            _delete(folder, _is_own)
    finally:
        if not (folder / SETTINGS).is_file():
            with contextlib.suppress(OSError):  # keep the folder if another file has appeared in it
                (folder / LOCK).unlink()
                folder.rmdir()


def _create(folder: Path, settings: Settings) -> None:
    """Create the folder with its settings by one rename, so that a kill leaves no folder without settings."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = atomic.name_aside(folder)
    part.mkdir(0o700)
    try:
        _write_json(part / SETTINGS, settings)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _is_own(name: str) -> bool:
    return name in (SETTINGS, LOCK) or any(form.fullmatch(name) for form in (LAYER, TEMPORARY))


def _check_names(folder: Path) -> None:
    """Raise FileExistsError unless a folder holds files that `quantize` wrote and nothing else."""
    if folder.is_symlink() or not folder.is_dir():
        raise FileExistsError(f"{folder}: expected a folder of unfinished work, got another kind of file")
    paths = list(folder.iterdir())
    for path in paths:
        is_temporary = TEMPORARY.fullmatch(path.name) is not None
        if not _is_own(path.name) or path.is_symlink() or not (path.is_file() or is_temporary):
            raise FileExistsError(f"{folder}: expected unfinished work alone, got a file of others: {path.name!r:.200}")
    if folder / SETTINGS not in paths:
        raise FileExistsError(f"{folder}: expected unfinished work with its {SETTINGS}, got a folder without it")


def _check_settings(folder: Path, found: dict[str, Any], settings: Settings) -> None:
    """Raise ValueError, which lists the differences, if unfinished work depends on other settings."""
    differences = []
    for part in sorted(found.keys() | settings.keys()):
        earlier, now = found.get(part), settings.get(part, {})
        if not isinstance(earlier, dict):
            differences.append(f"{part!r:.80} is not known")
            continue
        for name in sorted(earlier.keys() | now.keys()):
            if earlier.get(name) == now.get(name):
                continue
            if part == "settings":
                differences.append(f"{name} {now.get(name)!r:.80} instead of {earlier.get(name)!r:.80}")
            else:
                verb = "is new" if name not in earlier else "is gone" if name not in now else "has changed"
                differences.append(f"{name:.200} {verb}")
    if differences:
        shown = ", ".join(differences[:8]) + (f" and {len(differences) - 8} more" if len(differences) > 8 else "")
        raise ValueError(f"{folder}: expected unfinished work with the settings of this run, got differences: {shown}")


def _read_reports(folder: Path) -> list[dict[str, Any]]:
    """Return the reports of the finished layers. Raises CheckpointError if the tensors of one have changed."""
    reports: list[dict[str, Any]] = []
    while (file := folder / f"layer-{len(reports):05}.json").is_file():
        report = read_object(file)
        tensors = file.with_suffix(".safetensors")
        if not tensors.is_file() or report.pop(DIGEST, None) != _digest_file(tensors):
            raise CheckpointError(f"{tensors}: expected the file that quantize wrote, got another: delete {folder}")
        reports.append(report)
    return reports


def _delete(folder: Path, has_to_go: Callable[[str], object]) -> None:
    """Delete the files and folders whose names ``has_to_go`` accepts, but not the lock, which is still held.

    Reports go before tensors, and the settings last, so that the rest can be resumed after a kill.
    """
    for path in sorted(folder.iterdir()):
        if path.name == LOCK or not has_to_go(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    with atomic.create(file) as opened:
        opened.write(json.dumps(value).encode())
