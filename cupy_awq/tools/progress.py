# SPDX-License-Identifier: Apache-2.0
"""A progress bar on stderr, for the commands that read or create large models."""

from __future__ import annotations

import sys

WIDTH = 30
"""The width of the bar in characters."""


def show_bar(done: int, total: int) -> None:
    """Draw a bar for ``done`` of ``total`` steps, replacing the previous one; erase the bar after the last step."""
    filled = WIDTH * done // max(total, 1)
    print(f"\r[{'#' * filled}{' ' * (WIDTH - filled)}] ", end="", file=sys.stderr, flush=True)
    if done == total:
        erase_bar()


def erase_bar() -> None:
    """Erase the bar and move the cursor to the start of its line."""
    print("\r\033[K", end="", file=sys.stderr, flush=True)
