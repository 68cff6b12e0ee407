# SPDX-License-Identifier: Apache-2.0
"""Tests of regular expressions in configurations: they match as Python's do, in bounded time."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.format import ModuleTensors
from cupy_awq.checkpoint.rules import Pattern, Rules, read_rules

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


def found(rules: Rules, name: str) -> int | None:
    """Return the number in the settings of a module, or None without settings."""
    return rules.settings(ModuleTensors(name, Path("file"), "qweight", {})).get("number")


@given(texts=st.lists(st.sampled_from(["^a$", "^ab$", r"^a\.b$", "^[a]$", "a", "^a", "b$", "^a|^$", "^$", ".*b"])))
def test_first_expression_that_matches_applies_whether_it_is_a_name_or_not(texts: list[str]) -> None:
    rules = read_rules({text: {"number": i} for i, text in enumerate(texts)}, "dynamic", "file", has_names=False)
    unique = list(dict.fromkeys(texts))
    for name in ("a", "ab", "a.b", "axb", "b", ""):
        matching = [text for text in unique if re.match(text, name)]
        last = {text: i for i, text in enumerate(texts)}
        assert found(rules, name) == (last[matching[0]] if matching else None)


def test_names_of_all_dense_modules_take_no_steps() -> None:
    """`save` writes one rule for each router of a mixture of experts."""
    dense = [f"model.layers.{layer}.mlp.gate" for layer in range(64)]
    rules = read_rules({f"-:^{re.escape(name)}$": {} for name in dense}, "dynamic", "file", has_names=False)
    for layer in range(64):
        for expert in range(64):
            assert found(rules, f"model.layers.{layer}.mlp.experts.{expert}.up_proj") is None
