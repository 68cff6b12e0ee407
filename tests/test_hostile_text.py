# SPDX-License-Identifier: Apache-2.0
"""Hostile templates, tokenizers and rules: none takes over 3 s or 512 MB, and none changes what follows."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cupy_awq.checkpoint import CheckpointError
from cupy_awq.checkpoint.format import ModuleTensors
from cupy_awq.checkpoint.rules import read_rules
from cupy_awq.llm.text import chat_template
from cupy_awq.llm.text.tokenizer import Tokenizer
from cupy_awq.sandbox import worker
from tests import llm_models

MAX_SECONDS = 3.0
MAX_MEMORY = 512 << 20
"""The largest memory of the process tree in bytes, of which the test runner itself takes about 200 MB."""

CHAT = [{"role": "user", "content": "Hello é"}]
USER = "<|im_start|>user\nHello é<|im_end|>\n<|im_start|>assistant\n"

TEMPLATES = {
    "nested loops": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "nested loops with output": "{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}",
    "repetition": "{{ 'x' * 3000000000 }}",
    "repeated list": "{{ ([1] * 100000 * 100000) | length }}",
    "doubling": "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "concatenation": "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "captured": "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set x %}{{ n.s }}{{ n.s }}{% endset %}"
    "{% set n.s = x %}{% endfor %}",
    "nested lists": "{% set n = namespace(l=[1]) %}{% for i in range(60) %}{% set n.l = [n.l, n.l] %}{% endfor %}"
    "{{ n.l }}",
    "equal lists": "{% set n = namespace(l=[1], m=[1]) %}{% for i in range(60) %}{% set n.l = [n.l, n.l] %}"
    "{% set n.m = [n.m, n.m] %}{% endfor %}{{ n.l == n.m }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "large factor": "{% set n = namespace(i=2) %}{% for i in range(60) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "width": "{{ '%3000000000d' % 1 }}",
    "starred width": "{{ '%*d' % (3000000000, 1) }}",
    "format": "{{ '{:3000000000}'.format(1) }}",
    "center": "{{ 'x'.center(3000000000) }}",
    "center filter": "{{ 'x' | center(3000000000) }}",
    "zfill": "{{ 'x'.zfill(3000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(3000000000) }}",
    "replace": "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "replace filter": "{{ ('x' * 100000) | replace('', 'y' * 100000) }}",
    "join": "{{ ('y' * 100000).join('x' * 100000) }}",
    "join filter": "{{ range(100000) | join('y' * 100000) }}",
    "indent": "{{ ('x\n' * 100000) | indent(100000) }}",
    "tojson": "{{ {'a': [1]} | tojson(indent=3000000000) }}",
    "slice filter": "{{ [1] | slice(3000000000) | list }}",
    "batch": "{{ [1] | batch(3000000000, 'x') | list }}",
    "round": "{{ 1.5 | round(3000000000, 'ceil') }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "strftime": "{{ strftime_now('%3000000000d') }}",
    "membership": "{% set l = range(100000) | list %}{% for i in range(90000) %}{{ -1 in l }}{% endfor %}",
    "lazy": "{% for i in range(90000) %}{{ range(100000) | select | last }}{% endfor %}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop(range(90000)) }}{% endfor %}",
    "macros": "".join(f"{{% macro m{i + 1}() %}}{{{{ m{i}() }}}}{{{{ m{i}() }}}}{{% endmacro %}}" for i in range(60))
    + "{% macro m0() %}{% endmacro %}{{ m60() }}",
    "blocks": "".join(
        f"{{% block b{i} %}}{{{{ self.b{i + 1}() }}}}{{{{ self.b{i + 1}() }}}}{{% endblock %}}" for i in range(60)
    ),
    "format filter": "{{ '%3000000000d' | format(1) }}",
    "output": "{{ messages[0].content * 200000 }}",
    "long template": "{{ 1 }}" * 100000,
    "open braces": "{{" * 60000,
    "parentheses": "{{ " + "(" * 60000,
    "long output": "{% for i in range(90000) %}" + "x" * 100000 + "{% endfor %}",
    "power of powers": "{{ (9 ** 9 ** 9) ** (9 ** 9) }}",
    "backward search": "{% for i in range(90000) %}{{ ('ab' * 50000).rfind('ba' * 20000 + 'c') }}{% endfor %}",
    "strip of characters": "{% for i in range(9000) %}"
    "{{ ('x' * 90000).strip('abcdefgx' * 9000) | length }}{% endfor %}",
    "dotted attributes": "{{ range(90000) | map(attribute='a' ~ '.a' * 90000) | list }}",
    "attributes with commas": "{{ range(90000) | sort(attribute='a' ~ ',a' * 9000) | list }}",
    "string of nested lists": "{% set n = namespace(l=[1]) %}"
    "{% for i in range(40) %}{% set n.l = [n.l, n.l] %}{% endfor %}"
    "{{ n.l | string | length }}",
    "float of a long text": "{% for i in range(9000) %}{{ ('1' * 900000) | float }}{% endfor %}",
    "integer of a long text": "{{ ('1' * 4000000) | int }}",
    "lookup by a large key": "{% set k = 'x' * 4000000 %}{% for i in range(90000) %}{{ {}[k ~ i] }}{% endfor %}",
    "count of a range": "{% for i in range(90000) %}{{ range(100000).count(-1.5) }}{% endfor %}",
    "width of a mapping key": "{{ '%(a)3000000000d' % {'a': 1} }}",
    "join of a map": "{{ range(99999) | map('string') | join('y' * 99999) }}",
    "wordwrap": "{% for i in range(90000) %}{{ ('a ' * 90000) | wordwrap(3) | length }}{% endfor %}",
    "urlize": "{{ ('http://a.b/(' * 300000) | urlize | length }}{{ '(' * 3000000 | urlize }}",
    "striptags": "{% for i in range(9000) %}{{ ('<' * 900000) | striptags | length }}{% endfor %}",
    "groupby": "{% for i in range(90000) %}{{ range(90000) | groupby(0) | list | length }}{% endfor %}",
    "format of a tuple": "{{ '%s' * 3000000 % tuple }}{{ ('%s' * 300000) % (('x' * 99999,) * 300000) }}",
    "translate": "{{ ('a' * 4000000).translate({97: 'x' * 9999}) }}",
    "endless recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "cycler": "{% set c = cycler(*range(99999)) %}{% for i in range(99999) %}{% for j in range(9999) %}{{ c.next() }}"
    "{% endfor %}{% endfor %}",
    "dictionary": "{% set n = namespace(d={}) %}"
    "{% for i in range(99999) %}{% set n.d = dict(n.d, **{'k' ~ i: 'x' * 9999}) %}"
    "{% endfor %}",
    "pprint": "{% set n = namespace(l=[1]) %}"
    "{% for i in range(30) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l | pprint }}",
    "random": "{% for i in range(99999) %}{% for j in range(99999) %}{{ range(9) | random }}{% endfor %}{% endfor %}",
    "case folding": "{% for i in range(90000) %}{{ ('ß' * 900000).casefold() | length }}{% endfor %}",
    "sorted dictionary": "{% set d = dict.fromkeys(range(99999)) %}"
    "{% for i in range(999) %}{{ d | dictsort | length }}{% endfor %}",
    "joiner": "{% set j = joiner('x' * 9999999) %}{% for i in range(999) %}{{ j() }}{% endfor %}",
    "translation table": "{{ 'a'.maketrans({'a': 'b' * 99999999}) }}",
    "hexadecimal integer": "{{ '%x' % (7 ** 4000000) }}",
    "escaped output": "{% autoescape true %}{{ '<' * 9999999 }}{% endautoescape %}",
    "many branches": "{% if 0 %}" + "{% elif 0 %}" * 10000 + "{% endif %}",
    "hash of a long tuple": "{{ {(1,) * 9999999: 1} }}",
    "map of a map": "{{ (range(99999) | map('string') | map('center', 99999)) | list | length }}",
    "comparison of integers": "{% set n = namespace(i=9) %}"
    "{% for i in range(30) %}{% set n.i = n.i * n.i %}{% endfor %}"
    "{{ n.i | string | length }}",
}

ALWAYS = (
    "nested loops",
    "repetition",
    "doubling",
    "power of powers",
    "open braces",
    "endless recursion",
    "join of a map",
)
"""The names of the hostile templates that every run tests; the others are marked slow."""


def long_alternatives(count: int) -> dict[str, Any]:
    """Return a pre-tokenizer with a regular expression whose alternatives begin alike, so that it backtracks."""
    pattern = "|".join("a" * i + "b" for i in range(1, count))
    return {"type": "Split", "pattern": {"Regex": f"(?:{pattern})+$"}, "behavior": "Isolated", "invert": False}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(old: str, new: str, times: int) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"String": old}, "content": new}
    return {"type": "Sequence", "normalizers": [step] * times}


def replace_decoders(old: str, new: str) -> list[dict[str, Any]]:
    """Return the steps of a decoder that replaces a text in each token and joins the tokens."""
    return [{"type": "Replace", "pattern": {"String": old}, "content": new}, {"type": "Fuse"}]


def special_tokens(texts: list[str]) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
    return [{"id": 256 + i, "content": text, "special": True, **flags} for i, text in enumerate(texts)]


SLOW_STEP = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}
WORD_PIECE = {
    "type": "WordPiece",
    "vocab": {"[UNK]": 0, "a": 1, "##a": 2, **{"##" + "a" * i: i + 3 for i in range(2, 500)}},
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 10**9,
}
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], *[["a" * i, -float(i)] for i in range(1, 3000)]]}
TWICE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100_000,
    "pair": [],
    "special_tokens": {},
}
TOKENIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "exponential expression": ({"pre_tokenizer": split("(a+)+$")}, "a" * 3000 + "!"),
    "polynomial expression": ({"pre_tokenizer": split("a*a*a*a*a*b")}, "a" * 2000),
    "quadratic expression": ({"pre_tokenizer": split(r"\s+$")}, " " * 200_000 + "x"),
    "alternatives": ({"pre_tokenizer": long_alternatives(300)}, "a" * 5000),
    "back reference": ({"pre_tokenizer": split(r"(a*)*\1b")}, "a" * 3000),
    "look-around": ({"pre_tokenizer": split(r"(?=(a+)+b)a|(?<!a)c")}, "a" * 3000),
    "expression of a normalizer": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": ""}},
        "a" * 3000,
    ),
    "long words": ({"model": WORD_PIECE}, "a" * 50_000 + "b"),
    "long tokens": ({"model": UNIGRAM}, "a" * 50_000),
    "repeated replacement": ({"normalizer": replace("a", "aaaaaaaa", 12)}, "a"),
    "replacement of nothing": ({"normalizer": replace("", "xxxxxxxx", 12)}, "abc"),
    "repeated bytes": ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}}, "é"),
    "repeated text": ({"post_processor": TWICE}, "a" * 1000),
    "long prefix": ({"normalizer": {"type": "Prepend", "prepend": "x" * 5_000_000}}, "a"),
    "strip": ({"decoder": {"type": "Strip", "content": "h", "start": 10**15, "stop": 10**15}}, "hello"),
    "fixed length": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "a"),
    "nested sequences": ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split("a")] * 1000}}, "a" * 3000),
    "compatibility forms": ({"normalizer": {"type": "NFKD"}}, "\ufdfa" * 100_000),
    "repeated expression": ({"pre_tokenizer": split("(?:(?:(?:a{1,100}){1,100}){1,100}){1,100}b")}, "a" * 20_000),
    "quadratic steps": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(r"\s+$")] * 16}},
        " " * 20_000 + "x",
    ),
    "slow decoder": (
        {"decoder": {"type": "Sequence", "decoders": [*replace_decoders("b", "a" * 21 + "!"), SLOW_STEP]}},
        "b" * 100,
    ),
    "lengthening decoder": (
        {"decoder": {"type": "Sequence", "decoders": replace_decoders("b", "x" * 5_000_000)}},
        "b" * 20,
    ),
    "long special tokens": (
        {"added_tokens": special_tokens(["b", *("a" * 3400 + str(i) for i in range(299))])},
        "a" * 6000,
    ),
    "special tokens": ({"added_tokens": special_tokens(["a" * 60 + str(i) for i in range(10_000)])}, "a" * 20_000),
}
EXPRESSIONS = [
    name for name, (changes, _) in TOKENIZERS.items() if changes.get("pre_tokenizer", {}).get("type") == "Split"
]
"""The names of the hostile tokenizers whose regular expressions are slow on certain texts only."""
ALWAYS_TOKENIZERS = (
    "exponential expression",
    "long words",
    "repeated replacement",
    "special tokens",
    "slow decoder",
    "long special tokens",
)

RULES = {
    "nested repetition": "(a+)+$",
    "alternatives": "(a|a)*$b",
    "empty repetition": "(a*)*b",
    "many stars": "(.*)" * 40 + "x",
    "counted repetition": "((a{1,500}){1,500}){1,500}b",
    "nested groups": "(" * 40 + "a" + "*)" * 40 + "b",
    "character classes": "([a-z0-9_]*[a-z._]*)*!x",
    "look-ahead": "(?=(a+)+b)a",
    "back reference": r"(a*)*\1\1b",
    "many parentheses": "(" * 240,
    "large class": "[" + "".join(map(chr, range(200, 690))) + "]*" + "a" * 8 + "b",
}


def processes(pid: int) -> list[int]:
    """Return the ids of a process and of its descendants (Linux)."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                found += processes(int(child))
    return found


