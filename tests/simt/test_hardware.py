# SPDX-License-Identifier: Apache-2.0
"""Tests of the simulator against results that ``record.py`` recorded on a GPU, by opcode."""

from __future__ import annotations

import numpy as np
import pytest

from tests.backends import fewer
from tests.simt.case import same
from tests.simt.opcodes import CASES
from tests.simt.record import load, simulate

RECORDED = load()


def test_every_case_was_recorded() -> None:
    assert sorted(RECORDED) == sorted(CASES)


@pytest.mark.parametrize("name", fewer(RECORDED, 3))
def test_same_as_hardware(name: str) -> None:
    case = CASES[name]
    found = simulate(case)
    agrees = same(case, found, RECORDED[name])
    if not agrees.all():
        row, thread = (int(index[0]) for index in np.nonzero(~agrees))
        inputs = ", ".join(f"{word:#x}" for word in case.buffers()["x"][:, thread])
        pytest.fail(
            f"{(~agrees).sum()} words differ; first: inputs [{inputs}], hardware {RECORDED[name][row, thread]:#x}, "
            f"simulated {found[row, thread]:#x}"
        )
