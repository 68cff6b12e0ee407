# SPDX-License-Identifier: Apache-2.0
"""Per-module settings of a configuration, selected by regular expressions that are matched in polynomial time.

A configuration is untrusted, and Python's backtracking matcher takes exponential time for some expressions. `Pattern`
interprets Python's syntax tree of the expression, but tracks the set of all positions that a match can have reached.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.format import ModuleTensors

if sys.version_info >= (3, 11):
    from re import _constants as ops  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
else:
    import sre_constants as ops
    import sre_parse as parser

MAX_PATTERN = 500
"""The largest length of an expression, in characters."""

MAX_NAME = 500
"""The largest length of a module name that is matched, in characters."""

MAX_STEPS = 1 << 20
"""The largest number of steps (visits of expression nodes) in all matches of one configuration, which take seconds."""


class Budget:
    """A limit on the total work of all matches of one configuration.

    Attributes:
        left: the number of steps that are left.
    """

    def __init__(self) -> None:
        self.left = MAX_STEPS

    def spend(self, steps: int = 1) -> None:
        """Subtract ``steps`` from the steps that are left. Raises CheckpointError if too few are left."""
        self.left -= steps
        if self.left < 0:
            raise CheckpointError(f"expected patterns that match all names in {MAX_STEPS} steps, got slower ones")


class Pattern:
    """A regular expression that is matched without backtracking.

    Raises CheckpointError if the expression is malformed, longer than `MAX_PATTERN` or has flags. For unsupported
    syntax, such as back references, only `match` raises it.

    Args:
        text: the expression.
        budget: the work limit, which all patterns of a configuration share; by default, the pattern has its own.

    >>> Pattern(r"model\\.layers\\.\\d+\\.mlp").match("model.layers.12.mlp.up_proj")
    True
    >>> Pattern("(a+)+$").match("a" * 300 + "b")
    False
    """

    def __init__(self, text: str, budget: Budget | None = None) -> None:
        if len(text) > MAX_PATTERN:
            raise CheckpointError(f"expected a pattern of at most {MAX_PATTERN} characters, got {len(text)}")
        try:
            self._tree: Any = parser.parse(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f"expected a regular expression, got {text!r:.80}: {error}") from None
        if self._tree.state.flags & ~re.UNICODE:
            raise CheckpointError(f"expected a regular expression without flags, got {text!r:.80}")
        self._text = text
        self._budget = budget or Budget()

    @property
    def literal(self) -> str | None:
        """The only name that `match` accepts if the expression is ^ and $ around ordinary characters, else None."""
        first, *middle, last = self._tree if len(self._tree) > 1 else (None, None)
        if first != (ops.AT, ops.AT_BEGINNING) or last != (ops.AT, ops.AT_END):
            return None
        return "".join(chr(value) for _, value in middle) if all(op is ops.LITERAL for op, _ in middle) else None

    def match(self, name: str) -> bool:
        """Return whether the expression matches at the start of ``name``.

        Raises CheckpointError if the name is longer than `MAX_NAME`, the expression is nested too deeply or has
        unsupported syntax, or the budget is exhausted.
        """
        if len(name) > MAX_NAME:
            raise CheckpointError(f"expected names of at most {MAX_NAME} characters, got {len(name)}")
        try:
            return bool(self._walk(self._tree, name, 1))
        except RecursionError:
            raise CheckpointError(f"expected a regular expression of few groups, got {self._text!r:.80}") from None

    # A set of positions is an integer: bit i is set if a match can have reached the position before name[i].

    def _walk(self, tree: Any, name: str, positions: int) -> int:
        """Match a sequence of nodes against ``name`` from each start position; return the set of end positions."""
        for op, value in tree:
            positions = self._step(op, value, name, positions)
            if not positions:
                break
        return positions

    def _step(self, op: Any, value: Any, name: str, positions: int) -> int:
        self._budget.spend()
        if op in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN):
            return (positions & self._accepted(op, value, name)) << 1
        if op is ops.BRANCH:
            ends = 0
            for branch in value[1]:
                ends |= self._walk(branch, name, positions)
            return ends
        if op is ops.SUBPATTERN and not value[1] and not value[2]:
            return self._walk(value[-1], name, positions)
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            low, high, body = value
            return self._repeat(low, high, body, name, positions)
        if op is ops.AT:
            if value in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING):
                return positions & 1
            if value in (ops.AT_END, ops.AT_END_STRING):
                return positions & 1 << len(name)
        if op in (ops.ASSERT, ops.ASSERT_NOT) and value[0] == 1:
            wanted = op is ops.ASSERT
            self._budget.spend(len(name))
            starts = (1 << i for i in range(len(name) + 1) if positions >> i & 1)
            return sum(start for start in starts if bool(self._walk(value[1], name, start)) == wanted)
        raise CheckpointError(f"expected a regular expression without {str(op).lower()}, got {self._text!r:.80}")

    def _repeat(self, low: int, high: int, tree: Any, name: str, positions: int) -> int:
        op, value = tree[0] if len(tree) == 1 else (None, None)
        if low < 2 and high is ops.MAXREPEAT and op in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN):
            accepted = self._accepted(op, value, name)
            starts = positions if low == 0 else (positions & accepted) << 1
            # The carries of the addition run through adjacent accepted characters ("MatchStar" of Parabix).
            return (((starts & accepted) + accepted) ^ accepted) | starts
        reached = positions if low == 0 else 0
        for count in range(1, int(high) + 1):  # ends early, since the set of reached positions converges
            following = self._walk(tree, name, positions)
            if count >= low:
                if not following & ~reached:
                    break
                reached |= following
            elif following == positions:
                return following
            if not following:
                break
            positions = following
        return reached

    def _accepted(self, op: Any, value: Any, name: str) -> int:
        """Return the set of positions (bit i: before name[i]) whose next character the node matches."""
        masks = _masks_by_character(name)
        whole = (1 << len(name)) - 1
        if op is ops.LITERAL:
            return masks.get(value, 0)
        if op is ops.NOT_LITERAL:
            return whole & ~masks.get(value, 0)
        if op is ops.ANY:
            return whole & ~masks.get(ord("\n"), 0)
        negated = bool(value) and value[0][0] is ops.NEGATE
        accepted = 0
        for kind, item in value:
            if kind is not ops.NEGATE:
                self._budget.spend()
                for code, mask in masks.items():
                    accepted |= mask if self._in_class(kind, item, code) else 0
        return whole & ~accepted if negated else accepted

    def _in_class(self, op: Any, value: Any, code: int) -> bool:
        char = chr(code)
        if op is ops.LITERAL:
            return bool(code == value)
        if op is ops.RANGE:
            return bool(value[0] <= code <= value[1])
        if value in (ops.CATEGORY_WORD, ops.CATEGORY_NOT_WORD):
            return bool((char.isalnum() or char == "_") == (value is ops.CATEGORY_WORD))
        if value in (ops.CATEGORY_DIGIT, ops.CATEGORY_NOT_DIGIT):
            return bool(char.isdecimal() == (value is ops.CATEGORY_DIGIT))
        if value in (ops.CATEGORY_SPACE, ops.CATEGORY_NOT_SPACE):
            return bool(char.isspace() == (value is ops.CATEGORY_SPACE))
        raise CheckpointError(f"expected a regular expression of plain classes, got {self._text!r:.80}")


@functools.lru_cache(maxsize=4)  # each name is matched against all patterns before the next name
def _masks_by_character(name: str) -> Mapping[int, int]:
    """Return, by code point, the set of the positions in a name whose next character has this code point."""
    masks: dict[int, int] = {}
    for i, char in enumerate(name):
        masks[ord(char)] = masks.get(ord(char), 0) | 1 << i
    return masks


@dataclass(frozen=True)
class Rules:
    """The per-module settings of a configuration, such as GPTQModel's ``dynamic``.

    Attributes:
        key: the key of the settings in the configuration, for error messages.
        exact: the settings by module name; these take precedence over ``patterns``.
        patterns: pairs of an expression and the settings of modules that match it; the first match applies.
        literals: by module name, for the expressions that match only this name: the number of ``patterns`` that precede
            the expression in the configuration, and the settings. A look-up takes no steps.
    """

    key: str = ""
    exact: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    patterns: tuple[tuple[Pattern, Mapping[str, Any]], ...] = ()
    literals: Mapping[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)

    def settings(self, tensors: ModuleTensors) -> Mapping[str, Any]:
        """Return the settings of a module, or {} if it has none.

        Raises CheckpointError if ``bits`` is not 4, or if a pattern cannot be matched against the module's name.
        """
        found = self.exact.get(tensors.name)
        if found is None:
            count, default = self.literals.get(tensors.name, (len(self.patterns), {}))
            matches = (settings for pattern, settings in self.patterns[:count] if pattern.match(tensors.name))
            try:
                found = next(matches, default)
            except CheckpointError as error:
                raise tensors.error(f"{self.key}: {error}") from None
        bits = found.get("bits", 4)
        if bits != 4:
            raise tensors.error(f"{self.key}: bits: expected 4, got {bits!r:.80}")
        return found


def read_rules(table: Any, key: str, where: str, *, has_names: bool) -> Rules:
    """Parse the per-module settings of a configuration: ``table`` maps a module name or expression to settings.

    The prefix "+:" of a name is ignored. The prefix "-:" excludes modules from quantization; their settings are empty.

    Args:
        table: the value of ``key`` in the configuration, as parsed from JSON.
        key: the key, "dynamic" or "extra_config", for error messages.
        where: the path of the configuration, for error messages.
        has_names: whether an equal module name takes precedence over the expressions (auto-round); if False, the first
            match in the order of the table applies (GPTQModel).

    Raises:
        CheckpointError: the table is malformed.
    """
    if not table:
        return Rules(key)
    if not isinstance(table, dict):
        raise CheckpointError(f"{where}: {key}: expected an object, got {table!r:.80}")
    exact: dict[str, Mapping[str, Any]] = {}
    patterns: list[tuple[Pattern, Mapping[str, Any]]] = []
    literals: dict[str, tuple[int, Mapping[str, Any]]] = {}
    budget = Budget()
    for name, settings in table.items():
        excludes = name.startswith("-:")
        if not isinstance(settings, dict) and not excludes:
            raise CheckpointError(f"{where}: {key}: {name!r:.80}: expected an object, got {settings!r:.80}")
        text = name[2:] if name[:2] in ("+:", "-:") else name
        values: Mapping[str, Any] = {} if excludes else settings
        if has_names:
            exact.setdefault(text, values)
        try:
            pattern = Pattern(text, budget)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {key}: {error}") from None
        literal = pattern.literal
        if literal is None:
            patterns.append((pattern, values))
        else:  # `save` writes one for each dense module; matched one by one, they would exhaust the budget
            literals.setdefault(literal, (len(patterns), values))
    return Rules(key, exact, tuple(patterns), literals)
