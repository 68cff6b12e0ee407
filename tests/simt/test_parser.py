# SPDX-License-Identifier: Apache-2.0
"""Tests of the parser with unusual forms of PTX that NVRTC emits or inline asm adds."""

from __future__ import annotations

import pytest

from tests import simt
from tests.simt.parser import (
    Address,
    Function,
    Immediate,
    Location,
    Not,
    Pair,
    Register,
    Special,
    Symbol,
    Vector,
    parse,
)

HEADER = ".version 8.8\n.target sm_80\n.address_size 64\n"


def function(body: str, before: str = "", after: str = "") -> Function:
    text = f"{HEADER}{before}.visible .entry k(\n\t.param .u64 k_param_0,\n\t.param .align 64 .b8 k_param_1[128]\n)"
    return parse(f"{text}\n.maxntid 128, 1, 1\n{{\n{body}\n}}\n{after}").functions["k"]


def test_operands() -> None:
    entry = function(
        ".reg .b32 %r<4>; .reg .pred %p<3>; .reg .b64 %rd<2>;\n"
        "shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 0x1f, -1;\n"
        "@!%p2 ld.global.v2.u32 {%r1, _}, [%rd1+-4];\n"
        "mov.f32 %r3, 0fBF800000; mov.u32 %r3, %tid.x;\n"
        "setp.and.s32 %p1, %r1, %r2, !%p2;\n"
        "cp.async.bulk.tensor.2d [%r1], [%rd1, {%r2, %r3}], [%r3];"
    )
    r1, r2, r3 = (Register(f"%r{k}", "b32") for k in (1, 2, 3))
    p1, p2, rd1 = Register("%p1", "pred"), Register("%p2", "pred"), Register("%rd1", "b64")
    shuffle, load, constant, special, compare, tensor = entry.instructions
    assert shuffle.operands == (Pair(r1, p1), r2, Immediate(1), Immediate(31), Immediate(-1))
    assert (load.guard, load.operands) == (Not(p2), (Vector((r1, None)), Address(rd1, -4)))
    assert constant.operands == (r3, Immediate(0xBF800000, 32))
    assert special.operands == (r3, Special("%tid.x"))
    assert compare.operands[-1] == Not(p2)
    assert tensor.operands == (Address(r1), Address(rd1, 0, (r2, r3)), Address(r3))


def test_parameters_and_variables() -> None:
    module = parse(
        f"{HEADER}.const .align 4 .b8 tab[4] = {{0, 0, 128, 63}};\n.global .align 4 .u32 counter = 7;\n"
        ".extern .shared .align 128 .b8 dyn[];\n.visible .entry k(.param .u64 .ptr .global .align 1 k_param_0)\n"
        "{\n.shared .align 16 .b8 s[64];\n.local .align 8 .b8 __local_depot0[24];\nret;\n}\n"
    )
    table, counter, dynamic = module.variables
    assert (table.space, table.align, table.size, table.data) == ("const", 4, 4, bytes([0, 0, 128, 63]))
    assert counter.data == (7).to_bytes(4, "little")
    assert (dynamic.space, dynamic.align, dynamic.size) == ("shared", 128, 0)
    entry = module.functions["k"]
    assert [(p.name, p.size, p.align) for p in entry.parameters] == [("k_param_0", 8, 8)]
    assert [(v.name, v.space, v.size) for v in entry.variables] == [
        ("s", "shared", 64),
        ("__local_depot0", "local", 24),
    ]


def test_scopes_hide_registers_and_labels_of_each_inlining() -> None:
    asm = "{ .reg .pred p; .reg .b32 q; setp.ne.s32 p, %r1, 0; @p bra L1; mov.b32 q, 1; L1: mov.b32 %r1, q; }\n"
    entry = function(".reg .b32 %r<4>;\n" + asm + asm)
    first, second = (entry.instructions[k].operands[0] for k in (0, 4))
    assert isinstance(first, Register)
    assert isinstance(second, Register)
    assert first.name != second.name
    jumps = [i.operands[0] for i in entry.instructions if i.opcode == "bra"]
    assert [entry.labels[jump.name] for jump in jumps if isinstance(jump, Symbol)] == [3, 7]


def test_labels_resolve_forwards_and_spaces_are_no_labels() -> None:
    entry = function(".reg .b32 %r<2>;\nbra.uni $L__BB0_2;\nst.shared::cta.b32 [%r1], 1;\n$L__BB0_2:\nret;")
    assert entry.instructions[0].operands == (Symbol("$L__BB0_2"),)
    assert entry.labels == {"$L__BB0_2": 2}
    assert entry.instructions[1].opcode == "st.shared::cta.b32"


def test_source_lines_with_the_lines_that_they_are_inlined_at() -> None:
    entry = function(
        ".reg .b32 %r<2>;\n.loc\t1 20 3\nmov.u32 %r1, 0;\n"
        ".loc\t2 99 1, function_name $L__info_string0, inlined_at 1 20 3\nmov.u32 %r1, 1;\n.loc 1 0 3\nmov.u32 %r1, 2;",
        after='\t.file\t1 "/somewhere/gemv.cu"\n\t.file\t2 "/somewhere/ptx/mma.cuh"\n',
    )
    plain, inlined, unknown = (i.source for i in entry.instructions)
    assert str(plain) == "gemv.cu:20"
    assert inlined == Location("mma.cuh", 99, Location("gemv.cu", 20))
    assert str(inlined) == "mma.cuh:99, inlined at gemv.cu:20"
    assert unknown == inlined


def test_comments_pragmas_and_sections_are_passed_over() -> None:
    entry = function(
        '.reg .b32 %r<2>;\n// a; comment {\n/* another; } */ mov.u32 %r1, 0;\n.pragma "nounroll";\nret;',
        after="\t.section\t.debug_str\n\t{\n$L__info_string0:\n.b8 95,90,0\n\n\t}\n",
    )
    assert [i.opcode for i in entry.instructions] == ["mov.u32", "ret"]


def test_branch_tables() -> None:
    entry = function(".reg .b32 %r<2>;\n$L_brx_0: .branchtargets $A, $B;\nbrx.idx %r1, $L_brx_0;\n$A:\nret;\n$B:\nret;")
    assert entry.tables == {"$L_brx_0": ["$A", "$B"]}


def test_an_error_names_the_line() -> None:
    with pytest.raises(simt.PtxError, match="PTX line 13: number not understood"):
        function(".reg .b32 %r<2>;\nmov.u32 %r1, 0;\n\nadd.s32 %r1, %r1, 0q7;")
