# SPDX-License-Identifier: Apache-2.0
"""Tests of the decoder's GPU back end: its forward pass on simulated kernels; with a GPU, texts and CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_awq import AwqLinear, llm
from cupy_awq.check import BFLOAT16, FLOAT16
from cupy_awq.kernels.gemm.layouts import FragmentLayout
from cupy_awq.llm import LanguageModel, Sampling
from cupy_awq.llm.decoder import cuda_steps, step_graphs
from cupy_awq.llm.decoder.backend import ChoiceOptions, DecoderOps
from cupy_awq.llm.decoder.block_pool import BLOCK
from cupy_awq.llm.decoder.build import build_model
from cupy_awq.llm.decoder.cuda_backend import CudaOps
from cupy_awq.llm.decoder.forward import Add, Norm, Project
from cupy_awq.llm.decoder.model import Model
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.decoder.step_graphs import StepGraph
from cupy_awq.ops.repack import RepackedWeight
from cupy_awq.runtime import device, placement
from cupy_awq.tools.testing import random_weight
from tests import llm_models, simt
from tests.backends import fewer
from tests.llm_models import EXPERT_FAMILIES, FAMILIES, LLAMA, QWEN3
from tests.logits import logits_of

IDS = [int(i) for i in np.random.default_rng(2).integers(0, llm_models.VOCAB, 9)]


class Stream(contextlib.nullcontext[None]):
    """A stream whose work is done at once."""

    def synchronize(self) -> None:
        pass


class SimulatedOps(CudaOps):
    """The GPU back end on NumPy arrays: its kernels run on the simulator, quantized GEMMs in NumPy, which is faster."""

    decode_stream = Stream(), SimpleNamespace(malloc=None)

    def run(self, plan: Any, **arrays: Any) -> None:
        simt.run(plan, {name: arrays[name] for name in plan.buffers})

    def to_numpy(self, a: Any) -> Any:
        return a.copy()


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace CuPy by NumPy, and captured graphs by launches; return the events that are waited for.

    New arrays are filled with NaN, or -7 if they are integers.
    """
    waited: list[Any] = []

    class Event:
        def record(self, stream: Any) -> None:
            pass

        def synchronize(self) -> None:
            waited.append(self)

    def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.full(shape, -7 if np.dtype(dtype).kind == "i" else np.nan, dtype)

    def pinned(shape: tuple[int, ...], index: int) -> tuple[Any, Any]:
        memory = np.full(shape, -7, np.int32)
        return memory, memory

    def enqueue_copy(target: Any, source: Any, stream: Any) -> None:
        target[...] = source

    def gather_rows(a: Any, rows: list[int], stream: Any) -> Any:
        return a[rows]

    def capture(stream: Any, launch: Callable[[], None]) -> Any:
        return SimpleNamespace(launch=lambda stream: launch())

    cuda = SimpleNamespace(runtime=SimpleNamespace(memGetInfo=lambda: (10**9, 10**9)), get_current_stream=Stream)
    cuda.Event = lambda disable_timing: Event()
    cuda.using_allocator = lambda malloc: contextlib.nullcontext()
    functions = {name: getattr(np, name) for name in ("asarray", "zeros", "concatenate", "ascontiguousarray")}
    pool = SimpleNamespace(free_bytes=lambda: 0, free_all_blocks=lambda: None)
    stub = SimpleNamespace(**functions, empty=empty, cuda=cuda, get_default_memory_pool=lambda: pool)
    monkeypatch.setitem(sys.modules, "cupy", stub)
    monkeypatch.setattr(placement, "to_device", lambda a, index, dtype=None: a.astype(dtype or a.dtype, copy=False))
    monkeypatch.setattr(placement, "copy_to", np.copyto)
    monkeypatch.setattr(device, "of", lambda _: device.nominal(90))
    monkeypatch.setattr("cupy_awq.runtime.workspace.allocate_zeros", lambda nbytes: np.zeros(nbytes, np.uint8))
    monkeypatch.setattr("cupy_awq.runtime.placement.use_device", lambda index: contextlib.nullcontext())
    for function in (pinned, enqueue_copy, gather_rows):
        monkeypatch.setattr(cuda_steps, function.__name__, function)
    monkeypatch.setattr(step_graphs, "capture", capture)
    return waited


