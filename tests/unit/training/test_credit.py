"""From rewards to advantages, as each algorithm has them."""

import numpy as np
import pytest

from gyre_core.config import GyreConfig
from gyre_core.training.credit import Credit, sequence_divergences
from gyre_core.types import Completion, PolicyVersion, Prompt, Rollout, RolloutGroup, Score

VERSION = PolicyVersion(1, 0)


def make_group(rewards, *, lengths=None, behaviour=-1.0, reference=None, **columns):
    rollouts = []
    for index, reward in enumerate(rewards):
        length = lengths[index] if lengths else 2
        ids, logs = np.zeros(length, np.int32), np.full(length, behaviour, np.float32)
        completion = Completion("g", index, ids, logs, "t", "stop", VERSION, 0.0, 1.0)
        known = None if reference is None else np.full(length, reference[index], np.float32)
        rollouts.append(Rollout(completion, Score({"r": reward}, reward, "scored"), known))
    prompt = Prompt("p", "text", "text", np.zeros(1, np.int32), columns)
    return RolloutGroup("g", prompt, 1, VERSION, tuple(rollouts))


def credit(algorithm="grpo", shaping=None, max_tokens=4, **learning):
    return Credit(
        GyreConfig.model_validate(
            {
                "experiment": {"algorithm": algorithm},
                "rollout": {"max_tokens": max_tokens},
                "learning": learning,
                "reward": {"shaping": shaping or {}},
            }
        )
    )


@pytest.mark.parametrize(
    ("algorithm", "learning", "expected"),
    [
        ("grpo", {}, [1.5, -0.5, -0.5, -0.5]),
        ("grpo", {"scale_advantages": False}, [0.75, -0.25, -0.25, -0.25]),
        ("grpo", {"advantage": "leave_one_out"}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("ppo", {}, [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_each_algorithm_makes_its_own_of_one_right_answer_among_four(algorithm, learning, expected):
    (advantages,) = credit(algorithm, **learning).advantages([make_group([1.0, 0.0, 0.0, 0.0])])
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)


def test_a_penalty_in_the_reward_takes_the_divergence_of_the_whole_completion_off():
    """Behaviour -1 against reference -1.5 and -1: log-ratios 0.5 and 0 a token; over 2 tokens 1 and 0."""
    group = make_group([1.0, 1.0], reference=[-1.5, -1.0])
    np.testing.assert_allclose(sequence_divergences(group), [1.0, 0.0])
    (advantages,) = credit(kl_in="reward", kl_coef=0.5, scale_advantages=False).advantages([group])
    # Rewards 1 - 0.5 x 1 and 1: mean 0.75.
    np.testing.assert_allclose(advantages, [-0.25, 0.25])
    (in_the_loss,) = credit(kl_coef=0.5).advantages([group])
    assert in_the_loss.tolist() == [0.0, 0.0]


def test_with_a_critic_a_group_of_one_counts_and_no_group_is_dead():
    assert (credit("ppo").smallest_group, credit("ppo").skip_dead_groups) == (1, False)
    assert (credit().smallest_group, credit().skip_dead_groups) == (2, True)
    assert not credit(skip_dead_groups=False).skip_dead_groups


def test_shaping_comes_before_the_advantages():
    """Lengths 4 and 0 of 4 tokens at a length penalty of 1: rewards 1 - 1 and 1 - 0.5."""
    group = make_group([1.0, 1.0], lengths=[4, 2])
    (rewards,) = credit("ppo", {"length_penalty": 1.0}).advantages([group])
    np.testing.assert_allclose(rewards, [0.0, 0.5])


def test_its_state_goes_on_where_it_was():
    shaping = {"normalize": "standardize"}
    one, other = credit("ppo", shaping), credit("ppo", shaping)
    first, second = make_group([1.0, 2.0, 4.0]), make_group([0.0, 8.0])
    one.advantages([first])
    other.load_state(one.state())
    np.testing.assert_array_equal(one.advantages([second])[0], other.advantages([second])[0])


def test_a_group_has_a_signal_when_its_penalised_rewards_differ():
    equal, of_other_lengths = make_group([1.0, 1.0]), make_group([1.0, 1.0], lengths=[4, 2])
    assert not credit().has_signal(of_other_lengths)
    assert not credit("grpo", {"length_penalty": 0.5}).has_signal(equal)
    assert credit("grpo", {"length_penalty": 0.5}).has_signal(of_other_lengths)
    far_from_reference = make_group([1.0, 1.0], reference=[-1.5, -1.0])
    assert credit(kl_in="reward", kl_coef=0.5).has_signal(far_from_reference)
    assert not credit(kl_coef=0.5).has_signal(far_from_reference)
