# SPDX-License-Identifier: Apache-2.0
"""The translation of asynchronous copies, mbarriers and wgmma (PTX ISA 9.7.9.25, 9.7.13.15, 9.7.15)."""

from __future__ import annotations

from re import Match

from tests.simt.emit import BlockCode, Operand, emits, items
from tests.simt.memory import SHARED_GENERIC
from tests.simt.parser import Vector
from tests.simt.wgmma import Shape


@emits(r"cp\.async\.(ca|cg)\.shared(?:::cta)?\.global(?:\.L2::(\w+))*")
def copy_async(b: BlockCode, m: Match[str], target: Operand, source: Operand, size: Operand, *rest: Operand) -> None:
    """Translate ``cp.async``.

    ``rest`` holds the number of bytes to read, or a predicate to read none, and then a cache policy.
    """
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


@emits(r"cp\.async\.mbarrier\.arrive(\.noinc)?(?:\.shared(?:::cta)?)?\.b64")
def signal(b: BlockCode, m: Match[str], barrier: Operand) -> None:
    b.line(f"m.async_copies.signal({_shared(b, m, barrier)}, {b.lanes}, {not m[1]}, {b.at})")


def _shared(b: BlockCode, m: Match[str], operand: Operand) -> str:
    """Return the shared address of an operand that may be generic."""
    address = b.address(operand)
    return address if ".shared" in m[0] else f"({address} - {b.constant(SHARED_GENERIC, 'int64')})"


SCOPE = r"(?:\.(?:release|acquire|relaxed|cta|cluster))*"
SHARED = r"(?:\.shared(?:::(?:cta|cluster))?)?"


@emits(rf"mbarrier\.init{SHARED}\.b64")
def mbarrier_init(b: BlockCode, m: Match[str], barrier: Operand, count: Operand) -> None:
    b.line(f"m.mbarriers.init({_shared(b, m, barrier)}, {b.lanes}, {b.use(count, 'u32')}, {b.at})")


@emits(rf"mbarrier\.inval{SHARED}\.b64")
def mbarrier_invalidate(b: BlockCode, m: Match[str], barrier: Operand) -> None:
    b.line(f"m.mbarriers.invalidate({_shared(b, m, barrier)}, {b.lanes}, {b.at})")


@emits(rf"mbarrier\.arrive(_drop)?(\.expect_tx)?(?:\.noComplete)?{SCOPE}{SHARED}\.b64")
def mbarrier_arrive(b: BlockCode, m: Match[str], state: Operand, barrier: Operand, count: Operand = None) -> None:
    number = f"{b.use(count, 'u32')}.astype(int64)" if count else "int64(1)"
    arrivals, transfers = ("int64(1)", number) if m[2] else (number, "int64(0)")
    where = f"{_shared(b, m, barrier)}, {b.lanes}"
    result = b.temporary(f"m.mbarriers.arrive({where}, {arrivals}, {transfers}, {b.at}, drop={bool(m[1])})")
    b.define(state, "b64", result)


@emits(rf"mbarrier\.(expect|complete)_tx{SCOPE}{SHARED}\.b64")
def mbarrier_expect(b: BlockCode, m: Match[str], barrier: Operand, count: Operand) -> None:
    number = f"{'-' if m[1] == 'complete' else ''}{b.use(count, 'u32')}.astype(int64)"
    b.line(f"m.mbarriers.arrive({_shared(b, m, barrier)}, {b.lanes}, int64(0), {number}, {b.at})")


@emits(rf"mbarrier\.test_wait(\.parity)?{SCOPE}{SHARED}\.b64")
def mbarrier_test(b: BlockCode, m: Match[str], d: Operand, barrier: Operand, phase: Operand) -> None:
    value = b.use(phase, "u32" if m[1] else "b64")
    b.define(d, "pred", f"m.mbarriers.test({_shared(b, m, barrier)}, {b.lanes}, {value}, {bool(m[1])}, {b.at})")


@emits(rf"mbarrier\.try_wait(\.parity)?{SCOPE}{SHARED}\.b64", "polls")
def mbarrier_wait(b: BlockCode, m: Match[str], d: Operand, barrier: Operand, phase: Operand, *hint: Operand) -> None:
    """Translate ``try_wait`` as a wait without a time limit: a program cannot tell that from repeated tries."""
    value = b.use(phase, "u32" if m[1] else "b64")
    where = f"active, {_shared(b, m, barrier)}, {value}, {bool(m[1])}"
    b.line(f"m.mbarriers.wait({where}, {b.names.register(d)!r}, {b.number}, {b.following}, {b.at})")


HINT = r"(\.L2::cache_hint)?"
TO_SHARED = r"\.shared::(?:cluster|cta)"


@emits(rf"cp\.async\.bulk{TO_SHARED}\.(global|shared::cta)\.mbarrier::complete_tx::bytes(\.multicast::cluster)?{HINT}")
def bulk_load(
    b: BlockCode, m: Match[str], d: Operand, x: Operand, size: Operand, barrier: Operand, *rest: Operand
) -> None:
    where = f"{b.lanes}, {b.address(d)}, {b.address(x)}, {b.use(size, 'u32')}, {b.address(barrier)}"
    if m[2]:
        b.line(f"m.bulk.load_multicast({where}, {b.use(rest[0], 'u16')}, {b.at})")
    else:
        b.line(f"m.bulk.load({where}, {m[1]!r}, {b.at})")


