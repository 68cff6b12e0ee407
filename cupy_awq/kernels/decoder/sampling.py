# SPDX-License-Identifier: Apache-2.0
"""``sample_token`` and ``sampling_threshold``: the next token of each row of a step."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cupy_awq.kernels.decoder.common import THREADS, int32s, plan_launch
from cupy_awq.kernels.family import FunctionFamily, MemoryBoundProblem, SoleConfig, sole_configs, traffic_us
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan

MAX_SAMPLE_CTAS = 128
"""The largest number of CTAs per row in ``sample_token``."""
SLOT_OPTIONS = np.dtype(
    [
        *(("seed", "u8"), ("choice", "i4"), ("top_k", "i4")),
        *(("temperature", "f4"), ("top_p", "f4"), ("log_min_p", "f4"), ("penalty", "f4")),
        *(("presence", "f4"), ("frequency", "f4"), ("has_offsets", "i8")),
    ]
)
"""The dtype of the options of one sequence."""


@dataclass(frozen=True)
class TokenSampling(MemoryBoundProblem):
    """A choice of the next token of m rows, each with the `SLOT_OPTIONS` of its sequence.

    Attributes:
        m: number of rows.
        vocab: number of logits per row.
        samples: whether any row samples; else all take the largest logit.
        penalizes: whether any row has a repetition penalty or offsets.
    """

    m: int
    vocab: int
    samples: bool = False
    penalizes: bool = False

    COMMON = tuple((1, 8, *options) for options in itertools.product((False, True), repeat=2))

    def __str__(self) -> str:
        return f"tokens[{self.m}] = sample(logits[{self.m}, {self.vocab}])"

    @property
    def nbytes(self) -> int:
        """The size of the logits in bytes."""
        return 4 * self.m * self.vocab


@dataclass(frozen=True)
class ThresholdSearch(MemoryBoundProblem):
    """A search for the smallest logit that may be sampled, for each of m rows.

    Offsets, penalty and temperature are applied to the logits first; then top-k, top-p and min-p determine the limit.

    Attributes:
        m, vocab, penalizes: as in `TokenSampling`.
    """

    m: int
    vocab: int
    penalizes: bool = False

    COMMON = ((1, 8, False), (1, 8, True))

    def __str__(self) -> str:
        return f"limits[{self.m}] = threshold(logits[{self.m}, {self.vocab}])"

    @property
    def nbytes(self) -> int:
        """The size of the logits in bytes."""
        return 4 * self.m * self.vocab


def slot_options(sampling: Any, choice: int, offsets: Any) -> npt.NDArray[np.void]:
    """Return `SLOT_OPTIONS` [1] of a sequence.

    Args:
        sampling: the `cupy_awq.llm.Sampling`.
        choice: the index of the completion.
        offsets: its `cupy_awq.llm.decoder.sampling.Offsets`.
    """
    log_min_p = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    filters = min(sampling.top_k, 2**31 - 1), sampling.temperature, sampling.top_p, log_min_p
    penalties = offsets.presence, offsets.frequency, bool(offsets)
    return np.array([(sampling.seed, choice, *filters, sampling.repetition_penalty, *penalties)], SLOT_OPTIONS)


def plan_sample(config: SoleConfig, problem: TokenSampling, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are logits, seen, offsets, limits, slots, options, tokens, lengths, partials, counters and host_tokens;
    limits is a null pointer if every token may be sampled.
    """
    buffers = ("logits", "seen", "offsets", "limits", "slots", "options", "tokens", "lengths", "partials", "counters")
    arguments = (*buffers, "host_tokens", *int32s(problem.vocab))
    defines = _constants(problem.samples, problem.penalizes)
    resident_ctas = 1024 // THREADS * device.sm_count
    ctas = max(1, min(MAX_SAMPLE_CTAS, resident_ctas // problem.m))
    return plan_launch(device, SAMPLE_TOKEN.NAME, defines, (ctas, problem.m, 1), THREADS, arguments, source="sample")


def plan_threshold(config: SoleConfig, problem: ThresholdSearch, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are logits, seen, offsets, limits, slots and options."""
    arguments = ("logits", "seen", "offsets", "limits", "slots", "options", *int32s(problem.vocab))
    defines = _constants(True, problem.penalizes)
    return plan_launch(device, SAMPLING_THRESHOLD.NAME, defines, (1, problem.m, 1), 1024, arguments, source="sample")


def _constants(samples: bool, penalizes: bool) -> dict[str, int | str]:
    return {"SAMPLES": int(samples), "PENALTY": int(penalizes)}


SAMPLE_TOKEN = FunctionFamily("sample_token", sole_configs, traffic_us, plan_sample)
SAMPLING_THRESHOLD = FunctionFamily("sampling_threshold", sole_configs, traffic_us, plan_threshold)
