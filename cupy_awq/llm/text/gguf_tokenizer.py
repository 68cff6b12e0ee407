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
from cupy_awq.llm.text import pipeline
from cupy_awq.llm.text.detokenizer import SPACE
from cupy_awq.llm.text.pipeline import check_size
from cupy_awq.llm.text.tokenizer import Tokenizer, guarded
from cupy_awq.sandbox.encoder import Encoder

Array = npt.NDArray[Any]

BYTE_LEVEL, SENTENCE_PIECE = KINDS = ("gpt2", "llama")
"""The supported values of ``tokenizer.ggml.model``."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The values of ``tokenizer.ggml.token_type``."""

MAX_SPLITS = 1 << 21
"""The largest total number of ways to split SentencePiece tokens in two, enough for 2**18 tokens of 9 characters."""

MAX_TOKEN_CHARACTERS = 256
"""The largest accepted length of a SentencePiece token in characters. SentencePiece's trainer has a default of 16."""

PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "gpt-2": (),
    "default": (),
    "smollm": (),
    "qwen2": (pipeline.QWEN2,),
    "llama-bpe": (pipeline.LLAMA3,),
    "dbrx": (pipeline.LLAMA3,),
    "qwen35": (pipeline.QWEN35,),
    "tekken": (pipeline.TEKKEN,),
    "gpt-4o": (pipeline.GPT4O,),
    "deepseek-v3": pipeline.DEEPSEEK_V3,
}
"""The regular expressions that split text into words before BPE, by ``tokenizer.ggml.pre``; none for GPT-2's."""

ALIASES = {
    "gpt-2": "phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat a.x-4.0 mellum"
    " modern-bert mpt olmo jais trillion granite-docling exaone4",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    "dbrx": "smaug-bpe glm4 chatglm-bpe",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
}
"""The other names that llama.cpp knows for a pre-tokenizer, by our name."""

ADDS_BOS = frozenset({"llama-bpe", "tekken"})
"""The pre-tokenizers that imply a BOS token, and that keep a word that is a token whole."""

SPECIAL = ("bos", "eos", "unknown", "seperator", "padding", "cls", "mask")
"""The special tokens in GGUF's metadata, ``tokenizer.ggml.bos_token_id`` and so on (llama.cpp misspells the fourth)."""

SPECIAL_NAMES = {"unknown": "unk_token", "seperator": "sep_token", "padding": "pad_token"}
"""The names of these tokens in transformers if they differ from "bos_token" and so on."""

STOPS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>"
    " <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>"
    " <\uff5cend\u2581of\u2581sentence\uff5c> [e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|>"
    " <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>".split()
)
"""The texts of tokens that llama.cpp takes for the end of a text."""


def load_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer in the metadata of a file. Raises CheckpointError for a missing or unsupported tokenizer."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(f"{path}: tokenizer.ggml.model: expected {' or '.join(KINDS)}, got {show(kind)}")
    aliases = {alias: name for name, names in ALIASES.items() for alias in names.split()}
    pre = aliases.get(pre, pre) if isinstance(pre, str) else pre
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
    for name in SPECIAL:
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if type(i) is int and 0 <= i < len(tokens):
            texts[SPECIAL_NAMES.get(name, f"{name}_token")] = str(tokens[i])
    # If the field add_bos_token is missing, only SentencePiece and some pre-tokenizers imply a BOS token.
    adds_by_default = kind == SENTENCE_PIECE or pre in ADDS_BOS
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_by_default) is True and type(bos) is int
    with guarded(str(path)):
        if kind == SENTENCE_PIECE:
            inner = _build_sentence_piece(path, metadata, tokens, types)
        else:
            inner = Encoder(_build_byte_level(path, metadata, tokens, types, str(pre)))
        bos = bos if adds_bos else None
        template_where = f"{path}: tokenizer.chat_template"
        template = template if isinstance(template, str) else None
        return Tokenizer(inner, template, texts, bos, str(path), template_where)


def list_stop_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text: those that the metadata names, and those of `STOPS`.

    As in llama.cpp, "<|end|>" only ends a part of an answer if there are the tokens of gpt-oss or Solar, and "</s>"
    does not end one if there is Gemma 4's "<|tool_response>".
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    fields = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    named = [i for i in fields if type(i) is int and i >= 0]
    found = {token: i for i, token in enumerate(tokens) if token in STOPS}
    calls = found.keys() & {"<|call|>", "<|calls|>"}
    dropped = {"<|end|>"} if calls and found.keys() & {"<|return|>", "<|flush|>"} else set()
    dropped |= {"</s>"} if "<|tool_response>" in found else set()
    others = {i for token, i in found.items() if token in dropped}
    return tuple(dict.fromkeys(i for i in [*named, *found.values()] if i not in others))


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
    bpe = tokenizers.models.BPE(vocabulary, pairs, ignore_merges=pre in ADDS_BOS)
    inner = tokenizers.Tokenizer(bpe)
    inner.pre_tokenizer = make_pre_tokenizer(tokenizers, pre)
    inner.decoder = tokenizers.decoders.ByteLevel()
    if pre in ("qwen2", "qwen35"):
        inner.normalizer = tokenizers.normalizers.NFC()
    _add_tokens(inner, tokens, types, special=(CONTROL,))
    return inner


def _build_sentence_piece(path: Path, metadata: Mapping[str, Any], tokens: list[str], types: Array) -> Encoder:
    """Return an encoder for SentencePiece BPE, as in Llama 2.

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
    return Encoder(inner, (continued, None) if has_prefix else None)


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
    patterns, to_bytes = PRE_TOKENIZERS[pre], partial(steps.ByteLevel, add_prefix_space=False)
    if patterns:
        splits = [steps.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
        return steps.Sequence([*splits, to_bytes(use_regex=False)])
    digits = [steps.Digits(individual_digits=True)] if pre == "smollm" else []
    return steps.Sequence([*digits, to_bytes(use_regex=True)])


def show(value: Any) -> str:
    """Return a metadata value as text for an error message; for an array, which may be huge, return only its length."""
    return f"{len(value)} values" if isinstance(value, (list, np.ndarray)) else f"{value!r:.80}"
