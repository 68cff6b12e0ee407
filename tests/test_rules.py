# SPDX-License-Identifier: Apache-2.0
"""Expressions of configurations: they match as Python's do, in bounded time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.rules import Pattern

atoms = st.sampled_from(["a", "b", r"\.", ".", "[ab]", "[^a]", r"\d", r"\w", "[a-c0-3]", "^", "$", "(?=a)", "(?!b)"])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "*?", "{0,3}?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)


@given(text=expressions, name=st.text("ab.1c", max_size=8))
def test_expressions_match_as_those_of_python(text: str, name: str) -> None:
    assert Pattern(text).match(name) == bool(re.match(text, name))


@pytest.mark.parametrize(
    "text",
    [
        r"(a+)+$",
        r"(a|a)*$b",
        r"(a*)*b",
        "(.*)" * 40 + "x",
        "((a{1,500}){1,500}){1,500}b",
        "(" * 40 + "a" + "*)" * 40 + "b",
    ],
)
def test_expressions_that_take_python_ages_end_soon(text: str) -> None:
    start = time.perf_counter()
    assert not Pattern(text).match("a" * 400 + "!")
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("text", ["(", r"(w)\1?", r"\bword", "(?i)a", "(?i:a)", "(?<=a)b", "a" * 501, "*", "(" * 300])
def test_expressions_that_are_not_supported_are_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"expected a (regular expression|pattern)"):
        Pattern(text).match("word" * 3)


def test_long_names_are_refused() -> None:
    with pytest.raises(CheckpointError, match="at most 500 characters"):
        Pattern("a").match("a" * 501)
