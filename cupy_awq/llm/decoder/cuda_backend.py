# SPDX-License-Identifier: Apache-2.0
"""The GPU back end of the decoder: 16-bit activations, float32 residual stream and logits.

Intermediate arrays are allocated from CuPy's memory pool, so any batch and chunk size works, except in `CudaSteps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cupy_awq import check
from cupy_awq.array_types import AnyActivation
from cupy_awq.check import Array
from cupy_awq.checkpoint import Module
from cupy_awq.kernels.decoder import decoder as kernels
from cupy_awq.kernels.decoder.decode_attention import MAX_COUNTERS, attention_workspace
from cupy_awq.kernels.gemm.gemm_sm90 import SQUARE_SUM_COLUMNS
from cupy_awq.kernels.gemm.problem import Fusion
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.linear import AwqLinear
from cupy_awq.llm.decoder import cuda_experts, cuda_steps, upload
from cupy_awq.llm.decoder.backend import OPTIONS, DecoderOps, Forward
from cupy_awq.llm.decoder.block_pool import BLOCK
from cupy_awq.llm.decoder.cuda_steps import CudaSteps
from cupy_awq.llm.decoder.forward import Attend, ColumnOrder, HostOrder, Norm, Operation, Projection
from cupy_awq.llm.decoder.fused_operations import AddAndNorm, NormAndMix, NormAndProject, fuse, next_part
from cupy_awq.llm.decoder.step_graphs import CudaRows
from cupy_awq.llm.families.description import Decoder
from cupy_awq.llm.files.model_files import DenseLinear, Int8Module, Linear
from cupy_awq.ops.gather_columns import gather_columns
from cupy_awq.ops.plan import FusedPlan
from cupy_awq.runtime import device, placement, workspace
from cupy_awq.runtime.launch_plan import LaunchPlan
from cupy_awq.runtime.launcher import launch
from cupy_awq.weight import PackedWeight

if TYPE_CHECKING:
    import cupy

RESERVED_BYTES = 1 << 29
"""The size in bytes of the free memory that a KV cache leaves for the intermediate arrays of a forward pass."""


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream h + delta, float32 [B, S, hidden], whose sum or RMSNorm may be left to the next operation.

    Attributes:
        h: float32 [B, S, hidden]. Operations may overwrite the array, so only the newest stream is valid.
        delta: the output of the last projection, [B, S, hidden] in the dtype of activations, if it has not been added
            to h yet; else None.
        inverse_rms: float32 [B * S], 1 / RMS of each row of h at the last RMSNorm; None before the first RMSNorm.
        unnormalized_x: h times the weight of the next RMSNorm, [B, S, hidden] in the dtype of activations. The GEMM
            with ``Fusion("rms_norm_x")`` divides its rows by their RMS. None if a separate kernel computes the RMSNorm.
        square_sums: float32 [B * S, ceil(hidden / 32)], the sums of h^2 over blocks of 32 columns, from which the GEMM
            computes the RMS; None without ``unnormalized_x``.
        x_order: the activation order in which ``unnormalized_x`` has its columns, int32 [hidden], or None.
    """

    h: Array
    delta: Array | None = None
    inverse_rms: Array | None = None
    unnormalized_x: Array | None = None
    square_sums: Array | None = None
    x_order: Array | None = None


