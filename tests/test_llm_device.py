# SPDX-License-Identifier: Apache-2.0
"""The decoder on a GPU: its forward pass over simulated kernels, and, where there is a GPU, texts and CUDA graphs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_awq import AwqLinear, llm
from cupy_awq.check import BFLOAT16, FLOAT16
from cupy_awq.kernels.repack import Repacking
from cupy_awq.llm import Config, LanguageModel, Sampling
from cupy_awq.llm.cuda_ops import DeviceOps, Residual
from cupy_awq.llm.model import Model, build
from cupy_awq.llm.numpy_ops import HostOps
from cupy_awq.ops.repack import RepackedWeight
from cupy_awq.runtime import device
from cupy_awq.tools.testing import random_weight
from tests import llm_models, simt
from tests.llm_models import FAMILIES, LLAMA, QWEN3

IDS = [int(i) for i in np.random.default_rng(2).integers(0, llm_models.VOCAB, 9)]


class SimulatedOps(DeviceOps):
    """Kernels run on the simulator, over NumPy arrays; quantized products are NumPy's own."""

    def run(self, plan: Any, **arrays: Any) -> None:
        simt.run(plan, {name: arrays[name] for name in plan.buffers})


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy in CuPy's place, with arrays that are NaN until they are written."""

    def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.full(shape, np.nan, dtype)

    cuda = SimpleNamespace(runtime=SimpleNamespace(memGetInfo=lambda: (10**9, 10**9)))
    functions = {name: getattr(np, name) for name in ("asarray", "zeros", "concatenate", "ascontiguousarray")}
    pool = SimpleNamespace(free_bytes=lambda: 0)
    stub = SimpleNamespace(**functions, empty=empty, cuda=cuda, get_default_memory_pool=lambda: pool)
    monkeypatch.setitem(sys.modules, "cupy", stub)
    monkeypatch.setattr(device, "of", lambda _: device.nominal(90))
    monkeypatch.setattr("cupy_awq.runtime.workspace.zeroed", lambda nbytes: np.zeros(nbytes, np.uint8))


def simulated_logits(model: Model, ids: list[int], prompt: int) -> np.ndarray:
    """The logits of ids, of which ``prompt`` go at a time and the others one by one."""
    kv = model.ops.cache(1, 40)
    logits = [model.logits(hidden)[0] for hidden in model.append(kv, 0, ids[:prompt])]
    for token in ids[prompt:]:
        logits += [model.logits(hidden)[0] for hidden in model.append(kv, 0, [token])]
    return np.concatenate(logits)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
def test_every_family_follows_the_formulas_in_sixteen_bits(tmp_path: Path, family: str, dtype: Any) -> None:
    """A prompt, then single tokens: fused and separate products, tied and untied heads, biases, norms of q and k."""
    source = llm.read(llm_models.folder(tmp_path, FAMILIES[family], plain=("0.self_attn.k_proj", "1.mlp.up_proj")))
    model = build(source, SimulatedOps(source.config, 0, dtype))
    found, wanted = simulated_logits(model, IDS, 6), llm_models.forward(source, IDS)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() <= (0.01 if dtype == FLOAT16 else 0.08) * np.abs(wanted).max()


@pytest.mark.usefixtures("simulated")
def test_modules_that_all_were_left_alone_share_one_product(tmp_path: Path) -> None:
    plain = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    source = llm.read(llm_models.folder(tmp_path, QWEN3, plain=plain))
    model = build(source, SimulatedOps(source.config, 0, FLOAT16))
    found, wanted = simulated_logits(model, IDS, 8), llm_models.forward(source, IDS)
    assert np.abs(found - wanted).max() <= 0.01 * np.abs(wanted).max()


