# SPDX-License-Identifier: Apache-2.0
"""Kernels ``dense_sm90``, ``dense_mma``, ``dense``, ``dense_int8``: GEMMs with a weight in 16 or 8 bits, such as heads.

The kernels with "mma" in their names use tensor cores, from sm_75 on; for bfloat16, from sm_80 on. ``dense_sm90`` is
for more than a few rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cupy_awq.kernels.decoder.common import SIMT_FACTOR, THREADS, int32s, plan_launch
from cupy_awq.kernels.dtypes import ITEMSIZE, TYPES
from cupy_awq.kernels.family import Family, MemoryBoundProblem, SoleConfig, SoleConfigFamily
from cupy_awq.kernels.hopper import HOPPER, p_norm
from cupy_awq.kernels.tiling import ceil_div
from cupy_awq.runtime.device import Capability, Device
from cupy_awq.runtime.launch_plan import LaunchPlan, TensorMap

DENSE_BLOCK_M = 16
"""The number of rows of x per block of ``dense_mma``."""
DENSE_MAX_M = 128
"""The largest number of rows of x that the CTAs of ``dense_mma`` compute while the weight is read once."""
DENSE_THREADS = 512
"""The number of threads per CTA of ``dense_mma``."""
MMA_SHARE, SIMT_SHARE = 0.16, 0.25
"""The fractions of the rates of mma.sync and of fma that ``dense_mma`` (LM heads of 48 and 64 rows, H100) and ``dense``
reach; the latter is an assumption."""
TILE_N, TILE_K, SM90_THREADS = 128, 64, 288
"""The columns of y and the extent along k of a tile of ``dense_sm90``, and its number of threads per CTA."""
TILES_M = (56, 64, 96, 128, 200, 256)
"""The numbers of rows per tile of ``dense_sm90``, for which ``ptx/wgmma_shared.cuh`` has instructions."""
MIN_SM90_ROWS = 17
"""The smallest number of rows for ``dense_sm90``: up to 16, ``dense_mma`` takes the time to read the weight."""
COPY_BYTES = 53
"""The bytes per clock cycle that an SM of an H100 copies from L2."""
FILL_US = 2.0
"""The time in microseconds until the first stages of ``dense_sm90`` are filled, and to store the last tiles."""


@dataclass(frozen=True)
class DenseProduct(MemoryBoundProblem):
    """A GEMM y [m, n] = x [m, k] @ w [n, k]^T + bias.

    Attributes:
        m: number of rows of x and y.
        n: number of rows of w and columns of y.
        k: number of columns of x and w.
        dtype: dtype of x, of the scales, and of w if ``block`` is None: "float16" or "bfloat16".
        out_dtype: dtype of y.
        bias: whether there is a bias.
        same_order: whether products with any number of rows must be added in the same order.
        block: number of values along k per scale, a multiple of 16, of a weight given by the buffers ``codes``, uint8
            [n, k], and ``code_scales`` [n, k / block]; None for a weight ``w`` [n, k].
    """

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    bias: bool
    block: int | None = None
    same_order: bool = False

    def __str__(self) -> str:
        weight = self.dtype if self.block is None else f"int8 block size {self.block}"
        return f"x[{self.m}, {self.k}] {self.dtype} @ w[{self.n}, {self.k}]^T {weight}"

    @property
    def nbytes(self) -> int:
        """The size of x, the weight and y in bytes."""
        itemsize = ITEMSIZE[self.dtype]
        row_bytes = self.k * itemsize if self.block is None else self.k + self.k // self.block * itemsize
        return self.m * (self.k * itemsize + self.n * ITEMSIZE[self.out_dtype]) + self.n * row_bytes

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of a launch's buffers, which depend on the kind of weight and on the bias."""
        return ("x", *(("w",) if self.block is None else ("codes", "code_scales")), "bias", "y")

    def busy_us(self, device: Device, rate: float) -> float:
        """Return the time in microseconds of all products, at ``rate`` multiply-adds per SM and clock cycle."""
        m = ceil_div(self.m, DENSE_BLOCK_M) * DENSE_BLOCK_M
        return m * self.n * self.k / (rate * device.sm_count * device.rates.clock_mhz)

    def defines(self) -> dict[str, int | str]:
        """Return the compile-time constants (name, value) of all kernels."""
        constants: dict[str, int | str] = {
            "X": TYPES[self.dtype],
            "Y": TYPES[self.out_dtype],
            "HAS_BIAS": int(self.bias),
        }
        return constants if self.block is None else constants | {"BLOCK": self.block}

    def weight_refusal(self, has_codes: bool) -> str | None:
        """Return the reason why kernels for weights in 8 bits (``has_codes``) or 16 bits cannot take the weight."""
        if has_codes == (self.block is None):
            return f"takes a weight in {8 if has_codes else 16} bits, not {16 if has_codes else 8}"
        return None

    @classmethod
    def common_problems(cls) -> Iterator[DenseProduct]:
        """Yield GEMMs of common models, which the compile command compiles in advance."""
        for dtype in ("float16", "bfloat16"):
            for k, out_dtype in ((64, dtype), *((k, "float32") for k in (64, 896, 1536, 4096, 72))):
                for m in (1, 17, 33, 64, 128, 256):
                    yield DenseProduct(m, 8, k, dtype, out_dtype, bias=False)
            for block, k, out_dtype in (
                (32, 4096, dtype),
                (32, 2048, "float32"),
                (16, 4096, "float32"),
                (16, 144, dtype),
            ):
                yield DenseProduct(1, 8, k, dtype, out_dtype, bias=False, block=block)


