# SPDX-License-Identifier: Apache-2.0
"""The small kernels around the grouped products.

They are ``choose_experts``, ``route_tokens``, ``sort_tokens`` and ``sum_experts``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES
from cupy_awq.kernels.experts.problem import count_blocks
from cupy_awq.kernels.family import MemoryBoundProblem, SoleConfig, SoleConfigFamily
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import Argument, Dim3, Kernel, LaunchPlan

MAX_EXPERTS = 2048
"""The largest number of experts, whose counts shared memory holds."""
MAX_ROUTER_EXPERTS = 1024
"""The largest number of experts of `ExpertChoice`, whose scores of four tokens shared memory holds."""
MAX_ROUTED_WIDTH = 16384
"""The largest number of columns of `TokenRouting`, of which shared memory holds a token."""
CLUSTER_CTAS = 8
"""The number of CTAs of the clusters that sort and route."""
MAX_CLUSTER_ROUTER_BYTES = 2 << 20
"""The largest size in bytes of the weight of a router that a cluster reads for a token."""
SHARED_PAIRS = 2048
"""The smallest number of pairs that the CTAs of a cluster sort together."""


@dataclass(frozen=True)
class ExpertChoice(MemoryBoundProblem):
    """A router: the top_k experts of each of ``m`` tokens, and their weights.

    Attributes:
        m: number of tokens.
        experts: number of experts.
        top_k: number of experts per token.
        dtype: dtype of the logits.
        is_sigmoid: whether scores are sigmoids of the logits, not their softmax.
        has_bias: whether a bias is added to the scores for the choice.
        renormalize: whether the weights of a token are divided by their sum.
        groups: number of groups of experts.
        kept: number of groups among which experts are chosen.
        scale: factor of the weights.
        ld: row stride of the logits in elements.
    """

    m: int
    experts: int
    top_k: int
    dtype: str
    is_sigmoid: bool
    has_bias: bool
    renormalize: bool
    groups: int
    kept: int
    scale: float
    ld: int

    def __str__(self) -> str:
        return f"router of {self.m} tokens: {self.top_k} of {self.experts} experts"

    @property
    def nbytes(self) -> int:
        """The size of logits, ids and weights in bytes."""
        return self.m * (self.experts * ITEMSIZE[self.dtype] + 8 * self.top_k)

    def defines(self) -> dict[str, int | str]:
        """Return the compile-time constants (name, value) of the choice."""
        return {
            "EXPERTS": self.experts,
            "GROUPS": self.groups,
            "SIGMOID": int(self.is_sigmoid),
            "HAS_BIAS": int(self.has_bias),
            "RENORMALIZE": int(self.renormalize),
        }

    @classmethod
    def common_problems(cls) -> Iterator[ExpertChoice]:
        """Yield routers of common models, which the compile command compiles in advance."""
        for experts, top_k, is_sigmoid in ((128, 8, False), (8, 2, False), (128, 8, True)):
            yield cls(1, experts, top_k, "float32", is_sigmoid, is_sigmoid, True, 1, 1, 1.0, experts)


class ChooseExperts(SoleConfigFamily[ExpertChoice]):
    """The kernel family ``choose_experts``, the router, with one warp per token."""

    NAME = "choose_experts"

    def refusal(self, problem: ExpertChoice, device: Device) -> str | None:
        if problem.experts > MAX_ROUTER_EXPERTS:
            return f"needs at most {MAX_ROUTER_EXPERTS} experts, not {problem.experts}"
        return None

    def plan(self, config: SoleConfig, problem: ExpertChoice, device: Device) -> LaunchPlan:
        """Return the launch plan; the buffers are logits, bias, ids and weights."""
        threads = 128
        sizes = int32s(problem.m, problem.top_k, problem.kept, problem.ld)
        arguments = ("logits", "bias", "ids", "weights", *sizes, np.float32(problem.scale))
        defines = problem.defines() | {"X": TYPES[problem.dtype]}
        return _plan(device, self.NAME, defines, (ceil_div(problem.m, threads // 32), 1, 1), threads, arguments)


@dataclass(frozen=True)
class TokenRouting(MemoryBoundProblem):
    """The RMSNorm of a few tokens, their router, and the choice of their experts.

    Attributes:
        choice: the choice, from logits that are float32.
        width: number of columns of the residual stream.
        dtype: dtype of x, of the router's weight and of delta.
        eps: epsilon of the RMSNorm.
        delta: whether delta [m, width] is added to the residual stream first.
    """

    choice: ExpertChoice
    width: int
    dtype: str
    eps: float
    delta: bool

    def __str__(self) -> str:
        return f"RMSNorm and {self.choice}"

    @property
    def nbytes(self) -> int:
        """The size in bytes of the residual stream and x, and of the router's weight, which each token reads."""
        itemsize = ITEMSIZE[self.dtype]
        stream = self.width * (4 + itemsize + (4 + itemsize if self.delta else 0))
        return self.choice.m * (stream + self.choice.experts * self.width * itemsize) + self.choice.nbytes

    @classmethod
    def common_problems(cls) -> Iterator[TokenRouting]:
        """Yield routers of common models, which the compile command compiles in advance."""
        for choice, width in zip(ExpertChoice.common_problems(), (2048, 4096, 4096), strict=True):
            yield cls(choice, width, "float16", 1e-6, True)


