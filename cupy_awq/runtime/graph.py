# SPDX-License-Identifier: Apache-2.0
"""Capture of CUDA graphs that also ends if a launch fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


def capture(stream: Any, launch: Callable[[], object]) -> Any:
    """Capture the launches of ``launch`` on ``stream``, the current CuPy stream, and return the CUDA graph.

    If ``launch`` raises, the capture ends, and the exception is raised again.
    """
    import cupy

    stream.begin_capture()
    try:
        launch()
    except BaseException:
        # A failed launch may have invalidated the capture, so that ending it fails as well.
        with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
            stream.end_capture()
        raise
    return stream.end_capture()
