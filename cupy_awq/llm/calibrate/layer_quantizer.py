# SPDX-License-Identifier: Apache-2.0
"""The quantization of a language model's decoder layers, one layer in memory at a time."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupy_awq import reference
from cupy_awq.check import Array
from cupy_awq.checkpoint import Module
from cupy_awq.llm.calibrate.dense_weights import DenseWeights, build_operations, read_weights
from cupy_awq.llm.calibrate.layer_tuning import STEPS, tune_layer
from cupy_awq.llm.decoder.block_pool import DUMMY, count_blocks
from cupy_awq.llm.decoder.forward import Operation
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.llm.decoder.states import Pages
from cupy_awq.llm.families.description import Experts, LayerSpec, NormSpec
from cupy_awq.llm.files.model_files import DenseLinear, ModelFiles
from cupy_awq.packing import namespace, to_host
from cupy_awq.quantization import (
    Moments,
    MomentSum,
    Recipe,
    folding,
    output_error,
    quantize_rows,
    search_channel_scales,
)
from cupy_awq.quantization.grid import Grid, QuantizedRows
from cupy_awq.weight import PackedWeight

CHECKED_SEQUENCES = 2
"""The number of calibration sequences on which the output error of a decoder layer is measured."""
FEW_TOKENS = 32
"""The number of calibration tokens below which the weights of an expert are rounded to nearest."""


@dataclass(frozen=True)
class QuantizedLayer:
    """A quantized decoder layer.

    Attributes:
        index: the index of the layer in the model.
        linears: the linear layers by name (`LinearSpec.name`). Layers that are not quantized are dense.
        norms: the RMSNorm weights (`NormSpec.weight`) by name, in their stored dtype, with channel scales folded in.
        errors: by name of the linear layer, two relative squared errors |x (W_q - W)|^2 / |x W|^2 on the calibration
            tokens x: that of W_q rounded to nearest, and that of W_q as quantized here.
        output_error: |f_q(h) - f(h)| / |f(h) - h| for the layer f and the quantized layer f_q, on the inputs h that the
            layer has in the original model.
        nearest_output_error: the value of ``output_error`` for rounding to nearest.
        few_tokens: the number of calibration tokens of each expert that had less than `FEW_TOKENS`, by the name of the
            expert, such as "mlp.experts.3".
    """

    index: int
    linears: Mapping[str, Module | DenseLinear]
    norms: Mapping[str, Array]
    errors: Mapping[str, tuple[float, float]]
    output_error: float
    nearest_output_error: float
    few_tokens: Mapping[str, int]


def quantize_layers(
    files: ModelFiles,
    sequences: Sequence[Sequence[int]],
    recipe: Recipe,
    *,
    scales: bool = True,
    tunes: bool = True,
    ignore: str | None = None,
    finished: Iterable[QuantizedLayer] = (),
    xp: Any = np,
    on_step: Callable[[str], None] = lambda step: None,
) -> Iterator[QuantizedLayer]:
    """Quantize the decoder layers of a model that follow those in ``finished``, and yield them in order.

    Every layer is calibrated on its inputs in the original model; scales and codes are then tuned on its inputs in the
    quantized model. The memory holds one layer in float32, the second moments of its four inputs, and the hidden
    states of all calibration tokens.

    Args:
        files: a model with dense linear layers.
        sequences: the token ids of each calibration sequence, none longer than the model's context.
        recipe: the quantization settings for every linear layer.
        scales: whether to search AWQ's channel scales and fold them into the weights.
        tunes: whether to tune scales and codes on the output of the decoder layer (`layer_tuning`), unless it has
            experts.
        ignore: a regular expression. Linear layers with a match in their name, such as "model.layers.0.mlp.up_proj",
            stay dense. None quantizes all.
        finished: the first layers if they are quantized already; they are only run, to compute the inputs of the rest.
        xp: the array module, NumPy, or CuPy to compute on its current GPU.
        on_step: a callback that is called with the name of each step of a layer before the step starts.

    Raises:
        CheckpointError: a tensor is missing or damaged.
        ValueError: a linear layer is already quantized, all sequences are empty, or activations have NaN or infinity.

    Example::

        files = cupy_awq.llm.read("SmolLM2-135M/")
        ids = files.load_tokenizer().encode(text)
        blocks = [ids[i : i + 512] for i in range(0, len(ids), 512)]
        for layer in quantize_layers(files, blocks, Recipe(group_size=64)):
            print(layer.index, layer.output_error)
    """
    if not any(map(len, sequences)):
        raise ValueError("sequences: expected at least one token, got none")
    decoder = files.config
    ops = NumpyOps(decoder, expand_weights=True, xp=xp)
    table = ops.prepare_tensor(files.read_tensor(f"{decoder.embedding}.weight", (decoder.vocab, decoder.hidden)))
    hidden = [ops.embed(table, ops.prepare_tokens(ids)[None]) for ids in sequences if len(ids)]
    tuned = hidden[:STEPS] if tunes else []  # the inputs of the next layer in the quantized model
    done = iter(finished)
    for index, layer in enumerate(decoder.layers):
        on_step("read")
        weights = read_weights(files, layer, xp)
        ops = NumpyOps(dataclasses.replace(decoder, layers=(layer,)), expand_weights=True, xp=xp)
        longest = max(h.shape[1] for h in hidden)
        pages = ops.make_pages(longest, longest)
        if (earlier := next(done, None)) is not None:
            on_step("run")
            _advance(ops, weights, hidden, pages, {})
            _advance(ops, _restore(earlier, weights.router, xp), tuned, pages, {})
            continue
        sites = _list_quantized(layer, ignore)
        try:
            result = _quantize_layer(ops, index, weights, hidden, tuned, pages, recipe, sites, on_step, scales=scales)
        except ValueError as error:  # add the layer to the message of MomentSum.add
            raise ValueError(f"{files.path}: {layer.name}: {error}") from None
        del weights  # so that the memory never holds two layers in float32
        yield result


def _quantize_layer(
    ops: NumpyOps,
    index: int,
    weights: DenseWeights,
    hidden: list[Array],
    tuned: list[Array],
    pages: Pages,
    recipe: Recipe,
    sites: Mapping[str, Sequence[str]],
    on_step: Callable[[str], None],
    *,
    scales: bool,
) -> QuantizedLayer:
    """Quantize the layer of ``ops`` and replace each sequence's hidden states by the output of the original layer.

    ``tuned`` holds hidden states in the quantized model, which are replaced by the output of the quantized layer; the
    list is empty without tuning.
    """
    (layer,) = ops.config.layers
    checked = hidden[:CHECKED_SEQUENCES]
    on_step("calibrate")
    moments, few_tokens = _calibrate(ops, weights, hidden, pages)
    folded, folded_moments, found = weights, moments, _Scales({}, {})
    if scales:
        on_step("search scales")
        folded, folded_moments, found = _fold(layer, weights, moments, recipe, sites)
    on_step("quantize")
    quantized = _quantize(folded, folded_moments, recipe, sites)
    del folded_moments  # with scales they take as much memory as `moments`, which is needed below
    dtype = weights.norms[layer.mixer_norm.weight].dtype
    if tuned:
        if not isinstance(layer.feed_forward, Experts):
            on_step("tune")
            quantized = tune_layer(layer, folded.linears, folded.norms, quantized, tuned, hidden, pages)
        _advance(ops, _dequantize(folded, quantized, dtype), tuned, pages, {})
    nearest = _quantize(weights, {}, recipe, sites)
    on_step("compare errors")
    moved = [
        _output_error(ops, _dequantize(dense, rows, dtype), checked, hidden, pages)
        for dense, rows in ((folded, quantized), (weights, nearest))
    ]
    return QuantizedLayer(
        index,
        {name: _pack(linear, quantized.get(name), dtype) for name, linear in folded.linears.items()},
        {name: to_host(a) for name, a in folded.norms.items()},
        _compare_errors(layer, weights, moments, quantized, nearest, found),
        moved[0],
        moved[1],
        few_tokens,
    )


def _advance(
    ops: NumpyOps, weights: DenseWeights, hidden: list[Array], pages: Pages, sums: Mapping[str, MomentSum]
) -> None:
    """Replace each sequence's hidden states by the layer's output; add the inputs of linear layers to ``sums``."""
    operations = build_operations(ops, weights, sums)
    for i, h in enumerate(hidden):
        hidden[i] = _run(ops, operations, h, pages)


def _calibrate(
    ops: NumpyOps, weights: DenseWeights, hidden: list[Array], pages: Pages
) -> tuple[dict[str, Moments], dict[str, int]]:
    """Replace each sequence's hidden states by the layer's output.

    Returns the moments of the inputs by name of their `Site`, without those of experts that had few tokens, and
    `QuantizedLayer.few_tokens`.
    """
    (layer,) = ops.config.layers
    sums = {site.name: MomentSum() for site in layer.sites}
    _advance(ops, weights, hidden, pages, sums)
    has_experts = isinstance(layer.feed_forward, Experts)
    few = {site: sums[site.name].tokens for site in layer.sites if has_experts and sums[site.name].tokens < FEW_TOKENS}
    moments = {site.name: sums[site.name].mean() for site in layer.sites if site not in few}
    return moments, {site.linears[0].name.rpartition(".")[0]: tokens for site, tokens in few.items()}


def _output_error(
    ops: NumpyOps, weights: DenseWeights, inputs: Sequence[Array], outputs: Sequence[Array], pages: Pages
) -> float:
    """Return |f_q(h) - y| / |y - h| of the layer f_q with these weights, for the inputs h and original outputs y."""
    operations = build_operations(ops, weights, {})
    moved = total = 0.0
    for h, y in zip(inputs, outputs, strict=False):
        moved += _sum_squares(_run(ops, operations, h, pages) - y)
        total += _sum_squares(y - h)
    return float((moved / max(total, 1e-300)) ** 0.5)


def _sum_squares(a: Array) -> float:
    """Return the sum of all squared elements of an array, added up in float64."""
    columns = np.square(a.reshape(-1, a.shape[-1])).sum(axis=0, dtype=np.float64)
    return float(to_host(columns).sum())  # CuPy takes seconds to compile a sum over all axes


def _run(ops: NumpyOps, operations: Sequence[Operation], h: Array, pages: Pages) -> Array:
    """Return the output [1, S, hidden] of a layer for the hidden states of one sequence. ``h`` is not modified."""
    tokens = h.shape[1]
    rows = pages.make_rows([(0, tokens, range(DUMMY + 1, DUMMY + 1 + count_blocks(tokens)))])
    return ops.run(operations, h.copy(), rows)[0]


class _Scales(NamedTuple):
    """The channel scales of a layer."""

    columns: Mapping[str, Array]
    """The factors of the columns of the weights [N, K] of linear layers, float32 [K], by name of `Site`."""
    rows: Mapping[str, Array]
    """The divisor of each row of the weight [N, K] of a linear layer, float32 [N], by name of the layer."""

    def unfold(self, site: str, name: str, w: Array) -> Array:
        """Return a weight [N, K] without the folded scales."""
        result: Array = w / self.columns[site] if site in self.columns else w
        return result * self.rows[name][:, None] if name in self.rows else result


def _list_quantized(layer: LayerSpec, ignore: str | None) -> dict[str, list[str]]:
    """Return the names of the linear layers to quantize, by name of `Site` (the layers with the same input)."""
    names = {
        site.name: [
            linear.name
            for linear in site.linears
            if ignore is None or not re.search(ignore, f"{layer.name}.{linear.name}")
        ]
        for site in layer.sites
    }
    return {site: found for site, found in names.items() if found}


def _fold(
    layer: LayerSpec,
    weights: DenseWeights,
    moments: Mapping[str, Moments],
    recipe: Recipe,
    sites: Mapping[str, Sequence[str]],
) -> tuple[DenseWeights, dict[str, Moments], _Scales]:
    """Search and fold AWQ's channel scales; return the new weights, the moments of the scaled inputs, the scales."""
    attention = layer.mixer
    scaled = [site for site in layer.sites if site.name in sites and site.name in moments and site.source is not None]
    tied = attention.kv_heads, attention.heads // attention.kv_heads, attention.head_dim
    columns = {
        site.name: search_channel_scales(
            [weights.linears[name][0] for name in sites[site.name]],
            moments[site.name].regularize(recipe.shrinkage, recipe.damping),
            group_size=recipe.group_size,
            scale_dtype=recipe.scale_dtype,
            symmetric=recipe.symmetric,
            tied=tied if site.source == attention.v else None,
        ).t
        for site in scaled
    }
    norms, linears, rows = dict(weights.norms), dict(weights.linears), {}
    for site in scaled:
        source, t = site.source, columns[site.name]
        if isinstance(source, NormSpec):
            norm = norms[source.weight]
            norms[source.weight], columns[site.name] = folding.divide_norm(norm, t, norm.dtype)
        elif source is not None:
            rows[source.name] = folding.value_scales(t, tied) if source == attention.v else t
        for name in (linear.name for linear in site.linears):
            linears[name] = folding.scale_columns(linears[name][0], columns[site.name]), linears[name][1]
    for name, t in rows.items():
        linears[name] = folding.divide_rows(*linears[name], t)
    folded = {**moments, **{site: moments[site].rescale(t) for site, t in columns.items()}}
    return DenseWeights(linears, norms, weights.router), folded, _Scales(columns, rows)


