# SPDX-License-Identifier: Apache-2.0
"""Models with experts on the GPU back end, with every kernel of their layers on the simulator."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupy_awq import MoeLayer, PackedExperts, llm
from cupy_awq.check import BFLOAT16, FLOAT16, HOST
from cupy_awq.checkpoint import CheckpointError, Module
from cupy_awq.kernels import select
from cupy_awq.kernels.experts.routing import MAX_ROUTED_WIDTH
from cupy_awq.llm.decoder import cuda_experts
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.step_graphs import StepGraph
from cupy_awq.llm.families.description import LinearSpec, Router
from cupy_awq.llm.files.model_files import DenseLinear
from cupy_awq.ops import experts, moe_layer, packed_experts
from cupy_awq.runtime import arrays, device
from cupy_awq.tools.testing import random_weight
from tests import llm_models, simt
from tests.backends import runner
from tests.experts import error_of, float64_layer, random_experts, repack_experts, run_steps
from tests.golden_models import FILE, IDS, write_quantized
from tests.test_llm_device import PROMPTS, SimulatedOps, launch_eagerly, simulated, simulated_logits, teacher_forced

__all__ = ["simulated"]
NOWHERE = -7
"""A device ordinal that no array has: with it in place of HOST, operations on NumPy arrays launch kernels."""


class Launcher(NamedTuple):
    """A kernel of the simulator with the interface of a loaded one."""

    buffers: tuple[str, ...]
    launch: Callable[[tuple[int, ...], int], None]

    def __call__(self, addresses: tuple[int, ...], stream: int) -> None:
        self.launch(addresses, stream)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, simulated: None) -> list[str]:
    """Run the kernels of experts on the simulator and return the list of their names, which grows with each launch."""
    here, names = device.nominal(90), []

    def run(plan: Any, buffers: dict[str, Any]) -> None:
        names.append(plan.kernel.entry)
        simt.run(plan, {name: buffers[name] for name in plan.buffers})

    def choose(problem: Any, index: int) -> Any:
        return SimpleNamespace(launch=lambda buffers: run(select.choose(problem, here).plan, buffers))

    def repack(qweight: Any, scales: Any, qzeros: Any, form: Any, index: int) -> Any:
        parts = SimpleNamespace(qweight=qweight, scales=scales, qzeros=qzeros, form=form)
        return repack_experts(runner("latest"), parts, here)

    monkeypatch.setattr(arrays, "is_aligned", lambda *some: True)
    monkeypatch.setattr(arrays, "address", lambda a: 0 if a is None else a.ctypes.data)
    monkeypatch.setattr(experts, "HOST", NOWHERE)
    monkeypatch.setattr(packed_experts, "HOST", NOWHERE)
    monkeypatch.setattr(packed_experts, "_repack", repack)
    monkeypatch.setattr(experts, "choose_kernel", choose)
    monkeypatch.setattr(experts, "_launch", lambda steps, buffers, index: run_steps(run, steps, buffers, here))
    return names


@pytest.mark.parametrize(
    ("family", "dtype", "form"),
    [
        ("glm4_moe", FLOAT16, "awq"),
        *(pytest.param(family, FLOAT16, "awq", marks=pytest.mark.slow) for family in ("mixtral", "qwen2_moe")),
        pytest.param("qwen3_moe", FLOAT16, "mlx", marks=pytest.mark.slow),
        pytest.param("qwen2_moe", BFLOAT16, "awq", marks=pytest.mark.slow),
    ],
)
def test_logits_of_all_kernels_are_those_of_transformers(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch, family: str, dtype: Any, form: str
) -> None:
    """Logits of a prompt and of single tokens are right; a shared expert's gate runs as a router of one expert.

    One kernel computes RMSNorm and router of a single token, separate kernels those of the prompt.
    """
    monkeypatch.setattr(cuda_experts, "MAX_ROUTED_TOKENS", 2)
    files = llm.read(write_quantized(tmp_path, llm_models.EXPERT_FAMILIES[family], form))
    model = build_model(files, SimulatedOps(files.config, 0, dtype))
    found, wanted = simulated_logits(model, IDS[:4], 3), np.load(FILE)[family][:4]
    assert np.abs(found - wanted).max() <= (0.01 if dtype == FLOAT16 else 0.08) * np.abs(wanted).max()
    assert {"choose_experts", "expert_gemm" if form == "awq" else "expert_gemm_tiles"} <= set(launched)


@pytest.mark.parametrize("m", [0, 1, 9])
def test_a_plan_fills_the_same_array_for_new_contents(
    monkeypatch: pytest.MonkeyPatch, launched: list[str], m: int
) -> None:
    """Each launch gets the addresses of the caller's arrays, or of the plan's memory between launches."""
    rng, memory = np.random.default_rng(m), []

    def allocate(nbytes: int, on_current_stream: bool) -> np.ndarray:
        memory.append(np.full(nbytes, 255, np.uint8))
        return memory[-1]

    def load(plan: Any, index: int) -> Any:
        def launch(addresses: tuple[int, ...], stream: int) -> None:
            simt.run(plan, dict(zip(plan.buffers, map(find, addresses), strict=True)))

        return Launcher(tuple(plan.buffers), launch)

    def find(address: int) -> np.ndarray | None:
        begin = memory[0].ctypes.data
        inside = begin <= address < begin + memory[0].nbytes
        return memory[0][address - begin :] if inside else known.get(address)

    monkeypatch.setattr(moe_layer, "HOST", NOWHERE)
    monkeypatch.setattr(experts, "get_launcher", load)
    monkeypatch.setattr("cupy_awq.runtime.workspace.allocate_zeros", allocate)
    with monkeypatch.context() as on_the_cpu:
        on_the_cpu.setattr(packed_experts, "HOST", HOST)
        weights = random_experts(rng, 3, 64, 128, 32), random_experts(rng, 3, 64, 64, 32)
    packed = [PackedExperts(w.qweight, w.scales, w.qzeros, keep_weight=True) for w in weights]
    x, shared, out = (rng.standard_normal((m, 64)).astype(np.float16) for _ in range(3))
    ids, scale = np.zeros((m, 2), np.int32), np.ones((m, 2), np.float32)
    arrays_of = [x, shared, out, ids, scale, *(a for w in packed for a in w.buffers.values() if a is not None)]
    known = {a.ctypes.data: a.reshape(-1) for a in arrays_of}
    stream = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0))
    monkeypatch.setattr(sys.modules["cupy"], "cuda", stream)
    plan = MoeLayer(*packed).plan(x, ids, scale, shared=shared, out=out)
    assert bool(plan.kernels) == (m > 0)
    for _ in range(2):
        ids[:], scale[:] = rng.integers(-1, 4, (m, 2)), rng.uniform(0, 1, (m, 2))
        out[:] = np.nan
        assert plan() is out
        assert m == 0 or error_of(out, float64_layer(x, ids, scale, *weights, "swiglu", shared)) < 2e-3


@pytest.mark.parametrize("change", ["groups", "dense", "order"])
def test_experts_that_kernels_do_not_take_are_named(simulated: None, change: str) -> None:
    rng = np.random.default_rng(0)
    modules = [Module(random_weight(rng, 64, 16, 32), None) for _ in range(3)]
    others = {
        "groups": (
            Module(random_weight(rng, 64, 16, 16), None),
            r"group_size=32, .* as the first expert has, got .*=16",
        ),
        "dense": (DenseLinear(np.zeros((16, 64), np.float32), None), "expected 4-bit codes .* got a weight of float32"),
        "order": (modules[0]._replace(order=np.arange(64, dtype=np.int32)), "got an activation order"),
    }
    part, message = others[change]
    specs = [LinearSpec(f"mlp.experts.{i}.up_proj", 64, 16) for i in range(3)]
    pairs = [[(spec, module)] for spec, module in zip(specs, [*modules[:2], part], strict=True)]
    with pytest.raises(ValueError, match=rf"^mlp\.experts\.2\.up_proj: .*{message}"):
        cuda_experts.stack_experts(pairs)


@pytest.mark.parametrize(("m", "width"), [(1, MAX_ROUTED_WIDTH + 8), (cuda_experts.MAX_ROUTED_TOKENS + 1, 64)])
def test_norm_and_router_are_separate_for_wide_models_and_many_tokens(simulated: None, m: int, width: int) -> None:
    """The residual stream is as before when no kernel computes the norm and the router together."""
    router = Router(LinearSpec("mlp.gate", width, 4), 2, True)
    mixture: Any = SimpleNamespace(_options=router, _batch_invariant=False, _logits=SimpleNamespace(parts=1))
    h, delta, norm = (np.ones((m, width), element) for element in (np.float32, np.float16, np.float32))
    assert cuda_experts.Mixture.mix_stream(mixture, h, delta, SimpleNamespace(weight=norm, eps=1e-6)) is None
    assert (h == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("family", llm_models.EXPERT_FAMILIES)
def test_a_model_on_the_gpu_matches_the_cpu(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of prompts and steps match; a CUDA graph, whose routing changes, and eager steps write the same texts."""
    path = llm_models.folder(tmp_path, llm_models.EXPERT_FAMILIES[family])
    host, gpu = llm.load(path, device="cpu"), llm.load(path)
    ids = np.random.default_rng(0).integers(0, llm_models.VOCAB, 60).tolist()
    for prompt in (1, 40):
        wanted, found = (teacher_forced(model, ids, prompt) for model in (host, gpu))
        assert np.median(np.abs(wanted - found).max(axis=1)) <= 0.01 * np.abs(wanted).max()
    graph = gpu.generate(PROMPTS, max_tokens=30)
    assert gpu.generate(PROMPTS, max_tokens=30) == graph
    monkeypatch.setattr(StepGraph, "launch", launch_eagerly)
    assert gpu.generate(PROMPTS, max_tokens=30) == graph


@pytest.mark.parametrize(("family", "name"), [("qwen3_moe", "mlp.gate"), ("qwen2_moe", "mlp.shared_expert_gate")])
def test_a_router_with_nan_is_refused(tmp_path: Path, family: str, name: str) -> None:
    folder = llm_models.folder(tmp_path / "model", llm_models.EXPERT_FAMILIES[family])
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    first, end = json.loads(data[8:start])[f"model.layers.1.{name}.weight"]["data_offsets"]
    data[start + first : start + end] = b"\xff" * (end - first)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"layers\.1\.{name}\.weight: expected finite values"):
        llm.load(folder, device="cpu")


@pytest.mark.parametrize("groups", [(3, 1), (4, 5), (8, 4)])
def test_groups_that_do_not_divide_the_experts_are_refused(groups: tuple[int, int]) -> None:
    config = {**llm_models.EXPERT_FAMILIES["glm4_moe"], "n_group": groups[0], "topk_group": groups[1]}
    with pytest.raises(ValueError, match="groups: expected"):
        llm_models.decoder(**config)
