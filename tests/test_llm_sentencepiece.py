# SPDX-License-Identifier: Apache-2.0
"""Tests of the SentencePiece tokenizers of GGUF files against recorded ids and a plain reference.

`sentencepiece.json` was recorded from the package sentencepiece by tests/peers/compare_sentencepiece.py.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq import llm
from cupy_awq.checkpoint import CheckpointError
from cupy_awq.llm.text.gguf_tokenizer import load_tokenizer
from cupy_awq.llm.text.tokenizer import Tokenizer

RECORDED = json.loads((Path(__file__).parent / "sentencepiece.json").read_text(encoding="utf-8"))
PREFIX = "tokenizer.ggml."
SPACE = "▁"


def metadata(**changes: Any) -> dict[str, Any]:
    """Return the recorded metadata of a GGUF file, with arrays as a reader returns them; ``changes`` replace fields."""
    fields = {**RECORDED["fields"], **{PREFIX + key: value for key, value in changes.items()}}
    for key, dtype in (("scores", np.float32), ("token_type", np.int32)):
        if isinstance(fields[PREFIX + key], list):
            fields[PREFIX + key] = np.array(fields[PREFIX + key], dtype)
    return fields


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(Path("f"), metadata())


@pytest.mark.parametrize(("text", "ids", "decoded"), RECORDED["texts"])
def test_ids_and_texts_are_those_of_sentencepiece(
    tokenizer: Tokenizer, text: str, ids: list[int], decoded: str
) -> None:
    assert tokenizer.encode(text, add_special_tokens=False, special_tokens=False) == ids
    assert tokenizer.decode(ids) == decoded
    assert tokenizer.encode(text, special_tokens=False) == [1, *ids]  # by default the token BOS (1) comes first
    stream = tokenizer.stream()
    assert "".join(stream.step(i) for i in ids) == decoded.removesuffix("�")


def merge(text: str, vocabulary: dict[str, int], scores: list[float]) -> list[str]:
    """Return the pieces of a text by plain BPE: merge the neighbors whose piece has the best score, again and again.

    Of equal scores the first pair is merged.
    """
    pieces = list(text)
    while True:
        joined = [
            (scores[vocabulary[a + b]], -i)
            for i, (a, b) in enumerate(itertools.pairwise(pieces))
            if a + b in vocabulary
        ]
        if not joined:
            return pieces
        i = -max(joined)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


@given(data=st.data())
def test_any_vocabulary_merges_the_pair_of_the_best_score_first(data: st.DataObject) -> None:
    words = data.draw(st.lists(st.text("abc" + SPACE, min_size=2, max_size=5), unique=True, max_size=30))
    tokens = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *("abc" + SPACE), *words]
    order = data.draw(st.permutations(range(len(tokens))))
    scores = [-float(i) for i in order]
    types = [2, *([6] * 256), *([1] * (len(tokens) - 257))]
    prefix = data.draw(st.booleans())
    fields = metadata(
        tokens=tokens, scores=scores, token_type=types, add_space_prefix=prefix, bos_token_id=None, eos_token_id=None
    )
    tokenizer = load_tokenizer(Path("f"), fields)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    normal = {token: i for token, i in vocabulary.items() if i >= 257}
    text = data.draw(st.text("abc é"))
    pieces = merge((SPACE * prefix + text.replace(" ", SPACE)) if text else "", normal, scores)
    wanted = [
        i
        for piece in pieces
        for i in ([vocabulary[piece]] if piece in normal else [1 + byte for byte in piece.encode()])
    ]
    assert tokenizer.encode(text) == wanted
    assert tokenizer.decode(wanted) == text


def test_a_leading_space_follows_special_tokens_but_not_their_plain_text(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a</s>a") == [1, *plain, 2, *plain]
    ids = tokenizer.encode("a</s>a", special_tokens=False)
    assert 2 not in ids
    assert tokenizer.decode(ids) == "a</s>a"


def test_user_defined_tokens_are_never_split() -> None:
    fields = metadata()
    fields[PREFIX + "tokens"] = [*fields[PREFIX + "tokens"], "<tool>"]
    fields[PREFIX + "scores"] = np.append(fields[PREFIX + "scores"], np.float32(0))
    fields[PREFIX + "token_type"] = np.append(fields[PREFIX + "token_type"], np.int32(4))
    tokenizer = load_tokenizer(Path("f"), fields)
    last = len(fields[PREFIX + "tokens"]) - 1
    ids = tokenizer.encode("a <tool> b", special_tokens=False)
    assert ids.count(last) == 1
    assert tokenizer.decode(ids).replace(" ", "") == "a<tool>b"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [1.0]}, r"tokenizer\.ggml\.scores: expected a finite score for each token, got others"),
        ({"scores": [np.nan] * len(RECORDED["fields"][PREFIX + "scores"])}, "finite score"),
        ({"add_space_prefix": 3}, r"tokenizer\.ggml\.add_space_prefix: expected a bool, got 3"),
        (
            {"tokens": ["x" * 300, *RECORDED["fields"][PREFIX + "tokens"][1:]]},
            r"tokenizer\.ggml\.tokens: expected at most 256 characters, got 300",
        ),
    ],
)
def test_invalid_fields_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(Path("f"), metadata(**changes))


def model_file(path: Path) -> Path:
    """Write a GGUF file of a model with random weights, the recorded tokenizer, and a template of Llama 2."""
    fields = RECORDED["fields"]
    tokens = fields[PREFIX + "tokens"]
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 128, "embedding_length": 64, "block_count": 1, "feed_forward_length": 96}
    for key, value in {**sizes, "attention.head_count": 4, "attention.head_count_kv": 2}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(fields[PREFIX + "scores"])
    writer.add_token_types(fields[PREFIX + "token_type"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ bos_token }}[INST] {{ m['content'] }} [/INST]{% endfor %}")
    rng = np.random.default_rng(0)
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    tensors = {f"blk.0.{name}.weight": rng.standard_normal(shape) / 8 for name, shape in shapes.items()}
    tensors |= {f"blk.0.{name}.weight": np.ones(64) for name in ("attn_norm", "ffn_norm")}
    tensors |= {"output_norm.weight": np.ones(64), "token_embd.weight": rng.standard_normal((len(tokens), 64))}
    for name, values in tensors.items():
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_model_with_such_a_tokenizer_generates_text(tmp_path: Path) -> None:
    model = llm.load(model_file(tmp_path / "m.gguf"), device="cpu")
    completion = model.generate("Hello é", max_tokens=12)[0]
    assert completion.text == model.tokenizer.decode(completion.tokens)
    ids = model.tokenizer.encode_chat([{"role": "user", "content": "a </s> b"}])
    assert ids[0] == 1
    assert 2 not in ids
    assert model.tokenizer.decode(ids) == "[INST] a </s> b [/INST]"
