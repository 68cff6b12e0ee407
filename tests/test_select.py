# SPDX-License-Identifier: Apache-2.0
"""Tests of kernel selection without a GPU: refusals with reasons, choices and their launches."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupy_awq
from cupy_awq.kernels import select
from cupy_awq.kernels.decoder.attention import Attention
from cupy_awq.kernels.decoder.decoder import plan_attention
from cupy_awq.kernels.gemm import gather_columns
from cupy_awq.kernels.gemm.gemm_sm90_large import GEMM_SM90_LARGE
from cupy_awq.kernels.gemm.layouts import AwqLayout, FragmentLayout
from cupy_awq.kernels.gemm.problem import AWQ, FRAGMENTS, Problem
from cupy_awq.kernels.registry import FAMILIES, FAMILIES_OF
from cupy_awq.runtime import device
from cupy_awq.runtime.device import Capability
from cupy_awq.runtime.workspace import COUNTERS, WORKSPACE_BYTES
from tests.tools import operator_table

ARCHS = sorted(device.NOMINAL)


@given(
    m=st.integers(1, 9000),
    words=st.integers(1, 2000),
    group_size=st.sampled_from([1, 8, 24, 32, 64, 128]),
    groups=st.integers(1, 100),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    arch=st.sampled_from(ARCHS),
    aligned=st.booleans(),
)
def test_every_problem_has_a_kernel_within_the_limits_of_the_device(
    m: int, words: int, group_size: int, groups: int, dtype: str, arch: int, aligned: bool
) -> None:
    problem = Problem(m, 8 * words, group_size * groups, group_size, dtype, aligned=aligned, x_aligned=aligned)
    facts = device.nominal(arch)
    choice = select.choose(problem, facts)
    plan = choice.plan
    partial_bytes, counters = choice.family.workspace(choice.config, problem)
    assert partial_bytes <= WORKSPACE_BYTES
    assert counters <= COUNTERS
    assert plan.shared_bytes <= facts.shared_bytes_per_block
    assert plan.block[0] <= 1024
    assert max(plan.grid[1:]) <= 65535
    assert int(plan.kernel.arch.rstrip("a")) == arch


@pytest.mark.parametrize(
    ("m", "arch", "dtype", "group_size", "names"),
    [
        (1, 90, "float16", 128, {"gemm_sm90_raw"}),
        (16, 90, "bfloat16", 32, {"gemm_sm90_raw"}),
        (16, 90, "float16", 16, {"gemm_sm80"}),
        (16, 80, "float16", 128, {"gemm_sm80"}),
        (16, 75, "float16", 128, {"gemm_sm75"}),
        (16, 75, "bfloat16", 128, {"gemm_small", "gemm_simt"}),
        (16, 60, "float16", 128, {"gemm_small", "gemm_simt"}),
        (1024, 90, "float16", 128, {"gemm_sm80"}),
        (1024, 60, "float16", 128, {"gemm_simt"}),
        (1024, 90, "float32", 128, {"gemm_simt"}),
        (1024, 90, "float16", 8, {"gemm_simt"}),
    ],
)
def test_clear_cases_choose_the_expected_kernel(
    m: int, arch: int, dtype: str, group_size: int, names: set[str]
) -> None:
    assert select.choose(Problem(m, 4096, 4096, group_size, dtype), device.nominal(arch)).name in names


@pytest.mark.parametrize(
    ("kernel", "problem", "arch", "reason"),
    [
        ("gemv", Problem(2, 64, 64, 64), 90, "takes one row of x, not M=2"),
        ("gemm_small", Problem(17, 64, 64, 64), 90, "takes 2 to 16 rows of x, not M=17"),
        ("gemm_sm80", Problem(4, 64, 64, 64), 75, "needs sm_80 or newer, not sm_75"),
        ("gemm_sm75", Problem(4, 64, 64, 64, "bfloat16"), 75, "takes x of float16, not bfloat16"),
        ("gemm_sm75", Problem(4, 64, 64, 64), 80, "serves GPUs on which gemm_sm80 cannot run"),
        ("gemm_sm80", Problem(4, 64, 48, 24), 80, "multiple of 16, not 24"),
        ("gemm_sm80", Problem(4, 64, 64, 64, x_aligned=False), 80, "multiples of 16 bytes"),
        ("gemm_sm90_raw", Problem(4, 64, 64, 64), 80, "needs sm_90, not sm_80"),
        ("gemm_sm90_raw", Problem(17, 64, 64, 64), 90, "needs M <= 16, not 17"),
        ("gemm_sm90_raw", Problem(4, 64, 64, 64, "float32"), 90, "takes x of float16 or bfloat16, not float32"),
        (
            "gemm_sm90_raw",
            Problem(4, 64, 64, 64, layouts=(AWQ, FRAGMENTS)),
            90,
            "only if the weight has no repacked copy",
        ),
        ("gemm_sm90_raw", Problem(4, 64, 48, 48), 90, "multiple of 32, not 48"),
        ("gemm_sm90_raw", Problem(4, 64, 64, 64, x_aligned=False), 90, "multiples of 16 bytes"),
        (
            "gemm_sm90_raw",
            Problem(4, 64, 64, 64, aligned=False),
            90,
            "of the weight and of y that start at multiples of 16",
        ),
        ("gemm_sm90_raw", Problem(4, 72, 64, 64), 90, "of the weight and of y that start at multiples of 16"),
    ],
)
def test_a_refusal_says_why(kernel: str, problem: Problem, arch: int, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        select.choose(problem, device.nominal(arch), kernel)


def test_split_k_is_taken_or_refused() -> None:
    problem, facts = Problem(4, 512, 512, 128), device.nominal(80)
    assert select.choose(problem, facts, "gemm_sm80", 4).config.split_k == 4
    with pytest.raises(ValueError, match="gemm_sm80 has no configuration with split_k=32"):
        select.choose(problem, facts, "gemm_sm80", 32)


def test_an_unknown_kernel_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"expected one of gemv, .*, got 'marlin'"):
        select.choose(Problem(1, 64, 64, 64), device.nominal(80), "marlin")


def test_explain_has_a_line_for_each_kernel_and_marks_the_choice() -> None:
    _, header, *lines, chosen = cupy_awq.explain(1, 4096, 4096, 128, "float16", arch=75).splitlines()
    assert header.split() == ["kernel", "us", "time", "configuration"]
    runners_up = [line for line in lines if not line[:4].strip()]
    assert [line[3:].split()[0] for line in lines if line not in runners_up] == list(FAMILIES_OF[Problem])
    (choice,) = (i for i, line in enumerate(lines) if line.startswith("->"))
    assert lines[choice + 1 : choice + 3] == runners_up
    first, second, third = (float(line[3:].split("modelled")[0].split()[-1]) for line in lines[choice : choice + 3])
    assert first <= second <= third
    assert "needs sm_80 or newer" in "\n".join(lines)
    assert {line.index("modelled") for line in lines if "modelled" in line} == {header.index("time")}
    assert {line.index("needs sm_") for line in lines if "needs sm_" in line} == {header.index("configuration")}
    assert chosen == "chosen: the lowest modelled time; there is no table of tuned configurations for Tesla T4"


def test_explain_gives_the_parts_of_the_time_of_gemm_sm90() -> None:
    """`explain` prints the modelled parts of a GEMM's time; they add up to the time.

    Parts that overlap contribute at least the largest of them.
    """
    text = cupy_awq.explain(48, 17152, 1408, 128, arch=90, layer=True)
    (line,) = re.findall(r"^modelled parts in us: (.*)$", text, re.MULTILINE)
    added, overlapping = ([float(x) for x in re.findall(r" (\d+\.\d)", part)] for part in f" {line}".split("("))
    (us,) = re.findall(r"^-> gemm_sm90 +(\S+)", text, re.MULTILINE)
    assert len(added) >= 3
    assert len(overlapping) == 5
    assert abs(sum(added) - float(us)) <= 0.3
    assert max(overlapping) <= added[-1] <= sum(overlapping)


@pytest.mark.parametrize(("m", "k", "n"), [(700, 4480, 17984), (155, 4224, 23360), (300, 17152, 1408)])
def test_the_shares_of_stream_k_are_described(m: int, k: int, n: int) -> None:
    """`explain` describes how stream-K divides the work, as a list of the clusters of each k tile shows."""
    problem = Problem(m, n, k, 128, layouts=(AWQ, FRAGMENTS))
    configs = [c for c in GEMM_SM90_LARGE.configs(problem, device.nominal(90)) if c.stream_k_units]
    assert configs
    for config in configs:
        k_tiles, shares = k // 128, config.stream_k_clusters
        units: dict[int, set[int]] = {}
        counts = set()
        for cluster in range(shares):
            begin, end = (config.stream_k_units * k_tiles * i // shares for i in (cluster, cluster + 1))
            counts.add(end - begin)
            for at in range(begin, end):
                units.setdefault(at // k_tiles, set()).add(cluster)
        text = GEMM_SM90_LARGE.describe_work(config, problem)
        ((some, shared),) = re.findall(r"take (\S+) k tiles each of \d+ .*?tiles, (\d+) of which are shared", text)
        assert {int(count) for count in some.split("-")} == counts
        assert int(shared) == sum(len(clusters) > 1 for clusters in units.values())
    for rows in 16, m:
        text = cupy_awq.explain(rows, k, n, 128, arch=90, layer=True)
        assert len(re.findall(r"^work: \d+ x \d+ tiles of \d+ x \d+, \d+ k tiles each; ", text, re.MULTILINE)) == 1


def test_explain_takes_sizes_in_the_order_of_x_at_w() -> None:
    """`explain` takes M, K, N in the order of x[M, K] @ W[K, N], by position and by name."""
    text = cupy_awq.explain(3, 256, 512, arch=80)
    assert text.startswith("x[3, 256] float16 @ W[256, 512] ")
    assert text == cupy_awq.explain(n=512, k=256, m=3, arch=80)


def _chosen(text: str) -> str:
    (name,) = re.findall(r"^-> (\w+)", text, re.MULTILINE)
    return name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("k", "group_size"), [(4096, 16), (4096, 32), (4096, 64), (4096, 128), (4096, -1), (192, 192)])
@pytest.mark.parametrize("m", [1, 16, 64, 2048])
def test_explain_of_a_layer_chooses_a_kernel_on_the_repacked_layout(
    m: int, k: int, group_size: int, dtype: str
) -> None:
    layer, raw = (cupy_awq.explain(m, k, 4096, group_size, dtype, arch=90, layer=layer) for layer in (True, False))
    assert _chosen(layer) in ("gemm_sm90", "gemm_sm90_large")
    assert _chosen(raw) not in ("gemm_sm90", "gemm_sm90_large")


@pytest.mark.parametrize(
    ("k", "group_size", "arch"),
    [(4096, 128, 70), (4096, 8, 75), (4096, 8, 80), (4096, 8, 90), (384, 192, 90), (96, 32, 90)],
)
def test_explain_of_a_layer_that_cannot_repack_is_that_of_the_awq_layout(k: int, group_size: int, arch: int) -> None:
    arguments = 16, k, 4096, group_size
    assert cupy_awq.explain(*arguments, arch=arch, layer=True) == cupy_awq.explain(*arguments, arch=arch)


@pytest.mark.parametrize(
    ("m", "arch", "text"),
    [
        (1, 90, "gathered by the GEMM; modelled: the GEMM "),
        (12, 90, "a launch of gather_columns before the GEMM; "),
        (600, 90, "a launch of gather_columns before the GEMM; gemm_sm90 gathers the columns of x only"),
        (1, 80, "a launch of gather_columns before the GEMM; gemm_sm90 needs sm_90"),
        (600, 80, "a launch of gather_columns before the GEMM; gemm_sm90 needs sm_90"),
    ],
)
def test_explain_of_a_layer_with_an_order_says_who_gathers_x(m: int, arch: int, text: str) -> None:
    table, line = cupy_awq.explain(m, 4096, 28672, arch=arch, layer=True, order=True).rsplit("\n", 1)
    assert line.startswith(f"activation order: {text}")
    problem = Problem(m, 28672, 4096, 128, layouts=(AWQ, FRAGMENTS)[: 1 + (arch == 90)], gathers_x=True)
    is_fused = gather_columns.is_fused(problem, device.nominal(arch))
    assert is_fused == ("gathered by the GEMM" in line)
    without = cupy_awq.explain(m, 4096, 28672, arch=arch, layer=True)
    assert (table == without) == (not is_fused)
    if is_fused:
        fused, with_launch = map(float, re.findall(r"([\d.]+) us", line))
        assert fused < with_launch
        assert f" {fused} " in next(row for row in table.splitlines() if row.startswith("->"))


def test_explain_of_a_batch_invariant_layer_with_an_order_names_the_launch() -> None:
    text = cupy_awq.explain(1, 4096, 28672, arch=90, layer=True, order=True, batch_invariant=True)
    assert text.endswith("before the GEMM; no batch-invariant GEMM gathers the columns of x")


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((0, 64, 64, 64), {}, ValueError, "m: expected at least 1, got 0"),
        ((2147483648, 8, 128), {}, ValueError, "m: expected at most 2147483647, got 2147483648"),
        ((1, 128, 2**40), {}, ValueError, "n: expected at most 2147483647, got"),
        ((1, 64, 64, 64), {"arch": "85"}, ValueError, "arch: expected one of 60, 61, .*, got '85'"),
        ((1, 64, 63, 64), {}, ValueError, "n: expected a multiple of 8, got 63"),
        ((1, 64, 64, 48), {}, ValueError, "group_size: expected a divisor of K = 64"),
        ((1.0, 64, 64, 64), {}, TypeError, "m: expected an integer, got 1.0"),
        ((1, 64, 64, 64, "int8"), {}, TypeError, "dtype: expected"),
        ((1, 64, 64, 64), {"arch": 50}, ValueError, "arch: expected one of 60, .*, got 50"),
        ((1, 64, 64, 64), {"order": True}, ValueError, "order: expected False without layer=True, got True"),
        ((1, 64, 64, 64), {"layer": True, "order": 1}, TypeError, "order: expected"),
    ],
)
def test_explain_refuses(arguments: tuple[object, ...], options: dict[str, int], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        cupy_awq.explain(*arguments, **options)  # type: ignore[arg-type]


def test_explain_takes_integers_of_numpy() -> None:
    sizes = 2, 4096, 12288
    for dtype in (np.int64, np.int32, np.uint16):
        assert cupy_awq.explain(*map(dtype, sizes), arch=90) == cupy_awq.explain(*sizes, arch=90)


def test_an_architecture_has_the_same_names_everywhere() -> None:
    for arch in (90, "90", "90a", "sm_90", "sm_90a", np.int64(90)):
        assert device.nominal(arch) == device.nominal(90)
    for arch in ("90b", "sm90", "compute_90", "9.0", "", 9, 999):
        with pytest.raises(ValueError, match="arch: expected one of"):
            device.nominal(arch)
    assert "x[2147483647, 128]" in cupy_awq.explain(2147483647, 128, 8, arch=90)


def test_the_table_of_operators_names_existing_tests() -> None:
    folder = Path(__file__).parent
    for named in (*operator_table.TESTS.values(), *(operation.test for operation in operator_table.OTHERS.values())):
        file, names = named.split("::")
        source = (folder / file).read_text(encoding="utf-8")
        assert [name for name in names.split(", ") if f"def {name}(" not in source] == []
    assert operator_table.TESTS.keys() == FAMILIES_OF[Problem].keys()


H100 = device.nominal(90)


def test_a_gpu_without_tma_runs_the_kernels_of_the_generation_before() -> None:
    """A GPU that lacks a capability uses no kernel that needs it, and no layout of which no kernel is left."""
    made_up = replace(H100, name="H100 without TMA", without=(Capability.TMA,))
    weight = 4096, 4096, 128, "float16", "packed"
    assert select.weight_layouts(*weight, H100) == (AWQ, FRAGMENTS)
    assert select.weight_layouts(*weight, made_up) == (AWQ, FRAGMENTS)
    assert select.weight_layouts(*weight, replace(made_up, without=(Capability.TMA, Capability.LDMATRIX))) == (AWQ,)
    problem = Problem(64, 4096, 4096, 128, layouts=(AWQ, FRAGMENTS))
    assert select.choose(problem, H100).name == "gemm_sm90"
    assert select.choose(problem, made_up).name == "gemm_mma_fragments"
    assert select.choose(replace(problem, layouts=(AWQ,)), made_up).name == "gemm_sm80"
    assert select.candidates(problem, made_up)["gemm_sm90"] == "needs TMA, which H100 without TMA lacks"
    assert made_up.target == "90a"


def test_gemm_sm75_serves_only_gpus_without_gemm_sm80() -> None:
    for arch, gpu in device.NOMINAL.items():
        found = select.candidates(Problem(16, 4096, 4096, 128), gpu)
        assert isinstance(found["gemm_sm75"], list) == (arch == 75)
        assert isinstance(found["gemm_sm80"], list) == (arch >= 80)


def test_a_weight_is_stored_in_the_layouts_that_kernels_of_the_gpu_read() -> None:
    forms = [(4096, 128, "packed"), (4096, 8, "packed"), (96, 32, "packed"), (4096, 128, "float")]
    for k, group_size, zeros in forms:
        form = k, 4096, group_size, "float16", zeros
        for arch in device.NOMINAL:
            reads = arch >= 75 and FragmentLayout(*form).refusal() is None
            expected = (AWQ, FRAGMENTS) if reads else (AWQ,)
            assert select.weight_layouts(*form, device.nominal(arch)) == expected
    # the tensor cores of sm_75 cannot multiply bfloat16
    assert select.weight_layouts(4096, 4096, 128, "bfloat16", "packed", device.nominal(75)) == (AWQ,)
    assert FragmentLayout(4096, 4096, 128).pack(H100).kernel.source == "gemm/repack.cu"
    assert AwqLayout(4096, 4096, 128).pack(H100) is None


@pytest.mark.parametrize(
    ("arch", "needs", "target"),
    [
        (80, (), "80"),
        (90, (), "90a"),
        (100, (), "100"),
        (100, (Capability.TCGEN05,), "100a"),
        (120, (Capability.MMA_BLOCK_SCALE,), "120a"),
    ],
)
def test_the_compiler_target_follows_the_capabilities(arch: int, needs: tuple[Capability, ...], target: str) -> None:
    gpu = device.nominal(arch)
    assert gpu.has(*needs)
    assert gpu.target_for(needs) == target
    assert needs or gpu.target == target


def test_a_lowered_path_has_the_capabilities_of_its_architecture() -> None:
    assert replace(H100, arch=80).capabilities == device.nominal(80).capabilities
    assert replace(H100, arch=80).target == "80"
    assert not replace(H100, arch=80).is_native
    assert H100.refusal([Capability.TCGEN05]) == "needs sm_100 to sm_119, not sm_90"


def test_explain_covers_the_kernels_of_a_decoder() -> None:
    """`explain` lists both attention kernels on a GPU with tensor cores, and chooses the one that uses them."""
    problem = Attention(64, 32, 8, 128, 2048, 32 * 1024, "float16", 1e-6, False, 1)
    for arch, kernel in ((90, "attention_mma"), (75, "attention_mma"), (70, "attention")):
        text = select.explain(problem, device.nominal(arch))
        assert _chosen(text) == kernel
        assert len(re.findall(r"^(?:->|  ) attention(?:_mma)? ", text, re.MULTILINE)) == 2
    assert "needs sm_75 or newer, not sm_70" in text
    assert "needs sm_80 or newer, not sm_75" in select.explain(replace(problem, dtype="bfloat16"), device.nominal(75))
    candidate = select.candidates(problem, H100)["attention"][0]
    names = [plan_attention(H100, *astuple(problem)).kernel.entry]
    with select.forced(candidate):
        names.append(plan_attention(H100, *astuple(problem)).kernel.entry)
    names.append(plan_attention(H100, *astuple(problem)).kernel.entry)
    assert names == ["attention_mma", "attention", "attention_mma"]


def test_a_forced_arch_lowers_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.ARCH_VARIABLE, "75")
    assert device.forced_arch() == 75
    for text in ("sm_75", "5", "-80"):
        monkeypatch.setenv(device.ARCH_VARIABLE, text)
        with pytest.raises(ValueError, match="CUPY_AWQ_ARCH: expected a compute capability"):
            device.forced_arch()


def test_kernels_of_sm_90a_are_refused_on_newer_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compiled for sm_90a, whose features no other architecture has, are refused on newer GPUs."""
    cupy = pytest.importorskip("cupy")
    attributes: dict[str, int] = defaultdict(lambda: 1)
    gpu = SimpleNamespace(attributes=attributes, compute_capability="100")
    monkeypatch.setattr(cupy.cuda, "Device", lambda index: gpu)
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda index: {"name": b"B200"})
    for text, expected in (("80", 80), ("100", 100), ("101", None), ("90", None)):
        monkeypatch.setenv(device.ARCH_VARIABLE, text)
        if expected:
            assert device.of.__wrapped__(0).arch == expected
        else:
            with pytest.raises(ValueError, match=f"CUPY_AWQ_ARCH: expected .*100.* got {text}"):
                device.of.__wrapped__(0)


