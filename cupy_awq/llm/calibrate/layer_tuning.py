# SPDX-License-Identifier: Apache-2.0
"""Gradient descent on the scales and codes of a quantized decoder layer, which reduces the error of its output.

The searches of `cupy_awq.quantization` treat each linear layer separately. Here, the errors of all linear layers of a
decoder layer, and of all layers before it, compensate each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cupy_awq.check import Array
from cupy_awq.llm.decoder.numpy_backend import rotate
from cupy_awq.llm.decoder.states import Pages
from cupy_awq.llm.families.description import Attention, LayerSpec, LinearSpec, Mlp, NormSpec
from cupy_awq.llm.families.rope import Rope
from cupy_awq.packing import namespace
from cupy_awq.quantization.grid import LIMITS, QuantizedRows, make_grid

STEPS = 28
"""The number of steps of gradient descent. Each step takes one sequence; sequences are repeated if there are fewer."""
SCALE_RATE, CODE_RATE = 3e-3, 0.01
"""The learning rates of the first step: relative to a scale, and in units of a code. They decrease linearly to 0."""
MARGIN = 0.45
"""The largest initial distance between a code and its value before rounding."""
DECAYS = 0.9, 0.95
"""Adam's decay rates of the means of gradients and of squared gradients."""
EPSILON = 1e-18
"""The number that Adam adds to denominators: negligible, but not 0 where the squares of all gradients underflow."""

Backward = Callable[[Array], Array]
"""A function that returns the gradient of an operation's input, given the gradient of its output."""


def tune_layer(
    spec: LayerSpec,
    linears: Mapping[str, tuple[Array, Array | None]],
    norms: Mapping[str, Array],
    quantized: Mapping[str, QuantizedRows],
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    pages: Pages,
) -> dict[str, QuantizedRows]:
    """Tune the scales and codes of a decoder layer by Adam and return its quantized weights.

    The loss is the mean of |f_q(h) - y|^2 / |y|^2 over the tokens of a sequence, for the outputs y of the original
    layer. The value of a code before rounding gets the gradient of the code (straight-through estimator).

    Args:
        spec: the description of the layer.
        linears: (weight float32 [N, K], bias [N] or None) of all linear layers, by name.
        norms: the RMSNorm weights, by name.
        quantized: the quantized weights that replace those of ``linears``, by name; they are not modified.
        inputs: the inputs h of the quantized layer f_q for each sequence, float32 [1, S, hidden].
        outputs: the outputs y of the original layer, float32 [1, S, hidden].
        pages: pages with the rotations of at least S positions.
    """
    if not quantized:
        return {}
    xp = namespace(inputs[0])
    tuned = {name: _TunedLinear(linears[name][0], rows) for name, rows in quantized.items()}
    layer = _Layer(spec, linears, norms, tuned, pages)
    for step in range(STEPS):
        h, y = inputs[step % len(inputs)][0], outputs[step % len(inputs)][0]
        difference, backward = layer.run(h)
        difference -= y
        difference /= len(h) * xp.maximum(xp.square(y).sum(axis=-1, keepdims=True), np.float32(1e-30))
        backward(difference)
        for linear in tuned.values():
            linear.descend(step)
    return {name: linear.result() for name, linear in tuned.items()}


class _Adam:
    """Adam's running means of the gradient of an array and of the square of this gradient."""

    def __init__(self, like: Array) -> None:
        xp = namespace(like)
        self._mean, self._square = xp.zeros_like(like), xp.zeros_like(like)

    def normalize(self, gradient: Array, step: int) -> Array:
        """Add a gradient and return the mean gradient divided by its root mean square; ``step`` counts from 0."""
        mean, square = self._mean, self._square
        mean += np.float32(1 - DECAYS[0]) * (gradient - mean)
        square += np.float32(1 - DECAYS[1]) * (gradient * gradient - square)
        corrections = [np.float32(1 - decay ** (step + 1)) for decay in DECAYS]
        size = np.sqrt(square / corrections[1])
        size += np.float32(EPSILON)
        result: Array = mean / (size * corrections[0])
        return result