def tree_bytes() -> int:
    """Return the resident memory of this process and its descendants (Linux), in which shared pages count once.

    A process that has not executed its program yet has this one's command line and, after vfork, all of its pages.
    """
    total, own = 0, Path("/proc/self/cmdline").read_bytes()
    for pid in processes(os.getpid()):
        with contextlib.suppress(OSError, IndexError):
            if pid != os.getpid() and Path(f"/proc/{pid}/cmdline").read_bytes() == own:
                continue
            total += int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0]) << 10
    return total


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its descendants (Linux), also of those that have ended."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for pid in processes(os.getpid())[1:]:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Assert that the body takes at most `MAX_SECONDS` and adds at most `MAX_MEMORY`.

    On a loaded machine a call takes longer on the clock, so the load scales the limit of wall-clock time.
    """
    if sys.platform != "linux":
        yield
        return
    peak, watching, done, before = 0, 0.0, threading.Event(), tree_bytes()

    def watch() -> None:
        nonlocal peak, watching
        while not done.wait(0.005):
            with contextlib.suppress(OSError):
                peak = max(peak, tree_bytes())
            watching = time.thread_time()

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, began_clock = cpu_seconds(), time.monotonic()
    try:
        yield
    finally:
        seconds, clock = cpu_seconds() - began, time.monotonic() - began_clock
        done.set()
        watcher.join()
    assert seconds - watching < MAX_SECONDS
    assert clock < MAX_SECONDS * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))
    assert peak - before < MAX_MEMORY - (200 << 20)


def check_honest_chat() -> None:
    """Check that a new conversation is rendered as before the attack."""
    assert chat_template.render(llm_models.TEMPLATE, CHAT, {}, "file") == USER


def marked(names: Any, always: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in always else [pytest.mark.slow]) for name in names]


def attempt(function: Callable[[], Any], where: str) -> bool:
    """Return whether a function succeeds; its only error is a CheckpointError of one line that names the file."""
    message = None
    try:
        function()
    except CheckpointError as error:
        message = str(error)
    if message is not None:
        assert where in message
        assert "expected" in message
        assert message.isprintable()
        assert len(message) < 1000
    return message is None


@pytest.mark.parametrize("name", marked(TEMPLATES, ALWAYS))
def test_a_hostile_template_is_stopped(name: str) -> None:
    check_honest_chat()
    with bounded():
        attempt(lambda: chat_template.render(TEMPLATES[name], CHAT, {}, "m.gguf"), "m.gguf: chat template: ")
    check_honest_chat()


@pytest.mark.parametrize("name", ["repetition", "nested loops", "power of powers"])
def test_the_error_says_which_limit_was_exceeded(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"m\.gguf: chat template: expected at most .* of (memory|CPU time), got"):
        chat_template.render(TEMPLATES[name], CHAT, {}, "m.gguf")


@pytest.mark.parametrize("name", marked(TOKENIZERS, ALWAYS_TOKENIZERS))
def test_a_hostile_tokenizer_is_stopped(tmp_path: Path, name: str) -> None:
    changes, text = TOKENIZERS[name]
    table = {**json.loads(llm_models.tokenizer().to_str()), **changes}
    if "model" in changes:
        table |= {"added_tokens": [], "pre_tokenizer": None, "decoder": None}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(table))

    def use() -> None:
        tokenizer = Tokenizer.from_file(file, llm_models.TEMPLATE, {})
        ids = tokenizer.encode(text)
        tokenizer.decode(ids)
        stream = tokenizer.stream()
        for token in ids[:300]:
            stream.step(token)
        tokenizer.encode_chat(CHAT)

    honest = Tokenizer(llm_models.tokenizer(), llm_models.TEMPLATE, {})
    before = honest.encode_chat(CHAT)
    with bounded():
        attempt(use, str(file))
    assert honest.encode_chat(CHAT) == before


@pytest.mark.parametrize("name", marked(EXPRESSIONS, ALWAYS_TOKENIZERS))
def test_a_tokenizer_that_was_stopped_still_encodes_other_texts(tmp_path: Path, name: str) -> None:
    changes, text = TOKENIZERS[name]
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(llm_models.tokenizer().to_str()), **changes}))
    tokenizer = Tokenizer.from_file(file, llm_models.TEMPLATE, {})
    before = tokenizer.encode("xyz")
    attempt(lambda: tokenizer.encode(text), str(file))
    assert tokenizer.encode("xyz") == before == llm_models.tokenizer().encode("xyz").ids


@pytest.mark.parametrize("name", marked(RULES, ("nested repetition", "many stars", "many parentheses")))
def test_a_hostile_rule_is_stopped(name: str) -> None:
    names = ["a" * 400 + "!", *(f"model.layers.{i}.aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!" for i in range(100))]

    def use() -> None:
        rules = read_rules({RULES[name]: {"bits": 4}}, "dynamic", "file", has_names=False)
        for module in names:
            rules.settings(ModuleTensors(module, Path("file"), "qweight", {}))

    with bounded():
        attempt(use, "file")
    rules = read_rules({r"model\..*": {"number": 1}}, "dynamic", "file", has_names=False)
    assert rules.settings(ModuleTensors("model.a", Path("file"), "qweight", {})) == {"number": 1}


def test_there_are_about_100_hostile_inputs() -> None:
    assert len(TEMPLATES) + len(TOKENIZERS) + len(RULES) >= 100


def test_a_prompt_longer_than_the_context_is_refused_soon(tmp_path: Path) -> None:
    from cupy_awq import llm

    model = llm.load(llm_models.folder(tmp_path / "model", llm_models.QWEN3), device="cpu")
    text = "some words " * 1_000_000
    for options in ({"raw": True}, {}, {"raw": True, "special_tokens": False}):
        began = time.process_time()
        with pytest.raises(
            ValueError, match="prompt: expected fewer tokens than the context of 256, got more than 512"
        ):
            model.generate(text, **options)
        assert time.process_time() - began < 2
    with pytest.raises(llm.ContextFullError, match="conversation: expected fewer tokens than its capacity of 256"):
        next(model.chat().say(text))
    with pytest.raises(ValueError, match="prompt: expected at most 16777216 characters"):
        model.generate("x" * (1 << 25))


def test_the_worker_serves_others_while_it_restarts() -> None:
    """While one thread's hostile template makes the worker restart, others' honest templates are rendered."""

    def honest() -> None:
        for _ in range(20):
            check_honest_chat()

    def hostile() -> None:
        attempt(lambda: chat_template.render(TEMPLATES["repetition"], CHAT, {}, "m.gguf"), "m.gguf")

    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(target) for target in (honest, hostile, honest, hostile)]:
            job.result()
    assert worker.shared().starts > 1
