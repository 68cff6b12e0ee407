# SPDX-License-Identifier: Apache-2.0
"""Per-module settings of a configuration, selected by regular expressions.

A configuration is untrusted, and Python's matcher takes exponential time for some expressions. So it runs in the worker
process, whose CPU time is limited.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cupy_awq.checkpoint.files import CheckpointError
from cupy_awq.checkpoint.module_tensors import ModuleTensors
from cupy_awq.sandbox import worker

MAX_SECONDS = 1.0
"""The largest CPU time in seconds for all regular expressions of a configuration; most matches take microseconds."""

MAX_PATTERN = 500
"""The largest length of an expression, in characters."""

_LITERAL = re.compile(r"\^((?:[^\\.^$*+?{}\[\]|()]|\\[^a-zA-Z0-9])*)\$", re.DOTALL)
"""The expressions that match only one name: ^ and $ around ordinary or escaped characters."""


class Patterns:
    """Regular expressions of one configuration, as Python's `re.match` matches them.

    Args:
        texts: the expressions.
        names: names that `find` will probably be called with, which are matched in one call of the worker process.

    Raises:
        CheckpointError: an expression is malformed or longer than `MAX_PATTERN`.

    >>> Patterns([r"model\\.layers\\.\\d+\\.mlp", "lm_head"]).find("lm_head")
    1
    """

    def __init__(self, texts: Sequence[str], names: Iterable[str] = ()) -> None:
        longest = max(map(len, texts), default=0)
        if longest > MAX_PATTERN:
            raise CheckpointError(f"expected expressions of at most {MAX_PATTERN} characters, got {longest}")
        self._texts, self._expected = list(texts), list(names)
        self._left = MAX_SECONDS
        self._found: dict[str, int] = {}
        if texts:
            self._match([])

    def find(self, name: str) -> int | None:
        """Return the index of the first expression that matches at the start of ``name``, or None.

        Raises CheckpointError if this takes too long.
        """
        if not self._texts:
            return None
        if name not in self._found:
            expected, self._expected = self._expected, []
            self._match([name, *expected])
        found = self._found[name]
        return None if found < 0 else found

    def _match(self, names: list[str]) -> None:
        if self._left < 0:
            raise CheckpointError(
                f"expected expressions that match all names in {MAX_SECONDS} s of CPU time, got slower ones"
            )
        try:
            found, seconds = worker.shared().call("match", patterns=self._texts, names=names)
        except worker.ProgramError as error:
            raise CheckpointError(f"expected a regular expression, got {error.kind}: {error!s:.200}") from None
        except worker.LimitError as error:
            raise CheckpointError(f"expected regular expressions that match soon, got others: {error}") from None
        self._left -= seconds
        self._found |= zip(names, found, strict=True)


def read_literal(text: str) -> str | None:
    r"""Return the only name that an expression matches if it is ^ and $ around ordinary characters, else None.

    >>> read_literal(r"^lm\_head\.up$")
    'lm_head.up'
    """
    found = _LITERAL.fullmatch(text)
    return re.sub(r"\\(.)", r"\1", found[1], flags=re.DOTALL) if found else None


@dataclass(frozen=True)
class Rules:
    """The per-module settings of a configuration, such as GPTQModel's ``dynamic``.

    Attributes:
        key: the key of the settings in the configuration, for error messages.
        exact: the settings by module name; these take precedence over ``patterns``.
        patterns: the expressions; the first that matches a name applies.
        values: the settings of the modules that each expression matches.
        literals: by module name, for the expressions that match only this name: the number of ``patterns`` that precede
            the expression in the configuration, and the settings.
    """

    key: str = ""
    exact: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    patterns: Patterns = field(default_factory=lambda: Patterns(()))
    values: tuple[Mapping[str, Any], ...] = ()
    literals: Mapping[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)

    def settings(self, tensors: ModuleTensors) -> Mapping[str, Any]:
        """Return the settings of a module, or {} if it has none.

        Raises CheckpointError if ``bits`` is not 4, or if matching takes too long.
        """
        found = self.exact.get(tensors.name)
        if found is None:
            count, default = self.literals.get(tensors.name, (len(self.values), {}))
            try:
                index = self.patterns.find(tensors.name) if count else None
            except CheckpointError as error:
                raise tensors.error(f"{self.key}: {error}") from None
            found = default if index is None or index >= count else self.values[index]
        bits = found.get("bits", 4)
        if bits != 4:
            raise tensors.error(f"{self.key}: bits: expected 4, got {bits!r:.80}")
        return found


def read_rules(table: Any, key: str, where: str, *, has_names: bool, names: Iterable[str] = ()) -> Rules:
    """Parse the per-module settings of a configuration: ``table`` maps a module name or expression to settings.

    The prefix "+:" of a name is ignored. The prefix "-:" excludes modules from quantization; their settings are empty.

    Args:
        table: the value of ``key`` in the configuration, as parsed from JSON.
        key: the key, "dynamic" or "extra_config", for error messages.
        where: the path of the configuration, for error messages.
        has_names: whether an equal module name takes precedence over the expressions (auto-round); if False, the first
            match in the order of the table applies (GPTQModel).
        names: the names of modules, as in `Patterns`.

    Raises:
        CheckpointError: the table is malformed.
    """
    if not table:
        return Rules(key)
    if not isinstance(table, dict):
        raise CheckpointError(f"{where}: {key}: expected an object, got {table!r:.80}")
    exact: dict[str, Mapping[str, Any]] = {}
    patterns: list[tuple[str, Mapping[str, Any]]] = []
    literals: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for name, settings in table.items():
        excludes = name.startswith("-:")
        if not isinstance(settings, dict) and not excludes:
            raise CheckpointError(f"{where}: {key}: {name!r:.80}: expected an object, got {settings!r:.80}")
        text = name[2:] if name[:2] in ("+:", "-:") else name
        values: Mapping[str, Any] = {} if excludes else settings
        if has_names:
            exact.setdefault(text, values)
        literal = read_literal(text)
        if literal is None:
            patterns.append((text, values))
        else:  # a single name is looked up, not matched: `save` writes one for each dense module
            literals.setdefault(literal, (len(patterns), values))
    try:
        compiled = Patterns([text for text, _ in patterns], names)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {key}: {error}") from None
    return Rules(key, exact, compiled, tuple(values for _, values in patterns), literals)
