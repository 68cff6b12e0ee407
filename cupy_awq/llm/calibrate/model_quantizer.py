# SPDX-License-Identifier: Apache-2.0
"""The quantization of a model folder: tokenize calibration texts, quantize layer by layer, and write a new folder."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import re
import stat
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cupy_awq import atomic, check, checkpoint
from cupy_awq.checkpoint import CheckpointError, Module, ModuleSpec, Tensor, model_folder, safetensors
from cupy_awq.checkpoint.contents import Contents
from cupy_awq.checkpoint.model_path import locate
from cupy_awq.checkpoint.module import Pending
from cupy_awq.checkpoint.tensors import is_finite
from cupy_awq.llm.assemble import load
from cupy_awq.llm.calibrate.layer_quantizer import QuantizedLayer, quantize_layers
from cupy_awq.llm.calibrate.quantization_report import Report, peak_memory
from cupy_awq.llm.calibrate.unfinished_work import (
    Settings,
    UnfinishedWork,
    digest_files,
    digest_texts,
    name_unfinished,
    open_work,
)
from cupy_awq.llm.families.description import Decoder, LayerSpec
from cupy_awq.llm.files import hugging_face
from cupy_awq.llm.files.model_files import DenseLinear
from cupy_awq.llm.text.tokenizer import Tokenizer
from cupy_awq.quantization import Recipe
from cupy_awq.runtime import placement
from cupy_awq.weight import PackedWeight

METHODS: Mapping[str, tuple[bool, bool, Mapping[str, Any]]] = {
    "rtn": (False, False, {"clips": False, "compensates": False, "passes": 0}),
    "awq": (True, False, {"compensates": False, "passes": 0}),
    "gptq": (False, False, {}),
    "awq+gptq": (True, True, {}),
}
"""The settings of each quantization method.

