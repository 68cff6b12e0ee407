# SPDX-License-Identifier: Apache-2.0
"""The tokenizer, over the package ``tokenizers``, and chat templates, in the sandbox of ``jinja2``."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.llm.extra import import_extra

Message = Mapping[str, str]
"""A message of a conversation: {"role": "user", "content": text}, with the roles "system", "user" and "assistant"."""


class Tokenizer:
    """A tokenizer and a chat template.

    Args:
        inner: a ``tokenizers.Tokenizer``.
        template: the chat template as jinja2 text, or None.
        special: the variables "bos_token" and "eos_token" of the template, as text.
        bos: the id of the token that opens every text but those of the template; None if the model has no such token,
            or if ``inner`` adds it.
    """

    def __init__(self, inner: Any, template: str | None, special: Mapping[str, str], bos: int | None = None) -> None:
        self.inner = inner
        self.template = template
        self._special = dict(special)
        self._bos = bos

    @classmethod
    def from_file(cls, file: Path, template: str | None, special: Mapping[str, str]) -> Tokenizer:
        """Return the tokenizer of a tokenizer.json. Raises CheckpointError if the library cannot read it."""
        tokenizers = import_extra("tokenizers")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)), template, special)
        except Exception as error:  # the library raises Exception itself
            raise CheckpointError(f"{file}: expected a valid tokenizer, got {error}") from None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with special tokens in it recognized.

        ``add_special_tokens`` adds those that open a text, such as BOS.
        """
        ids: list[int] = self.inner.encode(text, add_special_tokens=add_special_tokens).ids
        return [self._bos, *ids] if add_special_tokens and self._bos is not None else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without the special ones."""
        text: str = self.inner.decode(list(ids))
        return text

    def stream(self) -> DecodeStream:
        """Return a decoder for tokens that arrive one by one."""
        return DecodeStream(self.inner)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation up to the beginning of the assistant's answer.

        Raises CheckpointError if there is no chat template, or if it fails for these messages.
        """
        if self.template is None:
            raise CheckpointError("chat template: expected one, got none: use --raw or raw=True to complete plain text")
        return self.encode(self._render(self.template, messages), add_special_tokens=False)

    def _render(self, template: str, messages: Sequence[Message]) -> str:
        jinja2 = import_extra("jinja2")
        sandbox = import_extra("jinja2.sandbox")
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
            raise CheckpointError(
                f"chat template: expected valid jinja2, got {type(error).__name__}: {error}"
            ) from None
        return text


class DecodeStream:
    """An incremental decoder: a character that spans several tokens is emitted with the last of them."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._decoder = import_extra("tokenizers.decoders").DecodeStream(skip_special_tokens=True)

    def step(self, token: int) -> str:
        """Return the text that one more token adds, which may be empty."""
        text: str | None = self._decoder.step(self._inner, token)
        return text or ""


def _raise(message: str) -> NoReturn:
    raise ValueError(message)