def _quantize(
    weights: DenseWeights, moments: Mapping[str, Moments], recipe: Recipe, sites: Mapping[str, Sequence[str]]
) -> dict[str, QuantizedRows]:
    """Return the quantized weights of a decoder layer by name; a `Site` without moments is rounded to nearest."""
    result = {}
    for site, names in sites.items():
        parts = [weights.linears[name][0] for name in names]
        stacked = namespace(parts[0]).concatenate(parts)  # layers that share an input are quantized together
        quantized = quantize_rows(stacked, moments.get(site), recipe)
        start = 0
        for name, part in zip(names, parts, strict=True):
            rows = slice(start, start := start + len(part))
            result[name] = QuantizedRows(quantized.codes[rows], Grid(*(a[rows] for a in quantized.grid)))
    return result


def _dequantize(weights: DenseWeights, quantized: Mapping[str, QuantizedRows], dtype: Any) -> DenseWeights:
    """Return the weights with which the written model computes: dequantized, or rounded to ``dtype`` if dense."""
    linears = {}
    for name, (w, bias) in weights.linears.items():
        values = quantized[name].dequantize() if name in quantized else w.astype(dtype).astype(np.float32)
        linears[name] = values, None if bias is None else bias.astype(dtype)
    return DenseWeights(linears, weights.norms, weights.router)


