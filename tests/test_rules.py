# SPDX-License-Identifier: Apache-2.0
"""Tests of regular expressions in configurations: they match as Python's do, in the worker process."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint import rules as rules_module
from cupy_awq.checkpoint.module_tensors import ModuleTensors
from cupy_awq.checkpoint.rules import Patterns, Rules, read_literal, read_rules
from cupy_awq.sandbox import worker

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


@given(texts=st.lists(expressions, min_size=1, max_size=4), name=st.text("ab.1c", max_size=8))
def test_expressions_match_as_those_of_python(texts: list[str], name: str) -> None:
    wanted = next((i for i, text in enumerate(texts) if re.match(text, name)), None)
    assert Patterns(texts).find(name) == wanted


POSSESSIVE = ["[a-z]{2,}+"] if sys.version_info >= (3, 11) else []


@pytest.mark.parametrize("text", [r"(w)\1?", r"\bword", "(?i)A", "(?i:WORD)", "(?<!a)word", "(?P<x>w)ord", *POSSESSIVE])
def test_expressions_may_have_all_of_pythons_syntax(text: str) -> None:
    assert (Patterns([text]).find("word") == 0) == bool(re.match(text, "word"))


@pytest.mark.parametrize("text", ["(", "*", "[", "(?P<", "a{2,1}", r"\1", "(" * 300])
def test_malformed_expressions_are_refused_when_they_are_read(text: str) -> None:
    with pytest.raises(CheckpointError, match="expected a regular expression, got "):
        Patterns(["a", text])
    with pytest.raises(CheckpointError, match=r"^file: dynamic: expected a regular expression, got "):
        read_rules({text: {}}, "dynamic", "file", has_names=False)


def test_long_expressions_are_refused() -> None:
    with pytest.raises(CheckpointError, match="expected expressions of at most 500 characters, got 501"):
        Patterns(["a" * 501])


def test_expressions_that_take_python_ages_end_soon() -> None:
    """An expression that takes Python exponential time ends soon with an error (more: test_hostile_text.py)."""
    patterns = Patterns([r"(a+)+$"])
    start = time.process_time()
    with pytest.raises(CheckpointError, match="expected regular expressions that match soon, got others"):
        patterns.find("a" * 400 + "!")
    assert time.process_time() - start < 1
    assert patterns.find("aaa") == 0


def test_many_slow_matches_are_stopped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_module, "MAX_SECONDS", 0.05)
    patterns = Patterns([r"(a+)+$"])
    names = [f"{'a' * 16}!{i}" for i in range(10_000)]
    with pytest.raises(CheckpointError, match="expected expressions that match all names in"):
        list(map(patterns.find, names))


@given(name=st.text("ab.^$\\*+?{}[]()| -_\n", max_size=8))
def test_an_escaped_name_matches_only_itself(name: str) -> None:
    assert read_literal(f"^{re.escape(name)}$") == name
    text = f"^{name}$"
    literal = read_literal(text)
    if literal is not None:
        assert re.match(text, literal)
        assert not re.match(text, literal + "x")


def found(rules: Rules, name: str) -> int | None:
    """Return the number in the settings that rules give to the module ``name``, or None if no rule matches."""
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
    """Rules that only name modules are matched without the worker process, which is started for expressions.

    `save` writes a rule for each router of a mixture of experts.
    """
    calls = worker.shared().starts
    dense = [f"model.layers.{layer}.mlp.gate" for layer in range(64)]
    rules = read_rules({f"-:^{re.escape(name)}$": {} for name in dense}, "dynamic", "file", has_names=False)
    for layer in range(64):
        for expert in range(64):
            assert found(rules, f"model.layers.{layer}.mlp.experts.{expert}.up_proj") is None
    assert worker.shared().starts == calls
