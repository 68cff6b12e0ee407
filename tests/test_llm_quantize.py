# SPDX-License-Identifier: Apache-2.0
"""Tests of whole-model quantization: exact folding, errors below round-to-nearest, and the written folder."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cupy_awq import PackedWeight, llm, quantize
from cupy_awq.checkpoint import CheckpointError
from cupy_awq.llm.calibrate import layer_quantizer, model_quantizer
from cupy_awq.quantization import Recipe
from cupy_awq.runtime import placement
from cupy_awq.tools import quantize_command
from cupy_awq.tools.command_line import main
from tests import llm_models
from tests.backends import fewer
from tests.logits import logits_of

TEXT = "The quick brown fox jumps over the lazy dog. 0123456789, and so on; again and again!\n" * 8
OPTIONS: dict[str, Any] = {"group_size": 16, "samples": 4, "sequence_length": 64, "device": "cpu"}


def dense_folder(path: Path, config: dict[str, Any], dtype: Any = np.float16) -> Path:
    """Write a folder of a dense model in which some channels have large activations."""
    path.mkdir()
    tensors = llm_models.tensors(config, plain=("proj", "w1", "w2", "w3"))
    for name, a in tensors.items():
        if name.endswith("layernorm.weight"):
            a[::7] *= 6
    save_file({name: a.astype(dtype) for name, a in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": llm_models.TEMPLATE}))
    llm_models.tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(params=llm_models.FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return dense_folder(tmp_path / "dense", llm_models.FAMILIES[request.param])


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return dense_folder(tmp_path / "dense", llm_models.LLAMA)


def sequences(files: llm.ModelFiles) -> list[list[int]]:
    return model_quantizer.cut_sequences(files.load_tokenizer(), [TEXT], 4, 64)


@pytest.mark.parametrize("family", llm_models.FAMILIES)
def test_folded_model_gives_the_logits_of_the_original(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folding channel scales into neighboring layers does not change logits; the weights stay unquantized here."""
    config = llm_models.FAMILIES[family]
    files = llm.read(dense_folder(tmp_path / "dense", config, np.float32))
    tensors = load_file(tmp_path / "dense" / "model.safetensors")
    changes: list[float] = []
    fold = layer_quantizer._fold

    def record(config: Any, weights: Any, *others: Any) -> Any:
        folded, *rest = fold(config, weights, *others)
        at = f"model.layers.{len(changes) // 7}"
        for name, (w, bias) in folded.linears.items():
            changes.append(np.abs(w - weights.linears[name][0]).max())
            tensors[f"{at}.{name}.weight"] = w
            if bias is not None:
                tensors[f"{at}.{name}.bias"] = bias
        tensors.update({f"{at}.{name}": a for name, a in folded.norms.items()})
        return folded, *rest

    def keep(folded: Any, *others: Any) -> Any:
        return {name: Unquantized(w) for name, (w, _) in folded.linears.items()}

    monkeypatch.setattr(layer_quantizer, "_fold", record)
    monkeypatch.setattr(layer_quantizer, "_quantize", keep)
    for layer in layer_quantizer.quantize_layers(files, sequences(files), Recipe(16), tunes=False):
        assert layer.output_error < 1e-5
        assert all(error < 1e-9 for _, error in layer.errors.values())
    assert np.mean(np.array(changes) > 0.001) > 0.7  # not 1: the scale search leaves some layers unscaled
    dense_folder(tmp_path / "folded", config)
    save_file(tensors, tmp_path / "folded" / "model.safetensors")
    logits = [all_logits(llm.load(tmp_path / name, device="cpu")) for name in ("dense", "folded")]
    assert np.abs(logits[1] - logits[0]).max() <= 1e-5 * np.abs(logits[0]).max()


def all_logits(model: llm.LanguageModel) -> np.ndarray:
    ids = model.tokenizer.encode(TEXT[:100])
    return logits_of(model.model, ids)


class Unquantized(NamedTuple):
    """A stand-in for a quantized weight that keeps its values."""

    w: np.ndarray

    def dequantize(self) -> np.ndarray:
        return self.w

    def pack(self) -> PackedWeight:
        return quantize(self.w.T, group_size=16)


