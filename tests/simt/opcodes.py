# SPDX-License-Identifier: Apache-2.0
"""The test cases of all opcodes, in which the simulator is compared with hardware and with plain Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.simt.case import Case


def _simple(opcode: str, output: str, operands: str, arch: str = "80", **more: Any) -> Case:
    """Return the case of an opcode whose operands are one result and then the inputs, of the kinds in ``operands``."""
    kinds = tuple(operands.split())
    text = ", ".join(["o0", *(f"a{k}" for k in range(len(kinds)))])
    return Case(opcode, f"{opcode} {text};", (output,), kinds, arch, **more)


def _integers() -> Iterator[Case]:
    for table in (0xEA, 0x6A, 0x1B, 0xE8, 0xF8, 0xE2):
        yield Case(f"lop3.b32 {table:#x}", f"lop3.b32 o0, a0, a1, a2, {table};", ("b32",), ("b32",) * 3)
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        yield _simple(f"prmt.b32{mode}", "b32", "b32 b32 b32")
    for kind in ("s32", "u32", "s64", "u64", "s16", "u16"):
        for operation in ("mul.lo", "mul.hi", "min", "max", "add", "sub"):
            yield _simple(f"{operation}.{kind}", kind, f"{kind} {kind}")
        yield _simple(f"mad.lo.{kind}", kind, f"{kind} {kind} {kind}")
        yield _simple(f"sad.{kind}", kind, f"{kind} {kind} {kind}")
        yield _simple(f"shr.{kind}", kind, f"{kind} u32:70")
        wide = kind[0] + str(2 * int(kind[1:]))
        if kind[1:] != "64":
            yield _simple(f"mul.wide.{kind}", wide, f"{kind} {kind}")
            yield _simple(f"mad.wide.{kind}", wide, f"{kind} {kind} {wide}")
    for kind in ("s32", "u32"):
        yield _simple(f"mad.hi.{kind}", kind, f"{kind} {kind} {kind}")
        yield _simple(f"mul24.lo.{kind}", kind, f"{kind} {kind}")
        yield _simple(f"dp4a.{kind}.s32", "s32", f"{kind} s32 s32")
        yield _simple(f"dp4a.{kind}.u32", "s32" if kind == "s32" else "u32", f"{kind} u32 u32")
        for half in ("lo", "hi"):
            yield _simple(f"dp2a.{half}.{kind}.s32", "s32", f"{kind} s32 s32")
            yield _simple(f"dp2a.{half}.{kind}.u32", "s32" if kind == "s32" else "u32", f"{kind} u32 u32")
    for kind in ("s32", "u32", "s64", "u64"):
        yield _simple(f"bfe.{kind}", kind, f"{kind} u32:80 u32:80")
        yield _simple(f"bfind.{kind}", "u32", kind)
        yield _simple(f"bfind.shiftamt.{kind}", "u32", kind)
        for operation in ("div", "rem"):
            bits = kind[1:]
            text = f"{operation}.{kind} o0, a0, t;"
            yield Case(
                f"{operation}.{kind}", f".reg .b{bits} t; or.b{bits} t, a1, 1; {text}", (kind,), (kind, f"{kind}")
            )
    for bits in ("32", "64"):
        yield _simple(f"bfi.b{bits}", f"b{bits}", f"b{bits} b{bits} u32:80 u32:80")
        yield _simple(f"brev.b{bits}", f"b{bits}", f"b{bits}")
        yield _simple(f"popc.b{bits}", "u32", f"b{bits}")
        yield _simple(f"clz.b{bits}", "u32", f"b{bits}")
        yield _simple(f"abs.s{bits}", f"s{bits}", f"s{bits}")
        yield _simple(f"neg.s{bits}", f"s{bits}", f"s{bits}")
        yield _simple(f"shl.b{bits}", f"b{bits}", f"b{bits} u32:70")
        yield _simple(f"cnot.b{bits}", f"b{bits}", f"b{bits}")
    for mode in ("l.wrap", "l.clamp", "r.wrap", "r.clamp"):
        yield _simple(f"shf.{mode}.b32", "b32", "b32 b32 u32:70")
    yield Case(
        "add.cc.u32", "add.cc.u32 o0, a0, a1; addc.u32 o1, a2, a3;", ("u32", "u32"), ("u32", "u32", "u32", "u32")
    )
    yield Case(
        "sub.cc.u32", "sub.cc.u32 o0, a0, a1; subc.u32 o1, a2, a3;", ("u32", "u32"), ("u32", "u32", "u32", "u32")
    )
    for to, source in (("s8", "s32"), ("u8", "s32"), ("s16", "s32"), ("u16", "s32"), ("u32", "s32"), ("s32", "u32")):
        kind = to if to[1:] in ("16", "32") else "s32"
        yield Case(f"cvt.sat.{to}.{source}", f"cvt.sat.{to}.{source} o0, a0;", (kind,), (source,))
    yield _simple("cvt.s64.s32", "s64", "s32")
    yield _simple("slct.b32.s32", "b32", "b32 b32 s32")
    for compare in ("lt.s32", "ge.u32", "eq.b32", "hi.u32"):
        text = f".reg .pred p, q; setp.{compare} p|q, a0, a1; selp.b32 o0, 1, 0, p; selp.b32 o1, 1, 0, q;"
        yield Case(f"setp.{compare}", text, ("u32", "u32"), ("s32", "s32"))


def _floats() -> Iterator[Case]:
    for suffix in ("", ".ftz", ".sat", ".ftz.sat"):
        for operation in ("add", "sub", "mul"):
            yield _simple(f"{operation}.rn{suffix}.f32", "f32", "f32 f32")
        yield _simple(f"fma.rn{suffix}.f32", "f32", "f32 f32 f32")
    for operation in ("min", "max"):
        for suffix in ("", ".ftz", ".NaN"):
            yield _simple(f"{operation}{suffix}.f32", "f32", "f32 f32")
        for kind in ("f16", "f16x2", "bf16", "bf16x2"):
            yield _simple(f"{operation}.{kind}", kind, f"{kind} {kind}")
            yield _simple(f"{operation}.NaN.{kind}", kind, f"{kind} {kind}")
    for kind in ("f16", "f16x2", "bf16", "bf16x2"):
        arch = "90" if kind[0] == "b" else "80"
        for operation in ("add.rn", "sub.rn", "mul.rn"):
            yield _simple(f"{operation}.{kind}", kind, f"{kind} {kind}", arch)
        yield _simple(f"fma.rn.{kind}", kind, f"{kind} {kind} {kind}")
        yield _simple(f"fma.rn.relu.{kind}", kind, f"{kind} {kind} {kind}")
        yield _simple(f"neg.{kind}", kind, kind)
        yield _simple(f"abs.{kind}", kind, kind)
    yield _simple("fma.rm.f32", "f32", "f32 f32 f32")
    yield _simple("div.rn.f32", "f32", "f32 f32")
    yield _simple("sqrt.rn.f32", "f32", "f32")
    yield _simple("rcp.rn.f32", "f32", "f32")
    yield _simple("copysign.f32", "f32", "f32 f32")
    for compare in ("lt", "geu", "equ", "ne", "num", "nan", "neu", "gtu"):
        text = f".reg .pred p, q; setp.{compare}.f32 p|q, a0, a1; selp.b32 o0, 1, 0, p; selp.b32 o1, 1, 0, q;"
        yield Case(f"setp.{compare}.f32", text, ("u32", "u32"), ("f32", "f32"))
    for kind in ("f16", "bf16"):
        text = f".reg .pred p, q; setp.gt.{kind}x2 p|q, a0, a1; selp.b32 o0, 1, 0, p; selp.b32 o1, 1, 0, q;"
        yield Case(
            f"setp.gt.{kind}x2", text, ("u32", "u32"), (f"{kind}x2", f"{kind}x2"), "80" if kind == "f16" else "90"
        )
    yield _simple("set.gt.f16x2.f16x2", "f16x2", "f16x2 f16x2")
    # Approximate instructions: each case has the error bound that the PTX ISA states, relative or absolute.
    yield _simple("ex2.approx.f32", "f32", "f32:unit", tolerance=2.0**-21)
    yield _simple("lg2.approx.f32", "f32", "f32", absolute=2.0**-20, tolerance=2.0**-21)
    yield _simple("sin.approx.f32", "f32", "f32:unit", absolute=2.0**-20)
    yield _simple("cos.approx.f32", "f32", "f32:unit", absolute=2.0**-20)
    yield _simple("rsqrt.approx.f32", "f32", "f32", tolerance=2.0**-21)
    yield _simple("rcp.approx.ftz.f32", "f32", "f32", tolerance=2.0**-22)
    yield _simple("sqrt.approx.ftz.f32", "f32", "f32", tolerance=2.0**-21)
    yield _simple("div.approx.ftz.f32", "f32", "f32:unit f32:unit", tolerance=2.0**-21)
    yield _simple("div.full.ftz.f32", "f32", "f32:unit f32:unit", tolerance=2.0**-21)
    yield _simple("tanh.approx.f32", "f32", "f32:unit", tolerance=2.0**-10)
    yield _simple("tanh.approx.f16x2", "f16x2", "f16x2:unit", tolerance=2.0**-9)
    yield _simple("ex2.approx.f16x2", "f16x2", "f16x2:unit", tolerance=2.0**-9)
    yield _simple("ex2.approx.ftz.bf16x2", "bf16x2", "bf16x2:unit", "90", tolerance=2.0**-6)


def _conversions() -> Iterator[Case]:
    for rounding in ("rn", "rz"):
        for kind in ("f16", "bf16"):
            arch = "90" if (rounding, kind) == ("rz", "bf16") else "80"
            yield _simple(f"cvt.{rounding}.{kind}.f32", kind, "f32", arch)
            yield _simple(f"cvt.{rounding}.{kind}x2.f32", f"{kind}x2", "f32 f32")
    yield _simple("cvt.rn.relu.bf16.f32", "bf16", "f32")
    yield _simple("cvt.f32.f16", "f32", "f16")
    yield _simple("cvt.f32.bf16", "f32", "bf16", "90")
    for rounding in ("rni", "rzi", "rmi", "rpi"):
        yield _simple(f"cvt.{rounding}.f32.f32", "f32", "f32")
        for kind in ("s32", "u32", "s64", "u64", "s16"):
            yield _simple(f"cvt.{rounding}.{kind}.f32", kind, "f32")
        yield _simple(f"cvt.{rounding}.s32.f16", "s32", "f16")
    yield _simple("cvt.rni.ftz.s32.f32", "s32", "f32")
    for kind in ("s32", "u32", "s64", "u64", "u16"):
        yield _simple(f"cvt.rn.f32.{kind}", "f32", kind)
    for kind in ("s32", "u32", "s16"):
        yield _simple(f"cvt.rn.f16.{kind}", "f16", kind)
    yield _simple("cvt.rn.bf16.s32", "bf16", "s32", "90")
    for kind in ("s8", "u8"):
        yield Case(f"cvt.rn.f32.{kind}", f"cvt.rn.f32.{kind} o0, a0;", ("f32",), ("s32",))
    yield _simple("cvt.sat.f32.f32", "f32", "f32")


def _warps() -> Iterator[Case]:
    for mode in ("up", "down", "bfly", "idx"):
        for clamp in (0x1F, 0, 0x181F, 0x1C07):
            text = f".reg .pred p; shfl.sync.{mode}.b32 o0|p, a0, a1, {clamp}, -1; selp.b32 o1, 1, 0, p;"
            yield Case(f"shfl.sync.{mode}.b32 {clamp:#x}", text, ("b32", "u32"), ("b32", "u32:40"))
    for mode in ("all", "any", "uni"):
        text = f".reg .pred p; setp.gt.u32 p, a0, 2; vote.sync.{mode}.pred p, p, -1; selp.b32 o0, 1, 0, p;"
        yield Case(f"vote.sync.{mode}.pred", text, ("u32",), ("u32:60",))
    text = ".reg .pred p; setp.gt.u32 p, a0, 2; vote.sync.ballot.b32 o0, p, -1;"
    yield Case("vote.sync.ballot.b32", text, ("u32",), ("u32:5",))
    yield Case("match.any.sync.b32", "match.any.sync.b32 o0, a0, -1;", ("u32",), ("u32:4",))
    yield Case(
        "match.all.sync.b32", ".reg .pred p; match.all.sync.b32 o0|p, a0, -1; selp.b32 o1, 1, 0, p;", ("u32", "u32"),
        ("u32:1",),
    )  # fmt: skip
    for operation in ("add", "min", "max"):
        for kind in ("s32", "u32"):
            yield Case(f"redux.sync.{operation}.{kind}", f"redux.sync.{operation}.{kind} o0, a0, -1;", (kind,), (kind,))
    for operation in ("and", "or", "xor"):
        yield Case(f"redux.sync.{operation}.b32", f"redux.sync.{operation}.b32 o0, a0, -1;", ("b32",), ("b32",))
    text = ".reg .pred p; elect.sync o0|p, -1; selp.b32 o1, 1, 0, p;"
    yield Case("elect.sync", text, ("u32", "u32"), ("u32",), "90")


_FILL = """
  __shared__ alignas(1024) unsigned tile[4][128];
  const unsigned warp = t / 32, lane = t % 32;
  tile[warp][lane] = a0; tile[warp][lane + 32] = a1; tile[warp][lane + 64] = a2; tile[warp][lane + 96] = a3;
  __syncwarp();
  const unsigned row = static_cast<unsigned>(__cvta_generic_to_shared(&tile[warp][lane * 4]));
