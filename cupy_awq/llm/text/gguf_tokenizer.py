# SPDX-License-Identifier: Apache-2.0
"""The tokenizers of GGUF files: byte-level BPE ("gpt2") and SentencePiece BPE ("llama")."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.llm.extra import import_extra
from cupy_awq.llm.text.tokenizer import Tokenizer, check_size, guarded

Array = npt.NDArray[Any]

BYTE_LEVEL, SENTENCE_PIECE = KINDS = ("gpt2", "llama")
"""The supported values of ``tokenizer.ggml.model``."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The values of ``tokenizer.ggml.token_type``."""

SPACE = "\u2581"
"""The character that stands for a space in the tokens of SentencePiece."""

MAX_SPLITS = 1 << 21
"""The largest total number of ways to split SentencePiece tokens in two, enough for 2**18 tokens of 9 characters."""

MAX_TOKEN_CHARACTERS = 256
"""The largest accepted length of a SentencePiece token in characters. SentencePiece's trainer has a default of 16."""

PRE_TOKENIZERS = {
    "gpt-2": None,
    "default": None,
    "smollm": None,
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""The regular expression that splits text into words before BPE, by ``tokenizer.ggml.pre``; None for GPT-2's."""


def load_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer in the metadata of a file. Raises CheckpointError for a missing or unsupported tokenizer."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(f"{path}: tokenizer.ggml.model: expected {' or '.join(KINDS)}, got {show(kind)}")
    if kind == BYTE_LEVEL and (not isinstance(pre, str) or pre not in PRE_TOKENIZERS):
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(f"{path}: tokenizer.ggml.pre: expected one of {known}, got {show(pre)}")
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not (isinstance(tokens, list) and isinstance(types, np.ndarray)):
        raise CheckpointError(f"{path}: expected tokenizer.ggml.tokens and a token_type for each, got others")
    if len(tokens) != len(types):
        raise CheckpointError(f"{path}: expected a token_type for each of {len(tokens)} tokens, got {len(types)}")
    merges = metadata.get("tokenizer.ggml.merges")
    added = [tokens[i] for i in np.flatnonzero(np.isin(types, (UNKNOWN, CONTROL, USER_DEFINED)))]
    check_size(str(path), len(tokens), len(merges) if isinstance(merges, list) else 0, added)
    template = metadata.get("tokenizer.chat_template")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    texts = {}
    for name in ("bos", "eos"):
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        texts[f"{name}_token"] = str(tokens[i]) if type(i) is int and 0 <= i < len(tokens) else ""
    # If the field add_bos_token is missing, only SentencePiece and the pre-tokenizer llama-bpe imply a BOS token.
    adds_by_default = kind == SENTENCE_PIECE or pre == "llama-bpe"
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_by_default) is True and type(bos) is int
    with guarded(str(path)):
        continued = None
        if kind == SENTENCE_PIECE:
            inner, continued = _build_sentence_piece(path, metadata, tokens, types)
        else:
            inner = _build_byte_level(path, metadata, tokens, types, str(pre))
        bos = bos if adds_bos else None
        return Tokenizer(inner, template if isinstance(template, str) else None, texts, bos, str(path), continued)


def _build_byte_level(path: Path, metadata: Mapping[str, Any], tokens: list[str], types: Array, pre: str) -> Any:
    """Return a ``tokenizers.Tokenizer`` for byte-level BPE, as in GPT-2, with the pre-tokenizer ``pre``.

    Raises CheckpointError if there are no merges; errors of the package ``tokenizers`` are raised unchanged.
    """
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise CheckpointError(f"{path}: tokenizer.ggml.merges: expected a list of texts, got {show(merges)}")
    tokenizers = import_extra("tokenizers")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = tokenizers.models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
    inner = tokenizers.Tokenizer(bpe)
    inner.pre_tokenizer = make_pre_tokenizer(tokenizers, pre)
    inner.decoder = tokenizers.decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = tokenizers.normalizers.NFC()
    _add_tokens(inner, tokens, types, special=(CONTROL,))
    return inner


