# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies, mbarriers and warpgroup products (PTX ISA 9.7.9.25, 9.7.13.15, 9.7.15)."""

from __future__ import annotations

from re import Match

from tests.simt.emit import BlockCode, Operand, emits


@emits(r"cp\.async\.(ca|cg)\.shared(?:::cta)?\.global(?:\.L2::(\w+))*")
def copy_async(b: BlockCode, m: Match[str], target: Operand, source: Operand, size: Operand, *rest: Operand) -> None:
    """``rest``: the bytes to read, if fewer than the size, or a predicate that says to read none; a cache policy."""
    if size.value not in (4, 8, 16) or (m[1] == "cg" and size.value != 16):
        raise TypeError(m[0])
    rest = rest[:-1] if "cache_hint" in m[0] else rest
    taken = b.constant(size.value, "int64")
    if rest and _is_predicate(rest[0]):
        taken = f"np_where({b.predicate(rest[0])}, int64(0), {taken})"
    elif rest:
        taken = f"{b.use(rest[0], 'u32')}.astype(int64)"
    where = f"{b.address(target)}, {b.address(source)}, {b.lanes}"
    b.line(f"m.async_copies.start({where}, {size.value}, {taken}, {b.at})")


def _is_predicate(operand: Operand) -> bool:
    return getattr(operand, "type", "") == "pred" or hasattr(operand, "predicate")


@emits(r"cp\.async\.commit_group")
def commit_group(b: BlockCode, m: Match[str]) -> None:
    b.line(f"m.async_copies.commit({b.mask})")


@emits(r"cp\.async\.wait_(group|all)")
def wait_group(b: BlockCode, m: Match[str], newest: Operand = None) -> None:
    b.line(f"m.async_copies.wait({b.mask}, {newest.value if newest else None})")