@given(m=st.integers(1, 32), n=st.sampled_from([64, 256, 4096]), k=st.sampled_from([64, 256, 4096]))
def test_few_rows_use_kernels_that_do_not_round_weights(m: int, n: int, k: int) -> None:
    problem = Problem(m, n, k, 64, layouts=(AWQ, FRAGMENTS))
    choice = select.choose(problem, device.nominal(90))
    assert choice.name != "gemm_sm90_large"
    assert not getattr(choice.config, "scaled", False)


@pytest.mark.parametrize("m", [33, 128])
@pytest.mark.parametrize("group_size", [32, 64])
def test_many_rows_with_short_groups_scale_the_weights(m: int, group_size: int) -> None:
    """With many rows and short groups, W is scaled before the product; scaling the sums of each group is slower.

    The slower kernels serve only scales that float16 cannot hold.
    """
    here = replace(device.nominal(90), name="NVIDIA H100 80GB HBM3")
    problem = Problem(m, 4096, 4096, group_size, layouts=(FRAGMENTS,))
    assert getattr(select.choose(problem, here).config, "scaled", True)
    wide = replace(problem, wide_scales=True)
    assert not select.choose(wide, here).config.scaled


@pytest.mark.parametrize("m", [33, 64, 65, 128])
def test_bfloat16_x_with_float16_scales_scales_accumulators_at_64_rows(m: int) -> None:
    here = replace(device.nominal(90), name="NVIDIA H100 80GB HBM3")
    problem = Problem(m, 8192, 8192, 128, "bfloat16", layouts=(FRAGMENTS,))
    kinds = {config.scaled for config in FAMILIES["gemm_sm90"].configs(problem, here) if config.block_m <= 64}
    assert kinds == {False}
    if m <= 64:
        assert not select.choose(problem, here).config.scaled


@pytest.mark.parametrize("m", [65, 128, 129, 512])
def test_split_scales_have_no_tiles_of_128_rows_and_one_m64_tile(m: int) -> None:
    here = replace(device.nominal(90), name="NVIDIA H100 80GB HBM3")
    problem = Problem(m, 12288, 4096, 128, "bfloat16", "bfloat16", layouts=(FRAGMENTS,))
    for scales_dtype in ("bfloat16", "float16"):
        configs = FAMILIES["gemm_sm90_large"].configs(replace(problem, scales_dtype=scales_dtype), here)
        narrow = any(config.block_m <= 128 and config.m64_tiles == 1 for config in configs)
        assert narrow == (m <= 128 or scales_dtype == "bfloat16")
