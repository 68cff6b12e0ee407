# SPDX-License-Identifier: Apache-2.0
"""Compare the SentencePiece tokenizers of GGUF files with the package sentencepiece on random texts.

The script trains BPE models with byte fallback, gives cupy_awq the tokens, scores and types that a GGUF file of the
model holds, and compares ids and decoded texts. ``--record`` writes one model and its ids for the tests:

    python tests/peers/compare_sentencepiece.py README.md CHANGELOG.md --record tests/sentencepiece.json
"""

from __future__ import annotations

import argparse
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from cupy_awq.llm.text import gguf_tokenizer

RECORDED = (
    "Hello world",
    " leading",
    "trailing ",
    "  two  spaces   three",
    "line\nline\ttab\r\n",
    "é 你好 \U0001f600 ﬀ",
    "<s>[INST] no </s> special <0x41> <unk>",
    "x = [1, 22, 333]; // C++",
    "▁underscore ▁",
    "aaaaaaaaaaaaaaaaaaaaaaa",
    "",
    " ",
)


RANGES = ((0x20, 0x7E), (0xA1, 0xD7FF), (0x1F300, 0x1F6FF))
"""The ranges of Unicode code points from which characters are drawn."""


def train(text: str, size: int, prefix: bool) -> Any:
    """Return a SentencePiece BPE model of ``size`` tokens trained on ``text``; ``prefix`` adds a space in front."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=out,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def describe(processor: Any, prefix: bool) -> dict[str, Any]:
    """Return the metadata of a GGUF file (tokens, scores, types, options) for a trained SentencePiece model."""
    ids = range(processor.get_piece_size())

    def kind(i: int) -> int:
        if processor.is_unknown(i):
            return gguf_tokenizer.UNKNOWN
        if processor.is_control(i):
            return gguf_tokenizer.CONTROL
        return gguf_tokenizer.BYTE if processor.is_byte(i) else gguf_tokenizer.NORMAL

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def load(fields: dict[str, Any]) -> Any:
    """Return the tokenizer that cupy_awq builds from the metadata of a GGUF file, given as JSON values."""
    scores = np.array(fields["tokenizer.ggml.scores"], np.float32)
    types = np.array(fields["tokenizer.ggml.token_type"], np.int32)
    arrays = {"tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": types}
    return gguf_tokenizer.load_tokenizer(Path("sentencepiece"), {**fields, **arrays})


def draw_text(rng: random.Random, corpus: str) -> str:
    """Return a random text of pieces of the corpus, runs of spaces, rare characters and random code points."""
    parts = []
    for _ in range(rng.randint(1, 8)):
        start = rng.randrange(len(corpus))
        parts.append(
            rng.choice(
                [
                    corpus[start : start + rng.randint(1, 40)],
                    " " * rng.randint(1, 5),
                    "\n",
                    chr(
                        rng.choice([rng.randint(0x20, 0x7E), rng.randint(0xA1, 0xD7FF), rng.randint(0x1F300, 0x1F6FF)])
                    ),
                    rng.choice(corpus) * rng.randint(1, 12),
                ]
            )
        )
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="+", help="text files to train on")
    parser.add_argument("--texts", type=int, default=20_000, help="the number of texts for each model")
    parser.add_argument("--record", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    corpus = "\n".join(file.read_text() for file in options.corpus)
    different = 0
    for size, prefix in ((420, True), (900, True), (700, False)):
        processor = train(corpus, size, prefix)
        fields = describe(processor, prefix)
        ours, rng = load(fields), random.Random(size)
        for _ in range(options.texts):
            text = draw_text(rng, corpus)
            wanted = processor.encode(text)
            found = ours.encode(text, add_special_tokens=False, special_tokens=False)
            if found != wanted or ours.decode(found) != processor.decode(wanted):
                different += 1
                if different < 5:
                    print(repr(text), found, wanted, repr(ours.decode(found)), repr(processor.decode(wanted)))
        print(f"{size} tokens, prefix {prefix}: {options.texts} texts, {different} differ")
        if options.record is not None and size == 420:
            recorded = [[text, processor.encode(text), processor.decode(processor.encode(text))] for text in RECORDED]
            options.record.write_text(json.dumps({"fields": fields, "texts": recorded}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