Each is (whether to search channel scales, whether to tune each layer, keyword arguments of `Recipe`).
"""
NEEDED_TOKENS = 4096
"""The smallest number of calibration tokens, unless ``samples * sequence_length`` is smaller."""
LayerProgress = Callable[[int, int, "Mapping[str, Any] | None"], None]
"""A callback (number of finished layers, number of all layers, report of the last finished layer or None)."""


def quantize(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    texts: Sequence[str],
    /,
    *,
    method: str = "awq+gptq",
    group_size: int = 128,
    symmetric: bool = False,
    samples: int = 128,
    sequence_length: int = 512,
    ignore: str | None = None,
    evaluate: str | None = None,
    format_name: str = "autoawq",
    device: Any = None,
    resume: bool = False,
    progress: LayerProgress | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> Report:
    """Quantize the decoder layers of a model to 4 bits and write the model, with a report, to a new folder.

    Unfinished work is kept in ``<folder>.partial``; ``folder`` is created when the model is complete. The embedding
    table, the output head, routers and gates of shared experts are not quantized. Experts to which the router sends few
    calibration tokens are rounded to nearest, and the report names them. Of the source's other files, those of
    `model_folder.COPIED` are copied. No file has a permission that its source does not have.

    Args:
        path: a Hugging Face folder of a model with dense weights.
        folder: the folder to write, which must be empty if it exists.
        texts: calibration documents, similar to the texts for which the model is used.
        method: "rtn" (round to nearest), "awq" (channel scales and clipping), "gptq" (clipping, error compensation and
            refinement) or "awq+gptq" (all of them, then tuning of scales and codes on the output of each layer).
        group_size: the number of input channels per group.
        symmetric: whether every zero point is 8.
        samples: the largest number of calibration sequences.
        sequence_length: the number of tokens per calibration sequence.
        ignore: a regular expression. Linear layers with a match in their name, such as "model.layers.0.mlp.down_proj",
            stay dense. None quantizes all.
        evaluate: a text, not used for calibration, on which the report compares the perplexities of the original model,
            of rounding to nearest and of the result; None for no comparison.
        format_name: "autoawq" or "compressed-tensors".
        device: "cpu", "cuda", "cuda:1", a device ordinal, or None for CuPy's current device (the CPU if there is none).
        resume: True to continue unfinished work, if neither the settings nor the files of the model nor the
            calibration texts have changed.
        progress: a callback that is called at the start and after each layer; see `LayerProgress`.
        on_step: a callback that is called with the name of each step, such as "calibrate", before the step starts.

    Raises:
        CheckpointError: the model is damaged, not supported, or already quantized. It is a subclass of ValueError.
        OSError: a file cannot be read or written, the folder is not empty, or another run is at work.
        ValueError: a setting is not supported, the texts are too short, or the tokenizer does not preserve a text.

    Example::

        cupy_awq.llm.quantize("SmolLM2-135M", "SmolLM2-135M-AWQ", [text], group_size=64).text()
    """
    start = time.monotonic()
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r:.80}")
    if format_name not in ("autoawq", "compressed-tensors"):
        raise ValueError(f"format_name: expected autoawq or compressed-tensors, got {format_name!r:.80}")
    check_pattern(ignore)
    index = placement.resolve(device)
    source, target = locate(path), atomic.new_folder(folder)
    if not source.is_dir():
        raise CheckpointError(f"{source}: expected a Hugging Face folder with dense weights, got a file")
    files = hugging_face.read(source)
    contents = checkpoint.read(source)
    if contents.specs:
        raise CheckpointError(f"{source}: expected a model with dense weights, got a quantized one")
    hugging_face.check_names(source, contents, files.config)
    check_group_size(files.config, group_size)
    tokenizer = files.load_tokenizer()
    sequences = cut_sequences(tokenizer, texts, samples, min(sequence_length, files.config.context))
    if evaluate is not None and (count := len(tokenizer.encode(evaluate))) < 2:
        raise ValueError(f"evaluate: expected a text of at least 2 tokens, got {count}")
    has_scales, is_tuned, fields = METHODS[method]
    layers = files.config.layers
    dtype = contents.dense_form(f"{layers[0].name}.{layers[0].linears[0].name}.weight")[1]
    scale_dtype = dtype if format_name == "compressed-tensors" and dtype == check.BFLOAT16 else check.FLOAT16
    recipe = Recipe(group_size, symmetric=symmetric, scale_dtype=scale_dtype, **fields)
    copied, weights = model_folder.list_files(source), model_folder.list_weights(source)
    options: dict[str, Any] = {"source": str(source.resolve()), "method": method, "ignore": ignore}
    options |= {"samples": samples, "sequence_length": sequence_length}
    options |= {field.name: str(getattr(recipe, field.name)) for field in dataclasses.fields(recipe)}
    settings: Settings = {
        "settings": options,
        "files": digest_files({file.name: file for file in weights} | dict(copied)),
        "texts": {"the calibration text": digest_texts([*texts, json.dumps(sequences)])},
    }
    total = len(layers)
    with open_work(name_unfinished(target), settings, resume=resume) as work:
        reports = work.reports
        if progress is not None:
            progress(len(reports), total, None)
        if len(reports) < total:
            check_finite(contents)
            with placement.use_device(index):
                xp = np if index == check.HOST else importlib.import_module("cupy")
                for layer in quantize_layers(
                    files,
                    sequences,
                    recipe,
                    scales=has_scales,
                    tunes=is_tuned,
                    ignore=ignore,
                    finished=(_load_layer(work, report, layers[i]) for i, report in enumerate([*reports])),
                    xp=xp,
                    on_step=on_step,
                ):
                    work.save_layer(_list_tensors(layer), _describe(layer))
                    if progress is not None:
                        progress(layer.index + 1, total, reports[-1])
        on_step("write files")
        built = work.make_folder("model")
        built.mkdir()
        mode = atomic.hide_folder(built)
        model_folder.copy_files(source, built)
        checkpoint.save(built, _merge(contents, work, layers, recipe), format_name)
        atomic.remove_unfinished(built)
        seconds, memory = time.monotonic() - start, peak_memory(on_gpu=index != check.HOST)
        perplexities = {}
        if evaluate is not None:
            on_step("evaluate")
            nearest = built
            if method != "rtn":
                nearest = work.make_folder("rtn")
                quantize(
                    source,
                    nearest,
                    texts,
                    method="rtn",
                    group_size=group_size,
                    symmetric=symmetric,
                    samples=1,  # rounding to nearest needs no calibration
                    sequence_length=1,
                    ignore=ignore,
                    format_name=format_name,
                    device=device,
                )
            folders = {"16-bit": source, "rtn": nearest, "result": built}
            perplexities = {name: _perplexity(each, evaluate, index) for name, each in folders.items()}
        report = Report(method, group_size, reports, perplexities, seconds, memory)
        report.write(built)
        hugging_face.read(built)  # raises an error if the result could not be read
        for file in built.iterdir():
            if file.name not in dict(copied):
                atomic.narrow_mode(file, atomic.common_mode(weights))
        built.chmod(mode & source.stat().st_mode | stat.S_IRWXU)
        if target.exists():
            target.rmdir()
        built.rename(target)
    return report


def check_finite(contents: Contents) -> None:
    """Raise CheckpointError, which names the file and the tensor, if a float tensor has a NaN or an infinity."""
    for name in contents:
        item = contents[name]
        if isinstance(item, Tensor) and item.array.dtype in check.FLOATS and not is_finite(item.array):
            raise CheckpointError(f"{item.file}: tensor {name!r:.200}: expected finite values, got NaN or infinity")


def _perplexity(folder: Path, text: str, index: int) -> float:
    """Return the perplexity of a text for the model in a folder."""
    return load(folder, device="cpu" if index == check.HOST else index).score(text).perplexity


def check_pattern(pattern: str | None) -> None:
    """Raise ValueError unless ``pattern`` is None or a regular expression."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(f"ignore: expected a regular expression, got {pattern!r:.80}: {error}") from None


