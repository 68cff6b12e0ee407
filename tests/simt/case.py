# SPDX-License-Identifier: Apache-2.0
"""A test case for one opcode: its kernel, its inputs, and the comparison of the results with expected ones.

Each of 128 threads reads its inputs, executes the instruction, and writes the results. The inputs come from a random
generator in this module with fixed seeds, so that only results need to be stored.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_awq.runtime.launch_plan import LaunchPlan
from tests.simt.kernels import plan

THREADS = 128
WORDS = {"l": 2}
"""The number of 32-bit words of an operand by its asm constraint, where it is not 1."""


@dataclass(frozen=True)
class Case:
    """A test case for one opcode.

    ``text`` is PTX over inputs a0, a1, ... and outputs o0, o1, ... (or C++, if ``code``). Operands have kinds such as
    f32 or f16x2. ``tolerance`` bounds the error of each float result relative to the result (0: bit for bit, with all
    NaN equal), and ``absolute`` adds an absolute bound.
    """

    name: str
    text: str
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    arch: str = "80"
    tolerance: float = 0.0
    absolute: float = 0.0
    code: bool = False

    @property
    def source(self) -> str:
        """The file name of the kernel; its stem is a C identifier."""
        return "op_" + re.sub(r"\W", "_", self.name) + ".cu"

    def plan(self) -> LaunchPlan:
        return plan(self.source, ("x", "y"), block=(THREADS, 1, 1), arch=self.arch)

    def buffers(self) -> dict[str, np.ndarray]:
        y = np.zeros((sum(word_count(kind) for kind in self.outputs), THREADS), np.uint32)
        return {"x": inputs(self), "y": y}

    def kernel(self) -> str:
        """Return the CUDA source."""
        entry = self.source.removesuffix(".cu")
        lines = [f'extern "C" __global__ void {entry}(const unsigned* x, unsigned* y) {{']
        lines.append(f"  constexpr int n = {THREADS};\n  const int t = threadIdx.x;")
        lines += _loads(self.inputs)
        lines += [f"  {_CTYPE[_letter(kind)]} o{k} = 0;" for k, kind in enumerate(self.outputs)]
        lines += [self.text if self.code else _asm(self)]
        lines += _stores(self.outputs)
        return "\n".join([*lines, "}\n"])


_CTYPE = {"r": "unsigned", "h": "unsigned short", "l": "unsigned long long"}


def _letter(kind: str) -> str:
    kind = kind.partition(":")[0]
    bits = 32 if "x" in kind or kind == "pred" else int(re.sub(r"\D", "", kind))
    return {16: "h", 32: "r", 64: "l"}[bits]


def word_count(kind: str) -> int:
    return WORDS.get(_letter(kind), 1)


def _loads(kinds: tuple[str, ...]) -> Iterator[str]:
    row = 0
    for k, kind in enumerate(kinds):
        letter = _letter(kind)
        value = f"x[{row} * n + t]"
        if letter == "l":
            value += f" | static_cast<unsigned long long>(x[{row + 1} * n + t]) << 32"
        yield f"  const {_CTYPE[letter]} a{k} = {value};"
        row += word_count(kind)


def _stores(kinds: tuple[str, ...]) -> Iterator[str]:
    row = 0
    for k, kind in enumerate(kinds):
        yield f"  y[{row} * n + t] = o{k};"
        if _letter(kind) == "l":
            yield f"  y[{row + 1} * n + t] = o{k} >> 32;"
        row += word_count(kind)


def _asm(case: Case) -> str:
    count = len(case.outputs)
    text = re.sub(r"\bo(\d+)\b", lambda match: f"%{match[1]}", case.text)
    text = re.sub(r"\ba(\d+)\b", lambda match: f"%{count + int(match[1])}", text)
    outputs = ", ".join(f'"+{_letter(kind)}"(o{k})' for k, kind in enumerate(case.outputs))
    given = ", ".join(f'"{_letter(kind)}"(a{k})' for k, kind in enumerate(case.inputs))
    return f'  asm volatile("{{{text}}}" : {outputs} : {given} : "memory");'.replace("%%", "%")


def random_words(seed: str, count: int) -> np.ndarray:
    """Return ``count`` random uint32 from the generator SplitMix64 (Steele, Lea, Flood 2014), seeded by a name."""
    state = np.uint64(zlib.crc32(seed.encode())) << np.uint64(32)
    with np.errstate(over="ignore"):
        z = state + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31)) >> np.uint64(32)).astype(np.uint32)


SPECIAL = {
    "f32": [0, 1 << 31, 1, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x807FFFFF, 0x7F7FFFFF],
    "f16": [0, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 1, 0x83FF, 0x0400, 0x7BFF],
    "bf16": [0, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 1, 0x807F, 0x0080, 0x7F7F],
    "int": [0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 31, 32, 33],
}  # fmt: skip


def inputs(case: Case) -> np.ndarray:
    """Return random inputs, uint32 [words, THREADS].

    The suffix ``:unit`` of a kind limits values to [-4, 4], ``:small`` to a few integers.
    """
    rows: list[np.ndarray] = []
    for k, full in enumerate(case.inputs):
        kind, _, suffix = full.partition(":")
        for word in range(word_count(kind)):
            rows.append(_operand(random_words(f"{case.name}/{k}/{word}", 2 * THREADS), kind, suffix, 3 * k + word))
    return np.stack(rows)


def _operand(words: np.ndarray, kind: str, suffix: str, shift: int) -> np.ndarray:
    words, more = words[:THREADS], words[THREADS:]
    if suffix.isdigit():
        return words % np.uint32(suffix)
    base = kind.removesuffix("x2")
    if suffix == "small":
        if base in ("f16", "bf16", "f32"):
            values = (
                (words.astype(np.int64) % 9 - 4).astype(np.float32),
                (more.astype(np.int64) % 9 - 4).astype(np.float32),
            )
            return _pack(values, kind)
        return words & np.uint32(0x03030303)
    if suffix == "unit":
        unit = [(w.astype(np.float64) / 2**29 - 4).astype(np.float32) for w in (words, more)]
        return _pack((unit[0], unit[1]), kind)
    if base in ("f16", "bf16", "f32"):
        # Half of the values are in [-1, 1], so that sums must round; the others have random bits or are special values.
        words = words.copy()
        near = _pack(((words.astype(np.float64) / 2**31 - 1).astype(np.float32),) * 2, kind)
        words[::2] = near[::2]
        special = np.array(SPECIAL[base], np.uint32)
        if kind.endswith("x2"):
            special = special | np.roll(special, 3) << np.uint32(16)
        words[shift : shift + 3 * len(special) : 3] = special
    elif kind != "pred":
        words = words.copy()
        words[shift : shift + 3 * len(SPECIAL["int"]) : 3] = np.array(SPECIAL["int"], np.uint32)
    return words


def _pack(values: tuple[np.ndarray, np.ndarray], kind: str) -> np.ndarray:
    """Encode float32 values as a kind; a kind of pairs takes two values per word."""
    if kind.startswith("f32"):
        return values[0].view(np.uint32)
    if kind.startswith("bf16"):
        low, high = ((value.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16) for value in values)
    else:
        low, high = (value.astype(np.float16).view(np.uint16).astype(np.uint32) for value in values)
    return low | high << np.uint32(16) if kind.endswith("x2") else low


def same(case: Case, found: np.ndarray, wanted: np.ndarray) -> Any:
    """Return whether each word [words, THREADS] agrees with the expected one within the tolerance of the case."""
    rows, row = [], 0
    for kind in case.outputs:
        base = kind.partition(":")[0]
        for _ in range(word_count(base)):
            rows.append(_agree(case, base, found[row], wanted[row]))
            row += 1
    return np.stack(rows)


def _agree(case: Case, kind: str, found: np.ndarray, wanted: np.ndarray) -> Any:
    if kind.removesuffix("x2") not in ("f32", "f16", "bf16"):
        return found == wanted
    with np.errstate(all="ignore"):
        left, right = _values(kind, found), _values(kind, wanted)
        close = np.abs(left - right) <= case.tolerance * np.abs(right) + case.absolute
    equal = found == wanted if not kind.endswith("x2") else _bits(kind, found) == _bits(kind, wanted)
    exact = equal | (np.isnan(left) & np.isnan(right))
    result = exact | close if case.tolerance or case.absolute else exact
    return result.all(axis=-1) if result.ndim == 2 else result


def _bits(kind: str, words: np.ndarray) -> np.ndarray:
    if kind == "f32":
        return words
    halves = words[:, None].view(np.uint16)
    return halves if kind.endswith("x2") else halves[:, 0]


def _values(kind: str, words: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(_bits(kind, words))
    if kind == "f32":
        return bits.view(np.float32).astype(np.float64)
    if kind.startswith("bf16"):
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return bits.view(np.float16).astype(np.float64)
