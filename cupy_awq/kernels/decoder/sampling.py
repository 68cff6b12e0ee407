# SPDX-License-Identifier: Apache-2.0
"""``sample_token`` and ``sampling_threshold``: the next token of each sequence of a batch."""

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
"""The largest number of CTAs per sequence in ``sample_token``."""
SLOT_OPTIONS = np.dtype(
    [
        *(("seed", "u8"), ("choice", "i4"), ("top_k", "i4")),
        *(("temperature", "f4"), ("top_p", "f4"), ("log_min_p", "f4"), ("padding", "f4")),
    ]
)
"""The dtype of the options of one sequence, for rows that have options of their own."""


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
        by_slot: whether the rows are of any sequences, each with options of its own (`SLOT_OPTIONS`) in place of
            first_sequence, seed and the value of temperature, which only says whether any row samples.
    """

    m: int
    vocab: int
    first_sequence: int = 0
    seed: int = 0
    temperature: float = 0.0
    penalty: float = 1.0
    advance: bool = False
    by_slot: bool = False

    COMMON = (
        *((1, 8, 0, 0, *constants) for constants in itertools.product((0.0, 0.8), (1.0, 1.1), (False, True))),
        *((1, 8, 0, 0, temperature, 1.0, False, True) for temperature in (0.0, 0.8)),
    )

    def __str__(self) -> str:
        return f"tokens[{self.m}] = sample(logits[{self.m}, {self.vocab}])"

    @property
    def nbytes(self) -> int:
        """The size of the logits in bytes."""
        return 4 * self.m * self.vocab


@dataclass(frozen=True)
class ThresholdSearch(MemoryBoundProblem):
    """A search for the smallest logit that may be sampled, for each of m sequences.

    The penalty and the temperature are applied to the logits first; top-k, top-p and min-p then determine the smallest.

    Attributes:
        m: number of sequences.
        vocab: number of logits per sequence.
        temperature, penalty: as in `TokenSampling`.
        top_k: number of largest logits that may be sampled; 0 is all.
        top_p: smallest sum of probabilities of the logits that may be sampled; 1 is all.
        min_p: smallest probability, relative to the largest one; 0 is all.
        by_slot: as in `TokenSampling`, for all of these options.
    """

    m: int
    vocab: int
    temperature: float
    penalty: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    by_slot: bool = False

    COMMON = (*((1, 8, 0.8, penalty) for penalty in (1.0, 1.1)), (1, 8, 0.8, 1.0, 0, 1.0, 0.0, True))

    def __str__(self) -> str:
        return f"limits[{self.m}] = threshold(logits[{self.m}, {self.vocab}])"

    @property
    def nbytes(self) -> int:
        """The size of the logits in bytes."""
        return 4 * self.m * self.vocab


def slot_options(sampling: Any, choice: int) -> npt.NDArray[np.void]:
    """Return `SLOT_OPTIONS` [1]: the `cupy_awq.llm.Sampling` of a sequence and the index of its completion."""
    filters = min(sampling.top_k, 2**31 - 1), sampling.temperature, sampling.top_p, _log(sampling.min_p)
    return np.array([(sampling.seed, choice, *filters, 0)], SLOT_OPTIONS)


def _log(min_p: float) -> float:
    """Return log(min_p), or -infinity for 0, which lets every token be sampled."""
    return math.log(min_p) if min_p > 0 else -math.inf


def plan_sample(config: SoleConfig, problem: TokenSampling, device: Device) -> LaunchPlan:
    """Return the launch plan.

    The buffers are logits, seen, limits, slots and options if ``by_slot``, tokens, lengths, partials, counters and
    host_tokens; limits is a null pointer if every token may be sampled.
    """
    written = ("tokens", "lengths", "partials", "counters", "host_tokens")
    buffers = ("logits", "seen", "limits", *_slot_buffers(problem), *written)
    numbers = np.uint64(problem.seed), np.float32(problem.temperature), np.float32(problem.penalty)
    arguments = (*buffers, *int32s(problem.vocab, problem.first_sequence), *numbers)
    defines = _constants(problem) | {"ADVANCE": int(problem.advance)}
    resident_ctas = 1024 // THREADS * device.sm_count
    ctas = max(1, min(MAX_SAMPLE_CTAS, resident_ctas // problem.m))
    return plan_launch(device, SAMPLE_TOKEN.NAME, defines, (ctas, problem.m, 1), THREADS, arguments, source="sample")


def plan_threshold(config: SoleConfig, problem: ThresholdSearch, device: Device) -> LaunchPlan:
    """Return the launch plan; the buffers are logits, seen, limits and, if ``by_slot``, slots and options."""
    log_min_p = _log(problem.min_p)
    sizes = int32s(problem.vocab, min(problem.top_k, problem.vocab))
    numbers = map(np.float32, (problem.temperature, problem.penalty, problem.top_p, log_min_p))
    defines = _constants(problem) | {"ADVANCE": 0}
    arguments = ("logits", "seen", "limits", *_slot_buffers(problem), *sizes, *numbers)
    return plan_launch(device, SAMPLING_THRESHOLD.NAME, defines, (1, problem.m, 1), 1024, arguments, source="sample")


def _slot_buffers(problem: TokenSampling | ThresholdSearch) -> tuple[str, ...]:
    return ("slots", "options") if problem.by_slot else ()


def _constants(problem: TokenSampling | ThresholdSearch) -> dict[str, int | str]:
    options = {"SAMPLES": int(problem.temperature > 0), "PENALTY": int(problem.penalty != 1)}
    return {**options, "BY_SLOT": int(problem.by_slot)}


SAMPLE_TOKEN = FunctionFamily("sample_token", sole_configs, traffic_us, plan_sample)
SAMPLING_THRESHOLD = FunctionFamily("sampling_threshold", sole_configs, traffic_us, plan_threshold)