class CudaOps(DecoderOps):
    """The implementation of `DecoderOps` on one GPU. It is not thread-safe.

    Args:
        config: the description of the decoder.
        device_index: the device ordinal; this device must be current at construction and at every call.
        dtype: the dtype of activations and of the KV cache: float16 or bfloat16.
        batch_invariant: the option of `cupy_awq.llm.load`. If True, GEMMs are not fused with the residual add and
            RMSNorm, and decode steps use the attention kernel for prompts, whose order of additions depends only on the
            position of a token.

    Raises:
        ValueError: the kernels do not support the sizes or the options of the model.
    """

    options = OPTIONS
    int8_min_k = 2048  # on an H100, 8 bits are faster than float16 for K = 4096, but not for K = 576 and 1536
    rotates_parts = False
    prefill_chunk = 2048

    def __init__(
        self, config: Decoder, device_index: int, dtype: np.dtype[Any], *, batch_invariant: bool = False
    ) -> None:
        config.require(self.options, "on a GPU")
        for head_dim in {layer.mixer.head_dim for layer in config.layers}:
            if head_dim % 8 or head_dim > 256:
                raise ValueError(f"head_dim: expected a multiple of 8 up to 256 on a GPU, got {head_dim}")
        if config.hidden % 8:
            raise ValueError(f"hidden: expected a multiple of 8 on a GPU, got {config.hidden}")
        self.config, self.device_index, self.dtype = config, device_index, dtype
        self._batch_invariant = batch_invariant
        self.device = device.of(device_index)
        self._host_table: npt.NDArray[Any] | None = None
        self._table: Array = None
        self._positions: dict[Projection, Array] = {}  # the inverse activation order, by layer
        self._counters = workspace.allocate_zeros(4 * MAX_COUNTERS)
        self._decode_stream: tuple[cupy.cuda.Stream, cupy.cuda.MemoryPool] | None = None

    @property
    def decode_stream(self) -> tuple[cupy.cuda.Stream, cupy.cuda.MemoryPool]:
        """The CUDA stream of all decode steps, and the memory pool for their intermediate arrays.

        Both are kept as long as the model. A new pair for each text would leak device memory: the workspace of a stream
        is never freed, and a deleted pool does not return all of its memory.
        """
        import cupy

        if self._decode_stream is None:
            stream = cupy.cuda.Stream(non_blocking=True)
            workspace.workspace_address(self.device_index, stream.ptr)
            self._decode_stream = stream, cupy.cuda.MemoryPool()
        return self._decode_stream

    def prepare_tensor(self, a: npt.NDArray[Any]) -> cupy.ndarray:
        import cupy

        if a.ndim == 1:
            return cupy.asarray(a.astype(np.float32))
        self._host_table, self._table = a, placement.to_device(a, self.device_index, self.dtype)
        return self._table

    def prepare_order(self, order: npt.NDArray[np.int32]) -> ColumnOrder:
        import cupy

        return ColumnOrder(cupy.asarray(order), cupy.asarray(np.argsort(order).astype(np.int32)))

    def prepare_tokens(self, ids: Sequence[int]) -> cupy.ndarray:
        import cupy

        return cupy.asarray(np.array(ids, np.int32))

    def make_projection(
        self, parts: Sequence[Linear], *, gated: bool = False, column_order: HostOrder = None
    ) -> Projection:
        quantized = [part for part in parts if isinstance(part, Module)]
        if 1 < len(quantized) == len(parts) and len({upload.form(part) for part in quantized}) == 1:
            uploaded = [upload.to_gpu(part, self.device_index, column_order) for part in quantized]
            return self._concatenated(uploaded, "swiglu" if gated else None, quantized[0].order)
        linears = [
            upload.awq_linear(upload.to_gpu(part, self.device_index, column_order), self._batch_invariant)
            if isinstance(part, Module)
            else self._dense(upload.take_columns(part, column_order))
            for part in parts
        ]
        if len(linears) == 1 and not gated:
            return linears[0]

        def project(x: Array) -> Array:
            import cupy

            y = cupy.concatenate([linear(x) for linear in linears], axis=-1) if len(linears) > 1 else linears[0](x)
            return self._swiglu(y) if gated else y

        return project

    def make_experts(self, *parts: Any) -> Projection:
        return cuda_experts.Mixture(self, self.dtype, self._batch_invariant, *parts)

    def make_head(self, part: Linear) -> Projection:
        if not isinstance(part, Module):
            return self._dense(part, np.dtype(np.float32))
        linear = upload.awq_linear(upload.to_gpu(part, self.device_index), self._batch_invariant)
        return lambda x: linear(x).astype(np.float32, copy=False)

    def make_steps(
        self,
        forward: Forward,
        head: Projection,
        rows: int,
        positions: int,
        tokens: int | None,
        draft_rows: int = 0,
        *,
        prepares: bool = False,
    ) -> CudaSteps:
        blocks = cuda_steps.choose_blocks(self, rows, positions, tokens, self._free_bytes())
        sizes = rows, positions, blocks, draft_rows
        return CudaSteps(self, forward, head, *sizes, prepares, self._batch_invariant)

    def make_forward(self, table: Array, operations: Sequence[Operation]) -> Forward:
        fused = fuse(operations, self._positions)

        def forward(tokens: Array, rows: CudaRows) -> Array:
            stream = self.embed(table, tokens)
            x: Array = None
            for operation in fused:
                if isinstance(operation, NormAndProject):
                    stream, x = self.norm_and_project(stream, operation)
                elif isinstance(operation, NormAndMix):
                    stream = self.norm_and_mix(stream, operation)
                elif isinstance(operation, Attend):
                    x = self.attend(operation, x, rows)
                elif isinstance(operation, AddAndNorm):
                    stream = self.add_and_norm(stream, x, operation)
                elif isinstance(operation, Norm):
                    stream, x = self.rms_norm(stream, operation)
                else:
                    x = operation.projection(x)
            return x

        return forward

    def embed(self, table: Array, tokens: Array) -> ResidualStream:
        """Return a new residual stream: the rows of the embedding table [V, hidden] for tokens [B, S]."""
        vocab, width = table.shape
        h = self._empty((*tokens.shape, width), np.float32)
        plan = kernels.plan_embed(self.device, tokens.size, vocab, width, self.dtype.name)
        self.run(plan, tokens=tokens, table=table, h=h)
        return ResidualStream(h)

    def norm_and_project(self, stream: ResidualStream, fused: NormAndProject) -> tuple[ResidualStream, Array]:
        """Execute a `NormAndProject`. If `add_and_norm` left the division by the RMS, the GEMM includes it."""
        norm, projection = fused.norm, fused.projection
        if stream.unnormalized_x is not None and fused.order is stream.x_order:
            m = stream.unnormalized_x.size // self.config.hidden
            next_weight, part = next_part(fused.next, m, self.device)
            plan = self._plan_fused(projection, m, Fusion("rms_norm_x", norm.eps, next_weight=part))
            if plan is not None:
                inverse_rms = self._empty((m,), np.float32)
                read = {"square_sums": stream.square_sums, "previous_inverse_rms": stream.inverse_rms}
                read["next_weight"] = next_weight
                written = {"inverse_rms": inverse_rms}
                y = self._run_fused(plan, stream.unnormalized_x, h=None, norm_weight=None, **read, **written)
                return ResidualStream(stream.h, inverse_rms=inverse_rms), y
        stream, x = self.rms_norm(stream, norm)
        return stream, projection(x)

    def norm_and_mix(self, stream: ResidualStream, fused: NormAndMix) -> ResidualStream:
        """Execute a `NormAndMix`. For few tokens, the router's kernel includes the norm and the addition of delta."""
        y = fused.mixture.mix_stream(stream.h, stream.delta, fused.norm)
        if y is None:
            stream, x = self.rms_norm(stream, fused.norm)
            y = fused.mixture(x)
        return ResidualStream(stream.h, delta=y)

    def add_and_norm(self, stream: ResidualStream, x: Array, fused: AddAndNorm) -> ResidualStream:
        """Execute an `Add`. If supported, the GEMM also adds to h and multiplies h by the weight of the next norm.

        The product's columns are written in the activation order of the next projection.
        """
        projection, following = fused.projection, fused.next
        *rows, width = stream.h.shape
        m = x.size // x.shape[-1]
        if following is None or getattr(projection, "order", None) is not None:  # A fused GEMM does not permute x.
            return ResidualStream(stream.h, delta=projection(x))
        next_weight, part = next_part(following, m, self.device)
        positions = following.positions
        fusion = Fusion("add_to_stream", orders_y=positions is not None, next_weight=part)
        plan = self._plan_fused(projection, m, fusion)
        if plan is None:
            return ResidualStream(stream.h, delta=projection(x))
        square_sums = self._empty((*rows, ceil_div(width, SQUARE_SUM_COLUMNS)), np.float32)
        read = {"norm_weight": following.norm.weight, "previous_inverse_rms": stream.inverse_rms, "inverse_rms": None}
        read["next_weight"] = next_weight
        if positions is not None:
            read["positions"] = positions
        y = self._run_fused(plan, x, h=stream.h, square_sums=square_sums, **read)
        x_order = None if positions is None else following.order
        return ResidualStream(stream.h, None, stream.inverse_rms, y, square_sums, x_order)

    def rms_norm(self, stream: ResidualStream, norm: Norm) -> tuple[ResidualStream, Array]:
        """Execute a `Norm`, and add the stream's delta to h in place."""
        h, delta = stream.h, stream.delta
        width = h.shape[-1]
        m = h.size // width
        x, inverse_rms = self._empty(h.shape), self._empty((m,), np.float32)
        has_delta = delta is not None
        plan = kernels.plan_rms_norm(self.device, m, width, self.dtype.name, norm.eps, delta=has_delta)
        self.run(plan, h=h, delta=delta, weight=norm.weight, x=x, inverse_rms=inverse_rms)
        return ResidualStream(h, inverse_rms=inverse_rms), x

    def attend(self, attend: Attend, qkv: Array, rows: CudaRows) -> Array:
        """Execute an `Attend`. A decode step without drafts launches one kernel, others two."""
        spec, state, dtype, m = attend.spec, rows.layers[attend.layer], self.dtype.name, qkv.shape[1]
        q_norm, k_norm, order = attend.q_norm, attend.k_norm, attend.order
        has_norm, eps = q_norm is not None, 0.0 if q_norm is None else q_norm.eps
        out = self._empty((1, m, spec.q_width))
        sizes = m, spec.heads, spec.kv_heads, spec.head_dim, rows.capacity, spec.kv_width * BLOCK, dtype
        cached = {"lengths": rows.lengths, "slots": rows.slots, "work": rows.work, "table": rows.table}
        cached |= {"k": state.k, "v": state.v}
        norms = (None if norm is None else norm.weight for norm in (q_norm, k_norm))
        new = dict(zip(("q_norm", "k_norm", "cos", "sin"), (*norms, *rows.rotations[spec.rope]), strict=True))
        new["qkv"] = qkv
        if rows.has_drafts or not rows.splits:
            self.run(kernels.plan_rope_cache(self.device, *sizes, eps, norm=has_norm), **cached, **new)
        if not rows.splits:
            self.run(kernels.plan_attention(self.device, *sizes, eps, has_norm, rows.tiles), **cached, **new, out=out)
            return out if order is None else gather_columns(out, order.order)
        options: dict[str, Any] = {"norm": has_norm, "orders_out": order is not None, "appended": rows.has_drafts}
        plan = kernels.plan_decode_attention(self.device, *sizes, eps, splits=rows.splits, **options)
        partials, _ = attention_workspace(plan, m, spec.heads, spec.head_dim)
        scratch = {"partials": self._empty((partials,), np.float32), "counters": self._counters}
        positions = None if order is None else order.positions
        self.run(plan, **cached, **new, **scratch, out=out, positions=positions)
        return out

    def to_numpy(self, a: Array) -> npt.NDArray[np.float32]:
        host: npt.NDArray[np.float32] = a.get()
        return host

    def _free_bytes(self) -> int:
        """Return the size of the free memory that a KV cache may take."""
        import cupy

        free_bytes: int = cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()
        return max(free_bytes - RESERVED_BYTES, 0)

    def run(self, plan: LaunchPlan, **buffers: Array | None) -> None:
        """Launch a plan on the current stream. ``buffers`` maps argument names to arrays; None is a null pointer."""
        launch(plan, buffers, self.device_index)

    def _plan_fused(self, projection: Projection, m: int, fusion: Fusion) -> FusedPlan | None:
        return projection.plan_fused(m, fusion, dtype=self.dtype) if isinstance(projection, AwqLinear) else None

    def _run_fused(self, plan: FusedPlan, x: Array, **buffers: Array | None) -> Array:
        y = self._empty((*x.shape[:-1], plan.out_features))
        if "partials" in plan.launch.pointers:
            partials = self._empty((plan.partial_bytes // 4,), np.float32) if plan.partial_bytes else None
            buffers |= {"partials": partials, "counters": self._counters}
        self.run(plan.launch, **plan.arrays, **buffers, x=x, y=y)
        return y

    def _empty(self, shape: tuple[int, ...], dtype: Any = None) -> cupy.ndarray:
        import cupy

        return cupy.empty(shape, self.dtype if dtype is None else dtype)

    def _concatenated(self, parts: Sequence[Module], activation: AnyActivation, order: HostOrder) -> AwqLinear:
        """Return one layer for linear layers that share x and its activation order, concatenated along N."""
        linears: list[AwqLinear | PackedWeight] = []
        for part in parts:
            is_weight = part.bias is None and part.order is None
            linears.append(part.weight if is_weight else AwqLinear(part.weight, bias=part.bias, order=part.order))
        invariant = self._batch_invariant
        layer = AwqLinear.concatenate(linears, activation=activation, keep_weight=False, batch_invariant=invariant)
        if order is not None:
            self._positions[layer] = self.prepare_order(order).positions
        return layer

    def _dense(self, part: DenseLinear | Int8Module, out_dtype: np.dtype[Any] | None = None) -> Projection:
        """Return the projection of a dense or 8-bit layer. A tied output head shares the embedding table's memory.

        8-bit codes stay 8-bit if activations are float16. The results equal those with a float16 weight.
        """
        import cupy

        if isinstance(part, Int8Module) and self.dtype != check.FLOAT16:
            part = part.dequantize()
        block = part.weight.block_size if isinstance(part, Int8Module) else None
        n, k = part.weight.shape[0], part.weight.shape[-1]
        if isinstance(part, Int8Module):
            arrays = {"codes": part.weight.stored, "code_scales": part.weight.scale}
            weight = {name: placement.to_device(a, self.device_index) for name, a in arrays.items()}
        elif part.weight is self._host_table:
            weight = {"w": self._table}
        else:
            weight = {"w": placement.to_device(part.weight, self.device_index, self.dtype)}
        bias = None if part.bias is None else cupy.asarray(part.bias.astype(np.float32))
        if k % 8:
            raise ValueError(f"K of a linear layer: expected a multiple of 8 on a GPU, got {k}")
        y_dtype = out_dtype or self.dtype

        def project(x: Array) -> Array:
            x = cupy.ascontiguousarray(x)
            y = self._empty((*x.shape[:-1], n), y_dtype)
            dtypes = self.dtype.name, y_dtype.name
            options: dict[str, Any] = {"bias": bias is not None, "block": block}
            options["same_order"] = self._batch_invariant
            plan = kernels.plan_dense(self.device, x.size // k, n, k, *dtypes, **options)
            self.run(plan, x=x, **weight, bias=bias, y=y)
            return y

        return project

    def _swiglu(self, x: Array) -> Array:
        width = x.shape[-1] // 2
        y = self._empty((*x.shape[:-1], width))
        self.run(kernels.plan_swiglu(self.device, y.size // width, width, self.dtype.name), x=x, y=y)
        return y
