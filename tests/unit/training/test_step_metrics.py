"""The metrics of a step's completions, worked out by hand."""

import numpy as np
import pytest

from gyre_core.training.step import rollout_metrics
from gyre_core.types import Completion, PolicyVersion, Prompt, Rollout, RolloutGroup, Score

VERSION = PolicyVersion(1, 0)


def make_group(group_id, rewards, lengths=None, status=None):
    """A group with one completion per reward; NaN stands for one that failed."""
    prompt = Prompt("p", "1+1=", "1+1=", np.array([5, 6], np.int32))
    rollouts = []
    for index, reward in enumerate(rewards):
        length = lengths[index] if lengths else 2
        tokens, logs = np.ones(length, np.int32), np.zeros(length, np.float32)
        reason = "length" if length >= 4 else "stop"
        completion = Completion(group_id, index, tokens, logs, "", reason, VERSION, 0.0, 1.0)
        scored = np.isfinite(reward)
        score = Score({"f": reward if scored else None}, reward, "scored" if scored else status or "failed")
        rollouts.append(Rollout(completion, score, None))
    return RolloutGroup(group_id, prompt, 1, VERSION, tuple(rollouts))


def test_rewards_and_lengths_by_hand():
    """Deviations (n - 1) of 0 0 2 and of 1 1: 2 / sqrt 3 and 0. A failed row counts in neither mean nor spread."""
    groups = [make_group("a", [0.0, 0.0, 2.0], [1, 2, 3]), make_group("b", [1.0, np.nan, 1.0], [4, 1, 1])]
    metrics = rollout_metrics(groups)
    assert metrics["reward"] == metrics["rewards/f/mean"] == 0.8
    assert metrics["reward_std"] == pytest.approx(1 / np.sqrt(3))
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["reward/failure_share"] == pytest.approx(1 / 6)
    assert metrics["reward/abstained_share"] == 0.0
    assert metrics["completions/mean_length"] == 2.0
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (1.0, 4.0)
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 6)
    assert metrics["completions/mean_terminated_length"] == pytest.approx(8 / 5)


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (0.3, 0.1 + 0.2, 0.3), (0.0, 0.0, 0.0), (-7.0, np.nan, -7.0)])
def test_a_group_without_signal_has_no_spread(rewards):
    """What rounding alone makes differ is no spread, as for the advantages."""
    metrics = rollout_metrics([make_group("a", rewards)])
    assert (metrics["reward_std"], metrics["frac_reward_zero_std"]) == (0.0, 1.0)


def test_without_a_score_there_is_no_reward():
    metrics = rollout_metrics([make_group("a", [np.nan, np.nan], status="abstained")])
    assert metrics["reward/abstained_share"] == 1.0
    assert not {"reward", "reward_std", "frac_reward_zero_std"} & metrics.keys()