"""


def _matrices() -> Iterator[Case]:
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            outputs = ", ".join(f"%{k}" for k in range(count))
            results = ", ".join(f'"+r"(o{k})' for k in range(count))
            opcode = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            text = f'{_FILL}  asm volatile("{opcode} {{{outputs}}}, [%{count}];" : {results} : "r"(row) : "memory");'
            yield Case(opcode, text, ("b32",) * count, ("b32",) * 4, code=True)
            opcode = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            values = ", ".join(f"%{k + 1}" for k in range(count))
            given = ", ".join(f'"r"(a{k} + 1)' for k in range(count))
            text = f'{_FILL}  asm volatile("{opcode} [%0], {{{values}}};" :: "r"(row), {given} : "memory");\n'
            text += "  __syncwarp();\n" + "\n".join(f"  o{k} = tile[warp][lane + {32 * k}];" for k in range(4))
            yield Case(opcode, text, ("b32",) * 4, ("b32",) * 4, "90", code=True)
    for shape, kind, added, a, b, c in (
        ("m16n8k8", "f16", "f32", 2, 1, 4), ("m16n8k16", "f16", "f32", 4, 2, 4), ("m16n8k8", "bf16", "f32", 2, 1, 4),
        ("m16n8k16", "bf16", "f32", 4, 2, 4), ("m16n8k8", "f16", "f16", 2, 1, 2), ("m16n8k16", "f16", "f16", 4, 2, 2),
        ("m16n8k32", "s8", "s32", 4, 2, 4), ("m8n8k16", "s8", "s32", 1, 1, 2), ("m16n8k16", "s8", "s32", 2, 1, 4),
        ("m16n8k32", "u8", "s32", 4, 2, 4),
    ):  # fmt: skip
        opcode = f"mma.sync.aligned.{shape}.row.col.{added}.{kind}.{kind}.{added}"
        parts, first = [], 0
        for count in (a, b, c):
            parts.append("{" + ", ".join(f"a{k}" for k in range(first, first + count)) + "}")
            first += count
        text = f"{opcode} {{{', '.join(f'o{k}' for k in range(c))}}}, {', '.join(parts)};"
        sums = {"f32": "f32", "f16": "f16x2", "s32": "s32"}[added]
        factors = "b32" if kind[1:] == "8" else f"{kind}x2"
        exact, rough = ("", "") if kind[1:] == "8" else (":small", ":unit")
        yield Case(opcode, text, (sums,) * c, (factors + exact,) * (a + b) + (sums + exact,) * c)
        if rough:
            # Tensor cores add in an undocumented order and truncate float32 sums, which are below 2**9 here: allow for
            # that.
            inexact = (factors + rough,) * (a + b) + (sums + rough,) * c
            bound = {"tolerance": 2.0**-10} if added == "f16" else {"absolute": 2.0**-14}
            yield Case(f"{opcode} inexact", text, (sums,) * c, inexact, **bound)


def _warpgroups() -> Iterator[Case]:
    """Yield the cases of wgmma: operand B in every shared-memory layout, and A both in registers and in shared memory.

    For 16-bit types and 64 columns, A and B are also transposed.
    """
    for kind, added, columns in (
        ("f16", "f32", 8),
        ("bf16", "f32", 16),
        ("f16", "f32", 64),
        ("f16", "f16", 16),
        ("s8", "s32", 16),
    ):
        for layout, name in ((0, "plain"), (1, "128B"), (2, "64B"), (3, "32B")):
            for from_registers in (False, True):
                for transposed in (False, True) if kind != "s8" and columns == 64 else (False,):
                    yield warpgroup(kind, added, columns, layout, name, from_registers, transposed)


def warpgroup(
    kind: str, added: str, columns: int, layout: int, name: str, from_registers: bool, transposed: bool
) -> Case:
    """Return a case of wgmma.

    ``layout`` is the number of a swizzle in a matrix descriptor (PTX ISA), ``name`` its name.
    """
    small = kind in ("s8", "e4m3")
    depth = 32 if small else 16
    count = columns // (4 if added == "f16" else 2)
    span = (0, 128, 64, 32)[layout]
    # In the PTX ISA's canonical layouts, eight rows of `span` bytes (without swizzle: of 16) are adjacent.
    if transposed:
        leading, stride = (columns * 16, 128) if not span else (16 * span, 8 * span)
    else:
        leading, stride = (128, 256) if not span else (0, 8 * span)
    a_leading, a_stride = (128, 256) if not span else (0, 8 * span)
    opcode = f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{added}.{kind}.{kind}"
    sums = {"f32": "f32", "f16": "f16x2", "s32": "s32"}[added]
    outputs = ", ".join(f"%{k}" for k in range(count))
    results = ", ".join(f'"+r"(o{k})' for k in range(count))
    if from_registers:
        a, given = f"{{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}", '"r"(a0), "r"(a1), "r"(a2), "r"(a3)'
        b = count + 4
    else:
        a, given, b = f"%{count}", '"l"(a_tile)', count + 1
    flags = "" if kind == "s8" else ", 1, 1"
    if not small:
        flags += ("" if from_registers else ", 0") + f", {int(transposed)}"
    text = f"""
  __shared__ alignas(1024) unsigned tiles[2][2048];
  for (int i = t; i < 2048; i += n) {{ tiles[0][i] = x[i % 512]; tiles[1][i] = x[(i * 7 + 3) % 512]; }}
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  auto matrix = [](const void* start, unsigned long long leading, unsigned long long stride) {{
    return (__cvta_generic_to_shared(start) & 0x3ffff) >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 |
           static_cast<unsigned long long>({layout}) << 62;
  }};
  const unsigned long long a_tile = matrix(tiles[0], {a_leading}, {a_stride});
  const unsigned long long b_tile = matrix(tiles[1], {leading}, {stride});
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile("{opcode} {{{outputs}}}, {a}, %{b}, 1{flags};" : {results} : {given}, "l"(b_tile));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");"""
    what = f"{name} {'registers' if from_registers else 'shared'}{' transposed' if transposed else ''}"
    factors = {"s8": "b32", "e4m3": "b32:small"}.get(kind, f"{kind}x2:small")
    return Case(f"{opcode} {what}", text, (sums,) * count, (factors,) * 4, "90a", code=True)


CASES = {
    case.name: case
    for family in (_integers, _floats, _conversions, _warps, _matrices, _warpgroups)
    for case in family()
}  # fmt: skip
