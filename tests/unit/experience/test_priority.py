"""Signals, the weighted draw against exact probabilities, and importance weights."""

from itertools import permutations

import numpy as np
import pytest

from gyre_core.experience.priority import (
    SIGNAL_FLOOR,
    effective_sampling_rate,
    importance_weights,
    sample_without_replacement,
    signals,
)


def test_signal_by_hand():
    values = signals(np.array([0.5, 1.0, 0.0]), np.array([0.1, 0.0, 0.0]), np.array([0.0, 2.0, 1.0]))
    np.testing.assert_allclose(values - SIGNAL_FLOOR, [0.6, 2.0, 0.0])


def test_signal_does_not_depend_on_the_scale_of_rewards():
    spread, change, reward = np.random.default_rng(3).random((3, 50))
    np.testing.assert_allclose(signals(spread, change, reward), signals(spread, change, 7 * reward - 3))


def test_equal_rewards_raise_nothing():
    np.testing.assert_allclose(signals(np.ones(2), np.zeros(2), np.full(2, 5.0)), 1.0 + SIGNAL_FLOOR)


def test_nothing_in_nothing_out():
    empty = np.empty(0)
    assert len(signals(empty, empty, empty)) == 0
    assert len(sample_without_replacement(empty, 3, np.random.default_rng(0))) == 0


@pytest.mark.parametrize("seed", range(5))
def test_draws_are_distinct_and_as_many_as_there_are(seed):
    rng = np.random.default_rng(seed)
    priorities = np.where(rng.random(200) < 0.5, 0.0, rng.random(200) ** 8)
    everything = sample_without_replacement(priorities, 500, rng)
    assert sorted(everything.tolist()) == np.flatnonzero(priorities > 0).tolist()
    some = sample_without_replacement(priorities, 20, rng)
    assert len(set(some.tolist())) == 20
    assert (priorities[some] > 0).all()


def test_a_crushing_weight_does_not_hang_the_draw():
    priorities = np.full(1000, 1e-12)
    priorities[7] = 1e6
    drawn = sample_without_replacement(priorities, 100, np.random.default_rng(0))
    assert drawn[0] == 7
    assert len(set(drawn.tolist())) == 100


def test_ordered_draws_have_the_probabilities_of_successive_sampling():
    priorities = np.array([1.0, 2.0, 5.0, 0.0, 4.0])
    trials = 20_000
    rng = np.random.default_rng(12345)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(trials):
        key = tuple(sample_without_replacement(priorities, 2, rng).tolist())
        counts[key] = counts.get(key, 0) + 1
    statistic = 0.0
    for first, second in permutations([0, 1, 2, 4], 2):
        expected = trials * priorities[first] / 12 * priorities[second] / (12 - priorities[first])
        statistic += (counts.get((first, second), 0) - expected) ** 2 / expected
    assert sum(counts.values()) == trials
    assert statistic < 31.26  # Chi-square with 11 degrees of freedom, 99.9th percentile.


def test_importance_weights_undo_the_preference():
    worth = np.array([1.0, 2.0, 4.0])
    weights = importance_weights(worth)
    np.testing.assert_allclose(weights, [1.0, 0.5, 0.25])
    np.testing.assert_allclose(weights * worth, 1.0)


def test_effective_sampling_rate_by_hand():
    assert effective_sampling_rate(np.ones(5)) == 1.0
    assert effective_sampling_rate(np.array([1.0, 0.0])) == 0.5
    assert effective_sampling_rate(np.array([1.0, 0.5])) == pytest.approx(2.25 / 2.5)
    assert effective_sampling_rate(np.empty(0)) == 1.0