class _TunedLinear:
    """The weight of a linear layer during tuning.

    Args:
        w: the weight before quantization, float32 [N, K].
        rows: the quantized weight.
    """

    def __init__(self, w: Array, rows: QuantizedRows) -> None:
        xp = namespace(w)
        self._grid, self._steps = rows.grid, rows.grid.expand(-1, np.float32)
        codes = rows.codes.reshape(*rows.grid.scale.shape, -1).astype(np.float32)
        # The codes before rounding, [N, K/G, G], which the next lines keep within `MARGIN` of the present codes.
        self._codes = w.reshape(codes.shape) / self._steps.scale
        self._codes += self._steps.zero - codes
        xp.clip(self._codes, -MARGIN, MARGIN, out=self._codes)
        self._codes += codes
        self._factor = xp.ones_like(self._steps.scale)
        self._code_adam, self._factor_adam = _Adam(self._codes), _Adam(self._factor)
        self.gradient: Array = xp.zeros_like(w)
        """The gradient of the loss with respect to ``weight``, [N, K], set by the backward pass."""
        self._shape = w.shape
        self.weight = self._dequantize()
        """The dequantized weight, float32 [N, K]."""

    def descend(self, step: int) -> None:
        """Change scales and codes by one step against the gradient."""
        gradient = self.gradient.reshape(self._codes.shape)
        remaining = 1 - step / STEPS
        slope = (gradient * self.weight.reshape(gradient.shape)).sum(axis=-1, keepdims=True) / self._factor
        self._factor -= np.float32(SCALE_RATE * remaining) * self._factor_adam.normalize(slope, step)
        # The gradient of a code is that of its weight times the scale, a factor that Adam's normalization cancels.
        self._codes -= np.float32(CODE_RATE * remaining) * self._code_adam.normalize(gradient, step)
        self.weight = self._dequantize()

    def result(self) -> QuantizedRows:
        """Return the quantized weight. A scale that would leave the range of its dtype keeps its original value."""
        old = self._grid.scale
        smallest, largest = LIMITS[old.dtype]
        original = old.astype(np.float32)
        scale = original * self._factor[:, :, 0]
        is_valid = (scale >= smallest) & (scale * 15 <= largest)
        scale = namespace(old).where(is_valid, scale, original).astype(old.dtype)
        return QuantizedRows(self._round().astype(np.uint8).reshape(self._shape), make_grid(scale, self._grid.zero))

    def _round(self) -> Array:
        xp = namespace(self._codes)
        return xp.clip(xp.rint(self._codes), self._steps.bottom, self._steps.top)

    def _dequantize(self) -> Array:
        weight = self._round()
        weight -= self._steps.zero
        weight *= self._steps.scale * self._factor
        return weight.reshape(self._shape)


