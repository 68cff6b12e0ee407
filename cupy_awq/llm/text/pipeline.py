# SPDX-License-Identifier: Apache-2.0
"""The parts of a tokenizer.json that take time and memory proportional to the text.

A tokenizer of these parts alone runs in this process. Any other runs in a worker process: regular expressions can
backtrack, replacements can lengthen a text without limit, and damaged tables abort a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cupy_awq.checkpoint import CheckpointError

MAX_PARTS = 16
"""The largest number of steps of a known tokenizer; Llama 3 has 5."""

MAX_PREFIX = 8
"""The largest length in characters of a text that a step may add."""

MAX_UNIGRAM = 256
"""The largest length in characters of a token in a Unigram model, to whose square the time is proportional."""

MAX_WORD = 200
"""The largest word of a WordPiece model in characters, to whose square the time is proportional."""

MAX_FILE_BYTES = 48_000_000
"""The largest tokenizer.json in bytes; that of Gemma 3 has 33 million."""

MAX_TOKENS, MAX_MERGES = 1 << 19, 1 << 20
"""The largest sizes of a vocabulary and of its list of merges; Gemma 3 has 262,144 and 514,906."""

MAX_ADDED_TOKENS, MAX_ADDED_CHARACTERS = 1 << 14, 1 << 20
"""The largest number of added tokens, such as special tokens, and their largest total length in characters."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_MARKED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(numbers: str, letters: str = r"\p{L}", other: str = r"\p{L}") -> str:
    word = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{numbers}"
    return rf"{word}| ?[^\s{other}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(numbers: str, contractions: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{contractions}|{start}{_UPPER}+{_LOWER}*{contractions}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


QWEN2 = _words(r"\p{N}")
QWEN35 = _words(r"\p{N}", r"[\p{L}\p{M}]", r"\p{L}\p{M}")
LLAMA3 = _words(r"\p{N}{1,3}")
TEKKEN = _cased(r"\p{N}", "")
GPT4O = _cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    rf"{_MARKED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
"""The regular expressions of common tokenizers, which split a text into words."""

KNOWN_PATTERNS = frozenset(
    {
        GPT2,
        QWEN2,
        QWEN35,
        LLAMA3,
        TEKKEN,
        GPT4O,
        *DEEPSEEK_V3,
        *(pattern.replace(r"\-./", "-./") for pattern in DEEPSEEK_V3),
        _words(r"\p{N}{1,3}").replace(_CONTRACTIONS, "'(?i:[sdmt]|ll|ve|re)"),
        *(
            rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]"
            r"|\s+(?!\S)|\s+"
            for numbers in (r"\p{N}", r"\p{N}{1,3}")
        ),
        r"[^\n]+|[\n]+",
        r"[\r\n]",
        r"\p{N}",
        r"\p{N}+",
        r"\s+",
        r" {2,}",
    }
)
"""The regular expressions whose matching takes time proportional to the text."""

KNOWN_KINDS = frozenset(
    "Sequence NFC NFD Lowercase Prepend Replace ByteLevel Split Digits Metaspace Whitespace WhitespaceSplit"
    " TemplateProcessing ByteFallback Fuse Strip WordPiece BPEDecoder BertPreTokenizer BertProcessing RobertaProcessing"
    " Punctuation".split()
)
"""The types of steps that a known tokenizer may have."""


def is_known(table: Mapping[str, Any]) -> bool:
    """Return whether all parts of a tokenizer.json are known to take time proportional to the text."""
    model = table.get("model")
    if not isinstance(model, dict) or not _is_known_model(model):
        return False
    parts = [table.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
    steps = [step for part in parts for step in _list_steps(part)]
    bytewise = [step for part in parts[:2] for step in _list_steps(part) if step.get("type") == "ByteLevel"]
    return len(steps) <= MAX_PARTS and len(bytewise) <= 1 and all(map(_is_known_step, steps))


def _list_steps(part: Any, depth: int = 0) -> list[dict[str, Any]]:
    """Return the steps of a part, such as "normalizer", with nested sequences flattened."""
    if part is None:
        return []
    if not isinstance(part, dict) or depth > MAX_PARTS:
        return [{}]
    inner = [part[name] for name in ("normalizers", "pretokenizers", "processors", "decoders") if name in part]
    if part.get("type") != "Sequence" or len(inner) != 1 or not isinstance(inner[0], list):
        return [part]
    return [step for item in inner[0] for step in _list_steps(item, depth + 1)]


def _is_known_step(step: Mapping[str, Any]) -> bool:
    kind, pattern = step.get("type"), step.get("pattern")
    if not isinstance(kind, str) or kind not in KNOWN_KINDS:
        return False
    if isinstance(pattern, dict) and "Regex" in pattern:
        return kind == "Split" and isinstance(pattern["Regex"], str) and pattern["Regex"] in KNOWN_PATTERNS
    if kind == "Replace":
        old, new = pattern.get("String") if isinstance(pattern, dict) else None, step.get("content")
        return isinstance(old, str) and isinstance(new, str) and len(new) <= len(old)
    if kind == "Prepend":
        return isinstance(step.get("prepend"), str) and len(step["prepend"]) <= MAX_PREFIX
    if kind == "TemplateProcessing":
        single = step.get("single")
        texts = [item for item in single if "Sequence" in str(item)] if isinstance(single, list) else [{}, {}]
        return len(texts) <= 1 and len(single or ()) <= MAX_PARTS
    return True


def _is_known_model(model: Mapping[str, Any]) -> bool:
    kind, vocabulary = model.get("type", "BPE"), model.get("vocab")
    if kind == "Unigram" and isinstance(vocabulary, list):
        texts = (entry[0] for entry in vocabulary if isinstance(entry, list) and entry)
        return max((len(text) for text in texts if isinstance(text, str)), default=0) <= MAX_UNIGRAM
    if kind == "WordPiece":
        longest = model.get("max_input_chars_per_word", 100)
        return isinstance(longest, int) and longest <= MAX_WORD
    return kind in ("BPE", "WordLevel")


def check_size(where: str, tokens: int, merges: int, added: Sequence[str]) -> None:
    """Raise CheckpointError unless tokens, merges and the texts of added tokens can be loaded within seconds."""
    if tokens > MAX_TOKENS or merges > MAX_MERGES:
        raise CheckpointError(
            f"{where}: expected at most {MAX_TOKENS} tokens and {MAX_MERGES} merges, got {tokens} and {merges}"
        )
    characters = sum(map(len, added))
    if len(added) > MAX_ADDED_TOKENS or characters > MAX_ADDED_CHARACTERS:
        raise CheckpointError(
            f"{where}: expected at most {MAX_ADDED_TOKENS} added tokens of {MAX_ADDED_CHARACTERS} characters, got"
            f" {len(added)} of {characters}"
        )


def check_table_size(table: Mapping[str, Any], added: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise CheckpointError unless the vocabulary of a tokenizer.json and its added tokens satisfy `check_size`."""
    model, own = table.get("model"), table.get("added_tokens")
    parts = (model.get(name) if isinstance(model, dict) else None for name in ("vocab", "merges"))
    tokens, merges = (len(part) if isinstance(part, (dict, list)) else 0 for part in parts)
    entries = [entry for entry in own if isinstance(entry, dict)] if isinstance(own, list) else []
    check_size(where, tokens, merges, [str(entry.get("content")) for entry in [*entries, *added]])
