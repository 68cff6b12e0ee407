# SPDX-License-Identifier: Apache-2.0
"""The constants of the cost model of ``gemm_w4a8_sm90``."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_awq.kernels.hopper import costs_by_rows, costs_table, in_turn


@dataclass(frozen=True)
class GemmW4A8Costs:
    """Constants of the cost model. Cycles are per k tile and weight tile (128 x 64 weights).

    Those without tiles of offsets are fitted on an H100 to 34371 times of 840 random problems (group size 128, INT8
    with one scale per row or per block, and e4m3), with an RMS error of 4% to 5% of the ratios within a problem and 7%
    of the times. Those with them are fitted together with the constants of `gemm_int8_sm90` for e4m3, see there.

    Attributes:
        launch_us: fixed time of a launch.
        queue_us: longest time for which x waits behind the weights that are copied before it; see `prefetch_waits`.
        pause_us: longest time between the first copies and those that refill the stages; see `prefetch_waits`.
        block_scales_us: additional time if each block of x has a scale.
        wave_us: additional time per additional wave of CTAs.
        reduction_us: fixed time of the split-K reduction.
        odd_cluster_us: additional time of the reduction with ``split_k`` = 3.
        share_us: additional time if CTAs share the copies of x.
        exchange_ns: time of the split-K reduction per accumulator that a CTA sends, in nanoseconds.
        consumer_ns: time to add up the accumulators of a CTA, per consumer and accumulator, in nanoseconds.
        tensor_factor: tensor-core cycles per wgmma, relative to the nominal ones.
        dequantize_cycles: issue cycles to dequantize weights.
        product_cycles: issue cycles per row and instruction that scales a product.
        turn_cycles: issue cycles per pipeline stage, if a k tile has parameters of rows of x, times the square of the
            number of consumers beyond two, which take turns at the stages.
        alone_us: additional time per iteration of a consumer that is alone on its SM, in which nothing overlaps.
        iteration_cycles: cycles per k tile of a warpgroup that is alone on its SM, for any number of m64 tiles.
        consumer_cycles: cycles per m64 tile of a warpgroup that is alone on its SM, apart from ``row_cycles``.
        row_cycles: increase of ``consumer_cycles`` per row of the CTA tile.
        first_stage_ns: additional time until the first stage has landed, per row (of up to 64) and per weight tile of a
            stage beyond the first, in nanoseconds.
        l2_factor: bandwidth of copies from L2, relative to that of plain reads; clusters and SMs share copies.
        stream_factor: time to read the weight, relative to the time at the nominal bandwidth.
        norm: exponent of the p-norm of times that overlap.
    """

    launch_us: float = in_turn(1.64, 1.78, 2.12, 1.86, 1.758)
    queue_us: float = in_turn(0.668, 0.764, 0.943, 0.79, 0)
    pause_us: float = in_turn(1.53, 0.626, 0.0968, 0, 0)
    block_scales_us: float = in_turn(0.0109, 0.119, 0.143, 0.168, 0.362)
    wave_us: float = in_turn(1.27, 1.79, 3.99, 4.35, 5.899)
    reduction_us: float = in_turn(0.0576, 0.0438, 0.0592, 0.0686, 0.05639)
    odd_cluster_us: float = in_turn(0.0562, 0.092, 0.185, 0.102, 0)
    share_us: float = in_turn(1.18, 1.18, 1.34, 1.28, 1.18)
    exchange_ns: float = in_turn(0.00715, 0.0119, 0.122, 0.159, 0.254)
    consumer_ns: float = in_turn(0.00146, 0.00146, 0.0162, 0.0122, 0.02211)
    tensor_factor: float = in_turn(0.674, 0.822, 0.289, 0.752, 0.6947)
    dequantize_cycles: float = in_turn(39.7, 60.2, 110, 108, 137.8)
    product_cycles: float = in_turn(0.827, 0.227, 0.531, 0.577, 0.4508)
    turn_cycles: float = in_turn(6.58, 13.3, 17.8, 15.3, 20.73)
    alone_us: float = in_turn(0.00267, 0.0144, 0.0181, 0.0265, 0)
    iteration_cycles: float = in_turn(185, 172, 260, 237, 292)
    consumer_cycles: float = in_turn(53, 69, 14.6, 56.3, 200.6)
    row_cycles: float = in_turn(0.35, 1.3, 2.08, 2.41, 2.893)
    first_stage_ns: float = in_turn(4.34, 3.79, 2.04, 1.24, 0)
    l2_factor: float = in_turn(1.9104, 2.8393, 2.5238, 3.1022, 1.6867)
    stream_factor: float = in_turn(1.06, 1.08, 0.968, 1.02, 1.104)
    norm: float = in_turn(2.45, 2.3, 2.44, 2.65, 6.842)


COSTS_16, COSTS_32, COSTS_64, COSTS, OFFSET_TILE_COSTS = costs_table(GemmW4A8Costs)
"""The constants for M up to 16, up to 32, up to 64, for larger M, and for tiles of offsets."""


def choose_costs(m: int, offset_tiles: bool) -> GemmW4A8Costs:
    """Return the constants for M rows of x, with or without tiles of offsets."""
    if offset_tiles:
        return OFFSET_TILE_COSTS
    return costs_by_rows(m, (COSTS_16, COSTS_32, COSTS_64, COSTS))
