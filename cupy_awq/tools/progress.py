# SPDX-License-Identifier: Apache-2.0
"""A progress bar on stderr."""

from __future__ import annotations

import sys

WIDTH = 30
"""The width of the bar in characters."""


def show_bar(done: int, total: int) -> None:
    """Draw a bar for ``done`` of ``total`` steps, replacing the previous one; erase the bar after the last step."""
    filled = WIDTH * done // max(total, 1)
    end = "\r\033[K" if done == total else ""
    print(f"\r[{'#' * filled}{' ' * (WIDTH - filled)}] {end}", end="", file=sys.stderr, flush=True)
