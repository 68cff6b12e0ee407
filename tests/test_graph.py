# SPDX-License-Identifier: Apache-2.0
"""Tests of the capture of CUDA graphs: an error in a launch ends the capture and reaches the caller."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from cupy_awq.runtime.graph import capture


class Invalidated(RuntimeError):
    """A stand-in for the error that ends a capture in which an illegal call was made."""


@pytest.mark.parametrize("is_invalid", [False, True])
def test_a_capture_ends_whether_or_not_a_launch_fails(monkeypatch: pytest.MonkeyPatch, is_invalid: bool) -> None:
    calls: list[str] = []

    def end_capture() -> str:
        calls.append("end")
        if is_invalid:
            raise Invalidated
        return "graph"

    def fail() -> None:
        raise ValueError("launch")

    runtime = SimpleNamespace(CUDARuntimeError=Invalidated)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    stream = SimpleNamespace(begin_capture=lambda: calls.append("begin"), end_capture=end_capture)
    with pytest.raises(ValueError, match="launch"):
        capture(stream, fail)
    assert calls == ["begin", "end"]
    if not is_invalid:
        assert capture(stream, lambda: calls.append("launch")) == "graph"
        assert calls[2:] == ["begin", "launch", "end"]
