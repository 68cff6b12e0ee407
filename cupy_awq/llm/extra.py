# SPDX-License-Identifier: Apache-2.0
"""Import of the optional packages of the extras ``llm`` (tokenizers, jinja2 and gguf) and ``ray``."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(name: str) -> Any:
    """Import and return the module ``name``. Raises ValueError with the pip command if the module is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = (error.name or name).partition(".")[0]
        raise ValueError(f"{package}: expected an installed package, got none: pip install {package}") from error
