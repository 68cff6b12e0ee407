# SPDX-License-Identifier: Apache-2.0
"""Hostile files that act together, or that are large: each is refused within the limits of `test_hostile_text.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cupy_awq import llm
from cupy_awq.checkpoint.format import ModuleTensors
from cupy_awq.checkpoint.rules import read_rules
from cupy_awq.llm.text.tokenizer import Tokenizer
from tests import llm_models
from tests.test_hostile_text import CHAT, attempt, bounded, check_honest_chat, special_tokens, split

Attack = Callable[[], object]


def write_tokenizer(folder: Path, changes: dict[str, Any]) -> Path:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(llm_models.tokenizer().to_str()), **changes}))
    return file


def write_settings(folder: Path, name: str, text: str) -> Attack:
    """Write a model with a file of settings; return a function that opens it."""
    model = llm_models.folder(folder / "m", llm_models.QWEN3)
    (model / name).write_text(text)
    return lambda: llm.read(model).load_tokenizer()


def make_chat_of_many_pieces(folder: Path) -> Attack:
    """Cut a conversation by the special token "e" into pieces, each of which takes the expression half a second."""
    template = "{% for i in range(60) %}{{ messages[0].content }}" + "a" * 22 + "!{% endfor %}"
    file = write_tokenizer(folder, {"pre_tokenizer": split("(a+)+$"), "added_tokens": special_tokens(["e"])})
    return lambda: Tokenizer.from_file(file, template, {}).encode_chat(CHAT)


def make_tokens_to_find_in_the_template(folder: Path) -> Attack:
    tokens = [{**token, "special": False} for token in special_tokens(["a" * 50 + f"{i:05}" for i in range(16_000)])]
    file = write_tokenizer(folder, {"added_tokens": tokens})
    return lambda: Tokenizer.from_file(file, "a" * 131_000, {})


def make_many_names(file: str, folder: Path) -> Attack:
    return write_settings(folder, file, "{" + ",".join(f'"k{i}":1' for i in range(2_000_000)) + "}")


def make_many_values(file: str, folder: Path) -> Attack:
    values = ",".join(["1"] * 4_000_000)
    return write_settings(folder, file, f'{{"eos_token_id":[{values}],"additional_special_tokens":[{values}]}}')


def make_many_tokens(folder: Path) -> Attack:
    tokens = {str(i): {"content": f"x{i}", "special": True} for i in range(500_000)}
    return write_settings(folder, "tokenizer_config.json", json.dumps({"added_tokens_decoder": tokens}))


def make_many_rules_and_modules(folder: Path) -> Attack:
    names = [f"model.layers.{i}.mlp.up_proj" for i in range(3000)]

    def use() -> None:
        table = {f"x{i}.*": {"bits": 4} for i in range(5000)}
        rules = read_rules(table, "dynamic", str(folder), has_names=False, names=names)
        for name in names:
            rules.settings(ModuleTensors(name, folder, "qweight", {}))

    return use


ATTACKS: dict[str, Callable[[Path], Attack]] = {
    "chat of many pieces": make_chat_of_many_pieces,
    "tokens to find in the template": make_tokens_to_find_in_the_template,
    "many rules and modules": make_many_rules_and_modules,
    "many tokens": make_many_tokens,
    **{
        f"{what} in {file}": partial(make, file)
        for what, make in (("names", make_many_names), ("values", make_many_values))
        for file in ("config.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
    },
}


SLOW = {
    "many tokens",
    *(f"names in {name}.json" for name in ("tokenizer_config", "generation_config")),
    *(f"values in {name}.json" for name in ("config", "special_tokens_map")),
}
"""The attacks that only slow tests make: the others make those of each kind and on each file."""


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in ATTACKS])
def test_a_hostile_file_is_refused_soon(tmp_path: Path, name: str) -> None:
    run = ATTACKS[name](tmp_path)
    with bounded():
        assert not attempt(run, str(tmp_path))
    check_honest_chat()
