# SPDX-License-Identifier: Apache-2.0
"""The configuration of the mma.sync kernels ``conv2d_mma``, ``gemm_int8_sm75`` and ``gemm_int8_sm80``."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_awq.kernels.family import Workspace


@dataclass(frozen=True)
class WarpTileConfig:
    """A configuration with CTA tiles of ``warp_m * warps_m`` rows x ``32 * warps_n`` columns of y.

    In a convolution, the rows are output pixels and the columns are output channels.

    Attributes:
        warp_m: number of rows per warp; a warp computes 32 columns.
        warps_m: number of warps along rows.
        warps_n: number of warps along columns.
        stages: number of pipeline stages.
        split_k: number of CTAs per tile; each computes a slice of K.
    """

    warp_m: int
    warps_m: int
    warps_n: int
    stages: int
    split_k: int

    @property
    def block_m(self) -> int:
        """The number of rows per CTA tile."""
        return self.warp_m * self.warps_m

    @property
    def block_n(self) -> int:
        """The number of columns per CTA tile."""
        return 32 * self.warps_n

    def workspace(self, tiles: int) -> Workspace:
        """Return the split-K workspace for a number of tiles."""
        return Workspace.for_split_k(self.split_k, tiles, self.block_m * self.block_n)