@emits(rf"cp\.async\.bulk\.global\.shared::cta\.bulk_group{HINT}")
def bulk_store(b: BlockCode, m: Match[str], d: Operand, x: Operand, size: Operand, *hint: Operand) -> None:
    b.line(f"m.bulk.store({b.lanes}, {b.address(d)}, {b.address(x)}, {b.use(size, 'u32')}, {b.at})")


def _coordinates(b: BlockCode, operand: Operand) -> str:
    return "(" + "".join(f"{b.use(c, 's32')}, " for c in operand.coordinates) + ")"


@emits(
    rf"cp\.async\.bulk\.tensor\.[1-5]d{TO_SHARED}\.global(?:\.tile)?\.mbarrier::complete_tx::bytes"
    rf"(\.multicast::cluster)?{HINT}"
)
def tensor_load(b: BlockCode, m: Match[str], d: Operand, tensor: Operand, barrier: Operand, *rest: Operand) -> None:
    ranks = b.use(rest[0], "u16") if m[1] else "None"
    where = f"{b.lanes}, {b.address(d)}, {b.address(tensor)}, {_coordinates(b, tensor)}, {b.address(barrier)}"
    b.line(f"m.bulk.load_tensor({where}, {ranks}, {b.at})")


@emits(rf"cp\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta(?:\.tile)?\.bulk_group{HINT}")
def tensor_store(b: BlockCode, m: Match[str], tensor: Operand, x: Operand, *hint: Operand) -> None:
    where = f"{b.lanes}, {b.address(tensor)}, {_coordinates(b, tensor)}, {b.address(x)}"
    b.line(f"m.bulk.store_tensor({where}, {b.at})")


@emits(
    r"cp\.async\.bulk\.prefetch\.[\w.:]+|prefetch\.(?:param\.|const\.)?tensormap"
    r"|cp\.async\.bulk\.prefetch\.tensor\.[\w.:]+"
)
def bulk_prefetch(b: BlockCode, m: Match[str], *operands: Operand) -> None:
    """Ignore prefetches, which have no effect on results."""


@emits(r"cp\.async\.bulk\.commit_group")
def bulk_commit(b: BlockCode, m: Match[str]) -> None:
    b.line(f"m.bulk.commit({b.mask})")


@emits(r"cp\.async\.bulk\.wait_group(?:\.read)?")
def bulk_wait(b: BlockCode, m: Match[str], newest: Operand) -> None:
    b.line(f"m.bulk.wait({b.mask}, {newest.value})")


@emits(r"st\.async(?:\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes(?:\.v[24])?\.([busf](?:32|64))")
def store_async(b: BlockCode, m: Match[str], address: Operand, value: Operand, barrier: Operand) -> None:
    values = "".join(f"{b.use(v, m[1])}, " for v in items(value))
    b.line(f"m.bulk.store_async({b.lanes}, {b.address(address)}, ({values}), {b.address(barrier)}, {b.at})")


@emits(r"fence\.proxy\.async(?:\.(?:global|shared::(?:cta|cluster)))*")
def fence_proxy(b: BlockCode, m: Match[str]) -> None:
    b.line(f"m.fence_proxy({b.mask})")


@emits(r"wgmma\.(fence|commit_group)\.sync\.aligned", "warp")
def wgmma_fence(b: BlockCode, m: Match[str]) -> None:
    b.line(f"m.warpgroups.{m[1].removesuffix('_group')}(active)")


@emits(r"wgmma\.wait_group\.sync\.aligned", "warp")
def wgmma_wait(b: BlockCode, m: Match[str], newest: Operand) -> None:
    b.line(f"m.warpgroups.wait(active, {newest.value})")


FACTOR = r"(f16|bf16|s8|u8|e4m3)"


@emits(rf"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(16|32)\.(f32|f16|s32)\.{FACTOR}\.{FACTOR}", "warpgroup")
def wgmma(b: BlockCode, m: Match[str], d: Operand, x: Operand, y: Operand, add: Operand, *flags: Operand) -> None:
    """Translate ``wgmma``; ``flags`` are the signs of A and B, then, for 16-bit types, their transpositions."""
    columns, depth, added, left, right = int(m[1]), int(m[2]), m[3], m[4], m[5]
    integer = added == "s32"
    small = "e4m3" in (left, right)
    from_registers = isinstance(x, Vector)
    if (depth == 32) != (integer != small) or columns % 8 or columns > 256 or (left != right and not integer):
        raise TypeError(m[0])
    values = [int(flag.value) for flag in flags]
    negative = (values[0] == -1, values[1] == -1) if values else (False, False)
    turned = [False] * from_registers + [bool(value) for value in values[2:]]
    transposed = (turned[0], turned[1]) if len(turned) == 2 else (False, False)
    shape = b.names.object(Shape(columns, depth, added, left, right, negative, transposed))
    a = "(" + "".join(f"{b.use(v, 'b32')}, " for v in items(x)) + ")" if from_registers else b.use(x, "b64")
    kind = "f32" if added == "f32" else "b32"
    sums = "".join(f"{b.use(v, kind)}, " for v in items(d))
    call = f"m.warpgroups.multiply({shape}, active, {a}, {b.use(y, 'b64')}, {b.predicate(add)}, ({sums}), {b.at})"
    b.define_all(items(d), kind, b.results(len(items(d)), call))
