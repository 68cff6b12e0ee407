# SPDX-License-Identifier: Apache-2.0
"""Chat templates, rendered by jinja2's immutable sandbox with the options, filters and functions of transformers."""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class Generation(Extension):
    """The tag {% generation %}, which marks the text that a model is trained on. Here it only emits its body.

    The body is a call block, as in transformers, so that variables that it sets do not leave it.
    """

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_emit"), [], [], body).set_lineno(line)

    def _emit(self, caller: Any) -> str:
        text: str = caller()
        return text


class PlainNamespace(Namespace):
    """jinja2's namespace without names that start with an underscore, which could reach Python's internals."""

    # No argument is called "self": a template may use this name as a keyword argument.
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace: expected names that do not start with _, got {name!r:.80}")


class PlainDict:
    """The function ``dict`` and its ``fromkeys`` for templates, which thus cannot reach the class itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class RaisedError(Exception):
    """The error of ``raise_exception``: the template refuses the conversation."""


def _raise(message: object) -> NoReturn:
    raise RaisedError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    environment.globals |= {"dict": PlainDict(), "namespace": PlainNamespace}
    return environment.from_string(source)


def render(template: str, variables: dict[str, Any], max_characters: int) -> str:
    """Return the text that a template renders. Raises ValueError if it is longer than ``max_characters``."""
    text = _compile(template).render(**variables)
    if len(text) > max_characters:
        raise ValueError(f"expected an output of at most {max_characters} characters, got {len(text)}")
    return text
