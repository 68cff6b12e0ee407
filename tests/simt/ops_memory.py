# SPDX-License-Identifier: Apache-2.0
"""The translation of loads, stores, atomics and address conversions (PTX ISA 9.7.9, 9.7.13.9-9.7.13.12).

Cache hints are ignored.
"""

from __future__ import annotations

from re import Match

from tests.simt.emit import BlockCode, Operand, computed, emits, items
from tests.simt.memory import LOCAL_GENERIC, ORDERED, PLAIN, SHARED_GENERIC, WINDOW_BITS
from tests.simt.parser import Symbol
from tests.simt.program import PARAMETER_WINDOW

ORDER = r"((?:\.(?:weak|volatile|relaxed|acquire|release|acq_rel|mmio|cta|cluster|gpu|sys))*)"
SPACE = r"(?:\.(global|shared(?:::(?:cta|cluster))?|local|const|param(?:::entry)?))?"
CACHE = r"(?:\.(?:nc|ca|cg|cs|lu|cv|wb|wt|L1::\w+|L2::\w+|level::\w+))*"


def space_of(text: str | None) -> str:
    name = (text or "generic").split("::")[0]
    return "global" if name in ("const", "param") else name


def _how(modifiers: str) -> str:
    """Return the kind of an access as `memory` names it: volatile and scoped accesses do not race with each other."""
    words = ("volatile", "relaxed", "acquire", "release", "acq_rel")
    return ORDERED if any(word in modifiers for word in words) else PLAIN


def _fence(b: BlockCode, modifiers: str, *words: str) -> None:
    """Emit the memory fence that an acquire or release of gpu or sys scope contains."""
    if any(f".{word}" in modifiers for word in words) and not any(
        f".{word}" in modifiers for word in ("cta", "cluster")
    ):
        b.line(f"m.fence({b.mask})")


@emits(rf"ldu?{ORDER}{SPACE}{CACHE}(?:\.v([248]))?\.([busf](?:8|16|32|64))")
def load(b: BlockCode, m: Match[str], d: Operand, address: Operand, *hint: Operand) -> None:
    targets = items(d)
    dtype = computed(m[4])
    if m[2] and m[2].startswith("param") and isinstance(address.base, Symbol):
        offset = b.symbols[address.base.name] + address.offset - (PARAMETER_WINDOW << WINDOW_BITS)
        values = b.results(len(targets), f"m.parameter({offset}, {dtype}, {len(targets)})")
    else:
        where = f"{space_of(m[2])!r}, {b.address(address)}, {b.lanes}"
        values = b.results(len(targets), f"m.memory.load({where}, {dtype}, {len(targets)}, {b.at}, {_how(m[1])!r})")
        _fence(b, m[1], "acquire")
    b.define_all(targets, m[4], values)


@emits(rf"st{ORDER}{SPACE}{CACHE}(?:\.v([248]))?\.([busf](?:8|16|32|64))")
def store(b: BlockCode, m: Match[str], address: Operand, value: Operand, *hint: Operand) -> None:
    values = "".join(f"{b.use(v, m[4])}, " for v in items(value))
    where = f"{space_of(m[2])!r}, {b.address(address)}, {b.lanes}"
    _fence(b, m[1], "release")
    b.line(f"m.memory.store({where}, ({values}), {b.at}, {_how(m[1])!r})")


ATOMIC_TYPE = r"([bus](?:32|64)|f32|f64)"


@emits(rf"atom{ORDER}{SPACE}\.(add|min|max|and|or|xor|exch|inc|dec|cas)(?:\.L2::cache_hint)?\.{ATOMIC_TYPE}")
def atomic(b: BlockCode, m: Match[str], d: Operand, address: Operand, *values: Operand) -> None:
    count = 2 if m[3] == "cas" else 1
    b.define(d, m[4], _atomic(b, m, address, values[:count]))


