# SPDX-License-Identifier: Apache-2.0
"""A progress bar on stderr."""

from __future__ import annotations

import sys

WIDTH = 30
"""The number of characters of a full bar."""


def show_bar(done: int, total: int) -> None:
    """Draw a bar for ``done`` of ``total`` steps over the previous one; erase it after the last step."""
    filled = WIDTH * done // max(total, 1)
    end = "\r\033[K" if done == total else ""
    print(f"\r[{'#' * filled}{' ' * (WIDTH - filled)}] {end}", end="", file=sys.stderr, flush=True)
