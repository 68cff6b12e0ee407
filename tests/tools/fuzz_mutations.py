# SPDX-License-Identifier: Apache-2.0
"""Mutations of files: damaged bytes, and damaged values of JSON texts, headers and templates."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
from typing import Any

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 8, 31, 32, 64, 127, 128, 255, 256, 1 << 16, 1 << 31, (1 << 31) - 1,
    1 << 32,
    1 << 53, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 10**400, 0.0, -0.0, 0.5, 1e-300, 5e-324, 1e300, -1.5,
    float("nan"), float("inf"), "", "x", "\x1b[2J", "\ud800", "a" * 5000, "é\u202e", "../x",
    "\0", [], {}, [[]], [1],
    [None], {"a": 1}, [0] * 50, {"": None}, "yarn", "linear", "llama3", "awq", "gptq", "mlx", "F16", "I32",
    "Precompiled",
    "Replace", "Sequence", "WordLevel", "Unigram", "WordPiece", "BPE", "Split", "Metaspace", "ByteLevel", "Strip",
]  # fmt: skip
"""The values that replace entries of JSON texts: extreme integers, empty containers, words that readers expect."""

SNIPPETS = [
    "{{ messages }}", "{{ 1|dictsort }}", "{{ 3|truncate(-1) }}", "{% break %}", "{% continue %}",
    "{% generation %}",
    "{% endgeneration %}", "{% for i in range(90000) %}", "{% endfor %}", "{% if messages %}", "{% endif %}",
    "{{ x",
    "{% set a = namespace(x=[1]) %}", "{% set a.x = [a.x, a.x] %}", "{{ 'x' * 3000000000 }}", "{{ 9 ** 9 ** 9 }}",
    "{{ messages | tojson }}", "{{ messages[0].content * 100000 }}", "{{ loop.index }}", "{% macro m(x) %}",
    "{{ m(1) }}",
    "{% endmacro %}", "{% call m(1) %}", "{% endcall %}", "{% filter upper %}", "{% endfilter %}", "{{ self }}",
    "{#", "#}",
    "{{ messages | map('upper') | join(',') }}", "{{ ''.join(messages) }}", "{{ [] | first }}",
    "{{ cycler(1).next() }}",
    "{% raw %}", "{% endraw %}", "{{ strftime_now('%Q') }}", "{{ strftime_now(1) }}", "{{ raise_exception(1) }}",
    "\ud800",
    "{{ messages | groupby('role') }}", "{{ messages | sort }}", "{{ 'a' % 1 }}", "{{ -1 | round(-5) }}",
    "{{ {}|min }}",
    "{{ messages | selectattr('role', 'nothing') }}", "{{ caller() }}", "{{ joiner()() }}",
    "{{ dict(**messages) }}",
    "{% set ns.x = 1 %}", "{{ 1 if }}", "{{ range(10**9) }}", "{{ 1/0 }}", "{{ undefined.x }}", "\x1b[31m",
    "{{ '\\u' }}",
]  # fmt: skip
"""Parts of chat templates, which are inserted into templates."""

WORDS = [
    0,
    1,
    2,
    7,
    8,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
]
"""The integers that replace words of binary headers: 0, small numbers, and the limits of 32 and 64 bits."""


def mutate(data: bytes, name: str, rng: random.Random) -> bytes:
    """Return a damaged copy of a file's bytes, according to the type of file that its name implies."""
    if rng.random() < 0.2:
        return _damage(data, rng)
    if name.endswith(".json"):
        return _mutate_json(data, rng)
    if name.endswith(".jinja"):
        return _mutate_template(data, rng)
    if name.endswith(".safetensors"):
        length = int.from_bytes(data[:8], "little")
        header = _mutate_json(data[8 : 8 + length], rng)
        return len(header).to_bytes(8, "little") + header + data[8 + length :]
    return _damage(data, rng)


def _damage(data: bytes, rng: random.Random) -> bytes:
    """Return bytes in which one to four bytes are changed, words are replaced, or a part is cut, repeated or moved."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        # Headers are at the beginning, so most positions are drawn near it.
        limit = len(out) if rng.random() < 0.4 else min(len(out), rng.choice([64, 512, 4096, 16384]))
        at = rng.randrange(limit) if limit else 0
        kind = rng.randrange(7)
        if kind == 0:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            word = rng.choice(WORDS)
            form = rng.choice(["<Q", "<I"])
            out[at : at + struct.calcsize(form)] = struct.pack(form, word & (2 ** (8 * struct.calcsize(form)) - 1))
        elif kind == 2:
            del out[at : at + rng.choice([1, 2, 8, 100])]
        elif kind == 3:
            out[at:at] = out[at : at + rng.choice([1, 8, 100])]
        elif kind == 4 and rng.random() < 0.4:
            del out[at:]
        elif kind == 5:
            out[at : at + 1] = bytes([out[at] ^ 1 << rng.randrange(8)]) if at < len(out) else b""
        else:
            out[at : at + 4] = rng.randbytes(4)
    return bytes(out)


def _mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Return a JSON text with one to three values or names changed, removed, repeated or nested."""
    table = json.loads(data)
    for _ in range(rng.randint(1, 3)):
        places: list[tuple[Any, Any]] = []
        pending = [table]
        while pending:
            item = pending.pop()
            keys = list(item) if isinstance(item, dict) else range(len(item))
            keys = keys if len(keys) < 60 else rng.sample(keys, 60)
            for key in keys:
                places.append((item, key))
                if isinstance(item[key], (dict, list)):
                    pending.append(item[key])
        if not places:
            break
        item, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind == 0:
            del item[key]
        elif kind == 1 and isinstance(item, dict):
            item[str(rng.choice(VALUES))] = item.pop(key)
        elif kind == 2:
            other, place = rng.choice(places)
            if place in other if isinstance(other, dict) else place < len(other):
                item[key] = json.loads(json.dumps(other[place]))
        elif kind == 3 and type(item[key]) is int:
            item[key] += rng.choice([-1, 1, 8, -8, 1 << 32])
        elif kind == 4 and isinstance(item[key], str):
            at = rng.randint(0, len(item[key]))
            item[key] = item[key][:at] + rng.choice(["\x1b[2J", "\ud800", "x", "", "("]) + item[key][at + 1 :]
        elif kind == 5:
            item[key] = [item[key]]
        else:
            item[key] = copy.deepcopy(rng.choice(VALUES))
    text = json.dumps(table).encode()
    if rng.random() < 0.05:
        text = _damage(text, rng)
    return text


def _mutate_template(data: bytes, rng: random.Random) -> bytes:
    """Return a template in which snippets are inserted, or parts are cut or repeated."""
    text = data.decode()
    for _ in range(rng.randint(1, 4)):
        # A snippet between two tags leaves more templates valid.
        borders = [match.end() for match in re.finditer(r"[%}]}", text)] or [0]
        at, end = sorted(rng.choice(borders) if rng.random() < 0.8 else rng.randint(0, len(text)) for _ in range(2))
        kind = rng.randrange(6)
        if kind == 0:
            text = text[:at] + text[min(end, at + 20) :]
        elif kind == 1:
            text = text[:at] + text[at:end] * 2 + text[end:]
        else:
            text = text[:at] + rng.choice(SNIPPETS) + text[at:]
    return text.encode("utf-8", "surrogatepass")