def simulated_logits(model: Model, ids: list[int], prompt: int) -> np.ndarray:
    """Return the logits of all ids, of which the first ``prompt`` run as one prompt and the others as decode steps."""
    return logits_of(model, ids, prompt, *[1] * (len(ids) - prompt))


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, FLOAT16) for family in ("llama", "qwen2", "qwen2_moe", "glm4_moe")),
        ("qwen3", BFLOAT16),
        *(pytest.param(family, FLOAT16, marks=pytest.mark.slow) for family in ("qwen3", "qwen3_moe", "mixtral")),
        *(
            pytest.param(family, BFLOAT16, marks=pytest.mark.slow)
            for family in (*FAMILIES, *EXPERT_FAMILIES)
            if family != "qwen3"
        ),
    ],
)
def test_every_model_family_matches_the_float64_formulas_in_16_bits(tmp_path: Path, family: str, dtype: Any) -> None:
    """The logits are those of the float64 formulas, within the error of 16 bits.

    Families have concatenated and separate projections, tied and untied heads, biases, q/k norms, and experts.
    """
    config = {**FAMILIES, **EXPERT_FAMILIES}[family]
    files = llm.read(llm_models.folder(tmp_path, config, plain=("0.self_attn.k_proj", "1.mlp.up_proj")))
    model = build_model(files, SimulatedOps(files.config, 0, dtype))
    found, wanted = simulated_logits(model, IDS, 6), llm_models.forward(files, IDS)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() <= (0.01 if dtype == FLOAT16 else 0.08) * np.abs(wanted).max()


@pytest.mark.usefixtures("simulated")
def test_projections_of_dense_layers_only_match_the_float64_formulas(tmp_path: Path) -> None:
    plain = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    files = llm.read(llm_models.folder(tmp_path, QWEN3, plain=plain))
    model = build_model(files, SimulatedOps(files.config, 0, FLOAT16))
    found, wanted = simulated_logits(model, IDS, 8), llm_models.forward(files, IDS)
    assert np.abs(found - wanted).max() <= 0.01 * np.abs(wanted).max()


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_sequences_of_a_batch_do_not_see_each_other(tmp_path: Path, batch_invariant: bool) -> None:
    """Prompts of several sequences share a step; a decode step runs eagerly, then captured, and beside padding rows."""
    files = llm.read(llm_models.folder(tmp_path, LLAMA))
    model = build_model(files, SimulatedOps(files.config, 0, FLOAT16, batch_invariant=batch_invariant))
    steps = model.ops.make_steps(model.forward, model.head, 3, 64, 6 * BLOCK)
    texts, blocks = [IDS[:2], IDS[2:7]], [[3, 5], [2, 1]]
    for i, found in enumerate(blocks, 1):
        steps.place(i, found)
    steps.prompt([(i, 0, text) for i, text in enumerate(texts, 1)])
    for tokens in ([5, 6], [7, 8], [9, 10]):
        rows = [(i, len(texts[i - 1]), blocks[i - 1][0], blocks[i - 1][0], token) for i, token in enumerate(tokens, 1)]
        logits, _ = steps.decode(rows, ChoiceOptions())
        for text, token, row in zip(texts, tokens, logits, strict=False):
            text.append(token)
            wanted = llm_models.forward(files, text)[-1]
            assert np.abs(row - wanted).max() <= 0.01 * np.abs(wanted).max()


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("family", fewer(reversed(FAMILIES), 3))
def test_batch_invariant_logits_have_the_same_bits_in_any_chunks(tmp_path: Path, family: str) -> None:
    """In the batch-invariant mode, logits have equal bits if a prompt runs whole, in two parts, or token by token."""
    files = llm.read(llm_models.folder(tmp_path, FAMILIES[family], plain=("0.self_attn.k_proj", "1.mlp.up_proj")))
    model = build_model(files, SimulatedOps(files.config, 0, FLOAT16, batch_invariant=True))
    whole = simulated_logits(model, IDS, len(IDS))
    for prompt in (6, 1):
        np.testing.assert_array_equal(simulated_logits(model, IDS, prompt).view(np.uint32), whole.view(np.uint32))
    assert np.abs(whole - llm_models.forward(files, IDS)).max() <= 0.01 * np.abs(whole).max()


