# SPDX-License-Identifier: Apache-2.0
"""Tests of the tuning of a quantized decoder layer: its gradients against finite differences, and its effects."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_awq import llm
from cupy_awq.llm.calibrate import dense_weights, layer_quantizer, layer_tuning
from cupy_awq.llm.decoder.numpy_backend import NumpyOps
from cupy_awq.quantization import QuantizedRows, Recipe, quantize_rows
from tests import llm_models
from tests.test_llm_quantize import dense_folder


class Problem:
    """A decoder layer with random weights, inputs and the outputs for them, and its weights rounded to nearest."""

    def __init__(self, family: str, folder: Path) -> None:
        config = llm_models.FAMILIES[family]
        files = llm.read(dense_folder(folder, config, np.float32))
        (self.layer,) = files.config.layers[:1]
        self.config = dataclasses.replace(files.config, layers=(self.layer,))
        self.weights = dense_weights.read_weights(files, self.layer, np)
        self.ops = NumpyOps(self.config, expand_weights=True)
        self.pages = self.ops.make_pages(24, 24)
        rng = np.random.default_rng(0)
        self.inputs = [rng.standard_normal((1, s, files.config.hidden), np.float32) for s in (24, 17, 20)]
        self.outputs = [self.run(self.weights, h) for h in self.inputs]
        self.quantized = {name: quantize_rows(w, None, Recipe(16)) for name, (w, _) in self.weights.linears.items()}

    def run(self, weights: Any, h: np.ndarray) -> np.ndarray:
        return layer_quantizer._run(self.ops, dense_weights.build_operations(self.ops, weights, {}), h, self.pages)

    def loss(self, quantized: dict[str, QuantizedRows]) -> float:
        weights = layer_quantizer._dequantize(self.weights, quantized, np.dtype(np.float32))
        pairs = zip(self.inputs, self.outputs, strict=True)
        return float(np.mean([np.square(self.run(weights, h) - y).sum() / np.square(y).sum() for h, y in pairs]))

    def tune(self, quantized: dict[str, QuantizedRows]) -> dict[str, QuantizedRows]:
        arguments = self.weights.linears, self.weights.norms, quantized, self.inputs, self.outputs, self.pages
        return layer_tuning.tune_layer(self.layer, *arguments)


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def problem(request: pytest.FixtureRequest, tmp_path: Path) -> Problem:
    return Problem(request.param, tmp_path / "dense")


def test_gradients_equal_finite_differences(problem: Problem) -> None:
    tuned = {
        name: layer_tuning._TunedLinear(w, problem.quantized[name]) for name, (w, _) in problem.weights.linears.items()
    }
    layer = layer_tuning._Layer(problem.layer, problem.weights.linears, problem.weights.norms, tuned, problem.pages)
    h, rng = problem.inputs[0][0], np.random.default_rng(1)
    y, backward = layer.run(h)
    for name, linear in tuned.items():
        linears = {other: (each.weight, problem.weights.linears[other][1]) for other, each in tuned.items()}
        weights = dense_weights.DenseWeights(linears, problem.weights.norms, {})
        if name == "self_attn.q_proj":
            np.testing.assert_allclose(y, problem.run(weights, h[None])[0], rtol=1e-4, atol=1e-4)
        dy, direction = (rng.standard_normal(a.shape, np.float32) for a in (y, linear.weight))
        backward(dy)
        expected = np.vdot(linear.gradient, direction)
        step, ends = np.float32(2e-3) * np.abs(linear.weight).mean(), []
        for sign in (1, -1):
            linears[name] = linear.weight + sign * step * direction, linears[name][1]
            ends.append(np.vdot(problem.run(weights, h[None])[0].astype(np.float64), dy))
        found = (ends[0] - ends[1]) / (2 * step)
        size = np.linalg.norm(linear.gradient) * np.linalg.norm(direction) / direction.size**0.5
        assert abs(found - expected) < 0.02 * size, name


def test_tuning_reduces_the_loss_and_gives_the_same_bits_again(problem: Problem) -> None:
    tuned, again = problem.tune(problem.quantized), problem.tune(problem.quantized)
    assert problem.loss(tuned) < 0.9 * problem.loss(problem.quantized)
    for name, rows in tuned.items():
        before = problem.quantized[name]
        np.testing.assert_array_equal(rows.codes, again[name].codes)
        np.testing.assert_array_equal(rows.grid.scale, again[name].grid.scale)
        np.testing.assert_array_equal(rows.grid.zero, before.grid.zero)
        assert rows.grid.scale.dtype == before.grid.scale.dtype
        assert rows.codes.max() <= 15
        assert np.abs(rows.codes.astype(int) - before.codes).max() <= 1


def test_layers_that_are_not_quantized_are_not_tuned(problem: Problem) -> None:
    few = {"mlp.up_proj": problem.quantized["mlp.up_proj"]}
    tuned = problem.tune(few)
    assert list(tuned) == ["mlp.up_proj"]
    assert problem.loss(tuned) < problem.loss(few)
    assert problem.tune({}) == {}


@pytest.mark.gpu
def test_tuning_on_the_gpu_is_as_good_as_on_the_cpu(problem: Problem) -> None:
    import cupy

    def move(a: Any) -> Any:
        return None if a is None else cupy.asarray(a)

    quantized = {
        name: QuantizedRows(move(rows.codes), type(rows.grid)(*map(move, rows.grid)))
        for name, rows in problem.quantized.items()
    }
    pages = NumpyOps(problem.config, expand_weights=True, xp=cupy).make_pages(24, 24)
    linears = {name: (move(w), move(bias)) for name, (w, bias) in problem.weights.linears.items()}
    norms = {name: move(a) for name, a in problem.weights.norms.items()}
    hidden = [[move(h) for h in each] for each in (problem.inputs, problem.outputs)]
    tuned = layer_tuning.tune_layer(problem.layer, linears, norms, quantized, *hidden, pages)
    result = {
        name: QuantizedRows(rows.codes.get(), type(rows.grid)(*(a.get() for a in rows.grid)))
        for name, rows in tuned.items()
    }
    assert problem.loss(result) == pytest.approx(problem.loss(problem.tune(problem.quantized)), rel=0.05)