@dataclass(frozen=True)
class DenseConfig(SoleConfig):
    """A configuration of ``dense_mma``.

    Attributes:
        tiles: number of tiles of 8 columns of y per CTA.
        steps: number of steps of a CTA along k, which are loaded at the same time.
        blocks: number of blocks of DENSE_BLOCK_M rows of x per CTA.
    """

    tiles: int
    steps: int
    blocks: int


class DenseMma(Family[DenseProduct, DenseConfig]):
    """The kernel families ``dense_mma`` (a weight in 16 bits) and, with ``has_codes``, ``dense_int8_mma``."""

    needs = (Capability.MMA_M16N8K8,)

    def __init__(self, name: str, has_codes: bool) -> None:
        self.NAME = name
        self._has_codes = has_codes

    def refusal(self, problem: DenseProduct, device: Device) -> str | None:
        reason = problem.weight_refusal(self._has_codes) or device.refusal(self.needs, problem.dtype)
        if reason is None and problem.k % 32:
            return f"needs K to be a multiple of 32, not {problem.k}"
        return reason

    def configs(self, problem: DenseProduct, device: Device) -> list[DenseConfig]:
        """Return the family's single configuration, whose tile depends on M and the GPU."""
        # A step loads 2 * DENSE_THREADS bytes of each row of w. The number of steps limits the loads in flight per CTA
        # to 64 KiB; more loads in flight slow down LM heads by 1 to 4% on an H100.
        step_k = (2 if self._has_codes else 1) * DENSE_THREADS
        steps = ceil_div(problem.k, step_k * ceil_div(problem.k, 4 * step_k))
        # With 8-bit codes, ptxas spills registers if TILES is 4 and STEPS is 2 and, for GPUs with tcgen05, if their
        # product is 8. On an H100, heads with K = 2048 take 0.80 to 0.86 of the time with 3 tiles.
        product = 4 if self._has_codes and device.has(Capability.TCGEN05) else 8
        tiles = min(3 if self._has_codes and steps == 2 else 4, product // steps)
        # More blocks per CTA save reads of the weight from L2, but need more registers and, with more than two tiles,
        # more shared memory than a CTA has.
        m_blocks = ceil_div(problem.m, DENSE_BLOCK_M)
        blocks = 1 if self._has_codes else m_blocks if m_blocks <= 3 else 2
        return [DenseConfig(tiles if blocks == 1 else min(tiles, 2), steps, blocks)]

    def estimate_us(self, config: DenseConfig, problem: DenseProduct, device: Device) -> float:
        """Return the run time in microseconds: the longer of the memory traffic and the products."""
        busy = problem.busy_us(device, MMA_SHARE * device.rates.mma_fp32)
        return device.rates.launch_us + max(device.read_us(problem.nbytes), busy)

    def plan(self, config: DenseConfig, problem: DenseProduct, device: Device) -> LaunchPlan:
        """Return the launch plan; the buffers are `DenseProduct.buffers`."""
        m_blocks = ceil_div(problem.m, DENSE_BLOCK_M)
        groups = m_blocks if config.blocks == 1 else ceil_div(problem.m, DENSE_MAX_M)
        sharing = ceil_div(m_blocks, config.blocks * groups)
        grid = (sharing, min(ceil_div(problem.n, 8 * config.tiles), device.sm_count // sharing), groups)
        defines = problem.defines() | {"TILES": config.tiles, "STEPS": config.steps, "BLOCKS": config.blocks}
        arguments = (*problem.buffers, *int32s(problem.m, problem.n, problem.k))
        plan = plan_launch(device, self.NAME, defines, grid, DENSE_THREADS, arguments)
        return replace(plan, prefers_l1=True)


@dataclass(frozen=True)
class DenseSm90Config(SoleConfig):
    """A configuration of ``dense_sm90``.

    Attributes:
        block_m: number of rows of y per tile.
    """

    block_m: int

    def tiles(self, problem: DenseProduct) -> tuple[int, int]:
        """Return the numbers of tiles along m and n."""
        return ceil_div(problem.m, self.block_m), ceil_div(problem.n, TILE_N)


class DenseSm90(Family[DenseProduct, DenseSm90Config]):
    """The kernel family ``dense_sm90``."""

    NAME = "dense_sm90"
    needs = HOPPER

    def refusal(self, problem: DenseProduct, device: Device) -> str | None:
        reason = problem.weight_refusal(has_codes=False) or device.refusal(self.needs)
        if reason is None and problem.same_order:
            return "adds in another order than the kernels for few rows"
        if reason is None and problem.m < MIN_SM90_ROWS:
            return f"takes {MIN_SM90_ROWS} rows or more, not {problem.m}"
        if reason is None and problem.k % 8:
            return f"needs K to be a multiple of 8, not {problem.k}"
        return reason

    def configs(self, problem: DenseProduct, device: Device) -> list[DenseSm90Config]:
        """Return the configurations with no more rows per tile than M needs."""
        most = next((rows for rows in TILES_M if rows >= problem.m), TILES_M[-1])
        return [DenseSm90Config(rows) for rows in TILES_M if rows <= most]

    def estimate_us(self, config: DenseSm90Config, problem: DenseProduct, device: Device) -> float:
        """Return the run time in microseconds, from the memory traffic and the time of the CTA with the most tiles."""
        rows, columns = config.tiles(problem)
        copied = (config.block_m + TILE_N) * TILE_K * 2 / COPY_BYTES
        products = config.block_m * TILE_N * TILE_K / device.rates.tensor
        steps = ceil_div(rows * columns, device.sm_count) * ceil_div(problem.k, TILE_K)
        busy = steps * p_norm((copied, products), 4) / device.rates.clock_mhz
        return device.rates.launch_us + FILL_US + p_norm((device.read_us(problem.nbytes), busy), 4)

    def plan(self, config: DenseSm90Config, problem: DenseProduct, device: Device) -> LaunchPlan:
        """Return the launch plan; the buffers are `DenseProduct.buffers`."""
        m, n, k = problem.m, problem.n, problem.k
        rows, columns = config.tiles(problem)
        stage_bytes = (config.block_m + TILE_N) * TILE_K * 2 + 16
        stages = min(8, device.shared_bytes_per_block // stage_bytes)
        shared_bytes = stages * stage_bytes
        defines = problem.defines() | {"BLOCK_M": config.block_m, "STAGES": stages, "SHARED_BYTES": shared_bytes}
        w, x = (
            TensorMap(
                name, problem.dtype, dims=(k, size, 1), strides=(2 * k, 2 * k * size), box=(TILE_K, box, 1), swizzle=128
            )
            for name, size, box in (("w", n, TILE_N), ("x", m, min(m, config.block_m)))
        )
        sizes = int32s(m, n, rows, rows * columns, ceil_div(k, TILE_K))
        grid = (min(rows * columns, device.sm_count), 1, 1)
        arguments = ("bias", "y", w, x, *sizes)
        return plan_launch(device, self.NAME, defines, grid, SM90_THREADS, arguments, shared_bytes=shared_bytes)


class DenseSimt(SoleConfigFamily[DenseProduct]):
    """The kernel families ``dense`` (a weight in 16 bits) and, with ``has_codes``, ``dense_int8``, on CUDA cores."""

    def __init__(self, name: str, has_codes: bool) -> None:
        self.NAME = name
        self._has_codes = has_codes

    def refusal(self, problem: DenseProduct, device: Device) -> str | None:
        return problem.weight_refusal(self._has_codes)

    def estimate_us(self, config: SoleConfig, problem: DenseProduct, device: Device) -> float:
        busy = problem.busy_us(device, SIMT_SHARE * device.rates.fma)
        return max(SIMT_FACTOR * super().estimate_us(config, problem, device), busy)

    def plan(self, config: SoleConfig, problem: DenseProduct, device: Device) -> LaunchPlan:
        """Return the launch plan; the buffers are `DenseProduct.buffers`."""
        grid = (ceil_div(problem.n, THREADS // 32), problem.m, 1)
        arguments = (*problem.buffers, *int32s(problem.n, problem.k))
        return plan_launch(device, self.NAME, problem.defines(), grid, THREADS, arguments)


DENSE_SM90 = DenseSm90()
DENSE_MMA = DenseMma("dense_mma", has_codes=False)
DENSE_INT8_MMA = DenseMma("dense_int8_mma", has_codes=True)
DENSE = DenseSimt("dense", has_codes=False)
DENSE_INT8 = DenseSimt("dense_int8", has_codes=True)
