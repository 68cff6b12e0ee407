# SPDX-License-Identifier: Apache-2.0
"""Writing that an error, Ctrl-C or a kill ends at any moment: always the whole old or the whole new checkpoint."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from cupy_awq.checkpoint import read, replacement
from tests.file_faults import fail_at_each
from tests.test_atomic import all_files
from tests.tools.stress_writes import (
    USER_FILES,
    WRITES,
    describe,
    make_quantize,
    make_save,
    stress,
    two_checkpoints,
    visible_files,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and signals")


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
def test_an_error_at_each_file_operation_of_save_keeps_a_whole_checkpoint(tmp_path: Path, lasts: bool) -> None:
    write, out = make_save(tmp_path, signal.SIGINT), tmp_path / "out"
    write.prepare()
    old = visible_files(out)
    write.run()
    new = visible_files(out)
    values = [describe(contents) for contents in two_checkpoints(tmp_path / "again")]
    seen: set[str] = set()

    def check(raised: bool) -> None:
        found = visible_files(out)
        assert USER_FILES.items() <= found.items()
        if found in (old, new):
            seen.add("old" if found == old else "new")
            assert raised or found == new
        else:  # the roll-back has failed as well: the new files are valid, in the journal
            assert lasts
            assert describe(read(out)) == values[1]
            seen.add("journal")
        assert describe(read(out)) in values
        write.run()
        assert visible_files(out) == new

    assert fail_at_each(out, write.run, write.prepare, check, lasts=lasts) > 20
    assert seen >= ({"old", "new", "journal"} if lasts else {"old", "new"})


def test_a_kill_after_each_rename_of_save_leaves_a_checkpoint_that_the_next_save_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill, simulated by a failed rename without a roll-back, leaves the whole old or the whole new checkpoint."""
    write, out = make_save(tmp_path, signal.SIGKILL), tmp_path / "out"
    values = [describe(contents) for contents in two_checkpoints(tmp_path / "again")]
    roll_back = replacement._roll_back
    write.prepare()
    write.run()
    new = visible_files(out)
    seen: list[int] = []

    def check(raised: bool) -> None:
        if raised:
            seen.append(values.index(describe(read(out))))
        with monkeypatch.context() as patched:
            patched.setattr(replacement, "_roll_back", roll_back)
            write.run()
        assert visible_files(out) == new

    monkeypatch.setattr(replacement, "_roll_back", lambda *_: None)
    fail_at_each(out, write.run, write.prepare, check)
    assert set(seen) == {0, 1}
    assert seen == sorted(seen)  # once the new values are visible, old ones never return


@pytest.mark.parametrize("name", [name for name in WRITES if name.startswith("convert")])
def test_an_error_at_each_file_operation_of_convert_keeps_the_old_file(tmp_path: Path, name: str) -> None:
    write, out = WRITES[name](tmp_path, signal.SIGINT), tmp_path / "out"
    write.prepare()
    old = visible_files(out)
    write.run()
    new = visible_files(out)

    def check(raised: bool) -> None:
        if raised:
            assert visible_files(out) in (old, new)
        else:
            assert all_files(out) == new

    count = fail_at_each(out, write.run, write.prepare, check)
    assert count >= (4 if "." in name else 30)


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_an_error_at_file_operations_of_quantize_leaves_no_model_and_can_resume(tmp_path: Path, step: int) -> None:
    write, out = make_quantize(tmp_path, signal.SIGINT), tmp_path / "out"
    write.prepare()
    write.run()
    whole: Any = write.read()

    def check(raised: bool) -> None:
        if raised and not (out / "new").exists():
            write.run()
        assert write.read() == whole

    fail_at_each(out, write.run, write.prepare, check, step=step)


@pytest.mark.parametrize("moments", [3, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
@pytest.mark.parametrize("name", WRITES)
def test_a_signal_at_random_moments_keeps_a_whole_checkpoint(
    tmp_path: Path, name: str, signum: int, moments: int
) -> None:
    """Ctrl-C or SIGKILL leaves the whole old or new checkpoint; tests/tools/stress_writes.py tries more moments."""
    counts = stress(WRITES[name](tmp_path, signum), signum, moments)
    assert sum(counts.values()) == moments
    assert moments < 60 or min(counts["old"], counts["new"]) > 0