def check_group_size(decoder: Decoder, group_size: int) -> None:
    """Raise ValueError unless the group size divides the number of in features of every linear layer."""
    sizes = list(dict.fromkeys(site.linears[0].k for layer in decoder.layers for site in layer.sites))
    most = math.gcd(*sizes)
    if type(group_size) is not int or group_size < 1 or most % group_size:
        fitting = most & -most
        raise ValueError(
            f"group_size: expected a divisor of the layers' input sizes {', '.join(map(str, sizes))}, such as"
            f" {min(fitting, 128)}, got {group_size}"
        )


def cut_sequences(tokenizer: Tokenizer, texts: Sequence[str], samples: int, sequence_length: int) -> list[list[int]]:
    """Return calibration sequences: at most ``samples`` blocks of ``sequence_length`` tokens, spread over all texts.

    Raises ValueError if the texts are too short, or if the tokens of a text do not decode to the text, which indicates
    a broken tokenizer.
    """
    if samples < 1 or sequence_length < 1:
        raise ValueError(f"samples, sequence_length: expected positive integers, got {samples} and {sequence_length}")
    ids: list[int] = []
    for i, text in enumerate(texts):
        plain = tokenizer.encode(text, add_special_tokens=False)
        decoded = tokenizer.inner.decode(plain, skip_special_tokens=False)
        if _normalize(decoded) != _normalize(text):
            raise ValueError(f"tokenizer: expected the tokens of text {i} to decode to the text, got {decoded!r:.80}")
        ids += tokenizer.encode(text)
    needed = min(NEEDED_TOKENS, samples * sequence_length)
    if len(ids) < needed:
        raise ValueError(f"texts: expected at least {needed} tokens, got {len(ids)}")
    blocks = [ids[i : i + sequence_length] for i in range(0, len(ids) - sequence_length + 1, sequence_length)]
    count = min(samples, len(blocks))
    return [blocks[i * len(blocks) // count] for i in range(count)]


def _normalize(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()


def _list_tensors(layer: QuantizedLayer) -> dict[str, Any]:
    """Return the tensors of a finished layer by name, from which `_load_layer` builds the layer."""
    tensors = {f"norm/{name}": a for name, a in layer.norms.items()}
    for name, linear in layer.linears.items():
        if isinstance(linear, DenseLinear):
            parts = {"weight": linear.weight, "bias": linear.bias}
        else:
            weight = linear.weight
            parts = {"qweight": weight.qweight, "scales": weight.scales, "qzeros": weight.qzeros, "bias": linear.bias}
        tensors |= {f"{name}/{part}": a for part, a in parts.items() if a is not None}
    return tensors


def _describe(layer: QuantizedLayer) -> dict[str, Any]:
    """Return the errors of a finished layer as a JSON object, for the report and for `_load_layer`."""
    return {
        "layer": layer.index,
        "errors": dict(layer.errors),
        "output_error": layer.output_error,
        "nearest_output_error": layer.nearest_output_error,
        "few_tokens": dict(layer.few_tokens),
    }


def _load_layer(work: UnfinishedWork, report: Mapping[str, Any], layer: LayerSpec) -> QuantizedLayer:
    """Return a layer that an earlier run has finished, from its tensors in the folder of unfinished work."""
    tensors = safetensors.read(work.tensors_file(report["layer"]))
    linears: dict[str, Module | DenseLinear] = {}
    for name in (linear.name for linear in layer.linears):
        parts = _list_parts(tensors, name)
        is_dense = "weight" in parts
        linears[name] = DenseLinear(parts["weight"], parts.get("bias")) if is_dense else _module(parts, symmetric=False)
    norms = {name.removeprefix("norm/"): a for name, a in tensors.items() if name.startswith("norm/")}
    figures = (report[key] for key in ("errors", "output_error", "nearest_output_error", "few_tokens"))
    return QuantizedLayer(report["layer"], linears, norms, *figures)


def _list_parts(tensors: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the tensors of a linear layer by the last part of their names, such as "qweight"."""
    return {part.rpartition("/")[2]: a for part, a in tensors.items() if part.startswith(f"{name}/")}


def _merge(contents: Contents, work: UnfinishedWork, layers: Sequence[LayerSpec], recipe: Recipe) -> Contents:
    """Return the contents of the quantized model: the source's contents with quantized instead of dense layers."""
    entries: dict[str, Pending | Tensor] = {
        name: Tensor(contents.read(name), work.folder)  # type: ignore[arg-type]
        for name in contents
    }
    for index, layer in enumerate(layers):
        file, at = work.tensors_file(index), layer.name
        tensors = safetensors.read(file)
        for name in (linear.name for linear in layer.linears):
            parts = _list_parts(tensors, name)
            if "weight" in parts:
                entries |= {f"{at}.{name}.{part}": Tensor(a, file) for part, a in parts.items()}
                continue
            k, n = parts["qweight"].shape[0], 8 * parts["qweight"].shape[1]
            bias = parts.get("bias")
            zeros = "symmetric" if recipe.symmetric else "packed"
            bias_dtype = None if bias is None else bias.dtype
            spec = ModuleSpec(k, n, recipe.group_size, zeros, parts["scales"].dtype, bias_dtype=bias_dtype)
            entries.pop(f"{at}.{name}.weight")
            entries.pop(f"{at}.{name}.bias", None)
            entries[f"{at}.{name}"] = Pending(spec, partial(_module, parts, symmetric=recipe.symmetric))
        for name, array in tensors.items():
            if name.startswith("norm/"):
                entries[f"{at}.{name.removeprefix('norm/')}"] = Tensor(array, file)
    return Contents(entries, "Quantized by cupy_awq.", "autoawq")


def _module(parts: Mapping[str, np.ndarray[Any, Any]], *, symmetric: bool) -> Module:
    zeros = None if symmetric else parts["qzeros"]
    return Module(PackedWeight(parts["qweight"], parts["scales"], zeros), parts.get("bias"))