class RouteTokens(SoleConfigFamily[TokenRouting]):
    """The kernel family ``route_tokens``, with a warp per token and expert."""

    NAME = "route_tokens"

    def refusal(self, problem: TokenRouting, device: Device) -> str | None:
        if problem.width > MAX_ROUTED_WIDTH:
            return f"needs at most {MAX_ROUTED_WIDTH} columns, not {problem.width}"
        return CHOOSE_EXPERTS.refusal(problem.choice, device)

    def plan(self, config: SoleConfig, problem: TokenRouting, device: Device) -> LaunchPlan:
        """Return the launch plan; the buffers are named as in ``route_tokens.cu``."""
        choice, router_bytes = problem.choice, problem.choice.experts * problem.width * ITEMSIZE[problem.dtype]
        is_cluster = device.has(Capability.CLUSTERS) and router_bytes <= MAX_CLUSTER_ROUTER_BYTES
        threads = 512 if is_cluster else 256
        ctas = CLUSTER_CTAS if is_cluster else ceil_div(choice.experts, threads // 32)
        defines = choice.defines() | {
            "X": TYPES[problem.dtype],
            "WIDTH": problem.width,
            "HAS_DELTA": int(problem.delta),
            "CTAS": ctas,
            "IS_CLUSTER": int(is_cluster),
        }
        buffers = (
            "h",
            "delta",
            "norm_weight",
            "router",
            "bias",
            "x",
            "logits",
            "counters",
            "ids",
            "weights",
        )
        floats = np.float32(choice.scale), np.float32(problem.eps)
        arguments = (*buffers, *int32s(choice.top_k, choice.kept), *floats)
        plan = _plan(device, self.NAME, defines, (ctas, choice.m, 1), threads, arguments)
        return replace(plan, cluster=(ctas if is_cluster else 1, 1, 1))


@dataclass(frozen=True)
class TokenSort(MemoryBoundProblem):
    """A sort of rows by expert, in blocks that hold rows of one expert.

    Attributes:
        pairs: number of rows.
        experts: number of experts.
        block: number of rows per block.
        from_offsets: whether the rows of each expert are given by offsets, not by an id per row.
    """

    pairs: int
    experts: int
    block: int
    from_offsets: bool = False

    def __str__(self) -> str:
        return f"sort of {self.pairs} rows by {self.experts} experts in blocks of {self.block}"

    @property
    def blocks(self) -> int:
        """The largest number of blocks that any routing can give."""
        return count_blocks(self.pairs, self.experts, self.block)

    @property
    def nbytes(self) -> int:
        """The size of the ids and of the sorted rows in bytes."""
        return 4 * (2 * self.pairs + self.blocks * (self.block + 1))

    @classmethod
    def common_problems(cls) -> Iterator[TokenSort]:
        """Yield sorts of common models, which the compile command compiles in advance."""
        for experts in (8, 64, 128, 256):
            yield cls(1024, experts, 16)


class SortTokens(SoleConfigFamily[TokenSort]):
    """The kernel family ``sort_tokens``, which has a single cluster."""

    NAME = "sort_tokens"

    def refusal(self, problem: TokenSort, device: Device) -> str | None:
        return None if problem.experts <= MAX_EXPERTS else f"needs at most {MAX_EXPERTS} experts, not {problem.experts}"

    def plan(self, config: SoleConfig, problem: TokenSort, device: Device) -> LaunchPlan:
        """Return the launch plan; the buffers are ids, sorted_pairs, experts and sorted_count."""
        shares = problem.pairs >= SHARED_PAIRS and device.has(Capability.CLUSTERS) and not problem.from_offsets
        cluster = CLUSTER_CTAS if shares else 1
        # A warp has counts of its own; the shared memory of a CTA is that of 12,288 counts.
        warps = min(16 if problem.pairs <= 2048 * cluster else 32, (12000 // problem.experts) - 4)
        threads = 32 << (warps.bit_length() - 1)
        defines: dict[str, int | str] = {"EXPERTS": problem.experts, "FROM_OFFSETS": int(problem.from_offsets)}
        defines["CLUSTER"] = cluster
        sizes = int32s(problem.pairs, problem.block, problem.blocks * problem.block)
        arguments = ("ids", "sorted_pairs", "experts", "sorted_count", *sizes)
        plan = _plan(device, self.NAME, defines, (cluster, 1, 1), threads, arguments)
        return replace(plan, cluster=(cluster, 1, 1))


@dataclass(frozen=True)
class ExpertSum(MemoryBoundProblem):
    """A sum over the experts of each token.

    Attributes:
        m: number of tokens.
        n: number of columns.
        top_k: number of experts per token.
        experts: number of experts.
        dtype: dtype of the results.
        has_shared: whether the result of a shared expert is added.
        aligned: whether rows of y and of the shared result start at multiples of the size of eight values.
        ld_shared, ldy: row strides in elements.
    """

    m: int
    n: int
    top_k: int
    experts: int
    dtype: str
    has_shared: bool
    aligned: bool
    ld_shared: int
    ldy: int

    def __str__(self) -> str:
        return f"sum of {self.top_k} experts, y[{self.m}, {self.n}] {self.dtype}"

    @property
    def nbytes(self) -> int:
        """The size of the summands, the shared expert's result and y in bytes."""
        return self.m * self.n * (self.top_k + 1 + self.has_shared) * ITEMSIZE[self.dtype]

    @classmethod
    def common_problems(cls) -> Iterator[ExpertSum]:
        """Yield sums of common models, which the compile command compiles in advance."""
        for dtype, has_shared in itertools.product(("float16", "bfloat16"), (False, True)):
            yield cls(16, 2048, 8, 128, dtype, has_shared, True, 2048, 2048)


class SumExperts(SoleConfigFamily[ExpertSum]):
    """The kernel family ``sum_experts``, which sums the results of a token's experts."""

    NAME = "sum_experts"

    def plan(self, config: SoleConfig, problem: ExpertSum, device: Device) -> LaunchPlan:
        """Return the launch plan; the buffers are pairs, ids, shared and y."""
        threads = 64
        defines: dict[str, int | str] = {
            "X": TYPES[problem.dtype],
            "HAS_SHARED": int(problem.has_shared),
            "ALIGNED": int(problem.aligned),
        }
        sizes = int32s(problem.n, problem.top_k, problem.experts, problem.ld_shared, problem.ldy)
        grid = ceil_div(problem.n, 8 * threads) * problem.m, 1, 1
        return _plan(device, self.NAME, defines, grid, threads, ("pairs", "ids", "shared", "y", *sizes))


def int32s(*values: int) -> tuple[Argument, ...]:
    """Return kernel arguments of type int32 with these values."""
    return tuple(map(np.int32, values))


def _plan(
    device: Device, name: str, defines: dict[str, int | str], grid: Dim3, threads: int, arguments: tuple[Argument, ...]
) -> LaunchPlan:
    dependent = device.has(Capability.DEPENDENT_LAUNCH)
    constants = (*defines.items(), ("DEPENDENT", int(dependent)), ("THREADS", threads))
    kernel = Kernel(f"experts/{name}.cu", name, constants, device.target)
    return LaunchPlan(kernel, grid, (threads, 1, 1), arguments, dependent=dependent)


CHOOSE_EXPERTS, ROUTE_TOKENS, SORT_TOKENS, SUM_EXPERTS = ChooseExperts(), RouteTokens(), SortTokens(), SumExperts()
