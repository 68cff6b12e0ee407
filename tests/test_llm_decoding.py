# SPDX-License-Identifier: Apache-2.0
"""Token ids to text, texts around special tokens, threads, interruptions, and stop strings."""

from __future__ import annotations

import json
import random
import signal
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from cupy_awq import llm
from cupy_awq.llm.text import pipeline
from cupy_awq.llm.text.detokenizer import Detokenizer, StopStrings
from cupy_awq.llm.text.remote import RemoteEncoder
from cupy_awq.llm.text.tokenizer import Tokenizer
from tests import llm_models

N, P, D = tokenizers.normalizers, tokenizers.pre_tokenizers, tokenizers.decoders
USER = [{"role": "user", "content": "A"}]


def byte_level() -> Any:
    inner = llm_models.tokenizer()
    inner.add_tokens(["<tool>", "日本"])
    return inner


def sentence_piece(has_prefix: bool = True) -> Any:
    words = ["i", "h", "\u2581", "\u2581ok", "\u2581\u2581", "é", "日", "a\u2581b", "<0xZZ>", "<0x1>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    vocabulary = {text: i for i, text in enumerate(tokens)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = N.Sequence([N.Prepend("\u2581"), N.Replace(" ", "\u2581")]) if has_prefix else None
    strip = [D.Strip(" ", 1, 0)] if has_prefix else []
    inner.decoder = D.Sequence([D.Replace("\u2581", " "), D.ByteFallback(), D.Fuse(), *strip])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return inner


def word_piece() -> Any:
    tokens = ["[UNK]", "a", "##b", "##c", "d", ".", "'", "s", "[SEP]"]
    vocabulary = {text: i for i, text in enumerate(tokens)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer, inner.decoder = P.Whitespace(), D.WordPiece()
    inner.add_special_tokens(["[SEP]"])
    return inner


def metaspace() -> Any:
    words = ["\u2581a", "b", "\u2581", "\u2581\u2581c", "d\u2581e"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({text: i for i, text in enumerate(words)}, unk_token="b"))
    inner.pre_tokenizer, inner.decoder = P.Metaspace(), D.Metaspace()
    return inner


KINDS = {
    "byte level": byte_level,
    "sentence piece": sentence_piece,
    "no prefix": lambda: sentence_piece(False),
    "word piece": word_piece,
    "metaspace": metaspace,
}


def streamed(tokenizer: Tokenizer, ids: Sequence[int], earlier: Sequence[int] = ()) -> str:
    stream = tokenizer.stream(earlier)
    return "".join(map(stream.step, ids)) + stream.flush()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_of_random_tokens_is_their_text(kind: str) -> None:
    """Streamed pieces of random tokens add up to the text of all tokens at once.

    That includes tokens that are no valid UTF-8, special ones, and ids that the vocabulary does not have.
    """
    tokenizer = Tokenizer(KINDS[kind](), None, {})
    size = tokenizer.inner.get_vocab_size() + 3
    generator = random.Random(0)
    for length in [*range(1, 12)] * 20 + [200] * 5:
        ids = [generator.randrange(size) for _ in range(length)]
        assert streamed(tokenizer, ids) == tokenizer.decode(ids), ids


@pytest.mark.parametrize("kind", ["byte level", "sentence piece", "no prefix"])
def test_text_that_is_valid_utf_8_decodes_as_the_package_decodes_it(kind: str) -> None:
    inner = KINDS[kind]()
    tokenizer = Tokenizer(inner, None, {})
    for text in ("", " ", "  a", "héllo wörld", "日本語 😀 <tool>", "\ufffd x \ufffd", "a\u2581b", "<0x41>", " i ok"):
        ids = inner.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == streamed(tokenizer, ids) == inner.decode(ids)


def test_random_bytes_decode_as_the_package_decodes_them() -> None:
    inner = byte_level()
    tokenizer = Tokenizer(inner, None, {})
    generator = random.Random(1)
    for _ in range(500):
        ids = [generator.randrange(262) for _ in range(generator.randrange(12))]
        assert tokenizer.decode(ids) == inner.decode(ids)


def test_a_stray_byte_does_not_change_what_was_written() -> None:
    tokenizer = Tokenizer(sentence_piece(), None, {})
    stream = tokenizer.stream()
    ok = tokenizer.inner.token_to_id("\u2581ok")
    pieces = [stream.step(i) for i in (3 + 0xC3, 3 + 0xA9, 3 + 0xF0, ok, 10**9)]
    assert pieces == ["", "é", "", "\ufffd ok", ""]


def test_a_continuation_keeps_its_first_space_and_a_text_of_its_own_does_not() -> None:
    tokenizer = Tokenizer(sentence_piece(), None, {})
    ok = tokenizer.inner.token_to_id("\u2581ok")
    assert streamed(tokenizer, [ok]) == "ok"
    assert streamed(tokenizer, [ok], earlier=[1, 262]) == " ok"
    words = Tokenizer(metaspace(), None, {})
    assert streamed(words, [0, 1]) == "ab"
    assert streamed(words, [0, 1], earlier=[0]) == " ab"


@pytest.mark.parametrize("scheme", ["prepend", "first", "always"])
def test_the_text_after_a_plain_special_token_gets_no_space(tmp_path: Path, scheme: str) -> None:
    inner = sentence_piece()
    if scheme != "prepend":
        inner.normalizer, inner.pre_tokenizer = None, P.Metaspace(prepend_scheme=scheme, split=False)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json", "{{ messages[0].content }}</s>{{ bos_token }}i", {})
    for text in ("i</s>i", "i</s> i", "</s>i", "i<s></s>h i<unk>", "i</s>"):
        ids = tokenizer.encode(text, special_tokens=False)
        assert not {0, 1, 2} & set(ids)
        assert tokenizer.decode(ids) == text
        chat = tokenizer.encode_chat([{"role": "user", "content": text}])
        assert chat[: len(ids)] == ids
        assert chat[len(ids) :] == inner.encode("</s>i", add_special_tokens=False).ids


def test_plain_special_tokens_are_the_tokens_of_their_characters() -> None:
    inner = byte_level()
    tokenizer = Tokenizer(inner, None, {})
    text = "a<|im_end|><tool>b"
    assert tokenizer.encode(text, special_tokens=False) == [
        *inner.encode("a").ids,
        *(i for c in "<|im_end|>" for i in inner.encode(c).ids),
        inner.token_to_id("<tool>"),
        *inner.encode("b").ids,
    ]


def test_two_bos_tokens_are_one_warning(tmp_path: Path) -> None:
    inner = llm_models.tokenizer()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 256)]
    )
    tokenizer = Tokenizer(inner, None, {"bos_token": "<|end|>"})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert tokenizer.encode("a")[0] == 256
        assert not seen
        assert [tokenizer.encode("<|end|>a")[:2] for _ in range(3)] == [[256, 256]] * 3
    assert len(seen) == 1
    assert "starts with the BOS token, which is added once more" in str(seen[0].message)


