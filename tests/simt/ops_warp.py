# SPDX-License-Identifier: Apache-2.0
"""The translation of shuffles, votes, matrix loads and mma (PTX ISA 9.7.9.6-9.7.9.8, 9.7.13, 9.7.14)."""

from __future__ import annotations

from re import Match

from tests.simt.emit import BlockCode, Operand, emits, items


@emits(r"shfl\.sync\.(up|down|bfly|idx)\.b32", "warp")
def shuffle(
    b: BlockCode, m: Match[str], d: Operand, x: Operand, lane: Operand, clamp: Operand, members: Operand
) -> None:
    arguments = f"{m[1]!r}, {b.use(x, 'b32')}, {b.use(lane, 'u32')}, {b.use(clamp, 'u32')}, active"
    # Reading the member mask keeps its register alive until the scheduler, which is not generated code, reads it.
    b.use(members, "u32")
    value, valid = b.results(2, f"m.warps.shuffle({arguments})")
    b.define_pair(d, "b32", value, valid)


@emits(r"vote\.sync\.(all|any|uni)\.pred", "warp")
def vote(b: BlockCode, m: Match[str], d: Operand, p: Operand, members: Operand) -> None:
    b.define(d, "pred", f"m.warps.vote({m[1]!r}, {b.predicate(p)}, active, {b.use(members, 'u32')})")


@emits(r"vote\.sync\.ballot\.b32", "warp")
def ballot(b: BlockCode, m: Match[str], d: Operand, p: Operand, members: Operand) -> None:
    b.define(d, "b32", f"m.warps.ballot({b.predicate(p)}, active, {b.use(members, 'u32')})")


@emits(r"activemask\.b32")
def active_mask(b: BlockCode, m: Match[str], d: Operand) -> None:
    b.define(d, "b32", f"m.warps.bits({b.mask})")


@emits(r"match\.(any|all)\.sync\.b(32|64)", "warp")
def match(b: BlockCode, m: Match[str], d: Operand, x: Operand, members: Operand) -> None:
    arguments = f"{b.use(x, 'b' + m[2])}, active, {b.use(members, 'u32')}"
    value, same = b.results(2, f"m.warps.match({m[1]!r}, {arguments})")
    b.define_pair(d, "b32", value, same)


@emits(r"redux\.sync\.(add|min|max|and|or|xor)\.([bus]32)", "warp")
def reduce(b: BlockCode, m: Match[str], d: Operand, x: Operand, members: Operand) -> None:
    b.define(d, m[2], f"m.warps.reduce({m[1]!r}, {b.use(x, m[2])}, active, {b.use(members, 'u32')})")


@emits(r"elect\.sync", "warp")
def elect(b: BlockCode, m: Match[str], d: Operand, members: Operand) -> None:
    lane, chosen = b.results(2, f"m.warps.elect(active, {b.use(members, 'u32')})")
    b.define_pair(d, "b32", lane, chosen)


@emits(r"ldmatrix\.sync\.aligned(?:\.m8n8)?\.x([124])(\.trans)?\.shared(?:::cta)?\.b16", "warp")
def load_matrix(b: BlockCode, m: Match[str], d: Operand, address: Operand) -> None:
    targets = items(d)
    values = b.results(len(targets), f"m.matrices.load({b.address(address)}, active, {m[1]}, {bool(m[2])}, {b.at})")
    b.define_all(targets, "b32", values)


@emits(r"stmatrix\.sync\.aligned(?:\.m8n8)?\.x([124])(\.trans)?\.shared(?:::cta)?\.b16", "warp")
def store_matrix(b: BlockCode, m: Match[str], address: Operand, value: Operand) -> None:
    values = "".join(f"{b.use(v, 'b32')}, " for v in items(value))
    b.line(f"m.matrices.store({b.address(address)}, active, ({values}), {bool(m[2])}, {b.at})")


@emits(r"mma\.sync\.aligned\.m(16|8)n8k(8|16|32)\.row\.col(\.satfinite)?\.(\w+)\.(\w+)\.(\w+)\.(\w+)", "warp")
def multiply_matrices(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, z: Operand) -> None:
    rows, depth = int(m[1]), int(m[2])
    to, left, right, added = m[4], m[5], m[6], m[7]
    known = {("f32", "f16", "f16", "f32"), ("f16", "f16", "f16", "f16"), ("f32", "bf16", "bf16", "f32")}
    small = (to, left, right, added) == ("f32", "e4m3", "e4m3", "f32")
    integer = (to, added) == ("s32", "s32") and {left, right} <= {"s8", "u8"}
    shapes = {(16, 32), (16, 16), (8, 16)} if integer else {(16, 32)} if small else {(16, 8), (16, 16)}
    floats = small or (to, left, right, added) in known
    if (rows, depth) not in shapes or not (integer or (floats and not m[3])):
        raise TypeError(m[0])
    parts = [
        "".join(f"{b.use(v, kind)}, " for v in items(operand))
        for operand, kind in ((x, "b32"), (y, "b32"), (z, "f32" if added == "f32" else "b32"))
    ]
    targets = items(d)
    call = f"m.matrices.multiply({rows}, {depth}, {left!r}, {right!r}, {added!r}, {bool(m[3])}, active, "
    values = b.results(len(targets), call + ", ".join(f"({part})" for part in parts) + ")")
    b.define_all(targets, "f32" if to == "f32" else "b32", values)
