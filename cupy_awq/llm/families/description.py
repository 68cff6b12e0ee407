# SPDX-License-Identifier: Apache-2.0
"""The description of a decoder: the one place that says what a layer consists of.

Readers, both back ends, the quantizer, `tune` and `bench` interpret a `Decoder`; `cupy_awq.llm.families` makes one from
the configuration of a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.llm.families.rope import Rope, is_positive

LIMITS = {"layers": 1 << 10, "heads": 1 << 10, "head_dim": 1 << 10, "hidden": 1 << 17, "intermediate": 1 << 19}
LIMITS |= {"kv_heads": 1 << 10, "vocab": 1 << 22, "context": 1 << 25, "experts": 1 << 10}
"""The largest accepted value of each size, far above that of any model: a larger value indicates a damaged file."""


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer y = x @ W + bias, W [k, n].

    Attributes:
        name: the Hugging Face name within its layer, such as "mlp.up_proj".
        k, n: the number of in features and of out features.
        bias: whether the layer has a bias; None if the files decide (GGUF).
    """

    name: str
    k: int
    n: int
    bias: bool | None = False


@dataclass(frozen=True)
class NormSpec:
    """An RMSNorm y = x / sqrt(mean(x^2) + eps) * weight.

    Attributes:
        name: the Hugging Face name within its layer, without ".weight", such as "input_layernorm".
        size: the number of elements of the weight.
        eps: the epsilon.
    """

    name: str
    size: int
    eps: float

    @property
    def weight(self) -> str:
        """The Hugging Face name of the weight within its layer, such as "input_layernorm.weight"."""
        return f"{self.name}.weight"


@dataclass(frozen=True)
class Attention:
    """Causal attention with grouped key-value heads: o(softmax(q k^T / sqrt(head_dim)) v).

    Attributes:
        heads, kv_heads: the number of query heads, and of key-value heads.
        head_dim: the width of a head, in elements.
        rope: the rotary position embedding of queries and keys, of all elements of a head or of the first ones.
        q, k, v, o: the projections to queries, keys and values, and the output projection.
        q_norm, k_norm: the RMSNorms of each head before RoPE, or None without them.

    Raises:
        ValueError: a size is out of range, or ``heads`` is not a multiple of ``kv_heads``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    q: LinearSpec
    k: LinearSpec
    v: LinearSpec
    o: LinearSpec
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None

    def __post_init__(self) -> None:
        check_sizes(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: expected a multiple of kv_heads={self.kv_heads}, got {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, got {self.head_dim}")
        if self.rope.dim % 2 or not 0 < self.rope.dim <= self.head_dim:
            raise ValueError(f"rope: expected an even number of elements up to {self.head_dim}, got {self.rope.dim}")

    @property
    def q_width(self) -> int:
        """The total width of all query heads in elements, heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """The total width of all key heads (and of all value heads) in elements, kv_heads * head_dim."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Mlp:
    """The gated MLP (SwiGLU) down(silu(gate(x)) * up(x)).

    Attributes:
        gate, up, down: the linear layers.
    """

    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec

    def __post_init__(self) -> None:
        check_sizes(intermediate=self.down.k)


@dataclass(frozen=True)
class Router:
    """The choice of a token's experts, by scores of x @ W; `cupy_awq.topk` has the formula and its options.

    Attributes:
        linear: the linear layer from x to one logit per expert; its weight is never quantized.
        top_k: the number of experts per token.
        renormalize, scoring, groups, scale: the options of `cupy_awq.topk`.
        bias: the name of the tensor [experts] that is added to the scores for the choice, or None.
    """

    linear: LinearSpec
    top_k: int
    renormalize: bool = True
    scoring: str = "softmax"
    bias: str | None = None
    groups: tuple[int, int] | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_sizes(experts=self.linear.n)
        count, kept = self.groups or (1, 1)
        if not 1 <= kept <= count or self.linear.n % count or 1 < count > self.linear.n // 2:
            expected = f"a divisor of {self.linear.n} experts with two experts a group, and at most as many to keep"
            raise ValueError(f"groups: expected {expected}, got {count!r:.80} and {kept!r:.80}")
        most = self.linear.n // count * kept
        if not 0 < self.top_k <= most:
            raise ValueError(f"top_k: expected an integer in 1..{most}, got {self.top_k!r:.80}")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: the weighted sum of the MLPs that the router chooses, plus that of a shared expert.

    Attributes:
        router: the router.
        expert: the MLP of an expert; {} in a name stands for the index of the expert.
        shared: the MLP that computes every token, or None.
        shared_gate: the linear layer hidden -> 1 whose sigmoid multiplies the result of ``shared``, or None.
    """

    router: Router
    expert: Mlp
    shared: Mlp | None = None
    shared_gate: LinearSpec | None = None

    def mlp(self, index: int) -> Mlp:
        """Return the MLP of the expert with this index, whose number replaces {} in the names of ``expert``."""
        gate, up, down = (
            replace(linear, name=linear.name.format(index))
            for linear in (self.expert.gate, self.expert.up, self.expert.down)
        )
        return Mlp(gate, up, down)

    @property
    def mlps(self) -> tuple[Mlp, ...]:
        """The MLPs of all experts, then the shared one."""
        experts = tuple(self.mlp(index) for index in range(self.router.linear.n))
        return experts if self.shared is None else (*experts, self.shared)