@pytest.mark.usefixtures("simulated")
def test_default_logits_depend_on_the_chunks(tmp_path: Path) -> None:
    """Without the batch-invariant mode, logits do depend on the chunks: the test of the mode is able to fail."""
    files = llm.read(llm_models.folder(tmp_path, LLAMA))
    model = build_model(files, SimulatedOps(files.config, 0, FLOAT16))
    assert (simulated_logits(model, IDS, 1) != simulated_logits(model, IDS, len(IDS))).any()


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("hidden", "head_dim", "message"),
    [
        (64, 12, "head_dim: expected a multiple of 8 up to 256 on a GPU, got 12"),
        (64, 264, "head_dim: expected a multiple of 8 up to 256 on a GPU, got 264"),
        (60, 16, "hidden: expected a multiple of 8 on a GPU, got 60"),
    ],
)
def test_a_model_with_sizes_that_kernels_do_not_support_is_refused(hidden: int, head_dim: int, message: str) -> None:
    config = llm_models.decoder(hidden_size=hidden, num_attention_heads=2, head_dim=head_dim)
    with pytest.raises(ValueError, match=message):
        SimulatedOps(config, 0, FLOAT16)


@pytest.mark.usefixtures("simulated")
def test_a_kv_cache_larger_than_the_free_gpu_memory_is_refused(tmp_path: Path) -> None:
    files = llm.read(llm_models.folder(tmp_path, LLAMA))
    model = build_model(files, SimulatedOps(files.config, 0, FLOAT16))
    with pytest.raises(ValueError, match=r"KV cache of 2000000 tokens: expected at most 0\.41 GB, got 0\.51 GB"):
        model.ops.make_steps(model.forward, model.head, 2, 10**6, 2 * 10**6)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("arch", "dtype"), [(90, FLOAT16), pytest.param(90, BFLOAT16, marks=pytest.mark.slow), (80, FLOAT16)]
)
@pytest.mark.parametrize(
    ("m", "gated"),
    [
        (1, False),
        (2, True),
        (33, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, False), (17, True), (32, False))),
    ],
)
def test_small_batches_fuse_the_residual_add_and_rms_norm_into_gemms(
    monkeypatch: pytest.MonkeyPatch, arch: int, dtype: Any, m: int, gated: bool
) -> None:
    """In a small batch, residual adds and RMSNorms are fused into GEMMs, except the first norm, which no GEMM precedes.

    An add without a GEMM that can be fused gets a kernel of its own.
    """
    rng, gpu = np.random.default_rng(m), device.nominal(arch)
    monkeypatch.setattr(device, "of", lambda _: gpu)

    def layer(k: int, n: int, **options: Any) -> AwqLinear:
        weight, layout = random_weight(rng, k, n, 64), FragmentLayout(k, n, 64)
        repacked = np.empty(layout.nbytes, np.uint8)
        tensors = {"qweight": weight.qweight, "scales": weight.scales, "qzeros": weight.qzeros}
        simt.run(layout.pack(gpu), {**tensors, "out": repacked})
        monkeypatch.setattr("cupy_awq.linear.repack", lambda weight: RepackedWeight(weight, repacked, 0, False))
        return AwqLinear(weight, **options)

    wide = 256 if gated else 128
    enter = layer(192, wide, bias=rng.standard_normal(wide).astype(np.float32), activation="swiglu" if gated else None)
    leave = layer(128, 192)
    config = llm_models.decoder(hidden_size=192)
    ops, plain = SimulatedOps(config, 0, dtype), NumpyOps(config)
    entries, prefetches, run = [], [], ops.run

    def recorded(plan: Any, **arrays: Any) -> None:
        entries.append(plan.kernel.entry)
        prefetches.append(arrays.get("next_weight") is not None)
        if prefetches[-1]:
            share, half_offset = map(int, plan.scalars[-2:])
            assert share > 0
            assert half_offset + share * plan.grid[0] <= arrays["next_weight"].nbytes
        run(plan, **arrays)

    monkeypatch.setattr(ops, "run", recorded)
    first, second = (Norm(rng.standard_normal(192).astype(np.float32), 1e-5) for _ in range(2))
    table, tokens = rng.standard_normal((m, 192)).astype(dtype), np.arange(m, dtype=np.int32)[None]

    def shorten(x: np.ndarray) -> np.ndarray:  # a projection that is no GEMM, and so cannot divide x by its RMS
        return np.ascontiguousarray(x[..., :128])

    operations = [first, Project(enter), Add(leave), second, Project(enter), Add(leave), first, Project(shorten)]
    operations += [Add(leave), second]

    def forward(ops: DecoderOps, count: int) -> np.ndarray:
        return ops.make_forward(table, operations[:count])(tokens, None).astype(np.float32)

    found = [forward(ops, count) for count in (5, 8)]
    entries.clear()
    prefetches.clear()
    found.append(forward(ops, len(operations)))
    wanted = [forward(plain, count) for count in (5, 8, len(operations))]
    gemm = "gemm_mma_fragments" if arch == 80 else "gemm_sm90_mma" if m <= 8 else "gemm_sm90"
    assert entries == ["embed", "rms_norm", *(["rms_norm"] if m > 32 else [gemm] * 3), "rms_norm", "rms_norm"]
    # Below sm_90, the first of these GEMMs prefetches the weight of the second, the second that of the third.
    expected = (2 if m <= 32 else 0) if arch == 80 else int(gated and m <= 8)
    assert sum(prefetches) == expected, "GEMMs prefetch a part of the next weight, on Hopper that of a gated one"
    for simulated_y, y in zip(found, wanted, strict=True):
        assert np.abs(simulated_y - y).max() <= (3e-3 if dtype == FLOAT16 else 3e-2) * np.abs(y).max()