def _build_sentence_piece(path: Path, metadata: Mapping[str, Any], tokens: list[str], types: Array) -> tuple[Any, Any]:
    """Return a ``tokenizers.Tokenizer`` for SentencePiece BPE, as in Llama 2, and the normalizer of continued texts.

    Starting from single characters, SentencePiece repeatedly merges the two adjacent tokens whose concatenation is the
    token with the largest score. `tokenizers` needs a ranked list of merges instead: all pairs of tokens whose
    concatenation is a token, ordered by the score of this token. Spaces become U+2581, and one is added before the text
    and after special tokens (``add_space_prefix``). A character that is not a token becomes the tokens of its bytes in
    UTF-8.

    Raises CheckpointError if a token has no finite score, a token is too long or there are too many; errors of
    ``tokenizers`` are raised unchanged.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens) or not np.isfinite(scores).all():
        raise CheckpointError(f"{path}: tokenizer.ggml.scores: expected a finite score for each token, got others")
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    if type(has_prefix) is not bool:
        raise CheckpointError(f"{path}: tokenizer.ggml.add_space_prefix: expected a bool, got {show(has_prefix)}")
    if max(map(len, tokens), default=0) > MAX_TOKEN_CHARACTERS:
        longest = max(map(len, tokens))
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens: expected at most {MAX_TOKEN_CHARACTERS} characters, got {longest}"
        )
    splits = sum(map(len, tokens)) - len(tokens)
    if splits > MAX_SPLITS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens: expected at most {MAX_SPLITS} ways to split them in two, got {splits}"
        )
    tokenizers = import_extra("tokenizers")
    unknown = np.flatnonzero(types == UNKNOWN)
    bpe = tokenizers.models.BPE(
        {token: i for i, token in enumerate(tokens)},
        _list_pairs(tokens, types, scores),
        unk_token=tokens[unknown[0]] if unknown.size else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    inner = tokenizers.Tokenizer(bpe)
    steps, ends = tokenizers.normalizers, tokenizers.decoders
    continued = steps.Replace(" ", SPACE)
    inner.normalizer = steps.Sequence([steps.Prepend(SPACE), continued]) if has_prefix else continued
    strip = [ends.Strip(" ", 1, 0)] if has_prefix else []
    inner.decoder = ends.Sequence([ends.Replace(SPACE, " "), ends.ByteFallback(), ends.Fuse(), *strip])
    _add_tokens(inner, tokens, types, special=(UNKNOWN, CONTROL))
    return inner, continued


def _list_pairs(tokens: list[str], types: Array, scores: Array) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose concatenation is a token, in decreasing order of that token's score."""
    ids = np.flatnonzero((types == NORMAL) | (types == USER_DEFINED))
    known = {tokens[i] for i in ids}
    pairs = []
    for i in ids[np.argsort(-scores[ids].astype(np.float64), kind="stable")]:
        text = tokens[i]
        splits = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        pairs += [pair for pair in splits if pair[0] in known and pair[1] in known]
    return pairs


def _add_tokens(inner: Any, tokens: list[str], types: Array, special: tuple[int, ...]) -> None:
    """Add the tokens that are recognized before a text is split: first the types ``special``, then user-defined."""
    tokenizers = import_extra("tokenizers")
    for is_special, kinds in ((True, special), (False, (USER_DEFINED,))):
        ids = np.flatnonzero(np.isin(types, kinds)).tolist()
        inner.add_tokens([tokenizers.AddedToken(tokens[i], special=is_special, normalized=False) for i in ids])


def make_pre_tokenizer(tokenizers: Any, pre: str) -> Any:
    """Return the pre-tokenizer for ``tokenizer.ggml.pre``, which splits text into words and words into bytes."""
    steps = tokenizers.pre_tokenizers
    pattern, to_bytes = PRE_TOKENIZERS[pre], partial(steps.ByteLevel, add_prefix_space=False)
    if pattern is not None:
        return steps.Sequence([steps.Split(tokenizers.Regex(pattern), "isolated"), to_bytes(use_regex=False)])
    digits = [steps.Digits(individual_digits=True)] if pre == "smollm" else []
    return steps.Sequence([*digits, to_bytes(use_regex=True)])


def show(value: Any) -> str:
    """Return a metadata value as text for an error message; for an array, which may be huge, return only its length."""
    return f"{len(value)} values" if isinstance(value, (list, np.ndarray)) else f"{value!r:.80}"
