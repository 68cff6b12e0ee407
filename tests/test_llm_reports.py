# SPDX-License-Identifier: Apache-2.0
"""Tests of bugs that users of other projects reported, from a model's file to the generated text.

The weights of a model determine the next token of each token, so the right text is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from cupy_awq import llm
from cupy_awq.tools.command_line import main
from tests import llm_models

VOCAB = 512
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "model.layers.0": "blk.0",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
}


def chain_tensors(following: Mapping[int, int]) -> dict[str, np.ndarray]:
    """Return the tensors of a model whose most likely next token is ``following[token]`` (default: the same token).

    It has one-hot embeddings, a head that maps them, and a decoder layer of zeros.
    """
    head = np.zeros((VOCAB, VOCAB), np.float16)
    for i in range(VOCAB):
        head[following.get(i, i), i] = 1
    table = {"model.embed_tokens": np.eye(VOCAB, dtype=np.float16), "lm_head": head, "model.norm": np.ones(VOCAB)}
    shapes = {"self_attn.q_proj": (VOCAB, VOCAB), "self_attn.o_proj": (VOCAB, VOCAB)}
    shapes |= {"self_attn.k_proj": (VOCAB // 2, VOCAB), "self_attn.v_proj": (VOCAB // 2, VOCAB)}
    shapes |= {"mlp.gate_proj": (32, VOCAB), "mlp.up_proj": (32, VOCAB), "mlp.down_proj": (VOCAB, 32)}
    table |= {f"model.layers.0.{name}": np.zeros(shape) for name, shape in shapes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    table |= {f"model.layers.0.{name}": np.ones(VOCAB) for name in norms}
    return {f"{name}.weight": value.astype(np.float16) for name, value in table.items()}


def chain_folder(
    folder: Path,
    inner: Any,
    following: Mapping[int, int],
    *,
    template: str = llm_models.TEMPLATE,
    settings: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write a Hugging Face folder with a model that follows each token by a fixed other one (`chain_tensors`)."""
    folder.mkdir()
    save_file(chain_tensors(following), folder / "model.safetensors")
    table = {**llm_models.LLAMA, "hidden_size": VOCAB, "intermediate_size": 32, "num_hidden_layers": 1}
    table |= {"vocab_size": VOCAB, "head_dim": VOCAB // 4, "tie_word_embeddings": False, **config}
    (folder / "config.json").write_text(json.dumps(table))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **(settings or {})}))
    inner.save(str(folder / "tokenizer.json"))
    return folder


