# SPDX-License-Identifier: Apache-2.0
"""`MoeLayer`: the experts of a layer, validated once, and plans of its launches."""

from __future__ import annotations

from typing import Any

from cupy_awq import check, check_scalar
from cupy_awq.check import HOST, Array
from cupy_awq.ops.experts import bind_steps, contiguous, moe, plan_moe, readable, validate_layer, validate_moe
from cupy_awq.ops.packed_experts import PackedExperts
from cupy_awq.runtime import arrays, device, placement
from cupy_awq.runtime import workspace as workspaces


class MoeLayer:
    """The experts of a layer: ``layer(x, topk_ids, topk_weights)`` is `moe` with their weights.

    Args:
        gate_up, down: the weights, as for `moe`.
        activation, batch_invariant: as for `moe`.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value, or the weights do not fit each other.

    >>> import numpy as np
    >>> gate_up = PackedExperts(np.zeros((4, 64, 4), np.int32), np.full((4, 1, 32), 0.125, np.float16), None)
    >>> down = PackedExperts(np.full((4, 16, 8), -1, np.int32), np.full((4, 1, 64), 0.125, np.float16), None)
    >>> layer = MoeLayer(gate_up, down)
    >>> x, ids, weights = np.full((1, 64), -0.0625, np.float16), np.array([[1]], np.int32), np.ones((1, 1), np.float32)
    >>> step = layer.plan(x, ids, weights)
    >>> step()[0, :2], bool((step() == layer(x, ids, weights)).all())
    (array([220., 220.], dtype=float16), True)
    """

    __slots__ = ("activation", "batch_invariant", "down", "gate_up")

    def __init__(
        self,
        gate_up: PackedExperts,
        down: PackedExperts,
        /,
        *,
        activation: str = "swiglu",
        batch_invariant: bool = False,
    ) -> None:
        validate_layer(gate_up, down, activation)
        self.batch_invariant = check_scalar.validate_flag(batch_invariant, "batch_invariant")
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def __call__(
        self,
        x: Array,
        topk_ids: Array,
        topk_weights: Array,
        /,
        *,
        shared: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        """Return `moe` of the arguments, which raises its errors."""
        options: dict[str, Any] = {"activation": self.activation, "batch_invariant": self.batch_invariant}
        return moe(x, topk_ids, topk_weights, self.gate_up, self.down, shared=shared, out=out, **options)

    def plan(
        self,
        x: Array,
        topk_ids: Array,
        topk_weights: Array,
        /,
        *,
        shared: Array | None = None,
        out: Array | None = None,
    ) -> MoePlan:
        """Return a `MoePlan` for these arrays. The arguments and errors are those of `moe`."""
        return MoePlan(self, x, topk_ids, topk_weights, shared, out)


class MoePlan:
    """The launches of a `MoeLayer` for fixed arrays with any contents: ``plan()`` fills ``out`` and returns it.

    On a GPU, a call launches two or three kernels for few tokens and four for many, on the current stream, without
    validation, allocation or synchronization, so calls can be captured in a CUDA graph; create the plan before the
    capture. The plan keeps the arrays alive. It owns the memory between its launches, so calls on several streams must
    run in order.

    Attributes:
        out: the array that each call fills.
        kernels: the names of the kernels in the order of their launches; () on the CPU and for M = 0.

    Raises:
        TypeError, ValueError: those of `moe`; or kernels cannot read or write an array where it is: rows must start at
            multiples of 16 bytes, and the routing and ``out`` must be contiguous.
        MemoryError: the memory of the GPU is exhausted.
    """

    __slots__ = ("_arguments", "_launches", "_layer", "_memory", "kernels", "out")

    def __init__(
        self, layer: MoeLayer, x: Array, topk_ids: Array, topk_weights: Array, shared: Array | None, out: Array | None
    ) -> None:
        x, topk_ids, topk_weights, shared, out = arrays.views(
            x=x, topk_ids=topk_ids, topk_weights=topk_weights, shared=shared, out=out
        )
        weights = layer.gate_up, layer.down
        form, shape = validate_moe(x, topk_ids, topk_weights, *weights, layer.activation, shared, out)
        index = layer.gate_up.spec.weight.device
        self._layer, self._arguments = layer, (x, topk_ids, topk_weights, shared)
        self._launches: list[tuple[Any, tuple[int, ...]]] = []
        self.kernels: tuple[str, ...] = ()
        self._memory: Array | None = None
        with placement.use_device(index):
            self.out = arrays.empty(shape, x.dtype, index) if out is None else out
            if index != HOST and len(x):
                read = {"x": readable, "shared": readable, "out": contiguous}
                operands = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights, "shared": shared}
                for name, a in {**operands, "out": self.out}.items():
                    if a is not None and read.get(name, contiguous)(a) is not a:
                        raise ValueError(f"{name}: expected aligned, contiguous rows, got {check.describe(a)}")
                parts = x, topk_ids, topk_weights, *weights, form, shared, self.out, layer.batch_invariant
                self._prepare(plan_moe(*parts), index)

    def _prepare(self, planned: tuple[Any, dict[str, Array | None]], index: int) -> None:
        """Load the kernels and compute the arguments of their launches."""
        steps, buffers = planned
        workspace, scratch_bytes = steps.workspace(device.of(index)), steps.offsets[""]
        workspace_bytes = workspaces.COUNTER_BYTES + workspace.partial_bytes if workspace.counters else 0
        self._memory = workspaces.allocate_zeros(max(scratch_bytes + workspace_bytes, 1), on_current_stream=True)
        begin = arrays.address(self._memory)
        self._launches += bind_steps(steps, buffers, begin, begin + scratch_bytes, index)
        self.kernels = tuple(plan.kernel.entry for plan, _ in steps.plans(device.of(index)))

    def __call__(self) -> Array:
        if self._layer.gate_up.spec.weight.device == HOST:
            x, ids, weights, shared = self._arguments
            return self._layer(x, ids, weights, shared=shared, out=self.out)
        if self._launches:
            import cupy

            stream = cupy.cuda.get_current_stream().ptr
            for launcher, addresses in self._launches:
                launcher(addresses, stream)
        return self.out