@pytest.mark.parametrize("kind", ["byte level", "sentence piece"])
def test_threads_share_a_tokenizer(kind: str) -> None:
    tokenizer = Tokenizer(KINDS[kind](), "{% for m in messages %}{{ m.content }}</s>{% endfor %}", {})
    special = next(iter(tokenizer.special_ids))
    texts = [f"i h {special} ok{special}{i}" for i in range(4)]
    wanted = [
        (
            tokenizer.encode(t),
            tokenizer.encode(t, special_tokens=False),
            tokenizer.encode_chat([{**USER[0], "content": t}]),
        )
        for t in texts
    ]
    wrong = []

    def work(k: int) -> None:
        for i in range(120):
            text, (plain, masked, chat) = texts[(i + k) % 4], wanted[(i + k) % 4]
            got = tokenizer.encode(text), tokenizer.encode(text, special_tokens=False)
            if got != (plain, masked) or (
                i % 10 == 0 and tokenizer.encode_chat([{**USER[0], "content": text}]) != chat
            ):
                wrong.append(text)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not wrong


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timer")
def test_an_interruption_at_any_moment_changes_no_later_text() -> None:
    tokenizer = Tokenizer(sentence_piece(), None, {})
    text = "i h</s> ok" * 50
    wanted = tokenizer.encode(text), tokenizer.encode(text, special_tokens=False)
    interrupted = 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for i in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (i + 1))
                for _ in range(3):
                    tokenizer.encode(text, special_tokens=False)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            assert (tokenizer.encode(text), tokenizer.encode(text, special_tokens=False)) == wanted
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 20