@pytest.mark.usefixtures("simulated")
def test_a_batch_of_sequences_keeps_them_apart(tmp_path: Path) -> None:
    source = llm.read(llm_models.folder(tmp_path, LLAMA))
    model = build(source, SimulatedOps(source.config, 0, FLOAT16))
    kv = model.ops.cache(2, 40)
    for i, prompt in enumerate((IDS[:2], IDS[2:7])):
        list(model.append(kv, i, prompt))
    batch = model.logits(model.forward(model.ops.tokens([5, 6])[:, None], kv))[:, 0]
    for i, ids in enumerate(([*IDS[:2], 5], [*IDS[2:7], 6])):
        wanted = llm_models.forward(source, ids)[-1]
        assert np.abs(batch[i] - wanted).max() <= 0.01 * np.abs(wanted).max()


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("hidden", "head_dim"), [(64, 12), (64, 264), (60, 16)])
def test_a_model_that_kernels_cannot_take_is_refused(hidden: int, head_dim: int) -> None:
    config = Config("llama", hidden, 96, 1, 2, 2, head_dim, 264, 256)
    with pytest.raises(ValueError, match="head_dim a multiple of 8 up to 256 and hidden a multiple of 8"):
        SimulatedOps(config, 0, FLOAT16)


@pytest.mark.usefixtures("simulated")
def test_a_cache_larger_than_the_gpus_memory_is_refused(tmp_path: Path) -> None:
    source = llm.read(llm_models.folder(tmp_path, LLAMA))
    with pytest.raises(ValueError, match=r"needs 0\.51 GB, and 0\.46 GB are free"):
        SimulatedOps(source.config, 0, FLOAT16).cache(2, 10**6)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize(("m", "gated"), [(1, False), (2, True), (3, False), (17, True), (32, False), (33, False)])
def test_products_of_few_rows_keep_the_residual_stream(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, m: int, gated: bool
) -> None:
    """Two layers' ends: a norm, products that add and norm, and one behind which nobody takes the norm."""
    rng = np.random.default_rng(m)

    def layer(k: int, n: int, **options: Any) -> AwqLinear:
        weight, layout = random_weight(rng, k, n, 64), Repacking(k, n, 64)
        repacked = np.empty(layout.nbytes, np.uint8)
        tensors = {"qweight": weight.qweight, "scales": weight.scales, "qzeros": weight.qzeros}
        simt.run(layout.plan(device.nominal(90)), {**tensors, "out": repacked})
        monkeypatch.setattr("cupy_awq.linear.repack", lambda weight: RepackedWeight(weight, repacked, 0, False))
        return AwqLinear(weight, **options)

    wide = 256 if gated else 128
    enter = layer(192, wide, bias=rng.standard_normal(wide).astype(np.float32), activation="swiglu" if gated else None)
    leave = layer(128, 192)
    config = Config("llama", 192, 96, 1, 2, 2, 16, 264, 256)
    ops, plain = SimulatedOps(config, 0, dtype), HostOps(config)
    entries, run = [], ops.run

    def recorded(plan: Any, **arrays: Any) -> None:
        entries.append(plan.kernel.entry)
        run(plan, **arrays)

    monkeypatch.setattr(ops, "run", recorded)
    first, second = (rng.standard_normal(192).astype(np.float32) for _ in range(2))
    start = rng.standard_normal((m, 1, 192)).astype(np.float32)

    def forward(ops: Any, h: Any) -> list[np.ndarray]:
        h, x = ops.project(h, first, enter)
        h = ops.add(h, x, leave, second)
        h, y = ops.project(h, second, enter)
        h = ops.add(h, y, leave, first)
        h, z = ops.project(h, first, lambda x: x)  # nothing that could take the norm's last factor
        last = ops.norm(ops.add(h, y, leave, None), second)
        return [a.astype(np.float32) for a in (y, z, last)]

    found, wanted = forward(ops, Residual(start.copy())), forward(plain, start.copy())
    product = "gemm_sm90_mma" if m <= 8 else "gemm_sm90"
    assert entries == ["rms_norm", *(["rms_norm"] if m > 32 else [product] * 3), "rms_norm", "rms_norm"]
    for mine, theirs in zip(found, wanted, strict=True):
        assert np.abs(mine - theirs).max() <= (3e-3 if dtype == FLOAT16 else 3e-2) * np.abs(theirs).max()


# On a GPU


