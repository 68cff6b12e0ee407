# SPDX-License-Identifier: Apache-2.0
"""The translation of jumps, exits, barriers of CTAs and clusters (PTX ISA 9.7.12, 9.7.13.1-9.7.13.5), and hints."""

from __future__ import annotations

from re import Match

from tests.simt.emit import BlockCode, Operand, emits


@emits(r"bra(?:\.uni)?", "ends")
def branch(b: BlockCode, m: Match[str], target: Operand) -> None:
    b.outcome = b.guard


@emits(r"brx\.idx(?:\.uni)?", "ends")
def branch_table(b: BlockCode, m: Match[str], index: Operand, table: Operand) -> None:
    b.outcome = b.use(index, "u32")


@emits(r"ret(?:\.uni)?|exit", "ends")
def leave(b: BlockCode, m: Match[str]) -> None:
    pass


@emits(r"trap|brkpt", "warp")
def trap(b: BlockCode, m: Match[str]) -> None:
    b.line(f"m.fail('trap', 'the kernel executed a trap', {b.at}, {b.lanes})")


@emits(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?", "blocks")
def barrier(b: BlockCode, m: Match[str], name: Operand, count: Operand = None) -> None:
    threads = b.use(count, "s32") if count else "None"
    b.line(f"m.barriers.arrive(active, {b.use(name, 's32')}, {threads}, {b.following}, {m[1] == 'sync'}, {b.at})")


@emits(r"(?:bar|barrier)(?:\.cta)?\.red\.(popc|and|or)(?:\.aligned)?\.(u32|pred)", "blocks")
def barrier_reduce(b: BlockCode, m: Match[str], d: Operand, name: Operand, *rest: Operand) -> None:
    """Translate ``bar.red``; ``d`` gets the reduction over all arrived threads when the barrier completes."""
    count, value = rest if len(rest) == 2 else (None, rest[0])
    threads = b.use(count, "s32") if count else "None"
    b.names.register(d)
    b.line(
        f"m.barriers.arrive(active, {b.use(name, 's32')}, {threads}, {b.following}, True, {b.at}, "
        f"({m[1]!r}, {b.predicate(value)}, {b.names.register(d)!r}))"
    )


@emits(r"fence\.mbarrier_init\.release\.cluster")
def fence_mbarrier_init(b: BlockCode, m: Match[str]) -> None:
    b.line(f"m.barriers.fence_initialised({b.mask})")


@emits(r"barrier\.cluster\.arrive(?:\.release|(\.relaxed))?(?:\.aligned)?", "warp")
def cluster_arrive(b: BlockCode, m: Match[str]) -> None:
    b.line(f"m.barriers.cluster_arrive(active, {not m[1]}, {b.at})")


@emits(r"barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?", "blocks")
def cluster_wait(b: BlockCode, m: Match[str]) -> None:
    b.line(f"m.barriers.cluster_wait(active, {b.number}, {b.following}, {b.at})")


@emits(r"bar\.warp\.sync", "warp")
def warp_barrier(b: BlockCode, m: Match[str], members: Operand) -> None:
    # Reading the member mask keeps its register alive until the scheduler, which is not generated code, reads it.
    b.use(members, "u32")
    b.line("m.warp_barrier(active)")


@emits(r"(?:fence|membar)((?:\.(?:sc|acq_rel|acquire|release|cta|cluster|gpu|gl|sys|sync_restrict::shared::\w+))*)")
def fence(b: BlockCode, m: Match[str]) -> None:
    """Record fences in the race detector of global memory; the simulator's memory itself is sequentially consistent."""
    if {"gpu", "gl", "sys"} & set(m[1].split(".")):
        b.line(f"m.fence({b.mask})")


@emits(
    r"nanosleep\.u32|griddepcontrol\.launch_dependents"
    r"|(?:prefetch|prefetchu|applypriority|discard)(?:\.(?:global|local|L1|L2|L2::\w+))*|pragma"
)
def no_effect(b: BlockCode, m: Match[str], *operands: Operand) -> None:
    """Ignore hints, and orderings that the simulator always provides."""


@emits(r"griddepcontrol\.wait")
def dependent_wait(b: BlockCode, m: Match[str]) -> None:
    b.line(f"m.dependent_wait({b.mask})")


@emits(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32", "warp")
def register_count(b: BlockCode, m: Match[str], count: Operand) -> None:
    b.line(f"m.check_register_count({count.value}, {b.at}, {b.lanes})")


@emits(r"createpolicy\.[\w.:]+\.b64")
def cache_policy(b: BlockCode, m: Match[str], d: Operand, *operands: Operand) -> None:
    b.define(d, "b64", "uint64(0)")
