# SPDX-License-Identifier: Apache-2.0
"""``sample_token`` and ``sampling_threshold``: the next token of each sequence of a batch."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from cupy_awq.kernels.decoder.common import THREADS, int32s, plan_launch
from cupy_awq.kernels.family import FunctionFamily, MemoryBoundProblem, SoleConfig, sole_configs, traffic_us
from cupy_awq.runtime.device import Device
from cupy_awq.runtime.launch_plan import LaunchPlan

MAX_SAMPLE_CTAS = 128
"""The largest number of CTAs per sequence in ``sample_token``."""


@dataclass(frozen=True)
class TokenSampling(MemoryBoundProblem):
    """A choice of the next token of m sequences of a batch.

    The sequences are first_sequence to first_sequence + m - 1 of the batch; all buffers start at sequence
    first_sequence.

    Attributes:
        m: number of sequences.
        vocab: number of logits per sequence.
        first_sequence: number of sequences of the batch before the first one.
        seed: seed of the random numbers.
        temperature: temperature of the distribution; 0 chooses the largest logit.
        penalty: repetition penalty; 1 is none.
        advance: whether the kernel also increments the lengths of the sequences and writes the tokens to host memory.
    """

    m: int
    vocab: int
    first_sequence: int = 0
    seed: int = 0
    temperature: float = 0.0
    penalty: float = 1.0
    advance: bool = False

    COMMON = tuple((1, 8, 0, 0, *constants) for constants in itertools.product((0.0, 0.8), (1.0, 1.1), (False, True)))

    def __str__(self) -> str:
        return f"tokens[{self.m}] = sample(logits[{self.m}, {self.vocab}])"

    @property
    def nbytes(self) -> int:
        """The size of the logits in bytes."""
        return 4 * self.m * self.vocab


@dataclass(frozen=True)
class ThresholdSearch(MemoryBoundProblem):
    """A search of the smallest logit of each of m sequences that may be sampled.

    The penalty and the temperature are applied to the logits first; top-k, top-p and min-p then determine the smallest.

    Attributes:
        m: number of sequences.
        vocab: number of logits per sequence.
        temperature, penalty: as in `TokenSampling`.
        top_k: number of largest logits that may be sampled; 0 is all.
        top_p: smallest sum of probabilities of the logits that may be sampled; 1 is all.
        min_p: smallest probability, relative to the largest one; 0 is all.
    """

    m: int
    vocab: int
    temperature: float
    penalty: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    COMMON = tuple((1, 8, 0.8, penalty) for penalty in (1.0, 1.1))

    def __str__(self) -> str:
        return f"limits[{self.m}] = threshold(logits[{self.m}, {self.vocab}])"

    @property
    def nbytes(self) -> int:
        """The size of the logits in bytes."""
        return 4 * self.m * self.vocab


def plan_sample(config: SoleConfig, problem: TokenSampling, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are logits, seen, limits, tokens, lengths, partials, counters and host_tokens; limits is a null
    pointer if every token may be sampled.
    """
    buffers = ("logits", "seen", "limits", "tokens", "lengths", "partials", "counters", "host_tokens")
    numbers = np.uint64(problem.seed), np.float32(problem.temperature), np.float32(problem.penalty)
    arguments = (*buffers, *int32s(problem.vocab, problem.first_sequence), *numbers)
    defines = _constants(problem) | {"ADVANCE": int(problem.advance)}
    resident_ctas = 1024 // THREADS * device.sm_count
    ctas = max(1, min(MAX_SAMPLE_CTAS, resident_ctas // problem.m))
    return plan_launch(device, SAMPLE_TOKEN.NAME, defines, (ctas, problem.m, 1), THREADS, arguments, source="sample")


def plan_threshold(config: SoleConfig, problem: ThresholdSearch, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are logits, seen and limits."""
    log_min_p = math.log(problem.min_p) if problem.min_p > 0 else -math.inf
    sizes = int32s(problem.vocab, min(problem.top_k, problem.vocab))
    numbers = map(np.float32, (problem.temperature, problem.penalty, problem.top_p, log_min_p))
    defines = _constants(problem) | {"ADVANCE": 0}
    arguments = ("logits", "seen", "limits", *sizes, *numbers)
    return plan_launch(device, SAMPLING_THRESHOLD.NAME, defines, (1, problem.m, 1), 1024, arguments, source="sample")


def _constants(problem: TokenSampling | ThresholdSearch) -> dict[str, int | str]:
    return {"SAMPLES": int(problem.temperature > 0), "PENALTY": int(problem.penalty != 1)}


SAMPLE_TOKEN = FunctionFamily("sample_token", sole_configs, traffic_us, plan_sample)
SAMPLING_THRESHOLD = FunctionFamily("sampling_threshold", sole_configs, traffic_us, plan_threshold)