def chain_gguf(
    path: Path, tokens: list[str], types: list[int], following: Mapping[int, int], pre: str, ids: Mapping[str, int]
) -> Path:
    """Write `chain_tensors` and a byte-level tokenizer as a GGUF file; ``ids`` are special tokens such as "eos"."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(VOCAB)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a b"])
    writer.add_chat_template("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    for name, i in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", i)
    for name, value in chain_tensors(following).items():
        for old, new in GGUF_NAMES.items():
            name = name.replace(old, new)
        writer.add_tensor(name, value.astype(np.float32) if value.ndim == 1 else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ids_of(inner: Any, text: str) -> list[int]:
    return inner.encode(text, add_special_tokens=False).ids


def test_a_model_stops_at_the_token_that_its_tokenizer_names(tmp_path: Path) -> None:
    """If config.json still names the base model's stop token, the tokenizer's own end token stops the text.

    Reported as QwenLM/Qwen3 #927 and huggingface/open-r1 #663.
    """
    inner = llm_models.tokenizer()
    (newline,), (a,) = ids_of(inner, "\n"), ids_of(inner, "A")
    end = inner.token_to_id("<|im_end|>")
    following = {newline: a, a: end, end: newline}
    settings = {"eos_token": "<|im_end|>"}
    folder = chain_folder(tmp_path / "m", inner, following, settings=settings, eos_token_id=256)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 256}))
    done = llm.load(folder, device="cpu").generate("hi", max_tokens=20)[0]
    assert (done.text, done.reason) == ("A", "stop")


@pytest.mark.parametrize("pre", ["llama-bpe", "deepseek-r1-qwen"])
@pytest.mark.parametrize("end", ["<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|eom_id|>"])
def test_a_gguf_model_stops_at_the_end_of_a_turn(tmp_path: Path, pre: str, end: str) -> None:
    """A GGUF chat model stops at the end of a turn though the file names only the token that ends a text.

    Reported as ggml-org/llama.cpp #6772 and #11341, and ollama/ollama #3759.
    """
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "<|end_of_text|>", end]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens) - 1)] + ["ab"]
    types = [1] * 256 + [3] * 2 + [5] * (VOCAB - 259) + [1]
    newline, a = tokens.index("\u010a"), tokens.index("A")
    path = chain_gguf(tmp_path / "m.gguf", tokens, types, {newline: a, a: 257, 257: newline}, pre, {"eos": 256})
    assert sorted(llm.read(path).stop_ids) == [256, 257]
    done = llm.load(path, device="cpu").generate("hi", max_tokens=20)[0]
    assert (done.text, done.reason) == ("A", "stop")


def sentence_piece() -> Any:
    words = ["i", "\u2581", "\u2581hi", "\u2581ok"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    vocabulary = {text: i for i, text in enumerate(tokens)}
    bpe = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    inner = tokenizers.Tokenizer(bpe)
    steps, ends = tokenizers.normalizers, tokenizers.decoders
    inner.normalizer = steps.Sequence([steps.Prepend("\u2581"), steps.Replace(" ", "\u2581")])
    inner.decoder = ends.Sequence(
        [ends.Replace("\u2581", " "), ends.ByteFallback(), ends.Fuse(), ends.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return inner


def test_an_answer_goes_on_after_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A stray byte between valid characters does not end the text or delay what follows.

    Reported as vllm-project/vllm #17448 and huggingface/tokenizers #1705.
    """
    inner = sentence_piece()
    i, ok = inner.token_to_id("i"), inner.token_to_id("\u2581ok")
    following = {i: 3 + 0xC3, 3 + 0xC3: 3 + 0xA9, 3 + 0xA9: 3 + 0xF0, 3 + 0xF0: ok, ok: 2}
    folder = chain_folder(tmp_path / "m", inner, following, eos_token_id=2)
    pieces: list[str] = []
    model = llm.load(folder, device="cpu")
    done = model.generate("hi", raw=True, max_tokens=20, on_text=lambda _, text: pieces.append(text))[0]
    assert (done.text, done.reason) == ("é\ufffd ok", "stop")
    assert "".join(pieces) == done.text


def test_a_raw_completion_keeps_its_first_space_and_an_answer_does_not(tmp_path: Path) -> None:
    inner = sentence_piece()
    i, ok = inner.token_to_id("i"), inner.token_to_id("\u2581ok")
    folder = chain_folder(tmp_path / "m", inner, {i: ok, ok: 2}, template="{{ messages[0].content }}", eos_token_id=2)
    model = llm.load(folder, device="cpu")
    assert model.generate("hi", raw=True)[0].text == " ok"
    assert model.generate("hi")[0].text == "ok"
    assert "".join(model.chat().say("hi")) == "ok"


def test_a_character_that_is_cut_by_the_limit_is_a_replacement_character(tmp_path: Path) -> None:
    inner = sentence_piece()
    i = inner.token_to_id("i")
    folder = chain_folder(tmp_path / "m", inner, {i: 3 + 0xC3})
    model = llm.load(folder, device="cpu")
    done = model.generate("hi", raw=True, max_tokens=1)[0]
    assert done.text == "\ufffd" == model.tokenizer.decode(done.tokens)


def test_a_token_that_the_tokenizer_does_not_have_has_no_text(tmp_path: Path) -> None:
    """A token id beyond the tokenizer's vocabulary, which the embedding table has, gives no text and no error.

    Reported as NVIDIA-NeMo/RL #237.
    """
    inner = llm_models.tokenizer()
    (newline,), (a,) = ids_of(inner, "\n"), ids_of(inner, "A")
    folder = chain_folder(tmp_path / "m", inner, {newline: 400, 400: a, a: 258})
    done = llm.load(folder, device="cpu").generate("hi", max_tokens=8)[0]
    assert (done.text, done.reason, done.tokens[0]) == ("A", "stop", 400)


