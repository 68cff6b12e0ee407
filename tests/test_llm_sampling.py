# SPDX-License-Identifier: Apache-2.0
"""Tests of sampling: the probabilities of tokens, the random noise, penalties, and values out of range."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cupy_awq.llm import Sampling
from cupy_awq.llm.decoder.sampling import choose_token, gumbel_noise

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2], np.float32))


def drawn(sampling: dict[str, Any], count: int, logits: np.ndarray = LOGITS) -> np.ndarray:
    """Return the share of ``count`` draws with one seed in which each token is chosen."""
    seen = np.zeros(len(logits), bool)
    chosen = [choose_token(logits, Sampling(**sampling), seen=seen, sequence=0, position=i) for i in range(count)]
    return np.bincount(chosen, minlength=len(logits)) / count


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        ({}, [0.05, 0.4, 0.1, 0.25, 0.2]),
        ({"top_k": 2}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"top_p": 0.5}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"top_p": 0.7}, [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
        ({"min_p": 0.45}, [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
        ({"top_k": 3, "top_p": 0.5}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"temperature": 0.5}, [0.0025, 0.16, 0.01, 0.0625, 0.04]),
    ],
)
def test_tokens_are_drawn_with_their_probability(sampling: dict[str, Any], wanted: list[float]) -> None:
    """In 4000 draws a token's share is within 4 standard deviations of its probability, and 0 if filtered out."""
    found, p = drawn({"temperature": 1.0, "seed": 5, **sampling}, 4000), np.array(wanted) / sum(wanted)
    assert (np.abs(found - p) <= 4 * np.sqrt(p * (1 - p) / 4000)).all()
    assert (found[p == 0] == 0).all()


def test_a_temperature_above_the_largest_is_refused_with_the_range() -> None:
    assert Sampling(temperature=1e6).temperature == 1e6
    with pytest.raises(ValueError, match=r"temperature: expected 0 to 1e6, got inf"):
        Sampling(temperature=math.inf)


def test_noise_differs_between_seeds_sequences_and_positions_and_is_reproducible() -> None:
    ids = np.arange(1000)
    noise = [gumbel_noise(*key, ids) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**64 - 1, 7, 9))]
    for i, one in enumerate(noise):
        assert all(abs(np.corrcoef(one, other)[0, 1]) < 0.15 for other in noise[:i])
    np.testing.assert_array_equal(noise[1], gumbel_noise(1, 0, 0, ids))
    np.testing.assert_array_equal(noise[1][500:], gumbel_noise(1, 0, 0, ids[500:]))


def test_greedy_sampling_takes_the_first_of_equal_tokens() -> None:
    logits = np.array([1, 3, 3, 2], np.float32)
    assert choose_token(logits, Sampling(top_k=1, seed=9), seen=np.zeros(4, bool), sequence=0, position=0) == 1


def test_a_repetition_penalty_makes_seen_tokens_less_likely_on_both_sides_of_zero() -> None:
    seen = np.array([True, False, False])
    for logits, wanted in (([2.0, 1.5, 0.0], 1), ([-1.0, -1.5, -9.0], 1), ([4.0, 1.5, 0.0], 0)):
        assert (
            choose_token(np.float32(logits), Sampling(repetition_penalty=2.0), seen=seen, sequence=0, position=0)
            == wanted
        )


def test_logits_with_nan_are_an_error() -> None:
    with pytest.raises(ValueError, match="logits: expected finite values, got NaN"):
        choose_token(np.array([1, np.nan], np.float32), Sampling(), seen=np.zeros(2, bool), sequence=0, position=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1e39},
        {"top_k": -1},
        {"top_p": 0},
        {"min_p": 2},
        {"seed": -1},
        {"repetition_penalty": 0},
    ],
)
def test_sampling_values_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
        Sampling(**wrong)