@dataclass(frozen=True)
class Site:
    """Linear layers that share an input x, and the operation before them, which can absorb the scales of x's channels.

    Attributes:
        name: "qkv", "o", "gate_up" or "down"; for experts, the last two with the index of the expert.
        linears: the linear layers.
        source: the RMSNorm whose output is x; or the linear layer such that column i of x is proportional to its
            column i (for the output projection, to column i of a head that several query heads share); or None for x
            that other experts and the router share.
    """

    name: str
    linears: tuple[LinearSpec, ...]
    source: NormSpec | LinearSpec | None


@dataclass(frozen=True)
class LayerSpec:
    """A decoder layer: h = h + mixer(mixer_norm(h)), then h = h + feed_forward(feed_forward_norm(h)).

    Attributes:
        name: the prefix of the Hugging Face names of its tensors, such as "model.layers.0".
        mixer: the block that mixes the tokens of a sequence.
        feed_forward: the block that computes each token by itself.
        mixer_norm, feed_forward_norm: the RMSNorm before each block.
    """

    name: str
    mixer: Attention
    feed_forward: Mlp | Experts
    mixer_norm: NormSpec
    feed_forward_norm: NormSpec

    @property
    def mlp(self) -> Mlp:
        """The feed-forward block of a layer without experts. Raises ValueError for a layer with experts."""
        if isinstance(self.feed_forward, Experts):
            raise ValueError(f"{self.name}: expected an MLP, as experts are not supported here, got experts")
        return self.feed_forward

    @property
    def sites(self) -> tuple[Site, ...]:
        """The linear layers, those with the same input together, in the order of execution."""
        attention, block = self.mixer, self.feed_forward
        mlps = {"": block} if isinstance(block, Mlp) else {f".{i}": mlp for i, mlp in enumerate(block.mlps)}
        sites = [
            Site("qkv", (attention.q, attention.k, attention.v), self.mixer_norm),
            Site("o", (attention.o,), attention.v),
        ]
        for suffix, mlp in mlps.items():
            source = None if suffix else self.feed_forward_norm
            sites.append(Site(f"gate_up{suffix}", (mlp.gate, mlp.up), source))
            sites.append(Site(f"down{suffix}", (mlp.down,), mlp.up))
        return tuple(sites)

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The linear layers in the order of execution."""
        return tuple(linear for site in self.sites for linear in site.linears)

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """The RMSNorms: those before the blocks, then those of the heads."""
        heads = (norm for norm in (self.mixer.q_norm, self.mixer.k_norm) if norm is not None)
        return (self.mixer_norm, self.feed_forward_norm, *heads)


@dataclass(frozen=True)
class Decoder:
    """A decoder: embedding table, layers, final RMSNorm and output head.

    Attributes:
        model_type: the model type of Hugging Face, such as "llama".
        vocab: the number of tokens in the vocabulary.
        hidden: the width of the residual stream, in elements.
        context: the context length for which the model is made, in tokens, including that of RoPE scaling.
        layers: the layers in the order of execution.
        norm: the RMSNorm after the last layer.
        embedding: the Hugging Face name of the embedding table [vocab, hidden], without ".weight".
        head: the output head: hidden -> vocab.
        tied: whether the output head shares its weight with the embedding table.
        extra_layers: the number of layers that the files hold after the last one, for multi-token prediction; they are
            not read.

    Raises:
        ValueError: a size is out of range.
    """

    model_type: str
    vocab: int
    hidden: int
    context: int
    layers: tuple[LayerSpec, ...] = field(repr=False)
    norm: NormSpec
    embedding: str
    head: LinearSpec
    tied: bool = False
    extra_layers: int = 0

    def __post_init__(self) -> None:
        check_sizes(layers=len(self.layers), hidden=self.hidden, vocab=self.vocab, context=self.context)
        for norm in (self.norm, *(norm for layer in self.layers for norm in layer.norms)):
            if not is_positive(norm.eps):
                raise ValueError(f"eps: expected a positive number, got {norm.eps!r:.80}")

    @property
    def options(self) -> frozenset[str]:
        """The blocks and the optional fields that the decoder uses, such as "Experts" and "Attention.q_norm".

        A field with a default is used if it has another value.
        """
        return frozenset(_list_options(self))

    def require(self, supported: frozenset[str], where: str) -> None:
        """Raise ValueError if the decoder has `options` that are not supported ``where``, such as "on a GPU"."""
        if others := self.options - supported:
            raise ValueError(f"{self.model_type}: expected no {' and no '.join(sorted(others))} {where}, got some")

    def rope_frequencies(self) -> tuple[npt.NDArray[np.float64], float]:
        """Return the RoPE frequencies of the first layer and their factor, as `Rope.frequencies` does."""
        return self.layers[0].mixer.rope.frequencies()


def _list_options(block: Any) -> Iterator[str]:
    """Yield the `Decoder.options` of a block and of the blocks in it; the parameters of a `Rope` are none."""
    if isinstance(block, tuple):
        for item in block:
            yield from _list_options(item)
    elif is_dataclass(block) and not isinstance(block, Rope):
        name = type(block).__name__
        yield name
        for part in fields(block):
            value = getattr(block, part.name)
            if part.default is not MISSING and value != part.default:
                yield f"{name}.{part.name}"
            yield from _list_options(value)


def check_sizes(**sizes: int) -> None:
    """Raise ValueError unless each size is an integer from 1 to its value in `LIMITS`."""
    for name, value in sizes.items():
        if type(value) is not int or not 0 < value <= LIMITS[name]:
            raise ValueError(f"{name}: expected an integer in 1..{LIMITS[name]}, got {value!r:.80}")