def test_calibration_texts_may_hold_the_turns_of_chats(tmp_path: Path) -> None:
    """Calibration texts may have special tokens, and decomposed Unicode that the tokenizer composes.

    Reported as QwenLM/Qwen3 #692.
    """
    inner = llm_models.tokenizer()
    inner.normalizer = tokenizers.normalizers.NFC()
    turn = "<|im_start|>user\ncafe\u0301 \u212b {}<|im_end|>\n<|im_start|>assistant\nworld<|im_end|>\n<|end|>"
    folder = chain_folder(tmp_path / "m", inner, {})
    options = {"group_size": 32, "method": "rtn", "samples": 8, "sequence_length": 64, "device": "cpu"}
    report = llm.quantize(folder, tmp_path / "out", [turn.format(i) for i in range(40)], **options)
    assert len(report.layers) == 1
    assert llm.load(tmp_path / "out", device="cpu").generate("hi", max_tokens=2)[0].reason == "length"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("up", "down"), [(30.0, 1.0), (3e4, 1e-3), (30.0, 1e4)], ids=["small", "gated", "output"])
def test_activations_beyond_float16_are_finite_or_an_error(tmp_path: Path, up: float, down: float, device: str) -> None:
    """Products of the MLP near 1e6 give finite logits, or on a GPU, which computes in float16, an error.

    Reported as QwenLM/Qwen3 #761.
    """
    folder = chain_folder(tmp_path / "m", llm_models.tokenizer(), {i: (i * 7 + 1) % VOCAB for i in range(VOCAB)})
    tensors, rng = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    for name, factor in {"gate": 30.0, "up": up, "down": down}.items():
        key = f"model.layers.0.mlp.{name}_proj.weight"
        n, k = tensors[key].shape
        tensors[key] = (rng.standard_normal((n, k)) * factor * k**-0.5).astype(np.float16)
    save_file(tensors, folder / "model.safetensors")
    text = "The quick brown fox"
    expected = llm.load(folder, device="cpu").score(text).log_likelihood
    assert np.isfinite(expected)
    try:
        found = llm.load(folder, device=device).score(text).log_likelihood
    except ValueError as error:
        if device == "cpu" or max(up, down) < 1e3 or "activations overflow" not in str(error):
            raise
        return
    assert found == pytest.approx(expected, rel=0.02, abs=0.1)


def test_variables_of_the_template_reach_it_from_every_entrance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Variables of a chat template, such as enable_thinking, reach it from Python, the command line and the server.

    Reported as QwenLM/Qwen3 #1286 and abetlen/llama-cpp-python #2063.
    """
    inner = llm_models.tokenizer()
    (yes,), (no,), (other,) = ids_of(inner, "y"), ids_of(inner, "n"), ids_of(inner, "o")
    template = "{% if enable_thinking is not defined %}y{% elif enable_thinking is false %}n{% else %}o{% endif %}"
    folder = chain_folder(tmp_path / "m", inner, {yes: yes, no: no, other: other}, template=template)
    model = llm.load(folder, device="cpu")
    off = {"enable_thinking": False}
    assert model.generate("x", max_tokens=1)[0].text == "y"
    assert model.generate("x", max_tokens=1, template_args=off)[0].text == "n"
    assert model.encode("x", template_args=off) == [no]
    assert "".join(model.chat(template_args=off).say("x", max_tokens=1)) == "n"
    for argument, wanted in (("false", "n"), ("true", "o"), ("False", "n"), ('"false"', "o"), ("null", "o")):
        command = ["generate", str(folder), "x", "--max-tokens", "1", "--device", "cpu"]
        assert main([*command, "--template-arg", f"enable_thinking={argument}"]) == 0
        assert capsys.readouterr().out == f"{wanted}\n"
    for wrong in ("enable_thinking", "=1", "a b=1"):
        assert main([*command, "--template-arg", wrong]) == 2
        assert "expected NAME=VALUE, got" in capsys.readouterr().err