UNKNOWN = {"type": "Split", "pattern": {"Regex": r"\w+|[^\w\s]+|\s+"}, "behavior": "Isolated", "invert": False}


def test_a_tokenizer_with_an_unknown_expression_gives_the_same_ids_and_texts(tmp_path: Path) -> None:
    table = json.loads(sentence_piece(False).to_str())
    table["pre_tokenizer"] = UNKNOWN
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(table))
    inner = tokenizers.Tokenizer.from_file(str(file))
    assert not pipeline.is_known(table)
    added = [{"id": 269, "content": "<|im_end|>", "special": True, "normalized": False}]
    remote = Tokenizer.from_file(file, llm_models.TEMPLATE, {}, added=added)
    assert isinstance(remote.inner, RemoteEncoder)
    inner.add_special_tokens(["<|im_end|>"])
    local = Tokenizer(inner, llm_models.TEMPLATE, {})
    for text in ("i h  ok!", "é日 </s> x", ""):
        assert remote.encode(text) == local.encode(text)
        assert remote.encode(text, special_tokens=False) == local.encode(text, special_tokens=False)
        chat = [{"role": "user", "content": text}]
        assert remote.encode_chat(chat) == local.encode_chat(chat)
        ids = remote.encode(text)
        assert remote.decode(ids) == local.decode(ids) == streamed(remote, ids)
        assert remote.inner.decode(ids, skip_special_tokens=False) == inner.decode(ids, skip_special_tokens=False)
    assert remote.special_ids == local.special_ids
    remote.inner.save(str(tmp_path / "again.json"))
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(inner.to_str())


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizers_of_common_kinds_run_in_this_process(kind: str) -> None:
    assert pipeline.is_known(json.loads(KINDS[kind]().to_str()))


@pytest.mark.parametrize("pattern", sorted(pipeline.KNOWN_PATTERNS))
def test_a_known_expression_takes_time_proportional_to_the_text(pattern: str) -> None:
    split = P.Split(tokenizers.Regex(pattern), "isolated")
    for unit in (" ", "\n", "a", "A", "1", "你", "!", " a", "aA", "\r\n", " \n", "'", "\u0301", "a\u0301", "_a"):
        for end in ("", "x", "!", "\n"):
            began = time.process_time()
            split.pre_tokenize_str(unit * (10_000 // len(unit)) + end)
            assert time.process_time() - began < 0.5, (unit, end)


def test_a_million_stop_strings_take_no_time_per_token() -> None:
    stops = StopStrings([f"stop {i} {'x' * (i % 40)}" for i in range(1_000_000)])

    class Characters:
        def step(self, token: int) -> str:
            return chr(token)

    detokenizer = Detokenizer(Characters(), stops)
    text = "a text with stop 12 and stop 999 and more " * 50 + "stop 123456 " + "x" * 16
    began = time.process_time()
    out = ""
    for character in text:
        out += detokenizer.step(ord(character))
        if detokenizer.stopped:
            break
    assert time.process_time() - began < 2
    assert detokenizer.stopped
    assert out == text[: text.index("stop 123456")]


def test_a_stop_string_that_is_too_long_is_refused(tmp_path: Path) -> None:
    model = llm.load(llm_models.folder(tmp_path / "model", llm_models.QWEN3), device="cpu")
    with pytest.raises(ValueError, match="stop: expected texts of at most 1024 characters, got 1025"):
        model.generate("x", stop=["x" * 1025])
    assert model.generate("x", stop=["x" * 1024, "", "\ud800"], max_tokens=2)[0].reason == "length"


@given(st.lists(st.text("ab", max_size=5), max_size=6), st.text("abc", max_size=30))
def test_sorted_stop_strings_find_what_a_search_finds(stops: list[str], text: str) -> None:
    class Characters:
        def step(self, token: int) -> str:
            return chr(token)

    detokenizer, out = Detokenizer(Characters(), stops), ""
    for character in text:
        out += detokenizer.step(ord(character))
        if detokenizer.stopped:
            break
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s and s in text]
    assert detokenizer.stopped == bool(ends)
    if ends:
        end = min(end for end, _ in ends)
        assert out == text[: min(begin for last, begin in ends if last == end)]
    else:
        assert out + detokenizer.flush() == text
