# SPDX-License-Identifier: Apache-2.0
"""Rules for pages: their length, and that generated parts are current."""

from __future__ import annotations

import re

import pytest

from tests.peers import render
from tests.tools import operator_table
from tests.tools.sample_prose import ROOT

PAGES = {"README.md": 150, "CHANGELOG.md": 80}
"""The largest number of lines of a page."""


@pytest.mark.parametrize("page", PAGES)
def test_page_is_short(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= PAGES[page]


def test_results_are_what_render_writes() -> None:
    assert render.RESULTS.read_text(encoding="utf-8") == render.results()


def test_readme_has_the_figures_of_the_results() -> None:
    readme = render.README.read_text(encoding="utf-8")
    assert render.Comparison(render.HERE / "h100.json").bands() in readme
    assert render.with_bands(readme) == readme


def test_operator_table_is_what_its_command_prints() -> None:
    """And each test that the table names exists."""
    text = operator_table.table()
    assert text in (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    for file, names in re.findall(r"`(test_\w+\.py)::([\w, ]+)`", text):
        for name in names.split(", "):
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")
