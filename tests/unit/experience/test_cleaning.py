"""Rows that cannot be trained on leave, by a counted reason."""

from dataclasses import replace

import numpy as np
import pytest
from experience_samples import grpo, make_group, plain, random_groups

from gyre_core.experience.cleaning import clean, drop_reason

NAN, INF = float("nan"), float("inf")


def rollout(**changes):
    """A clean row with a change to its completion, its score or its reference."""
    row = make_group("a", [1.0], reference=True).rollouts[0]
    if "reference_log_probabilities" in changes:
        return replace(row, **changes)
    part = "score" if set(changes) <= {"status", "reward"} else "completion"
    return replace(row, **{part: replace(getattr(row, part), **changes)})


def logs(*values):
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (rollout(), None),
        (rollout(reference_log_probabilities=None), None),
        (rollout(status="failed", reward=NAN), "reward_failed"),
        (rollout(status="abstained", reward=NAN), "reward_abstained"),
        (rollout(reward=NAN), "reward_not_finite"),
        (rollout(reward=-INF), "reward_not_finite"),
        (rollout(reward=0.0), None),
        (rollout(token_ids=np.empty(0, np.int32), log_probabilities=logs()), "empty_completion"),
        (rollout(log_probabilities=logs(-1, -1)), "length_mismatch"),
        (rollout(reference_log_probabilities=logs(-1, -1, -1, -1)), "length_mismatch"),
        (rollout(log_probabilities=logs(-1, NAN, -1)), "log_probability_not_finite"),
        (rollout(log_probabilities=logs(-1, -INF, -1)), "log_probability_not_finite"),
        (rollout(reference_log_probabilities=logs(-1, INF, -1)), "log_probability_not_finite"),
        (rollout(log_probabilities=logs(-1, 0.01, -1)), "log_probability_positive"),
        (rollout(log_probabilities=logs(-1, 5e-5, -1)), None),
    ],
)
def test_each_fault_has_its_reason(row, reason):
    assert drop_reason(row) == reason
    siblings = make_group("a", [1.0, 0.0], reference=True).rollouts
    result = clean([replace(make_group("a", [1.0]), rollouts=(*siblings, row))])
    assert result.dropped == ({reason: 1} if reason else {})
    assert [len(group.rollouts) for group in result.groups] == [2 if reason else 3]


def test_an_abstention_leaves_the_baseline():
    result = clean([make_group("a", [1.0, None, 0.0, 1.0])])
    assert result.dropped == {"reward_abstained": 1}
    np.testing.assert_allclose(grpo(result.groups)[0], [0.577, -1.155, 0.577], atol=1e-3)


def test_a_group_that_abstains_altogether_is_dropped_and_counted():
    result = clean([make_group("a", [None] * 4), make_group("b", [1.0, 0.0])])
    assert [group.group_id for group in result.groups] == ["b"]
    assert result.dropped == {"reward_abstained": 4}


def test_a_single_survivor_has_no_siblings_and_goes():
    result = clean([make_group("a", [1.0, None, None])])
    assert result.groups == ()
    assert result.dropped == {"reward_abstained": 2, "group_too_small": 1}


@pytest.mark.parametrize("seed", range(10))
def test_rows_are_conserved_and_cleaning_twice_is_cleaning_once(seed):
    groups = random_groups(np.random.default_rng(seed), 30)
    result = clean(groups)
    kept = sum(len(group.rollouts) for group in result.groups)
    assert kept + sum(result.dropped.values()) == sum(len(group.rollouts) for group in groups)
    again = clean(result.groups)
    assert not again.dropped
    assert plain(again.groups) == plain(result.groups)