@pytest.fixture(scope="module", params=["plain", "repacked"])
def pair(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[LanguageModel, LanguageModel]:
    """One model on the CPU and on the GPU; of sizes that Hopper's layout of weights has, and of others."""
    options = {"config": {**QWEN3, "intermediate_size": 128}, "group": 32} if request.param == "repacked" else {}
    path = llm_models.folder(tmp_path_factory.mktemp("model"), **{"config": QWEN3, **options})
    return llm.load(path, device="cpu"), llm.load(path)


PROMPTS = ["Hello", "Why is the sky blue?", "x" * 70]


def teacher_forced(model: LanguageModel, ids: list[int], prompt: int) -> np.ndarray:
    kv = model.model.ops.cache(1, len(ids))
    logits = [model.model.logits(hidden)[0] for hidden in model.model.append(kv, 0, ids[:prompt])]
    for token in ids[prompt:]:
        logits += [model.model.logits(hidden)[0] for hidden in model.model.append(kv, 0, [token])]
    return np.concatenate([a if isinstance(a, np.ndarray) else a.get() for a in logits])


@pytest.mark.gpu
@pytest.mark.parametrize("prompt", [1, 20, 100])
def test_logits_of_the_gpu_are_those_of_the_cpu(pair: tuple[LanguageModel, LanguageModel], prompt: int) -> None:
    ids = np.random.default_rng(0).integers(0, llm_models.VOCAB, 120).tolist()
    host, gpu = (teacher_forced(model, ids, prompt) for model in pair)
    assert np.abs(host - gpu).max() <= 0.01 * np.abs(host).max()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.9, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=3)],
)
def test_a_replayed_graph_decodes_what_single_launches_do(
    pair: tuple[LanguageModel, LanguageModel], sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of three lengths, twice; then with each step launched as it is."""
    from cupy_awq.llm.cuda_ops import DeviceDecoder

    _, model = pair
    graph = [model.generate(PROMPTS, max_tokens=30, sampling=sampling) for _ in range(2)]
    assert graph[0] == graph[1]
    assert [model.generate(p, max_tokens=30, sampling=sampling)[0] for p in PROMPTS[:1]] == graph[0][:1]
    original = DeviceDecoder.step

    def step(self: DeviceDecoder) -> list[int]:
        self._steps = 0  # so that it never comes to a capture
        return original(self)

    monkeypatch.setattr(DeviceDecoder, "step", step)
    assert model.generate(PROMPTS, max_tokens=30, sampling=sampling) == graph[0]


@pytest.mark.gpu
def test_a_chat_on_the_gpu_goes_on_as_if_it_were_asked_anew(pair: tuple[LanguageModel, LanguageModel]) -> None:
    _, model = pair
    chat = model.chat()
    messages: list[dict[str, str]] = []
    for text in ("Hi", "And now?", "More"):
        answer = "".join(chat.say(text, max_tokens=8))
        messages.append({"role": "user", "content": text})
        assert model.generate([messages], max_tokens=8)[0].text == answer
        messages.append({"role": "assistant", "content": answer})


@pytest.mark.gpu
def test_many_requests_do_not_grow_the_devices_memory(pair: tuple[LanguageModel, LanguageModel]) -> None:
    import cupy

    _, model = pair
    free = []
    for i in range(200):
        model.generate("x" * (1 + 3 * (37 * i % 50)), max_tokens=3)
        cupy.get_default_memory_pool().free_all_blocks()
        free.append(cupy.cuda.runtime.memGetInfo()[0])
    # Once each of the 50 lengths was met, and its kernels were loaded. Another process on the GPU upsets this.
    assert free[-1] >= min(free[50:100])


@pytest.mark.gpu
def test_score_on_the_gpu(pair: tuple[LanguageModel, LanguageModel]) -> None:
    scores = [model.score("The sky is blue because of scattering. " * 5) for model in pair]
    assert scores[0].tokens == scores[1].tokens
    assert scores[1].log_likelihood == pytest.approx(scores[0].log_likelihood, rel=2e-3)
