# SPDX-License-Identifier: Apache-2.0
"""Structured output: JSON schemas, regular expressions and Lark grammars, by the package llguidance."""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.llm.engine.core import TextModel

JSON_OPTIONS: Any = {"coerce_one_of": True, "whitespace_pattern": r"[ \n]{0,16}"}
"""The options of JSON schemas: oneOf is read as anyOf; white space, which small models repeat forever, is limited."""

CACHED_CHARACTERS, GRAMMAR_CHARACTERS = 1 << 22, 1 << 14
"""The length in characters of the compiled grammars that are kept, and what the smallest one counts."""


class Grammars:
    """The compiler of grammars for the vocabulary of a model. Threads may share it.

    llguidance limits the time and the memory of a grammar itself, and reports errors instead of raising them.

    Args:
        model: the model.
        max_characters: the largest length of a schema, a regular expression or a grammar.
    """

    def __init__(self, model: TextModel, max_characters: int) -> None:
        self._model, self._max_characters = model, max_characters
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._model)), eos_token=sorted(self._model.stop_ids))

    def compile(self, kind: str, source: Any) -> Callable[[], GrammarConstraint]:
        """Return a function that returns a new constraint.

        Args:
            kind: the field of the request: "response_format" with a JSON schema as a dict, "regex" with the text of a
                regular expression, or "grammar" or "tools" with that of a Lark grammar.
            source: the schema or the text.

        Raises:
            ValueError: the source is too large, or not valid or supported.
        """
        from llguidance import LLMatcher

        text = json.dumps(source) if kind == "response_format" else source
        if len(text) > self._max_characters:
            raise ValueError(f"{kind}: expected at most {self._max_characters} characters, got {len(text)}")
        convert: dict[str, Callable[[str], str]] = {
            "response_format": lambda text: LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS),
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
            "tools": LLMatcher.grammar_from_lark,
        }
        with self._lock:
            matcher = self._compiled.pop((kind, text), None)
            if matcher is None:
                matcher = LLMatcher(self._tokenizer, convert[kind](text), log_level=0)
            _check(matcher, kind)
            self._compiled[kind, text] = matcher
            while sum(max(GRAMMAR_CHARACTERS, len(text)) for _, text in self._compiled) > CACHED_CHARACTERS:
                self._compiled.popitem(last=False)
            copy = matcher.deep_copy()
        return lambda: GrammarConstraint(copy.deep_copy(), self._model.config.vocab)


class GrammarConstraint:
    """The state of one completion that follows a grammar. At the end of the grammar, only a stop token may come."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher, self._bits = matcher, np.zeros(-(-vocab // 32), np.int32)

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Set the logits [V] of the tokens that may not come next to -inf. Raises ValueError if none may."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        _check(self._matcher)
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: len(logits)]
        if not allowed.any():
            raise ValueError("grammar: expected a next token, got none")
        logits[allowed == 0] = -np.inf

    def accept(self, token: int) -> None:
        """Record that ``token`` has been chosen and go on after it. Raises ValueError if it may not come next."""
        self._matcher.consume_token(token)
        _check(self._matcher)


class _Vocabulary:
    """The vocabulary in the form of llguidance's `TokenizerWrapper`."""

    def __init__(self, model: TextModel) -> None:
        tokenizer, vocab = model.tokenizer, model.config.vocab
        self.eos_token_id = min(model.stop_ids)
        self.bos_token_id = None
        special = {i: text for text, i in tokenizer.special_ids.items()}
        self.special_token_ids = sorted(i for i in special if i < vocab)
        self.tokens = [special[i].encode() if i in special else tokenizer.token_bytes(i) for i in range(vocab)]
        self._encode = functools.partial(tokenizer.encode, add_special_tokens=False, special_tokens=False)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def _check(matcher: Any, name: str = "grammar") -> None:
    if matcher.is_error():
        raise ValueError(f"{name}: expected one that is valid and supported, got {matcher.get_error():.200}")