def test_every_linear_layer_has_at_most_the_error_of_round_to_nearest(model: Path) -> None:
    files = llm.read(model)
    layers = list(layer_quantizer.quantize_layers(files, sequences(files), Recipe(16)))
    nearest = Recipe(16, clips=False, compensates=False, passes=0)
    plain = list(layer_quantizer.quantize_layers(files, sequences(files), nearest, scales=False))
    assert len(layers) == len(plain) == 2
    for layer, other in zip(layers, plain, strict=True):
        assert all(error <= rounded for rounded, error in layer.errors.values())
        assert layer.output_error < 0.8 * other.output_error


@pytest.mark.parametrize("format_name", fewer(["compressed-tensors", "autoawq"]))
def test_written_folder_runs_and_is_the_same_each_time(model: Path, tmp_path: Path, format_name: str) -> None:
    for name in ("first", "second"):
        report = llm.quantize(model, tmp_path / name, [TEXT], format_name=format_name, **OPTIONS)
        assert [layer["layer"] for layer in report.layers] == [0, 1]
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second
    settings = json.loads((tmp_path / "first" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == ("awq" if format_name == "autoawq" else format_name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "first", "second"]
    scores = [llm.load(folder, device="cpu").score(TEXT[:200]) for folder in (model, tmp_path / "first")]
    assert scores[1].log_likelihood == pytest.approx(scores[0].log_likelihood, rel=0.05)


def test_killed_run_resumes_with_the_same_result(llama: Path, tmp_path: Path) -> None:
    llm.quantize(llama, tmp_path / "whole", [TEXT], **OPTIONS)

    def stop(done: int, total: int, report: Any) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.quantize(llama, tmp_path / "parts", [TEXT], progress=stop, **OPTIONS)
    assert not (tmp_path / "parts").exists()
    with pytest.raises(FileExistsError, match="expected no unfinished work"):
        llm.quantize(llama, tmp_path / "parts", [TEXT], **OPTIONS)
    with pytest.raises(ValueError, match="expected unfinished work with the settings"):
        llm.quantize(llama, tmp_path / "parts", [TEXT], resume=True, method="rtn", **OPTIONS)
    seen: list[int | str] = []
    llm.quantize(
        llama,
        tmp_path / "parts",
        [TEXT],
        resume=True,
        progress=lambda done, *_: seen.append(done),
        on_step=seen.append,
        **OPTIONS,
    )
    steps = ["read", "calibrate", "search scales", "quantize", "tune", "compare errors"]
    assert seen == [1, "read", "run", *steps, 2, "write files"]
    whole, parts = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


@pytest.mark.gpu
def test_quantizing_a_model_on_the_gpu_is_as_good_as_on_the_cpu(model: Path, tmp_path: Path) -> None:
    reports = [llm.quantize(model, tmp_path / str(at), [TEXT], **{**OPTIONS, "device": at}) for at in ("cpu", 0)]
    assert (reports[1].memory_bytes["gpu"] or 0) > 0
    for on_cpu, on_gpu in zip(*(report.layers for report in reports), strict=True):
        for name, (nearest, error) in on_cpu["errors"].items():
            assert on_gpu["errors"][name][0] == pytest.approx(nearest, rel=0.01)
            assert on_gpu["errors"][name][1] == pytest.approx(error, rel=0.03)
        assert on_gpu["nearest_output_error"] == pytest.approx(on_cpu["nearest_output_error"], rel=0.01)
        assert on_gpu["output_error"] == pytest.approx(on_cpu["output_error"], rel=0.03)


@pytest.mark.parametrize("format_name", fewer(["autoawq", "compressed-tensors"]))
def test_ignored_layers_stay_dense_and_the_model_runs(model: Path, tmp_path: Path, format_name: str) -> None:
    pattern = r"layers\.0\.(self_attn\.[qkv]|mlp\.up)|down_proj"
    report = llm.quantize(model, tmp_path / "new", [TEXT], ignore=pattern, format_name=format_name, **OPTIONS)
    assert list(report.layers[0]["errors"]) == ["self_attn.o_proj", "mlp.gate_proj"]
    assert "mlp.down_proj" not in report.layers[1]["errors"]
    settings = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    dense = settings["modules_to_not_convert" if format_name == "autoawq" else "ignore"]
    linears = [name for name in dense if "layers" in name]
    assert len(linears) == 6
    assert all(re.search(pattern, name) for name in linears)
    scores = [llm.load(folder, device="cpu").score(TEXT[:200]) for folder in (model, tmp_path / "new")]
    assert scores[1].log_likelihood == pytest.approx(scores[0].log_likelihood, rel=0.05)


def test_ignoring_everything_keeps_the_model(llama: Path, tmp_path: Path) -> None:
    report = llm.quantize(llama, tmp_path / "new", [TEXT], ignore="", **OPTIONS)
    assert all(layer["errors"] == {} and layer["output_error"] == 0 for layer in report.layers)


def test_report_compares_layers_and_perplexities(llama: Path, tmp_path: Path) -> None:
    short = {**OPTIONS, "samples": 1}  # One sample must suffice for the report's model that is rounded to nearest, too.
    report = llm.quantize(llama, tmp_path / "new", [TEXT[:80]], evaluate=TEXT[:200], **short)
    assert list(report.perplexities) == ["16-bit", "rtn", "result"]
    for name, folder in (("16-bit", llama), ("result", tmp_path / "new")):
        assert report.perplexities[name] == llm.load(folder, device="cpu").score(TEXT[:200]).perplexity
    options = {**OPTIONS, "samples": 1, "sequence_length": 8}
    llm.quantize(llama, tmp_path / "rtn", [TEXT], method="rtn", **options)
    assert report.perplexities["rtn"] == llm.load(tmp_path / "rtn", device="cpu").score(TEXT[:200]).perplexity
    stored = json.loads((tmp_path / "new" / "quantization_report.json").read_text())
    assert stored["perplexities"] == report.perplexities
    first, _ = stored["layers"]  # the second layer compensates errors of the first, so its own error may grow
    assert first["output_error"] < first["nearest_output_error"]
    assert stored["memory_bytes"]["cpu"] > 1e6
    lines = (tmp_path / "new" / "quantization_report.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["Error", "layer", "0", "1", *["perplexity"] * 3, "awq+gptq,"]
    assert (tmp_path / "new" / "quantization_report.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "new", "rtn"]


def test_report_has_no_plot_without_matplotlib(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    llm.quantize(llama, tmp_path / "new", [TEXT], **OPTIONS)
    assert not (tmp_path / "new" / "quantization_report.png").exists()
    assert (tmp_path / "new" / "quantization_report.txt").exists()


def test_full_disk_leaves_no_folder_and_the_run_resumes(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = model_quantizer.safetensors.write

    def fail(path: Path, tensors: Any) -> None:
        if "00001" in path.name:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device", str(path))
        write(path, tensors)

    with monkeypatch.context() as patched:
        patched.setattr(model_quantizer.safetensors, "write", fail)
        with pytest.raises(OSError, match="No space left on device"):
            llm.quantize(llama, tmp_path / "new", [TEXT], **OPTIONS)
    assert not (tmp_path / "new").exists()
    report = llm.quantize(llama, tmp_path / "new", [TEXT], resume=True, **OPTIONS)
    assert len(report.layers) == 2


def invalid() -> Iterator[Any]:
    yield {"method": "best"}, ValueError, r"^method: expected one of rtn"
    yield {"format_name": "gguf"}, ValueError, r"^format_name: expected autoawq"
    yield {"group_size": 24}, ValueError, r"^group_size: expected a divisor of .* such as 32, got 24$"
    yield {"ignore": "("}, ValueError, r"^ignore: expected a regular expression, got '\('"
    yield {"evaluate": ""}, ValueError, r"^evaluate: expected a text of at least 2 tokens, got \d$"
    yield {"samples": 0}, ValueError, r"^samples, sequence_length: expected positive"
    yield {"samples": 128}, ValueError, r"^texts: expected at least 4096 tokens, got \d+$"


@pytest.mark.parametrize(("options", "error", "message"), list(invalid()))
def test_invalid_settings_are_refused(
    llama: Path, tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.quantize(llama, tmp_path / "new", [TEXT], **{**OPTIONS, **options})
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_quantized_models_and_full_folders_are_refused(tmp_path: Path) -> None:
    quantized = llm_models.folder(tmp_path / "quantized", llm_models.LLAMA)
    with pytest.raises(CheckpointError, match="expected a model with dense weights, got a quantized one"):
        llm.quantize(quantized, tmp_path / "new", [TEXT], **OPTIONS)
    with pytest.raises(FileExistsError, match="expected a new or empty folder"):
        llm.quantize(quantized, quantized, [TEXT], **OPTIONS)


def test_tensor_with_nan_is_named_before_any_work(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][3, 5] = np.nan
    save_file(tensors, llama / "model.safetensors")
    message = r"tensor 'model\.layers\.1\.self_attn\.v_proj\.weight': expected finite values, got NaN or infinity"
    with pytest.raises(ValueError, match=message):
        llm.quantize(llama, tmp_path / "new", [TEXT], **OPTIONS)


def test_tokenizer_that_loses_text_is_refused(llama: Path, tmp_path: Path) -> None:
    import tokenizers

    inner = llm_models.tokenizer()
    inner.normalizer = tokenizers.normalizers.Replace(" ", "")
    inner.save(str(llama / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"^tokenizer: expected the tokens of text 0 to decode to the text, got"):
        llm.quantize(llama, tmp_path / "new", [TEXT], **OPTIONS)


def test_sequences_are_spread_over_all_texts(llama: Path) -> None:
    tokenizer = llm.read(llama).load_tokenizer()
    found = model_quantizer.cut_sequences(tokenizer, ["a" * 80, "b" * 80], 2, 40)
    assert tokenizer.decode(found[0]) == "a" * 40
    assert tokenizer.decode(found[1]) == "b" * 40


def test_command_quantizes_a_folder(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(placement, "gpu_count", lambda: 0)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(TEXT)
    options = ["--group-size", "16", "--samples", "4", "--sequence-length", "64", "--symmetric"]
    arguments = ["quantize", str(llama), str(tmp_path / "new"), "--calibration", str(tmp_path / "texts"), *options]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("quantize: no GPU here, so the CPU computes")
    lines = printed.out.splitlines()
    assert lines[-2].startswith("awq+gptq, group size 16, ")
    assert lines[-1] == f"{tmp_path / 'new'}: written"
    assert main(arguments) == 2
    assert "expected a new or empty folder" in capsys.readouterr().err
    (tmp_path / "texts" / "a.txt").unlink()
    os.mkfifo(tmp_path / "texts" / "b.txt")  # a pipe that nobody writes to: reading it would never end
    assert main([*arguments[:2], str(tmp_path / "other"), *arguments[3:]]) == 2
    assert "expected a folder of .txt or .md files, got none" in capsys.readouterr().err


def test_command_without_calibration_says_what_it_needs(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(llama), str(tmp_path / "new")]) == 2
    assert "--calibration: expected a text file or a folder of .txt and .md files, with" in capsys.readouterr().err
    missing = str(tmp_path / "missing.txt")
    assert main(["quantize", str(llama), str(tmp_path / "new"), "--calibration", missing]) == 2
    assert "missing.txt" in capsys.readouterr().err


def test_progress_bar_tells_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    progress = quantize_command._Progress(is_shown=True)
    for done in range(4):
        progress.show_layer(done + 1, 4, None if done == 0 else {})
    progress.show_step("write files")
    progress.close()
    shown = [line.rstrip(" ") for line in capsys.readouterr().err.split("\r")]
    assert shown[1] == "[#######.......................] layer 1 of 4"
    assert shown[2] == "[###############...............] layer 2 of 4, 0:00 left"
    assert shown[5] == f"{'[' + 30 * '#' + ']'} layer 4 of 4, 0:00 left: write files"
    assert shown[6].split("]")[1].split() == "layer 4 of 4, 0:00 left".split()
    assert shown[6].endswith("\n")


def test_score_compares_models_in_a_table(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:100])
    assert main(["score", str(llama), str(llama), str(text), "--device", "cpu"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["model", "tokens", "perplexity", "nats/token", "loss"]
    assert first == second
    assert first.split()[::4] == [str(llama), "+0.0000"]