def _restore(layer: QuantizedLayer, router: Mapping[str, Array], xp: Any) -> DenseWeights:
    """Return the dequantized weights of a finished layer."""
    linears = {}
    for name, part in layer.linears.items():
        if isinstance(part, Module):
            packed = part.weight
            w = reference.dequantize(packed.qweight, packed.scales, packed.qzeros, dtype=np.float32).T
        else:
            w = part.weight.astype(np.float32)
        linears[name] = xp.asarray(w), None if part.bias is None else xp.asarray(part.bias)
    return DenseWeights(linears, {name: xp.asarray(a) for name, a in layer.norms.items()}, router)


def _compare_errors(
    layer: LayerSpec,
    original: DenseWeights,
    moments: Mapping[str, Moments],
    quantized: Mapping[str, QuantizedRows],
    nearest: Mapping[str, QuantizedRows],
    scales: _Scales,
) -> dict[str, tuple[float, float]]:
    """Return `QuantizedLayer.errors`, computed from the weights and inputs of the original model."""
    errors = {}
    for site in (site for site in layer.sites if site.name in moments):
        second = moments[site.name].second
        for name in (linear.name for linear in site.linears if linear.name in quantized):
            w = original.linears[name][0]
            candidates = nearest[name].dequantize(), scales.unfold(site.name, name, quantized[name].dequantize())
            energy = max(output_error(w, second), 1e-300)
            nearest_error, error = (output_error(candidate - w, second) / energy for candidate in candidates)
            errors[name] = nearest_error, error
    return errors


def _pack(linear: tuple[Array, Array | None], rows: QuantizedRows | None, dtype: Any) -> Module | DenseLinear:
    """Return a linear layer on the host: quantized, or dense if ``rows`` is None."""
    w, bias = linear
    bias = None if bias is None else to_host(bias.astype(dtype))
    if rows is None:
        return DenseLinear(to_host(w.astype(dtype)), bias)
    packed = rows.pack()
    arrays = (to_host(a) for a in (packed.qweight, packed.scales, packed.qzeros))
    return Module(PackedWeight(*arrays), bias)
