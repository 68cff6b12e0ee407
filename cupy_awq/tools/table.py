# SPDX-License-Identifier: Apache-2.0
"""Formatting of tables, numbers and sizes as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def render(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a text table whose first ``left`` columns are left-aligned and whose other columns are right-aligned.

    >>> print(render(["layer", "M"], [["gate_proj", "1"], ["up", "256"]]))
    layer        M
    gate_proj    1
    up         256
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = (
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits and no exponent; "-" for None.

    >>> number(1234.5), number(9.6), number(0.01234), number(None)
    ('1234', '9.60', '0.0123', '-')
    """
    if value is None:
        return "-"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def size(nbytes: int) -> str:
    """Return a size in bytes as text with a decimal unit.

    >>> size(476928), size(12), size(1_430_784)
    ('477 kB', '12 B', '1.43 MB')
    """
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