@emits(rf"red{ORDER}{SPACE}\.(add|min|max|and|or|xor|inc|dec)(?:\.L2::cache_hint)?\.{ATOMIC_TYPE}")
def reduce(b: BlockCode, m: Match[str], address: Operand, value: Operand, *hint: Operand) -> None:
    _atomic(b, m, address, (value,))


def _atomic(b: BlockCode, m: Match[str], address: Operand, values: tuple[Operand, ...]) -> str:
    picked = "".join(f"{b.use(v, m[4])}, " for v in values)
    where = f"{space_of(m[2])!r}, {b.address(address)}, {b.lanes}"
    _fence(b, m[1], "release", "acq_rel")
    result = b.temporary(f"m.memory.atomic({where}, {m[3]!r}, ({picked}), {b.at})")
    _fence(b, m[1], "acquire", "acq_rel")
    return result


@emits(rf"(atom|red){ORDER}{SPACE}\.add\.noftz(?:\.L2::cache_hint)?\.(f16|bf16)(x2)?")
def atomic_half(b: BlockCode, m: Match[str], *operands: Operand) -> None:
    d, address, value = operands if m[1] == "atom" else (None, *operands)
    used = "b32" if m[5] else "b16"
    where = f"{space_of(m[3])!r}, {b.address(address)}, {b.lanes}"
    operation = f"add_{m[4]}{m[5] or ''}"
    result = b.temporary(f"m.memory.atomic({where}, {operation!r}, ({b.use(value, used)},), {b.at})")
    b.define(d, used, result)


GENERIC_BASE = {
    "shared": SHARED_GENERIC,
    "shared::cta": SHARED_GENERIC,
    "shared::cluster": SHARED_GENERIC,
    "local": LOCAL_GENERIC,
    "global": 0,
    "const": 0,
    "param": 0,
}


@emits(r"cvta(\.to)?\.(global|shared(?:::(?:cta|cluster))?|local|const|param(?:::entry)?)\.u(32|64)")
def convert_address(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    base = b.constant(GENERIC_BASE[m[2].removesuffix("::entry")], "uint64")
    b.define(d, "u64", f"{b.use(x, 'u64')} {'-' if m[1] else '+'} {base}")


@emits(r"isspacep\.(global|shared(?:::(?:cta|cluster))?|local|const|param)")
def is_in_space(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    window, kind = f"({b.use(x, 'u64')} >> uint64({WINDOW_BITS}))", f"({b.use(x, 'u64')} >> uint64(32))"
    space = m[1].split("::")[0]
    test = {
        "global": f"({window} > 0) & ({window} < {PARAMETER_WINDOW})",
        "shared": f"{kind} == 1",
        "local": f"{kind} == 2",
        "const": f"{window} > {PARAMETER_WINDOW}",
        "param": f"{window} == {PARAMETER_WINDOW}",
    }[space]
    b.define(d, "pred", test)


@emits(r"mapa(?:\.(shared::cluster))?\.u(32|64)")
def map_address(b: BlockCode, m: Match[str], d: Operand, x: Operand, rank: Operand) -> None:
    """Translate ``mapa``: return the address of the same offset in another CTA of the cluster."""
    kind = f"u{m[2]}"
    shifted = f"(({b.use(rank, 'u32')}.astype(uint{m[2]}) + uint{m[2]}(1)) << uint{m[2]}(24))"
    b.define(d, kind, f"({b.use(x, kind)} & {b.constant(~(0xFF << 24) % 2 ** int(m[2]), f'uint{m[2]}')}) | {shifted}")


@emits(r"getctarank(?:\.(shared::cluster))?\.u(32|64)")
def rank_of_address(b: BlockCode, m: Match[str], d: Operand, x: Operand) -> None:
    b.specials.add("%cluster_ctarank")
    field = b.temporary(f"(({b.use(x, f'u{m[2]}')} >> uint{m[2]}(24)) & uint{m[2]}(255)).astype(uint32)")
    b.define(d, "u32", f"np_where({field} > 0, {field} - uint32(1), s_cluster_ctarank)")
