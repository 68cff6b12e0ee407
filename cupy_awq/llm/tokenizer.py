# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back by the package ``tokenizers``, and chat templates by ``jinja2`` in its sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.llm.extra import needed

Message = Mapping[str, str]
"""{"role": "user", "content": text}; roles are "system", "user" and "assistant"."""


class Tokenizer:
    """A tokenizer and a chat template.

    Args:
        inner: a ``tokenizers.Tokenizer``.
        template: jinja2 text, or None.
        special: "bos_token" and "eos_token" as text, for the template.
        bos: id of a token that opens each text but those of the template; None if there is none, or ``inner`` adds it.
    """

    def __init__(self, inner: Any, template: str | None, special: Mapping[str, str], bos: int | None = None) -> None:
        self.inner = inner
        self.template = template
        self._special = dict(special)
        self._bos = bos

    @classmethod
    def from_file(cls, file: Path, template: str | None, special: Mapping[str, str]) -> Tokenizer:
        """From a tokenizer.json. Raises CheckpointError if the library cannot read it."""
        tokenizers = needed("tokenizers")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)), template, special)
        except Exception as error:  # the library raises Exception itself
            raise CheckpointError(f"{file}: not a tokenizer that can be read: {error}") from None

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Ids of the tokens of ``text``, in which special tokens are recognised; ``start``: it opens a context."""
        ids: list[int] = self.inner.encode(text, add_special_tokens=start).ids
        return [self._bos, *ids] if start and self._bos is not None else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        text: str = self.inner.decode(list(ids))
        return text

    def stream(self) -> Stream:
        """A decoder for tokens that come one by one."""
        return Stream(self.inner)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation, up to where the assistant speaks.

        Raises CheckpointError if there is no template, or it cannot be run on these messages.
        """
        if self.template is None:
            raise CheckpointError("the model has no chat template: use --raw, or raw=True, to go on from plain text")
        return self.encode(self._render(self.template, messages), start=False)

    def _render(self, template: str, messages: Sequence[Message]) -> str:
        jinja2 = needed("jinja2")
        sandbox = needed("jinja2.sandbox")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals |= {"raise_exception": _raise, "strftime_now": datetime.datetime.now().strftime}
        try:
            text: str = environment.from_string(template).render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._special
            )
        except (jinja2.TemplateError, ValueError, TypeError, ArithmeticError, LookupError, RecursionError) as error:
            raise CheckpointError(f"the chat template failed: {type(error).__name__}: {error}") from None
        return text


class Stream:
    """Text of tokens that come one by one; a character that spans several tokens comes with its last one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._decoder = needed("tokenizers.decoders").DecodeStream(skip_special_tokens=True)

    def step(self, token: int) -> str:
        text: str | None = self._decoder.step(self._inner, token)
        return text or ""


def _raise(message: str) -> NoReturn:
    raise ValueError(message)
