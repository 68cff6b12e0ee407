# SPDX-License-Identifier: Apache-2.0
"""Layers of experts with unusual sizes: widths that few kernels take, and sums of wide rows."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_awq.expert_check import EXPERT_ACTIVATIONS
from cupy_awq.kernels.experts.layer import ExpertForm, ExpertLayer, plan_layer, reads_fragments
from cupy_awq.kernels.experts.routing import SUM_EXPERTS, ExpertSum
from cupy_awq.kernels.family import SoleConfig
from cupy_awq.kernels.gemm.problem import FRAGMENTS
from cupy_awq.runtime import device
from tests.backends import BACKENDS, runner
from tests.test_kernels import facts


@pytest.mark.parametrize("backend", BACKENDS)
def test_sum_of_rows_that_several_ctas_share(backend: str) -> None:
    rng = np.random.default_rng(0)
    pairs, ids = rng.standard_normal((9, 1040)).astype(np.float16), rng.integers(-1, 3, (3, 3)).astype(np.int32)
    shared, y = rng.standard_normal((3, 1040)).astype(np.float16), np.full((3, 1040), np.nan, np.float16)
    problem = ExpertSum(3, 1040, 3, 2, "float16", True, True, 1040, 1040)
    plan = SUM_EXPERTS.plan(SoleConfig(), problem, facts(80, backend))
    runner(backend)(plan, {"pairs": pairs, "ids": ids, "shared": shared, "y": y})
    has_expert = ((ids >= 0) & (ids < 2))[:, :, None]
    expected = np.where(has_expert, pairs.reshape(3, 3, -1).astype(np.float64), 0).sum(1) + shared
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("arch", [60, 75, 80, 90, 120])
@pytest.mark.parametrize("zeros", ["packed", "float"])
@pytest.mark.parametrize("width", [8, 16, 24, 40, 64])
def test_weights_are_repacked_only_where_a_gate_of_their_width_has_a_kernel(arch: int, zeros: str, width: int) -> None:
    here = device.nominal(arch)
    forms = [ExpertForm(8, k, n, 8, "float16", zeros) for k, n in ((128, 2 * width), (width, 128))]
    forms[0] = forms[0]._replace(group_size=32)
    forms = [form._replace(layout=FRAGMENTS) if reads_fragments(form, "float16", here) else form for form in forms]
    for m in (1, 100):
        layer = ExpertLayer(m, 2, *forms, "float16", EXPERT_ACTIVATIONS["swiglu"], False, 128, 128, 0)
        assert plan_layer(layer, here).plans(here)