@pytest.fixture(scope="module", params=["plain", "repacked"])
def pair(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[LanguageModel, LanguageModel]:
    """Return one model on the CPU and on the GPU, with sizes that Hopper's fragment layout supports or not."""
    options = {"config": {**QWEN3, "intermediate_size": 128}, "group": 32} if request.param == "repacked" else {}
    path = llm_models.folder(tmp_path_factory.mktemp("model"), **{"config": QWEN3, **options})
    return llm.load(path, device="cpu"), llm.load(path)


PROMPTS = ["Hello", "Why is the sky blue?", "x" * 70]


def launch_eagerly(self: StepGraph, stream: Any, malloc: Any) -> Any:
    """Launch a step without a CUDA graph, in place of `StepGraph.launch`."""
    self.run(self)
    return self.result


def teacher_forced(model: LanguageModel, ids: list[int], prompt: int) -> np.ndarray:
    return simulated_logits(model.model, ids, prompt)


@pytest.mark.gpu
@pytest.mark.parametrize("prompt", [1, 20, 100])
def test_logits_of_the_gpu_match_those_of_the_cpu(pair: tuple[LanguageModel, LanguageModel], prompt: int) -> None:
    ids = np.random.default_rng(0).integers(0, llm_models.VOCAB, 120).tolist()
    host, gpu = (teacher_forced(model, ids, prompt) for model in pair)
    assert np.abs(host - gpu).max() <= 0.01 * np.abs(host).max()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.9, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=3)],
)
def test_a_replayed_cuda_graph_generates_the_same_text_as_eager_steps(
    pair: tuple[LanguageModel, LanguageModel], sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed CUDA graphs generate the texts that eagerly launched steps generate, for a batch of three lengths."""
    _, model = pair
    graph = [model.generate(PROMPTS, max_tokens=30, sampling=sampling) for _ in range(2)]
    assert graph[0] == graph[1]
    assert [model.generate(p, max_tokens=30, sampling=sampling)[0] for p in PROMPTS[:1]] == graph[0][:1]
    monkeypatch.setattr(StepGraph, "launch", launch_eagerly)
    assert model.generate(PROMPTS, max_tokens=30, sampling=sampling) == graph[0]


@pytest.mark.gpu
def test_a_chat_on_the_gpu_answers_as_a_new_prompt_with_the_whole_conversation(
    pair: tuple[LanguageModel, LanguageModel],
) -> None:
    _, model = pair
    chat = model.chat()
    messages: list[dict[str, str]] = []
    for text in ("Hi", "And now?", "More"):
        answer = "".join(chat.say(text, max_tokens=8))
        messages.append({"role": "user", "content": text})
        assert model.generate([messages], max_tokens=8)[0].text == answer
        messages.append({"role": "assistant", "content": answer})


@pytest.mark.gpu
def test_many_requests_do_not_leak_device_memory(pair: tuple[LanguageModel, LanguageModel]) -> None:
    import cupy

    _, model = pair

    def in_use_after(requests: int) -> int:
        for i in range(requests):
            model.generate("x" * (1 + 3 * (37 * i % 50)), max_tokens=3)
        gc.collect()
        return int(cupy.get_default_memory_pool().used_bytes())

    # The GPU's free memory says nothing, since other processes allocate at the same time; a leak shows in every round.
    used = [in_use_after(60) for _ in range(5)]
    assert any(after <= before for before, after in itertools.pairwise(used)), used


@pytest.mark.gpu
def test_a_score_on_the_gpu_matches_that_of_the_cpu(pair: tuple[LanguageModel, LanguageModel]) -> None:
    scores = [model.score("The sky is blue because of scattering. " * 5) for model in pair]
    assert scores[0].tokens == scores[1].tokens
    assert scores[1].log_likelihood == pytest.approx(scores[0].log_likelihood, rel=2e-3)
