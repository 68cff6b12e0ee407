# SPDX-License-Identifier: Apache-2.0
"""Tokenizer files as users have them: added and special tokens, stop tokens, and pre-tokenizers of GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.llm.files import hugging_face
from cupy_awq.llm.text import gguf_tokenizer
from tests import llm_models

N, P, D = tokenizers.normalizers, tokenizers.pre_tokenizers, tokenizers.decoders
USER = [{"role": "user", "content": "A"}]


def token(text: str, **flags: bool) -> dict[str, Any]:
    names = ("lstrip", "normalized", "rstrip", "single_word")
    return {"content": text, **dict.fromkeys(names, False), "special": True, **flags}


def write(folder: Path, **tables: Any) -> Path:
    """Write JSON files into a folder, each named by its argument, and the tokenizer of the tests."""
    llm_models.tokenizer().save(str(folder / "tokenizer.json"))
    for name, table in tables.items():
        (folder / f"{name}.json").write_text(json.dumps(table))
    return folder


DECODER = {"259": token("<new>"), "260": token("<tool>", special=False)}


@pytest.mark.parametrize(
    "tables",
    [
        {"tokenizer_config": {"added_tokens_decoder": DECODER}},
        {"added_tokens": {"<tool>": 260, "<new>": 259}, "special_tokens_map": {"pad_token": "<new>"}},
        {"added_tokens": {"<tool>": 260, "<new>": 259}, "tokenizer_config": {"additional_special_tokens": ["<new>"]}},
    ],
)
def test_added_tokens_of_other_files_join_the_tokenizer(tmp_path: Path, tables: dict[str, Any]) -> None:
    tokenizer = hugging_face.load_tokenizer(write(tmp_path, **tables))
    assert tokenizer.encode("a<new><tool>") == [*tokenizer.encode("a"), 259, 260]
    assert tokenizer.decode([259, 260]) == "<tool>"
    assert tokenizer.special_ids["<new>"] == 259
    assert 259 not in tokenizer.encode("<new>", special_tokens=False)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": {"300": token("<new>")}}}, "id 300 does not follow"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"x": token("<new>")}}},
            "added tokens: expected ids with texts",
        ),
        ({"tokenizer_config": {"added_tokens_decoder": {"259": 3}}}, "added tokens: expected ids with texts"),
        ({"tokenizer_config": {"added_tokens_decoder": [3]}}, "added tokens: expected ids with texts"),
        ({"added_tokens": {"<new>": "259x"}}, "added tokens: expected ids with texts"),
        ({"added_tokens": {"<new>": None}}, "added tokens: expected ids with texts"),
    ],
)
def test_malformed_added_tokens_are_refused(tmp_path: Path, tables: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        hugging_face.load_tokenizer(write(tmp_path, **tables))


def test_a_token_that_a_file_calls_special_is_special(tmp_path: Path) -> None:
    """A token that special_tokens_map.json lists is special, even if tokenizer.json has it as an ordinary token."""
    tokenizer = hugging_face.load_tokenizer(write(tmp_path, special_tokens_map={"pad_token": {"content": "!"}}))
    assert tokenizer.special_ids["!"] == llm_models.tokenizer().token_to_id("!")
    assert tokenizer.decode(tokenizer.encode("a!")) == "a"


def test_all_special_tokens_reach_the_template(tmp_path: Path) -> None:
    named = {"pad_token": "P", "unk_token": {"content": "U"}, "cls_token": "C", "bos_token": "no", "mask_token": None}
    settings = {
        "bos_token": token("B"),
        "eos_token": "E",
        "image_token": "I",
        "add_bos_token": True,
        "added_tokens_decoder": {},
        "additional_special_tokens": ["X", {"content": "Y"}],
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ cls_token }}{{ mask_token }}"
        "{{ image_token }}{{ additional_special_tokens | join }}{{ sep_token is defined }}",
    }
    folder = write(tmp_path, special_tokens_map=named, tokenizer_config=settings)
    assert hugging_face.load_tokenizer(folder).special["bos_token"] == "B"
    tokenizer = hugging_face.load_tokenizer(folder)
    assert tokenizer.inner.decode(tokenizer.encode_chat(USER), skip_special_tokens=False) == "BEPUCIXYFalse"


def test_the_file_of_the_template_is_named_in_its_errors(tmp_path: Path) -> None:
    folder = write(tmp_path, tokenizer_config={"chat_template": "{{ 1 / 0 }}"})
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config\.json: chat template: expected valid jinja2, got Zero"
    ):
        hugging_face.load_tokenizer(folder).encode_chat(USER)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: chat template: .* got its error: no"):
        hugging_face.load_tokenizer(folder).encode_chat(USER)


@pytest.mark.parametrize(
    ("generation", "config", "settings", "wanted"),
    [
        (None, 5, {}, (5,)),
        ([6, 7], [5, 6], {}, (6, 7, 5)),
        (None, None, {"eos_token": "<|im_end|>"}, (258,)),
        (5, 5, {"eos_token": {"content": "<|im_end|>"}}, (5, 258)),
        ([None, 5], None, {"eos_token": None}, (5,)),
        (-1, 5, {"eos_token": "unknown"}, (5,)),
        (5, 6, {"eos_token": "!"}, (5, 6, 0)),
        (None, 5, {"eos_token": "<new>", "added_tokens_decoder": {"259": token("<new>")}}, (5, 259)),
    ],
)
def test_stop_tokens_are_those_of_all_files(
    tmp_path: Path, generation: Any, config: Any, settings: Any, wanted: tuple[int, ...]
) -> None:
    folder = write(tmp_path, generation_config={"eos_token_id": generation}, tokenizer_config=settings)
    assert hugging_face.read_stop_ids(folder, {"eos_token_id": config}) == wanted


def test_stop_tokens_of_a_nested_configuration_count(tmp_path: Path) -> None:
    assert hugging_face.read_stop_ids(write(tmp_path), {"text_config": {"eos_token_id": [1, 106]}}) == (1, 106)
    named = write(tmp_path, special_tokens_map={"eos_token": "<|end|>"})
    assert hugging_face.read_stop_ids(named, {}) == (256,)


@pytest.mark.parametrize("wrong", ["</s>", 2.0, True, {"id": 2}, ["</s>"], [2, [3]]])
def test_a_stop_token_of_another_type_is_refused_by_name(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"config\.json: eos_token_id: expected an integer or a list of them, got"
    ):
        hugging_face.read_stop_ids(write(tmp_path), {"eos_token_id": wrong})
    folder = write(tmp_path, generation_config={"eos_token_id": wrong})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id: expected an integer"):
        hugging_face.read_stop_ids(folder, {})


@pytest.mark.parametrize("text", sorted(gguf_tokenizer.STOPS))
def test_a_gguf_file_stops_at_tokens_that_end_a_turn_by_text(text: str) -> None:
    metadata = {"tokenizer.ggml.tokens": ["a", "b", text, "c"], "tokenizer.ggml.eos_token_id": 3}
    assert gguf_tokenizer.list_stop_ids(metadata) == (3, 2)


def test_a_gguf_file_stops_at_all_tokens_that_it_names() -> None:
    ids = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("eot", "eom", "eos", "bos"), 1)}
    assert sorted(gguf_tokenizer.list_stop_ids(ids)) == [1, 2, 3]
    foreign = {"tokenizer.ggml.eos_token_id": "x", "tokenizer.ggml.eot_token_id": None, "tokenizer.ggml.tokens": 3}
    assert gguf_tokenizer.list_stop_ids(foreign) == ()


def test_tokens_that_end_a_part_of_an_answer_are_no_stop_tokens() -> None:
    tokens = ["<|end|>", "<|return|>", "<|call|>", "</s>", "<|tool_response>"]
    assert gguf_tokenizer.list_stop_ids({"tokenizer.ggml.tokens": tokens}) == (1, 2, 4)
    assert gguf_tokenizer.list_stop_ids({"tokenizer.ggml.tokens": tokens[:1] + tokens[3:4]}) == (0, 1)


def gguf_metadata(pre: str, **fields: Any) -> dict[str, Any]:
    inner = llm_models.tokenizer()
    tokens = [inner.id_to_token(i) for i in range(inner.get_vocab_size())]
    table = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": ["a b"], **fields}
    table["tokens"] = [*tokens, "ab"]
    table["token_type"] = np.array([1] * 256 + [3] * 3 + [1], np.int32)
    return {f"tokenizer.ggml.{name}": value for name, value in table.items()}


SAMPLE = "Hello  world, it's 12345 fooBar \n\n e\u0301te\u0301 x(y) 你好 ... a_b"


@pytest.mark.parametrize(("name", "aliases"), gguf_tokenizer.ALIASES.items())
def test_other_names_of_a_pre_tokenizer_split_equally(name: str, aliases: str) -> None:
    def words(pre: str) -> Any:
        inner = gguf_tokenizer.load_tokenizer(Path("f"), gguf_metadata(pre)).inner
        return inner.pre_tokenizer.pre_tokenize_str(SAMPLE)

    assert name in gguf_tokenizer.PRE_TOKENIZERS
    assert {alias for alias in aliases.split() if words(alias) != words(name)} == set()


def test_pre_tokenizers_with_different_expressions_split_differently() -> None:
    def words(pre: str) -> str:
        return str(gguf_tokenizer.make_pre_tokenizer(tokenizers, pre).pre_tokenize_str(SAMPLE))

    names = set(gguf_tokenizer.PRE_TOKENIZERS) - {"default", "dbrx"}
    assert len({words(name) for name in names}) == len(names)


@pytest.mark.parametrize("pre", ["falcon", "llama4x", "", None, 3])
def test_an_unknown_pre_tokenizer_is_refused(pre: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre: expected one of gpt-2, "):
        gguf_tokenizer.load_tokenizer(Path("f"), gguf_metadata(pre))