class _Layer:
    """A decoder layer with a backward pass.

    Each method runs an operation on the tokens of one sequence and returns the output and the backward function.

    Args:
        spec: the description of the layer.
        linears: (weight float32 [N, K], bias [N] or None) of all linear layers, by name.
        norms: the RMSNorm weights, by name.
        tuned: the weights that replace those of ``linears``, by name; the backward pass sets their gradients.
        pages: pages, for their rotations.
    """

    def __init__(
        self,
        spec: LayerSpec,
        linears: Mapping[str, tuple[Array, Array | None]],
        norms: Mapping[str, Array],
        tuned: Mapping[str, _TunedLinear],
        pages: Pages,
    ) -> None:
        self._spec, self._linears, self._norms, self._tuned, self._pages = spec, linears, norms, tuned, pages

    def run(self, h: Array) -> tuple[Array, Backward]:
        """Run the layer on the hidden states h [S, hidden].

        The backward function returns the gradient of the normalized h, since the gradient of h is not needed.
        """
        normed, _ = self._rms_norm(self._spec.mixer_norm, h)
        mixed, mixer_back = self._attention(self._spec.mixer, normed)
        h = h + mixed
        normed, norm_back = self._rms_norm(self._spec.feed_forward_norm, h)
        y, feed_forward_back = self._mlp(self._spec.mlp, normed)

        def backward(dy: Array) -> Array:
            return mixer_back(dy + norm_back(feed_forward_back(dy)))

        return h + y, backward

    def _mlp(self, spec: Mlp, x: Array) -> tuple[Array, Backward]:
        gate, gate_back = self._linear(spec.gate, x)
        up, up_back = self._linear(spec.up, x)
        with np.errstate(over="ignore"):  # if exp(-gate) overflows to inf, the result is 0, the correct limit
            sigmoid = np.float32(1) / (np.float32(1) + np.exp(-gate))
        silu = gate * sigmoid
        y, down_back = self._linear(spec.down, silu * up)

        def backward(dy: Array) -> Array:
            d = down_back(dy)
            slope = sigmoid * (np.float32(1) + gate - silu)  # the derivative of silu
            return gate_back(d * up * slope) + up_back(d * silu)

        return y, backward

    def _attention(self, spec: Attention, x: Array) -> tuple[Array, Backward]:
        """Run the attention with its projections on x [S, hidden]."""
        s = len(x)
        heads, backs = [], []
        for linear, norm, rope in (
            (spec.q, spec.q_norm, spec.rope),
            (spec.k, spec.k_norm, spec.rope),
            (spec.v, None, None),
        ):
            flat, back = self._linear(linear, x)
            heads.append(_split(flat, spec.head_dim))
            steps = [back]
            if norm is not None:
                heads[-1], back = self._rms_norm(norm, heads[-1])
                steps.append(back)
            if rope is not None:
                heads[-1], back = self._rotate(rope, heads[-1])
                steps.append(back)
            backs.append(steps)
        mixed, mix_back = _attend(*heads)
        y, out_back = self._linear(spec.o, mixed.swapaxes(0, 1).reshape(s, -1))

        def backward(dy: Array) -> Array:
            total = 0
            gradients = mix_back(_split(out_back(dy), spec.head_dim))
            for d, (project_back, *head_backs) in zip(gradients, backs, strict=True):
                for back in reversed(head_backs):
                    d = back(d)
                total = total + project_back(d.swapaxes(0, 1).reshape(s, -1))
            return total

        return y, backward

    def _linear(self, spec: LinearSpec, x: Array) -> tuple[Array, Backward]:
        (w, bias), tuned = self._linears[spec.name], self._tuned.get(spec.name)
        if tuned is not None:
            w = tuned.weight
        y = x @ w.T
        if bias is not None:
            y += bias.astype(np.float32)

        def backward(dy: Array) -> Array:
            if tuned is not None:
                tuned.gradient = dy.T @ x
            result: Array = dy @ w
            return result

        return y, backward

    def _rms_norm(self, spec: NormSpec, x: Array) -> tuple[Array, Backward]:
        weight = self._norms[spec.weight].astype(np.float32)
        scale = np.float32(1) / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(spec.eps))
        normed = x * scale

        def backward(dy: Array) -> Array:
            d = dy * weight
            result: Array = scale * (d - normed * (d * normed).mean(axis=-1, keepdims=True))
            return result

        return normed * weight, backward

    def _rotate(self, rope: Rope, x: Array) -> tuple[Array, Backward]:
        cos, sin = (table[: x.shape[1]] for table in self._pages.rotations[rope])
        return rotate(x, cos, sin), lambda dy: rotate(dy, cos, -sin)


def _split(x: Array, head_dim: int) -> Array:
    """Return x [S, heads * head_dim] as [heads, S, head_dim]."""
    result: Array = x.reshape(len(x), -1, head_dim).swapaxes(0, 1)
    return result


def _attend(q: Array, k: Array, v: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """Return the causal attention [heads, S, head_dim] and its backward function, which returns (dq, dk, dv).

    ``q`` is [heads, S, head_dim], and ``k`` and ``v`` are [kv_heads, S, head_dim].
    """
    xp = namespace(q)
    kv_heads, s, head_dim = k.shape
    root = np.float32(head_dim**-0.5)
    grouped = q.reshape(kv_heads, -1, head_dim)  # a separate axis for the query heads that share a key head
    p = grouped @ k.swapaxes(1, 2)
    p *= root
    p.reshape(-1, s, s)[:, xp.arange(s) > xp.arange(s)[:, None]] = -np.inf
    p -= p.max(axis=-1, keepdims=True)
    xp.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    y = p @ v

    def backward(dy: Array) -> tuple[Array, Array, Array]:
        dy = dy.reshape(y.shape)
        d = dy @ v.swapaxes(1, 2)
        d -= (dy * y).sum(axis=-1, keepdims=True)
        d *= p
        d *= root
        return (d @ k).reshape(q.shape), d.swapaxes(1, 2) @ grouped, p.swapaxes(1, 2) @ dy

    return y.reshape(q.shape), backward
