# SPDX-License-Identifier: Apache-2.0
"""Packages of the extra ``llm``, which the rest of the library does without."""

from __future__ import annotations

import importlib
from typing import Any


def needed(name: str) -> Any:
    """The module ``name``. Raises ValueError that tells what to install if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f'the package {name.partition(".")[0]} is needed: pip install "cupy-awq[llm]"') from error
